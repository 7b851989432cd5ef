// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dynamic connections: initiators, targets, their keys, streams and ends.

use connectx::ifc::command::{create_dct_in, header, modify_qp_in, query_dct_out, reply};
use connectx::ifc::context::{dctc, qpc_ext};
use connectx::ifc::event::kind;
use connectx::ifc::opcode;
use connectx::ifc::wqe::{cqe_opcode, send, syndrome};
use connectx::objects::qp::Service;

use crate::guest::{
    Cq, Guest, Qp, Settings, Shape, Srq, eventually, guests, input, pointer, remote, status,
};

const KEY: u64 = 0x1122_3344_5566_7788;
const LEN: u64 = 1 << 16;

/// A target with what it receives into.
struct Target {
    dctn: u32,
    cq: Cq,
    srq: Srq,
    key: u32,
    at: u64,
}

impl Target {
    fn new(guest: &mut Guest) -> Self {
        let pd = guest.alloc(opcode::ALLOC_PD);
        let cq = Cq::new(guest, 6);
        let srq = Srq::new(guest, pd, 4, None);
        let (key, at) = guest.region(pd, LEN);
        let mut create = input(opcode::CREATE_DCT, create_dct_in::SIZE);
        let context = create_dct_in::dct_context_entry.bytes_mut(&mut create);
        for (field, value) in [
            (dctc::cqn, cq.cqn),
            (dctc::srqn_xrqn, srq.number),
            (dctc::pd, pd),
            (dctc::mtu, 3),
            (dctc::min_rnr_nak, 1),
            (dctc::atomic_mode, 3),
            (dctc::rre, 1),
            (dctc::rwe, 1),
            (dctc::rae, 1),
        ] {
            field.set(context, u64::from(value));
        }
        dctc::dc_access_key.set(context, KEY);
        let out = guest.ok(create, 16);
        Self {
            dctn: reply::object.get32(&out),
            cq,
            srq,
            key,
            at,
        }
    }

    fn violations(&self, guest: &mut Guest) -> u64 {
        let mut query = input(opcode::QUERY_DCT, 16);
        header::object.set(&mut query, u64::from(self.dctn));
        let out = guest.ok(query, query_dct_out::SIZE);
        dctc::dc_access_key_violation_count.get(query_dct_out::dct_context_entry.bytes(&out))
    }
}

/// An initiator with memory to send from.
struct Initiator {
    qp: Qp,
    cq: Cq,
    key: u32,
    at: u64,
}

impl Initiator {
    fn with_streams(guest: &mut Guest, log_streams: (u32, u32)) -> Self {
        let pd = guest.alloc(opcode::ALLOC_PD);
        let cq = Cq::new(guest, 6);
        let shape = Shape {
            log_streams,
            ..Shape::of(Service::Dci)
        };
        let qp = Qp::shaped(guest, pd, guest.uar, &cq, &cq, shape).unwrap();
        qp.connect(guest, Settings::to(0, 0));
        let (key, at) = guest.region(pd, LEN);
        Self { qp, cq, key, at }
    }

    fn new(guest: &mut Guest) -> Self {
        Self::with_streams(guest, (0, 0))
    }

    /// Posts to a target, the address vector first.
    fn post(&mut self, guest: &Guest, op: u8, to: &Target, key: u64, segments: &[[u8; 16]]) {
        let mut all = address(2, to.dctn, key).to_vec();
        all.extend_from_slice(segments);
        self.qp.post(guest, op, 0, &all);
    }

    /// The same on a stream.
    fn post_on(&mut self, guest: &Guest, stream: u16, to: &Target, segment: [u8; 16]) {
        let at = self.qp.sq + u64::from(self.qp.producer % 16) * 64;
        let mut all = address(2, to.dctn, KEY).to_vec();
        all.push(segment);
        self.qp.put(guest, send::SEND, 0x08, 0, &all);
        guest.ram.set(at + 9, &stream.to_be_bytes());
        self.qp.ring(guest, guest.uar);
    }

    fn reset_stream(&self, guest: &mut Guest, stream: u16) -> u8 {
        let mut reset = input(
            opcode::RTS2RTS_QP,
            modify_qp_in::qpc_data_ext.offset() + qpc_ext::SIZE,
        );
        header::object.set(&mut reset, u64::from(self.qp.qpn));
        modify_qp_in::qpc_ext.set(&mut reset, 1);
        modify_qp_in::opt_param_mask_95_32.set(&mut reset, 1);
        let extension = modify_qp_in::qpc_data_ext.bytes_mut(&mut reset);
        qpc_ext::dci_stream_channel_id.set(extension, u64::from(stream));
        status(&guest.command(reset, 16))
    }
}

