// SPDX-License-Identifier: MIT OR Apache-2.0
//! System memory as the host maps it for one function: bus address ranges, each a piece of a shared file.
//!
//! Behind an IOMMU there is a range for each buffer of the driver, thousands that come and go. They are pieces of few
//! files (a guest's memory is one), so a file is mapped once and whole, and a range is no more than an entry here.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Weak};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use vm_memory::VolatileSlice;

use crate::mem::{OutOfReach, SharedMemory};
use crate::platform::DmaFault;

#[derive(Debug, Default)]
struct State {
    /// Bus Master Enable.
    enabled: bool,
    /// By first bus address; ranges do not overlap.
    maps: BTreeMap<u64, Piece>,
    /// Files that pieces are of, by device, inode and whether they may be written.
    files: HashMap<(u64, u64, bool), Weak<SharedMemory>>,
}

/// A piece of a file at a bus address.
#[derive(Debug, Clone)]
struct Piece {
    file: Arc<SharedMemory>,
    offset: u64,
    len: u64,
}

/// A piece of a file at a bus address, for others.
#[derive(Debug, Clone)]
pub struct Mapping {
    /// First bus address.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// The file, whole.
    pub file: Arc<SharedMemory>,
    /// Where in it.
    pub offset: u64,
}

/// A function's DMA mappings.
///
/// An access holds the table for reading while it copies, so that when [`DmaTable::unmap`] or [`DmaTable::enable`]
/// returns no access under the old rule is under way any more.
#[derive(Debug, Default)]
pub struct DmaTable {
    state: RwLock<State>,
}

