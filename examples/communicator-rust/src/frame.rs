// SPDX-License-Identifier: MIT OR Apache-2.0
//! What ranks and their coordinator say to each other: a byte of kind, the length in 32 bits, little-endian, the contents.

use std::io::{self, Read, Write};

/// Of the contents. A card of 16 ranks has about a thousand bytes.
const MOST_BYTES: u32 = 1 << 20;
const MAGIC: [u8; 4] = *b"IBGC";
const VERSION: u16 = 1;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// A rank's first: who it is, and how many it thinks there are.
    Hello { rank: u16, size: u16 },
    /// What a rank has to say in a round.
    Piece(Vec<u8>),
    /// What all have said, by rank.
    All(Vec<Vec<u8>>),
    /// A rank has failed.
    Failed { rank: u16, why: String },
    /// A rank's last: all is well.
    Leave,
}

fn wrong(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

impl Frame {
    pub(crate) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let (kind, contents) = match self {
            Self::Hello { rank, size } => {
                let numbers = [VERSION, *rank, *size].map(u16::to_le_bytes);
                (1, [&MAGIC[..], &numbers.concat()].concat())
            }
            Self::Piece(bytes) => (2, bytes.clone()),
            Self::All(pieces) => {
                let each =
                    |piece: &Vec<u8>| [&(piece.len() as u32).to_le_bytes(), &piece[..]].concat();
                (3, pieces.iter().flat_map(each).collect())
            }
            Self::Failed { rank, why } => (4, [&rank.to_le_bytes(), why.as_bytes()].concat()),
            Self::Leave => (5, Vec::new()),
        };
        let length = u32::try_from(contents.len())
            .ok()
            .filter(|&length| length <= MOST_BYTES)
            .ok_or_else(|| {
                wrong(format!(
                    "{} bytes are too many for a message",
                    contents.len()
                ))
            })?;
        // In one piece, so that it is one packet.
        to.write_all(&[&[kind], &length.to_le_bytes()[..], &contents].concat())
    }

    pub(crate) fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut head = [0; 5];
        from.read_exact(&mut head)?;
        let length = u32::from_le_bytes([head[1], head[2], head[3], head[4]]);
        if length > MOST_BYTES {
            return Err(wrong(format!(
                "a message of {length} bytes: is the peer a rank?"
            )));
        }
        let mut contents = vec![0; length as usize];
        from.read_exact(&mut contents)?;
        Self::parse(head[0], &contents)
    }

    fn parse(kind: u8, contents: &[u8]) -> io::Result<Self> {
        let number = |at: usize| {
            Some(u16::from_le_bytes([
                *contents.get(at)?,
                *contents.get(at + 1)?,
            ]))
        };
        match kind {
            1 => {
                if contents.len() != 10 || contents[..4] != MAGIC {
                    return Err(wrong("the first message is not a rank's"));
                }
                match (number(4), number(6), number(8)) {
                    (Some(VERSION), Some(rank), Some(size)) => Ok(Self::Hello { rank, size }),
                    (version, ..) => Err(wrong(format!("version {version:?}, not {VERSION}"))),
                }
            }
            2 => Ok(Self::Piece(contents.to_vec())),
            3 => pieces(contents).map(Self::All),
            4 => {
                let rank = number(0).ok_or_else(|| wrong("a failure of no rank"))?;
                let why = String::from_utf8_lossy(&contents[2..]).into_owned();
                Ok(Self::Failed { rank, why })
            }
            5 => Ok(Self::Leave),
            other => Err(wrong(format!(
                "a message of kind {other}: is the peer a rank?"
            ))),
        }
    }
}

fn pieces(mut rest: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let mut pieces = Vec::new();
    while let Some((length, behind)) = rest.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length) as usize;
        let (piece, behind) = behind
            .split_at_checked(length)
            .ok_or_else(|| wrong("a piece that is longer than its message"))?;
        pieces.push(piece.to_vec());
        rest = behind;
    }
    if rest.is_empty() {
        Ok(pieces)
    } else {
        Err(wrong("a piece without its length"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let frames = [
            Frame::Hello { rank: 3, size: 4 },
            Frame::Piece(vec![7; 1000]),
            Frame::All(vec![vec![1, 2], vec![], vec![3]]),
            Frame::Failed {
                rank: 2,
                why: "the NIC is gone".into(),
            },
            Frame::Leave,
        ];
        let mut bytes = Vec::new();
        for frame in &frames {
            frame.write(&mut bytes).expect("memory takes it");
        }
        let mut rest = &bytes[..];
        for frame in frames {
            assert_eq!(Frame::read(&mut rest).expect("what was written"), frame);
        }
        assert!(rest.is_empty());
    }

    #[test]
    fn what_is_no_message_is_refused() {
        for (bytes, words) in [
            (&b"GET / HTTP/1.1\r\n"[..], "is the peer a rank?"),
            (&[9, 0, 0, 0, 0], "kind 9"),
            (&[1, 2, 0, 0, 0, 1, 1], "not a rank's"),
            (&[3, 4, 0, 0, 0, 9, 0, 0, 0], "longer than its message"),
            (&[3, 1, 0, 0, 0, 9], "without its length"),
            (&[4, 1, 0, 0, 0, 9], "no rank"),
        ] {
            let error = Frame::read(&mut &bytes[..]).expect_err("no message");
            assert!(error.to_string().contains(words), "{error}");
        }
        Frame::read(&mut &[2, 9, 0, 0, 0, 1][..]).expect_err("cut short");
    }
}
