// SPDX-License-Identifier: MIT OR Apache-2.0
//! Access to memory through keys: existence, owner domain, permission, bounds, translation.

use super::indirect;
use super::lent::Data;
use super::signature;
use super::wqe::Sge;
use crate::objects::device::{Device, Host};
use crate::objects::memic;
use crate::objects::memory::{Access, Mkey, NULL_MKEY, Translation};
use crate::objects::table::Table;
use crate::platform::DmaFault;
use crate::wire::packet::Reth;

/// What an access does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Purpose {
    LocalRead,
    LocalWrite,
    RemoteRead,
    RemoteWrite,
    RemoteAtomic,
}

impl Purpose {
    fn permitted(self, access: Access) -> bool {
        match self {
            Self::LocalRead => access.local_read,
            Self::LocalWrite => access.local_write,
            Self::RemoteRead => access.remote_read,
            Self::RemoteWrite => access.remote_write,
            Self::RemoteAtomic => access.atomic,
        }
    }

    fn writes(self) -> bool {
        !matches!(self, Self::LocalRead | Self::RemoteRead)
    }

    fn field(self) -> &'static str {
        match self {
            Self::LocalRead => "lr",
            Self::LocalWrite => "lw",
            Self::RemoteRead => "rr",
            Self::RemoteWrite => "rw",
            Self::RemoteAtomic => "a",
        }
    }
}

/// Why an access is denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Denied {
    /// No such key, or its variant byte differs, or it is free.
    Key,
    /// The key belongs to another protection domain.
    Domain,
    /// The key does not permit it.
    Permission,
    /// The range leaves the key's.
    Bounds,
    /// The key's translation leads nowhere.
    Translation,
    /// The key has signatures, and this is no access that can have them.
    Signature,
    /// Memory could not be reached.
    Dma,
    /// A page is not there now: the key that has it, the address under that, and the bytes that are needed from there.
    Absent { key: u32, address: u64, len: u64 },
    /// The memory that a packet's data lies in was taken away while it was delivered: nobody's fault here.
    Sender,
}

/// Whose access it is: protection domain and, for windows bound to one, queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Accessor {
    pub pd: u32,
    pub qpn: u32,
}

/// A range of addresses under a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Range {
    pub key: u32,
    pub address: u64,
    pub len: u64,
}

impl From<Sge> for Range {
    fn from(sge: Sge) -> Self {
        Self {
            key: sge.key,
            address: sge.address,
            len: u64::from(sge.len),
        }
    }
}

/// How deep keys may refer to keys.
const MAX_DEPTH: u32 = 2;

/// The memory key of a 32-bit key, if its variant byte is right.
fn find(keys: &Table<Mkey>, key: u32) -> Result<&Mkey, Denied> {
    keys.get(key >> 8)
        .filter(|k| k.variant == key as u8 && !k.free)
        .ok_or(Denied::Key)
}

fn examine(
    keys: &Table<Mkey>,
    who: Accessor,
    range: Range,
    purpose: Purpose,
) -> Result<&Mkey, Denied> {
    let key = find(keys, range.key)?;
    if key.pd != who.pd || key.qpn.is_some_and(|qpn| qpn != who.qpn) {
        return Err(Denied::Domain);
    }
    if !purpose.permitted(key.access) {
        return Err(Denied::Permission);
    }
    let offset = range.address.checked_sub(key.start);
    if let Some(bsf) = key.bsf() {
        if purpose == Purpose::RemoteAtomic {
            return Err(Denied::Signature);
        }
        let extent = offset.and_then(|offset| bsf.extent(offset, range.len));
        let end = bsf.memory_end(extent.ok_or(Denied::Bounds)?.data.1);
        if key.len.is_some_and(|len| end > len) {
            return Err(Denied::Bounds);
        }
    } else if let Some(len) = key.len {
        let inside = offset
            .and_then(|offset| offset.checked_add(range.len))
            .is_some_and(|end| end <= len);
        if !inside {
            return Err(Denied::Bounds);
        }
    }
    Ok(key)
}

/// How far a translation may go, and whether its pages must be writable.
#[derive(Clone, Copy)]
struct How {
    depth: u32,
    write: bool,
}

