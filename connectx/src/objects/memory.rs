// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that objects refer to: page lists, queue buffers, UMEMs, memory keys.

use std::sync::Arc;

use super::signature::{Bsf, Signature};
use super::table::Weigh;
use crate::ifc::be64_list;
use crate::ifc::context::mkc;

/// Pages of one size, given by their bus addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pages {
    /// Bus address of each page; of the low bits that the page size covers, [`ABSENT`] and [`READ_ONLY`] may be set.
    pub addresses: Arc<[u64]>,
    /// Log2 of the page size in bytes.
    pub log_size: u32,
}

impl Pages {
    /// Bytes covered.
    pub fn len(&self) -> u64 {
        (self.addresses.len() as u64) << self.log_size
    }

    /// Whether there are no pages.
    pub fn is_empty(&self) -> bool {
        self.addresses.is_empty()
    }

    #[inline]
    fn page(&self, offset: u64) -> Option<u64> {
        let page = usize::try_from(offset >> self.log_size).ok()?;
        self.addresses.get(page).copied()
    }

    /// Whether there is a page at byte `offset` that is not there now, or is not to be written now.
    #[inline]
    pub fn is_absent(&self, offset: u64, write: bool) -> bool {
        let missing = if write { ABSENT | READ_ONLY } else { ABSENT };
        self.page(offset).is_some_and(|page| page & missing != 0)
    }

    /// Bus address of byte `offset`, and how many bytes follow it in the same page.
    #[inline]
    pub fn locate(&self, offset: u64) -> Option<(u64, u64)> {
        let within = offset & ((1 << self.log_size) - 1);
        let page = self.page(offset)? & PAGE_ADDRESS;
        Some((page.wrapping_add(within), (1 << self.log_size) - within))
    }
}

/// A part of some pages in which a queue lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buffer {
    /// The pages.
    pub pages: Pages,
    /// First byte of the queue in the pages.
    pub start: u64,
    /// The list of pages is a UMEM's.
    pub borrowed: bool,
}

impl Buffer {
    /// A queue that starts at byte `start` of `pages`, or `None` if `len` bytes do not fit.
    pub fn new(pages: Pages, start: u64, len: u64) -> Option<Self> {
        (start.checked_add(len)? <= pages.len()).then_some(Self {
            pages,
            start,
            borrowed: false,
        })
    }

    /// A buffer of nothing.
    pub fn empty() -> Self {
        Self {
            pages: Pages {
                addresses: Arc::new([]),
                log_size: 12,
            },
            start: 0,
            borrowed: false,
        }
    }

    /// Bus address of byte `offset` of the queue, and how many bytes follow it in the same page.
    #[inline]
    pub fn locate(&self, offset: u64) -> Option<(u64, u64)> {
        self.pages.locate(self.start.checked_add(offset)?)
    }
}

/// Memory of a user, registered for queues.
#[derive(Debug)]
pub struct Umem {
    /// Owner.
    pub uid: u16,
    /// Queues that lie in it.
    pub refs: u32,
    /// Its pages.
    pub pages: Pages,
    /// First byte of the user's memory in the first page.
    pub page_offset: u64,
    /// Bytes usable from there.
    pub len: u64,
}

/// How a memory key translates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Translation {
    /// Addresses are bus addresses.
    Physical,
    /// Through pages of one size; the key's start lies `page_offset` bytes into the first.
    Pages {
        /// The pages.
        pages: Pages,
        /// See above.
        page_offset: u64,
    },
    /// Addresses are offsets from `start` in device memory.
    Device {
        /// See above.
        start: u64,
    },
    /// Through other keys, one entry after the other.
    Keys(Arc<[KeyEntry]>),
    /// Through other keys, each entry for as many bytes (KSM, the capability `fixed_buffer_size`).
    Fixed {
        /// The entries, whose own length says nothing.
        entries: Arc<[KeyEntry]>,
        /// Log2 of the bytes of each.
        log_size: u32,
    },
}

