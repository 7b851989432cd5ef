// SPDX-License-Identifier: MIT OR Apache-2.0
//! The subnet as infiniband-diags sees it: the ports' agents, by MAD_IFC and across the wire, and the subnet manager's
//! answers; and as IP over InfiniBand and the connection manager use it.
//!
//! vm: --nics 2 --gpus 0 --no-ibgda

use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result, ensure};
use ibgda_vmtests::tools::{Place, ctl, wait};

/// The tests look at the ports' counters and cut their links: one at a time.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

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
    let _turn = turn();
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
    let _turn = turn();
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
    let _turn = turn();
    // The question itself goes over the wire.
    says(&["perfquery", "-x", "1", "1"], &["PortSelect: 1"])?;
    // Of whatever port the LID is.
    says(&["perfquery", "-x", "2"], &["PortXmitPkts", "PortRcvData"])?;
    says(&["perfquery", "2"], &["PortXmitPkts", "PortXmitDiscards"])?;
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
    let _turn = turn();
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
    let _turn = turn();
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

/// One interface in each of two network namespaces: what is sent from one to the other goes over the wire.
struct Interfaces;

impl Interfaces {
    const NAMES: [&'static str; 2] = ["a", "b"];
    const ADDRESSES: [&'static str; 2] = ["10.78.0.1", "10.78.0.2"];

    fn new() -> Result<Self> {
        said(&["modprobe", "ib_ipoib"])?;
        for (index, (name, address)) in Self::NAMES.into_iter().zip(Self::ADDRESSES).enumerate() {
            let device = format!("/sys/class/infiniband/mlx5_{index}/device/net");
            let mut found = std::fs::read_dir(&device)?;
            let link = found.next().context(device)??.file_name();
            let link = link.to_string_lossy();
            said(&["ip", "netns", "add", name])?;
            said(&["ip", "link", "set", &link, "netns", name])?;
            let address = format!("{address}/24");
            said(&["ip", "-n", name, "address", "add", &address, "dev", &link])?;
            said(&["ip", "-n", name, "link", "set", &link, "up"])?;
            wait("the broadcast group", || {
                Ok(said(&["ip", "-n", name, "link", "show", &link])?.contains("LOWER_UP"))
            })?;
        }
        Ok(Self)
    }
}

impl Drop for Interfaces {
    fn drop(&mut self) {
        for name in Self::NAMES {
            // The interfaces go back to the first namespace.
            let _ = Place::Here.run(&["ip", "netns", "delete", name]);
        }
    }
}

#[test]
fn ip_and_the_connection_manager_go_over_the_wire() -> Result<()> {
    let _turn = turn();
    let kernel_said =
        |words: &str| -> Result<usize> { Ok(said(&["dmesg"])?.matches(words).count()) };
    let _interfaces = Interfaces::new()?;
    let [here, there] = Interfaces::NAMES;
    let [_, address] = Interfaces::ADDRESSES;
    said(&[
        "ip", "netns", "exec", here, "busybox", "ping", "-c", "3", "-W", "10", address,
    ])?;
    // Packets of IP as large as the interface takes, and a group of which only the sender is a member.
    said(&[
        "ip", "netns", "exec", here, "busybox", "ping", "-c", "1", "-s", "1900", address,
    ])?;
    for program in ["ib_write_bw", "ib_send_lat"] {
        let line = |namespace: &str, device: &str| {
            format!("ip netns exec {namespace} {program} -F -R -n 50 -d {device}")
        };
        let server = line(there, "mlx5_1");
        let server = Place::Here.spawn(&server.split(' ').collect::<Vec<_>>())?;
        let client = format!("{} {address}", line(here, "mlx5_0"));
        let client: Vec<&str> = client.split(' ').collect();
        wait("the server", || {
            Ok(server.has_ended() || Place::Here.run(&client)?.ok())
        })?;
        server.end()?.passed()?;
    }
    // ib_cm compares what the receive CQEs say with what the subnet manager said.
    ensure!(kernel_said("different BTH P_Key")? == 0);
    ensure!(kernel_said("join failed")? == 0);
    Ok(())
}
