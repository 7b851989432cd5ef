// SPDX-License-Identifier: MIT OR Apache-2.0
//! Accesses of any size to any offset of the BARs and of config space, resets among them.
#![no_main]

use connectx_fuzz::program::Kind;

connectx_fuzz::program_target!(
    connectx_fuzz::harness::connected,
    &[
        Kind::Write,
        Kind::Read,
        Kind::Config,
        Kind::Run,
        Kind::Reset,
        Kind::Steer,
        Kind::Memory,
        Kind::Post,
    ]
);
