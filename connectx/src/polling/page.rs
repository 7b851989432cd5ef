// SPDX-License-Identifier: MIT OR Apache-2.0
//! A doorbell page that is plain memory. Nothing traps a store to it: a thread looks.
//!
//! A register that is found written is taken with an atomic exchange against 0, which no doorbell is (every doorbell
//! names a queue, and no queue has the number 0), so that none is missed or seen twice, not even two of the same value.
//! What cannot be seen is a doorbell that another overwrote in between; see [`Page::queue_pairs`].

use std::any::Any;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::ifc::wqe::uar;

/// A register of a page that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ring {
    pub(crate) offset: u64,
    /// The bytes in the order of memory.
    pub(crate) value: [u8; 8],
}

/// A page that is looked at.
#[derive(Debug)]
pub(crate) struct Page {
    /// Function, by its place in the fabric.
    pub(crate) nic: usize,
    /// Number of the page.
    pub(crate) number: u32,
    /// First byte.
    base: *mut u8,
    /// Queue pairs with this page. Two that share a register can ring between two looks, and then only the last doorbell is
    /// there; a doorbell record is never lost, so after each doorbell those of all of them are read. Of a function that has
    /// none listed here the function's own tables say which they are.
    pub(crate) queue_pairs: Vec<u32>,
    /// When it was last looked at, by a clock of who looks.
    pub(crate) looked: Cell<u64>,
    /// What it lies in, if that is ours to keep.
    pub(crate) memory: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: the pointer is only used for atomic accesses, to memory that by the contract of `Page::new` is mapped.
unsafe impl Send for Page {}

/// Its registers, but for those of event queues, which are not rung by memory: only the driver has event queues, and its
/// pages are trapped, or it is in this process too.
const REGISTERS: [u64; 2 + SEND] = {
    let mut registers = [uar::CQ; 2 + SEND];
    registers[1] = uar::SQ_DBR_LESS;
    let mut i = 0;
    while i < SEND {
        registers[2 + i] = uar::SQ + i as u64 * uar::SQ_STRIDE;
        i += 1;
    }
    registers
};
const SEND: usize = ((uar::SQ_END - uar::SQ) / uar::SQ_STRIDE) as usize;

impl Page {
    /// A page at `base`.
    ///
    /// # Safety
    /// `base` is aligned to a page, and the page is mapped for reading and writing as long as the `Page` lives.
    pub(crate) unsafe fn new(nic: usize, number: u32, base: *mut u8) -> Self {
        Self {
            nic,
            number,
            base,
            queue_pairs: Vec::new(),
            looked: Cell::new(0),
            memory: None,
        }
    }

    #[inline]
    fn quad(&self, offset: u64) -> &AtomicU64 {
        debug_assert!(offset % 8 == 0 && offset < uar::PAGE);
        // SAFETY: aligned and within the page, by the contract of `new`; atomics bear any sharing.
        unsafe { &*self.base.add(offset as usize).cast::<AtomicU64>() }
    }

    /// Takes what was written to the page's registers. Returns whether there was anything.
    #[inline]
    pub(crate) fn take(&self, mut rung: impl FnMut(Ring)) -> bool {
        let mut any = false;
        for offset in REGISTERS {
            // The second word names the queue. Without it only half of a doorbell of two 4-byte stores is there.
            if !whole(self.quad(offset).load(Ordering::Relaxed)) {
                continue;
            }
            // Acquire: what the doorbell announces is read after it.
            let value = self.quad(offset).swap(0, Ordering::AcqRel).to_ne_bytes();
            rung(Ring { offset, value });
            any = true;
        }
        any
    }
}

/// Whether both words of a doorbell are there.
#[inline]
fn whole(value: u64) -> bool {
    value.to_ne_bytes()[4..] != [0; 4]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::SharedMemory;

    fn taken(page: &Page) -> Vec<(u64, [u8; 8])> {
        let mut list = vec![];
        page.take(|ring| list.push((ring.offset, ring.value)));
        list
    }

    #[test]
    fn every_register_is_taken_once_and_only_when_whole() {
        let memory = SharedMemory::new("page", 4096).unwrap();
        // SAFETY: `memory` outlives the page.
        let page = unsafe { Page::new(0, 1, memory.as_ptr()) };
        assert_eq!(taken(&page), []);
        let value = [0, 0, 1, 0, 0, 0, 0x41, 0];
        for offset in REGISTERS.map(|offset| offset as usize) {
            for _ in 0..2 {
                memory.write(offset as u64, &value).unwrap();
                assert_eq!(
                    taken(&page),
                    [(offset as u64, value)],
                    "the same value again counts"
                );
                assert_eq!(taken(&page), []);
            }
        }
        memory.write(0x800, &value[..4]).unwrap();
        assert_eq!(taken(&page), [], "half a doorbell");
        memory.write(0x804, &value[4..]).unwrap();
        assert_eq!(taken(&page), [(0x800, value)]);
        // The WQE bytes of a BlueFlame copy are no doorbells.
        memory.write(0x808, &[9; 56]).unwrap();
        assert_eq!(taken(&page), []);
    }
}
