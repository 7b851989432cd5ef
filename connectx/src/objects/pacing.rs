// SPDX-License-Identifier: MIT OR Apache-2.0
//! What limits how fast queue pairs send: packet pacing's rates, and trees of scheduling elements.

use std::time::{Duration, Instant};

use super::table::Weigh;

/// A number of bits per second that is not exceeded.
#[derive(Debug, Clone, Copy, Default)]
pub struct Limiter {
    /// When what was sent has had its time.
    free_at: Option<Instant>,
}

impl Limiter {
    /// Until when nothing more may be sent.
    pub fn busy_until(&self, now: Instant) -> Option<Instant> {
        self.free_at.filter(|free_at| *free_at > now)
    }

    /// Bytes have been sent. Time in which nothing was is not made up for.
    pub fn spend(&mut self, bytes: usize, bits_per_second: u64, now: Instant) {
        let nanoseconds = (bytes as u64 * 8).saturating_mul(1_000_000_000) / bits_per_second.max(1);
        let start = self.free_at.map_or(now, |free_at| free_at.max(now));
        self.free_at = Some(start + Duration::from_nanos(nanoseconds));
    }
}

/// A rate of packet pacing (`set_pp_rate_limit_context`).
#[derive(Debug, Clone)]
pub struct Rate {
    /// Owner.
    pub uid: u16,
    /// kbit/s.
    pub limit: u32,
    /// What was sent.
    pub limiter: Limiter,
}

/// Kinds of scheduling elements, `MLX5_SCHED_ELEM_TYPE_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum ElementKind {
    /// Arbiter between the elements below it.
    Tsar = 0,
    /// Queue pairs.
    QueueGroup = 4,
}

impl ElementKind {
    /// The kind with a number, if the device has it.
    pub fn from_number(number: u64) -> Option<Self> {
        match number {
            0 => Some(Self::Tsar),
            4 => Some(Self::QueueGroup),
            _ => None,
        }
    }
}

/// A scheduling element.
#[derive(Debug)]
pub struct Element {
    /// Owner.
    pub uid: u16,
    /// Elements and queue pairs below it.
    pub refs: u32,
    /// Kind.
    pub kind: ElementKind,
    /// Element above it; 0 for the root.
    pub parent: u32,
    /// Elements above it.
    pub depth: u32,
    /// Weight among the elements with the same parent, of 100; 0 is as good as 100.
    pub bw_share: u32,
    /// Mbit/s; 0 for no limit.
    pub max_average_bw: u32,
    /// What was sent.
    pub limiter: Limiter,
}

impl Element {
    /// An element without limits.
    pub fn new(uid: u16, kind: ElementKind, parent: u32, depth: u32) -> Self {
        Self {
            uid,
            refs: 0,
            kind,
            parent,
            depth,
            bw_share: 0,
            max_average_bw: 0,
            limiter: Limiter::default(),
        }
    }
}

impl Weigh for Element {}

/// What a queue pair is limited by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Rate of packet pacing, for requests; 0 for none.
    pub rate_index: u16,
    /// Queue group, for requests; 0 for none.
    pub requester_group: u32,
    /// Queue group, for READ responses; 0 for none.
    pub responder_group: u32,
}
