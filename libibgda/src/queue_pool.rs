// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory for the queues of a context: whole pages of larger pieces, each of which the NIC was told of once.
//!
//! A queue with an allocation and a UMEM of its own costs four system calls and two firmware commands; here most cost none.
//! A piece is as large as all before it together, so that few queues take little of what may be locked, and it goes when
//! the last queue in it does.

use crate::{
    error::Result,
    memory::PAGE_BYTES,
    nic::{Device, QueueMemory, Session, Umem},
    worker::{Home, lock},
};
use ibgda_uapi::IBGDA_STATE_READY;
use std::sync::{Arc, Mutex, Weak};

const PAGE: usize = PAGE_BYTES as usize;
/// No piece for several queues is larger.
const MOST: usize = 1 << 20;

/// A piece of memory.
#[derive(Debug)]
struct Piece {
    // In this order: what the NIC has of it, then the memory.
    umem: Umem,
    memory: QueueMemory,
    /// Of each page: whether a queue has it, and whether one has had it.
    pages: Mutex<Vec<Page>>,
    home: Home,
}

#[derive(Clone, Copy, Debug, Default)]
struct Page {
    taken: bool,
    used: bool,
}

impl Piece {
    fn new(session: &Session, device: &Device, bytes: usize) -> Result<Arc<Self>> {
        let memory = QueueMemory::alloc(session, bytes)?;
        // SAFETY: the UMEM is dropped before the memory (field order), and only protocols of queues touch that.
        let umem = unsafe { Umem::register(device, memory.address(), memory.len()) }?;
        let pages = Mutex::new(vec![Page::default(); memory.len() / PAGE]);
        Ok(Arc::new(Self {
            umem,
            memory,
            pages,
            home: Home::here(),
        }))
    }

    /// Pages in a row that nobody has, zeroed.
    fn take(self: &Arc<Self>, count: usize) -> Option<QueueSlice> {
        let mut pages = lock(&self.pages);
        let first = pages
            .windows(count)
            .position(|row| row.iter().all(|page| !page.taken))?;
        let row = &mut pages[first..first + count];
        let used = row.iter().any(|page| page.used);
        row.fill(Page {
            taken: true,
            used: true,
        });
        drop(pages);
        let slice = QueueSlice {
            piece: Arc::clone(self),
            first,
            count,
        };
        if used {
            // SAFETY: the pages are this slice's alone; whoever had them has given them back.
            unsafe { slice.address().write_bytes(0, slice.len()) };
        }
        Some(slice)
    }
}

/// The pieces of a context.
#[derive(Debug)]
pub(crate) struct QueuePool {
    session: Session,
    device: Device,
    pieces: Mutex<Vec<Weak<Piece>>>,
    home: Home,
}

impl QueuePool {
    pub(crate) fn new(session: &Session, device: &Device) -> Arc<Self> {
        Arc::new(Self {
            session: session.clone(),
            device: device.clone(),
            pieces: Mutex::default(),
            home: Home::here(),
        })
    }

    /// At least `bytes` bytes, zeroed, in pages of their own.
    pub(crate) fn take(&self, bytes: usize) -> Result<QueueSlice> {
        let count = bytes.div_ceil(PAGE);
        if !self.home.is_here() || self.session.state().state != IBGDA_STATE_READY {
            // Of a lost NIC, and in a child, which has neither the pieces' memory nor a lock that is sure to be free: the
            // broker says so.
            let piece = Piece::new(&self.session, &self.device, count * PAGE)?;
            return Ok(piece.take(count).expect("the piece is new"));
        }
        let mut pieces = lock(&self.pieces);
        pieces.retain(|piece| piece.strong_count() > 0);
        let there: Vec<_> = pieces.iter().filter_map(Weak::upgrade).collect();
        if let Some(slice) = there.iter().find_map(|piece| piece.take(count)) {
            return Ok(slice);
        }
        let own = count * PAGE;
        let all: usize = there.iter().map(|piece| piece.memory.len()).sum();
        let piece = match all.min(MOST) {
            // What is enough for this queue may still be allowed when more is not.
            more if more > own => Piece::new(&self.session, &self.device, more)
                .or_else(|_| Piece::new(&self.session, &self.device, own)),
            _ => Piece::new(&self.session, &self.device, own),
        }?;
        pieces.push(Arc::downgrade(&piece));
        Ok(piece.take(count).expect("the piece is new, and as large"))
    }
}

