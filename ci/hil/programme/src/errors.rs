// SPDX-License-Identifier: MIT OR Apache-2.0
//! What goes wrong is known on the device, by its right name, and the first error stays.

use crate::{
    list::{List, all_ok, ended_in},
    machine::{Machine, ask_model},
    rig::{Link, PATIENCE, Where, options},
};
use anyhow::{Context as _, Result, ensure};
use ibgda::{QueuePair, QueuePairOptions, Route, Status};

const BYTES: usize = 4096;

fn put(at: &Where, link: &Link) -> Result<List> {
    List::new(at).put(&link.qp, (&link.target, 0), (&link.source, 0), 64)
}

/// What was latched there.
fn latched(qp: &QueuePair, status: Status) -> Result<String> {
    let error = qp.error_on_gpu()?.context("no error was latched")?;
    ensure!(
        Status(error.status) == status,
        "the latched error is {error}"
    );
    Ok(error.to_string())
}

/// A wrong rkey.
pub fn wrong_rkey(machine: &Machine, at: &Where, route: Route) -> Result<String> {
    let link = Link::new(machine, route, BYTES, &options())?;
    let list = put(at, &link)?.but(|step| step.rkey ^= 0xff00);
    let steps = list.quiet(&link.qp)?.run()?;
    ended_in(&steps[1], Status::REMOTE_ACCESS)?;
    let error = latched(&link.qp, Status::REMOTE_ACCESS)?;
    // The flushes behind it do not hide it.
    let steps = put(at, &link)?.run()?;
    ended_in(&steps[0], Status::REMOTE_ACCESS)?;
    Ok(format!("wrong rkey: {error}"))
}

/// The host stops a QP that a kernel waits on.
pub fn stopped(machine: &Machine, at: &Where, route: Route) -> Result<String> {
    let link = Link::new(machine, route, BYTES, &options())?;
    all_ok(&put(at, &link)?.quiet(&link.qp)?.run()?)?;
    link.qp.stop()?;
    let steps = put(at, &link)?.quiet(&link.qp)?.run()?;
    ended_in(&steps[1], Status::WR_FLUSHED)?;
    Ok(format!(
        "QP stopped: {}",
        latched(&link.qp, Status::WR_FLUSHED)?
    ))
}

/// The link at NIC 0 is down.
pub fn link_cut(machine: &Machine, at: &Where, route: Route) -> Result<String> {
    let options = QueuePairOptions {
        // 134 ms, twice.
        ack_timeout: 15,
        retry_count: 2,
        ..options()
    };
    let link = Link::new(machine, route, BYTES, &options)?;
    ask_model("link", &["nic0", "down"])?;
    let steps = put(at, &link)
        .and_then(|list| list.quiet(&link.qp))
        .and_then(List::run);
    ask_model("link", &["nic0", "up"])?;
    ended_in(&steps?[1], Status::TRANSPORT_RETRY_EXCEEDED)?;
    let error = latched(&link.qp, Status::TRANSPORT_RETRY_EXCEEDED)?;
    drop(link);
    wait_for_port(machine)?;
    Ok(format!("link cut: {error}"))
}

fn wait_for_port(machine: &Machine) -> Result<()> {
    let path = format!("/sys/bus/pci/devices/{}/infiniband", machine.nics[0]);
    let end = std::time::Instant::now() + PATIENCE;
    loop {
        let device = std::fs::read_dir(&path)?.flatten().next();
        let device = device.with_context(|| format!("{path} is empty"))?;
        let state = std::fs::read_to_string(device.path().join("ports/1/state"))?;
        if state.contains("ACTIVE") {
            return Ok(());
        }
        ensure!(std::time::Instant::now() < end, "the port stays {state}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}
