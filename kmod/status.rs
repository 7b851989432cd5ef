// SPDX-License-Identifier: GPL-2.0

//! The status page: what the kernel tells a process, and the GPU that polls for it.

use crate::{
    abi::uapi::*,
    decisions::life::Life, //
};
use kernel::{
    bindings,
    page::PAGE_SIZE,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        barrier::{
            dma_mb,
            Write, //
        }, //
    }, //
};

const WORDS: usize = PAGE_SIZE / size_of::<u64>();

/// One page of 64-bit words that user space and the GPU read while the kernel writes.
///
/// The whole page is the mapping's, so nothing of the kernel's shares it.
pub(crate) struct StatusPage {
    words: VBox<[Atomic<u64>; WORDS]>,
}

impl StatusPage {
    /// A page of zeros: no state yet.
    pub(crate) fn new() -> Result<Self> {
        let words = VBox::<[Atomic<u64>; WORDS]>::new_uninit(GFP_KERNEL_ACCOUNT | __GFP_ZERO)?;
        // SAFETY: The allocation is zeroed, and zero is a value of `Atomic<u64>`, a transparent `u64`.
        let words = unsafe { words.assume_init() };
        Ok(Self { words })
    }

    /// Writes the state. The caller is the only writer: it holds the session's lock.
    pub(crate) fn publish(&self, life: &Life, port: u64) {
        let sequence = &self.words[IBGDA_STATUS_WORD_SEQUENCE as usize];
        let before = sequence.load(Relaxed);
        // Odd while the words do not belong together.
        sequence.store(before.wrapping_add(1), Relaxed);
        dma_mb(Write);
        let put = |word: u32, value| self.words[word as usize].store(value, Relaxed);
        put(IBGDA_STATUS_WORD_REASON, life.reason_word());
        put(IBGDA_STATUS_WORD_PORT, port);
        // SAFETY: No requirements.
        put(IBGDA_STATUS_WORD_TIME, unsafe { bindings::ktime_get() }
            as u64);
        // After the reason: who polls only this word finds the reason there. The GPU reads too, so the order is one for
        // devices.
        dma_mb(Write);
        put(IBGDA_STATUS_WORD_STATE, life.state_word());
        dma_mb(Write);
        sequence.store(before.wrapping_add(2), Relaxed);
    }

    /// The page, to be inserted into a mapping. It stays valid while `self` lives.
    pub(crate) fn page(&self) -> *mut bindings::page {
        // SAFETY: The address is one that vmalloc handed out.
        unsafe { bindings::vmalloc_to_page(self.words.as_ptr().cast()) }
    }
}

/// Where writes through a revoked doorbell's mapping land: private to the session, read by nobody.
pub(crate) struct SinkPage(VBox<[u8; PAGE_SIZE]>);

impl SinkPage {
    /// A page of zeros.
    pub(crate) fn new() -> Result<Self> {
        let page = VBox::<[u8; PAGE_SIZE]>::new_uninit(GFP_KERNEL_ACCOUNT | __GFP_ZERO)?;
        // SAFETY: The allocation is zeroed.
        Ok(Self(unsafe { page.assume_init() }))
    }

    /// Its page frame number. It stays valid while `self` lives.
    pub(crate) fn pfn(&self) -> usize {
        // SAFETY: The address is one that vmalloc handed out.
        unsafe { bindings::vmalloc_to_pfn(self.0.as_ptr().cast()) }
    }
}
