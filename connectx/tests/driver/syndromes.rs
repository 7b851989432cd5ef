// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every failure that a completion can report, each brought about by work that earns it. The device's own list of them is
//! complete and has nothing that cannot be reached.

use std::collections::BTreeSet;

use connectx::engine::completion::FAILURES;
use connectx::ifc::command::{self, header, reply};
use connectx::ifc::context::{mkc, qpc};
use connectx::ifc::opcode;
use connectx::ifc::wqe::{cqe_opcode, send, syndrome};
use connectx::objects::qp::Service;

use crate::guest::{
    Cq, Cqe, Guest, Pair, Qp, REGION, Settings, Shape, Side, address_vector, input, pointer, remote,
};

/// Syndrome and vendor's syndrome.
type Seen = (u8, u8);

fn seen(cqe: Cqe) -> Seen {
    assert!(
        matches!(cqe.opcode, cqe_opcode::REQ_ERR | cqe_opcode::RESP_ERR),
        "{cqe:?}"
    );
    (cqe.syndrome, cqe.vendor)
}

/// What comes of one WQE on side 0.
fn posted(op: u8, immediate: u32, f: impl FnOnce(&mut Pair) -> Vec<[u8; 16]>) -> Seen {
    let mut pair = Pair::new();
    let segments = f(&mut pair);
    let Pair { guests, sides } = &mut pair;
    sides[0].qp.post(&guests[0], op, immediate, &segments);
    seen(sides[0].send.wait(&guests[0]))
}

/// What comes of it on side 1.
fn received(op: u8, immediate: u32, f: impl FnOnce(&mut Pair) -> Vec<[u8; 16]>) -> Seen {
    let mut pair = Pair::new();
    let segments = f(&mut pair);
    let Pair { guests, sides } = &mut pair;
    sides[0].qp.post(&guests[0], op, immediate, &segments);
    seen(sides[1].receive.wait(&guests[1]))
}

fn local(pair: &Pair, len: u32) -> [u8; 16] {
    pointer(len, pair.sides[0].key, pair.sides[0].at)
}

fn there(pair: &Pair) -> [u8; 16] {
    remote(pair.sides[1].at, pair.sides[1].key)
}

/// A receive WQE on side 1.
fn awaited(pair: &mut Pair, key: u32, len: u32) {
    let at = pair.sides[1].at;
    pair.sides[1].qp.receive(&pair.guests[1], key, at, len);
}

/// A key over memory that does not exist.
fn key_to_nowhere(guest: &mut Guest, pd: u32) -> u32 {
    let mut create = input(opcode::CREATE_MKEY, 0x110);
    let context = command::create_mkey_in::mkc.bytes_mut(&mut create);
    for right in [mkc::lr, mkc::lw, mkc::rr, mkc::rw] {
        right.set(context, 1);
    }
    mkc::access_mode_1_0.set(context, 1);
    mkc::pd.set(context, u64::from(pd));
    mkc::len.set(context, 4096);
    mkc::log_page_size.set(context, 12);
    command::create_mkey_in::translations_octword_actual_size.set(&mut create, 1);
    create.extend(0xdead_0000_0000u64.to_be_bytes());
    create.extend(0u64.to_be_bytes());
    reply::object.get32(&guest.ok(create, 16)) << 8
}

