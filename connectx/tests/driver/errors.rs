// SPDX-License-Identifier: MIT OR Apache-2.0
//! Work that fails: the right completion, the right state, the right event.

use connectx::ifc::event::kind;
use connectx::ifc::opcode;
use connectx::ifc::wqe::{cqe_opcode, send, syndrome};
use connectx::objects::qp::State;

use crate::guest::{Cq, Pair, Qp, REGION, Settings, eventually, pointer, remote};

const ERROR: u64 = State::Error as u64;

/// Posts one bad WQE on side 0 and one good one behind it: an error and a flush, then the error state.
fn fails(pair: &mut Pair, op: u8, segments: &[[u8; 16]], expected: u8) {
    let Pair { guests, sides } = pair;
    let [a, b] = sides;
    a.qp.put(&guests[0], op, 0x08, 0, segments);
    a.qp.put(
        &guests[0],
        send::RDMA_WRITE,
        0,
        0,
        &[remote(b.at, b.key), pointer(4, a.key, a.at)],
    );
    a.qp.receive(&guests[0], a.key, a.at, 64);
    a.qp.ring(&guests[0], guests[0].uar);
    let first = a.send.wait(&guests[0]);
    assert_eq!(
        (first.opcode, first.syndrome, first.counter),
        (cqe_opcode::REQ_ERR, expected, 0)
    );
    let second = a.send.wait(&guests[0]);
    assert_eq!(
        (second.opcode, second.syndrome, second.counter),
        (cqe_opcode::REQ_ERR, syndrome::WR_FLUSH, 1),
        "unsignalled work is flushed too"
    );
    let receive = a.receive.wait(&guests[0]);
    assert_eq!(
        (receive.opcode, receive.syndrome),
        (cqe_opcode::RESP_ERR, syndrome::WR_FLUSH)
    );
    assert_eq!(a.qp.state(&mut guests[0]), ERROR);
}

/// A write of 1024 bytes, in packets of 256 to a queue pair that takes 1024 for full, and the other way round.
#[test]
pub fn packets_that_are_full_at_one_end_only_stop_both_sides() {
    for (near, far) in [(1, 3), (3, 1)] {
        let mut pair = Pair::with(|s| s.mtu = if s.lid == 2 { near } else { far });
        let (at, key) = (pair.sides[1].at, pair.sides[1].key);
        let local = pointer(1024, pair.sides[0].key, pair.sides[0].at);
        fails(
            &mut pair,
            send::RDMA_WRITE,
            &[remote(at, key), local],
            syndrome::REMOTE_INVAL_REQ,
        );
        let Pair { guests, sides } = &mut pair;
        let b = &mut sides[1];
        assert_eq!(b.qp.state(&mut guests[1]), ERROR);
        let event = eventually(|| guests[1].event());
        assert_eq!(event, (kind::WQ_INVAL_REQ_ERROR, b.qp.qpn));
    }
}

#[test]
pub fn a_wrong_remote_key_stops_both_sides() {
    let mut pair = Pair::new();
    let (at, key) = (pair.sides[1].at, pair.sides[1].key);
    let local = pointer(4, pair.sides[0].key, pair.sides[0].at);
    pair.sides[1].qp.receive(&pair.guests[1], key, at, 64);
    fails(
        &mut pair,
        send::RDMA_WRITE,
        &[remote(at, key ^ 1), local],
        syndrome::REMOTE_ACCESS,
    );
    let Pair { guests, sides } = &mut pair;
    let b = &mut sides[1];
    assert_eq!(b.qp.state(&mut guests[1]), ERROR);
    assert_eq!(guests[1].event(), Some((kind::WQ_ACCESS_ERROR, b.qp.qpn)));
    let cqe = b.receive.wait(&guests[1]);
    assert_eq!(
        (cqe.opcode, cqe.syndrome),
        (cqe_opcode::RESP_ERR, syndrome::WR_FLUSH)
    );
    assert_eq!(guests[1].ram.get(at, 4), [0; 4], "nothing was written");
}

#[test]
pub fn the_last_byte_may_be_written_and_the_next_not() {
    let mut pair = Pair::new();
    let (at, key) = (pair.sides[1].at, pair.sides[1].key);
    let local = pointer(4, pair.sides[0].key, pair.sides[0].at);
    let a = &mut pair.sides[0];
    a.qp.post(
        &pair.guests[0],
        send::RDMA_WRITE,
        0,
        &[remote(at + REGION - 4, key), local],
    );
    assert_eq!(a.send.wait(&pair.guests[0]).opcode, cqe_opcode::REQ);
    a.qp.post(
        &pair.guests[0],
        send::RDMA_WRITE,
        0,
        &[remote(at + REGION - 3, key), local],
    );
    assert_eq!(
        a.send.wait(&pair.guests[0]).syndrome,
        syndrome::REMOTE_ACCESS
    );
}

