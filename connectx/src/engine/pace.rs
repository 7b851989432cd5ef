// SPDX-License-Identifier: MIT OR Apache-2.0
//! Slows queue pairs down to the limits that they have: packet pacing's rates, and the scheduling elements above them.

use std::time::Instant;

use super::requester::Budget;
use crate::objects::device::Device;
use crate::objects::pacing::Limits;

/// Half of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Half {
    Requester,
    Responder,
}

/// First scheduling element above a half.
fn group(limits: Limits, half: Half) -> u32 {
    match half {
        Half::Requester => limits.requester_group,
        Half::Responder => limits.responder_group,
    }
}

/// Until when a queue pair's half may not send.
pub(super) fn busy_until(
    device: &Device,
    limits: Limits,
    half: Half,
    now: Instant,
) -> Option<Instant> {
    let rate = device
        .rates
        .get(&limits.rate_index)
        .filter(|_| half == Half::Requester);
    let mut until = rate.and_then(|rate| rate.limiter.busy_until(now));
    // An element is above the ones made after it, so this ends.
    let mut id = group(limits, half);
    while let Some(element) = device.elements.get(id) {
        if element.max_average_bw > 0 {
            until = until.max(element.limiter.busy_until(now));
        }
        id = element.parent;
    }
    until
}

/// A queue pair's half has sent.
pub(super) fn spend(device: &mut Device, limits: Limits, half: Half, bytes: usize, now: Instant) {
    if half == Half::Requester {
        if let Some(rate) = device.rates.get_mut(&limits.rate_index) {
            let bits = u64::from(rate.limit) * 1000;
            rate.limiter.spend(bytes, bits, now);
        }
    }
    let mut id = group(limits, half);
    while let Some(element) = device.elements.get_mut(id) {
        if element.max_average_bw > 0 {
            let bits = u64::from(element.max_average_bw) * 1_000_000;
            element.limiter.spend(bytes, bits, now);
        }
        id = element.parent;
    }
}

/// A turn of a queue pair whose elements have shares: as much of a whole turn as they are of 100, so that what all in a
/// round get is in proportion.
pub(super) fn share(device: &Device, limits: Limits, budget: &mut Budget) {
    let mut id = limits.requester_group;
    while let Some(element) = device.elements.get(id) {
        if element.bw_share > 0 {
            let part = |all: usize| (all * element.bw_share as usize / 100).max(1);
            budget.packets = part(budget.packets as usize) as u32;
            budget.bytes = part(budget.bytes);
        }
        id = element.parent;
    }
}
