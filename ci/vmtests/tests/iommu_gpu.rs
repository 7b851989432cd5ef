// SPDX-License-Identifier: MIT OR Apache-2.0
//! GPU and NICs behind an IOMMU that translates: what the doctor says of it, and that data moves.
//!
//! vm: --nics 2 --gpus 1 --iommu

use anyhow::{Result, ensure};
use ibgda_vmtests::{
    machine::{Allowed, gpus, nics},
    side::{Side, exchange, join},
};
use serde_json::json;
use std::{fs, process::Command};

#[test]
fn data_moves_behind_an_iommu_and_the_doctor_says_what_it_costs() -> Result<()> {
    let (gpu, nics) = (gpus()[0], nics());
    for function in [gpu, nics[0], nics[1]] {
        let kind = fs::read_to_string(function.sysfs().join("iommu_group/type"))?;
        ensure!(kind.trim() == "DMA", "{function}: {kind}");
    }
    let _allowed = [Allowed::pair(gpu, nics[0]), Allowed::pair(gpu, nics[1])];
    let said = Command::new("ibgda").arg("doctor").output()?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    for part in [
        format!("warn  iommu {gpu}: translates (DMA)"),
        format!("warn  iommu {}: translates (DMA)", nics[0]),
        "fix: iommu=pt".into(),
        format!(
            "ok    acs {gpu}@{}: no bridge between the two redirects",
            nics[0]
        ),
        format!("ok    path {gpu}@{}: PIX", nics[0]),
    ] {
        ensure!(said.contains(&part), "{part:?} is missing in:\n{said}");
    }
    ensure!(!said.contains("\nfail"), "{said}");

    let (mut near, mut far) = (Side::start(gpu, nics[0])?, Side::start(gpu, nics[1])?);
    join(&mut near, &mut far, &json!({}), |_| ())?;
    exchange(&mut near, &mut far, 1)
}
