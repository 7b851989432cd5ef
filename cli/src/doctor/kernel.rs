// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel that runs.

use super::{Facts, Finding};

const RELEASE: &str = "proc/sys/kernel/osrelease";

/// The oldest series that has what the module needs, and the one that it is tested on (README).
const OLDEST: (u32, u32) = (7, 0);
const TESTED: (u32, u32) = (7, 3);

pub fn version(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "kernel";
    let Some(release) = facts.root.text(RELEASE) else {
        return vec![Finding::not_applicable(
            NAME,
            format!("/{RELEASE} cannot be read"),
        )];
    };
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|number| number.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let found = format!("Linux {release}");
    let fix = "Linux 7.3 or later (Debian: the kernel of backports)";
    vec![if version < OLDEST {
        Finding::fail(
            NAME,
            format!("{found}: uverbs exports no UAR as a dma-buf before 7.0"),
            fix,
        )
    } else if version < TESTED {
        Finding::warn(
            NAME,
            format!("{found}: the module is untried before 7.3"),
            fix,
        )
    } else {
        Finding::ok(NAME, found)
    }]
}

pub fn rust(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "kernel-rust";
    let release = facts.root.text(RELEASE).unwrap_or_default();
    let places = [
        format!("boot/config-{release}"),
        format!("lib/modules/{release}/config"),
        format!("lib/modules/{release}/build/.config"),
    ];
    let config = places
        .iter()
        .find_map(|place| Some((place, facts.root.text(place)?)));
    vec![match config {
        Some((place, text)) if text.lines().any(|line| line == "CONFIG_RUST=y") => {
            Finding::ok(NAME, format!("CONFIG_RUST=y in /{place}"))
        }
        Some((place, _)) => Finding::fail(
            NAME,
            format!("/{place} has no CONFIG_RUST=y: the module cannot be built for this kernel"),
            "a kernel with CONFIG_RUST=y, as Debian's of backports is",
        ),
        None if facts.root.has("sys/module/ibgda") => {
            Finding::ok(NAME, "the module, which is in Rust, is loaded")
        }
        None => Finding::not_applicable(
            NAME,
            format!("the kernel's configuration is not at /{}", places[0]),
        ),
    }]
}

/// `AT_PAGESZ` (6) of the auxiliary vector.
pub fn page_size(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "page-size";
    let vector = facts.root.bytes("proc/self/auxv").unwrap_or_default();
    let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
    let size = vector
        .chunks_exact(16)
        .find(|pair| word(&pair[..8]) == 6)
        .map(|pair| word(&pair[8..]));
    vec![match size {
        Some(4096) => Finding::ok(NAME, "4096 bytes"),
        Some(size) => Finding::fail(
            NAME,
            format!("{size} bytes: a page would span several UARs, and the module refuses to load"),
            "a kernel with pages of 4 KiB",
        ),
        None => Finding::not_applicable(NAME, "/proc/self/auxv does not say"),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{doctor::tests::check, fixture::Fixture};

    #[test]
    fn versions() {
        let fixture = Fixture::healthy();
        check(&fixture, version).is("ok", "Linux 7.3.4-test");
        for (release, status) in [
            ("6.12.0-1-amd64", "fail"),
            ("7.1.2", "warn"),
            ("8.0.0", "ok"),
        ] {
            fixture.write(RELEASE, release);
            check(&fixture, version).is(status, release);
        }
        fixture.write(RELEASE, "6.12.0");
        check(&fixture, version).fixed_by("Linux 7.3");
    }

    #[test]
    fn rust_is_seen_in_the_configuration() {
        let fixture = Fixture::healthy();
        check(&fixture, rust).is("ok", "CONFIG_RUST=y in /boot/config-7.3.4-test");
        fixture.write("boot/config-7.3.4-test", "# CONFIG_RUST is not set\n");
        check(&fixture, rust)
            .is("fail", "no CONFIG_RUST=y")
            .fixed_by("CONFIG_RUST=y");
        fixture.remove("boot/config-7.3.4-test");
        check(&fixture, rust).is("ok", "is loaded");
        fixture.remove("sys/module/ibgda");
        check(&fixture, rust).is("n/a", "is not at /boot/config-7.3.4-test");
    }

    #[test]
    fn page_sizes() {
        let fixture = Fixture::healthy();
        check(&fixture, page_size).is("ok", "4096");
        let vector: Vec<u8> = [6u64, 65536, 0, 0]
            .iter()
            .flat_map(|word| word.to_ne_bytes())
            .collect();
        fixture.write_bytes("proc/self/auxv", &vector);
        check(&fixture, page_size)
            .is("fail", "65536 bytes")
            .fixed_by("4 KiB");
    }
}