/// An entry of an indirect memory key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyEntry {
    /// Bytes.
    pub len: u32,
    /// Key that translates them.
    pub key: u32,
    /// Address under that key.
    pub address: u64,
}

/// A bit of a bus address that no host has memory at.
const NOWHERE: u64 = 1 << 58;

impl Translation {
    /// Makes the pages lie where no memory is. `false` if the key has none.
    pub fn lead_astray(&mut self) -> bool {
        let Self::Pages { pages, .. } = self else {
            return false;
        };
        pages.addresses = pages.addresses.iter().map(|page| page | NOWHERE).collect();
        true
    }

    /// Replaces entries from octoword `offset` on by `list`, which has the entries' layout. `false` if they do not fit.
    ///
    /// Lists come in units of 64 bytes, so that the last may reach beyond the key's own entries; what does is ignored.
    pub fn replace(&mut self, offset: u64, list: &[u8], capacity: u32) -> bool {
        let octowords = list.len() as u64 / 16;
        let room = u64::from(capacity).next_multiple_of(4);
        if offset.checked_add(octowords).is_none_or(|end| end > room) {
            return false;
        }
        let at = offset as usize;
        match self {
            Self::Physical | Self::Device { .. } => false,
            Self::Pages { pages, .. } => {
                let addresses = Arc::make_mut(&mut pages.addresses);
                let places = addresses.iter_mut().skip(at * 2);
                for (place, entry) in places.zip(be64_list(list)) {
                    *place = page_entry(entry);
                }
                true
            }
            Self::Keys(entries) | Self::Fixed { entries, .. } => {
                let entries = Arc::make_mut(entries);
                for (place, entry) in entries.iter_mut().skip(at).zip(key_entries(list)) {
                    *place = entry;
                }
                true
            }
        }
    }
}

/// A page as an entry of a list that says what may be done with it: bits `MLX5_IB_MTT_READ` and `MLX5_IB_MTT_WRITE` of
/// mlx5_ib.h. Of a page of neither there is none now.
pub fn page_entry(entry: u64) -> u64 {
    let missing = match entry & 3 {
        0 => ABSENT,
        1 => READ_ONLY,
        _ => 0,
    };
    entry & PAGE_ADDRESS | missing
}

/// In the place of a page's address: there is none now.
pub const ABSENT: u64 = 1;
/// With a page's address: it is not to be written now.
pub const READ_ONLY: u64 = 2;
/// In an entry of an indirect key: there is no memory, whoever asks. No key has this value.
pub const NULL_MKEY: u32 = 0x200;

/// Of a page entry, the address: the low bits say what may be done with the page.
const PAGE_ADDRESS: u64 = !0xfff;

/// Entries of an indirect key: byte count, key, address.
pub fn key_entries(list: &[u8]) -> impl Iterator<Item = KeyEntry> + '_ {
    list.chunks_exact(16).map(|e| KeyEntry {
        len: u32::from_be_bytes([e[0], e[1], e[2], e[3]]),
        key: u32::from_be_bytes([e[4], e[5], e[6], e[7]]),
        address: u64::from_be_bytes([e[8], e[9], e[10], e[11], e[12], e[13], e[14], e[15]]),
    })
}

/// What a memory key permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access {
    /// Local read.
    pub local_read: bool,
    /// Local write.
    pub local_write: bool,
    /// Remote read.
    pub remote_read: bool,
    /// Remote write.
    pub remote_write: bool,
    /// Remote atomic.
    pub atomic: bool,
}

impl Access {
    /// Permissions of a context.
    pub fn of(context: &[u8]) -> Self {
        Self {
            local_read: mkc::lr.is_set(context),
            local_write: mkc::lw.is_set(context),
            remote_read: mkc::rr.is_set(context),
            remote_write: mkc::rw.is_set(context),
            atomic: mkc::a.is_set(context),
        }
    }
}

