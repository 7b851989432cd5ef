// SPDX-License-Identifier: MIT OR Apache-2.0
//! BlueFlame: WQEs that the processor writes into a send register of a UAR page, behind the doorbell that its head is.
//!
//! A NIC knows such a copy by its packet: where the processor combines the writes, 64 bytes come at once, and it takes the
//! WQE from them; where it does not, 8 come, which are a doorbell, and what follows is ignored. That is what the driver's
//! self-test looks for (core/wc.c: its NOPs ask for a completion in the copy only).
//!
//! QEMU never gives us 64 bytes: its processor stores 8 at a time, and each store is a write of its own (seen with Linux
//! 7.3's `__iowrite64_copy` and rdma-core's `mmio_memcpy_x64`: eight writes of 8 bytes in ascending order). So "combined" is
//! taken to mean: in order, to one buffer, with no other write to the page between them. Whether a doorbell is the head of
//! a copy shows only afterwards, when it has been executed from memory, as hardware would. But who copies once will do it
//! again: on a page where the last doorbells turned out to be copies' heads, the next one is held until the copy is whole,
//! until something else is written to the page, until a command comes, or until nothing has come for
//! [`Copies::patience`]. Either way the WQE that is executed is one that the driver posted: with drivers that write the
//! same to both places, none can tell. Who turns out to mix copies and doorbells waits for few of them: each doorbell that
//! was held in vain doubles the copies in a row that are wanted before one is held again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::doorbell::{self, Register};
use crate::ifc::wqe::{BASIC_BLOCK, SEGMENT, ctrl, sq_doorbell, uar};
use crate::objects::device::Device;

/// Bytes of a buffer, which bound a WQE that can be copied.
const BUFFER: usize = uar::SQ_STRIDE as usize;

/// The driver's self-test writes 256 copies and looks at the last: a quarter of that is enough for whatever precedes them.
const MOST_IN_VAIN: u32 = 6;

/// A WQE that came by a UAR page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copied {
    /// Index of its first basic block.
    pub index: u16,
    /// Its basic blocks.
    pub bytes: Vec<u8>,
}

/// A copy that has begun.
#[derive(Debug)]
struct Open {
    /// Offset of its buffer in the page.
    buffer: u64,
    bytes: Vec<u8>,
    /// Bytes when it is whole.
    whole: usize,
    /// More than the doorbell has come.
    continued: bool,
    /// Its doorbell was held in vain, it seems; the copies before it.
    expired: Option<u32>,
    /// Its doorbell is held until then.
    until: Option<Instant>,
}

#[derive(Debug, Default)]
struct Page {
    /// The last doorbells were the heads of copies: so many.
    copies: u32,
    /// Doubled so many times is the number of copies in a row that a doorbell is held after.
    in_vain: u32,
    open: Option<Open>,
}

impl Page {
    /// Whether the next doorbell is likely to be a copy's head.
    fn expects_a_copy(&self) -> bool {
        self.copies >= 1 << self.in_vain.min(MOST_IN_VAIN)
    }
}

/// What is being written to UAR pages.
#[derive(Debug)]
pub struct Copies {
    /// How long the next part of a copy is waited for. It is the processor that is waited for, between two stores, and QEMU's
    /// may have been put aside: on a host with three threads for each core 5 ms for the whole of a copy were too short for
    /// most.
    pub patience: Duration,
    pages: BTreeMap<u32, Page>,
    /// Pages where a doorbell is held.
    held: BTreeSet<u32>,
}

impl Default for Copies {
    fn default() -> Self {
        Self {
            patience: Duration::from_millis(50),
            pages: BTreeMap::new(),
            held: BTreeSet::new(),
        }
    }
}

impl Copies {
    /// Forgets a page.
    pub fn forget(&mut self, page: u32) {
        self.pages.remove(&page);
        self.held.remove(&page);
    }
}

/// Bytes of a copy with this head.
fn whole(head: &[u8]) -> usize {
    let len = ctrl::ds.get(head) as usize * SEGMENT;
    len.next_multiple_of(BASIC_BLOCK).clamp(BASIC_BLOCK, BUFFER)
}

