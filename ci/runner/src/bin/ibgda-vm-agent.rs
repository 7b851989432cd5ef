// SPDX-License-Identifier: MIT OR Apache-2.0
//! The guest's first process: makes the guest ready, runs one command, reports how it ended.

use ibgda_vm::guest;

fn main() -> ! {
    guest::run()
}
