// SPDX-License-Identifier: MIT OR Apache-2.0
//! A QP as the proxy's thread sees it: what a kernel has told it of goes to the verbs in order, and comes back in order.
//!
//! Requests that the verbs do not have, NOP and DUMP, are complete when all before them are. A request that is refused
//! is held back until all before it are complete, as a NIC comes to it then; behind the first error everything is
//! flushed. Every posted request has a completion of the verbs, so that it is always known how far the QP is; the
//! kernel's CQ gets those that it asked for, and the errors. What finds no room there waits.

use super::{
    cqe::{CqWriter, Cqe},
    wqe::{self, Action, Data, Fault, Request, Slot, opcode},
};
use ibgda_device::{
    abi::{IBGDA_CQE_REQ, IBGDA_CQE_REQ_ERR},
    proxy_fault as vendor,
};
use std::{
    collections::VecDeque,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

/// Requests posted at a look, and completions taken at once: so many that they share the cost of a call, and so few that
/// other QPs get their turn.
pub(super) const BATCH: usize = 32;

/// Why not all was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// So many were, and then the queue was full for a moment.
    Full(usize),
    /// So many were, and then one was refused.
    Refused(usize),
}

/// A completion of the verbs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Done {
    /// Of the request, since the queue's start.
    pub(super) index: u64,
    pub(super) fault: Option<Fault>,
    /// Of a receive: `IBGDA_CQE_RESP_*`, bytes, immediate.
    pub(super) kind: u8,
    pub(super) bytes: u32,
    pub(super) immediate: [u8; 4],
}

/// What may be done to a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Receives may be posted.
    Init,
    /// Requests too.
    Ready,
    /// All is flushed.
    Error,
}

/// The QP of the verbs.
pub(super) trait Verbs {
    fn phase(&self) -> Phase;
    /// Posts requests, with their indices.
    fn post_send(&self, requests: &[(u64, Request)]) -> Result<(), Refusal>;
    fn post_recv(&self, receives: &[(u64, Data)]) -> Result<(), Refusal>;
    /// Takes completions of requests, how many there were; or one of a receive.
    fn poll_send(&self, done: &mut [Done; BATCH]) -> usize;
    fn poll_recv(&self) -> Option<Done>;
    /// Flushes all that is posted.
    fn stop(&self);
    /// Whether a flush of this memory is none, since it is the host's and the key covers it.
    fn check_flush(&self, data: &Data) -> Result<(), Fault>;
}

/// Where a work queue and what belongs to it lie.
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) slots: *const u8,
    pub(super) depth: u32,
    /// Big-endian, 16 bits: one past the last slot that was written.
    pub(super) record: *const AtomicU32,
    pub(super) cq: CqWriter,
}

// SAFETY: the memory is valid as long as the QP is (see the users), and written by kernels only.
unsafe impl Send for Ring {}

impl Ring {
    /// Slots told of, behind `next`; `Err`: more than there can be, with `free` of them free.
    pub(super) fn told(&self, next: u64, free: usize) -> Result<usize, ()> {
        // SAFETY: the record is valid as long as the ring. What was written before it is known after this.
        let record = u32::from_be(unsafe { &*self.record }.load(Ordering::Acquire)) as u16;
        let told = record.wrapping_sub(next as u16).into();
        if told <= free { Ok(told) } else { Err(()) }
    }

