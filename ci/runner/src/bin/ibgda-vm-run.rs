// SPDX-License-Identifier: MIT OR Apache-2.0
//! Boots the guest and runs one command in it; `ci/vm` calls this.

use std::process::ExitCode;

use clap::Parser;
use ibgda_vm::host::{Options, run};

fn main() -> ExitCode {
    run(&Options::parse())
}
