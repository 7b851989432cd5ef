// SPDX-License-Identifier: MIT OR Apache-2.0
//! The device's clock.

use std::sync::OnceLock;
use std::time::Instant;

use crate::cmd::caps::Capabilities;

fn start() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(Instant::now)
}

/// Ticks of the free-running clock at the capability's `device_frequency_khz`, common to all functions.
pub fn ticks() -> u64 {
    let time = start().elapsed();
    let rest = u64::from(time.subsec_nanos()) * Capabilities::CLOCK_KHZ / 1_000_000;
    time.as_secs() * Capabilities::CLOCK_KHZ * 1000 + rest
}

/// Value of the health counter: it moves ten times a second and is never 0.
pub fn health_counter() -> u32 {
    (start().elapsed().as_millis() / 100 + 1) as u32 & 0xff_ffff
}
