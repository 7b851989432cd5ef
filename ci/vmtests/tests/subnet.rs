// SPDX-License-Identifier: MIT OR Apache-2.0
//! The subnet as infiniband-diags sees it: the ports' agents, by MAD_IFC and across the wire, and the subnet manager's
//! answers.
//!
//! vm: --nics 2 --gpus 0 --no-ibgda

use anyhow::{Result, ensure};
use ibgda_vmtests::tools::{Place, ctl, wait};

/// Runs a tool; its output, with runs of dots made one blank.
fn said(words: &[&str]) -> Result<String> {
    let ended = Place::Here.run(words)?;
    ended.passed()?;
    let parts = ended.output.split('.').filter(|part| !part.is_empty());
    Ok(parts.collect::<Vec<_>>().join(" "))
}

fn says(words: &[&str], parts: &[&str]) -> Result<()> {
    let text = said(words)?;
    for part in parts {
        ensure!(
            text.contains(part),
            "{words:?} does not say {part:?}: {text}"
        );
    }
    Ok(())
}

/// A file of a port's in sysfs.
fn port(device: &str, file: &str) -> Result<String> {
    let path = format!("/sys/class/infiniband/{device}/ports/1/{file}");
    Ok(std::fs::read_to_string(path)?.trim().to_owned())
}

#[test]
fn a_port_tells_of_itself() -> Result<()> {
    let guid = port("mlx5_0", "gids/0")?;
    ensure!(guid.starts_with("fe80:"), "{guid}");
    says(
        &["ibstat", "mlx5_0"],
        &[
            "State: Active",
            "Physical state: LinkUp",
            "Rate: 200",
            "SM lid: 2048",
        ],
    )?;
    says(
        &["smpquery", "nodeinfo", "-D", "0"],
        &[
            "NodeType: Channel Adapter",
            "VendorId: 0x0002c9",
            "DevId: 0x101b",
        ],
    )?;
    says(
        &["smpquery", "portinfo", "-D", "0"],
        &[
            "LinkState: Active",
            "SMLid: 2048",
            "MtuCap: 4096",
            "LinkWidthActive: 4X",
        ],
    )
}

#[test]
fn a_port_tells_of_itself_across_the_wire() -> Result<()> {
    says(&["smpquery", "nodedesc", "2"], &["ConnectX model nic1"])?;
    says(
        &["smpquery", "portinfo", "2", "1"],
        &["Lid: 2", "LinkState: Active"],
    )?;
    says(&["smpquery", "pkeys", "2"], &["0xffff 0x0000"])?;
    says(&["ibaddr", "2"], &["fe80::202:c903:0:101"])
}

#[test]
fn counters_of_a_port_move_and_can_be_cleared() -> Result<()> {
    // The question itself goes over the wire.
    says(&["perfquery", "-x", "1", "1"], &["PortSelect: 1"])?;
    let sent = || -> Result<u64> { Ok(port("mlx5_0", "counters/port_xmit_packets")?.parse()?) };
    let before = sent()?;
    said(&["smpquery", "nodeinfo", "2"])?;
    ensure!(sent()? > before, "{before} packets, and no more");
    said(&["perfquery", "-R", "2", "1"])?;
    let counters = said(&["perfquery", "2", "1"])?;
    let packets = counters
        .lines()
        .find_map(|line| line.strip_prefix("PortXmitPkts: "));
    // What it has sent since is the answers to this.
    ensure!(
        packets.is_some_and(|packets| packets.parse().is_ok_and(|packets: u64| packets < 8)),
        "{counters}"
    );
    Ok(())
}

#[test]
fn the_subnet_manager_knows_nodes_paths_and_groups() -> Result<()> {
    says(
        &["saquery"],
        &[
            "lid 1",
            "lid 2",
            "ConnectX model nic0",
            "ConnectX model nic1",
        ],
    )?;
    says(
        &["saquery", "-p", "--src-to-dst", "1:2"],
        &["slid 1", "dlid 2", "pkey 0xFFFF"],
    )?;
    says(
        &["saquery", "-g"],
        &["ff12:401b:ffff::ffff:ffff", "Mlid 0xC000"],
    )?;
    says(&["saquery", "PIR"], &["EndPortLid 1", "EndPortLid 2"])
}

/// A port that is down is in no path.
#[test]
fn the_subnet_manager_knows_what_is_down() -> Result<()> {
    ctl(&["link", "nic1", "down"])?;
    let nodes = said(&["saquery"]);
    ctl(&["link", "nic1", "up"])?;
    wait("the port", || {
        Ok(port("mlx5_1", "state")?.contains("ACTIVE"))
    })?;
    let nodes = nodes?;
    ensure!(nodes.contains("nic0") && !nodes.contains("nic1"), "{nodes}");
    Ok(())
}