/// Address vector of a target: its key, its number with the bit of the long form, and its port.
fn address(lid: u16, dctn: u32, key: u64) -> [[u8; 16]; 3] {
    let mut first = [0u8; 16];
    first[..8].copy_from_slice(&key.to_be_bytes());
    first[8..12].copy_from_slice(&(dctn | 0x8000_0000).to_be_bytes());
    first[14..16].copy_from_slice(&lid.to_be_bytes());
    [first, [0; 16], [0; 16]]
}

fn two() -> (Vec<Guest>, Initiator, Target) {
    let mut guests = guests(2);
    let (initiator, target) = (Initiator::new(&mut guests[0]), Target::new(&mut guests[1]));
    (guests, initiator, target)
}

#[test]
fn one_initiator_reaches_two_targets_in_turn() {
    let (mut guests, mut from, mut to) = two();
    let mut other = Target::new(&mut guests[1]);
    for round in 0..6u8 {
        let target = if round % 3 == 2 { &mut other } else { &mut to };
        target
            .srq
            .post(&guests[1], &[pointer(4096, target.key, target.at)]);
        let data = vec![round + 1; 3000];
        guests[0].ram.set(from.at, &data);
        let segment = pointer(3000, from.key, from.at);
        from.post(&guests[0], send::SEND, target, KEY, &[segment]);
        assert_eq!(from.cq.wait(&guests[0]).opcode, cqe_opcode::REQ);
        let cqe = target.cq.wait(&guests[1]);
        assert_eq!(
            (cqe.opcode, cqe.qpn, cqe.bytes),
            (cqe_opcode::RESP_SEND, target.dctn, 3000)
        );
        assert_eq!(guests[1].ram.get(target.at, 3000), data);
    }
    assert_eq!(guests[0].count("retransmissions"), 0);
}

#[test]
fn a_target_answers_reads_and_atomics_of_many_initiators() {
    let (mut guests, first, to) = two();
    let mut all = vec![
        first,
        Initiator::new(&mut guests[0]),
        Initiator::new(&mut guests[0]),
    ];
    guests[1].ram.set(to.at, &[0; 8]);
    guests[1].ram.set(to.at + 8, b"remote..");
    for (i, from) in all.iter_mut().enumerate() {
        let mut add = [0u8; 16];
        add[7] = 1;
        let segments = [remote(to.at, to.key), add, pointer(8, from.key, from.at)];
        from.post(&guests[0], send::ATOMIC_FA, &to, KEY, &segments);
        assert_eq!(from.cq.wait(&guests[0]).opcode, cqe_opcode::REQ);
        assert_eq!(guests[0].ram.get(from.at, 8), (i as u64).to_be_bytes());
        let segments = [remote(to.at + 8, to.key), pointer(8, from.key, from.at)];
        from.post(&guests[0], send::RDMA_READ, &to, KEY, &segments);
        assert_eq!(from.cq.wait(&guests[0]).opcode, cqe_opcode::REQ);
        assert_eq!(guests[0].ram.get(from.at, 8), b"remote..");
    }
}

#[test]
pub fn a_wrong_key_is_counted_refused_and_an_event_when_armed() {
    let (mut guests, mut from, to) = two();
    assert_eq!(
        guests[1].on_object(opcode::ARM_DCT_FOR_KEY_VIOLATION, to.dctn),
        0
    );
    let write = [remote(to.at, to.key), pointer(8, from.key, from.at)];
    from.post(&guests[0], send::RDMA_WRITE, &to, KEY + 1, &write);
    let cqe = from.cq.wait(&guests[0]);
    assert_eq!(
        (cqe.opcode, cqe.syndrome),
        (cqe_opcode::REQ_ERR, syndrome::REMOTE_ACCESS)
    );
    assert_eq!(to.violations(&mut guests[1]), 1);
    let event = eventually(|| guests[1].event());
    assert_eq!(event, (kind::DCT_KEY_VIOLATION, to.dctn));
    let last = guests[1].referee.recent(2).into_iter().map(|r| r.refusal);
    assert!(last.into_iter().any(|r| r.field == "dc_access_key"));
    // Another initiator is not affected, and the event was for one violation.
    let mut second = Initiator::new(&mut guests[0]);
    let write = [remote(to.at, to.key), pointer(8, second.key, second.at)];
    second.post(&guests[0], send::RDMA_WRITE, &to, KEY, &write);
    assert_eq!(second.cq.wait(&guests[0]).opcode, cqe_opcode::REQ);
}

