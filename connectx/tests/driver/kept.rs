// SPDX-License-Identifier: MIT OR Apache-2.0
//! Nothing that was taken is lost: each receive WQE has its completion whatever becomes of the message, a command without
//! a place for its output does nothing, and packets that have come in part come only once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use connectx::engine;
use connectx::ifc::context::qpc;
use connectx::ifc::event::kind;
use connectx::ifc::wqe::{cqe_opcode, send, syndrome};
use connectx::ifc::{command, opcode};
use connectx::objects::qp::Service;
use connectx::platform::{Dma, DmaFault, Function};
use connectx::wire::packet::{Kind, Nak, Packet, Position, Reth, Rider, Transport, Verdict};
use connectx::wire::payload::Payload;

use crate::guest::{
    Cq, Guest, Pair, Qp, Ram, Settings, Shape, Side, Srq, guests, input, pointer, remote, status,
};

const MTU: u32 = 1024;

/// Memory of which a page is there once and then no more.
struct Vanishing {
    ram: Arc<Ram>,
    page: u64,
    gone: AtomicBool,
}

impl Dma for Vanishing {
    fn read(&self, addr: u64, buf: &mut [u8]) -> Result<(), DmaFault> {
        if addr & !0xfff == self.page && self.gone.swap(true, Ordering::Relaxed) {
            let len = buf.len();
            let write = false;
            return Err(DmaFault { addr, len, write });
        }
        self.ram.read(addr, buf)
    }

