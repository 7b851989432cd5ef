// SPDX-License-Identifier: MIT OR Apache-2.0
//! PCIe errors: how many there were, and whether the next one can be recovered from.

use super::{Facts, Finding};
use crate::{
    bdf::Bdf,
    machine::{Function, NVIDIA, folder, list},
    topology::shared,
};
use std::collections::BTreeSet;

const NOTHING: &str = "there is neither a GPU nor a NIC";

/// What a file has counted, as "2 nonfatal (CmpltTO 2)"; empty if nothing, `None` if there is no such file. Which fatal
/// error of an endpoint it was, the kernel does not read, and counts in the total alone (`aer_get_device_error_info`).
fn counted(facts: &Facts<'_>, bdf: Bdf, kind: &str) -> Option<String> {
    let text = facts
        .root
        .text(&format!("{}/aer_dev_{kind}", folder(bdf)))?;
    let lines = text.lines().filter_map(|line| line.rsplit_once(' '));
    let (total, named): (Vec<_>, Vec<_>) = lines
        .filter(|(_, count)| *count != "0")
        .partition(|(name, _)| name.starts_with("TOTAL"));
    let named: Vec<String> = named
        .iter()
        .map(|(name, count)| format!("{name} {count}"))
        .collect();
    Some(match (total.first(), named.as_slice()) {
        (None, []) => String::new(),
        (Some((_, total)), []) => format!("{total} {kind}"),
        (Some((_, total)), named) => format!("{total} {kind} ({})", named.join(", ")),
        (None, named) => format!("{kind} ({})", named.join(", ")),
    })
}

/// Of the GPUs, the NICs, and the port above each.
pub fn counters(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "aer";
    let functions = facts.functions();
    let all: BTreeSet<Bdf> = functions
        .flat_map(|one| one.bridges.last().copied().into_iter().chain([one.bdf]))
        .collect();
    let findings = all.into_iter().map(|bdf| {
        let finding = match ["fatal", "nonfatal", "correctable"].map(|kind| counted(facts, bdf, kind)) {
            [Some(fatal), Some(non_fatal), Some(correctable)] => {
                let uncorrected = [fatal, non_fatal].into_iter().filter(|counted| !counted.is_empty());
                let uncorrected = uncorrected.collect::<Vec<_>>().join(", ");
                if !uncorrected.is_empty() {
                    Finding::warn(
                        NAME,
                        format!("uncorrectable errors since boot: {uncorrected}"),
                        "dmesg says when; if they come again: reseat the card, another slot, firmware",
                    )
                } else if !correctable.is_empty() {
                    Finding::warn(
                        NAME,
                        format!("corrected errors since boot: {correctable}"),
                        "a few are harmless; if they grow under load: reseat the card, another slot or riser",
                    )
                } else {
                    Finding::ok(NAME, "no errors since boot")
                }
            }
            _ => Finding::not_applicable(NAME, "the kernel counts none: the firmware has AER, or pci=noaer is set"),
        };
        finding.of(bdf)
    });
    let findings: Vec<Finding> = findings.collect();
    if findings.is_empty() {
        return vec![Finding::not_applicable(NAME, NOTHING)];
    }
    findings
}

