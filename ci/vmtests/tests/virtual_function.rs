// SPDX-License-Identifier: MIT OR Apache-2.0
//! NICs that are SR-IOV virtual functions, as a guest has them that was given some.
//!
//! vm: --nics 2 --gpus 1 --vf

use anyhow::{Context as _, Result, ensure};
use ibgda_vmtests::{
    machine::{Allowed, gpus, nics, wait_for_rdma, wait_until},
    side::{Side, exchange, join},
};
use serde_json::json;
use std::{fs, process::Command};

/// One test, since it resets a NIC.
#[test]
fn the_broker_binds_a_virtual_function_data_moves_and_a_reset_is_survived() -> Result<()> {
    let (gpu, nics) = (gpus()[0], nics());
    for &nic in &nics {
        let id = fs::read_to_string(nic.sysfs().join("device"))?;
        ensure!(id.trim() == "0x101c", "{nic} is {id}");
        // The driver knows it for one: it prints a physical function's bandwidth and sets the NIC's byte order.
        let speed = fs::read_to_string(nic.sysfs().join("current_link_speed"))?;
        ensure!(speed.trim() == "Unknown", "{nic}: {speed}");
        ensure!(!nic.sysfs().join("sriov_numvfs").exists());
    }
    let _allowed = [Allowed::pair(gpu, nics[0]), Allowed::pair(gpu, nics[1])];

    let said = Command::new("ibgda").arg("doctor").output()?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    for part in [
        format!(
            "ok    nics {}: mlx5_0 ({}), a virtual function",
            nics[0], nics[0]
        ),
        format!("n/a   link {}: the kernel does not know its link", nics[0]),
        format!("ok    policy {gpu}@{}", nics[0]),
    ] {
        ensure!(said.contains(&part), "{part:?} is missing in:\n{said}");
    }
    ensure!(
        !said.contains("\nfail") && !said.contains("\nwarn"),
        "{said}"
    );

    let (mut near, mut far) = (Side::start(gpu, nics[0])?, Side::start(gpu, nics[1])?);
    join(&mut near, &mut far, &json!({}), |_| ())?;
    exchange(&mut near, &mut far, 1)?;

    // Who may reset it is whoever has it: a function level reset.
    fs::write(nics[0].sysfs().join("reset"), "1").context("reset")?;
    near.hears("is lost")?;
    wait_until("the function is back", || {
        nics[0].sysfs().join("infiniband").exists()
    });
    wait_for_rdma(nics[0]);
    near.ask(json!({"do": "rebind", "patience_ms": 60_000}))?;
    join(&mut near, &mut far, &json!({}), |_| ())?;
    exchange(&mut near, &mut far, 2)
}
