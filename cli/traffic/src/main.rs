// SPDX-License-Identifier: MIT OR Apache-2.0
//! The subcommands of `ibgda` that open NICs. `ibgda` becomes this program for them (cli/src/traffic.rs); ibgda(1) is
//! the manual of both.

mod bench;
mod choice;
mod ends;
mod files;
mod pattern;
mod picture;
mod poster;
mod progress;
mod route;
mod shadow;
mod stats;
mod stop;
mod stress;
mod units;

use clap::{Parser, Subcommand};
use ibgda_cli::output;
use std::process::ExitCode;

/// Traffic over RDMA NICs, by the routes of libibgda.
#[derive(Parser)]
#[command(name = "ibgda", bin_name = "ibgda", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Route(route::Arguments),
    Bench(bench::Arguments),
    Shadow(shadow::Arguments),
    Stress(stress::Arguments),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Route(arguments) => route::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Shadow(arguments) => shadow::run(&arguments),
        Command::Stress(arguments) => stress::run(&arguments),
    };
    result.unwrap_or_else(|error| {
        if output::reader_is_gone(&error) {
            return ExitCode::SUCCESS;
        }
        eprintln!("ibgda: {error:#}");
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }
}
