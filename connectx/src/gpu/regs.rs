// SPDX-License-Identifier: MIT OR Apache-2.0
//! Registers of the stand-in GPU in BAR 0, little-endian, 32 bits each. docs/standin-gpu.md has them as a table.
//!
//! Global registers are at the beginning; engine `e` has its own at [`ENGINE_BASE`] + `e` * [`ENGINE_STRIDE`].

/// Engines.
pub const ENGINES: usize = 64;
/// Bytes of an engine's DATA.
pub const DATA_LEN: usize = 64;

/// Read-only: [`ID_VALUE`].
pub const ID: u64 = 0x0;
/// "GPU!" as a little-endian word.
pub const ID_VALUE: u32 = u32::from_le_bytes(*b"GPU!");
/// Read-only: version of this layout.
pub const VERSION: u64 = 0x4;
/// The version described here.
pub const VERSION_VALUE: u32 = 1;
/// Read-only: number of engines.
pub const ENGINE_COUNT: u64 = 0x8;
/// Write anything to stop every engine.
pub const STOP_ALL: u64 = 0xc;
/// Read-only: a bit for each running engine, 0 to 31.
pub const RUNNING: u64 = 0x10;
/// Read-only: a bit for each running engine, 32 to 63.
pub const RUNNING_HIGH: u64 = 0x14;

/// Where the engines' registers begin.
pub const ENGINE_BASE: u64 = 0x1000;
/// From one engine's registers to the next one's.
pub const ENGINE_STRIDE: u64 = 0x100;

/// Bus address of the stores, low half; aligned to LENGTH.
pub const ADDRESS: u64 = 0x00;
/// Bus address of the stores, high half.
pub const ADDRESS_HIGH: u64 = 0x04;
/// Bytes of a store: 4, 8 or 64.
pub const LENGTH: u64 = 0x08;
/// Microseconds from one store to the next; 0 for as fast as possible, which needs a COUNT.
pub const PERIOD_US: u64 = 0x0c;
/// Stores to make; 0 for no end.
pub const COUNT: u64 = 0x10;
/// Write-only: [`COMMAND_START`] or [`COMMAND_STOP`].
pub const COMMAND: u64 = 0x14;
/// Latches the registers above and DATA, clears the counters and starts.
pub const COMMAND_START: u32 = 1;
/// Ends the stream; STATUS shows when the last store is over.
pub const COMMAND_STOP: u32 = 2;
/// Read-only: STATUS bits.
pub const STATUS: u64 = 0x18;
/// STATUS: stores are being made.
pub const STATUS_RUNNING: u32 = 1 << 0;
/// STATUS: the last store reached nothing.
pub const STATUS_FAILED: u32 = 1 << 1;
/// STATUS: the last start was refused for its settings.
pub const STATUS_REFUSED: u32 = 1 << 2;
/// Read-only: stores that reached their target since the start, low half.
pub const DONE: u64 = 0x20;
/// High half of DONE.
pub const DONE_HIGH: u64 = 0x24;
/// Read-only: stores that reached nothing since the start, low half.
pub const FAILURES: u64 = 0x28;
/// High half of FAILURES.
pub const FAILURES_HIGH: u64 = 0x2c;
/// What is stored, 64 bytes of which a store takes the first LENGTH.
pub const DATA: u64 = 0x40;

/// Engine and register at an offset of BAR 0.
pub fn locate(at: u64) -> Option<(usize, u64)> {
    let from = at.checked_sub(ENGINE_BASE)?;
    let engine = usize::try_from(from / ENGINE_STRIDE)
        .ok()
        .filter(|&e| e < ENGINES)?;
    let register = from % ENGINE_STRIDE;
    (register < DATA + DATA_LEN as u64).then_some((engine, register))
}