#[test]
pub fn a_key_without_the_right_is_no_key() {
    for (op, rights) in [
        (send::RDMA_WRITE, 0x17),
        (send::RDMA_READ, 0x1b),
        (send::ATOMIC_FA, 0x0f),
    ] {
        let mut pair = Pair::new();
        let b = &pair.sides[1];
        let (pd, at) = (b.pd, b.at);
        let key = pair.guests[1].key(pd, at, REGION, rights);
        let local = pointer(8, pair.sides[0].key, pair.sides[0].at);
        let segments = [remote(at, key), [0; 16], local];
        let segments = if op == send::ATOMIC_FA {
            segments.to_vec()
        } else {
            vec![segments[0], segments[2]]
        };
        fails(&mut pair, op, &segments, syndrome::REMOTE_ACCESS);
    }
}

#[test]
pub fn a_queue_pair_without_the_right_refuses() {
    let mut pair = Pair::with(|s| s.rights = 0);
    let segments = [
        remote(pair.sides[1].at, pair.sides[1].key),
        pointer(4, pair.sides[0].key, pair.sides[0].at),
    ];
    fails(
        &mut pair,
        send::RDMA_READ,
        &segments,
        syndrome::REMOTE_ACCESS,
    );
}

#[test]
pub fn a_key_of_another_domain_is_refused() {
    let mut pair = Pair::new();
    let other = pair.guests[1].alloc(opcode::ALLOC_PD);
    let (key, at) = pair.guests[1].region(other, 4096);
    let local = pointer(4, pair.sides[0].key, pair.sides[0].at);
    fails(
        &mut pair,
        send::RDMA_WRITE,
        &[remote(at, key), local],
        syndrome::REMOTE_ACCESS,
    );
}

#[test]
pub fn a_wrong_local_key_fails_here() {
    let mut pair = Pair::new();
    let there = remote(pair.sides[1].at, pair.sides[1].key);
    let local = pointer(4, pair.sides[0].key ^ 0x1000, pair.sides[0].at);
    fails(
        &mut pair,
        send::RDMA_WRITE,
        &[there, local],
        syndrome::LOCAL_PROT,
    );
    assert_ne!(
        pair.sides[1].qp.state(&mut pair.guests[1]),
        ERROR,
        "the peer saw nothing"
    );
}

#[test]
pub fn a_malformed_wqe_fails_here() {
    for (op, count) in [(0x2c, 2), (send::RDMA_WRITE, 0), (send::ATOMIC_FA, 2)] {
        let mut pair = Pair::new();
        let segment = pointer(4, pair.sides[0].key, pair.sides[0].at);
        fails(&mut pair, op, &vec![segment; count], syndrome::LOCAL_QP_OP);
    }
}

#[test]
pub fn a_message_longer_than_its_receive_stops_both_sides() {
    let mut pair = Pair::new();
    let (at, key) = (pair.sides[1].at, pair.sides[1].key);
    pair.sides[1].qp.receive(&pair.guests[1], key, at, 63);
    let local = pointer(64, pair.sides[0].key, pair.sides[0].at);
    fails(&mut pair, send::SEND, &[local], syndrome::REMOTE_INVAL_REQ);
    let cqe = pair.sides[1].receive.wait(&pair.guests[1]);
    assert_eq!(
        (cqe.opcode, cqe.syndrome),
        (cqe_opcode::RESP_ERR, syndrome::LOCAL_LENGTH)
    );
}

#[test]
pub fn a_receive_with_a_bad_key_is_a_remote_operation_error() {
    let mut pair = Pair::new();
    let (at, key) = (pair.sides[1].at, pair.sides[1].key);
    pair.sides[1]
        .qp
        .receive(&pair.guests[1], key ^ 0x1000, at, 64);
    let local = pointer(64, pair.sides[0].key, pair.sides[0].at);
    fails(&mut pair, send::SEND, &[local], syndrome::REMOTE_OP);
    let cqe = pair.sides[1].receive.wait(&pair.guests[1]);
    assert_eq!(
        (cqe.opcode, cqe.syndrome),
        (cqe_opcode::RESP_ERR, syndrome::LOCAL_PROT)
    );
}

#[test]
pub fn a_receiver_that_is_not_ready_is_asked_again() {
    let mut pair = Pair::new();
    let Pair { guests, sides } = &mut pair;
    let [a, b] = sides;
    a.qp.post(&guests[0], send::SEND, 0, &[pointer(4, a.key, a.at)]);
    assert_eq!(a.send.poll(&guests[0]), None);
    b.qp.receive(&guests[1], b.key, b.at, 64);
    assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
    assert!(guests[0].count("rnr_naks") > 0);
}

