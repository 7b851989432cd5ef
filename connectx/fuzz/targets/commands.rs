// SPDX-License-Identifier: MIT OR Apache-2.0
//! Commands of any content, length and delivery, on a function that the driver has started.
#![no_main]

use connectx_fuzz::program::Kind;

connectx_fuzz::program_target!(
    connectx_fuzz::harness::started,
    &[Kind::Command, Kind::Run, Kind::Consume]
);
