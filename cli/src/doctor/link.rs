// SPDX-License-Identifier: MIT OR Apache-2.0
//! PCIe links: what they run at, and what the function can do.

use super::{Facts, Finding};
use crate::machine::Function;

/// GT/s and lanes, each if known: `Unknown`, 0 and 255 lanes say nothing.
fn link(facts: &Facts<'_>, function: &Function, which: &str) -> (Option<f64>, Option<u64>) {
    let text = |what: &str| {
        facts
            .root
            .text(&function.file(&format!("{which}_link_{what}")))
    };
    let speed = text("speed").and_then(|text| text.split_whitespace().next()?.parse().ok());
    let width = text("width").and_then(|text| text.parse().ok());
    (speed, width.filter(|width| (1..=64).contains(width)))
}

pub fn links(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "link";
    let findings: Vec<Finding> = facts
        .functions()
        .map(|function| {
            let finding = match (link(facts, function, "current"), link(facts, function, "max")) {
                ((Some(speed), Some(width)), (Some(fastest), Some(widest))) => {
                    let found = format!("{speed} GT/s x{width}");
                    if width < widest {
                        Finding::warn(
                            NAME,
                            format!("{found}, while it can do x{widest}"),
                            "reseat it, or use a slot with as many lanes (lspci -vv shows both ends)",
                        )
                    } else if speed < fastest && function.is_gpu() {
                        Finding::warn(
                            NAME,
                            format!("{found}, while it can do {fastest} GT/s: it saves power, or the slot is slower"),
                            "look again while the GPU is busy; if it stays, the firmware's setting for the slot",
                        )
                    } else if speed < fastest {
                        Finding::warn(
                            NAME,
                            format!("{found}, while it can do {fastest} GT/s"),
                            "a faster slot, or the firmware's setting for this one",
                        )
                    } else {
                        Finding::ok(NAME, format!("{found}, all that it can do"))
                    }
                }
                _ => Finding::not_applicable(NAME, "the kernel does not know its link (a virtual function has none of its own)"),
            };
            finding.of(function.bdf)
        })
        .collect();
    if findings.is_empty() {
        return vec![Finding::not_applicable(
            NAME,
            "there is neither a GPU nor a NIC",
        )];
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{doctor::tests::check, fixture::Fixture};

    #[test]
    fn narrow_and_slow_links() {
        let fixture = Fixture::healthy();
        let [gpu, nic] = ["0000:04:00.0", "0000:05:00.0"].map(|bdf| fixture.device(bdf));
        check(&fixture, links).is("ok", "32 GT/s x16, all that it can do");
        fixture.write(&format!("{gpu}/current_link_speed"), "2.5 GT/s PCIe\n");
        check(&fixture, links)
            .about("0000:04:00.0")
            .is("warn", "it saves power")
            .fixed_by("busy");
        fixture.write(&format!("{nic}/current_link_speed"), "8.0 GT/s PCIe\n");
        check(&fixture, links)
            .about("0000:05:00.0")
            .is("warn", "8 GT/s x16, while it can do 32 GT/s")
            .fixed_by("slot");
        fixture.write(&format!("{nic}/current_link_width"), "4\n");
        check(&fixture, links)
            .about("0000:05:00.0")
            .is("warn", "x4, while it can do x16")
            .fixed_by("reseat");
        fixture.write(&format!("{nic}/max_link_speed"), "Unknown\n");
        check(&fixture, links)
            .about("0000:05:00.0")
            .is("n/a", "does not know");
    }
}