#[test]
pub fn a_receiver_that_never_gets_ready_is_given_up() {
    let mut pair = Pair::with(|s| s.rnr_retries = 2);
    let local = pointer(64, pair.sides[0].key, pair.sides[0].at);
    fails(&mut pair, send::SEND, &[local], syndrome::RNR_RETRY_EXC);
    assert_eq!(pair.guests[0].count("rnr_naks"), 3, "once and twice again");
}

#[test]
pub fn a_peer_that_is_gone_is_given_up() {
    let mut pair = Pair::new();
    let Pair { guests, sides } = &mut pair;
    assert_eq!(guests[1].on_object(opcode::DESTROY_QP, sides[1].qp.qpn), 0);
    let segments = [
        remote(sides[1].at, sides[1].key),
        pointer(4, sides[0].key, sides[0].at),
    ];
    fails(
        &mut pair,
        send::RDMA_WRITE,
        &segments,
        syndrome::TRANSPORT_RETRY_EXC,
    );
    assert_eq!(pair.guests[0].count("retransmissions"), 2);
}

#[test]
pub fn a_foreign_page_rings_nothing() {
    let mut pair = Pair::new();
    let Pair { guests, sides } = &mut pair;
    let [a, b] = sides;
    let other = guests[0].alloc(opcode::ALLOC_UAR);
    a.qp.put(
        &guests[0],
        send::RDMA_WRITE,
        8,
        0,
        &[remote(b.at, b.key), pointer(4, a.key, a.at)],
    );
    a.qp.ring(&guests[0], other);
    assert_eq!(a.send.poll(&guests[0]), None);
    assert_eq!(guests[0].count("foreign_doorbells"), 1);
    let last = guests[0].referee.recent(1).pop().unwrap().refusal;
    assert_eq!(last.object, format!("qp {:#x}", a.qp.qpn));
    a.qp.ring(&guests[0], other + 1);
    assert_eq!(guests[0].count("stale_doorbells"), 1);
    a.qp.ring(&guests[0], guests[0].uar);
    assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
}

#[test]
pub fn an_overrun_completion_queue_says_so() {
    let mut pair = Pair::new();
    let Pair { guests, sides } = &mut pair;
    let small = Cq::new(&mut guests[0], 1);
    let pd = sides[0].pd;
    let mut qp = Qp::new(&mut guests[0], pd, &small, &small);
    let own = Settings::to(1, qp.qpn);
    qp.connect(&mut guests[0], own);
    let (key, at) = (sides[0].key, sides[0].at);
    for _ in 0..3 {
        qp.post(
            &guests[0],
            send::RDMA_WRITE,
            0,
            &[remote(at, key), pointer(4, key, at)],
        );
    }
    assert_eq!(guests[0].event(), Some((kind::CQ_ERROR, small.cqn)));
    assert_eq!(guests[0].event(), Some((kind::WQ_CATAS_ERROR, qp.qpn)));
    assert_eq!(guests[0].count("cq_overruns"), 1);
    assert_eq!(qp.state(&mut guests[0]), ERROR);
}

#[test]
pub fn work_posted_in_error_is_flushed() {
    let mut pair = Pair::new();
    let Pair { guests, sides } = &mut pair;
    let [a, b] = sides;
    assert_eq!(guests[0].on_object(opcode::TO_ERR_QP, a.qp.qpn), 0);
    a.qp.post(
        &guests[0],
        send::RDMA_WRITE,
        0,
        &[remote(b.at, b.key), pointer(4, a.key, a.at)],
    );
    assert_eq!(a.send.wait(&guests[0]).syndrome, syndrome::WR_FLUSH);
    // A receive rings no doorbell; the device finds it by itself.
    a.qp.receive(&guests[0], a.key, a.at, 64);
    let cqe = eventually(|| a.receive.poll(&guests[0]));
    assert_eq!(
        (cqe.opcode, cqe.syndrome),
        (cqe_opcode::RESP_ERR, syndrome::WR_FLUSH)
    );
}

#[test]
pub fn transitions_out_of_order_are_refused() {
    let mut pair = Pair::new();
    let Pair { guests, sides } = &mut pair;
    let qp = &sides[0].qp;
    const BAD_STATE: u8 = 0x10;
    assert_eq!(
        qp.modify(&mut guests[0], opcode::RST2INIT_QP, |_| {}),
        BAD_STATE
    );
    assert_eq!(
        qp.modify(&mut guests[0], opcode::RTR2RTS_QP, |_| {}),
        BAD_STATE
    );
    assert_eq!(guests[0].on_object(opcode::TO_RST_QP, qp.qpn), 0);
    assert_eq!(
        qp.modify(&mut guests[0], opcode::INIT2RTR_QP, |_| {}),
        BAD_STATE
    );
    qp.to_init(&mut guests[0], Settings::to(2, 1));
    assert_eq!(
        qp.modify(&mut guests[0], opcode::INIT2RTR_QP, |_| {}),
        0x03,
        "no MTU"
    );
}