    fn write(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault> {
        self.ram.write(addr, buf)
    }

    fn publish(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault> {
        self.ram.publish(addr, buf)
    }

    fn atomic64(&self, addr: u64, f: &mut dyn FnMut(u64) -> Option<u64>) -> Result<u64, DmaFault> {
        self.ram.atomic64(addr, f)
    }

    fn post(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault> {
        self.ram.post(addr, buf)
    }
}

/// Completions of side 1's receives, after its queue pair has been put in error: how many are flushes, and all.
fn flushed(guest: &mut Guest, qp: &Qp, cq: &mut Cq) -> (usize, usize) {
    assert_eq!(qp.modify(guest, opcode::TO_ERR_QP, |_| {}), 0);
    let all: Vec<_> = std::iter::from_fn(|| cq.poll(guest)).collect();
    let counters: Vec<u16> = all.iter().map(|cqe| cqe.counter).collect();
    let expected: Vec<u16> = (0..all.len() as u16).collect();
    assert_eq!(counters, expected, "each once and in order: {all:?}");
    let flush = all.iter().filter(|cqe| cqe.syndrome == syndrome::WR_FLUSH);
    (flush.count(), all.len())
}

#[test]
pub fn a_receive_is_flushed_whose_sender_lost_its_data() {
    for op in [send::RDMA_WRITE_IMM, send::SEND_IMM] {
        let Pair { mut guests, sides } = Pair::new();
        let [mut a, mut b] = sides;
        let memory = Vanishing {
            ram: guests[0].ram.clone(),
            page: a.at,
            gone: AtomicBool::new(false),
        };
        guests[0]
            .hca
            .connect(Arc::new(memory), guests[0].vectors.clone());
        for _ in 0..2 {
            b.qp.receive(&guests[1], b.key, b.at, MTU);
        }
        let there = remote(b.at, b.key);
        let data = pointer(MTU, a.key, a.at);
        let segments = [there, data];
        let used = if op == send::SEND_IMM { 1.. } else { 0.. };
        a.qp.post(&guests[0], op, 7, &segments[used]);
        let cqe = a.send.wait(&guests[0]);
        assert_eq!(
            (cqe.opcode, cqe.syndrome),
            (cqe_opcode::REQ_ERR, syndrome::LOCAL_PROT)
        );
        let counts = flushed(&mut guests[1], &b.qp, &mut b.receive);
        assert_eq!(counts, (2, 2), "{op:#x}");
    }
}

#[test]
pub fn an_unreliable_message_cut_short_leaves_its_receive_to_the_next() {
    const RECEIVES: u16 = 24;
    let mut guests = guests(2);
    let mut sides = [0, 1].map(|i: usize| Side::new(&mut guests[i]));
    let shape = Shape {
        log_rq: 5,
        log_sq: 6,
        ..Shape::of(Service::Uc)
    };
    let mut qps = [0, 1].map(|i: usize| {
        let (side, guest) = (&sides[i], &mut guests[i]);
        let uar = guest.uar;
        Qp::shaped(guest, side.pd, uar, &side.send, &side.receive, shape).unwrap()
    });
    for i in 0..2 {
        let to = Settings::to(2 - i as u16, qps[1 - i].qpn);
        qps[i].connect(&mut guests[i], to);
    }
    let [a, b] = &mut sides;
    for _ in 0..RECEIVES {
        qps[1].receive(&guests[1], b.key, b.at, 3 * MTU);
    }
    guests[0].hca.steer("link", &["loss", "400000"]).unwrap();
    let data = [pointer(3 * MTU, a.key, a.at)];
    for _ in 0..RECEIVES {
        qps[0].post(&guests[0], send::SEND, 0, &data);
    }
    for _ in 0..RECEIVES {
        assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
    }
    let (flushes, all) = flushed(&mut guests[1], &qps[1], &mut b.receive);
    assert_eq!(all, usize::from(RECEIVES));
    assert!((1..all).contains(&flushes), "some came, some did not");
}

#[test]
pub fn a_shared_queue_with_more_posted_than_it_has_fails() {
    let mut guests = guests(2);
    let mut sides = [0, 1].map(|i: usize| Side::new(&mut guests[i]));
    let mut srq = Srq::new(&mut guests[1], sides[1].pd, 2, None);
    let shape = Shape {
        srqn: Some(srq.number),
        ..Shape::default()
    };
    let (b, uar) = (&sides[1], guests[1].uar);
    let qp = Qp::shaped(&mut guests[1], b.pd, uar, &b.send, &b.receive, shape).unwrap();
    let to = Settings::to(1, sides[0].qp.qpn);
    qp.connect(&mut guests[1], to);
    sides[0].qp.connect(&mut guests[0], Settings::to(2, qp.qpn));
    let into = [pointer(MTU, sides[1].key, sides[1].at)];
    for _ in 0..4 {
        srq.post(&guests[1], &into);
    }
    let [a, b] = &mut sides;
    let data = [pointer(4, a.key, a.at)];
    a.qp.post(&guests[0], send::SEND, 0, &data);
    assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
    assert_eq!(b.receive.wait(&guests[1]).opcode, cqe_opcode::RESP_SEND);
    // One of four is used; five more are one too many.
    for _ in 0..2 {
        srq.post(&guests[1], &into);
    }
    a.qp.post(&guests[0], send::SEND, 0, &data);
    assert_eq!(a.send.wait(&guests[0]).syndrome, syndrome::REMOTE_OP);
    assert_eq!(guests[1].event(), Some((kind::SRQ_CATAS_ERROR, srq.number)));
}

/// Sequence number of a queue pair's next packet.
fn next_psn(guest: &mut Guest, qpn: u32) -> u64 {
    let mut query = input(opcode::QUERY_QP, 16);
    command::header::object.set(&mut query, u64::from(qpn));
    let out = guest.ok(query, 0x110);
    qpc::next_send_psn.get(command::query_qp_out::qpc.bytes(&out))
}

#[test]
pub fn reads_stay_within_half_of_the_sequence_numbers() {
    // Nobody answers, and nothing is sent again.
    let mut pair = Pair::with(|s| {
        s.mtu = 1;
        s.ack_timeout = 0;
    });
    let qpn = pair.sides[1].qp.qpn;
    assert_eq!(pair.guests[1].on_object(opcode::DESTROY_QP, qpn), 0);
    let Pair { guests, sides } = &mut pair;
    let [a, b] = sides;
    let before = next_psn(&mut guests[0], a.qp.qpn);
    let gib = 1 << 30;
    for _ in 0..3 {
        let segments = [remote(b.at, b.key), pointer(gib, a.key, a.at)];
        a.qp.post(&guests[0], send::RDMA_READ, 0, &segments);
    }
    let ahead = next_psn(&mut guests[0], a.qp.qpn).wrapping_sub(before) & 0xff_ffff;
    assert!((1..1 << 23).contains(&ahead), "{ahead:#x}");
    assert_eq!(ahead % (u64::from(gib) / 256), 0, "whole READs");
}

#[test]
pub fn a_command_without_a_place_for_its_output_does_nothing() {
    let mut guest = guests(1).pop().unwrap();
    let before = guest.count("pd");
    let at = guest.slot(0);
    // The answer has one mailbox: a place that is none, and one that is not aligned.
    for (mailbox, delivery) in [
        (0xdead_0000_0000u64, 0x06),
        (guest.uar.into(), 0x04),
        (0, 0x04),
    ] {
        guest.prepare(&input(opcode::ALLOC_PD, 16), 32, 16);
        guest.ram.set(at + 0x30, &mailbox.to_be_bytes());
        guest.ring_commands(1);
        assert_eq!(guest.ram.get(at + 0x3f, 1), [delivery << 1], "{mailbox:#x}");
        assert_eq!(guest.count("pd"), before, "{mailbox:#x}");
    }
    let out = guest.command(input(opcode::ALLOC_PD, 16), 32);
    assert_eq!((status(&out), guest.count("pd")), (0, before + 1));
}

/// A link that becomes ideal has messages sent again as one packet, of which parts have come.
#[test]
pub fn a_packet_that_has_come_in_part_is_asked_for_from_there() {
    let pair = Pair::new();
    let (guest, side) = (&pair.guests[1], &pair.sides[1]);
    let reth = Reth {
        address: side.at,
        rkey: side.key,
        len: 4 * MTU,
    };
    let packet = |psn: u32, span: u32| {
        let (first, last) = (psn == 0xff_fffe, (psn + span) & 0xff_ffff == 2);
        Packet {
            source_lid: 1,
            destination_lid: 2,
            sl: 0,
            grh: None,
            transport: Transport::Rc,
            pkey: 0xffff,
            qpn: side.qp.qpn,
            psn,
            span,
            ack_request: last,
            solicited: false,
            deth: None,
            dceth: None,
            xrc_srqn: None,
            kind: Kind::Write {
                position: Position { first, last },
                reth: first.then_some(reth),
                rider: Rider::None,
            },
            payload: Payload::NONE,
        }
    };
    let come = |psn: u32, span: u32, fill: u8| {
        let data = vec![fill; (span * MTU) as usize];
        guest.hca.with_device(|device| {
            let before = device.outbox.len();
            let now = Instant::now();
            engine::receive::packet(device, &packet(psn, span), data[..].into(), now);
            let sent = device.outbox.drain(before..);
            sent.map(|p| (p.psn, p.kind)).collect::<Vec<_>>()
        })
    };
    assert_eq!(come(0xff_fffe, 1, 1), []);
    let nak = Kind::Acknowledge(Verdict::Nak(Nak::Sequence));
    assert_eq!(come(0xff_fffe, 4, 9), [(0xff_ffff, nak)]);
    assert_eq!(come(0xff_ffff, 3, 2), []);
    let mut expected = vec![1; MTU as usize];
    expected.resize(4 * MTU as usize, 2);
    assert_eq!(guest.ram.get(side.at, 4 * MTU as usize), expected);
}
