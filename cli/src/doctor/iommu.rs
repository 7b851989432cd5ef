// SPDX-License-Identifier: MIT OR Apache-2.0
//! What stands between a GPU's stores and a NIC's registers: translation, and Access Control Services.

use super::{Facts, Finding};
use crate::{
    bdf::Bdf,
    machine::{Function, folder},
    topology::apart,
};
use std::collections::BTreeMap;

/// PCI Express extended capability of ACS, its control register, and the bits that send peer requests up (PCIe base
/// specification, 7.7.11): P2P Request Redirect, P2P Completion Redirect, P2P Egress Control.
const ACS: u16 = 0x000d;
const ACS_CONTROL: usize = 6;
const REDIRECT: [(u16, &str); 3] = [
    (1 << 2, "request redirect"),
    (1 << 3, "completion redirect"),
    (1 << 5, "egress control"),
];

/// NVIDIA's driver maps a NIC's page by `dma_map_resource` (nv-dma.c): with a translating IOMMU the GPU has an address
/// of the IOMMU's, and its stores go up there, past a switch that both are below.
pub fn translation(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "iommu";
    let findings: Vec<Finding> = facts
        .functions()
        .map(|function| {
            let kind = facts.root.text(&function.file("iommu_group/type"));
            let finding = match kind.as_deref() {
                None => Finding::ok(NAME, "no IOMMU"),
                Some("identity") => Finding::ok(NAME, "passed through (identity)"),
                Some(kind) => Finding::warn(
                    NAME,
                    format!("translates ({kind}): what the GPU stores to the NIC goes up to the root complex and back"),
                    "iommu=pt on the kernel's command line, or identity in iommu_group/type while no driver is bound",
                ),
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

/// What a function's ACS control register says, if it can be read.
enum Acs {
    None,
    Control(u16),
    Unreadable,
}

fn acs_of(facts: &Facts<'_>, bdf: Bdf) -> Acs {
    let config = facts
        .root
        .bytes(&format!("{}/config", folder(bdf)))
        .unwrap_or_default();
    let word = |at: usize| Some(u16::from_le_bytes(config.get(at..at + 2)?.try_into().ok()?));
    // Users see 64 bytes; a conventional PCI function has 256 and no such capability.
    match config.len() {
        0..=64 => return Acs::Unreadable,
        65..=256 => return Acs::None,
        _ => {}
    }
    let mut at = 0x100;
    // As many as have room, so that a loop ends.
    for _ in 0..(4096 - 256) / 8 {
        let (Some(id), Some(next)) = (word(at), word(at + 2)) else {
            break;
        };
        if id == ACS {
            return word(at + ACS_CONTROL).map_or(Acs::None, Acs::Control);
        }
        at = usize::from(next >> 4);
        if at < 0x100 {
            break;
        }
    }
    Acs::None
}

pub fn acs(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "acs";
    let findings: Vec<Finding> = facts
        .meant()
        .map(|(gpu, nic)| {
            let looked = on_the_way(gpu, &nic.function)
                .into_iter()
                .map(|bdf| (bdf, acs_of(facts, bdf)))
                .collect::<BTreeMap<_, _>>();
            let redirecting: Vec<String> = looked
                .iter()
                .filter_map(|(bdf, acs)| {
                    let Acs::Control(control) = acs else { return None };
                    let on = REDIRECT.iter().filter(|(bit, _)| control & bit != 0).map(|(_, name)| *name);
                    let on: Vec<&str> = on.collect();
                    (!on.is_empty()).then(|| format!("{bdf} ({})", on.join(", ")))
                })
                .collect();
            let unreadable = looked.values().any(|acs| matches!(acs, Acs::Unreadable));
            let finding = if !redirecting.is_empty() {
                let bridges: Vec<String> = looked.keys().map(Bdf::to_string).collect();
                Finding::warn(
                    NAME,
                    format!("what the GPU stores is sent up to the root complex by {}", redirecting.join(", ")),
                    format!(
                        "pci=disable_acs_redir={} on the kernel's command line, or ACS off in the firmware, where no \
                         guest shares the switch",
                        bridges.join(";")
                    ),
                )
            } else if unreadable {
                Finding::not_applicable(NAME, "only root can read configuration space: run this as root")
            } else {
                Finding::ok(NAME, "no bridge between the two redirects")
            };
            finding.of(format!("{}@{}", gpu.bdf, nic.function.bdf))
        })
        .collect();
    if findings.is_empty() {
        return vec![Finding::not_applicable(
            NAME,
            "there is no pair of a GPU and a NIC",
        )];
    }
    findings
}

/// The functions whose ACS counts: both ends, and the bridges that only one of them is below.
fn on_the_way(gpu: &Function, nic: &Function) -> Vec<Bdf> {
    let [one, other] = apart(gpu, nic);
    [one, other, &[gpu.bdf, nic.bdf]].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{doctor::tests::check, fixture::Fixture};

    /// Configuration space with an AER capability, and ACS behind it.
    fn config(control: u16) -> Vec<u8> {
        let mut config = vec![0; 4096];
        config[0x100..0x104].copy_from_slice(&0x1500_0001_u32.to_le_bytes());
        config[0x150..0x154].copy_from_slice(&0x0001_000d_u32.to_le_bytes());
        config[0x156..0x158].copy_from_slice(&control.to_le_bytes());
        config
    }

    #[test]
    fn groups_that_translate() {
        let fixture = Fixture::healthy();
        check(&fixture, translation).is("ok", "no IOMMU");
        let group = format!("{}/iommu_group/type", fixture.device("0000:05:00.0"));
        fixture.write(&group, "identity\n");
        check(&fixture, translation).is("ok", "");
        fixture.write(&group, "DMA-FQ\n");
        check(&fixture, translation)
            .is("warn", "translates (DMA-FQ)")
            .fixed_by("iommu=pt");
    }

    #[test]
    fn bridges_that_redirect() {
        let fixture = Fixture::healthy();
        check(&fixture, acs).is("ok", "no bridge");
        let file = format!("{}/config", fixture.device("0000:02:01.0"));
        // Source validation alone redirects nothing.
        fixture.write_bytes(&file, &config(1));
        check(&fixture, acs).is("ok", "no bridge");
        fixture.write_bytes(&file, &config(0b1101));
        check(&fixture, acs)
            .is(
                "warn",
                "0000:02:01.0 (request redirect, completion redirect)",
            )
            .fixed_by("pci=disable_acs_redir=0000:02:00.0;0000:02:01.0");
        fixture.write_bytes(&file, &config(0)[..64]);
        check(&fixture, acs).is("n/a", "run this as root");
        // A bridge that both are below is not passed.
        fixture.write_bytes(&file, &config(0));
        fixture.write_bytes(
            &format!("{}/config", fixture.device("0000:00:01.0")),
            &config(0xff),
        );
        check(&fixture, acs).is("ok", "no bridge");
    }

    #[test]
    fn a_list_of_capabilities_that_never_ends() {
        let fixture = Fixture::healthy();
        let mut config = config(0);
        config[0x102..0x104].copy_from_slice(&0x1001_u16.to_le_bytes());
        fixture.write_bytes(
            &format!("{}/config", fixture.device("0000:02:01.0")),
            &config,
        );
        check(&fixture, acs).is("ok", "no bridge");
    }
}
