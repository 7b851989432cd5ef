// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that other processes (the guest's CPUs, a GPU) read and write while the model does.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use vm_memory::{VolatileMemory, VolatileSlice};

/// A mapped piece of a file shared with others. Offsets are relative to the piece.
#[derive(Debug)]
pub struct SharedMemory {
    map: MmapRaw,
    file: File,
    writable: bool,
}

/// An access beyond the end of a [`SharedMemory`], to a read-only one, or misaligned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutOfReach;

impl SharedMemory {
    /// Maps `len` bytes of `file` from `offset`.
    pub fn map(file: File, offset: u64, len: usize, writable: bool) -> std::io::Result<Self> {
        let end = offset
            .checked_add(len as u64)
            .ok_or(std::io::ErrorKind::InvalidInput)?;
        // Beyond the end of its file a mapping gives SIGBUS instead of memory.
        if file.metadata()?.len() < end {
            return Err(std::io::Error::new(
                std::io::ErrorKind::InvalidInput,
                format!("the file ends before offset {end:#x}"),
            ));
        }
        let mut options = MmapOptions::new();
        options.offset(offset).len(len);
        let map = if writable {
            options.map_raw(&file)?
        } else {
            options.map_raw_read_only(&file)?
        };
        Ok(Self {
            map,
            file,
            writable,
        })
    }

    /// New zeroed memory of `len` bytes, taken from the system as it is touched.
    pub fn new(name: &str, len: usize) -> std::io::Result<Self> {
        let file = File::from(memfd_create(name, MFdFlags::MFD_CLOEXEC)?);
        file.set_len(len as u64)?;
        Self::map(file, 0, len, true)
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its first byte.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// The file behind it, for others to map.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Zeroes the file and gives its pages back to the system.
    pub fn clear(&self) -> std::io::Result<()> {
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(self.file.as_fd(), flags, 0, self.len() as i64)?;
        Ok(())
    }

    /// A range of it, to be read or written.
    pub fn slice(
        &self,
        offset: u64,
        len: usize,
        write: bool,
    ) -> Result<VolatileSlice<'_>, OutOfReach> {
        let end = offset.checked_add(len as u64).ok_or(OutOfReach)?;
        if end > self.len() as u64 || (write && !self.writable) {
            return Err(OutOfReach);
        }
        // SAFETY: the range lies within the mapping, which lives as long as `self` does and so outlives the slice.
        // Others may change the memory at any time: it is only reached through volatile copies and atomics.
        Ok(unsafe { VolatileSlice::new(self.map.as_mut_ptr().add(offset as usize), len) })
    }

    /// Copies out of the memory; what is read is not older than anything read before.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), OutOfReach> {
        self.slice(offset, buf.len(), false)?.copy_to(buf);
        fence(Ordering::Acquire);
        Ok(())
    }

    /// Copies into the memory.
    pub fn write(&self, offset: u64, buf: &[u8]) -> Result<(), OutOfReach> {
        let slice = self.slice(offset, buf.len(), true)?;
        fence(Ordering::Release);
        slice.copy_from(buf);
        Ok(())
    }

    /// One aligned store of 1, 2, 4 or 8 bytes, after every earlier write.
    pub fn publish(&self, offset: u64, buf: &[u8]) -> Result<(), OutOfReach> {
        let slice = self.slice(offset, buf.len(), true)?;
        macro_rules! store {
            ($atomic:ty, $int:ty) => {{
                let value = <$int>::from_ne_bytes(buf.try_into().map_err(|_| OutOfReach)?);
                let place = slice.get_atomic_ref::<$atomic>(0).map_err(|_| OutOfReach)?;
                place.store(value, Ordering::SeqCst);
            }};
        }
        match buf.len() {
            1 => store!(AtomicU8, u8),
            2 => store!(AtomicU16, u16),
            4 => store!(AtomicU32, u32),
            8 => store!(AtomicU64, u64),
            _ => return Err(OutOfReach),
        }
        Ok(())
    }

    /// An atomic read-modify-write of an aligned quadword; `f` may be asked again. Returns the old value.
    pub fn atomic64(
        &self,
        offset: u64,
        f: &mut dyn FnMut(u64) -> Option<u64>,
    ) -> Result<u64, OutOfReach> {
        let slice = self.slice(offset, 8, true)?;
        let place = slice
            .get_atomic_ref::<AtomicU64>(0)
            .map_err(|_| OutOfReach)?;
        let result = place.fetch_update(Ordering::SeqCst, Ordering::SeqCst, f);
        Ok(result.unwrap_or_else(|unchanged| unchanged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds() {
        let m = SharedMemory::new("test", 4096).unwrap();
        assert_eq!(m.write(4090, b"abcdef"), Ok(()));
        assert_eq!(m.write(4090, b"abcdefg"), Err(OutOfReach));
        assert_eq!(m.read(u64::MAX, &mut [0; 2]), Err(OutOfReach));
        let mut tail = [0; 6];
        m.read(4090, &mut tail).unwrap();
        assert_eq!(&tail, b"abcdef");
    }

    #[test]
    fn publish_wants_alignment_and_size() {
        let m = SharedMemory::new("test", 4096).unwrap();
        for len in [1, 2, 4, 8] {
            assert_eq!(m.publish(8, &[7; 8][..len]), Ok(()));
        }
        assert_eq!(m.publish(4, &[0; 8]), Err(OutOfReach));
        assert_eq!(m.publish(1, &[0; 2]), Err(OutOfReach));
        assert_eq!(m.publish(0, &[0; 3]), Err(OutOfReach));
        assert_eq!(m.publish(0, &[]), Err(OutOfReach));
    }

    #[test]
    fn atomics_add_up_between_threads() {
        let m = SharedMemory::new("test", 4096).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        m.atomic64(16, &mut |old| Some(old + 1)).unwrap();
                    }
                });
            }
        });
        assert_eq!(m.atomic64(16, &mut |_| None), Ok(20_000));
        assert_eq!(m.atomic64(12, &mut |_| None), Err(OutOfReach));
    }

    #[test]
    fn read_only_and_short_files() {
        let file = File::from(memfd_create("test", MFdFlags::MFD_CLOEXEC).unwrap());
        file.set_len(8192).unwrap();
        let m = SharedMemory::map(file.try_clone().unwrap(), 4096, 4096, false).unwrap();
        assert_eq!(m.read(0, &mut [0; 8]), Ok(()));
        assert_eq!(m.write(0, &[1]), Err(OutOfReach));
        assert!(SharedMemory::map(file.try_clone().unwrap(), 4096, 8192, true).is_err());
        assert!(SharedMemory::map(file, u64::MAX, 8192, true).is_err());
    }

    #[test]
    fn clear_zeroes() {
        let m = SharedMemory::new("test", 8192).unwrap();
        m.write(5000, &[9; 8]).unwrap();
        m.clear().unwrap();
        let mut buf = [1; 8];
        m.read(5000, &mut buf).unwrap();
        assert_eq!(buf, [0; 8]);
    }
}
