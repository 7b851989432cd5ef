// SPDX-License-Identifier: MIT OR Apache-2.0
//! Device memory (MEMIC): a part of the BAR that CPUs load and store, and that memory keys can name.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use super::device::MEMIC_PAGES;
use crate::ifc::wqe::uar;
use crate::platform::{Dma, DmaFault};

/// Bytes of device memory.
pub const SIZE: u64 = 256 << 10;
/// Where it starts in the BAR.
pub const START: u64 = MEMIC_PAGES.start as u64 * uar::PAGE;
/// Ends the part of the BAR that belongs to device memory: the memory, then a window of its size for each operation.
pub const END: u64 = START + (1 + Operation::ALL.len() as u64) * SIZE;
const _: () = assert!(END <= MEMIC_PAGES.end as u64 * uar::PAGE);

/// Marks addresses of device memory among bus addresses, which have at most 52 bits (PCIe sends 64, no host uses them).
pub const WINDOW: u64 = 1 << 63;

/// What an access through an operation's window does instead of loading or storing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Operation {
    /// A store adds one.
    Increment = 0,
    /// A load gives the old value and leaves one.
    TestAndSet = 1,
}

impl Operation {
    /// All, by number.
    pub const ALL: [Self; 2] = [Self::Increment, Self::TestAndSet];

    /// The operation with a number.
    pub fn from_number(number: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|op| *op as u64 == number)
    }

    /// Offset of its window in the BAR.
    pub const fn window(self) -> u64 {
        START + (1 + self as u64) * SIZE
    }
}

/// The bytes.
pub struct Memory(Mutex<Vec<u8>>);

impl Default for Memory {
    fn default() -> Self {
        Self(Mutex::new(vec![0; SIZE as usize]))
    }
}

impl Memory {
    /// Does something with a range of the memory, `None` if it has no such range.
    fn with<R>(&self, offset: u64, len: usize, f: impl FnOnce(&mut [u8]) -> R) -> Option<R> {
        let mut bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let start = usize::try_from(offset).ok()?;
        bytes.get_mut(start..start.checked_add(len)?).map(f)
    }

    /// Zeroes it.
    pub fn clear(&self) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .fill(0);
    }

    /// A load by a CPU at an offset of the BAR.
    pub fn load(&self, offset: u64, data: &mut [u8]) {
        let at = offset.wrapping_sub(START);
        let tests = at / SIZE == 1 + Operation::TestAndSet as u64;
        if at >= SIZE && !tests {
            return;
        }
        self.with(at % SIZE, data.len(), |bytes| {
            data.copy_from_slice(bytes);
            if tests {
                bytes.fill(0);
                if let Some(last) = bytes.last_mut() {
                    *last = 1;
                }
            }
        });
    }

    /// A store by a CPU at an offset of the BAR.
    pub fn store(&self, offset: u64, data: &[u8]) {
        let at = offset.wrapping_sub(START);
        let increments = at / SIZE == 1 + Operation::Increment as u64;
        if at >= SIZE && !increments {
            return;
        }
        self.with(at % SIZE, data.len(), |bytes| {
            if !increments {
                bytes.copy_from_slice(data);
                return;
            }
            // Big-endian, as all that the device counts.
            for byte in bytes.iter_mut().rev() {
                *byte = byte.wrapping_add(1);
                if *byte != 0 {
                    break;
                }
            }
        });
    }

    /// An access of the engine, at an address in [`WINDOW`].
    fn access<R>(
        &self,
        addr: u64,
        len: usize,
        write: bool,
        f: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, DmaFault> {
        self.with(addr & !WINDOW, len, f)
            .ok_or(DmaFault { addr, len, write })
    }
}

impl Dma for Memory {
    fn read(&self, addr: u64, buf: &mut [u8]) -> Result<(), DmaFault> {
        self.access(addr, buf.len(), false, |bytes| buf.copy_from_slice(bytes))
    }

