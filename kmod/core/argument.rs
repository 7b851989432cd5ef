// SPDX-License-Identifier: GPL-2.0
//! The size rule of ioctl arguments, that of openat2(2): a shorter argument is extended with zeros, a longer one must be
//! zero beyond what we know.

/// No argument is longer than this, whatever the future brings.
pub const LIMIT: usize = 4096;

/// How many bytes to take of an argument, and how many more must be zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes to copy in, and at most to copy out.
    pub copy: usize,
    /// Bytes after those that the caller has and we do not know.
    pub tail: usize,
}

/// Why a size is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadSize {
    /// Shorter than the first version of the structure.
    TooShort,
    /// Longer than any structure may be.
    TooLong,
}

/// Splits `size` bytes that the caller has into what we know and the tail; `first` is the size of the structure's first
/// version, `known` its size today.
pub fn extent(size: u32, first: usize, known: usize) -> Result<Extent, BadSize> {
    let size = size as usize;
    if size < first {
        return Err(BadSize::TooShort);
    }
    if size > LIMIT {
        return Err(BadSize::TooLong);
    }
    let copy = if size < known { size } else { known };
    Ok(Extent {
        copy,
        tail: size - copy,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_is_split_or_refused() {
        for size in 0..=5000 {
            match extent(size, 16, 24) {
                Err(BadSize::TooShort) => assert!(size < 16),
                Err(BadSize::TooLong) => assert!(size > 4096),
                Ok(Extent { copy, tail }) => {
                    assert_eq!(copy + tail, size as usize);
                    assert!(copy <= 24 && (tail == 0 || copy == 24));
                }
            }
        }
        assert_eq!(extent(u32::MAX, 16, 24), Err(BadSize::TooLong));
    }
}