/// nvidia.ko has no PCI error handlers, and the kernel gives up on a port if a driver below it has none. An error of
/// the NIC is handled at the port above it.
pub fn recovery(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "aer-recovery";
    let findings = facts.nics.iter().map(|nic| {
        let function = &nic.function;
        let finding = match function.bridges.last() {
            None => Finding::not_applicable(NAME, "the NIC is below no PCIe port"),
            Some(port) => {
                let gpus = facts.machine.functions.values().filter(|other| other.is_gpu() && other.vendor == NVIDIA);
                let (beside, above): (Vec<_>, Vec<_>) = gpus
                    .filter(|gpu| !shared(gpu, function).is_empty())
                    .partition(|gpu| gpu.bridges.contains(port));
                let names = |gpus: Vec<&Function>| list(gpus.iter().map(|gpu| gpu.bdf.to_string()));
                if !beside.is_empty() {
                    Finding::warn(
                        NAME,
                        format!(
                            "the port {port} carries {} too, whose driver has no PCI error handlers: after an error of \
                             the NIC the kernel gives both up",
                            names(beside)
                        ),
                        "a NIC below a port of its own",
                    )
                } else if above.is_empty() {
                    Finding::ok(NAME, format!("the port {port} carries no GPU"))
                } else {
                    Finding::ok(
                        NAME,
                        format!(
                            "the port {port} carries no GPU, so an error of the NIC can be recovered from; one of a \
                             port further up, which {} is below too, cannot with NVIDIA's driver",
                            names(above)
                        ),
                    )
                }
            }
        };
        finding.of(function.bdf)
    });
    let findings: Vec<Finding> = findings.collect();
    if findings.is_empty() {
        return vec![Finding::not_applicable(NAME, "there is no NIC")];
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{doctor::tests::check, fixture::Fixture};

    #[test]
    fn errors_are_counted_by_name() {
        let fixture = Fixture::healthy();
        let nic = fixture.device("0000:05:00.0");
        check(&fixture, counters).is("ok", "no errors");
        fixture.write(
            &format!("{nic}/aer_dev_correctable"),
            "RxErr 0\nBadTLP 12\nTOTAL_ERR_COR 12\n",
        );
        check(&fixture, counters)
            .is(
                "warn",
                "corrected errors since boot: 12 correctable (BadTLP 12)",
            )
            .fixed_by("reseat");
        fixture.write(
            &format!("{nic}/aer_dev_nonfatal"),
            "CmpltTO 2\nTOTAL_ERR_NONFATAL 2\n",
        );
        fixture.write(
            &format!("{nic}/aer_dev_fatal"),
            "DLP 1\nTOTAL_ERR_FATAL 1\n",
        );
        check(&fixture, counters)
            .is(
                "warn",
                "uncorrectable errors since boot: 1 fatal (DLP 1), 2 nonfatal (CmpltTO 2)",
            )
            .fixed_by("dmesg");
        fixture.write(
            &format!("{nic}/aer_dev_nonfatal"),
            "CmpltTO 0\nTOTAL_ERR_NONFATAL 0\n",
        );
        fixture.write(
            &format!("{nic}/aer_dev_fatal"),
            "DLP 0\nTOTAL_ERR_FATAL 3\n",
        );
        check(&fixture, counters).is("warn", "since boot: 3 fatal");
        fixture.remove(&format!("{nic}/aer_dev_fatal"));
        check(&fixture, counters)
            .about("0000:05:00.0")
            .is("n/a", "pci=noaer");
        // The port above it counts what the link loses.
        fixture.write(
            &format!("{}/aer_dev_fatal", fixture.device("0000:02:01.0")),
            "SDES 1\nTOTAL_ERR_FATAL 1\n",
        );
        check(&fixture, counters)
            .about("0000:02:01.0")
            .is("warn", "1 fatal (SDES 1)");
    }

    #[test]
    fn a_port_that_carries_a_gpu_too() {
        let fixture = Fixture::healthy();
        check(&fixture, recovery).is("ok", "further up, which 0000:04:00.0 is below too");
        fixture.gpu(
            "0000:05:00.1",
            &["0000:00:01.0", "0000:01:00.0", "0000:02:01.0"],
        );
        check(&fixture, recovery)
            .is("warn", "the port 0000:02:01.0 carries 0000:05:00.1 too")
            .fixed_by("port of its own");
        let fixture = Fixture::empty();
        fixture.nic("0000:05:00.0", "mlx5_0", &[]);
        check(&fixture, recovery).is("n/a", "below no PCIe port");
        fixture.nic("0000:06:00.0", "mlx5_1", &["0000:00:02.0"]);
        check(&fixture, recovery)
            .about("0000:06:00.0")
            .is("ok", "the port 0000:00:02.0 carries no GPU");
    }
}
