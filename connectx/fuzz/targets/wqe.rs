// SPDX-License-Identifier: MIT OR Apache-2.0
//! Work requests, queue memory, doorbell records and doorbells of any content, on connected queue pairs of every service.
#![no_main]

use connectx_fuzz::program::Kind;

connectx_fuzz::program_target!(
    connectx_fuzz::harness::connected,
    &[
        Kind::Post,
        Kind::Receive,
        Kind::Run,
        Kind::Consume,
        Kind::Memory,
        Kind::Write,
        Kind::Command,
        Kind::Steer,
    ]
);