impl How {
    fn of(purpose: Purpose) -> Self {
        Self {
            depth: MAX_DEPTH,
            write: purpose.writes(),
        }
    }

    /// One key deeper.
    fn deeper(self) -> Option<Self> {
        Some(Self {
            depth: self.depth.checked_sub(1)?,
            ..self
        })
    }
}

/// Calls `f` with the bus address and the part of the range for each piece that is contiguous in memory.
fn walk(
    keys: &Table<Mkey>,
    key: &Mkey,
    range: Range,
    how: How,
    f: &mut dyn FnMut(u64, std::ops::Range<usize>) -> Result<(), Denied>,
    done: usize,
) -> Result<(), Denied> {
    let Range { address, len, .. } = range;
    match &key.translation {
        Translation::Physical => f(address, done..done + len as usize),
        Translation::Device { start } => f(
            memic::WINDOW | start.wrapping_add(address.wrapping_sub(key.start)),
            done..done + len as usize,
        ),
        Translation::Pages { pages, page_offset } => {
            let mut at = 0;
            while at < len {
                let offset = address
                    .wrapping_sub(key.start)
                    .wrapping_add(*page_offset)
                    .wrapping_add(at);
                if pages.is_absent(offset, how.write) {
                    return Err(Denied::Absent {
                        key: range.key,
                        address: address.wrapping_add(at),
                        len: len - at,
                    });
                }
                let (bus, left) = pages.locate(offset).ok_or(Denied::Translation)?;
                let piece = left.min(len - at);
                f(bus, done + at as usize..done + (at + piece) as usize)?;
                at += piece;
            }
            Ok(())
        }
        Translation::Keys(entries) => {
            let deeper = how.deeper().ok_or(Denied::Translation)?;
            let mut at = 0;
            let offset = address.wrapping_sub(key.start);
            indirect::pieces(entries, offset, len, &mut |entry| {
                let from = done + at as usize;
                let part = Range {
                    key: entry.key,
                    address: entry.address,
                    len: u64::from(entry.len),
                };
                at += part.len;
                walk_inner(keys, key, part, deeper, f, from)
            })
        }
        Translation::Fixed { entries, log_size } => {
            let deeper = how.deeper().ok_or(Denied::Translation)?;
            let size = 1u64 << log_size;
            let mut at = 0;
            while at < len {
                let offset = address.wrapping_sub(key.start).wrapping_add(at);
                let index = usize::try_from(offset >> log_size);
                let entry = index.ok().and_then(|index| entries.get(index));
                let entry = entry.ok_or(Denied::Translation)?;
                let within = offset & (size - 1);
                let part = Range {
                    key: entry.key,
                    address: entry.address.wrapping_add(within),
                    len: (size - within).min(len - at),
                };
                walk_inner(keys, key, part, deeper, f, done + at as usize)?;
                at += part.len;
            }
            Ok(())
        }
    }
}

/// The same for a range under a key that another key refers to.
fn walk_inner(
    keys: &Table<Mkey>,
    outer: &Mkey,
    range: Range,
    how: How,
    f: &mut dyn FnMut(u64, std::ops::Range<usize>) -> Result<(), Denied>,
    done: usize,
) -> Result<(), Denied> {
    let Range { key, address, len } = range;
    if key == NULL_MKEY {
        return Err(Denied::Absent { key, address, len });
    }
    let inner = find(keys, key)?;
    if inner.pd != outer.pd {
        return Err(Denied::Domain);
    }
    if inner.bsf().is_some() {
        return Err(Denied::Signature);
    }
    let within = |all| {
        let offset = address.wrapping_sub(inner.start);
        offset.checked_add(len).is_some_and(|end| end <= all)
    };
    if !inner.len.is_none_or(within) {
        return Err(Denied::Bounds);
    }
    walk(keys, inner, range, how, f, done)
}

/// Calls `f` as [`walk`] does with the pieces of a range of a key's memory, whatever signatures it has.
pub(super) fn walk_key(
    device: &Device,
    key: &Mkey,
    range: Range,
    purpose: Purpose,
    f: &mut dyn FnMut(u64, std::ops::Range<usize>) -> Result<(), Denied>,
) -> Result<(), Denied> {
    walk(&device.mkeys, key, range, How::of(purpose), f, 0)
}

