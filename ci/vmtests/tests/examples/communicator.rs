// SPDX-License-Identifier: MIT OR Apache-2.0
//! examples/communicator-rust: ranks as processes, here and as if on several hosts, and what they say of each other.

use crate::program::allow_all;
use anyhow::{Context as _, Result, ensure};
use ibgda_vmtests::machine::{Allowed, gpus, nics, settle};
use ibgda_vmtests::said::{Running, Said};
use std::{
    process::Command,
    time::{Duration, Instant},
};

fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new("/opt/ibgda/bin/ibgda-communicator");
    // NICs and GPU are in the guest's environment.
    command.args(arguments);
    command
}

#[test]
fn processes_exchange_blocks_on_every_route() -> Result<()> {
    let _allowed = allow_all();
    for route in ["direct", "cpu-doorbell", "proxy"] {
        let said = Said::by(&mut program(&[
            "--ranks", "4", "--rounds", "5", "--route", route,
        ]))?;
        let said = said.ended_with(0)?;
        for rank in 0..4 {
            said.output_has_all(&[
                &format!("NIC mlx5_{}, route {route}", rank % 2),
                &format!("rank {rank}: 5 rounds with 3 peers, every byte right"),
            ])?;
        }
    }
    Ok(())
}

#[test]
fn ranks_that_are_started_one_by_one_meet() -> Result<()> {
    let _allowed = allow_all();
    let common = ["--ranks", "2", "--meet", "127.0.0.1:7077", "--rounds", "2"];
    // The other comes first, as it may on another host.
    let mut one = Running::start(program(&common).args(["--rank", "1"]))?;
    let zero = Said::by(program(&common).args(["--rank", "0"]))?;
    zero.ended_with(0)?.output_has_all(&["rank 0: 2 rounds"])?;
    one.end()?
        .ended_with(0)?
        .output_has_all(&["rank 1: 2 rounds"])?;
    Ok(())
}

#[test]
fn a_rank_that_is_killed_is_named_by_the_others_and_leaves_nothing() -> Result<()> {
    let _allowed = allow_all();
    Said::by(&mut program(&["--rounds", "1"]))?.ended_with(0)?;
    let before = [settle(0), settle(1)];
    let mut running = Running::start(&mut program(&[
        "--ranks",
        "3",
        "--rounds",
        "1000000",
        "--patience",
        "300",
    ]))?;
    let mut pid = None;
    // In whatever order.
    for _ in 0..3 {
        let line = running.says(": process ")?;
        if let Some(rest) = line.strip_prefix("rank 1: process ") {
            let number = rest.split(',').next().context("a number")?;
            pid = Some(number.parse::<i32>()?);
        }
    }
    let pid = pid.context("rank 1 says which process it is")?;
    let start = Instant::now();
    // SAFETY: it only sends a signal, to the process that said its number.
    ensure!(unsafe { libc::kill(pid, libc::SIGKILL) } == 0);
    let said = running.end()?;
    // Not by a wait's end.
    ensure!(
        start.elapsed() < Duration::from_secs(60),
        "{:?}",
        start.elapsed()
    );
    said.ended_with(1)?.errors_have_all(&[
        "rank 0: rank 1 is gone: its process has ended",
        "rank 2: rank 1 is gone: its process has ended",
    ])?;
    let after = [settle(0), settle(1)];
    ensure!(before == after, "{before:?} became {after:?}");
    Ok(())
}

#[test]
fn a_rank_that_may_not_use_its_nic_says_so_to_all() -> Result<()> {
    let _one = Allowed::pair(gpus()[0], nics()[0]);
    // By a route for which the broker must grant: auto takes the proxy then.
    Said::by(&mut program(&["--ranks", "2", "--route", "direct"]))?
        .ended_with(1)?
        .errors_have_all(&[
            "rank 1: IBGDA_IOC_BIND",
            "the policy does not allow this pair",
            "rank 0: rank 1 is gone: IBGDA_IOC_BIND",
        ])?;
    Ok(())
}
