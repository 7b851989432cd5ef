// SPDX-License-Identifier: MIT OR Apache-2.0
//! A heap: one registered region, of the host or of a GPU, from which buffers are taken and given back. It keeps what
//! peers reach apart from other libraries' allocations, and costs one registration.

use crate::{
    error::{Error, Result, Source},
    memory::MemoryRegion,
    worker::{Home, lock},
};
use ibgda_device::abi::ibgda_region;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
};

/// Buffers begin and end on multiples of this, so that no two share a line of a cache, or a transaction of a GPU.
pub const HEAP_GRANULE: u64 = 64;

/// Which parts of a range are taken: best fit, and what is given back joins what is free around it.
#[derive(Debug)]
struct Space {
    bytes: u64,
    /// Start to length.
    free: BTreeMap<u64, u64>,
    /// The same, as (length, start).
    by_length: BTreeSet<(u64, u64)>,
    taken: BTreeMap<u64, u64>,
}

impl Space {
    fn new(bytes: u64) -> Self {
        let mut space = Self {
            bytes,
            free: BTreeMap::new(),
            by_length: BTreeSet::new(),
            taken: BTreeMap::new(),
        };
        space.add_free(0, bytes);
        space
    }

    fn add_free(&mut self, start: u64, length: u64) {
        if length > 0 {
            self.free.insert(start, length);
            self.by_length.insert((length, start));
        }
    }

    fn remove_free(&mut self, start: u64, length: u64) {
        self.free.remove(&start);
        self.by_length.remove(&(length, start));
    }

    /// Takes `length` bytes, of which `base` plus the result is a multiple of `align`, a power of two. The first of the
    /// shortest free ranges that can hold them.
    fn take(&mut self, length: u64, align: u64, base: u64) -> Option<u64> {
        let fits = |&(free, start): &(u64, u64)| {
            let address = (base + start).checked_next_multiple_of(align)?;
            let padding = address - (base + start);
            (padding.checked_add(length)? <= free).then_some((free, start, padding))
        };
        let (free, start, padding) = self.by_length.range((length, 0)..).find_map(fits)?;
        self.remove_free(start, free);
        self.add_free(start, padding);
        self.add_free(start + padding + length, free - padding - length);
        self.taken.insert(start + padding, length);
        Some(start + padding)
    }

    /// Gives back what `take` gave. `None`: nothing is taken there.
    fn give(&mut self, start: u64) -> Option<u64> {
        let length = self.taken.remove(&start)?;
        let (mut from, mut to) = (start, start + length);
        if let Some((&before, &bytes)) = self.free.range(..start).next_back() {
            if before + bytes == start {
                self.remove_free(before, bytes);
                from = before;
            }
        }
        if let Some(&bytes) = self.free.get(&to) {
            self.remove_free(to, bytes);
            to += bytes;
        }
        self.add_free(from, to - from);
        Some(length)
    }

    fn used(&self) -> u64 {
        self.taken.values().sum()
    }

    fn longest(&self) -> u64 {
        self.by_length.last().map_or(0, |&(length, _)| length)
    }
}

#[derive(Debug)]
struct Inner {
    region: MemoryRegion,
    space: Mutex<Space>,
    home: Home,
}

/// One registered region, from which buffers are taken. Any number of threads may use it.
#[derive(Clone, Debug)]
pub struct Heap(Arc<Inner>);

impl Heap {
    /// A heap in this region, all of which is the heap's from now on: of [`Context::alloc`](crate::Context::alloc), or the
    /// caller's memory, a GPU's too, of [`Context::map_device`](crate::Context::map_device). It need not be zero, and
    /// what is in a new buffer is what was there.
    pub fn new(region: MemoryRegion) -> Self {
        let bytes = region.length() / HEAP_GRANULE * HEAP_GRANULE;
        Self(Arc::new(Inner {
            region,
            space: Mutex::new(Space::new(bytes)),
            home: Home::here(),
        }))
    }

    /// The whole region.
    pub fn region(&self) -> &MemoryRegion {
        &self.0.region
    }

    /// Takes `length` bytes, rounded up to multiples of [`HEAP_GRANULE`], at an address that is a multiple of `align`, a
    /// power of two. They are given back when the result is dropped, at the latest when no peer, kernel or NIC uses them.
    ///
    /// # Errors
    /// `EINVAL`: zero, or no power of two; `ENOMEM`: there is no such room, and how much there is; `EPERM`: in a forked
    /// child.
    pub fn alloc(&self, length: u64, align: u64) -> Result<HeapBuffer> {
        let region = self.take(length, align)?;
        Ok(HeapBuffer {
            heap: self.clone(),
            region,
        })
    }

