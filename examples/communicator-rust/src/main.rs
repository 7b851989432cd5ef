// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks that exchange blocks with each other, some rounds of it, and check every byte. See the library's page for how to
//! start them on several hosts.

use clap::Parser;
use ibgda_communicator::{Communicator, Error, Options, Processor, Result, Team, launch::Launch};
use std::process::{self, ExitCode};

/// An all-to-all of blocks by puts with signals, posted by kernels.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(flatten)]
    launch: Launch,
    /// How often.
    #[arg(long, default_value_t = 8)]
    rounds: u32,
    /// Bytes of a block.
    #[arg(long, default_value_t = 16384)]
    bytes: usize,
}

fn pattern(from: u16, to: u16, round: u32, at: usize) -> u8 {
    let (from, to) = (usize::from(from), usize::from(to));
    (at * 13 + (at >> 8) * 7 + from * 59 + to * 101 + round as usize * 29) as u8
}

fn exchange(arguments: &Arguments, team: &Team, processor: &Processor) -> Result<()> {
    let (rank, size, bytes) = (team.rank(), team.size(), arguments.bytes);
    let launch = &arguments.launch;
    let window_bytes = bytes
        .checked_mul(2 * usize::from(size))
        .filter(|&window| bytes > 0 && window <= 1 << 30)
        .ok_or_else(|| {
            Error::Argument(format!(
                "--bytes {bytes}: all blocks together have at most 2^30 bytes"
            ))
        })?;
    let options = Options {
        nic: launch.nic(rank)?,
        gpu: launch.gpu()?,
        route: launch.route,
        window_bytes,
    };
    let mut communicator = Communicator::new(team, processor, &options)?;
    println!(
        "rank {rank}: process {}, NIC {}, route {}, kernels {processor}",
        process::id(),
        communicator.context().device_name(),
        communicator.context().route()
    );
    let peers = || (0..size).filter(move |&peer| peer != rank);
    for round in 1..=arguments.rounds {
        for peer in peers() {
            let block: Vec<u8> = (0..bytes)
                .map(|at| pattern(rank, peer, round, at))
                .collect();
            communicator.write(usize::from(peer) * bytes, &block)?;
        }
        communicator.all_to_all(bytes)?;
        for peer in peers() {
            let mut block = vec![0; bytes];
            communicator.read((usize::from(size) + usize::from(peer)) * bytes, &mut block)?;
            if let Some(at) = (0..bytes).find(|&at| block[at] != pattern(peer, rank, round, at)) {
                return Err(communicator.fail(Error::Argument(format!(
                    "round {round}: byte {at} of rank {peer}'s block is {:#04x}, should be {:#04x}",
                    block[at],
                    pattern(peer, rank, round, at)
                ))));
            }
        }
    }
    communicator.barrier()?;
    communicator.finish()?;
    println!(
        "rank {rank}: {} rounds with {} peers, every byte right",
        arguments.rounds,
        size - 1
    );
    Ok(())
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match arguments
        .launch
        .run(|team, processor| exchange(&arguments, team, processor))
    {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
