// SPDX-License-Identifier: MIT OR Apache-2.0
//! MSI-X vectors, each an eventfd that the host gave, with the masks and pending bits of the PCI Express Base
//! Specification 6.0, 6.1.4.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::platform::Interrupts;

/// A function's vectors.
#[derive(Debug)]
pub struct Vectors {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    vectors: Vec<Vector>,
    /// Function Mask of Message Control: masks all of them.
    function_mask: bool,
}

#[derive(Debug, Default)]
struct Vector {
    eventfd: Option<File>,
    /// Its mask bit, which a host that emulates the table sets by SET_IRQS.
    masked: bool,
    /// Raised while it was masked.
    pending: bool,
}

impl Vector {
    fn signal(&self) {
        if let Some(eventfd) = &self.eventfd {
            // An eventfd that cannot take more is one whose reader has yet to see what it holds.
            let _ = (&mut &*eventfd).write(&1u64.to_ne_bytes());
        }
    }
}

impl State {
    /// Sends what became pending under a mask that is gone.
    fn deliver(&mut self) {
        if self.function_mask {
            return;
        }
        for vector in &mut self.vectors {
            if !vector.masked && std::mem::take(&mut vector.pending) {
                vector.signal();
            }
        }
    }
}

impl Vectors {
    /// `count` vectors without eventfds.
    pub fn new(count: u16) -> Self {
        Self {
            state: Mutex::new(State {
                vectors: (0..count).map(|_| Vector::default()).collect(),
                function_mask: false,
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects or disconnects one vector; false when there is no such vector.
    pub fn assign(&self, vector: usize, eventfd: Option<File>) -> std::io::Result<bool> {
        if let Some(file) = &eventfd {
            // The device must never wait for its host to take an interrupt.
            let flags = OFlag::from_bits_retain(fcntl(file.as_fd(), FcntlArg::F_GETFL)?);
            fcntl(file.as_fd(), FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        }
        let mut state = self.state();
        let slot = state.vectors.get_mut(vector);
        Ok(slot.map(|slot| slot.eventfd = eventfd).is_some())
    }

    /// Masks or unmasks one vector; what came meanwhile is delivered, once.
    pub fn mask(&self, vector: usize, masked: bool) {
        let mut state = self.state();
        if let Some(vector) = state.vectors.get_mut(vector) {
            vector.masked = masked;
        }
        state.deliver();
    }

    /// Masks or unmasks all of them, whatever their own masks are.
    pub fn mask_function(&self, masked: bool) {
        let mut state = self.state();
        state.function_mask = masked;
        state.deliver();
    }

    /// The pending bits, the first vector in bit 0 of the first byte.
    pub fn pending(&self) -> Vec<u8> {
        let state = self.state();
        let quadwords = state.vectors.len().div_ceil(64);
        let mut bits = vec![0; quadwords * 8];
        for (i, _) in (state.vectors.iter().enumerate()).filter(|(_, vector)| vector.pending) {
            bits[i / 8] |= 1 << (i % 8);
        }
        bits
    }

    /// Forgets what is pending and the function's mask, as a reset of the function does; the host's eventfds and masks
    /// stay, since it restores the table without a word to us.
    pub fn reset(&self) {
        let mut state = self.state();
        state.function_mask = false;
        for vector in &mut state.vectors {
            vector.pending = false;
        }
    }

    /// Disconnects every vector.
    pub fn clear(&self) {
        let mut state = self.state();
        state.function_mask = false;
        for vector in &mut state.vectors {
            *vector = Vector::default();
        }
    }
}

impl Interrupts for Vectors {
    fn raise(&self, vector: u16) {
        let mut state = self.state();
        let function_mask = state.function_mask;
        if let Some(vector) = state.vectors.get_mut(usize::from(vector)) {
            match function_mask || vector.masked {
                true => vector.pending = true,
                false => vector.signal(),
            }
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

    #[test]
    fn masks_hold_interrupts_back_and_lose_none() {
        let vectors = Vectors::new(16);
        let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap();
        let file = File::from(event.as_fd().try_clone_to_owned().unwrap());
        vectors.assign(9, Some(file)).unwrap();
        vectors.mask(9, true);
        for _ in 0..3 {
            vectors.raise(9);
        }
        assert!(event.read().is_err(), "masked");
        assert_eq!(vectors.pending(), [0, 2, 0, 0, 0, 0, 0, 0]);
        vectors.mask(9, false);
        assert_eq!(event.read().unwrap(), 1, "one bit, one message");
        assert_eq!(vectors.pending(), [0; 8]);
        // Either mask is enough.
        vectors.mask_function(true);
        vectors.raise(9);
        vectors.mask(9, true);
        vectors.mask_function(false);
        assert!(event.read().is_err());
        vectors.mask(9, false);
        assert_eq!(event.read().unwrap(), 1);
        // A reset forgets.
        vectors.mask_function(true);
        vectors.raise(9);
        vectors.reset();
        assert_eq!(vectors.pending(), [0; 8]);
        assert!(event.read().is_err());
        vectors.raise(9);
        assert_eq!(event.read().unwrap(), 1);
        vectors.mask(200, true);
        assert_eq!(Vectors::new(65).pending().len(), 16);
    }
}
