// SPDX-License-Identifier: MIT OR Apache-2.0
//! examples/all-reduce, CPU threads standing in for the GPU: each rank a process, several on one NIC.

use crate::program::allow_all;
use anyhow::{Result, ensure};
use ibgda_vmtests::machine::{Allowed, gpus, nics};
use ibgda_vmtests::said::Said;
use std::{
    process::Command,
    time::{Duration, Instant},
};

fn run(arguments: &[&str]) -> Result<Said> {
    Said::by(Command::new("/opt/ibgda/bin/ibgda-all-reduce").args(arguments))
}

#[test]
fn two_and_four_ranks_equal_the_plain_sum_on_every_route() -> Result<()> {
    let _allowed = allow_all();
    for route in ["direct", "cpu-doorbell", "proxy"] {
        for ranks in [2, 4] {
            let said = run(&[
                "--route",
                route,
                "--ranks",
                &ranks.to_string(),
                "--elements",
                "10007",
                "--chunk",
                "512",
                "--calls",
                "2",
            ])?;
            let said = said.ended_with(0)?;
            for rank in 0..ranks {
                said.output_has_all(&[
                    &format!("rank {rank}: NIC mlx5_{}, route {route}", rank % 2),
                    &format!("rank {rank}: 4 all-reduces of 10007 elements over {ranks} ranks equal the plain sum"),
                ])?;
            }
        }
    }
    Ok(())
}

#[test]
fn a_rank_with_a_wrong_rkey_is_named_by_the_others() -> Result<()> {
    let _allowed = allow_all();
    let start = Instant::now();
    let said = run(&[
        "--ranks",
        "4",
        "--elements",
        "10007",
        "--chunk",
        "512",
        "--fail",
        "2@3",
        "--patience",
        "300",
    ])?;
    ensure!(
        start.elapsed() < Duration::from_secs(100),
        "{:?}",
        start.elapsed()
    );
    let said = said.ended_with(1)?;
    said.errors_have_all(&["rank 2: all_reduce_ring, ", "IBGDA_ERR_REMOTE_ACCESS"])?;
    for rank in [0, 1, 3] {
        said.errors_have_all(&[&format!("rank {rank}: rank 2 is gone: all_reduce_ring, ")])?;
    }
    Ok(())
}

#[test]
fn a_pair_that_is_not_allowed_is_refused() -> Result<()> {
    let _one = Allowed::pair(gpus()[0], nics()[0]);
    // By a route for which the broker must grant: auto takes the proxy then.
    run(&["--ranks", "2", "--route", "direct"])?
        .ended_with(1)?
        .errors_have_all(&[
            "rank 1: IBGDA_IOC_BIND",
            "the policy does not allow this pair",
            "rank 0: rank 1 is gone",
        ])?;
    Ok(())
}
