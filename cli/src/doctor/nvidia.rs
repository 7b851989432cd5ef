// SPDX-License-Identifier: MIT OR Apache-2.0
//! NVIDIA's driver, and whether it lets a process map a NIC's page for a GPU.

use super::{Facts, Finding};
use crate::machine::{Function, NVIDIA, list};

const VERSION: &str = "proc/driver/nvidia/version";
const PARAMETERS: &str = "proc/driver/nvidia/params";
/// The model's port: with it, the machine is the model's VM, and its GPUs are stand-ins.
const MODEL: &str = "dev/virtio-ports/org.ibgda.model";

/// `CAP_SYS_ADMIN`.
const SYS_ADMIN: u32 = 21;

/// Why NVIDIA's driver is not needed here, if it is not.
fn why_not(facts: &Facts<'_>) -> Option<String> {
    if facts.root.has(VERSION) {
        return None;
    }
    if !facts.gpus.iter().any(|gpu| gpu.vendor == NVIDIA) {
        return Some("there is no GPU of NVIDIA's".into());
    }
    facts.root.has(MODEL).then(|| {
        "this is the model's VM: its GPUs are stand-ins, which no driver drives and no CUDA process uses".into()
    })
}

/// Why a check that looks into the driver cannot: it is not loaded, or not needed.
fn absent(facts: &Facts<'_>, name: &'static str) -> Option<Vec<Finding>> {
    let why = why_not(facts);
    let why =
        why.or_else(|| (!facts.root.has(VERSION)).then(|| "NVIDIA's driver is not loaded".into()));
    why.map(|why| vec![Finding::not_applicable(name, why)])
}

/// Version, from the line "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build …".
fn driver_version(text: &str) -> Option<&str> {
    let is_version =
        |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.lines().next()?.split_whitespace().find(is_version)
}

fn is_open(facts: &Facts<'_>) -> bool {
    facts
        .root
        .text(VERSION)
        .is_some_and(|text| text.contains("Open Kernel Module"))
}

pub fn driver(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "nvidia-driver";
    if let Some(why) = why_not(facts) {
        return vec![Finding::not_applicable(NAME, why)];
    }
    let Some(text) = facts.root.text(VERSION) else {
        return vec![Finding::fail(
            NAME,
            "NVIDIA's driver is not loaded, or this container does not see it",
            "modprobe nvidia; in a container: the NVIDIA container toolkit",
        )];
    };
    let other: Vec<&&Function> = facts
        .gpus
        .iter()
        .filter(|gpu| gpu.vendor == NVIDIA && gpu.driver.as_deref() != Some("nvidia"))
        .collect();
    let missing = ["nvidiactl", "nvidia-uvm"]
        .into_iter()
        .find(|node| !facts.root.has(&format!("dev/{node}")));
    vec![if !other.is_empty() {
        let each = other.iter().map(|gpu| match &gpu.driver {
            Some(driver) => format!("{} (driver {driver})", gpu.bdf),
            None => format!("{} (no driver)", gpu.bdf),
        });
        Finding::fail(
            NAME,
            format!(
                "NVIDIA's driver is loaded, but does not drive {}",
                list(each)
            ),
            "bind them to it: echo BDF >/sys/bus/pci/drivers/nvidia/bind; see dmesg if it refuses",
        )
    } else if let Some(node) = missing {
        Finding::fail(
            NAME,
            format!("there is no /dev/{node}"),
            "nvidia-modprobe -u -c 0; in a container: the NVIDIA container toolkit",
        )
    } else {
        Finding::ok(
            NAME,
            format!("version {}", driver_version(&text).unwrap_or("unknown")),
        )
    }]
}

/// follow_pfnmap_start(), by which the driver finds a mapped NIC page, is for GPL modules only.
pub fn flavour(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "nvidia-flavour";
    if let Some(findings) = absent(facts, NAME) {
        return findings;
    }
    vec![if is_open(facts) {
        Finding::ok(NAME, "the open kernel modules")
    } else {
        Finding::warn(
            NAME,
            "the proprietary kernel modules: they may not use what the kernel offers to find a mapped NIC page, and \
             registering the doorbell (cuMemHostRegister, IOMEMORY) may fail with CUDA error 1",
            "NVIDIA's open kernel modules (nvidia-open)",
        )
    }]
}

