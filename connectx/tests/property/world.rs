// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs programs on two functions: every request as a WQE, every completion taken and compared.

use std::sync::Arc;
use std::time::Instant;

use connectx::ifc::command::header;
use connectx::ifc::opcode;
use connectx::ifc::wqe::{cqe_opcode, send};
use connectx::log::Referee;
use connectx::objects::qp::Service;
use connectx::platform::Function;
use connectx::wire::Fabric;
use connectx::wire::fabric::Next;
use connectx_guest::{
    Cq, Cqe, Guest, Qp, Settings, Shape, Srq, address_vector, guests_on, input, pointer, remote,
    status,
};

use crate::program::{Kind, LONGEST, Op, QUEUES, Request, SOURCE, TARGET, split};
use crate::reference::{Queue, Received, header as before_data, source_of};

/// Bytes for what READs bring, and for what is received, of each queue pair.
const LANDING: u64 = 1 << 20;
/// Turns of the engine without the completions that must come: then they never will.
const TURNS: u32 = 200_000;
const QKEY: u32 = 0x1234_5678;
/// Entries of the shared receive queue, log2.
const LOG_SRQ: u32 = 6;

/// A queue pair of one side, with its memory.
pub struct End {
    pub qp: Qp,
    pub send: Cq,
    pub receive: Cq,
    pub key: u32,
    /// Source, target and landing area, one after the other.
    pub at: u64,
    landed: u64,
    /// Send WQE counters of requests that have a completion coming.
    counters: Vec<u16>,
    /// Where what READs bring goes, in parts.
    fetches: Vec<Vec<(u64, u32)>>,
    /// Receive buffers in the order of their posting.
    buffers: Vec<Vec<(u64, u32)>>,
}

pub struct World {
    fabric: Arc<Fabric>,
    pub guests: Vec<Guest>,
    pub pd: [u32; 2],
    /// Of each side, a queue pair of each kind.
    pub ends: [Vec<End>; 2],
    srq: Srq,
}

impl End {
    fn new(guest: &mut Guest, pd: u32, kind: Kind, srqn: u32) -> Self {
        let (send, receive) = (Cq::new(guest, 7), Cq::new(guest, 7));
        let shape = Shape {
            service: match kind {
                Kind::Reliable | Kind::Shared => Service::Rc,
                Kind::Unreliable => Service::Uc,
                Kind::Datagram => Service::Ud,
            },
            log_sq: 5,
            log_rq: 5,
            log_stride: 6,
            srqn: (kind == Kind::Shared).then_some(srqn),
            xrcd: 0,
            scatter: (0, 0),
            log_streams: (0, 0),
        };
        let qp = Qp::shaped(guest, pd, guest.uar, &send, &receive, shape).expect("a queue pair");
        let len = u64::from(SOURCE + TARGET) + LANDING;
        let (key, at) = guest.region(pd, len);
        Self {
            qp,
            send,
            receive,
            key,
            at,
            landed: at + u64::from(SOURCE + TARGET),
            counters: Vec::new(),
            fetches: Vec::new(),
            buffers: Vec::new(),
        }
    }

    /// Fresh memory, not aligned to anything.
    fn land(&mut self, len: u32) -> u64 {
        let at = self.landed;
        self.landed += u64::from(len) + 3;
        assert!(self.landed <= self.at + u64::from(SOURCE + TARGET) + LANDING);
        at
    }

    pub fn target(&self) -> u64 {
        self.at + u64::from(SOURCE)
    }
}

