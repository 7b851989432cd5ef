// SPDX-License-Identifier: MIT OR Apache-2.0
//! examples/python-ioctl. That its layouts are those of the header is host::python-layout.

use crate::program::allow_all;
use anyhow::{Result, ensure};
use ibgda_vmtests::machine::{Allowed, gpus, nics, settle};
use ibgda_vmtests::said::{Running, Said};
use std::process::Command;

fn program(more: &[&str]) -> Command {
    let mut command = Command::new("python3");
    command
        .arg("/src/examples/python-ioctl/main.py")
        .args([gpus()[0].to_string(), nics()[0].to_string()])
        .args(more);
    command
}

#[test]
fn every_ioctl_does_its_part_and_nothing_is_left() -> Result<()> {
    let _allowed = allow_all();
    // mlx5_ib makes a few things at the first use, and keeps them.
    Said::by(&mut program(&[]))?.ended_with(0)?;
    let before = settle(0);
    Said::by(&mut program(&[]))?.ended_with(0)?.output_has_all(&[
        "ABI 1, features ",
        "before it is bound: IBGDA_IOC_QUEUE_ALLOC (4096 bytes): ENOTCONN: the session is not bound; IBGDA_IOC_BIND first",
        "bound: mlx5_0, path switch",
        "status page: ready, generation 1, reason none, port state 4",
        "a length that is no page's: IBGDA_IOC_QUEUE_ALLOC (100 bytes): EINVAL",
        "a handle of nothing: IBGDA_IOC_RELEASE",
        "the two files in the wrong order: IBGDA_IOC_DOORBELL_IMPORT",
        "doorbell: UAR 0x",
        "event: doorbell, reason uar_destroyed, generation 1",
        "all steps done",
    ])?;
    let after = settle(0);
    ensure!(before == after, "{before:?} became {after:?}");
    Ok(())
}

#[test]
fn a_pair_that_is_not_allowed_is_refused_with_what_to_do() -> Result<()> {
    Said::by(&mut program(&[]))?
        .ended_with(1)?
        .errors_have_all(&[
            "error: IBGDA_IOC_BIND (GPU ",
            "EACCES: the policy does not allow this pair; as root: mkdir /sys/kernel/config/ibgda/allow",
        ])?;
    Ok(())
}

#[test]
fn an_event_from_outside_is_heard() -> Result<()> {
    let allowed = Allowed::pair(gpus()[0], nics()[0]);
    let mut running = Running::start(&mut program(&["--wait", "60"]))?;
    running.says("waiting up to")?;
    drop(allowed);
    running.end()?.ended_with(0)?.output_has_all(&[
        "event: lost, reason policy, generation 1",
        "status page: lost, generation 1, reason policy",
        "a lost session: IBGDA_IOC_QUEUE_ALLOC (4096 bytes): ENOLINK",
    ])?;
    Ok(())
}

#[test]
fn words_that_are_no_address_are_refused_before_anything_is_done() -> Result<()> {
    let mut command = Command::new("python3");
    command.args(["/src/examples/python-ioctl/main.py", "65:00.0", "mlx5_0"]);
    Said::by(&mut command)?
        .ended_with(2)?
        .errors_have_all(&["'65:00.0' is no PCI address: write it as lspci -D does"])?;
    Ok(())
}
