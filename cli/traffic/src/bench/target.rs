// SPDX-License-Identifier: MIT OR Apache-2.0
//! The end that is written to, and that says whether all has arrived.

use crate::{ends::End, pattern};
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// What was written: `count` slots of `bytes` bytes, each `stride` bytes behind the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slots {
    pub bytes: u64,
    pub stride: u64,
    pub count: u64,
}

impl Slots {
    /// Bytes from the first slot to the end of the last one's stride.
    pub fn length(&self) -> u64 {
        self.stride * self.count
    }
}

/// The memory of it, and what should be in it.
#[derive(Debug)]
pub struct Target {
    pub end: End,
    expected: Vec<u8>,
}

impl Target {
    pub fn new(end: End) -> Self {
        Self {
            end,
            expected: Vec::new(),
        }
    }

    /// From now on the data is that of `seed`, and none of it is there.
    pub fn prepare(&mut self, seed: u64, length: u64) -> Result<()> {
        ensure!(
            length <= self.end.region.length(),
            "{length} bytes were asked for, the target has {}",
            self.end.region.length()
        );
        self.expected = pattern::bytes(seed, usize::try_from(length)?);
        self.end
            .region
            .write(0, &pattern::inverse(&self.expected))?;
        Ok(())
    }

    /// Whether the slots hold the data, and what is between them is as it was. What is wrong, else.
    pub fn verify(&self, slots: Slots) -> Result<Option<String>> {
        let length = slots.stride.checked_mul(slots.count);
        ensure!(
            slots.bytes <= slots.stride && length == Some(self.expected.len() as u64),
            "{slots:?} were not prepared"
        );
        let mut seen = vec![0; self.expected.len()];
        self.end.region.read(0, &mut seen)?;
        Ok(wrong(&seen, &self.expected, slots))
    }
}

fn wrong(seen: &[u8], expected: &[u8], slots: Slots) -> Option<String> {
    let (stride, bytes) = (slots.stride as usize, slots.bytes as usize);
    let both = seen.chunks(stride).zip(expected.chunks(stride));
    for (slot, (seen, expected)) in both.enumerate() {
        let place = |at: usize| slot * stride + at;
        if let Some(at) = pattern::difference(&seen[..bytes], &expected[..bytes]) {
            return Some(format!(
                "request {slot}: byte {at} of {bytes} (offset {} of the target) is {:#04x}, should be {:#04x}{}",
                place(at),
                seen[at],
                expected[at],
                if seen[at] == !expected[at] {
                    ": nothing was written there"
                } else {
                    ""
                }
            ));
        }
        let outside = pattern::inverse(&expected[bytes..]);
        if let Some(at) = pattern::difference(&seen[bytes..], &outside) {
            return Some(format!(
                "offset {} of the target is {:#04x}, and was {:#04x}: no request was to write there",
                place(bytes + at),
                seen[bytes + at],
                outside[at]
            ));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_wrong_or_too_much_is_found() {
        let slots = Slots {
            bytes: 10,
            stride: 64,
            count: 3,
        };
        let expected = pattern::bytes(1, 192);
        let mut seen = pattern::inverse(&expected);
        for slot in 0..3 {
            let at = slot * 64;
            seen[at..at + 10].copy_from_slice(&expected[at..at + 10]);
        }
        assert_eq!(wrong(&seen, &expected, slots), None);
        let with = |at: usize, byte: u8| {
            let mut seen = seen.clone();
            seen[at] = byte;
            wrong(&seen, &expected, slots).expect("it is wrong")
        };
        let text = with(64 + 3, !expected[64 + 3]);
        assert!(
            text.starts_with("request 1: byte 3 of 10 (offset 67")
                && text.ends_with("written there"),
            "{text}"
        );
        let text = with(128, expected[128] ^ 1);
        assert!(
            text.contains("request 2: byte 0") && !text.contains("nothing"),
            "{text}"
        );
        let text = with(191, expected[191]);
        assert!(
            text.starts_with("offset 191") && text.contains("no request"),
            "{text}"
        );
    }
}
