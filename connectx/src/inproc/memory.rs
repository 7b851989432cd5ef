// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory that a fabric in a process may touch: ranges of the process's own addresses, registered one by one.
//!
//! A bus address is a virtual address. Every access is checked against the registered ranges first, so that whatever a
//! WQE, a page list or a doorbell record says, the engine reaches nothing that it was not given.

use std::fs::File;
use std::ops::Range as Bytes;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};
use nix::sys::memfd::{MFdFlags, memfd_create};
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use vm_memory::{VolatileMemory, VolatileSlice};

use crate::platform::{Dma, DmaFault};

/// Page of queues and UAR pages.
pub const PAGE: usize = 4096;

/// Why memory cannot be registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// No bytes, a null address, or a range that leaves the address space.
    #[error("{len:#x} bytes at {addr:#x} are no range of memory")]
    NoRange {
        /// First byte.
        addr: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Some of it is registered already.
    #[error("{len:#x} bytes at {addr:#x} overlap the registered range at {other:#x}")]
    Overlap {
        /// First byte.
        addr: u64,
        /// Length in bytes.
        len: u64,
        /// First byte of the other range.
        other: u64,
    },
}

/// Registered ranges, in the order of their addresses, none overlapping another.
#[derive(Debug, Default)]
pub(super) struct Registry {
    ranges: RwLock<Vec<Bytes<u64>>>,
}

impl Registry {
    /// Recursive: what is lent from here may be copied to here.
    fn ranges(&self) -> RwLockReadGuard<'_, Vec<Bytes<u64>>> {
        self.ranges.read_recursive()
    }

    fn ranges_mut(&self) -> RwLockWriteGuard<'_, Vec<Bytes<u64>>> {
        self.ranges.write()
    }

    /// Lets accesses reach a range.
    ///
    /// # Safety
    /// The range must be mapped for reading and writing until [`Registry::remove`] returns, and all that others do with it
    /// meanwhile must bear concurrent access, as memory given to a device does.
    pub(super) unsafe fn add(&self, addr: u64, len: u64) -> Result<(), RegisterError> {
        let end = addr
            .checked_add(len)
            .filter(|_| addr != 0 && len != 0 && isize::try_from(len).is_ok())
            .ok_or(RegisterError::NoRange { addr, len })?;
        let mut ranges = self.ranges_mut();
        let at = ranges.partition_point(|range| range.end <= addr);
        if let Some(other) = ranges.get(at).filter(|range| range.start < end) {
            let other = other.start;
            return Err(RegisterError::Overlap { addr, len, other });
        }
        ranges.insert(at, addr..end);
        Ok(())
    }

    /// Ends a registration. When this returns no access to it is under way. `false` if there was none that starts there.
    pub(super) fn remove(&self, addr: u64) -> bool {
        let mut ranges = self.ranges_mut();
        match ranges.binary_search_by_key(&addr, |range| range.start) {
            Ok(at) => {
                ranges.remove(at);
                true
            }
            Err(_) => false,
        }
    }
}

/// The first of `len` bytes at `addr` that no range holds.
fn missing(ranges: &[Bytes<u64>], addr: u64, len: usize) -> Option<u64> {
    let Some(end) = addr.checked_add(len as u64) else {
        return Some(addr);
    };
    let mut at = addr;
    let mut next = ranges.partition_point(|range| range.end <= addr);
    // Ranges that touch are as good as one.
    while at < end {
        match ranges.get(next) {
            Some(range) if range.start <= at => at = range.end,
            _ => return Some(at),
        }
        next += 1;
    }
    None
}

