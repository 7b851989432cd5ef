// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random programs of work requests, such as a careful user writes them: no range is used by two requests whose order
//! the specification leaves open.

use proptest::prelude::*;

/// Bytes that are sent, never written.
pub const SOURCE: u32 = 32 << 10;
/// Bytes that the other side works on.
pub const TARGET: u32 = 32 << 10;
/// Longest message.
pub const LONGEST: u32 = 20_000;
/// Longest datagram: the port's MTU.
pub const DATAGRAM: u32 = 4096;
/// Longest inline data.
const INLINE: u32 = 150;

/// A queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Reliable,
    /// Reliable, and receives from a shared receive queue.
    Shared,
    Unreliable,
    Datagram,
}

/// The queue pairs of every program.
pub const QUEUES: [Kind; 4] = [
    Kind::Reliable,
    Kind::Shared,
    Kind::Unreliable,
    Kind::Datagram,
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    Nop,
    Send,
    SendImm,
    Write,
    WriteImm,
    Read,
    CompareSwap,
    FetchAdd,
}

impl Op {
    pub fn is_atomic(self) -> bool {
        matches!(self, Self::CompareSwap | Self::FetchAdd)
    }

    /// Uses up a receive request of the other side.
    pub fn receives(self) -> bool {
        matches!(self, Self::Send | Self::SendImm | Self::WriteImm)
    }

    /// Brings data back.
    pub fn fetches(self) -> bool {
        self == Self::Read || self.is_atomic()
    }
}

/// A work request.
#[derive(Debug, Clone)]
pub struct Request {
    pub queue: usize,
    pub op: Op,
    pub len: u32,
    /// First byte in the source, of what is sent.
    pub source: u32,
    /// First byte of the other side's range.
    pub target: u32,
    /// Parts of the local memory.
    pub pieces: u32,
    pub inline: bool,
    pub fence: bool,
    pub signalled: bool,
    pub immediate: u32,
    pub operands: [u64; 2],
    /// Bytes that the receive request has more than it needs.
    pub slack: u32,
}

impl Request {
    /// Lengths of the local parts. A part of no bytes is none: to hardware a byte count of 0 is something else.
    pub fn parts(&self) -> Vec<u32> {
        split(self.len, self.pieces)
    }
}

/// `len` in at most `pieces` parts that differ.
pub fn split(len: u32, pieces: u32) -> Vec<u32> {
    let mut parts = Vec::new();
    let mut left = len;
    for i in 0..pieces {
        let part = if i + 1 == pieces {
            left
        } else {
            (left / 2 + i).min(left)
        };
        if part > 0 {
            parts.push(part);
        }
        left -= part;
    }
    parts
}

/// A program, and the wire that it runs on.
#[derive(Debug, Clone)]
pub struct Program {
    pub requests: Vec<Request>,
    /// Code of the MTU of each queue pair: 128 << code bytes.
    pub mtu: [u64; 4],
    /// Packets lost of a million, in each direction.
    pub loss: u32,
    /// The wire gets well while packets are on their way again: what has come in part comes whole.
    pub heals: bool,
    /// Receive requests are posted after what they are for.
    pub late: bool,
    /// A doorbell for each request, or for several.
    pub ring_each: bool,
}

fn length() -> impl Strategy<Value = u32> {
    prop_oneof![
        3 => 0..=64u32,
        2 => (1..=16u32, -2..=2i32).prop_map(|(n, d)| (n * 256).saturating_add_signed(d)),
        1 => 0..=LONGEST,
    ]
}

fn request() -> impl Strategy<Value = Request> {
    let op = prop_oneof![
        1 => Just(Op::Nop),
        3 => Just(Op::Send),
        2 => Just(Op::SendImm),
        4 => Just(Op::Write),
        2 => Just(Op::WriteImm),
        3 => Just(Op::Read),
        1 => Just(Op::CompareSwap),
        2 => Just(Op::FetchAdd),
    ];
    let numbers = (any::<u32>(), any::<u32>(), any::<u32>());
    let operands = (any::<u64>(), 0..4u64);
    let sizes = (length(), 1..=4u32, 0..=64u32);
    let flags = any::<[bool; 3]>();
    (0..QUEUES.len(), op, numbers, sizes, flags, operands).prop_map(
        |(queue, op, (source, target, immediate), (len, pieces, slack), flags, operands)| Request {
            queue,
            op,
            len,
            source,
            target,
            pieces,
            inline: flags[0],
            fence: flags[1],
            signalled: flags[2],
            immediate,
            operands: [operands.0, operands.1],
            slack,
        },
    )
}

/// Programs that end well.
pub fn valid() -> impl Strategy<Value = Program> {
    let requests = proptest::collection::vec(request(), 1..40);
    let loss = prop_oneof![2 => Just(0u32), 1 => 1000..60_000u32];
    let mtu = [1..=5u64, 1..=5u64, 1..=5u64, 1..=5u64];
    (requests, mtu, loss, any::<[bool; 3]>()).prop_map(
        |(requests, mtu, loss, [heals, late, ring_each])| {
            let mut program = Program {
                requests,
                mtu,
                // What is sent again is not lost then.
                loss: if heals { loss * 8 } else { loss },
                heals,
                late,
                ring_each,
            };
            program.make_legal();
            program
        },
    )
}

impl Program {
    /// Changes each request into one that its queue pair can do and that has no race with another.
    fn make_legal(&mut self) {
        let lossy = self.loss > 0;
        // Ranges that READs and atomics of each queue pair may still be looking at.
        let mut fetched: [Vec<(u32, u32)>; 4] = Default::default();
        for request in &mut self.requests {
            let kind = QUEUES[request.queue];
            // What is unreliable cannot be predicted on a wire that loses packets.
            if lossy && matches!(kind, Kind::Unreliable | Kind::Datagram) {
                request.op = Op::Nop;
            }
            if kind == Kind::Unreliable && request.op.fetches() {
                request.op = Op::Write;
            }
            if kind == Kind::Datagram && request.op != Op::Nop && request.op != Op::SendImm {
                request.op = Op::Send;
            }
            if kind == Kind::Datagram {
                request.len = request.len.min(DATAGRAM);
            }
            if request.op == Op::Nop {
                request.len = 0;
            }
            if request.op.is_atomic() {
                request.len = 8;
                request.pieces = 1;
                // Few places with few values, so that comparisons come true.
                request.target %= 64;
                if request.operands[0] & 0x100 != 0 {
                    request.operands[0] %= 4;
                }
            }
            request.inline &= request.len <= INLINE && !request.op.fetches();
            request.source %= SOURCE - LONGEST;
            request.target %= TARGET - request.len;
            if request.op.is_atomic() {
                request.target &= !7;
            }
            let range = (request.target, request.target + request.len);
            let fetched = &mut fetched[request.queue];
            let overlaps = fetched
                .iter()
                .any(|(start, end)| *start < range.1 && range.0 < *end);
            // IBA 10.8.3.3: what follows a READ or atomic may pass it, but for a fence.
            request.fence |= overlaps && request.op != Op::Nop && !request.op.receives();
            request.fence |= overlaps && request.op == Op::WriteImm;
            if request.fence {
                fetched.clear();
            }
            if request.op.fetches() {
                fetched.push(range);
            }
        }
    }
}