/// Whether a key has signatures: data under it is never where it is sent from.
pub fn is_signed(device: &Device, key: u32) -> bool {
    find(&device.mkeys, key).is_ok_and(|key| key.bsf().is_some())
}

/// Does something under a key that permits it. What is denied is reported.
fn permitted<T>(
    device: &Device,
    who: Accessor,
    range: Range,
    purpose: Purpose,
    f: impl FnOnce(&Mkey) -> Result<T, Denied>,
) -> Result<T, Denied> {
    examine(&device.mkeys, who, range, purpose)
        .and_then(f)
        .inspect_err(|denied| report(device, who, range, purpose, *denied))
}

fn report(device: &Device, who: Accessor, range: Range, purpose: Purpose, denied: Denied) {
    if matches!(denied, Denied::Absent { .. }) {
        // Nobody's mistake: whoever wants the page waits for it.
        return;
    }
    let (field, rule): (&str, &str) = match denied {
        Denied::Key => (
            "key",
            "a key that exists, is valid and has the right variant byte",
        ),
        Denied::Domain => (
            "pd",
            "the key and the queue pair are in one protection domain",
        ),
        Denied::Permission => (purpose.field(), "the key permits this access"),
        Denied::Bounds => ("address", "the range lies within the key's"),
        Denied::Translation => ("translation", "the key's translation covers the range"),
        Denied::Signature => (
            "bsf",
            "a key with signatures has its PSVs, and is read or written by itself",
        ),
        Denied::Dma | Denied::Sender | Denied::Absent { .. } => {
            ("address", "the memory behind the key is reachable")
        }
    };
    let value = match denied {
        Denied::Key | Denied::Domain | Denied::Permission | Denied::Signature => {
            u64::from(range.key)
        }
        _ => range.address,
    };
    let object = format!(
        "mkey {:#x} for qp {:#x}: {purpose:?} of {} bytes",
        range.key, who.qpn, range.len
    );
    device.refuse(object, field, value, rule, "PRM memory key context");
}

/// Checks an access without doing it.
pub fn check(device: &Device, who: Accessor, range: Range, purpose: Purpose) -> Result<(), Denied> {
    permitted(device, who, range, purpose, |_| Ok(()))
}

/// Fails with the page that is missing of a range, if one is.
fn present(device: &Device, key: &Mkey, range: Range, purpose: Purpose) -> Result<(), Denied> {
    // With signatures, what is where is found when it is done.
    if key.bsf().is_some() || in_one_page(key, range, purpose.writes()).is_some() {
        return Ok(());
    }
    match walk_key(device, key, range, purpose, &mut |_, _| Ok(())) {
        Err(denied @ Denied::Absent { .. }) => Err(denied),
        _ => Ok(()),
    }
}

/// The page that an access waits for, if one is missing.
pub(super) fn absent(
    device: &Device,
    who: Accessor,
    range: Range,
    purpose: Purpose,
) -> Option<Denied> {
    let key = examine(&device.mkeys, who, range, purpose).ok()?;
    present(device, key, range, purpose).err()
}

/// Checks an access without doing it, and that the memory is there.
pub(super) fn check_present(
    device: &Device,
    who: Accessor,
    range: Range,
    purpose: Purpose,
) -> Result<(), Denied> {
    permitted(device, who, range, purpose, |key| {
        present(device, key, range, purpose)
    })
}

/// What is done to each contiguous piece: bus address, and the part of the range that it is.
pub(super) type PieceFn<'a> =
    dyn FnMut(&Host, u64, std::ops::Range<usize>) -> Result<(), Denied> + 'a;

/// Bus address of a range that lies in one page, as most do.
#[inline]
fn in_one_page(key: &Mkey, range: Range, write: bool) -> Option<u64> {
    let Translation::Pages { pages, page_offset } = &key.translation else {
        return None;
    };
    let offset = range
        .address
        .wrapping_sub(key.start)
        .wrapping_add(*page_offset);
    if pages.is_absent(offset, write) {
        return None;
    }
    let (bus, left) = pages.locate(offset)?;
    (range.len > 0 && range.len <= left).then_some(bus)
}

