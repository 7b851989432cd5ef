// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of a guest.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use connectx::platform::{Dma, DmaFault};

use crate::watch::Watch;

/// First bus address of the memory: not 0, so that a forgotten address is a fault.
pub const BASE: u64 = 0x1_0000_0000;
/// Its size.
pub const SIZE: usize = 32 << 20;

/// Memory of a guest.
pub struct Ram {
    bytes: Mutex<Vec<u8>>,
    next: AtomicU64,
    watch: Mutex<Watch>,
}

impl Ram {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            bytes: Mutex::new(vec![0; SIZE]),
            next: AtomicU64::new(BASE),
            watch: Mutex::default(),
        })
    }

    /// Fresh zeroed memory, aligned to pages.
    pub fn alloc(&self, len: u64) -> u64 {
        let at = self
            .next
            .fetch_add(len.next_multiple_of(4096), Ordering::Relaxed);
        assert!(
            at + len <= BASE + SIZE as u64,
            "the guest's memory is used up"
        );
        at
    }

    /// What the model has touched, and may.
    pub fn watch<R>(&self, f: impl FnOnce(&mut Watch) -> R) -> R {
        f(&mut self.watch.lock().unwrap())
    }

    /// An access by the model.
    fn touch<R>(
        &self,
        addr: u64,
        len: usize,
        write: bool,
        f: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, DmaFault> {
        self.watch(|watch| watch.access(addr, len, write));
        self.with(addr, len, write, f)
    }

    fn with<R>(
        &self,
        addr: u64,
        len: usize,
        write: bool,
        f: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, DmaFault> {
        let mut bytes = self.bytes.lock().unwrap();
        let start = addr.checked_sub(BASE).and_then(|s| usize::try_from(s).ok());
        let range = start.and_then(|s| bytes.get_mut(s..s.checked_add(len)?));
        range.map(f).ok_or(DmaFault { addr, len, write })
    }

    /// Copies memory.
    pub fn get(&self, addr: u64, len: usize) -> Vec<u8> {
        self.with(addr, len, false, |b| b.to_vec()).unwrap()
    }

    /// Changes memory.
    pub fn set(&self, addr: u64, data: &[u8]) {
        self.with(addr, data.len(), true, |b| b.copy_from_slice(data))
            .unwrap();
    }
}

impl Dma for Ram {
    fn read(&self, addr: u64, buf: &mut [u8]) -> Result<(), DmaFault> {
        self.touch(addr, buf.len(), false, |b| buf.copy_from_slice(b))
    }

    fn write(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault> {
        self.touch(addr, buf.len(), true, |b| b.copy_from_slice(buf))
    }

    fn publish(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault> {
        self.touch(addr, buf.len(), true, |b| b.copy_from_slice(buf))
    }

    fn atomic64(&self, addr: u64, f: &mut dyn FnMut(u64) -> Option<u64>) -> Result<u64, DmaFault> {
        self.touch(addr, 8, true, |b| {
            let old = u64::from_ne_bytes(b.try_into().unwrap());
            if let Some(new) = f(old) {
                b.copy_from_slice(&new.to_ne_bytes());
            }
            old
        })
    }

    fn post(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault> {
        self.touch(addr, buf.len(), true, |b| b.copy_from_slice(buf))
    }
}