impl World {
    /// Two functions with connected queue pairs and memory as the reference starts with.
    pub fn new(mtu: [u64; 4], queues: &[Queue]) -> Self {
        let fabric = Fabric::polled(Referee::in_memory());
        let mut guests = guests_on(&fabric, 2);
        // As mlx5_core does: results of atomics in the host's byte order.
        let mut set = input(opcode::SET_HCA_CAP, 4112);
        header::op_mod.set(&mut set, 3 << 1);
        set[16 + 8] = 0x40;
        for guest in &mut guests {
            assert_eq!(status(&guest.command(set.clone(), 16)), 0);
        }
        let pd = [0, 1].map(|side: usize| guests[side].alloc(opcode::ALLOC_PD));
        let srqs = [0, 1].map(|side: usize| Srq::new(&mut guests[side], pd[side], LOG_SRQ, None));
        let ends = [0, 1].map(|side: usize| {
            QUEUES
                .map(|kind| End::new(&mut guests[side], pd[side], kind, srqs[side].number))
                .into()
        });
        let [_, srq] = srqs;
        let mut world = Self {
            fabric,
            guests,
            pd,
            ends,
            srq,
        };
        for side in 0..2 {
            for (index, mtu) in mtu.into_iter().enumerate() {
                let qpn = world.ends[1 - side][index].qp.qpn;
                let settings = Settings {
                    mtu,
                    qkey: u64::from(QKEY),
                    ack_timeout: 4,
                    retries: 7,
                    ..Settings::to(2 - side as u16, qpn)
                };
                world.ends[side][index]
                    .qp
                    .connect(&mut world.guests[side], settings);
            }
        }
        for (index, queue) in queues.iter().enumerate() {
            let (a, b) = (&world.ends[0][index], &world.ends[1][index]);
            world.guests[0].ram.set(a.at, &queue.source);
            world.guests[1].ram.set(b.target(), &queue.target);
        }
        world
    }

    /// Has both links lose packets.
    pub fn lose(&self, per_million: u32) {
        for guest in &self.guests {
            let loss = per_million.to_string();
            guest.hca.steer("link", &["loss", &loss]).expect("loss");
        }
    }

    /// Posts the receive request that a request uses up.
    pub fn post_receive(&mut self, request: &Request) {
        let queue = request.queue;
        let shared = QUEUES[queue] == Kind::Shared;
        // Of a shared queue nobody knows which message takes which request.
        let len = if shared { LONGEST } else { request.len };
        let room = before_data(queue) + len + request.slack;
        let end = &mut self.ends[1][queue];
        let buffer: Vec<(u64, u32)> = split(room, if shared { 3 } else { request.pieces })
            .into_iter()
            .map(|len| (end.land(len), len))
            .collect();
        let pointers: Vec<[u8; 16]> = buffer
            .iter()
            .map(|(at, len)| pointer(*len, end.key, *at))
            .collect();
        end.buffers.push(buffer);
        if shared {
            self.srq.post(&self.guests[1], &pointers);
        } else {
            end.qp.receive_into(&self.guests[1], &pointers);
        }
    }

    /// The segments of a request's WQE.
    pub fn segments(&mut self, request: &Request) -> Vec<[u8; 16]> {
        let queue = request.queue;
        let (there, rkey, qpn) = {
            let end = &self.ends[1][queue];
            (
                end.target() + u64::from(request.target),
                end.key,
                end.qp.qpn,
            )
        };
        let mut segments = Vec::new();
        if request.op == Op::Nop {
            return segments;
        }
        if QUEUES[queue] == Kind::Datagram {
            segments.extend(address_vector(2, qpn, QKEY));
        }
        if !matches!(request.op, Op::Send | Op::SendImm) {
            segments.push(remote(there, rkey));
        }
        if request.op.is_atomic() {
            let mut operands = [0; 16];
            operands[..8].copy_from_slice(&request.operands[0].to_be_bytes());
            operands[8..].copy_from_slice(&request.operands[1].to_be_bytes());
            segments.push(operands);
        }
        let end = &mut self.ends[0][queue];
        let parts = request.parts();
        if request.op.fetches() {
            let places: Vec<(u64, u32)> = parts.iter().map(|len| (end.land(*len), *len)).collect();
            let key = end.key;
            segments.extend(places.iter().map(|(at, len)| pointer(*len, key, *at)));
            end.fetches.push(places);
            return segments;
        }
        let sources: Vec<(u64, u32)> = parts
            .iter()
            .zip(0..)
            .map(|(len, index)| (end.at + u64::from(source_of(request, index)), *len))
            .collect();
        if request.inline {
            let data: Vec<u8> = sources
                .iter()
                .flat_map(|(at, len)| self.guests[0].ram.get(*at, *len as usize))
                .collect();
            let mut bytes = (data.len() as u32 | 0x8000_0000).to_be_bytes().to_vec();
            bytes.extend(data);
            bytes.resize(bytes.len().next_multiple_of(16), 0);
            segments.extend(
                bytes
                    .chunks(16)
                    .map(|c| <[u8; 16]>::try_from(c).expect("16")),
            );
        } else {
            segments.extend(sources.iter().map(|(at, len)| pointer(*len, end.key, *at)));
        }
        segments
    }