/// Calls `f` for each contiguous piece of a range under a key that permits it and has no signatures.
fn pieces(
    device: &Device,
    key: &Mkey,
    range: Range,
    purpose: Purpose,
    f: &mut PieceFn<'_>,
) -> Result<(), Denied> {
    let mut on_host = |bus, part| f(&device.host, bus, part);
    match in_one_page(key, range, purpose.writes()) {
        Some(bus) => on_host(bus, 0..range.len as usize),
        None => walk_key(device, key, range, purpose, &mut on_host),
    }
}

/// Calls `f` for each contiguous piece of a range, once it is known to be permitted.
pub(super) fn each(
    device: &Device,
    who: Accessor,
    range: Range,
    purpose: Purpose,
    f: &mut PieceFn<'_>,
) -> Result<(), Denied> {
    permitted(device, who, range, purpose, |key| match key.bsf() {
        Some(_) => Err(Denied::Signature),
        None => pieces(device, key, range, purpose, f),
    })
}

/// Reads `buf.len()` bytes at an address under a key.
pub fn read(
    device: &Device,
    who: Accessor,
    key: u32,
    address: u64,
    purpose: Purpose,
    buf: &mut [u8],
) -> Result<(), Denied> {
    let range = Range {
        key,
        address,
        len: buf.len() as u64,
    };
    permitted(device, who, range, purpose, |key| {
        if let Some(access) = signature::Access::new(device, key, range) {
            return access?.read(buf);
        }
        pieces(device, key, range, purpose, &mut |host, bus, part| {
            let piece = buf.get_mut(part).ok_or(Denied::Translation)?;
            host.read(bus, piece).map_err(|_| Denied::Dma)
        })
    })
}

/// Writes `data` at an address under a key.
pub fn write(
    device: &Device,
    who: Accessor,
    key: u32,
    address: u64,
    purpose: Purpose,
    data: Data<'_>,
) -> Result<(), Denied> {
    let range = Range {
        key,
        address,
        len: data.len() as u64,
    };
    permitted(device, who, range, purpose, |key| {
        if let Some(access) = signature::Access::new(device, key, range) {
            return access?.write(data);
        }
        pieces(device, key, range, purpose, &mut |host, bus, part| {
            data.part(part).store(host, bus)
        })
    })
}

/// Changes an aligned word of 4 or 8 bytes under a key; `change` and the result have it as the host's processor loads it.
pub fn atomic(
    device: &Device,
    who: Accessor,
    target: Reth,
    change: &mut dyn FnMut(u64) -> Option<u64>,
) -> Result<u64, Denied> {
    let mut old = 0;
    let range = Range {
        key: target.rkey,
        address: target.address,
        len: u64::from(target.len),
    };
    each(
        device,
        who,
        range,
        Purpose::RemoteAtomic,
        &mut |host, bus, part| {
            if part != (0..target.len as usize) {
                return Err(Denied::Translation);
            }
            old = on_word(host, bus, target.len, change).map_err(|_| Denied::Dma)?;
            Ok(())
        },
    )?;
    Ok(old)
}