    /// As `alloc`, for `free` to give back.
    pub(crate) fn take(&self, length: u64, align: u64) -> Result<ibgda_region> {
        let what = || format!("take {length} bytes, aligned to {align}, of a heap");
        if length == 0 || !align.is_power_of_two() {
            return Err(Error::argument(
                what(),
                "the length is 0, or the alignment no power of two",
                format!("ask for at least 1 byte; an alignment of {HEAP_GRANULE} costs nothing"),
            ));
        }
        // A child's copy may be locked for ever.
        self.0.home.check(what)?;
        let whole = self.region();
        let mut space = lock(&self.0.space);
        let start = length
            .checked_next_multiple_of(HEAP_GRANULE)
            .and_then(|bytes| space.take(bytes, align.max(HEAP_GRANULE), whole.address()));
        let Some(start) = start else {
            return Err(Error::new(
                Source::Argument,
                libc::ENOMEM,
                what(),
                format!(
                    "{} of its {} bytes are taken, and the longest free range has {}",
                    space.used(),
                    space.bytes,
                    space.longest()
                ),
                "give buffers back, or make a larger heap",
            ));
        };
        Ok(ibgda_region {
            address: whole.address() + start,
            length,
            ..whole.region()
        })
    }

    /// Gives back the buffer that begins at `address`.
    pub(crate) fn free(&self, address: u64) -> Result<()> {
        self.check_ours("give a buffer back to a heap")?;
        let start = address.checked_sub(self.region().address());
        let given = start.and_then(|start| lock(&self.0.space).give(start));
        given.map(drop).ok_or_else(|| {
            let whole = self.region();
            Error::argument(
                format!(
                    "give back {address:#x} to the heap of {:#x} bytes at {:#x}",
                    whole.length(),
                    whole.address()
                ),
                "no buffer of this heap begins there: it is another's, or was given back before",
                "give back each buffer once, to the heap that it is of",
            )
        })
    }

    /// `EPERM` in a forked child.
    pub(crate) fn check_ours(&self, what: &str) -> Result<()> {
        self.0.home.check(|| what.to_owned())
    }

    /// Bytes that are taken, of how many, and the longest that can be; all 0 in a forked child, which has none of them.
    pub fn usage(&self) -> HeapUsage {
        if !self.0.home.is_here() {
            return HeapUsage::default();
        }
        let space = lock(&self.0.space);
        HeapUsage {
            buffers: space.taken.len() as u64,
            used: space.used(),
            total: space.bytes,
            longest_free: space.longest(),
        }
    }
}

/// How much of a heap is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeapUsage {
    /// Buffers that are out.
    pub buffers: u64,
    /// Their bytes, each rounded up to multiples of [`HEAP_GRANULE`].
    pub used: u64,
    /// Bytes of the heap.
    pub total: u64,
    /// The longest buffer that there is room for, if its alignment is [`HEAP_GRANULE`].
    pub longest_free: u64,
}

/// A buffer of a heap. It is given back when it is dropped: then no request may be under way that names it.
#[derive(Debug)]
pub struct HeapBuffer {
    heap: Heap,
    region: ibgda_region,
}

impl HeapBuffer {
    /// As kernels take it, and peers need it. The keys are those of the whole heap: the length is not checked by the NIC.
    pub fn region(&self) -> ibgda_region {
        self.region
    }

    /// Its heap.
    pub fn heap(&self) -> &Heap {
        &self.heap
    }

    fn offset(&self, call: &str, offset: usize, bytes: usize) -> Result<usize> {
        let end = offset.checked_add(bytes);
        if end.is_none_or(|end| end as u64 > self.region.length) {
            return Err(Error::argument(
                format!(
                    "{call} of {bytes} bytes at offset {offset} of a buffer of {}",
                    self.region.length
                ),
                "the range is not inside the buffer",
                "check offset and length",
            ));
        }
        Ok((self.region.address - self.heap.region().address()) as usize + offset)
    }

