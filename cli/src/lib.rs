// SPDX-License-Identifier: MIT OR Apache-2.0
//! The `ibgda` command. One file a subcommand; ibgda(1) is its manual.

// Shared with libibgda, so that both read and write a function's name alike. (The library itself would bring libibverbs
// along, without which the doctor must run too.)
#[path = "../../libibgda/src/pci.rs"]
mod bdf;
mod broker;
mod decode;
mod doctor;
mod events;
#[cfg(test)]
mod fixture;
mod machine;
mod output;
mod policy;
mod root;
mod topo;
mod topology;

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
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let root = Root::new(cli.root);
    let done = |()| ExitCode::SUCCESS;
    let result = match cli.command {
        Command::Doctor(arguments) => doctor::run(&root, &arguments),
        Command::Topo(arguments) => topo::run(&root, &arguments).map(done),
        Command::Policy(arguments) => policy::run(&root, &arguments).map(done),
        Command::Events(arguments) => events::run(&root, &arguments).map(done),
        Command::Decode(arguments) => decode::run(&arguments),
    };
    result.unwrap_or_else(|error| {
        if output::reader_is_gone(&error) {
            return ExitCode::SUCCESS;
        }
        eprintln!("ibgda: {error:#}");
        ExitCode::FAILURE
    })
}