/// Pages of one queue. They are free again when this is dropped.
#[derive(Debug)]
pub(crate) struct QueueSlice {
    piece: Arc<Piece>,
    first: usize,
    count: usize,
}

impl QueueSlice {
    pub(crate) fn address(&self) -> *mut u8 {
        // SAFETY: inside the piece.
        unsafe { self.piece.memory.address().add(self.first * PAGE) }
    }

    pub(crate) fn len(&self) -> usize {
        self.count * PAGE
    }

    /// The UMEM that it lies in.
    pub(crate) fn umem_id(&self) -> u32 {
        self.piece.umem.id()
    }

    /// Where in the UMEM it begins.
    pub(crate) fn umem_offset(&self) -> u64 {
        (self.first * PAGE) as u64
    }
}

impl Drop for QueueSlice {
    fn drop(&mut self) {
        if !self.piece.home.is_here() {
            return;
        }
        for page in &mut lock(&self.piece.pages)[self.first..self.first + self.count] {
            page.taken = false;
        }
    }
}

#[cfg(all(test, feature = "loopback"))]
mod tests {
    use super::*;
    use crate::{OpenOptions, Route, loopback};

    fn pool() -> Arc<QueuePool> {
        let (session, _) = loopback::Session::open(&OpenOptions {
            route: Route::Loopback,
            ..OpenOptions::new("loopback3", "0000:00:00.0".parse().expect("an address"))
        })
        .expect("a session");
        let device = loopback::Device::open(&session).expect("opens");
        QueuePool::new(&Session::Loopback(session), &Device::Loopback(device))
    }

    #[test]
    fn queues_have_pages_of_their_own_which_are_zero_each_time() {
        let pool = pool();
        let mut slices: Vec<QueueSlice> = Vec::new();
        for round in 0..200_usize {
            let slice = pool.take(1 + round * 997 % (5 * PAGE)).expect("memory");
            let start = slice.address().addr();
            assert_eq!((start % PAGE, slice.umem_offset() % PAGE as u64), (0, 0));
            for other in &slices {
                let there = other.address().addr();
                assert!(
                    start + slice.len() <= there || there + other.len() <= start,
                    "two queues in one page"
                );
            }
            // SAFETY: the slice's own memory.
            let bytes = unsafe { std::slice::from_raw_parts_mut(slice.address(), slice.len()) };
            assert!(bytes.iter().all(|&byte| byte == 0), "round {round}");
            bytes.fill(0xa5);
            slices.push(slice);
            if round % 3 == 2 {
                drop(slices.swap_remove(round * 31 % slices.len()));
            }
        }
        let alive = || {
            let pieces = lock(&pool.pieces);
            pieces
                .iter()
                .filter(|piece| piece.strong_count() > 0)
                .count()
        };
        assert!(alive() < 12, "{} pieces for 133 queues", alive());
        drop(slices);
        assert_eq!(alive(), 0, "a piece without a queue");
    }

    #[test]
    fn a_queue_larger_than_any_piece_has_its_own() {
        let pool = pool();
        let (small, large) = (pool.take(64), pool.take(3 * MOST));
        let (small, large) = (small.expect("memory"), large.expect("memory"));
        assert_eq!((small.len(), large.len()), (PAGE, 3 * MOST));
        assert_ne!(small.umem_id(), large.umem_id());
    }
}
