// SPDX-License-Identifier: MIT OR Apache-2.0
//! Asynchronous events as a program hears of them, through mlx5_core, mlx5_ib and libibverbs, and what the driver does
//! with those that are for itself.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use ibgda_verbs_sys::{ibv_event_type as event, ibv_wr_opcode as opcode};
use ibgda_vmtests::machine::Bdf;
use ibgda_vmtests::pair::{Pair, count, listening, rdma, wait};
use ibgda_vmtests::rc::{Device, Event};

#[test]
fn a_program_hears_of_its_shared_receive_queue() -> Result<()> {
    let pair = Pair::take()?;
    let device = Device::open(pair.nic)?;
    let (cq, srq) = (device.cq(64)?, device.srq(8)?);
    let [sender, receiver] = device.pair(cq, Some(srq))?;
    srq.post(&device, 4)?;
    srq.arm(3)?;
    for _ in 0..2 {
        device.post(sender, opcode::IBV_WR_SEND, 0, 0)?;
    }
    ensure!(device.event()? == Event(event::IBV_EVENT_SRQ_LIMIT_REACHED, srq.handle()));
    receiver.to_error()?;
    ensure!(device.event()? == Event(event::IBV_EVENT_QP_LAST_WQE_REACHED, receiver.number()));
    Ok(())
}

#[test]
fn a_program_hears_of_a_full_completion_queue_and_of_the_queue_pair_that_dies_of_it() -> Result<()>
{
    let pair = Pair::take()?;
    let device = Device::open(pair.nic)?;
    let small = device.cq(1)?;
    let [sender, _] = device.pair(small, None)?;
    for _ in 0..16 {
        device.post(sender, opcode::IBV_WR_RDMA_WRITE, 0, device.rkey())?;
    }
    let mut heard = [device.event()?, device.event()?];
    heard.sort_by_key(|event| event.0);
    let expected = [
        Event(event::IBV_EVENT_CQ_ERR, small.handle()),
        Event(event::IBV_EVENT_QP_FATAL, sender.number()),
    ];
    ensure!(heard == expected, "{heard:?}");
    Ok(())
}

#[test]
fn a_program_hears_of_requests_that_its_queue_pair_refuses() -> Result<()> {
    let pair = Pair::take()?;
    let device = Device::open(pair.nic)?;
    let rkey = device.rkey();
    for (request, offset, key, heard) in [
        (
            opcode::IBV_WR_RDMA_WRITE,
            0,
            rkey ^ 0x100,
            event::IBV_EVENT_QP_ACCESS_ERR,
        ),
        // An atomic operation is aligned.
        (
            opcode::IBV_WR_ATOMIC_FETCH_AND_ADD,
            4,
            rkey,
            event::IBV_EVENT_QP_REQ_ERR,
        ),
    ] {
        let [sender, receiver] = device.pair(device.cq(64)?, None)?;
        device.post(sender, request, offset, key)?;
        let event = device.event()?;
        ensure!(event == Event(heard, receiver.number()), "{event:?}");
    }
    Ok(())
}

/// What the driver says that it has lent the device.
fn lent(nic: Bdf) -> Result<u64> {
    let path = format!("/sys/kernel/debug/mlx5/{nic}/pages/fw_pages_total");
    if !Path::new(&path).exists() {
        Command::new("mount")
            .args(["-t", "debugfs", "none", "/sys/kernel/debug"])
            .status()?;
    }
    let text = fs::read_to_string(&path).context(path)?;
    Ok(text.trim().parse()?)
}

#[test]
fn the_driver_lends_pages_when_there_are_more_objects_and_takes_them_back() -> Result<()> {
    let pair = Pair::take()?;
    let device = Device::open(pair.nic)?;
    let before = lent(pair.nic)?;
    ensure!(count("pages")? == before, "{before}");
    let agree = || lent(pair.nic).ok() == count("pages").ok();
    let more = device.with_domains(1000, || {
        wait("more pages", || {
            lent(pair.nic).is_ok_and(|now| now >= before + 64) && agree()
        })?;
        lent(pair.nic)
    })?;
    println!("{before} pages became {more}");
    // The model keeps less than two chunks of 16 for the next objects.
    wait("fewer pages", || {
        lent(pair.nic).is_ok_and(|now| now < before + 32) && agree()
    })
}

/// Interrupts of the driver's vectors: of each, its number and how often it came on all CPUs.
fn interrupts(nic: Bdf, kind: &str) -> Result<Vec<(u32, u64)>> {
    let text = fs::read_to_string("/proc/interrupts")?;
    let of_nic = |line: &&str| line.contains(kind) && line.contains(&format!("pci:{nic}"));
    text.lines()
        .filter(of_nic)
        .map(|line| {
            let (irq, rest) = line.trim().split_once(':').context("no number")?;
            let counts = rest
                .split_whitespace()
                .map_while(|word| word.parse::<u64>().ok());
            Ok((irq.parse()?, counts.sum()))
        })
        .collect()
}

#[test]
fn the_driver_learns_of_its_commands_by_interrupt() -> Result<()> {
    let pair = Pair::take()?;
    let device = Device::open(pair.nic)?;
    let total = || -> Result<u64> {
        Ok(interrupts(pair.nic, "mlx5_async")?
            .iter()
            .map(|(_, n)| n)
            .sum())
    };
    let before = total()?;
    for _ in 0..20 {
        device.with_domains(1, || Ok(()))?;
    }
    let came = total()? - before;
    // Each waits for its end; two may share an interrupt if the first's handler has not ended.
    ensure!(came >= 20, "{came} interrupts for 40 commands");
    Ok(())
}

/// Moving a vector to another CPU masks it meanwhile.
#[test]
fn no_completion_is_lost_while_vectors_are_masked() -> Result<()> {
    let pair = Pair::take()?;
    let mut children = Vec::new();
    for (nic, host) in [(pair.nic, None), (pair.peer, Some("localhost"))] {
        let name = rdma(nic).context("no RDMA device")?;
        let mut command = Command::new("timeout");
        command
            .args(["120", "ibv_rc_pingpong", "-e", "-n", "500", "-d", &name])
            .args(host);
        if host.is_some() {
            wait("the server", listening)?;
        }
        children.push(command.stdout(Stdio::null()).spawn()?);
    }
    let mut moved = 0;
    while children[0].try_wait()?.is_none() {
        for (irq, _) in interrupts(pair.nic, "mlx5_comp")? {
            let cpu = if moved % 2 == 0 { "1" } else { "2" };
            if fs::write(format!("/proc/irq/{irq}/smp_affinity"), cpu).is_ok() {
                moved += 1;
            }
        }
    }
    for mut child in children {
        let status = child.wait()?;
        ensure!(status.success(), "{status}");
    }
    ensure!(moved > 10, "vectors were moved {moved} times");
    Ok(())
}
