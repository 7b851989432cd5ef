// SPDX-License-Identifier: MIT OR Apache-2.0
//! The same sums, plainly: what every rank has, added up one by one. Floats are added in the order of the ring, so that the
//! results are equal to the last bit.

use crate::ring::{ELEMENT_BYTES, Type};

/// Bits that differ in each rank, call and place (splitmix64's finish).
fn bits(rank: u16, call: u32, at: usize) -> u64 {
    let mut x = ((u64::from(rank) << 48) | (u64::from(call) << 32))
        .wrapping_add(at as u64)
        .wrapping_add(1)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Of both signs and of sizes from 2^-8 to 2^7, so that sums in another order differ.
fn float(rank: u16, call: u32, at: usize) -> f32 {
    let bits = bits(rank, call, at);
    let exponent = 119 + ((bits >> 40) & 15) as u32;
    f32::from_bits((bits as u32 & 0x8000_0000) | (exponent << 23) | (bits as u32 & 0x007f_ffff))
}

fn element(kind: Type, rank: u16, call: u32, at: usize) -> [u8; ELEMENT_BYTES] {
    match kind {
        Type::U32 => (bits(rank, call, at) as u32).to_ne_bytes(),
        Type::F32 => float(rank, call, at).to_ne_bytes(),
    }
}

/// What a rank has before a call.
pub fn vector(kind: Type, rank: u16, call: u32, count: usize) -> Vec<u8> {
    (0..count)
        .flat_map(|at| element(kind, rank, call, at))
        .collect()
}

/// The sum at a place: the ring begins with the rank that the segment is of.
fn sum(kind: Type, size: u16, call: u32, at: usize, segment: u16) -> [u8; ELEMENT_BYTES] {
    let ranks = (0..size).map(|step| (segment + step) % size);
    match kind {
        Type::U32 => ranks
            .map(|rank| bits(rank, call, at) as u32)
            .fold(0_u32, u32::wrapping_add)
            .to_ne_bytes(),
        Type::F32 => ranks
            .map(|rank| float(rank, call, at))
            .reduce(|sum, own| own + sum)
            .unwrap_or_default()
            .to_ne_bytes(),
    }
}

/// The first place at which a result is not the sum, with what is there and should be, in hexadecimal.
pub fn difference(kind: Type, size: u16, call: u32, result: &[u8]) -> Option<String> {
    let count = result.len() / ELEMENT_BYTES;
    let segment_length = count.div_ceil(usize::from(size));
    (0..count).find_map(|at| {
        let mut is = [0; ELEMENT_BYTES];
        is.copy_from_slice(&result[at * ELEMENT_BYTES..][..ELEMENT_BYTES]);
        let should = sum(kind, size, call, at, (at / segment_length) as u16);
        let [is, should] = [is, should].map(u32::from_ne_bytes);
        (is != should).then(|| format!("element {at} is {is:#010x}, should be {should:#010x}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_order_of_floats_is_another_sum() {
        let differ = (0..1000)
            .filter(|&at| sum(Type::F32, 4, 1, at, 0) != sum(Type::F32, 4, 1, at, 2))
            .count();
        assert!(differ > 100, "{differ} of 1000");
        let other = (0..1000).all(|at| sum(Type::U32, 4, 1, at, 0) == sum(Type::U32, 4, 1, at, 2));
        assert!(other, "integers have no order");
    }

    #[test]
    fn one_wrong_bit_is_found() {
        for kind in [Type::U32, Type::F32] {
            // Two ranks, three elements: segments of two and one.
            let mut result: Vec<u8> = [0, 0, 1]
                .iter()
                .enumerate()
                .flat_map(|(at, &segment)| sum(kind, 2, 7, at, segment))
                .collect();
            assert_eq!(difference(kind, 2, 7, &result), None);
            result[8] ^= 1;
            let found = difference(kind, 2, 7, &result).expect("a bit differs");
            assert!(found.starts_with("element 2 is "), "{found}");
        }
    }

    #[test]
    fn vectors_differ_in_rank_call_and_place() {
        let one = vector(Type::F32, 0, 1, 100);
        assert_ne!(one, vector(Type::F32, 1, 1, 100));
        assert_ne!(one, vector(Type::F32, 0, 2, 100));
        assert_ne!(one[..4], one[4..8]);
    }
}
