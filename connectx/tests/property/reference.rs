// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a program must do, from the InfiniBand Architecture Specification, volume 1: chapters 9.4 (what each operation
//! does to memory), 10.8 (order) and 11.4 (completions). It knows nothing of packets.

use crate::program::{Kind, Op, Program, QUEUES, Request, SOURCE, TARGET};

/// A completion of the sending side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sent {
    /// Place of its request among those of the queue pair.
    pub request: usize,
    /// Bytes of an operation that brings data; 0 of others.
    pub bytes: u32,
}

/// A completion of the receiving side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    pub write: bool,
    pub bytes: u32,
    pub immediate: Option<u32>,
    /// What the buffer holds; nothing for a WRITE, which goes to its own address.
    pub data: Vec<u8>,
}

/// One queue pair's part of the world.
#[derive(Debug, Clone)]
pub struct Queue {
    pub source: Vec<u8>,
    pub target: Vec<u8>,
    /// What each READ and atomic brought, in order.
    pub fetched: Vec<Vec<u8>>,
    pub sent: Vec<Sent>,
    pub received: Vec<Received>,
    requests: usize,
}

/// Payload bytes that each side sends when nothing is lost and nothing refused.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    pub requests: u64,
    pub responses: u64,
}

/// Bytes that differ everywhere and between queue pairs.
pub fn pattern(len: u32, seed: u32) -> Vec<u8> {
    (0..len)
        .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 11) as u8)
        .collect()
}

impl Queue {
    pub fn new(number: usize) -> Self {
        let mut target = pattern(TARGET, 100 + number as u32);
        for (i, word) in target[..64].chunks_mut(8).enumerate() {
            word.copy_from_slice(&(i as u64 % 4).to_ne_bytes());
        }
        Self {
            source: pattern(SOURCE, number as u32),
            target,
            fetched: Vec::new(),
            sent: Vec::new(),
            received: Vec::new(),
            requests: 0,
        }
    }

    /// What a request sends: its parts in order.
    fn outgoing(&self, request: &Request) -> Vec<u8> {
        request
            .parts()
            .iter()
            .zip(0..)
            .flat_map(|(len, index)| {
                let from = source_of(request, index) as usize;
                self.source[from..from + *len as usize].to_vec()
            })
            .collect()
    }

    fn range(&mut self, request: &Request) -> &mut [u8] {
        let from = request.target as usize;
        &mut self.target[from..from + request.len as usize]
    }

    /// Does a request as if nothing else were going on: the requests of a queue pair have their effects in order.
    pub fn execute(&mut self, request: &Request) {
        let data = self.outgoing(request);
        let mut bytes = 0;
        match request.op {
            Op::Nop => {}
            Op::Send | Op::SendImm => {}
            Op::Write | Op::WriteImm => self.range(request).copy_from_slice(&data),
            Op::Read => {
                let data = self.range(request).to_vec();
                self.fetched.push(data);
                bytes = request.len;
            }
            Op::CompareSwap | Op::FetchAdd => {
                let place = self.range(request);
                let old = u64::from_ne_bytes(place.try_into().expect("8 bytes"));
                let [swap_or_add, compare] = request.operands;
                let new = match request.op {
                    Op::FetchAdd => old.wrapping_add(swap_or_add),
                    _ if old == compare => swap_or_add,
                    _ => old,
                };
                place.copy_from_slice(&new.to_ne_bytes());
                self.fetched.push(old.to_ne_bytes().to_vec());
                bytes = 8;
            }
        }
        if request.op.receives() {
            let write = request.op == Op::WriteImm;
            self.received.push(Received {
                write,
                bytes: request.len,
                immediate: (request.op != Op::Send).then_some(request.immediate),
                data: if write { Vec::new() } else { data },
            });
        }
        if request.signalled {
            self.sent.push(Sent {
                request: self.requests,
                bytes,
            });
        }
        self.requests += 1;
    }
}

/// First byte of a part of what is sent.
pub fn source_of(request: &Request, index: u32) -> u32 {
    (request.source + index * 1501) % (SOURCE - request.len.max(1))
}

/// What the wire carries.
pub fn traffic(program: &Program) -> Traffic {
    let mut traffic = Traffic::default();
    for request in &program.requests {
        let len = u64::from(request.len);
        match request.op {
            Op::Nop | Op::CompareSwap | Op::FetchAdd => {}
            Op::Read => traffic.responses += len,
            _ => traffic.requests += len,
        }
    }
    traffic
}

/// Bytes that a receive buffer has before the data: a datagram's place for a route header (IBA 11.4.1.2).
pub fn header(queue: usize) -> u32 {
    if QUEUES[queue] == Kind::Datagram {
        40
    } else {
        0
    }
}
