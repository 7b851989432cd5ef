// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pages of the guest, mapped here one behind the other as kernels are to see them.

use crate::model::{Piece, pieces};
use anyhow::{Context as _, Result, bail, ensure};
use ibgda::outside::protocol::Kind;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::{
    ffi::c_void,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    ptr::NonNull,
};

const PAGE: u64 = 4096;
/// Longest range: more than any queue or test has.
const MOST_PAGES: u64 = 1 << 20;

/// Memory mapped here.
pub struct Mapped {
    start: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: only the address is kept; who uses the memory answers for it.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    pub fn start(&self) -> *const u8 {
        self.start.as_ptr().cast()
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `Space::map`, and no kernel uses it any more.
        if let Err(error) = unsafe { munmap(self.start, self.bytes) } {
            eprintln!("ibgda-gpu-agent: munmap: {error}");
        }
    }
}

/// The guest's address space.
pub struct Space {
    control: PathBuf,
    pieces: Vec<Piece>,
}

impl Space {
    pub fn new(control: &Path) -> Self {
        Self {
            control: control.to_owned(),
            pieces: Vec::new(),
        }
    }

    /// The piece that a run of pages of a kind lies in.
    fn find(&self, kind: Kind, (start, bytes): (u64, u64)) -> Option<&Piece> {
        let end = start.checked_add(bytes)?;
        self.pieces.iter().find(|piece| {
            piece.doorbells == (kind == Kind::Doorbell)
                && piece.address <= start
                && end <= piece.address + piece.bytes
        })
    }