impl DmaTable {
    /// Recursive: what is lent from a table may be copied to the same one.
    fn state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read_recursive()
    }

    fn state_mut(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write()
    }

    /// Lets accesses through, or none.
    pub fn enable(&self, enabled: bool) {
        self.state_mut().enabled = enabled;
    }

    /// True while accesses are let through.
    pub fn enabled(&self) -> bool {
        self.state().enabled
    }

    /// Maps `len` bytes of `file` from `offset` at bus address `addr`. What overlaps an earlier mapping is refused.
    pub fn map(
        &self,
        addr: u64,
        len: u64,
        file: File,
        offset: u64,
        writable: bool,
    ) -> std::io::Result<()> {
        let invalid = |why: String| std::io::Error::new(std::io::ErrorKind::InvalidInput, why);
        if len == 0 || addr.checked_add(len - 1).is_none() {
            return Err(invalid(format!("{len:#x} bytes at {addr:#x}")));
        }
        let mut state = self.state_mut();
        if let Some((other, _)) = state.overlapping(addr, len).next() {
            return Err(invalid(format!(
                "{len:#x} bytes at {addr:#x} overlap the mapping at {other:#x}"
            )));
        }
        let file = state.whole(file, writable)?;
        if offset
            .checked_add(len)
            .is_none_or(|end| end > file.len() as u64)
        {
            return Err(invalid(format!(
                "the file ends before {len:#x} bytes from offset {offset:#x}"
            )));
        }
        state.maps.insert(addr, Piece { file, offset, len });
        Ok(())
    }

    /// Takes a range away; what of a mapping lies outside stays. Returns the number of bytes that were mapped there.
    pub fn unmap(&self, addr: u64, len: u64) -> u64 {
        let mut state = self.state_mut();
        let hit: Vec<(u64, u64)> = state.overlapping(addr, len).collect();
        let end = u128::from(addr) + u128::from(len);
        let mut gone = 0;
        for (start, size) in hit {
            let Some(piece) = state.maps.remove(&start) else {
                continue;
            };
            let before = addr.saturating_sub(start).min(size);
            let after = (u128::from(start) + u128::from(size)).saturating_sub(end) as u64;
            gone += size - before - after;
            if before > 0 {
                let len = before;
                let head = Piece {
                    len,
                    ..piece.clone()
                };
                state.maps.insert(start, head);
            }
            if after > 0 {
                let skipped = size - after;
                let tail = Piece {
                    offset: piece.offset + skipped,
                    len: after,
                    file: piece.file,
                };
                state.maps.insert(start + skipped, tail);
            }
        }
        state.files.retain(|_, file| file.strong_count() > 0);
        gone
    }

    /// Removes every mapping.
    pub fn clear(&self) {
        let mut state = self.state_mut();
        state.maps.clear();
        state.files.clear();
    }

    /// Number of mappings.
    pub fn mappings(&self) -> usize {
        self.state().maps.len()
    }

    /// Every mapping, in the order of addresses.
    pub fn list(&self) -> Vec<Mapping> {
        let state = self.state();
        let mapping = |(address, piece): (&u64, &Piece)| Mapping {
            address: *address,
            bytes: piece.len,
            file: piece.file.clone(),
            offset: piece.offset,
        };
        state.maps.iter().map(mapping).collect()
    }

    /// Copies from bus addresses.
    pub fn read(&self, addr: u64, buf: &mut [u8]) -> Result<(), DmaFault> {
        self.state()
            .walk(addr, buf.len(), false, |memory, offset, range| {
                memory.read(offset, &mut buf[range])
            })
    }

    /// Copies to bus addresses. When a later part of the range is not mapped, earlier parts have been written.
    pub fn write(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault> {
        self.state()
            .walk(addr, buf.len(), true, |memory, offset, range| {
                memory.write(offset, &buf[range])
            })
    }

    /// Lends the memory of a range; see [`Dma::lend`](crate::platform::Dma::lend).
    pub fn lend(
        &self,
        addr: u64,
        len: usize,
        write: bool,
        f: &mut dyn FnMut(VolatileSlice<'_>),
    ) -> Result<(), DmaFault> {
        self.state()
            .walk(addr, len, write, |memory, offset, range| {
                f(memory.slice(offset, range.len(), write)?);
                Ok(())
            })
    }

    /// One aligned store; see [`SharedMemory::publish`].
    pub fn publish(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault> {
        let fault = DmaFault {
            addr,
            len: buf.len(),
            write: true,
        };
        let state = self.state();
        let (memory, offset, left) = state.find(addr).ok_or(fault)?;
        if left < buf.len() as u64 {
            return Err(fault);
        }
        memory.publish(offset, buf).map_err(|_| fault)
    }

    /// Writes an entry of a queue; see [`Dma::write_entry`](crate::platform::Dma::write_entry).
    pub fn write_entry(&self, addr: u64, entry: &[u8]) -> Result<(), DmaFault> {
        let fault = DmaFault {
            addr,
            len: entry.len(),
            write: true,
        };
        let state = self.state();
        let (memory, offset, left) = state.find(addr).ok_or(fault)?;
        if left < entry.len() as u64 {
            return Err(fault);
        }
        let (body, last) = entry.split_at(entry.len().saturating_sub(8));
        memory
            .write(offset, body)
            .and_then(|()| memory.publish(offset + body.len() as u64, last))
            .map_err(|_| fault)
    }

    /// An atomic read-modify-write; see [`SharedMemory::atomic64`].
    pub fn atomic64(
        &self,
        addr: u64,
        f: &mut dyn FnMut(u64) -> Option<u64>,
    ) -> Result<u64, DmaFault> {
        let fault = DmaFault {
            addr,
            len: 8,
            write: true,
        };
        let state = self.state();
        let (memory, offset, left) = state.find(addr).ok_or(fault)?;
        if left < 8 {
            return Err(fault);
        }
        memory.atomic64(offset, f).map_err(|_| fault)
    }
}

impl State {
    /// The whole of a file, mapped already or now.
    fn whole(&mut self, file: File, writable: bool) -> std::io::Result<Arc<SharedMemory>> {
        let metadata = file.metadata()?;
        let key = (metadata.dev(), metadata.ino(), writable);
        let known = self.files.get(&key).and_then(Weak::upgrade);
        // One that has grown since is mapped anew.
        if let Some(known) = known.filter(|known| known.len() as u64 >= metadata.len()) {
            return Ok(known);
        }
        let len = usize::try_from(metadata.len()).map_err(std::io::Error::other)?;
        let memory = Arc::new(SharedMemory::map(file, 0, len, writable)?);
        self.files.insert(key, Arc::downgrade(&memory));
        Ok(memory)
    }

    /// Start and size of each mapping that shares a byte with the range.
    fn overlapping(&self, addr: u64, len: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let last = addr.saturating_add(len.saturating_sub(1));
        let below = self.maps.range(..addr).next_back();
        let reaches = below.filter(|(start, m)| len > 0 && addr - **start < m.len);
        let within = (len > 0).then(|| self.maps.range(addr..=last));
        reaches
            .into_iter()
            .chain(within.into_iter().flatten())
            .map(|(&start, m)| (start, m.len))
    }

    /// The file behind a bus address, the offset in it, and how many bytes of the mapping are left from there.
    fn find(&self, addr: u64) -> Option<(&SharedMemory, u64, u64)> {
        if !self.enabled {
            return None;
        }
        let (&start, piece) = self.maps.range(..=addr).next_back()?;
        let within = addr - start;
        (within < piece.len).then(|| (&*piece.file, piece.offset + within, piece.len - within))
    }

    /// Splits an access at the borders of mappings.
    fn walk(
        &self,
        addr: u64,
        len: usize,
        write: bool,
        mut part: impl FnMut(&SharedMemory, u64, std::ops::Range<usize>) -> Result<(), OutOfReach>,
    ) -> Result<(), DmaFault> {
        let mut done = 0;
        while done < len {
            let fault = |addr| DmaFault { addr, len, write };
            let at = addr.checked_add(done as u64).ok_or(fault(addr))?;
            let (memory, offset, left) = self.find(at).ok_or(fault(at))?;
            let left = usize::try_from(left).unwrap_or(usize::MAX);
            let end = len.min(done.saturating_add(left));
            part(memory, offset, done..end).map_err(|_| fault(at))?;
            done = end;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use std::os::unix::fs::FileExt;

    const PAGE: u64 = 4096;

    fn ram(pages: u64) -> File {
        let file = File::from(memfd_create("ram", MFdFlags::MFD_CLOEXEC).unwrap());
        file.set_len(pages * PAGE).unwrap();
        file
    }

    fn table() -> DmaTable {
        let table = DmaTable::default();
        table.enable(true);
        table
    }

    #[test]
    fn access_crosses_mappings_in_any_file_order() {
        let file = ram(4);
        let t = table();
        t.map(0x10000, PAGE, file.try_clone().unwrap(), 3 * PAGE, true)
            .unwrap();
        t.map(0x11000, PAGE, file.try_clone().unwrap(), PAGE, true)
            .unwrap();
        let data: Vec<u8> = (0..200).collect();
        t.write(0x10f80, &data).unwrap();
        let mut back = vec![0; 200];
        t.read(0x10f80, &mut back).unwrap();
        assert_eq!(back, data);
        let mut tail = [0; 72];
        file.read_exact_at(&mut tail, PAGE).unwrap();
        assert_eq!(tail, data[128..]);
    }

    #[test]
    fn memory_is_lent_piece_by_piece_and_to_its_own_table() {
        let t = table();
        t.map(0x10000, PAGE, ram(1), 0, true).unwrap();
        t.map(0x11000, PAGE, ram(1), 0, true).unwrap();
        let data: Vec<u8> = (0..200).collect();
        t.write(0x10f80, &data).unwrap();
        let (mut lengths, mut to) = (vec![], 0x10100);
        t.lend(0x10f80, 200, false, &mut |from| {
            lengths.push(from.len());
            t.lend(to, from.len(), true, &mut |into| {
                from.copy_to_volatile_slice(into)
            })
            .unwrap();
            to += from.len() as u64;
        })
        .unwrap();
        assert_eq!(lengths, [128, 72]);
        let mut back = vec![0; 200];
        t.read(0x10100, &mut back).unwrap();
        assert_eq!(back, data);
        let mut lent = 0;
        let fault = t.lend(0x11ff0, 32, true, &mut |into| lent += into.len());
        assert_eq!((fault.unwrap_err().addr, lent), (0x12000, 16));
        t.enable(false);
        assert!(t.lend(0x10000, 1, false, &mut |_| panic!()).is_err());
    }

    #[test]
    fn faults_name_the_first_missing_byte() {
        let t = table();
        t.map(0x10000, PAGE, ram(1), 0, true).unwrap();
        assert_eq!(
            t.write(0x10ff0, &[0; 32]),
            Err(DmaFault {
                addr: 0x11000,
                len: 32,
                write: true
            })
        );
        assert_eq!(t.read(0xffff, &mut [0; 2]).unwrap_err().addr, 0xffff);
        assert!(t.read(u64::MAX, &mut [0; 2]).is_err());
        assert!(t.publish(0x11000, &[0; 8]).is_err());
        assert_eq!(t.read(0x5000, &mut []), Ok(()));
    }

    #[test]
    fn nothing_without_bus_mastering() {
        let t = table();
        t.map(0x10000, PAGE, ram(1), 0, true).unwrap();
        t.enable(false);
        assert!(t.read(0x10000, &mut [0; 1]).is_err());
        assert!(t.write(0x10000, &[0; 1]).is_err());
        assert!(t.publish(0x10000, &[0; 1]).is_err());
        assert!(t.atomic64(0x10000, &mut |_| None).is_err());
    }

    #[test]
    fn unmap_takes_the_range_and_nothing_else() {
        let file = ram(8);
        let t = table();
        for page in 0..4 {
            t.map(
                page * PAGE,
                PAGE,
                file.try_clone().unwrap(),
                page * PAGE,
                true,
            )
            .unwrap();
        }
        assert_eq!(t.unmap(PAGE, 2 * PAGE), 2 * PAGE);
        assert!(t.read(PAGE, &mut [0; 1]).is_err());
        assert!(t.read(3 * PAGE, &mut [0; 1]).is_ok());
        assert_eq!(t.unmap(5 * PAGE, PAGE), 0);
        assert_eq!(t.unmap(0, u64::MAX), 2 * PAGE);
        assert_eq!(t.unmap(0, 0), 0);
        assert_eq!(t.mappings(), 0);
    }

    #[test]
    fn a_mapping_is_cut_where_part_of_it_goes() {
        let file = ram(8);
        for page in 0..8 {
            file.write_all_at(&[page as u8], page * PAGE).unwrap();
        }
        let t = table();
        // As an IOMMU's large page of which single small ones are taken back.
        t.map(0x10_0000, 8 * PAGE, file.try_clone().unwrap(), 0, true)
            .unwrap();
        let first = |page: u64| {
            let mut byte = [0xff];
            t.read(0x10_0000 + page * PAGE, &mut byte).map(|()| byte[0])
        };
        assert_eq!(t.unmap(0x10_0000 + 2 * PAGE, PAGE), PAGE);
        assert_eq!(t.unmap(0x10_0000 + 6 * PAGE, 9 * PAGE), 2 * PAGE);
        let seen: Vec<Option<u8>> = (0..8).map(|page| first(page).ok()).collect();
        assert_eq!(
            seen,
            [
                Some(0),
                Some(1),
                None,
                Some(3),
                Some(4),
                Some(5),
                None,
                None
            ]
        );
        let end = 0x10_0000 + 2 * PAGE - 4;
        assert!(t.read(end, &mut [0; 8]).is_err(), "over the edge");
        assert!(t.publish(end, &[0; 4]).is_ok());
        assert!(t.publish(end, &[0; 8]).is_err());
        assert!(t.atomic64(end, &mut |_| None).is_err());
        // The hole can be filled with something else.
        t.map(
            0x10_0000 + 2 * PAGE,
            PAGE,
            file.try_clone().unwrap(),
            7 * PAGE,
            true,
        )
        .unwrap();
        assert_eq!(first(2), Ok(7));
        assert_eq!(t.mappings(), 3);
    }

    #[test]
    fn a_file_is_mapped_once_for_all_its_ranges() {
        let file = ram(4096);
        let t = table();
        for page in 0..4096 {
            let clone = file.try_clone().unwrap();
            t.map(page * 2 * PAGE, PAGE, clone, page * PAGE, true)
                .unwrap();
        }
        assert_eq!(t.state().files.len(), 1);
        let read_only = file.try_clone().unwrap();
        t.map(1 << 40, PAGE, read_only, 0, false).unwrap();
        assert!(t.write(1 << 40, &[0]).is_err());
        assert!(t.write(0, &[0]).is_ok());
        t.unmap(0, u64::MAX);
        assert_eq!((t.mappings(), t.state().files.len()), (0, 0));
    }

    #[test]
    fn bad_maps_are_refused() {
        let file = ram(2);
        let t = table();
        let clone = || file.try_clone().unwrap();
        t.map(PAGE, PAGE, clone(), 0, true).unwrap();
        assert!(t.map(PAGE, PAGE, clone(), 0, true).is_err());
        assert!(t.map(0, 2 * PAGE, clone(), 0, true).is_err());
        assert!(t.map(PAGE + 8, 8, clone(), 0, true).is_err());
        assert!(t.map(0, 0, clone(), 0, true).is_err());
        assert!(t.map(u64::MAX, PAGE, clone(), 0, true).is_err());
        assert!(
            t.map(0x10_0000, 16 * PAGE, clone(), 0, true).is_err(),
            "file too short"
        );
        let pipe = nix::unistd::pipe().unwrap();
        assert!(t.map(0x10_0000, PAGE, File::from(pipe.0), 0, true).is_err());
        assert_eq!(t.mappings(), 1);
    }

    #[test]
    fn unmap_waits_for_no_one_and_is_safe_under_load() {
        let file = ram(1);
        let t = table();
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                let mut reached = 0u32;
                for _ in 0..20_000 {
                    reached += u32::from(t.write(0x1000, &[1; 64]).is_ok());
                }
                reached
            });
            for _ in 0..500 {
                t.map(0x1000, PAGE, file.try_clone().unwrap(), 0, true)
                    .unwrap();
                assert_eq!(t.unmap(0x1000, PAGE), PAGE);
            }
            worker.join().unwrap();
        });
        assert_eq!(t.mappings(), 0);
    }
}