    /// Copies bytes into a buffer of host memory that [`Context::alloc`](crate::Context::alloc) made.
    ///
    /// # Errors
    /// As [`MemoryRegion::write`].
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let at = self.offset("write", offset, bytes.len())?;
        self.heap.region().write(at, bytes)
    }

    /// Copies bytes out of such a buffer.
    ///
    /// # Errors
    /// As [`MemoryRegion::write`].
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let at = self.offset("read", offset, bytes.len())?;
        self.heap.region().read(at, bytes)
    }
}

impl Drop for HeapBuffer {
    fn drop(&mut self) {
        let given = self.heap.free(self.region.address);
        debug_assert!(
            given.is_ok() || !self.heap.0.home.is_here(),
            "taken by this buffer alone"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a `Space` is to be, the plain way: who has each granule.
    struct Model {
        owner: Vec<Option<u64>>,
    }

    impl Model {
        fn fits(&self, granules: usize, align: u64, base: u64) -> bool {
            let aligned = |at: usize| (base + at as u64 * HEAP_GRANULE) % align == 0;
            (0..self.owner.len()).any(|at| {
                aligned(at)
                    && self
                        .owner
                        .get(at..at + granules)
                        .is_some_and(|range| range.iter().all(Option::is_none))
            })
        }

        fn longest(&self) -> u64 {
            let runs = self.owner.split(Option::is_some).map(<[_]>::len);
            runs.max().unwrap_or(0) as u64 * HEAP_GRANULE
        }
    }

    /// xorshift64: the same numbers in each run.
    fn next(state: &mut u64, below: u64) -> u64 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        (*state >> 11) % below
    }

    #[test]
    fn random_operations_agree_with_a_map_of_every_granule() {
        const GRANULES: u64 = 128;
        let mut state = 0x9e37_79b9_7f4a_7c15;
        for round in 0..200 {
            let base = 0x7f00_0000_0000 + next(&mut state, 64) * HEAP_GRANULE;
            let mut space = Space::new(GRANULES * HEAP_GRANULE);
            let mut model = Model {
                owner: vec![None; GRANULES as usize],
            };
            let mut out: Vec<(u64, u64)> = Vec::new();
            for step in 0..500 {
                let most = 1 + next(&mut state, 40);
                let granules = 1 + next(&mut state, most);
                let align = HEAP_GRANULE << next(&mut state, 6);
                if out.is_empty() || next(&mut state, 5) < 3 {
                    let fits = model.fits(granules as usize, align, base);
                    let taken = space.take(granules * HEAP_GRANULE, align, base);
                    assert_eq!(taken.is_some(), fits, "round {round}, step {step}");
                    let Some(start) = taken else { continue };
                    assert_eq!((base + start) % align, 0);
                    let at = (start / HEAP_GRANULE) as usize;
                    for owner in &mut model.owner[at..at + granules as usize] {
                        assert_eq!(owner.replace(start), None, "taken twice");
                    }
                    out.push((start, granules));
                } else {
                    let which = next(&mut state, out.len() as u64) as usize;
                    let (start, granules) = out.swap_remove(which);
                    assert_eq!(space.give(start + 1), None, "not a start");
                    assert_eq!(space.give(start), Some(granules * HEAP_GRANULE));
                    assert_eq!(space.give(start), None, "given back twice");
                    for owner in &mut model.owner {
                        if *owner == Some(start) {
                            *owner = None;
                        }
                    }
                }
                let used = model.owner.iter().flatten().count() as u64 * HEAP_GRANULE;
                assert_eq!((space.used(), space.longest()), (used, model.longest()));
                assert_eq!(space.free.len(), space.by_length.len());
            }
            for (start, _) in out {
                space.give(start).expect("is out");
            }
            assert_eq!(space.longest(), GRANULES * HEAP_GRANULE, "one piece again");
        }
    }

    #[test]
    fn the_shortest_free_range_is_used_and_huge_requests_are_refused() {
        let mut space = Space::new(64 * 100);
        let parts = [10, 1, 5, 1].map(|granules| space.take(64 * granules, 64, 0).expect("room"));
        space.give(parts[0]).expect("taken");
        space.give(parts[2]).expect("taken");
        assert_eq!(space.take(64 * 4, 64, 0), Some(parts[2]));
        for (length, align) in [(u64::MAX & !63, 64), (64, 1 << 63), (64 * 101, 64)] {
            assert_eq!(space.take(length, align, 0x7f00_0000_0000), None);
        }
    }
}
