// SPDX-License-Identifier: MIT OR Apache-2.0
//! The receive queue of a QP as the proxy's thread sees it.

use super::{
    cqe::Cqe,
    queue::{BATCH, Phase, Refusal, Ring, Verbs},
    wqe::{self, Data, Fault},
};
use ibgda_device::{abi::IBGDA_CQE_RESP_ERR, proxy_fault as vendor};

/// The receive queue.
#[derive(Debug)]
pub(super) struct Receiver {
    ring: Ring,
    next: u64,
    /// Those that are posted are before `next`, from here on.
    first: u64,
    /// What is wrong with slot `next`, which comes after those that are posted.
    fault: Option<Fault>,
    /// The record makes no sense: it is not looked at any more.
    lost: bool,
}

impl Receiver {
    pub(super) fn new(ring: Ring) -> Self {
        Self {
            ring,
            next: 0,
            first: 0,
            fault: None,
            lost: false,
        }
    }

    pub(super) fn look(&mut self, verbs: &impl Verbs) -> bool {
        let posted = self.post(verbs);
        let completed = self.take_completions(verbs);
        self.tell_fault(verbs) || posted || completed
    }

    fn post(&mut self, verbs: &impl Verbs) -> bool {
        if self.fault.is_some() || self.lost {
            return false;
        }
        let open = (self.next - self.first) as usize;
        let told = match self.ring.told(self.next, self.ring.depth as usize - open) {
            Ok(told) => told.min(BATCH),
            Err(()) => {
                (self.fault, self.lost) = (Some(Fault::local(vendor::OVERRUN)), true);
                return true;
            }
        };
        if told == 0 {
            return false;
        }
        if verbs.phase() == Phase::Error {
            self.fault = Some(Fault::FLUSHED);
            return true;
        }
        let mut batch = Vec::with_capacity(told);
        for index in (self.next..).take(told) {
            match wqe::decode_receive(&self.ring.slot(index)) {
                Ok(data) => batch.push((index, data)),
                Err(fault) => {
                    self.fault = Some(fault);
                    break;
                }
            }
        }
        let taken = match post(verbs, &batch) {
            Ok(()) => batch.len(),
            Err(Refusal::Full(taken)) if open + taken > 0 => {
                self.fault = None;
                taken
            }
            Err(Refusal::Full(taken) | Refusal::Refused(taken)) => {
                self.fault = Some(Fault::local(vendor::POST));
                taken
            }
        };
        self.next += taken as u64;
        taken > 0 || self.fault.is_some()
    }

    fn take_completions(&mut self, verbs: &impl Verbs) -> bool {
        let mut found = false;
        while self.first < self.next && self.ring.cq.has_room() {
            // One at a time: what is taken has a place.
            let Some(done) = verbs.poll_recv() else {
                break;
            };
            // In order; a completion of another is none of ours.
            if done.index != self.first {
                continue;
            }
            self.ring.cq.write(&Cqe {
                kind: match done.fault {
                    None => done.kind,
                    Some(_) => IBGDA_CQE_RESP_ERR as u8,
                },
                opcode: 0,
                index: done.index,
                bytes: done.bytes,
                immediate: done.immediate,
                fault: done.fault,
            });
            self.first += 1;
            found = true;
            if done.fault.is_some() {
                verbs.stop();
            }
        }
        found
    }

    /// A refused receive's turn comes when no other is before it.
    fn tell_fault(&mut self, verbs: &impl Verbs) -> bool {
        let Some(fault) = self.fault else {
            return false;
        };
        if self.first < self.next || !self.ring.cq.has_room() {
            return false;
        }
        self.ring.cq.write(&Cqe {
            kind: IBGDA_CQE_RESP_ERR as u8,
            index: self.first,
            fault: Some(fault),
            ..Cqe::default()
        });
        verbs.stop();
        // What comes after it is flushed, when a kernel tells of more.
        (self.first, self.next, self.fault) = (self.first + 1, self.next + 1, None);
        true
    }
}

fn post(verbs: &impl Verbs, batch: &[(u64, Data)]) -> Result<(), Refusal> {
    match batch {
        [] => Ok(()),
        batch => verbs.post_recv(batch),
    }
}
