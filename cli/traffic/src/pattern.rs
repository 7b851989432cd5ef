// SPDX-License-Identifier: MIT OR Apache-2.0
//! Data that is known on both ends without being sent: it comes from a seed.

/// So many bytes of a seed.
pub fn bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// What differs from `bytes` in each: memory that is to be written is filled with it, so that no write can be missed.
pub fn inverse(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().map(|byte| !byte).collect()
}

/// Where two differ first.
pub fn difference(seen: &[u8], expected: &[u8]) -> Option<usize> {
    if seen == expected {
        return None;
    }
    let both = seen.iter().zip(expected);
    let place = both
        .into_iter()
        .position(|(seen, expected)| seen != expected);
    Some(place.unwrap_or(seen.len().min(expected.len())))
}

/// Seeds that are not given are short enough to be typed in again, and for numbers in JSON.
const SEEDS: u64 = 1 << 32;

/// A seed that nobody has chosen.
pub fn random_seed() -> u64 {
    fastrand::u64(..SEEDS)
}

/// The seed after this one, for the next round or run.
pub fn next_seed(seed: u64) -> u64 {
    fastrand::Rng::with_seed(seed).u64(..SEEDS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_and_another_seed_other_bytes() {
        assert_eq!(bytes(3, 100), bytes(3, 100));
        assert_eq!(bytes(3, 100)[..50], bytes(3, 50));
        assert_ne!(bytes(3, 100), bytes(4, 100));
        assert_ne!(next_seed(3), next_seed(4));
    }

    #[test]
    fn the_first_difference_is_found() {
        let expected = bytes(5, 300);
        let mut seen = expected.clone();
        assert_eq!(difference(&seen, &expected), None);
        seen[299] ^= 1;
        seen[17] ^= 0x80;
        assert_eq!(difference(&seen, &expected), Some(17));
        assert_eq!(difference(&inverse(&expected), &expected), Some(0));
        assert_eq!(difference(&expected[..10], &expected), Some(10));
    }
}
