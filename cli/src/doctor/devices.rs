// SPDX-License-Identifier: MIT OR Apache-2.0
//! The GPUs and NICs that there are, and those that the broker cannot use.

use super::{Facts, Finding};
use crate::machine::{Nic, list};

pub fn gpus(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "gpus";
    vec![if facts.gpus.is_empty() {
        Finding::fail(
            NAME,
            "no GPU: no PCI function is a 3D controller",
            "see lspci -D; a container or VM needs the GPU passed to it",
        )
    } else {
        Finding::ok(NAME, list(facts.gpus.iter().map(|gpu| gpu.bdf.to_string())))
    }]
}

pub fn nics(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "nics";
    if facts.nics.is_empty() {
        return vec![Finding::fail(
            NAME,
            "no RDMA NIC",
            "see lspci -D; ConnectX-4 or later is needed, and a container or VM needs it passed to it",
        )];
    }
    let can_be_used = |nic: &Nic| nic.rdma.is_some() && !nic.is_foreign();
    let has_one = facts.nics.iter().any(|nic| can_be_used(nic));
    let findings = facts.nics.iter().map(|nic| {
        let driver = nic.function.driver.as_deref().unwrap_or("no driver");
        let (found, fix) = if nic.is_foreign() {
            let found = format!("driven by {driver}: the broker knows NICs of mlx5_core and mlx5_ib only");
            (found, "a ConnectX-4 or later, bound to mlx5_core")
        } else if nic.rdma.is_none() {
            let fix = "modprobe mlx5_ib; in a container: the host's network namespace, or rdma system set netns shared";
            (format!("no verbs device ({driver})"), fix)
        } else {
            return Finding::ok(NAME, described(nic)).of(nic.function.bdf);
        };
        // What else is in the machine is its owner's business, if there is one to work with.
        let finding = match (has_one, nic.is_foreign()) {
            (true, true) => Finding::not_applicable(NAME, found),
            (true, false) => Finding::warn(NAME, found, fix),
            (false, _) => Finding::fail(NAME, found, fix),
        };
        finding.of(nic.function.bdf)
    });
    findings.collect()
}

fn described(nic: &Nic) -> String {
    match nic.function.is_virtual {
        true => format!(
            "{}, a virtual function: its link, its power and a reset of the whole NIC are its physical function's",
            nic.title()
        ),
        false => nic.title(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{doctor::tests::check, fixture::Fixture};

    #[test]
    fn no_gpu() {
        check(&Fixture::healthy(), gpus).is("ok", "0000:04:00.0");
        let fixture = Fixture::healthy();
        fixture.write(
            &format!("{}/class", fixture.device("0000:04:00.0")),
            "0x010802\n",
        );
        check(&fixture, gpus).is("fail", "no GPU").fixed_by("lspci");
    }

    #[test]
    fn nics_without_a_verbs_device() {
        let fixture = Fixture::healthy();
        check(&fixture, nics).is("ok", "mlx5_0 (0000:05:00.0)");
        fixture.remove(&format!("{}/infiniband", fixture.device("0000:05:00.0")));
        check(&fixture, nics)
            .is("fail", "no verbs device (mlx5_core)")
            .fixed_by("modprobe mlx5_ib");
        fixture.nic("0000:06:00.0", "mlx5_1", &["0000:00:02.0"]);
        check(&fixture, nics)
            .about("0000:05:00.0")
            .is("warn", "no verbs device")
            .fixed_by("modprobe mlx5_ib");
        check(&Fixture::empty(), nics)
            .is("fail", "no RDMA NIC")
            .fixed_by("ConnectX-4");
    }

    #[test]
    fn virtual_functions_are_told_by_their_id_or_their_physical_function() {
        let nic = "0000:05:00.0";
        let fixture = Fixture::healthy();
        let device = fixture.device(nic);
        fixture.write(&format!("{device}/device"), "0x101c\n");
        check(&fixture, nics).is("ok", "mlx5_0 (0000:05:00.0), a virtual function");
        fixture.write(&format!("{device}/device"), "0x101b\n");
        check(&fixture, nics).is("ok", "mlx5_0 (0000:05:00.0)");
        fixture.link(&format!("{device}/physfn"), "../0000:05:00.1");
        check(&fixture, nics).is("ok", "a virtual function");
    }

    #[test]
    fn nics_of_other_drivers() {
        let fixture = Fixture::healthy();
        fixture.nic("0000:06:00.0", "irdma0", &["0000:00:02.0"]);
        fixture.link(
            &format!("{}/driver", fixture.device("0000:06:00.0")),
            "../../bus/pci/drivers/ice",
        );
        check(&fixture, nics)
            .about("0000:06:00.0")
            .is("n/a", "driven by ice");
        fixture.link(
            &format!("{}/driver", fixture.device("0000:05:00.0")),
            "../../bus/pci/drivers/vfio-pci",
        );
        check(&fixture, nics)
            .about("0000:05:00.0")
            .is("fail", "driven by vfio-pci")
            .fixed_by("bound to mlx5_core");
        // No pair of them is looked at.
        check(&fixture, crate::doctor::policy::pairs).is("n/a", "no pair");
    }
}
