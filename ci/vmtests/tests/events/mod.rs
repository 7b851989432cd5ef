// SPDX-License-Identifier: MIT OR Apache-2.0
//! Asynchronous events as a program hears of them, through mlx5_core, mlx5_ib and libibverbs, and what the driver does
//! with those that are for itself.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use ibgda_verbs_sys::ibv_event_type as event;
use ibgda_vmtests::machine::Bdf;
use ibgda_vmtests::pair::{Pair, count, wait};
use ibgda_vmtests::rdma::{Cq, Event, Memory, Nic, Qp, Srq, Work};

#[test]
fn a_program_hears_of_its_shared_receive_queue() -> Result<()> {
    let pair = Pair::take()?;
    let nic = Nic::open(pair.nic)?;
    let memory = Memory::new(&nic, 4096)?;
    let (cq, srq) = (Cq::new(&nic, 64)?, Srq::new(&nic, 8)?);
    let [sender, receiver] = Qp::pair(&nic, &cq, Some(&srq))?;
    for id in 0..4 {
        srq.post(id, memory.sge(0, 8))?;
    }
    srq.arm(3)?;
    for id in 0..2 {
        sender.post(&[Work::send(id, memory.sge(0, 8))])?;
    }
    ensure!(nic.event()? == Event(event::IBV_EVENT_SRQ_LIMIT_REACHED, srq.handle()));
    receiver.to_error()?;
    ensure!(nic.event()? == Event(event::IBV_EVENT_QP_LAST_WQE_REACHED, receiver.number));
    Ok(())
}

#[test]
fn a_program_hears_of_a_full_completion_queue_and_of_the_queue_pair_that_dies_of_it() -> Result<()>
{
    let pair = Pair::take()?;
    let nic = Nic::open(pair.nic)?;
    let memory = Memory::new(&nic, 4096)?;
    let small = Cq::new(&nic, 1)?;
    let [sender, _receiver] = Qp::pair(&nic, &small, None)?;
    for id in 0..16 {
        sender.post(&[Work::write(id, memory.sge(0, 8), memory.remote(0))])?;
    }
    let mut heard = [nic.event()?, nic.event()?];
    heard.sort_by_key(|event| event.0);
    let expected = [
        Event(event::IBV_EVENT_CQ_ERR, small.handle()),
        Event(event::IBV_EVENT_QP_FATAL, sender.number),
    ];
    ensure!(heard == expected, "{heard:?}");
    Ok(())
}

#[test]
fn a_program_hears_of_requests_that_its_queue_pair_refuses() -> Result<()> {
    let pair = Pair::take()?;
    let nic = Nic::open(pair.nic)?;
    let memory = Memory::new(&nic, 4096)?;
    let (local, (address, rkey)) = (memory.sge(0, 8), memory.remote(0));
    for (work, heard) in [
        (
            Work::write(0, local, (address, rkey ^ 0x100)),
            event::IBV_EVENT_QP_ACCESS_ERR,
        ),
        // An atomic operation is aligned.
        (
            Work::fetch_add(0, local, memory.remote(4)),
            event::IBV_EVENT_QP_REQ_ERR,
        ),
    ] {
        let cq = Cq::new(&nic, 64)?;
        let [sender, receiver] = Qp::pair(&nic, &cq, None)?;
        sender.post(&[work])?;
        let event = nic.event()?;
        ensure!(event == Event(heard, receiver.number), "{event:?}");
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
    let nic = Nic::open(pair.nic)?;
    let before = lent(pair.nic)?;
    ensure!(count("pages")? == before, "{before}");
    let agree = || lent(pair.nic).ok() == count("pages").ok();
    let more = nic.with_domains(1000, || {
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
    let nic = Nic::open(pair.nic)?;
    let total = || -> Result<u64> {
        Ok(interrupts(pair.nic, "mlx5_async")?
            .iter()
            .map(|(_, n)| n)
            .sum())
    };
    let before = total()?;
    for _ in 0..20 {
        nic.with_domains(1, || Ok(()))?;
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
    let mut traffic = pair.traffic("500")?;
    let mut moved = 0;
    while traffic.0[0].try_wait()?.is_none() {
        for (irq, _) in interrupts(pair.nic, "mlx5_comp")? {
            let cpu = if moved % 2 == 0 { "1" } else { "2" };
            if fs::write(format!("/proc/irq/{irq}/smp_affinity"), cpu).is_ok() {
                moved += 1;
            }
        }
    }
    traffic.ends_well()?;
    ensure!(moved > 10, "vectors were moved {moved} times");
    Ok(())
}