    /// Maps runs of pages one behind the other.
    pub fn map(&mut self, kind: Kind, runs: &[(u64, u64)]) -> Result<Mapped> {
        let mut total = 0u64;
        for &(start, count) in runs {
            ensure!(
                start % PAGE == 0 && count > 0 && count <= MOST_PAGES,
                "{count} pages at {start:#x} are no run"
            );
            total += count;
        }
        ensure!(
            (1..=MOST_PAGES).contains(&total),
            "{total} pages; at least 1 and at most {MOST_PAGES} can be registered"
        );
        let known = |space: &Self| {
            runs.iter()
                .all(|&(start, count)| space.find(kind, (start, count * PAGE)).is_some())
        };
        if kind == Kind::Doorbell || !known(self) {
            // The guest may have placed its BARs elsewhere since, or there is more memory.
            self.pieces = pieces(&self.control)?;
        }
        let bytes = NonZeroUsize::new((total * PAGE) as usize).context("no pages")?;
        // Room for all first, so that what is mapped over it lies together.
        let none = ProtFlags::PROT_NONE;
        // SAFETY: a new mapping, of nothing.
        let start = unsafe { mmap_anonymous(None, bytes, none, MapFlags::MAP_PRIVATE) };
        let start = start.context("reserving addresses")?;
        let mapped = Mapped {
            start,
            bytes: bytes.get(),
        };
        let protection = match kind {
            Kind::ReadOnly => ProtFlags::PROT_READ,
            Kind::Memory | Kind::Doorbell => ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
        };
        let mut at = mapped.start().addr();
        for &(start, count) in runs {
            let Some(piece) = self.find(kind, (start, count * PAGE)) else {
                bail!(
                    "{count} pages at {start:#x} are no {} of the guest",
                    match kind {
                        Kind::Doorbell => "mapped doorbell pages",
                        _ => "memory",
                    }
                );
            };
            let length = NonZeroUsize::new((count * PAGE) as usize).context("no pages")?;
            let offset = piece.offset + (start - piece.address);
            let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
            // SAFETY: over addresses that were reserved just now.
            unsafe {
                mmap(
                    NonZeroUsize::new(at),
                    length,
                    protection,
                    flags,
                    &*piece.file,
                    offset as i64,
                )
            }
            .with_context(|| format!("mapping {count} pages at {start:#x}"))?;
            at += length.get();
        }
        Ok(mapped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::{
        memfd::{MFdFlags, memfd_create},
        socket::{ControlMessage, MsgFlags, sendmsg},
    };
    use std::{
        fs::File,
        io::{BufRead, BufReader, IoSlice},
        os::{fd::AsRawFd, unix::fs::FileExt, unix::net::UnixListener},
        thread,
    };

    /// A model of one guest: four pages of memory at 0x10000, the first byte of each its number, and two doorbell pages.
    fn model(control: &Path) {
        let files = ["ram", "bar"].map(|name| {
            let file = File::from(memfd_create(name, MFdFlags::MFD_CLOEXEC).expect("a memfd"));
            file.set_len(8 * PAGE).expect("its length");
            for page in 0..8 {
                file.write_all_at(&[page as u8], page * PAGE)
                    .expect("a byte");
            }
            file
        });
        let listener = UnixListener::bind(control).expect("a socket");
        let answer = move || loop {
            let (stream, _) = listener.accept().expect("a client");
            let mut line = String::new();
            BufReader::new(&stream)
                .read_line(&mut line)
                .expect("a line");
            assert_eq!(line, "{\"command\":\"memory\"}\n");
            let text = serde_json::json!({"memory": [
                {"function": "nic0", "kind": "memory", "address": 0x10000, "bytes": 4 * PAGE, "file": 0, "offset": PAGE},
                {"function": "nic0", "kind": "doorbells", "address": 0x80000, "bytes": 2 * PAGE, "file": 1, "offset": 0},
            ]});
            let numbers = files.each_ref().map(|file| file.as_raw_fd());
            let text = format!("{text}\n");
            sendmsg::<()>(
                stream.as_raw_fd(),
                &[IoSlice::new(text.as_bytes())],
                &[ControlMessage::ScmRights(&numbers)],
                MsgFlags::empty(),
                None,
            )
            .expect("sent");
        };
        thread::spawn(answer);
    }

    #[test]
    fn pages_lie_together_in_the_order_that_was_asked_for() {
        let control = std::env::temp_dir().join(format!("hil-space-{}.sock", std::process::id()));
        model(&control);
        let mut space = Space::new(&control);
        let runs = [(0x13000, 1), (0x10000, 2), (0x13000, 1)];
        let mapped = space.map(Kind::Memory, &runs).expect("memory of the guest");
        assert_eq!(mapped.bytes() as u64, 4 * PAGE);
        let first = |page: usize| {
            // SAFETY: mapped just now.
            unsafe { mapped.start().add(page * PAGE as usize).read_volatile() }
        };
        assert_eq!([0, 1, 2, 3].map(first), [4, 1, 2, 4]);
        // One page at two places is one page.
        // SAFETY: as above, and written by nobody else.
        unsafe { mapped.start().cast_mut().write_volatile(0x55) };
        assert_eq!(first(3), 0x55);
        let doorbell = space
            .map(Kind::Doorbell, &[(0x81000, 1)])
            .expect("a doorbell page");
        let _ = std::fs::remove_file(&control);
        // SAFETY: mapped just now.
        assert_eq!(unsafe { doorbell.start().read_volatile() }, 1);
    }

    #[test]
    fn what_is_not_the_guests_is_refused() {
        let control = std::env::temp_dir().join(format!("hil-other-{}.sock", std::process::id()));
        model(&control);
        let mut space = Space::new(&control);
        space.map(Kind::Memory, &[(0x10000, 4)]).expect("all of it");
        let _ = std::fs::remove_file(&control);
        for (kind, runs, why) in [
            (Kind::Memory, &[(0x10800, 1)][..], "are no run"),
            (Kind::Memory, &[(0x10000, 0)], "are no run"),
            (Kind::Memory, &[], "at least 1"),
        ] {
            let error = space.map(kind, runs).err().expect("refused");
            assert!(error.to_string().contains(why), "{error}");
        }
        // The model is asked again, and this one is gone.
        for (kind, runs) in [
            (Kind::Memory, [(0x13000, 2)]),
            (Kind::Memory, [(0x80000, 1)]),
            (Kind::Doorbell, [(0x10000, 1)]),
            (Kind::Memory, [(u64::MAX - 4095, 1)]),
        ] {
            assert!(space.map(kind, &runs).is_err(), "{kind:?} {runs:x?}");
        }
    }
}
