// SPDX-License-Identifier: MIT OR Apache-2.0
//! The `ibgda` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    ibgda_cli::main()
}
