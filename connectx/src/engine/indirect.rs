// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which pieces of other keys make up a range of an indirect key: entries one after the other, or a pattern of them that
//! is repeated.

use super::memory::Denied;
use crate::objects::memory::KeyEntry;

/// What stands in place of a key in the entry that begins a pattern (rdma-core's `umr_strided_seg_create`, `op`). No key has
/// this value.
const REPEAT: u32 = 0x400;

/// A list of entries that is a pattern.
struct Pattern<'a> {
    /// Bytes of one turn.
    turn: u64,
    turns: u64,
    entries: &'a [KeyEntry],
}

impl<'a> Pattern<'a> {
    /// The first entry has the bytes of a turn, how many turns, and how many entries follow.
    fn of(list: &'a [KeyEntry]) -> Option<Result<Self, Denied>> {
        let (head, rest) = list.split_first().filter(|(head, _)| head.key == REPEAT)?;
        let entries = rest.get(..usize::from(head.address as u16));
        let turn = u64::from(head.len);
        // An entry of nothing would let a short range take as many steps as there are entries, at each of its bytes.
        let fits = |entries: &&[KeyEntry]| {
            let sizes = entries.iter().map(|entry| u64::from(entry.len & 0xffff));
            turn > 0 && sizes.clone().all(|size| size > 0) && sizes.sum::<u64>() == turn
        };
        Some(match entries.filter(fits) {
            Some(entries) => Ok(Self {
                turn,
                turns: head.address >> 32,
                entries,
            }),
            None => Err(Denied::Translation),
        })
    }
}

/// Calls `f` with each piece of `len` bytes from byte `offset` of what a list of entries describes.
pub(super) fn pieces(
    list: &[KeyEntry],
    offset: u64,
    len: u64,
    f: &mut dyn FnMut(KeyEntry) -> Result<(), Denied>,
) -> Result<(), Denied> {
    let mut cut = Cut {
        skip: offset,
        left: len,
        f,
    };
    match Pattern::of(list) {
        None => {
            for entry in list {
                if cut.left == 0 {
                    break;
                }
                cut.take(*entry)?;
            }
        }
        Some(pattern) => {
            let pattern = pattern?;
            let first = offset / pattern.turn;
            cut.skip = offset % pattern.turn;
            for turn in first..pattern.turns {
                if cut.left == 0 {
                    break;
                }
                for entry in pattern.entries {
                    let stride = u64::from(entry.len >> 16);
                    cut.take(KeyEntry {
                        len: entry.len & 0xffff,
                        address: entry.address.wrapping_add(turn.wrapping_mul(stride)),
                        ..*entry
                    })?;
                }
            }
        }
    }
    if cut.left == 0 {
        Ok(())
    } else {
        Err(Denied::Translation)
    }
}

/// What of a sequence of pieces lies within a range.
struct Cut<'a> {
    skip: u64,
    left: u64,
    f: &'a mut dyn FnMut(KeyEntry) -> Result<(), Denied>,
}

impl Cut<'_> {
    fn take(&mut self, entry: KeyEntry) -> Result<(), Denied> {
        let size = u64::from(entry.len);
        if self.skip >= size {
            self.skip -= size;
            return Ok(());
        }
        let len = (size - self.skip).min(self.left);
        let address = entry.address.wrapping_add(self.skip);
        self.skip = 0;
        if len == 0 {
            return Ok(());
        }
        self.left -= len;
        (self.f)(KeyEntry {
            len: len as u32,
            key: entry.key,
            address,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(len: u32, key: u32, address: u64) -> KeyEntry {
        KeyEntry { len, key, address }
    }

    fn cut(list: &[KeyEntry], offset: u64, len: u64) -> Result<Vec<(u64, u32)>, Denied> {
        let mut found = vec![];
        pieces(list, offset, len, &mut |piece| {
            found.push((piece.address, piece.len));
            Ok(())
        })?;
        Ok(found)
    }

    #[test]
    fn a_list() {
        let list = [
            entry(8, 7, 0x100),
            entry(0, 7, 0x900),
            entry(8, 7, 0x200),
            entry(0, 0, 0),
        ];
        assert_eq!(cut(&list, 0, 16), Ok(vec![(0x100, 8), (0x200, 8)]));
        assert_eq!(cut(&list, 7, 2), Ok(vec![(0x107, 1), (0x200, 1)]));
        assert_eq!(cut(&list, 0, 17), Err(Denied::Translation));
    }

    #[test]
    fn a_pattern() {
        // Three turns of 8 bytes every 10, and 4 bytes every 6.
        let head = entry(12, REPEAT, (3 << 32) | 2);
        let list = [
            head,
            entry((10 << 16) | 8, 7, 0x100),
            entry((6 << 16) | 4, 7, 0x200),
        ];
        let all = vec![
            (0x100, 8),
            (0x200, 4),
            (0x10a, 8),
            (0x206, 4),
            (0x114, 8),
            (0x20c, 4),
        ];
        assert_eq!(cut(&list, 0, 36), Ok(all));
        assert_eq!(
            cut(&list, 19, 4),
            Ok(vec![(0x111, 1), (0x206, 3)]),
            "from the middle"
        );
        assert_eq!(cut(&list, 0, 37), Err(Denied::Translation));
        assert_eq!(cut(&list, 36, 1), Err(Denied::Translation));
        for wrong in [
            entry(13, REPEAT, (3 << 32) | 2),
            entry(12, REPEAT, (3 << 32) | 3),
            entry(0, REPEAT, 3 << 32),
        ] {
            let list = [wrong, list[1], list[2]];
            assert_eq!(cut(&list, 0, 1), Err(Denied::Translation), "{wrong:?}");
        }
    }
}
