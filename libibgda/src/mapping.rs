// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that is mapped in this process and in no child of it.

use crate::worker::Home;
use memmap2::MmapRaw;
use std::mem::ManuallyDrop;

/// A mapping that a fork does not copy: the kernel's of the broker's file, or one that was told so (`MADV_DONTFORK`).
#[derive(Debug)]
pub(crate) struct Mapping {
    map: ManuallyDrop<MmapRaw>,
    home: Home,
}

impl Mapping {
    /// Of a mapping that this process has just made.
    pub(crate) fn new(map: MmapRaw) -> Self {
        Self {
            map: ManuallyDrop::new(map),
            home: Home::here(),
        }
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether it is there: in a forked child it is not.
    pub(crate) fn is_here(&self) -> bool {
        self.home.is_here()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // In a child something else may be mapped there by now.
        if self.is_here() {
            // SAFETY: it is not used any more.
            unsafe { ManuallyDrop::drop(&mut self.map) };
        }
    }
}