    pub(super) fn slot<const BYTES: usize>(&self, index: u64) -> [u8; BYTES] {
        let at = (index & u64::from(self.depth - 1)) as usize * BYTES;
        // SAFETY: inside the ring. The poster has written the slot, and does not until its completion.
        unsafe { self.slots.add(at).cast::<[u8; BYTES]>().read_volatile() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Posted.
    Open,
    Succeeded,
    /// Nothing to do but to wait for its turn.
    Local,
    Failed(Fault),
}

#[derive(Debug)]
struct Entry {
    opcode: u8,
    wants_cqe: bool,
    fetches: u32,
    fate: Fate,
}

impl Entry {
    fn failed(opcode: u8, fault: Fault) -> Self {
        Self {
            opcode,
            wants_cqe: true,
            fetches: 0,
            fate: Fate::Failed(fault),
        }
    }
}

/// The send queue.
#[derive(Debug)]
pub(super) struct Sender {
    ring: Ring,
    /// The doorbell's word.
    word: *const AtomicU64,
    qpn: u32,
    /// The next slot to look at.
    next: u64,
    /// Those before it that are not told as complete, the oldest first.
    entries: VecDeque<Entry>,
    posted: usize,
    /// A doorbell was taken, and not all slots behind it.
    rung: bool,
    /// A fence stood at a request that is not posted: the next one gets it.
    fence: bool,
    /// A request has failed: no more are posted.
    broken: bool,
    /// Its error has been told: what comes is flushed.
    told_error: bool,
}

// SAFETY: as for `Ring`.
unsafe impl Send for Sender {}

impl Sender {
    /// # Safety
    /// The ring and the word, aligned, are valid as long as the sender is used.
    pub(super) unsafe fn new(ring: Ring, word: *const AtomicU64, qpn: u32) -> Self {
        Self {
            entries: VecDeque::with_capacity(ring.depth as usize),
            ring,
            word,
            qpn,
            next: 0,
            posted: 0,
            rung: false,
            fence: false,
            broken: false,
            told_error: false,
        }
    }

    /// Posts what a kernel has told of, and tells it what has completed. Whether there was anything.
    pub(super) fn look(&mut self, verbs: &impl Verbs) -> bool {
        // SAFETY: by the contract of `new`.
        let word = unsafe { &*self.word };
        // Most looks find nothing, and leave the line of the cache shared. Taken out, one that equals it is seen too.
        if word.load(Ordering::Relaxed) != 0 {
            word.swap(0, Ordering::AcqRel);
            self.rung = true;
        }
        let fetched = self.rung && verbs.phase() != Phase::Init && self.fetch(verbs);
        let completed = self.take_completions(verbs);
        let told = self.tell(verbs);
        fetched || completed || told
    }

    /// Looks at the slots behind the record. Whether there were some.
    fn fetch(&mut self, verbs: &impl Verbs) -> bool {
        // More than is there, after a kernel that told too many: none.
        let room = (self.ring.depth as usize).saturating_sub(self.entries.len());
        let told = match self.ring.told(self.next, room) {
            Ok(told) => told,
            Err(()) if self.broken => 0,
            Err(()) => {
                self.push(Entry::failed(opcode::NOP, Fault::local(vendor::OVERRUN)));
                0
            }
        };
        self.rung = told > BATCH;
        let mut batch = Vec::with_capacity(BATCH);
        for _ in 0..told.min(BATCH) {
            self.take_slot(verbs, &mut batch);
        }
        match post(verbs, &batch) {
            Ok(()) => {}
            // It has room when something has completed; a full queue that is empty never will.
            Err(Refusal::Full(posted)) if self.posted > batch.len() - posted => {
                self.undo(batch[posted].0);
                self.rung = true;
            }
            Err(Refusal::Full(posted) | Refusal::Refused(posted)) => {
                self.refuse(batch[posted].0);
            }
        }
        told > 0
    }

    /// Decodes the next slot.
    fn take_slot(&mut self, verbs: &impl Verbs, batch: &mut Vec<(u64, Request)>) {
        let slot: Slot = self.ring.slot(self.next);
        if self.broken || verbs.phase() == Phase::Error {
            return self.push(Entry::failed(slot[3], Fault::FLUSHED));
        }
        let decoded =
            wqe::decode(&slot, self.next, self.qpn).and_then(|request| match &request.action {
                Action::Flush(data) => verbs.check_flush(data).map(|()| request),
                _ => Ok(request),
            });
        let mut request = match decoded {
            Ok(request) => request,
            Err(fault) => return self.push(Entry::failed(slot[3], fault)),
        };
        let local = matches!(request.action, Action::Nop | Action::Flush(_));
        self.fence |= request.fenced;
        if !local {
            request.fenced = std::mem::take(&mut self.fence);
            batch.push((self.next, request));
        }
        self.push(Entry {
            opcode: request.opcode,
            wants_cqe: request.wants_cqe,
            fetches: request.fetches(),
            fate: if local { Fate::Local } else { Fate::Open },
        });
    }

    fn push(&mut self, entry: Entry) {
        match entry.fate {
            Fate::Open => self.posted += 1,
            Fate::Failed(_) => self.broken = true,
            Fate::Succeeded | Fate::Local => {}
        }
        self.entries.push_back(entry);
        self.next += 1;
    }

    fn first(&self) -> u64 {
        self.next - self.entries.len() as u64
    }

    /// Forgets the slots from `index` on, which were not posted: they are looked at again. What they fence too.
    fn undo(&mut self, index: u64) {
        let first = (index - self.first()) as usize;
        let open = |entry: &Entry| entry.fate == Fate::Open;
        self.posted -= self.entries.drain(first..).filter(open).count();
        self.next = index;
        // A refused one may have been among them; nothing was posted behind one before.
        self.broken = false;
        // Whether the first of them had a fence from before is not known any more; one too many only waits.
        self.fence = true;
    }

    /// The request of `index` was refused by the verbs, and those behind it are not posted either.
    fn refuse(&mut self, index: u64) {
        let first = (index - self.first()) as usize;
        for (at, entry) in self.entries.iter_mut().enumerate().skip(first) {
            self.posted -= usize::from(entry.fate == Fate::Open);
            entry.fate = Fate::Failed(match at == first {
                true => Fault::local(vendor::POST),
                false => Fault::FLUSHED,
            });
        }
        self.broken = true;
    }

    fn take_completions(&mut self, verbs: &impl Verbs) -> bool {
        let mut found = false;
        while self.posted > 0 {
            let mut done = [Done::default(); BATCH];
            let count = verbs.poll_send(&mut done);
            for done in &done[..count] {
                let first = self.first();
                let entry = done.index.checked_sub(first);
                let entry = entry.and_then(|at| self.entries.get_mut(at as usize));
                // The verbs complete what was posted, once.
                if let Some(entry) = entry.filter(|entry| entry.fate == Fate::Open) {
                    self.posted -= 1;
                    entry.fate = done.fault.map_or(Fate::Succeeded, Fate::Failed);
                    self.broken |= done.fault.is_some();
                }
            }
            found |= count > 0;
            if count < BATCH {
                break;
            }
        }
        found
    }

    /// Tells the kernel of the oldest requests, as far as they are complete and its CQ has room.
    fn tell(&mut self, verbs: &impl Verbs) -> bool {
        let mut found = false;
        while let Some(entry) = self.entries.front() {
            let fault = match entry.fate {
                Fate::Open => break,
                Fate::Succeeded => None,
                Fate::Local if self.told_error => Some(Fault::FLUSHED),
                Fate::Local => None,
                Fate::Failed(fault) => Some(fault),
            };
            let cqe = Cqe {
                kind: match fault {
                    None => IBGDA_CQE_REQ as u8,
                    Some(_) => IBGDA_CQE_REQ_ERR as u8,
                },
                opcode: entry.opcode,
                index: self.first(),
                bytes: entry.fetches,
                immediate: [0; 4],
                fault,
            };
            if entry.wants_cqe || fault.is_some() {
                if !self.ring.cq.has_room() {
                    break;
                }
                self.ring.cq.write(&cqe);
            }
            if fault.is_some() && !std::mem::replace(&mut self.told_error, true) {
                // Of what the verbs know nothing of, they flush nothing.
                verbs.stop();
            }
            self.entries.pop_front();
            found = true;
        }
        found
    }
}

/// Nothing is posted by a call.
fn post(verbs: &impl Verbs, batch: &[(u64, Request)]) -> Result<(), Refusal> {
    match batch {
        [] => Ok(()),
        batch => verbs.post_send(batch),
    }
}

#[cfg(test)]
mod tests;
