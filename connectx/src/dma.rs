// SPDX-License-Identifier: MIT OR Apache-2.0
//! System memory as the host maps it for one function: bus address ranges, each a piece of a shared file.

use std::collections::BTreeMap;
use std::fs::File;

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use vm_memory::VolatileSlice;

use crate::mem::{OutOfReach, SharedMemory};
use crate::platform::DmaFault;

#[derive(Debug, Default)]
struct State {
    /// Bus Master Enable.
    enabled: bool,
    /// By first bus address; ranges do not overlap.
    maps: BTreeMap<u64, SharedMemory>,
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
        let size = usize::try_from(len).map_err(|_| invalid(format!("{len:#x} bytes")))?;
        if len == 0 || addr.checked_add(len - 1).is_none() {
            return Err(invalid(format!("{len:#x} bytes at {addr:#x}")));
        }
        let memory = SharedMemory::map(file, offset, size, writable)?;
        let mut state = self.state_mut();
        if let Some((other, _)) = state.overlapping(addr, len).next() {
            return Err(invalid(format!(
                "{len:#x} bytes at {addr:#x} overlap the mapping at {other:#x}"
            )));
        }
        state.maps.insert(addr, memory);
        Ok(())
    }

    /// Removes every mapping that lies in the range; returns their number.
    pub fn unmap(&self, addr: u64, len: u64) -> usize {
        let mut state = self.state_mut();
        let end = u128::from(addr) + u128::from(len);
        let inside: Vec<u64> = state
            .overlapping(addr, len)
            .filter(|&(start, size)| start >= addr && u128::from(start) + size as u128 <= end)
            .map(|(start, _)| start)
            .collect();
        for start in &inside {
            state.maps.remove(start);
        }
        inside.len()
    }

    /// Removes every mapping.
    pub fn clear(&self) {
        self.state_mut().maps.clear();
    }

    /// Number of mappings.
    pub fn mappings(&self) -> usize {
        self.state().maps.len()
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
        let (memory, offset) = state.find(addr).ok_or(fault)?;
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
        let (memory, offset) = state.find(addr).ok_or(fault)?;
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
        let (memory, offset) = state.find(addr).ok_or(fault)?;
        memory.atomic64(offset, f).map_err(|_| fault)
    }
}

impl State {
    /// Start and size of each mapping that shares a byte with the range.
    fn overlapping(&self, addr: u64, len: u64) -> impl Iterator<Item = (u64, usize)> + '_ {
        let last = addr.saturating_add(len.saturating_sub(1));
        let below = self.maps.range(..addr).next_back();
        let reaches = below.filter(|(start, m)| addr - **start < m.len() as u64);
        let within = (len > 0).then(|| self.maps.range(addr..=last));
        reaches
            .into_iter()
            .chain(within.into_iter().flatten())
            .map(|(&start, m)| (start, m.len()))
    }

    /// The mapping that holds a bus address, and the offset in it.
    fn find(&self, addr: u64) -> Option<(&SharedMemory, u64)> {
        if !self.enabled {
            return None;
        }
        let (&start, memory) = self.maps.range(..=addr).next_back()?;
        let offset = addr - start;
        (offset < memory.len() as u64).then_some((memory, offset))
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
            let (memory, offset) = self.find(at).ok_or(fault(at))?;
            let left = memory.len() - offset as usize;
            let end = len.min(done + left);
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
    fn unmap_takes_what_lies_in_the_range() {
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
        assert_eq!(t.unmap(PAGE, 2 * PAGE), 2);
        assert!(t.read(PAGE, &mut [0; 1]).is_err());
        assert!(t.read(3 * PAGE, &mut [0; 1]).is_ok());
        assert_eq!(t.unmap(3 * PAGE, PAGE / 2), 0, "a mapping is never cut");
        assert_eq!(t.unmap(0, u64::MAX), 2);
        assert_eq!(t.unmap(0, 0), 0);
        assert_eq!(t.mappings(), 0);
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
                assert_eq!(t.unmap(0x1000, PAGE), 1);
            }
            worker.join().unwrap();
        });
        assert_eq!(t.mappings(), 0);
    }
}