/// A value of the driver's parameters: a line of its own, or a word of RegistryDwords.
fn parameter(facts: &Facts<'_>, name: &str) -> Option<String> {
    let text = facts.root.text(PARAMETERS)?;
    let line = |wanted: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once(": "));
        lines
            .find(|(known, _)| *known == wanted)
            .map(|(_, value)| value.trim_matches('"').to_owned())
    };
    line(name).or_else(|| {
        let words = line("RegistryDwords")?;
        let word = words.split(';').filter_map(|word| word.split_once('='));
        word.map(|(known, value)| (known.trim(), value.trim()))
            .find(|(known, _)| *known == name)
            .map(|(_, value)| value.to_owned())
    })
}

fn is_set(value: &str) -> bool {
    let digits = value
        .strip_prefix("0x")
        .map(|digits| u64::from_str_radix(digits, 16));
    digits
        .unwrap_or_else(|| value.parse())
        .is_ok_and(|value| value != 0)
}

/// Whether this process has CAP_SYS_ADMIN in the initial user namespace.
pub fn is_administrator(facts: &Facts<'_>) -> bool {
    let status = facts.root.text("proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok());
    effective.unwrap_or(0) & (1 << SYS_ADMIN) != 0 && is_initial_namespace(facts)
}

/// In the initial user namespace every user is itself.
pub fn is_initial_namespace(facts: &Facts<'_>) -> bool {
    let map = facts.root.text("proc/self/uid_map").unwrap_or_default();
    map.split_whitespace().collect::<Vec<_>>() == ["0", "0", "4294967295"]
}

/// The gate: osmemdesc.c of NVIDIA's driver takes MMIO for a GPU only with one of the two.
pub fn peer_mapping(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "peer-mapping";
    if let Some(findings) = absent(facts, NAME) {
        return findings;
    }
    let fix = "options nvidia NVreg_RegistryDwords=\"PeerMappingOverride=1\" in /etc/modprobe.d, and load the driver \
               anew; or the route by a CPU thread, which needs no such mapping";
    let value = parameter(facts, "PeerMappingOverride");
    vec![if value.as_deref().is_some_and(is_set) {
        Finding::ok(
            NAME,
            "PeerMappingOverride=1: any process may register a NIC's page for a GPU (and its plain uverbs page too, \
             without the broker: ibgda(7))",
        )
    } else if is_administrator(facts) {
        Finding::ok(
            NAME,
            "this process may register a NIC's page for a GPU, having CAP_SYS_ADMIN; those without it may not, since \
             PeerMappingOverride is not set",
        )
    } else if facts.root.has(PARAMETERS) {
        Finding::fail(
            NAME,
            "PeerMappingOverride is not set, and this process has no CAP_SYS_ADMIN in the initial user namespace: \
             registering the doorbell for the GPU will fail with CUDA error 800",
            fix,
        )
    } else {
        Finding::fail(
            NAME,
            format!(
                "/{PARAMETERS} cannot be read, and this process has no CAP_SYS_ADMIN in the initial user namespace"
            ),
            fix,
        )
    }]
}

/// Whether the NIC can reach the GPU's memory.
pub fn gpu_memory(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "gpu-memory";
    if let Some(findings) = absent(facts, NAME) {
        return findings;
    }
    let peermem = ["nvidia_peermem", "nv_peer_mem"]
        .into_iter()
        .find(|module| facts.root.has(&format!("sys/module/{module}")));
    vec![match (is_open(facts), peermem) {
        (true, None) => Finding::ok(NAME, "by dma-buf, which the open kernel modules export"),
        (true, Some(module)) => Finding::ok(
            NAME,
            format!("by dma-buf; {module} is loaded too, and not needed"),
        ),
        (false, Some(module)) => Finding::ok(NAME, format!("by {module}")),
        (false, None) => Finding::warn(
            NAME,
            "neither the open kernel modules, which export dma-bufs, nor nvidia-peermem: no GPU memory for the NIC",
            "NVIDIA's open kernel modules, or modprobe nvidia-peermem (which needs an RDMA stack with peer memory)",
        ),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{doctor::tests::check, fixture::Fixture};

    fn proprietary(fixture: &Fixture) {
        fixture.write(
            VERSION,
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Sep  1 2026\n",
        );
    }

    #[test]
    fn the_driver_and_what_it_drives() {
        let fixture = Fixture::healthy();
        check(&fixture, driver).is("ok", "version 580.159.04");
        fixture.remove("dev/nvidia-uvm");
        check(&fixture, driver)
            .is("fail", "no /dev/nvidia-uvm")
            .fixed_by("nvidia-modprobe");
        fixture.link(
            &format!("{}/driver", fixture.device("0000:04:00.0")),
            "../../bus/pci/drivers/vfio-pci",
        );
        check(&fixture, driver)
            .is("fail", "0000:04:00.0 (driver vfio-pci)")
            .fixed_by("bind");
        fixture.remove("proc/driver/nvidia");
        check(&fixture, driver)
            .is("fail", "not loaded")
            .fixed_by("modprobe nvidia");
        for check_of in [flavour, peer_mapping, gpu_memory] {
            check(&fixture, check_of).is("n/a", "not loaded");
        }
    }

    #[test]
    fn stand_ins_and_other_gpus_need_none() {
        let fixture = Fixture::healthy();
        fixture.remove("proc/driver/nvidia");
        fixture.write(MODEL, "");
        for check_of in [driver, flavour, peer_mapping, gpu_memory] {
            check(&fixture, check_of).is("n/a", "stand-ins");
        }
        fixture.write(
            &format!("{}/vendor", fixture.device("0000:04:00.0")),
            "0x1002\n",
        );
        check(&fixture, driver).is("n/a", "no GPU of NVIDIA's");
    }

    #[test]
    fn the_flavours() {
        let fixture = Fixture::healthy();
        check(&fixture, flavour).is("ok", "open");
        check(&fixture, gpu_memory).is("ok", "by dma-buf");
        proprietary(&fixture);
        check(&fixture, flavour)
            .is("warn", "CUDA error 1")
            .fixed_by("nvidia-open");
        check(&fixture, gpu_memory)
            .is("warn", "nor nvidia-peermem")
            .fixed_by("nvidia-peermem");
        fixture.write("sys/module/nvidia_peermem/refcnt", "0");
        check(&fixture, gpu_memory).is("ok", "nvidia_peermem");
    }

    #[test]
    fn the_gate_has_two_keys() {
        let fixture = Fixture::healthy();
        check(&fixture, peer_mapping).is("ok", "PeerMappingOverride=1");
        for closed in [
            "RegistryDwords: \"\"\n",
            "RegistryDwords: \"PeerMappingOverride=0\"\n",
            "OtherThing: 1\n",
        ] {
            fixture.write(PARAMETERS, closed);
            fixture.write("proc/self/status", "CapEff:\t000001ffffffffff\n");
            fixture.write("proc/self/uid_map", "0 0 4294967295\n");
            check(&fixture, peer_mapping).is("ok", "having CAP_SYS_ADMIN");
            // Root of a container's user namespace.
            fixture.write("proc/self/uid_map", "0 100000 65536\n");
            check(&fixture, peer_mapping)
                .is("fail", "CUDA error 800")
                .fixed_by("NVreg_RegistryDwords");
            fixture.write("proc/self/status", "CapEff:\t0000000000000000\n");
            fixture.write("proc/self/uid_map", "0 0 4294967295\n");
            check(&fixture, peer_mapping).is("fail", "CUDA error 800");
        }
        for open in [
            "RegistryDwords: \"A=2; PeerMappingOverride=0x1;B=3\"\n",
            "PeerMappingOverride: 1\n",
        ] {
            fixture.write(PARAMETERS, open);
            check(&fixture, peer_mapping).is("ok", "PeerMappingOverride=1");
        }
        fixture.remove(PARAMETERS);
        check(&fixture, peer_mapping)
            .is("fail", "cannot be read")
            .fixed_by("PeerMappingOverride=1");
    }
}