#[test]
fn a_refused_access_ends_the_connection_and_not_the_target() {
    let (mut guests, mut from, to) = two();
    let write = [remote(to.at + LEN, to.key), pointer(8, from.key, from.at)];
    from.post(&guests[0], send::RDMA_WRITE, &to, KEY, &write);
    assert_eq!(from.cq.wait(&guests[0]).syndrome, syndrome::REMOTE_ACCESS);
    assert_eq!(guests[1].event(), None, "the target has no error");
    // The same initiator again: a new connection.
    assert_eq!(from.qp.modify(&mut guests[0], opcode::TO_RST_QP, |_| {}), 0);
    (from.qp.producer, from.qp.posted) = (0, 0);
    guests[0].ram.set(from.qp.dbr, &[0; 8]);
    from.qp.connect(&mut guests[0], Settings::to(0, 0));
    let write = [remote(to.at, to.key), pointer(8, from.key, from.at)];
    from.post(&guests[0], send::RDMA_WRITE, &to, KEY, &write);
    assert_eq!(from.cq.wait(&guests[0]).opcode, cqe_opcode::REQ);
}

#[test]
pub fn a_stream_fails_alone_until_there_are_too_many() {
    let mut guests = guests(2);
    let mut from = Initiator::with_streams(&mut guests[0], (3, 1));
    let mut to = Target::new(&mut guests[1]);
    for _ in 0..4 {
        to.srq.post(&guests[1], &[pointer(64, to.key, to.at)]);
    }
    let (good, bad) = (
        pointer(8, from.key, from.at),
        pointer(8, from.key ^ 0x100, from.at),
    );
    let outcome = |guests: &[Guest], from: &mut Initiator, stream, segment| {
        from.post_on(&guests[0], stream, &to, segment);
        let cqe = from.cq.wait(&guests[0]);
        (cqe.opcode == cqe_opcode::REQ_ERR).then_some(cqe.syndrome)
    };
    assert_eq!(outcome(&guests, &mut from, 1, good), None);
    assert_eq!(
        outcome(&guests, &mut from, 2, bad),
        Some(syndrome::LOCAL_PROT)
    );
    assert_eq!(outcome(&guests, &mut from, 1, good), None);
    assert_eq!(
        outcome(&guests, &mut from, 2, good),
        Some(syndrome::WR_FLUSH)
    );
    assert_eq!(from.reset_stream(&mut guests[0], 3), 3, "not in error");
    assert_eq!(from.reset_stream(&mut guests[0], 2), 0);
    assert_eq!(outcome(&guests, &mut from, 2, good), None);
    // Two streams in error are too many for 2^1.
    assert_eq!(
        outcome(&guests, &mut from, 4, bad),
        Some(syndrome::LOCAL_PROT)
    );
    assert_eq!(
        outcome(&guests, &mut from, 5, bad),
        Some(syndrome::LOCAL_PROT)
    );
    assert_eq!(from.qp.state(&mut guests[0]), 6, "in error");
}

#[test]
pub fn a_target_is_drained_before_it_goes_and_takes_its_responders_along() {
    let (mut guests, mut from, mut to) = two();
    to.srq.post(&guests[1], &[pointer(64, to.key, to.at)]);
    from.post(
        &guests[0],
        send::SEND,
        &to,
        KEY,
        &[pointer(8, from.key, from.at)],
    );
    assert_eq!(from.cq.wait(&guests[0]).opcode, cqe_opcode::REQ);
    assert_eq!(guests[1].count("qp"), 2, "target and responder");
    assert_eq!(
        guests[1].on_object(opcode::DESTROY_DCT, to.dctn),
        0x09,
        "not drained"
    );
    assert_eq!(
        guests[1].on_object(opcode::DESTROY_QP, to.dctn),
        0x05,
        "no queue pair"
    );
    assert_eq!(
        guests[1].on_object(opcode::DESTROY_RMP, to.srq.number),
        0x09,
        "in use"
    );
    assert_eq!(guests[1].on_object(opcode::DRAIN_DCT, to.dctn), 0);
    let event = eventually(|| guests[1].event());
    assert_eq!(event, (kind::DCT_DRAINED, to.dctn));
    assert_eq!(guests[1].count("qp"), 1);
    // Who sends to it now finds nobody.
    from.post(
        &guests[0],
        send::SEND,
        &to,
        KEY,
        &[pointer(8, from.key, from.at)],
    );
    assert_eq!(
        from.cq.wait(&guests[0]).syndrome,
        syndrome::TRANSPORT_RETRY_EXC
    );
    assert_eq!(guests[1].on_object(opcode::DESTROY_DCT, to.dctn), 0);
    assert_eq!(guests[1].on_object(opcode::DESTROY_RMP, to.srq.number), 0);
    assert_eq!(guests[1].count("qp"), 0);
}