    /// Puts a request in its send queue, without ringing.
    pub fn put(&mut self, request: &Request, segments: &[[u8; 16]]) {
        let op = match request.op {
            Op::Nop => send::NOP,
            Op::Send => send::SEND,
            Op::SendImm => send::SEND_IMM,
            Op::Write => send::RDMA_WRITE,
            Op::WriteImm => send::RDMA_WRITE_IMM,
            Op::Read => send::RDMA_READ,
            Op::CompareSwap => send::ATOMIC_CS,
            Op::FetchAdd => send::ATOMIC_FA,
        };
        let flags = if request.signalled { 0x08 } else { 0 } | if request.fence { 0x40 } else { 0 };
        let end = &mut self.ends[0][request.queue];
        end.counters.push(end.qp.producer);
        end.qp
            .put(&self.guests[0], op, flags, request.immediate, segments);
    }

    pub fn ring(&self, queue: usize) {
        let guest = &self.guests[0];
        self.ends[0][queue].qp.ring(guest, guest.uar);
    }

    /// Runs the engine until `done` says so; false if it never will.
    pub fn run_until(&mut self, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        for _ in 0..TURNS {
            let next = self.fabric.poll(|_| {});
            if done(self) {
                return true;
            }
            match next {
                Next::AtOnce => {}
                Next::At(None) => return done(self),
                Next::At(Some(when)) => {
                    std::thread::sleep(when.saturating_duration_since(Instant::now()));
                }
            }
        }
        false
    }

    /// The engine's turns until it has nothing to do at once.
    pub fn settle(&self) {
        for _ in 0..TURNS {
            if matches!(self.fabric.poll(|_| {}), Next::At(_)) {
                return;
            }
        }
    }

    /// Takes the completions of a side's send or receive queue.
    pub fn take(&mut self, side: usize, queue: usize, receive: bool) -> Vec<Cqe> {
        let guest = &self.guests[side];
        let end = &mut self.ends[side][queue];
        let cq = if receive {
            &mut end.receive
        } else {
            &mut end.send
        };
        std::iter::from_fn(|| cq.poll(guest)).collect()
    }

    /// Counter in the completion of the `n`th request of a queue pair.
    pub fn counter(&self, queue: usize, n: usize) -> u16 {
        self.ends[0][queue].counters[n]
    }

    fn memory(&self, side: usize, parts: &[(u64, u32)]) -> Vec<u8> {
        let ram = &self.guests[side].ram;
        parts
            .iter()
            .flat_map(|(at, len)| ram.get(*at, *len as usize))
            .collect()
    }

    /// What the READs and atomics of a queue pair brought.
    pub fn fetched(&self, queue: usize) -> Vec<Vec<u8>> {
        let fetches = &self.ends[0][queue].fetches;
        fetches.iter().map(|parts| self.memory(0, parts)).collect()
    }

    /// The `n`th message that a queue pair received, by its completion.
    pub fn received(&self, queue: usize, n: usize, cqe: &Cqe) -> Received {
        let (write, immediate) = match cqe.opcode {
            cqe_opcode::RESP_WR_IMM => (true, true),
            cqe_opcode::RESP_SEND_IMM => (false, true),
            cqe_opcode::RESP_SEND => (false, false),
            other => panic!("a receive completion with opcode {other}: {cqe:?}"),
        };
        let shared = QUEUES[queue] == Kind::Shared;
        let buffers = &self.ends[1][queue].buffers;
        // The entries of the shared queue were posted and taken in order, as those of an own one are.
        let entry = if shared {
            n as u16 & ((1 << LOG_SRQ) - 1)
        } else {
            n as u16
        };
        assert_eq!(cqe.counter, entry, "receive requests are taken in order");
        let header = before_data(queue);
        let mut data = self.memory(1, &buffers[n]);
        data.drain(..header as usize);
        data.truncate(if write {
            0
        } else {
            (cqe.bytes - header) as usize
        });
        Received {
            write,
            bytes: cqe.bytes - header,
            immediate: immediate.then_some(cqe.immediate),
            data,
        }
    }

    pub fn target(&self, queue: usize) -> Vec<u8> {
        self.guests[1]
            .ram
            .get(self.ends[1][queue].target(), TARGET as usize)
    }

    pub fn source(&self, queue: usize) -> Vec<u8> {
        self.guests[0]
            .ram
            .get(self.ends[0][queue].at, SOURCE as usize)
    }
}
