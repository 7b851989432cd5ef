// SPDX-License-Identifier: GPL-2.0

//! Event records, and the eventfd that tells of them.

use crate::{
    abi::uapi::*,
    decisions::{
        life::Reason,
        ring::Ring, //
    }, //
};
use kernel::{
    bindings,
    error::from_err_ptr,
    prelude::*, //
};

/// Records kept for a process that does not take them.
const CAPACITY: usize = 64;

/// An eventfd's context.
pub(crate) struct EventFd(*mut bindings::eventfd_ctx);

// SAFETY: Contexts are reference counted and signalled from anywhere.
unsafe impl Send for EventFd {}

impl EventFd {
    /// `EBADF`: not a descriptor, or not of an eventfd.
    pub(crate) fn get(fd: i32) -> Result<Self> {
        // SAFETY: No requirements.
        from_err_ptr(unsafe { bindings::eventfd_ctx_fdget(fd) })
            .map(Self)
            .map_err(|_| EBADF)
    }

    fn signal(&self) {
        // SAFETY: We hold a reference.
        unsafe { bindings::eventfd_signal_mask(self.0, 0) };
    }
}

impl Drop for EventFd {
    fn drop(&mut self) {
        // SAFETY: The reference is ours.
        unsafe { bindings::eventfd_ctx_put(self.0) };
    }
}

/// The records of a session.
pub(crate) struct Events {
    records: Ring<ibgda_event, CAPACITY>,
    eventfd: Option<EventFd>,
}

fn record(kind: u32, reason: u32, generation: u32, handle: u32) -> ibgda_event {
    ibgda_event {
        type_: kind,
        reason,
        generation,
        handle,
        // SAFETY: No requirements.
        time_ns: unsafe { bindings::ktime_get() } as u64,
    }
}

impl Events {
    pub(crate) fn new() -> Self {
        Self {
            records: Ring::new(ibgda_event::default()),
            eventfd: None,
        }
    }

    /// Records that something happened, and tells.
    pub(crate) fn push(&mut self, kind: u32, reason: Option<Reason>, generation: u32, handle: u32) {
        self.records.push(record(
            kind,
            reason.map_or(0, |reason| reason as u32),
            generation,
            handle,
        ));
        if let Some(eventfd) = &self.eventfd {
            eventfd.signal();
        }
    }

    /// Takes the oldest record.
    pub(crate) fn take(&mut self) -> Option<ibgda_event> {
        match self.records.take_dropped() {
            0 => self.records.pop(),
            dropped => Some(record(IBGDA_EVENT_OVERFLOW, 0, 0, dropped)),
        }
    }

    /// Puts back what was taken and could not be handed over.
    pub(crate) fn give_back(&mut self, taken: &[ibgda_event]) {
        for record in taken.iter().rev() {
            match record.type_ {
                IBGDA_EVENT_OVERFLOW => self.records.untake_dropped(record.handle),
                _ => self.records.unpop(*record),
            }
        }
    }

    /// Sets whom to tell; gives back the former, to be dropped without a lock.
    pub(crate) fn set_eventfd(&mut self, eventfd: Option<EventFd>) -> Option<EventFd> {
        core::mem::replace(&mut self.eventfd, eventfd)
    }
}
