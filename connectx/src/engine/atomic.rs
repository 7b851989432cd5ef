// SPDX-License-Identifier: MIT OR Apache-2.0
//! Atomic operations on a quadword.

use crate::wire::packet::Atomic;

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
