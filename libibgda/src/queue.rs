// SPDX-License-Identifier: MIT OR Apache-2.0
//! What completion queues and queue pairs have in common.

use crate::error::{Error, Result};
use ibgda_device::abi::IBGDA_MAX_DEPTH;
use std::cell::UnsafeCell;

/// The base-2 logarithm of a queue's depth, which is a power of two from `least` to 32768.
pub(crate) fn depth(what: &str, depth: u32, least: u32) -> Result<u32> {
    if depth.is_power_of_two() && (least..=IBGDA_MAX_DEPTH).contains(&depth) {
        return Ok(depth.ilog2());
    }
    Err(Error::argument(
        format!("{what} of depth {depth}"),
        format!("depths are powers of two from {least} to {IBGDA_MAX_DEPTH}"),
        format!(
            "the next one is {}",
            depth.clamp(least, IBGDA_MAX_DEPTH).next_power_of_two()
        ),
    ))
}

/// A handle at an address that stays, which kernels write to while the host only reads.
#[derive(Debug)]
pub(crate) struct Handle<T>(Box<UnsafeCell<T>>);

// SAFETY: the host touches the contents only through raw pointers, and never where a kernel does: see the users.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

impl<T> Handle<T> {
    pub(crate) fn new(handle: T) -> Self {
        Self(Box::new(UnsafeCell::new(handle)))
    }

    pub(crate) fn as_ptr(&self) -> *mut T {
        self.0.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depths_are_powers_of_two_within_bounds() {
        assert_eq!(depth("CQ", 1, 1).expect("least"), 0);
        assert_eq!(depth("CQ", 32_768, 1).expect("most"), 15);
        for (wrong, next) in [
            (0, "next one is 4"),
            (2, "next one is 4"),
            (17, "next one is 32"),
            (65_536, "next one is 32768"),
        ] {
            let error = depth("receive queue", wrong, 4).expect_err("no depth");
            assert_eq!(error.errno(), libc::EINVAL);
            assert!(error.to_string().contains(next), "{error}");
        }
    }
}