/// Length of a context's address range; `None` for the whole address space.
pub fn key_length(context: &[u8]) -> Option<u64> {
    (!mkc::length64.is_set(context)).then(|| mkc::len.get(context))
}

/// A memory key.
#[derive(Debug, Clone)]
pub struct Mkey {
    /// Owner.
    pub uid: u16,
    /// Low byte of the 32-bit key, chosen by the owner.
    pub variant: u8,
    /// Not usable for access until user-mode registration makes it so.
    pub free: bool,
    /// Protection domain.
    pub pd: u32,
    /// Permissions.
    pub access: Access,
    /// First address.
    pub start: u64,
    /// Bytes; `None` for the whole address space.
    pub len: Option<u64>,
    /// How addresses are translated.
    pub translation: Translation,
    /// The context as it was given, for QUERY_MKEY.
    pub context: Vec<u8>,
    /// Translation entries that there is room for, in octowords.
    pub capacity: u32,
    /// Work requests may change the key (`umr_en`).
    pub updatable: bool,
    /// A QP number that alone may use the key, as set by a type 2B memory window.
    pub qpn: Option<u32>,
    /// UMEM whose pages it has.
    pub umem: Option<u32>,
    /// Signatures of its data, if it can have any.
    pub signature: Option<Box<Signature>>,
}

impl Mkey {
    /// The BSF that accesses go by.
    #[inline]
    pub fn bsf(&self) -> Option<&Bsf> {
        self.signature.as_ref()?.active()
    }
}

impl Weigh for Buffer {
    fn entries(&self) -> usize {
        if self.borrowed {
            0
        } else {
            self.pages.addresses.len()
        }
    }
}

impl Weigh for Umem {
    fn entries(&self) -> usize {
        self.pages.addresses.len()
    }
}

impl Weigh for Mkey {
    fn entries(&self) -> usize {
        match &self.translation {
            Translation::Physical | Translation::Device { .. } => 0,
            // A work request that changes the list gives the key its own.
            Translation::Pages { .. } if self.umem.is_some() && !self.updatable => 0,
            Translation::Pages { pages, .. } => pages.addresses.len(),
            Translation::Keys(list) | Translation::Fixed { entries: list, .. } => list.len() * 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(list: &[u64], log_size: u32) -> Pages {
        Pages {
            addresses: list.into(),
            log_size,
        }
    }

    #[test]
    fn a_buffer_ends_where_its_pages_do() {
        let p = pages(&[0x10000, 0x40000], 12);
        assert_eq!(
            Buffer::new(p.clone(), 64, 8192 - 64)
                .unwrap()
                .locate(4096 - 64),
            Some((0x40000, 4096))
        );
        assert!(Buffer::new(p.clone(), 64, 8192 - 63).is_none());
        assert!(Buffer::new(p.clone(), u64::MAX, 1).is_none());
        let b = Buffer::new(p, 64, 128).unwrap();
        assert_eq!(b.locate(0), Some((0x10040, 4032)));
        assert_eq!(b.locate(8192), None);
        assert_eq!(b.locate(u64::MAX), None);
    }

    #[test]
    fn entries_are_replaced_within_the_capacity() {
        let mut t = Translation::Pages {
            pages: pages(&[0; 8], 12),
            page_offset: 0,
        };
        let list = [0x5003u64, 0x6003].map(u64::to_be_bytes).concat();
        assert!(t.replace(3, &list, 4));
        assert!(!t.replace(4, &list, 4));
        assert!(t.replace(3, &list, 1), "a unit of four octowords");
        assert!(!t.replace(u64::MAX, &list, 4));
        let Translation::Pages { pages, .. } = t else {
            panic!()
        };
        assert_eq!(pages.addresses[..], [0, 0, 0, 0, 0, 0, 0x5000, 0x6000]);
    }

    #[test]
    fn large_pages() {
        let p = pages(&[0x20_0000], 21);
        assert_eq!(p.locate(0x1f_ffff), Some((0x3f_ffff, 1)));
        assert_eq!(p.locate(0x20_0000), None);
    }
}
