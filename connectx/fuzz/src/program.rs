// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs: what a guest does, step after step, as bytes. Any bytes are a program; what does not fit is left out.

/// What a step does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A command: `data` is the input's start, `a` its length and `b` the output's.
    Command = 0,
    /// Changes memory at offset `a`.
    Memory = 1,
    /// Writes to BAR 0 at `a`; `b` is the BAR's number.
    Write = 2,
    /// Reads `b` bytes of BAR 0 at `a`.
    Read = 3,
    /// Lets the engine run.
    Run = 4,
    /// Writes `data` to config space at `a`, and reads `b` bytes there.
    Config = 5,
    /// Posts `data` as a WQE on queue pair `a`, and rings unless `b` has bit 0.
    Post = 6,
    /// Posts `data` as a receive WQE on queue `a`.
    Receive = 7,
    /// Takes completions and events.
    Consume = 8,
    /// A reset, and a new start.
    Reset = 9,
    /// Control command `a`.
    Steer = 10,
}

/// All kinds, in the order of their numbers.
pub const KINDS: &[Kind] = &[
    Kind::Command,
    Kind::Memory,
    Kind::Write,
    Kind::Read,
    Kind::Run,
    Kind::Config,
    Kind::Post,
    Kind::Receive,
    Kind::Consume,
    Kind::Reset,
    Kind::Steer,
];

/// A step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    pub kind: Kind,
    /// Bit 0: which of the two guests. The rest is the kind's.
    pub flags: u8,
    pub a: u32,
    pub b: u32,
    pub data: Vec<u8>,
}

/// Bytes of a step before its data.
const HEAD: usize = 12;
/// Most steps of a program.
const MOST: usize = 64;

impl Step {
    pub fn new(kind: Kind, a: u32, b: u32, data: &[u8]) -> Self {
        let end = data.iter().rposition(|b| *b != 0).map_or(0, |at| at + 1);
        // Of a command the length is in `a`: zeros at the end need no place.
        let data = if kind == Kind::Command {
            &data[..end]
        } else {
            data
        };
        Self {
            kind,
            flags: 0,
            a,
            b,
            data: data.to_vec(),
        }
    }

    /// The same on one of the guests.
    pub fn on(mut self, guest: usize) -> Self {
        self.flags = guest as u8;
        self
    }

    pub fn guest(&self) -> usize {
        usize::from(self.flags & 1)
    }
}

/// Takes bytes apart.
pub fn decode(mut bytes: &[u8], kinds: &[Kind]) -> Vec<Step> {
    let mut steps = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<HEAD>() {
        let len = usize::from(u16::from_le_bytes([head[2], head[3]])).min(rest.len());
        let (data, rest) = rest.split_at(len);
        bytes = rest;
        let word =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let kind = kinds.iter().find(|kind| **kind as u8 == head[0]);
        steps.push(Step {
            kind: *kind.unwrap_or(&kinds[usize::from(head[0]) % kinds.len()]),
            flags: head[1],
            a: word(4),
            b: word(8),
            data: data.to_vec(),
        });
        if steps.len() == MOST {
            break;
        }
    }
    steps
}

/// Puts a program into bytes.
pub fn encode(steps: &[Step]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for step in steps {
        bytes.extend([step.kind as u8, step.flags]);
        bytes.extend((step.data.len() as u16).to_le_bytes());
        bytes.extend(step.a.to_le_bytes());
        bytes.extend(step.b.to_le_bytes());
        bytes.extend(&step.data);
    }
    bytes
}
