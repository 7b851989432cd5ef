// SPDX-License-Identifier: MIT OR Apache-2.0
//! Events of the model.

use super::{Device, Model};
use crate::{
    error::Result,
    hub::{Hub, kind},
    worker::lock,
};
use connectx::inproc::Event;
use std::{fmt, sync::Arc, time::Duration};

/// Who takes the events of a NIC.
pub(crate) struct Listener {
    model: Arc<Model>,
    index: usize,
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listener(loopback{})", self.index)
    }
}

/// What events of a queue are known by.
pub(crate) fn event_key(is_cq: bool, number: u32) -> u64 {
    (u64::from(is_cq) << 32) | u64::from(number)
}

impl Listener {
    /// The next event of a queue: its key, type and syndrome; waits for one for at most `patience`.
    pub(crate) fn next(&self, patience: Duration) -> Option<(u64, u8, u8)> {
        match self.model.nic(self.index).next_event(patience)? {
            Event::Completion { cqn } => Some((event_key(true, cqn), kind::COMPLETION, 0)),
            Event::CqError { cqn, syndrome } => {
                Some((event_key(true, cqn), kind::CQ_ERROR, syndrome))
            }
            Event::Queue { kind, number } => Some((event_key(false, number), kind, 0)),
            // Of nobody here.
            Event::Port { .. } | Event::Other { .. } => None,
        }
    }
}

impl Device {
    /// The hub of its NIC, which all contexts share, since the model has one queue of events for each NIC.
    pub(crate) fn hub(&self, start: impl FnOnce(Listener) -> Result<Arc<Hub>>) -> Result<Arc<Hub>> {
        let mut hub = lock(&self.model.hubs[self.index]);
        if let Some(hub) = hub.upgrade() {
            return Ok(hub);
        }
        let listener = Listener {
            model: Arc::clone(&self.model),
            index: self.index,
        };
        // What is there is of queues that had no hub. Their numbers may be used again.
        while self
            .model
            .nic(self.index)
            .next_event(Duration::ZERO)
            .is_some()
        {}
        let new = start(listener)?;
        *hub = Arc::downgrade(&new);
        Ok(new)
    }
}
