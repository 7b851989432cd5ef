// SPDX-License-Identifier: MIT OR Apache-2.0
//! The `ibgda` command. One file a subcommand; ibgda(1) is its manual. Those that open NICs are in `traffic/`, a
//! program of its own, which shares the public modules here.

// Shared with libibgda, so that both read and write a function's name alike. (The library itself would bring libibverbs
// along, without which the doctor must run too.)
#[path = "../../libibgda/src/pci.rs"]
pub mod bdf;
mod broker;
mod decode;
mod doctor;
mod events;
#[cfg(test)]
mod fixture;
pub mod machine;
pub mod output;
mod policy;
pub mod root;
mod topo;
mod topology;
mod traffic;

use clap::{Parser, Subcommand};
use root::Root;
use std::{path::PathBuf, process::ExitCode};

/// What a machine has and lacks for GPU-driven RDMA, and the IBGDA broker's policy and events.
#[derive(Parser)]
#[command(name = "ibgda", version)]
struct Cli {
    /// Look for /sys, /proc, /etc and /dev below DIR, which may be a copy of another machine's.
    #[arg(
        long,
        global = true,
        hide = true,
        value_name = "DIR",
        default_value = "/"
    )]
    root: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Doctor(doctor::Arguments),
    Topo(topo::Arguments),
    Policy(policy::Arguments),
    Events(events::Arguments),
    Decode(decode::Arguments),
    /// Say which route doorbells would take for each pair of GPU and NIC, and why not a better one.
    Route(traffic::Arguments),
    /// Measure the latency of RDMA WRITEs, and how many go through a second, with every byte compared.
    Bench(traffic::Arguments),
    /// Send each request by the CPU's path and by the GPU's; compare the data and the latencies.
    Shadow(traffic::Arguments),
    /// Send random requests for seconds or hours, with every byte compared.
    Stress(traffic::Arguments),
}

/// Runs the command that the process was started with.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let root = Root::new(cli.root);
    let done = |()| ExitCode::SUCCESS;
    let result = match cli.command {
        Command::Doctor(arguments) => doctor::run(&root, &arguments),
        Command::Topo(arguments) => topo::run(&root, &arguments).map(done),
        Command::Policy(arguments) => policy::run(&root, &arguments).map(done),
        Command::Events(arguments) => events::run(&root, &arguments).map(done),
        Command::Decode(arguments) => decode::run(&arguments),
        Command::Route(arguments) => traffic::run(&root, "route", &arguments),
        Command::Bench(arguments) => traffic::run(&root, "bench", &arguments),
        Command::Shadow(arguments) => traffic::run(&root, "shadow", &arguments),
        Command::Stress(arguments) => traffic::run(&root, "stress", &arguments),
    };
    result.unwrap_or_else(|error| {
        if output::reader_is_gone(&error) {
            return ExitCode::SUCCESS;
        }
        eprintln!("ibgda: {error:#}");
        ExitCode::FAILURE
    })
}