    fn write(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault> {
        self.access(addr, buf.len(), true, |bytes| bytes.copy_from_slice(buf))
    }

    fn publish(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault> {
        self.write(addr, buf)
    }

    fn atomic64(&self, addr: u64, f: &mut dyn FnMut(u64) -> Option<u64>) -> Result<u64, DmaFault> {
        let fault = DmaFault {
            addr,
            len: 8,
            write: true,
        };
        if addr % 8 != 0 {
            return Err(fault);
        }
        self.access(addr, 8, true, |bytes| {
            let old = u64::from_ne_bytes(bytes.try_into().ok()?);
            if let Some(new) = f(old) {
                bytes.copy_from_slice(&new.to_ne_bytes());
            }
            Some(old)
        })?
        .ok_or(fault)
    }

    fn post(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault> {
        self.write(addr, buf)
    }
}

/// What is allocated, by its offset in device memory.
#[derive(Debug, Default)]
pub struct Blocks(BTreeMap<u64, u64>);

impl Blocks {
    /// Takes `len` bytes, aligned, that begin in `range`, if there are any.
    pub fn insert(&mut self, range: std::ops::Range<u64>, len: u64, align: u64) -> Option<u64> {
        let mut at = range.start.checked_next_multiple_of(align)?;
        for (&start, &taken) in &self.0 {
            if at.checked_add(len)? <= start {
                break;
            }
            if start + taken > at {
                at = (start + taken).checked_next_multiple_of(align)?;
            }
        }
        let end = at.checked_add(len)?;
        if end > range.end.min(SIZE) {
            return None;
        }
        self.0.insert(at, len);
        Some(at)
    }

    /// The length of the block that begins at an offset.
    pub fn get(&self, start: u64) -> Option<u64> {
        self.0.get(&start).copied()
    }

    /// Whether a range lies within one block.
    pub fn covers(&self, start: u64, len: u64) -> bool {
        let block = self.0.range(..=start).next_back();
        block.is_some_and(|(begin, taken)| {
            start
                .checked_add(len)
                .is_some_and(|end| end <= begin + taken)
        })
    }

    /// Gives a block back.
    pub fn remove(&mut self, start: u64) {
        self.0.remove(&start);
    }

    /// Gives all back.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_disjoint_aligned_and_within_the_range() {
        let mut blocks = Blocks::default();
        assert_eq!(blocks.insert(0..4096, 64, 64), Some(0));
        assert_eq!(blocks.insert(0..4096, 64, 256), Some(256));
        assert_eq!(
            blocks.insert(0..4096, 192, 64),
            Some(64),
            "the gap between them"
        );
        assert_eq!(blocks.insert(0..512, 256, 64), None);
        assert_eq!(blocks.insert(4096..8192, 4096, 64), Some(4096));
        assert_eq!(blocks.insert(SIZE..SIZE + 4096, 64, 64), None);
        assert_eq!(blocks.insert(u64::MAX..u64::MAX, u64::MAX, 64), None);
        assert!(blocks.covers(4096, 4096) && blocks.covers(8191, 1));
        assert!(!blocks.covers(4096, 4097) && !blocks.covers(8192, 1));
        assert!(!blocks.covers(5000, u64::MAX));
        blocks.remove(64);
        assert_eq!(blocks.insert(0..4096, 192, 64), Some(64));
    }

    #[test]
    fn windows_change_what_loads_and_stores_do() {
        let memory = Memory::default();
        let at = |op: Operation| op.window() + 0x40;
        memory.store(START + 0x40, &[0, 0, 1, 0xff]);
        memory.store(at(Operation::Increment), &[9; 4]);
        let mut data = [0; 4];
        memory.load(START + 0x40, &mut data);
        assert_eq!(data, [0, 0, 2, 0]);
        memory.load(at(Operation::TestAndSet), &mut data);
        assert_eq!(data, [0, 0, 2, 0]);
        memory.load(at(Operation::TestAndSet), &mut data);
        assert_eq!(data, [0, 0, 0, 1]);
        memory.store(at(Operation::TestAndSet), &[7; 4]);
        data = [5; 4];
        memory.load(at(Operation::Increment), &mut data);
        assert_eq!(data, [5; 4], "an increment is no load");
        memory.load(END - 2, &mut data);
        memory.store(END, &[1]);
        memory.load(START + 0x40, &mut data);
        assert_eq!(data, [0, 0, 0, 1]);
    }

    #[test]
    fn the_engine_stays_inside() {
        let memory = Memory::default();
        assert!(memory.write(WINDOW | (SIZE - 4), &[1; 4]).is_ok());
        assert!(memory.write(WINDOW | (SIZE - 3), &[1; 4]).is_err());
        assert!(memory.read(WINDOW | !0, &mut [0; 4]).is_err());
        assert!(memory.atomic64(WINDOW | 4, &mut |_| None).is_err());
        assert_eq!(memory.atomic64(WINDOW | 8, &mut |old| Some(old + 1)), Ok(0));
    }
}
