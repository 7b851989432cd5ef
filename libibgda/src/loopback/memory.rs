// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of the library's users.

use super::{Device, Model, refused};
use crate::{error::Result, memory::Access};
use connectx::inproc;
use std::{
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, Weak},
};

/// What of it the model reaches.
#[derive(Default)]
pub(super) struct Pieces(Mutex<Vec<Weak<Piece>>>);

impl Pieces {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Piece>>> {
        crate::worker::lock(&self.0)
    }
}

/// Part of it. Registrations that overlap share pieces, since the model takes each byte
/// once.
#[derive(Debug)]
struct Piece {
    // Weak: the model has a list of pieces.
    model: Weak<Model>,
    range: Range<u64>,
}

impl Drop for Piece {
    fn drop(&mut self) {
        if let Some(model) = self.model.upgrade() {
            model.fabric.unregister(pointer(self.range.start));
        }
    }
}

fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// Memory registered with a NIC.
#[derive(Debug)]
pub(crate) struct Registration {
    device: Arc<Device>,
    key: u32,
    pieces: Vec<Arc<Piece>>,
}

impl Registration {
    /// # Safety
    /// The memory must stay mapped as long as the registration lives, and bear that the model reads and writes it.
    pub(crate) unsafe fn new(
        device: &Arc<Device>,
        address: u64,
        bytes: usize,
        access: Access,
    ) -> Result<Self> {
        let what = || {
            format!(
                "register {bytes} bytes at {address:#x} with {}",
                device.name
            )
        };
        let end = address + bytes as u64;
        // SAFETY: by this function's contract.
        let pieces = unsafe { cover(&device.model, address..end) }
            .map_err(|error| refused(what(), &error))?;
        let mut registration = Self {
            device: Arc::clone(device),
            key: 0,
            pieces,
        };
        let rights = inproc::Access {
            local_write: true,
            remote_read: access.contains(Access::READ),
            remote_write: access.contains(Access::WRITE),
            remote_atomic: access.contains(Access::ATOMIC),
        };
        registration.key = device.call(what, |nic| {
            nic.create_mkey(device.pd, address, bytes as u64, rights)
        })?;
        Ok(registration)
    }

    pub(crate) fn keys(&self) -> (u32, u32) {
        (self.key, self.key)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.key != 0 {
            self.device.end(|nic| nic.destroy_mkey(self.key));
        }
        // Under the lock: who looks for a piece finds it alive, or gone from the model too.
        let _list = self.device.model.pieces.lock();
        self.pieces.clear();
    }
}

/// Lets the model reach a range: the pieces that hold it, new ones for what none holds yet.
///
/// # Safety
/// The memory must stay mapped as long as the pieces live. A piece may live longer, by another registration, than part of
/// its memory; nothing reaches that part then, since every access is by a key, whose range is mapped.
unsafe fn cover(
    model: &Arc<Model>,
    range: Range<u64>,
) -> std::result::Result<Vec<Arc<Piece>>, inproc::Error> {
    let mut list = model.pieces.lock();
    list.retain(|piece| piece.strong_count() > 0);
    let mut pieces: Vec<Arc<Piece>> = list
        .iter()
        .filter_map(Weak::upgrade)
        .filter(|piece| piece.range.start < range.end && range.start < piece.range.end)
        .collect();
    pieces.sort_by_key(|piece| piece.range.start);
    let mut gaps = Vec::new();
    let mut at = range.start;
    for piece in &pieces {
        if at < piece.range.start {
            gaps.push(at..piece.range.start);
        }
        at = at.max(piece.range.end);
    }
    if at < range.end {
        gaps.push(at..range.end);
    }
    let mut made = Ok(());
    for gap in gaps {
        let bytes = (gap.end - gap.start) as usize;
        // SAFETY: by this function's contract.
        made = unsafe { model.fabric.register(pointer(gap.start), bytes) };
        if made.is_err() {
            break;
        }
        let piece = Arc::new(Piece {
            model: Arc::downgrade(model),
            range: gap,
        });
        list.push(Arc::downgrade(&piece));
        pieces.push(piece);
    }
    // Pieces die under the lock.
    if made.is_err() {
        pieces.clear();
    }
    drop(list);
    made.map(|()| pieces)
}
