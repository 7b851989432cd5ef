// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the guest's library and the agent say to each other: one JSON object a line each, in turn.
//!
//! A line of the guest is an [`Envelope`] with a number that the answer repeats, so that what a client that was killed
//! did not hear is told from what the next one asked. Empty lines mean nothing.

use serde::{Deserialize, Serialize};

/// Of both sides.
pub const VERSION: u32 = 1;

/// Longest copy of one request, in bytes.
pub const MOST_BYTES: usize = 16 << 10;

/// Longest line, in bytes.
pub const MOST_LINE: usize = 1 << 20;

/// What memory is, as [`HostKind`](crate::processor::HostKind) has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Kind {
    Memory,
    ReadOnly,
    Doorbell,
}

/// A message with its number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Envelope<T> {
    /// Of the request.
    pub number: u64,
    /// What is said.
    pub message: T,
}

/// To the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// A new client: whatever the last one had is let go.
    Hello {
        /// [`VERSION`].
        version: u32,
    },
    /// Pages of 4096 bytes, in the order in which kernels are to see them: runs of bus address and number of pages.
    Register {
        /// What they are.
        kind: Kind,
        /// The runs.
        pages: Vec<(u64, u64)>,
    },
    /// Memory of the GPU.
    Alloc {
        /// How much.
        bytes: u64,
    },
    /// Ends what `Register`, `Alloc` or `Launch` began; a kernel is waited for.
    Release {
        /// Its number.
        id: u64,
    },
    /// Copies to the GPU's address.
    Write {
        /// The address.
        address: u64,
        /// At most [`MOST_BYTES`].
        #[serde(with = "hex")]
        bytes: Vec<u8>,
    },
    /// Copies from the GPU's address.
    Read {
        /// The address.
        address: u64,
        /// At most [`MOST_BYTES`].
        bytes: u64,
    },
    /// Starts a kernel of one argument in blocks of one thread.
    Launch {
        /// Its name.
        kernel: String,
        /// How many.
        blocks: u32,
        /// The argument.
        argument: u64,
    },
    /// Waits for a kernel, at most so long.
    Wait {
        /// Its number.
        id: u64,
        /// How long.
        milliseconds: u64,
    },
}

/// From the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// What runs kernels.
    Hello {
        /// Its name.
        processor: String,
    },
    /// Of `Register` and `Alloc`.
    Memory {
        /// To release it by.
        id: u64,
        /// Where the GPU sees it.
        address: u64,
    },
    /// Of `Release` and `Write`.
    Done,
    /// Of `Read`.
    Bytes {
        /// As many as were asked for.
        #[serde(with = "hex")]
        bytes: Vec<u8>,
    },
    /// Of `Launch`.
    Launched {
        /// To wait for it by.
        id: u64,
    },
    /// Of `Wait`.
    Ended {
        /// Whether it has.
        ended: bool,
    },
    /// What was asked for was not done.
    Failed {
        /// As of the library's errors.
        errno: i32,
        /// In words.
        why: String,
    },
}

/// Bytes as a string of hexadecimal digits.
mod hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble)]);
        let text: String = bytes
            .iter()
            .flat_map(|byte| [digit(byte >> 4), digit(byte & 15)])
            .collect();
        to.serialize_str(&text)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        let text = String::deserialize(from)?;
        let value = |digit: u8| char::from(digit).to_digit(16);
        let bytes = text.as_bytes().chunks(2).map(|pair| match *pair {
            [high, low] => Some(((value(high)? << 4) | value(low)?) as u8),
            _ => None,
        });
        let bytes: Option<Vec<u8>> = bytes.collect();
        bytes.ok_or_else(|| D::Error::custom("bytes are pairs of hexadecimal digits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_and_bad_digits_do_not() {
        let bytes: Vec<u8> = (0..=255).collect();
        let message = Request::Write {
            address: u64::MAX,
            bytes,
        };
        let text = serde_json::to_string(&Envelope {
            number: 7,
            message: &message,
        })
        .expect("JSON");
        assert!(text.contains("\"000102") && !text.contains('\n'));
        let back: Envelope<Request> = serde_json::from_str(&text).expect("the same");
        assert_eq!((back.number, back.message), (7, message));
        for wrong in ["0", "0g", "zz", "\u{e9}"] {
            let text = format!("{{\"Write\":{{\"address\":0,\"bytes\":\"{wrong}\"}}}}");
            assert!(serde_json::from_str::<Request>(&text).is_err(), "{wrong}");
        }
    }
}
