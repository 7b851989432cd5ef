// SPDX-License-Identifier: MIT OR Apache-2.0
//! The event queue of a function and the driver's side of it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::memory::Memory;
use crate::engine::event;
use crate::ifc::event::{eqe, kind};
use crate::objects::device::Device;
use crate::platform::Interrupts;

/// Log2 of the entries of the queue.
pub(super) const LOG_SIZE: u32 = 10;
/// Events kept for those who ask; of more, the oldest are dropped.
const KEPT: usize = 1 << 16;

/// What a function tells by interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// An armed CQ has something.
    Completion {
        /// Its number.
        cqn: u32,
    },
    /// A CQ has failed and takes no more completions.
    CqError {
        /// Its number.
        cqn: u32,
        /// `ifc::event::cq_error`.
        syndrome: u8,
    },
    /// Something happened to a QP or SRQ.
    Queue {
        /// `ifc::event::kind`.
        kind: u8,
        /// Number of the QP or SRQ.
        number: u32,
    },
    /// The port went up or down.
    Port {
        /// `ifc::event::port_change`.
        change: u8,
    },
    /// Another, by its type.
    Other {
        /// `ifc::event::kind`.
        kind: u8,
    },
}

impl Event {
    fn decode(entry: &[u8]) -> Self {
        let number = eqe::queue_number.get32(entry);
        match eqe::event_type.get(entry) as u8 {
            kind::COMPLETION => Self::Completion {
                cqn: eqe::comp_cqn.get32(entry),
            },
            kind::CQ_ERROR => Self::CqError {
                cqn: eqe::cq_err_cqn.get32(entry),
                syndrome: eqe::cq_err_syndrome.get(entry) as u8,
            },
            kind::PORT_CHANGE => Self::Port {
                change: eqe::event_sub_type.get(entry) as u8,
            },
            kind @ (kind::COMM_EST
            | kind::SQ_DRAINED
            | kind::WQ_CATAS_ERROR
            | kind::WQ_INVAL_REQ_ERROR
            | kind::WQ_ACCESS_ERROR
            | kind::SRQ_CATAS_ERROR
            | kind::SRQ_LAST_WQE
            | kind::SRQ_RQ_LIMIT) => Self::Queue { kind, number },
            kind => Self::Other { kind },
        }
    }
}

/// The queue as its reader sees it.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) number: u32,
    pub(super) ring: Memory,
    consumer: u32,
}

impl Queue {
    /// A queue whose entries are all the device's.
    pub(super) fn ring(ring: Memory) -> Memory {
        for slot in 0..1 << LOG_SIZE {
            ring.write(slot * eqe::SIZE + eqe::SIZE - 1, &[1]);
        }
        ring
    }

    pub(super) fn new(number: u32, ring: Memory) -> Self {
        Self {
            number,
            ring,
            consumer: 0,
        }
    }

    fn next(&mut self) -> Option<Event> {
        let slot = self.consumer as usize & ((1 << LOG_SIZE) - 1);
        let mut entry = [0; eqe::SIZE];
        self.ring.read(slot * eqe::SIZE, &mut entry);
        if eqe::owner.get32(&entry) != (self.consumer >> LOG_SIZE) & 1 {
            return None;
        }
        self.consumer = self.consumer.wrapping_add(1);
        Some(Event::decode(&entry))
    }
}

/// Interrupts and events of one function.
#[derive(Debug, Default)]
pub(super) struct Events {
    raised: AtomicBool,
    queue: Mutex<Option<Queue>>,
    waiting: Mutex<VecDeque<Event>>,
    arrived: Condvar,
}

impl Interrupts for Events {
    fn raise(&self, _: u16) {
        self.raised.store(true, Ordering::Release);
    }
}

impl Events {
    /// Whether the queue is to be read.
    pub(super) fn raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }

    /// Reads a new queue from now on, or none.
    pub(super) fn attach(&self, device: &mut Device, queue: Option<Queue>) {
        if let Some(queue) = &queue {
            event::consumed(device, queue.number, 0, true);
        }
        *self.queue.lock().unwrap_or_else(PoisonError::into_inner) = queue;
    }

    /// Takes what has come and arms the queue again.
    pub(super) fn take(&self, device: &mut Device) {
        self.raised.store(false, Ordering::Release);
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(queue) = &mut *queue else { return };
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(event) = queue.next() {
            if waiting.len() == KEPT {
                waiting.pop_front();
            }
            waiting.push_back(event);
        }
        event::consumed(device, queue.number, queue.consumer & 0xff_ffff, true);
        self.arrived.notify_all();
    }

    /// The oldest event that nobody has taken; waits for one, for at most `patience`.
    pub(super) fn next(&self, patience: Duration) -> Option<Event> {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut waiting, _) = self
            .arrived
            .wait_timeout_while(waiting, patience, |waiting| waiting.is_empty())
            .unwrap_or_else(PoisonError::into_inner);
        waiting.pop_front()
    }
}
