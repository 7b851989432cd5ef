// SPDX-License-Identifier: MIT OR Apache-2.0
//! Page faults: memory that a key covers and that is not there now (on-demand paging, by the memory scheme).
//!
//! The half of a queue pair that needs it waits: the driver is told by an event which range of which key is missing, and
//! says by PAGE_FAULT_RESUME that it has put it there, or that it could not. A sender keeps its WQE and goes on with it;
//! what a READ or atomic has brought is asked for again. A receiver answers that it is not ready, so that the sender comes
//! again, and keeps the receive WQE that it has taken.

use std::collections::{BTreeMap, VecDeque};

use super::completion::{Failure, vendor};
use super::event;
use super::memory::Denied;
use crate::ifc::wqe::syndrome;
use crate::objects::device::Device;
use crate::objects::qp::Qp;

/// Unit in which an event counts, and to which its address is aligned.
const GRANULE: u64 = 4096;
/// Most units that are asked for, and most that are asked for ahead.
const MAX_GRANULES: u64 = 1024;
/// Faults of queue pairs that are gone whose answers are still expected: as many as the driver's queue has events.
const MAX_GONE: usize = 4096;

/// A half of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// The sender, with the WQE that needs the memory.
    Requester {
        /// Number of the flight.
        flight: u64,
    },
    /// The receiver.
    Responder,
}

/// A page fault that the driver has been told of.
#[derive(Debug, Clone, Copy)]
struct Fault {
    qpn: u32,
    half: Half,
    /// Key and address under it.
    place: (u32, u64),
}

/// The page faults of a function: at most one of each half of a queue pair.
#[derive(Debug, Default)]
pub struct PageFaults {
    /// Those that somebody waits for, by token.
    waiting: BTreeMap<u64, Fault>,
    /// Those that nobody waits for any more, and that the driver has not answered.
    gone: VecDeque<u64>,
    /// Newest token. Resets do not start it again: late answers are for nothing then.
    last: u64,
}

impl PageFaults {
    fn add(&mut self, fault: Fault) -> u64 {
        self.last = (self.last + 1) & 0xffff_ffff_ffff;
        self.waiting.insert(self.last, fault);
        self.last
    }

    /// Nobody waits any more: the queue pair is reset, in error or gone.
    pub fn forget(&mut self, qp: &mut Qp) {
        qp.responder.unresolved = None;
        let tokens = [
            qp.requester.page_fault.take(),
            qp.responder.page_fault.take(),
        ];
        for token in tokens.into_iter().flatten() {
            self.waiting.remove(&token);
            if self.gone.len() >= MAX_GONE {
                self.gone.pop_front();
            }
            self.gone.push_back(token);
        }
    }

    /// As a reset of the function leaves it.
    pub fn clear(&mut self) {
        self.waiting.clear();
        self.gone.clear();
    }

    /// Faults that somebody waits for.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

/// Has a half wait for memory that is not there; `ahead` bytes behind it will be needed next. `false` if the access was
/// denied for another reason, if the driver could not provide this memory, or if there is nobody to ask.
pub(super) fn wait(
    device: &mut Device,
    qp: &mut Qp,
    half: Half,
    denied: Denied,
    ahead: u64,
) -> bool {
    let Denied::Absent { key, address, len } = denied else {
        return false;
    };
    let place = (key, address);
    let waiting = match half {
        Half::Requester { .. } => &mut qp.requester.page_fault,
        Half::Responder if qp.responder.unresolved.take() == Some(place) => return false,
        Half::Responder => &mut qp.responder.page_fault,
    };
    if waiting.is_some() {
        return true;
    }
    if !device.caps.memory_page_faults {
        return false;
    }
    let qpn = qp.number;
    let token = device.page_faults.add(Fault { qpn, half, place });
    let pages = |bytes: u64| bytes.div_ceil(GRANULE).min(MAX_GRANULES);
    let demand = event::Demand {
        token,
        key,
        address: address & !(GRANULE - 1),
        pages: pages(address % GRANULE + len),
        after: pages(ahead),
    };
    if !event::page_fault(device, demand) {
        device.page_faults.waiting.remove(&token);
        return false;
    }
    *waiting = Some(token);
    device.counters.page_faults += 1;
    true
}

/// The driver has dealt with a page fault. `false` if there is none with this token.
pub fn resume(device: &mut Device, token: u64, error: bool) -> bool {
    let Some(fault) = device.page_faults.waiting.remove(&token) else {
        let gone = &mut device.page_faults.gone;
        let before = gone.len();
        gone.retain(|other| *other != token);
        return gone.len() < before;
    };
    if error {
        let (key, address) = fault.place;
        let object = format!("mkey {key:#x} for qp {:#x}", fault.qpn);
        let rule = "the driver can provide the memory behind a key";
        device.refuse(object, "address", address, rule, "PRM PAGE_FAULT_RESUME");
    }
    let Some(qp) = device.qps.get_mut(fault.qpn) else {
        return true;
    };
    match fault.half {
        Half::Requester { flight } => {
            qp.requester.page_fault = None;
            if error {
                let failure = Failure::new(syndrome::LOCAL_PROT, vendor::LOCAL_BOUNDS);
                qp.requester.fail(flight, failure);
            }
            qp.requester.rewind();
        }
        Half::Responder => {
            qp.responder.page_fault = None;
            qp.responder.unresolved = error.then_some(fault.place);
        }
    }
    device.schedule(fault.qpn);
    true
}
