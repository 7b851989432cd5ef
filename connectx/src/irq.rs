// SPDX-License-Identifier: MIT OR Apache-2.0
//! MSI-X vectors, each an eventfd that the host gave.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::{PoisonError, RwLock};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::platform::Interrupts;

/// The eventfds of a function's vectors.
#[derive(Debug)]
pub struct Vectors {
    eventfds: RwLock<Vec<Option<File>>>,
}

impl Vectors {
    /// `count` vectors without eventfds.
    pub fn new(count: u16) -> Self {
        Self {
            eventfds: RwLock::new((0..count).map(|_| None).collect()),
        }
    }

    /// Connects or disconnects one vector; false when there is no such vector.
    pub fn assign(&self, vector: usize, eventfd: Option<File>) -> std::io::Result<bool> {
        if let Some(file) = &eventfd {
            // The device must never wait for its host to take an interrupt.
            let flags = OFlag::from_bits_retain(fcntl(file.as_fd(), FcntlArg::F_GETFL)?);
            fcntl(file.as_fd(), FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        }
        let mut eventfds = self
            .eventfds
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let slot = eventfds.get_mut(vector);
        Ok(slot.map(|slot| *slot = eventfd).is_some())
    }

    /// Disconnects every vector.
    pub fn clear(&self) {
        let mut eventfds = self
            .eventfds
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        eventfds.iter_mut().for_each(|slot| *slot = None);
    }
}

impl Interrupts for Vectors {
    fn raise(&self, vector: u16) {
        let eventfds = self.eventfds.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(Some(eventfd)) = eventfds.get(usize::from(vector)) {
            // An eventfd that cannot take more is one whose reader has yet to see what it holds.
            let _ = (&mut &*eventfd).write(&1u64.to_ne_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::eventfd::{EfdFlags, EventFd};

    #[test]
    fn vectors_reach_their_own_eventfd_and_no_other() {
        let vectors = Vectors::new(2);
        let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap();
        let share = |e: &EventFd| File::from(e.as_fd().try_clone_to_owned().unwrap());
        assert!(vectors.assign(1, Some(share(&event))).unwrap());
        assert!(!vectors.assign(2, Some(share(&event))).unwrap());
        vectors.raise(0);
        vectors.raise(2);
        vectors.raise(u16::MAX);
        assert!(event.read().is_err(), "nothing signalled");
        vectors.raise(1);
        vectors.raise(1);
        assert_eq!(event.read().unwrap(), 2);
        vectors.assign(1, None).unwrap();
        vectors.raise(1);
        assert!(event.read().is_err());
    }

    #[test]
    fn a_full_eventfd_does_not_block() {
        let vectors = Vectors::new(1);
        let event = EventFd::from_value_and_flags(u32::MAX, EfdFlags::empty()).unwrap();
        event.write(u64::MAX - 1 - u64::from(u32::MAX)).unwrap();
        let file = File::from(event.as_fd().try_clone_to_owned().unwrap());
        vectors.assign(0, Some(file)).unwrap();
        vectors.raise(0);
    }
}