/// Does something with registered memory, while it stays so.
fn reach<T>(
    registry: &Registry,
    addr: u64,
    len: usize,
    write: bool,
    access: impl FnOnce(VolatileSlice<'_>) -> Option<T>,
) -> Result<T, DmaFault> {
    let ranges = registry.ranges();
    if let Some(addr) = missing(&ranges, addr, len) {
        return Err(DmaFault { addr, len, write });
    }
    // SAFETY: registered ranges cover these bytes and are mapped as long as the table is held (`Registry::add`); they do
    // not change hands before `ranges` is dropped, after `access`. Others may store at the same time, so that all access
    // is volatile or atomic.
    let slice = unsafe { VolatileSlice::new(addr as *mut u8, len) };
    access(slice).ok_or(DmaFault { addr, len, write })
}

impl Dma for Registry {
    fn read(&self, addr: u64, buf: &mut [u8]) -> Result<(), DmaFault> {
        reach(self, addr, buf.len(), false, |slice| {
            slice.copy_to(buf);
            // What is read later is not older.
            fence(Ordering::Acquire);
            Some(())
        })
    }

    fn write(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault> {
        reach(self, addr, buf.len(), true, |slice| {
            slice.copy_from(buf);
            Some(())
        })
    }

    fn publish(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault> {
        reach(self, addr, buf.len(), true, |slice| {
            macro_rules! store {
                ($atomic:ty, $int:ty) => {
                    slice.get_atomic_ref::<$atomic>(0).ok()?.store(
                        <$int>::from_ne_bytes(buf.try_into().ok()?),
                        Ordering::Release,
                    )
                };
            }
            match buf.len() {
                1 => store!(AtomicU8, u8),
                2 => store!(AtomicU16, u16),
                4 => store!(AtomicU32, u32),
                8 => store!(AtomicU64, u64),
                _ => return None,
            }
            Some(())
        })
    }

    fn write_entry(&self, addr: u64, entry: &[u8]) -> Result<(), DmaFault> {
        reach(self, addr, entry.len(), true, |slice| {
            let at = entry.len().checked_sub(8)?;
            let (body, last) = entry.split_at(at);
            slice.copy_from(body);
            let last = u64::from_ne_bytes(last.try_into().ok()?);
            let place = slice.get_atomic_ref::<AtomicU64>(at).ok()?;
            place.store(last, Ordering::Release);
            Some(())
        })
    }

    fn atomic64(&self, addr: u64, f: &mut dyn FnMut(u64) -> Option<u64>) -> Result<u64, DmaFault> {
        reach(self, addr, 8, true, |slice| {
            let word = slice.get_atomic_ref::<AtomicU64>(0).ok()?;
            let result = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, f);
            Some(result.unwrap_or_else(|unchanged| unchanged))
        })
    }

    fn lend(
        &self,
        addr: u64,
        len: usize,
        write: bool,
        f: &mut dyn FnMut(VolatileSlice<'_>),
    ) -> Result<(), DmaFault> {
        reach(self, addr, len, write, |slice| {
            f(slice);
            Some(())
        })
    }

    fn post(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault> {
        self.write(addr, buf)
    }
}

/// Zeroed shared memory (a memfd) that is registered with its fabric as long as it lives. Page aligned.
#[derive(Debug)]
pub struct Memory {
    map: MmapRaw,
    file: File,
    registry: Arc<Registry>,
}

impl Memory {
    pub(super) fn new(registry: &Arc<Registry>, len: usize) -> std::io::Result<Self> {
        let len = len.max(1).next_multiple_of(PAGE);
        let file = File::from(memfd_create("connectx", MFdFlags::MFD_CLOEXEC)?);
        file.set_len(len as u64)?;
        let map = MmapOptions::new().len(len).map_raw(&file)?;
        // SAFETY: the mapping is `self.map`, which is dropped after `Drop::drop` has ended the registration; it is only
        // reached through atomics, volatile copies, and what users of `as_ptr` answer for.
        unsafe { registry.add(map.as_mut_ptr() as u64, len as u64) }
            .map_err(std::io::Error::other)?;
        Ok(Self {
            map,
            file,
            registry: registry.clone(),
        })
    }

    /// First byte, as a pointer.
    pub fn as_ptr(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// First byte, as WQEs name it.
    pub fn addr(&self) -> u64 {
        self.as_ptr() as u64
    }

    /// Length in bytes, a multiple of [`PAGE`].
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Never: there is at least a page.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The memfd, for other processes to map.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn slice(&self) -> VolatileSlice<'_> {
        // SAFETY: the slice is the whole mapping, which outlives it.
        unsafe { VolatileSlice::new(self.as_ptr(), self.len()) }
    }

    /// Copies out of it. Bytes beyond the end are left alone.
    pub fn read(&self, offset: usize, buf: &mut [u8]) {
        if let Ok(part) = self.slice().offset(offset) {
            part.copy_to(buf);
        }
    }

    /// Copies into it, as far as it reaches.
    pub fn write(&self, offset: usize, buf: &[u8]) {
        if let Ok(part) = self.slice().offset(offset) {
            part.copy_from(buf);
        }
    }

    /// An aligned 32-bit word of it, for records and flags; `None` beyond the end or unaligned.
    pub fn word(&self, offset: usize) -> Option<&AtomicU32> {
        let place = NonNull::new(self.as_ptr())?;
        (offset % 4 == 0 && offset.checked_add(4)? <= self.len()).then(|| {
            // SAFETY: aligned and within the mapping, which the reference cannot outlive; atomics bear any sharing.
            unsafe { place.byte_add(offset).cast().as_ref() }
        })
    }

    /// An aligned 64-bit word of it, as [`Memory::word`].
    pub fn quad(&self, offset: usize) -> Option<&AtomicU64> {
        let place = NonNull::new(self.as_ptr())?;
        (offset % 8 == 0 && offset.checked_add(8)? <= self.len()).then(|| {
            // SAFETY: as in `word`.
            unsafe { place.byte_add(offset).cast().as_ref() }
        })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.registry.remove(self.addr());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A registry that holds parts of `memory`, whose own registration is elsewhere.
    fn registry(memory: &Memory, parts: &[(u64, u64)]) -> Registry {
        let registry = Registry::default();
        for &(start, end) in parts {
            // SAFETY: `memory` outlives every access of its test.
            unsafe { registry.add(memory.addr() + start, end - start) }.unwrap();
        }
        registry
    }

    #[test]
    fn nothing_but_registered_memory_is_reached() {
        let memory = Memory::new(&Arc::default(), 2 * PAGE).unwrap();
        let base = memory.addr();
        let r = registry(&memory, &[(64, 128), (128, 256), (512, 520)]);
        assert_eq!(r.write(base + 64, &[7; 192]), Ok(()), "ranges that touch");
        let mut buf = [0; 193];
        let fault = |addr, len, write| DmaFault { addr, len, write };
        assert_eq!(r.read(base + 64, &mut buf[..192]), Ok(()));
        assert_eq!(
            r.read(base + 64, &mut buf),
            Err(fault(base + 256, 193, false))
        );
        assert_eq!(
            r.read(base + 63, &mut buf[..2]),
            Err(fault(base + 63, 2, false))
        );
        assert_eq!(
            r.write(base + 505, &[0; 8]),
            Err(fault(base + 505, 8, true))
        );
        assert!(r.read(u64::MAX, &mut buf[..2]).is_err());
        assert!(r.read(0, &mut buf[..1]).is_err());
        assert_eq!(r.atomic64(base + 512, &mut |old| Some(old + 3)), Ok(0));
        assert!(r.atomic64(base + 516, &mut |_| None).is_err());
        assert!(r.publish(base + 512, &[1; 3]).is_err());
        assert!(r.publish(base + 66, &[1; 4]).is_err(), "unaligned");
        assert_eq!(memory.quad(512).unwrap().load(Ordering::Relaxed), 3);
        assert!(r.remove(base + 128) && !r.remove(base + 128));
        assert!(r.read(base + 128, &mut buf[..1]).is_err());
    }

    #[test]
    fn overlaps_and_empty_ranges_are_refused() {
        let memory = Memory::new(&Arc::default(), PAGE).unwrap();
        let r = registry(&memory, &[(64, 128)]);
        let add = |from: u64, len| {
            // SAFETY: as in `registry`; nothing is accessed.
            unsafe { r.add(from, len) }
        };
        let base = memory.addr();
        for (from, len) in [(0, 65), (64, 64), (127, 1), (0, 4096)] {
            let overlap = RegisterError::Overlap {
                addr: base + from,
                len,
                other: base + 64,
            };
            assert_eq!(add(base + from, len), Err(overlap));
        }
        for (addr, len) in [(0, 8), (base, 0), (u64::MAX, 1), (8, u64::MAX)] {
            assert_eq!(add(addr, len), Err(RegisterError::NoRange { addr, len }));
        }
        assert_eq!((add(base, 64), add(base + 128, 1)), (Ok(()), Ok(())));
    }
}
