// SPDX-License-Identifier: MIT OR Apache-2.0
//! Atomic operations on 8 bytes, and on 4.

use super::wqe::{Wrong, take};
use crate::ifc::wqe::{EXTENDED_ATOMIC, atomic, masked_atomic, masked_atomic_32, send};
use crate::wire::packet::Atomic;

/// Takes the atomic segments off a WQE. Gives the operation and the bytes that it works on.
pub(super) fn parse(opcode: u8, opmod: u8, rest: &mut &[u8]) -> Result<(Atomic, u32), Wrong> {
    let masked = matches!(opcode, send::ATOMIC_MASKED_CS | send::ATOMIC_MASKED_FA);
    let is_add = matches!(opcode, send::ATOMIC_FA | send::ATOMIC_MASKED_FA);
    let len = match opmod.wrapping_sub(EXTENDED_ATOMIC) {
        0 if masked => 4,
        1 if masked => 8,
        _ if !masked => 8,
        _ => {
            let rule = "the size of a masked atomic is one of atomic_size_qp";
            return Err(("opmod", u64::from(opmod), rule));
        }
    };
    let operation = if len == 4 {
        let s = take(rest, masked_atomic_32::SIZE)?;
        if is_add {
            Atomic::FetchAdd {
                add: masked_atomic_32::swap_add.get(s),
                boundary: masked_atomic_32::compare.get(s),
            }
        } else {
            Atomic::CompareSwap {
                compare: masked_atomic_32::compare.get(s),
                compare_mask: masked_atomic_32::compare_mask.get(s),
                swap: masked_atomic_32::swap_add.get(s),
                swap_mask: masked_atomic_32::swap_add_mask.get(s),
            }
        }
    } else if is_add {
        let s = take(rest, atomic::SIZE)?;
        // The second quadword marks the bits at which a field ends: carries stop there.
        let boundary = if masked { atomic::compare.get(s) } else { 0 };
        Atomic::FetchAdd {
            add: atomic::swap_add.get(s),
            boundary,
        }
    } else if masked {
        let s = take(rest, masked_atomic::SIZE)?;
        Atomic::CompareSwap {
            compare: masked_atomic::compare.get(s),
            compare_mask: masked_atomic::compare_mask.get(s),
            swap: masked_atomic::swap_add.get(s),
            swap_mask: masked_atomic::swap_add_mask.get(s),
        }
    } else {
        let s = take(rest, atomic::SIZE)?;
        Atomic::CompareSwap {
            compare: atomic::compare.get(s),
            compare_mask: u64::MAX,
            swap: atomic::swap_add.get(s),
            swap_mask: u64::MAX,
        }
    };
    Ok((operation, len))
}

/// The new value, or `None` if the comparison fails.
pub(super) fn apply(operation: Atomic, old: u64) -> Option<u64> {
    match operation {
        Atomic::CompareSwap {
            compare,
            compare_mask,
            swap,
            swap_mask,
        } => ((old ^ compare) & compare_mask == 0).then_some(old & !swap_mask | swap & swap_mask),
        Atomic::FetchAdd { add, boundary: 0 } => Some(old.wrapping_add(add)),
        Atomic::FetchAdd { add, boundary } => {
            // Add without the boundary bits, so that no carry leaves a field, and set these by themselves.
            let low = (old & !boundary).wrapping_add(add & !boundary);
            Some(low ^ ((old ^ add) & boundary))
        }
    }
}

/// A word as the processor loads it, in the order in which the device counts, and back.
pub(super) fn in_order(word: u64, len: u32, host_order: bool) -> u64 {
    match (host_order, len) {
        (true, _) => word,
        (false, 4) => u64::from((word as u32).to_be()),
        (false, _) => word.to_be(),
    }
}

/// A result as it lies in memory: its first `len` bytes.
pub(super) fn to_bytes(result: u64, len: u32, host_order: bool) -> [u8; 8] {
    let word = in_order(result, len, host_order);
    let mut bytes = word.to_ne_bytes();
    if len == 4 {
        bytes[..4].copy_from_slice(&(word as u32).to_ne_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn atomics() {
        let cas = |compare, swap| Atomic::CompareSwap {
            compare,
            compare_mask: u64::MAX,
            swap,
            swap_mask: u64::MAX,
        };
        assert_eq!(apply(cas(5, 9), 5), Some(9));
        assert_eq!(apply(cas(5, 9), 6), None);
        let masked = Atomic::CompareSwap {
            compare: 0x05,
            compare_mask: 0xff,
            swap: 0x0900,
            swap_mask: 0xff00,
        };
        assert_eq!(apply(masked, 0xaabb_1205), Some(0xaabb_0905));
        assert_eq!(
            apply(
                Atomic::FetchAdd {
                    add: 2,
                    boundary: 0
                },
                u64::MAX
            ),
            Some(1)
        );
        // Two 32-bit fields: no carry from the low into the high one.
        let two = Atomic::FetchAdd {
            add: 0x0000_0001_0000_0001,
            boundary: 0x8000_0000_8000_0000,
        };
        assert_eq!(
            apply(two, 0x0000_0005_ffff_ffff),
            Some(0x0000_0006_0000_0000)
        );
    }
}
