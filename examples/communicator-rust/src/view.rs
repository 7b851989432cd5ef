// SPDX-License-Identifier: MIT OR Apache-2.0
//! What kernels are given: the structures of `kernels/team.cuh`.

use ibgda::abi::{ibgda_region, ibgda_status};
use std::mem::{offset_of, size_of};

/// Ranks of a team, at most.
pub const MOST_RANKS: usize = 16;
/// Where a rank's own part of its window begins, in bytes.
pub const HEADER_BYTES: usize = 4096;
/// A status beyond those of the device header: the host has heard that a rank is gone.
pub(crate) const ABORTED: u32 = 0x10000;

/// `struct team_outcome`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) status: u32,
    pub(crate) peer: u32,
    pub(crate) act: u32,
    pub(crate) reserved: u32,
}

impl Outcome {
    /// In the window.
    pub(crate) const OFFSET: usize = 8;

    pub(crate) fn parse(bytes: [u8; size_of::<Self>()]) -> Self {
        let word = |at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Self {
            status: word(offset_of!(Self, status)),
            peer: word(offset_of!(Self, peer)),
            act: word(offset_of!(Self, act)),
            reserved: 0,
        }
    }

    /// Does another rank's failure look like this?
    pub(crate) fn follows(self) -> bool {
        [
            ABORTED,
            ibgda_status::IBGDA_TIMEOUT,
            ibgda_status::IBGDA_ERR_QUEUE_FULL,
            ibgda_status::IBGDA_ERR_WR_FLUSHED,
            ibgda_status::IBGDA_ERR_TRANSPORT_RETRY_EXCEEDED,
        ]
        .contains(&self.status)
    }

    /// What the kernel was doing, with a rank.
    pub(crate) fn act(self) -> &'static str {
        match self.act {
            1 => "posting to",
            2 => "awaiting data of",
            3 => "awaiting room at",
            4 => "awaiting completions of what was sent to",
            _ => "with",
        }
    }
}

/// `struct team`. Pointers are those of the processor that runs the kernel, as numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// Which rank this is.
    pub rank: u32,
    /// How many there are.
    pub size: u32,
    /// The own window.
    pub own: u64,
    /// The same, for requests.
    pub region: ibgda_region,
    /// The peers' windows.
    pub windows: [ibgda_region; MOST_RANKS],
    /// Handles of the QPs to the peers.
    pub qps: [u64; MOST_RANKS],
}

// As kernels/team.cuh asserts; it is passed by value.
const _: () = assert!(size_of::<View>() == 552);