/// A queue pair connected to itself, whose send queue lies in memory that does not exist.
fn queue_nowhere() -> Seen {
    let mut guest = crate::guest::guests(1).pop().unwrap();
    let pd = guest.alloc(opcode::ALLOC_PD);
    let mut cq = Cq::new(&mut guest, 4);
    let dbr = guest.ram.alloc(8);
    let mut create = input(opcode::CREATE_QP, 0x110);
    let context = command::create_qp_in::qpc.bytes_mut(&mut create);
    qpc::pd.set(context, u64::from(pd));
    qpc::rq_type.set(context, 3);
    qpc::log_sq_size.set(context, 2);
    qpc::uar_page.set(context, u64::from(guest.uar));
    qpc::cqn_snd.set(context, u64::from(cq.cqn));
    qpc::cqn_rcv.set(context, u64::from(cq.cqn));
    qpc::dbr_addr.set(context, dbr);
    create.extend(0xdead_0000_0000u64.to_be_bytes());
    let qpn = reply::object.get32(&guest.ok(create, 16));
    for op in [opcode::RST2INIT_QP, opcode::INIT2RTR_QP, opcode::RTR2RTS_QP] {
        let mut modify = input(op, 0x110);
        header::object.set(&mut modify, u64::from(qpn));
        let context = command::modify_qp_in::qpc.bytes_mut(&mut modify);
        qpc::mtu.set(context, 3);
        qpc::log_msg_max.set(context, 30);
        guest.ok(modify, 16);
    }
    guest.ram.set(dbr + 4, &1u32.to_be_bytes());
    let mut doorbell = [0u8; 8];
    doorbell[4..].copy_from_slice(&(qpn << 8).to_be_bytes());
    let at = u64::from(guest.uar) * 4096 + 0x800;
    connectx::platform::Function::bar_write(&guest.hca, 0, at, &doorbell);
    seen(cq.wait(&guest))
}

/// A datagram longer than the port's MTU.
fn long_datagram() -> Seen {
    let mut guest = crate::guest::guests(1).pop().unwrap();
    let mut side = Side::new(&mut guest);
    let (pd, uar) = (side.pd, guest.uar);
    let shape = Shape::of(Service::Ud);
    let mut qp = Qp::shaped(&mut guest, pd, uar, &side.send, &side.receive, shape).unwrap();
    let settings = Settings::to(1, qp.qpn);
    qp.connect(&mut guest, settings);
    let mut segments = address_vector(1, qp.qpn, settings.qkey as u32).to_vec();
    segments.push(pointer(4097, side.key, side.at));
    qp.post(&guest, send::SEND, 0, &segments);
    seen(side.send.wait(&guest))
}

/// READ responses of another size than the requester's MTU.
fn odd_responses() -> Seen {
    let mut guests = crate::guest::guests(2);
    let mut sides = [Side::new(&mut guests[0]), Side::new(&mut guests[1])];
    for i in 0..2 {
        let mut settings = Settings::to(2 - i as u16, sides[1 - i].qp.qpn);
        settings.mtu = 3 + i as u64;
        sides[i].qp.connect(&mut guests[i], settings);
    }
    let [a, b] = &mut sides;
    let segments = [remote(b.at, b.key), pointer(8192, a.key, a.at)];
    a.qp.post(&guests[0], send::RDMA_READ, 0, &segments);
    seen(a.send.wait(&guests[0]))
}

/// The second completion, after an error.
fn flushed(receive: bool) -> Seen {
    let mut pair = Pair::new();
    let Pair { guests, sides } = &mut pair;
    let a = &mut sides[0];
    a.qp.receive(&guests[0], a.key, a.at, 64);
    a.qp.put(&guests[0], 0x2c, 0, 0, &[]);
    a.qp.post(&guests[0], send::NOP, 0, &[]);
    a.send.wait(&guests[0]);
    seen(if receive {
        a.receive.wait(&guests[0])
    } else {
        a.send.wait(&guests[0])
    })
}