/// An atomic change of 8 bytes, or of 4 bytes by one of the quadword that they lie in.
fn on_word(
    host: &Host,
    bus: u64,
    len: u32,
    change: &mut dyn FnMut(u64) -> Option<u64>,
) -> Result<u64, DmaFault> {
    if len == 8 {
        return host.atomic64(bus, change);
    }
    let upper = (bus & 4 != 0) == cfg!(target_endian = "little");
    let shift = if upper { 32 } else { 0 };
    let mask = u64::from(u32::MAX) << shift;
    let mut within = |quad: u64| {
        let new = change((quad & mask) >> shift)?;
        Some(quad & !mask | (new << shift) & mask)
    };
    // An address that is not aligned to 4 stays unaligned, and is refused.
    let quad = host.atomic64(bus & !4, &mut within)?;
    Ok((quad & mask) >> shift)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::memory::{KeyEntry, Pages};

    const ALL: Access = Access {
        local_read: true,
        local_write: true,
        remote_read: true,
        remote_write: true,
        atomic: true,
    };

    fn key(translation: Translation, start: u64, len: u64, access: Access) -> Mkey {
        Mkey {
            uid: 0,
            variant: 7,
            free: false,
            pd: 1,
            access,
            start,
            len: Some(len),
            translation,
            context: vec![],
            capacity: 0,
            updatable: false,
            qpn: None,
            umem: None,
            signature: None,
        }
    }

    fn pages(list: &[u64]) -> Pages {
        Pages {
            addresses: list.into(),
            log_size: 12,
        }
    }

    fn pieces(
        keys: &Table<Mkey>,
        k: u32,
        address: u64,
        len: u64,
    ) -> Result<Vec<(u64, usize)>, Denied> {
        let who = Accessor { pd: 1, qpn: 5 };
        let range = Range {
            key: k,
            address,
            len,
        };
        let found = examine(keys, who, range, Purpose::RemoteWrite)?;
        let mut list = vec![];
        walk(
            keys,
            found,
            range,
            How::of(Purpose::RemoteWrite),
            &mut |bus, part| {
                list.push((bus, part.len()));
                Ok(())
            },
            0,
        )?;
        Ok(list)
    }

    #[test]
    fn pages_translate_with_an_unaligned_start() {
        let mut keys = Table::new(0x10, 16);
        let translation = Translation::Pages {
            pages: pages(&[0xa000, 0xc000]),
            page_offset: 0x800,
        };
        keys.insert(key(translation, 0x7000_0800, 0x1000, ALL));
        let k = 0x1007;
        assert_eq!(
            pieces(&keys, k, 0x7000_0800, 0x1000),
            Ok(vec![(0xa800, 0x800), (0xc000, 0x800)])
        );
        assert_eq!(pieces(&keys, k, 0x7000_17ff, 1), Ok(vec![(0xc7ff, 1)]));
        assert_eq!(pieces(&keys, k, 0x7000_17ff, 2), Err(Denied::Bounds));
        assert_eq!(pieces(&keys, k, 0x7000_07ff, 1), Err(Denied::Bounds));
        assert_eq!(pieces(&keys, k, u64::MAX, 2), Err(Denied::Bounds));
        assert_eq!(
            pieces(&keys, 0x1008, 0x7000_0800, 1),
            Err(Denied::Key),
            "variant byte"
        );
        assert_eq!(pieces(&keys, 0x9907, 0x7000_0800, 1), Err(Denied::Key));
    }

    #[test]
    fn domain_and_permission() {
        let mut keys = Table::new(0x10, 16);
        let readable = Access {
            remote_write: false,
            atomic: false,
            ..ALL
        };
        keys.insert(key(Translation::Physical, 0, 0x1000, readable));
        let range = Range {
            key: 0x1007,
            address: 0,
            len: 1,
        };
        let by = |pd, purpose| examine(&keys, Accessor { pd, qpn: 1 }, range, purpose).err();
        assert_eq!(by(2, Purpose::RemoteRead), Some(Denied::Domain));
        assert_eq!(by(1, Purpose::RemoteRead), None);
        assert_eq!(by(1, Purpose::RemoteWrite), Some(Denied::Permission));
        assert_eq!(by(1, Purpose::RemoteAtomic), Some(Denied::Permission));
    }

    #[test]
    fn keys_through_keys_end_at_a_bounded_depth() {
        let mut keys = Table::new(0x10, 16);
        keys.insert(key(Translation::Physical, 0, u64::MAX, ALL));
        let list = [
            KeyEntry {
                len: 16,
                key: 0x1007,
                address: 0x500,
            },
            KeyEntry {
                len: 16,
                key: 0x1007,
                address: 0x900,
            },
        ];
        keys.insert(key(Translation::Keys(list.into()), 0, 32, ALL));
        assert_eq!(
            pieces(&keys, 0x1107, 8, 16),
            Ok(vec![(0x508, 8), (0x900, 8)])
        );
        // A key that refers to itself.
        let own = [KeyEntry {
            len: 16,
            key: 0x1207,
            address: 0,
        }];
        keys.insert(key(Translation::Keys(own.into()), 0, 16, ALL));
        assert_eq!(pieces(&keys, 0x1207, 0, 16), Err(Denied::Translation));
    }
}
