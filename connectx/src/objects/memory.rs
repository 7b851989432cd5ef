// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that objects refer to: page lists, queue buffers, UMEMs, memory keys.

use std::sync::Arc;

/// Pages of one size, given by their bus addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pages {
    /// Bus address of each page; low bits that the page size covers are 0.
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

    /// Bus address of byte `offset`, and how many bytes follow it in the same page.
    #[inline]
    pub fn locate(&self, offset: u64) -> Option<(u64, u64)> {
        let page = self
            .addresses
            .get(usize::try_from(offset >> self.log_size).ok()?)?;
        let within = offset & ((1 << self.log_size) - 1);
        Some((page + within, (1 << self.log_size) - within))
    }
}

/// A part of some pages in which a queue lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buffer {
    /// The pages.
    pub pages: Pages,
    /// First byte of the queue in the pages.
    pub start: u64,
}

impl Buffer {
    /// A queue that starts at byte `start` of `pages`, or `None` if `len` bytes do not fit.
    pub fn new(pages: Pages, start: u64, len: u64) -> Option<Self> {
        (start.checked_add(len)? <= pages.len()).then_some(Self { pages, start })
    }

    /// A buffer of nothing.
    pub fn empty() -> Self {
        Self {
            pages: Pages {
                addresses: Arc::new([]),
                log_size: 12,
            },
            start: 0,
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
    /// Through other keys, one entry after the other.
    Keys(Arc<[KeyEntry]>),
    /// None yet: made for user-mode registration.
    None,
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
    /// A QP number that alone may use the key, as set by a type 2B memory window.
    pub qpn: Option<u32>,
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
    fn large_pages() {
        let p = pages(&[0x20_0000], 21);
        assert_eq!(p.locate(0x1f_ffff), Some((0x3f_ffff, 1)));
        assert_eq!(p.locate(0x20_0000), None);
    }
}