/// A write to a page. `true` if it belongs to a copy and is dealt with; else what was being copied is over.
pub(super) fn continues(device: &mut Device, page: u32, offset: u64, value: &[u8]) -> bool {
    let Some(state) = device.copies.pages.get_mut(&page) else {
        return false;
    };
    let Some(open) = &mut state.open else {
        return false;
    };
    let next = open.buffer + open.bytes.len() as u64;
    if offset != next || open.bytes.len() + value.len() > open.whole {
        settle(device, page);
        return false;
    }
    if !std::mem::replace(&mut open.continued, true) {
        if let Some(before) = open.expired.take() {
            // Late, but a copy after all.
            state.copies = before;
            state.in_vain = state.in_vain.saturating_sub(1);
        }
        state.copies = state.copies.saturating_add(1);
    }
    open.bytes.extend_from_slice(value);
    if let Some(until) = open.until {
        let later = Instant::now() + device.copies.patience;
        open.until = Some(later);
        let qpn = sq_doorbell::qpn.get32(&open.bytes);
        device.timers.add(later, qpn, Some(until));
    }
    if open.bytes.len() == open.whole {
        let (until, bytes) = (open.until, std::mem::take(&mut open.bytes));
        state.open = None;
        if let Some(until) = until {
            release(device, page, until, &bytes);
            take(device, page, bytes);
        }
    }
    true
}

/// A doorbell at the start of a buffer, which may be the head of a copy. `value` is all that was written at once.
pub(super) fn rung(device: &mut Device, page: u32, buffer: u64, head: &[u8; 8], value: &[u8]) {
    if !device.caps.blueflame() {
        return doorbell::send_queue(device, page, head, Register::WithRecord);
    }
    let whole = whole(head);
    if let Some(copy) = value.get(..whole) {
        return take(device, page, copy.to_vec());
    }
    let qpn = sq_doorbell::qpn.get32(head);
    let patience = device.copies.patience;
    let state = device.copies.pages.entry(page).or_default();
    let until = (state.expects_a_copy() && device.qps.get(qpn).is_some())
        .then(|| Instant::now() + patience);
    state.open = Some(Open {
        buffer,
        bytes: if value.len() > head.len() {
            value
        } else {
            head
        }
        .to_vec(),
        whole,
        continued: false,
        expired: None,
        until,
    });
    match until {
        None => doorbell::send_queue(device, page, head, Register::WithRecord),
        Some(until) => {
            device.copies.held.insert(page);
            device.timers.add(until, qpn, None);
        }
    }
}

/// A doorbell is held no longer, so that no timer need look at it.
fn release(device: &mut Device, page: u32, until: Instant, head: &[u8]) {
    device.copies.held.remove(&page);
    device.timers.remove(until, sq_doorbell::qpn.get32(head));
}

/// Takes a WQE from a copy.
fn take(device: &mut Device, page: u32, bytes: Vec<u8>) {
    let Some(head) = bytes.first_chunk::<8>().copied() else {
        return;
    };
    let qp = device.qps.get_mut(sq_doorbell::qpn.get32(&head));
    if let Some(qp) = qp.filter(|qp| qp.decoded.uar_page == page) {
        let index = sq_doorbell::wqe_index.get(&head) as u16;
        qp.requester.copied = Some(Copied { index, bytes });
    }
    doorbell::send_queue(device, page, &head, Register::Copy);
}

/// Ends what is being copied on a page: a doorbell that was held rings, and its WQE comes from memory.
fn settle(device: &mut Device, page: u32) {
    device.copies.held.remove(&page);
    let Some(state) = device.copies.pages.get_mut(&page) else {
        return;
    };
    let Some(open) = state.open.take() else {
        return;
    };
    // It was a doorbell and nothing else, or its writes were not combined.
    state.copies = 0;
    if let (Some(until), Some(head)) = (open.until, open.bytes.first_chunk::<8>()) {
        if !open.continued {
            state.in_vain = state.in_vain.saturating_add(1);
        }
        release(device, page, until, head);
        doorbell::send_queue(device, page, head, Register::WithRecord);
    }
}

/// Rings every doorbell that is held: a command must find what was rung before it.
pub fn settle_all(device: &mut Device) {
    while let Some(page) = device.copies.held.first().copied() {
        settle(device, page);
    }
}

/// Rings what has been held for long enough. What comes of a copy after that is for nothing, but shows that it was one.
pub fn expire(device: &mut Device, now: Instant) {
    let pages: Vec<u32> = device.copies.held.iter().copied().collect();
    for page in pages {
        let state = device.copies.pages.get_mut(&page);
        let Some((state, mut open)) = state.and_then(|s| s.open.take().map(|open| (s, open)))
        else {
            device.copies.held.remove(&page);
            continue;
        };
        let until = open.until.filter(|until| *until <= now);
        let head = open.bytes.first_chunk::<8>().copied();
        if until.is_some() {
            open.until = None;
            if !open.continued {
                open.expired = Some(state.copies);
                state.copies = 0;
                state.in_vain = state.in_vain.saturating_add(1);
            }
        }
        state.open = Some(open);
        if let (Some(until), Some(head)) = (until, head) {
            release(device, page, until, &head);
            doorbell::send_queue(device, page, &head, Register::WithRecord);
        }
    }
}