#[test]
pub fn every_failure_is_earned() {
    use syndrome::*;
    let mut all = BTreeSet::new();
    let mut row = |name: &str, expected: Seen, seen: Seen| {
        assert_eq!(seen, expected, "{name}: {seen:#x?}");
        all.insert(seen);
    };
    row(
        "a datagram longer than the MTU",
        (LOCAL_LENGTH, 0x6e),
        long_datagram(),
    );
    row(
        "a message longer than its receive",
        (LOCAL_LENGTH, 0x6f),
        received(send::SEND, 0, |p| {
            let key = p.sides[1].key;
            awaited(p, key, 63);
            vec![local(p, 64)]
        }),
    );
    row(
        "no opcode",
        (LOCAL_QP_OP, 0x68),
        posted(0x2c, 0, |_| vec![]),
    );
    row(
        "a queue that cannot be read",
        (LOCAL_QP_OP, 0x75),
        queue_nowhere(),
    );
    row(
        "a message that closes what is no window",
        (LOCAL_QP_OP, 0x54),
        received(send::SEND_INVAL, 0xdead00, |p| {
            let key = p.sides[1].key;
            awaited(p, key, 64);
            vec![local(p, 4)]
        }),
    );
    row(
        "no such local key",
        (LOCAL_PROT, 0x51),
        posted(send::RDMA_WRITE, 0, |p| {
            vec![there(p), pointer(4, 0xdead00, 0)]
        }),
    );
    row(
        "outside the local key's range",
        (LOCAL_PROT, 0x52),
        posted(send::RDMA_WRITE, 0, |p| {
            let (key, at) = (p.sides[0].key, p.sides[0].at);
            vec![there(p), pointer(4, key, at + REGION)]
        }),
    );
    row(
        "a local key that may not be written",
        (LOCAL_PROT, 0x53),
        posted(send::RDMA_READ, 0, |p| {
            let (pd, at) = (p.sides[0].pd, p.sides[0].at);
            // Local read only: rights a, rw, rr, lw, lr.
            let key = p.guests[0].key(pd, at, 4096, 0x01);
            vec![there(p), pointer(4, key, at)]
        }),
    );
    row(
        "a receive with a bad key",
        (LOCAL_PROT, 0x54),
        received(send::SEND, 0, |p| {
            awaited(p, 0xdead00, 64);
            vec![local(p, 4)]
        }),
    );
    row("a send behind an error", (WR_FLUSH, 0xf9), flushed(false));
    row("a receive behind an error", (WR_FLUSH, 0xf5), flushed(true));
    row(
        "work on a key that permits none",
        (MW_BIND, 0x78),
        posted(send::UMR, 0xdead00, |_| vec![[0; 16]; 7]),
    );
    row(
        "responses of a wrong size",
        (BAD_RESP, 0x8a),
        odd_responses(),
    );
    row(
        "an immediate with data for memory that is not there",
        (LOCAL_ACCESS, 0x54),
        received(send::RDMA_WRITE_IMM, 1, |p| {
            let key = p.sides[1].key;
            awaited(p, key, 0);
            let pd = p.sides[1].pd;
            let nowhere = key_to_nowhere(&mut p.guests[1], pd);
            vec![remote(0, nowhere), local(p, 4)]
        }),
    );
    row(
        "a request that is none",
        (REMOTE_INVAL_REQ, 0x8a),
        posted(send::ATOMIC_FA, 0, |p| {
            let (key, at) = (p.sides[1].key, p.sides[1].at);
            vec![remote(at + 4, key), [0; 16], local(p, 8)]
        }),
    );
    row(
        "no such remote key",
        (REMOTE_ACCESS, 0x88),
        posted(send::RDMA_WRITE, 0, |p| {
            vec![remote(0, 0xdead00), local(p, 4)]
        }),
    );
    row(
        "a receiver that cannot receive",
        (REMOTE_OP, 0x89),
        posted(send::SEND, 0, |p| {
            awaited(p, 0xdead00, 64);
            vec![local(p, 4)]
        }),
    );
    row(
        "a peer that is gone",
        (TRANSPORT_RETRY_EXC, 0x81),
        posted(send::SEND, 0, |p| {
            let qpn = p.sides[1].qp.qpn;
            assert_eq!(p.guests[1].on_object(opcode::DESTROY_QP, qpn), 0);
            vec![local(p, 4)]
        }),
    );
    let mut pair = Pair::with(|s| s.rnr_retries = 1);
    let segment = local(&pair, 4);
    let Pair { guests, sides } = &mut pair;
    sides[0].qp.post(&guests[0], send::SEND, 0, &[segment]);
    let never = seen(sides[0].send.wait(&guests[0]));
    row(
        "a receiver that is never ready",
        (RNR_RETRY_EXC, 0x87),
        never,
    );
    let known: BTreeSet<Seen> = FAILURES
        .iter()
        .map(|(f, _)| (f.syndrome, f.vendor))
        .collect();
    assert_eq!(known.len(), FAILURES.len(), "listed once");
    assert_eq!(all, known);
}
