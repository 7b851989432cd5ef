// SPDX-License-Identifier: MIT OR Apache-2.0
//! WQEs written into UAR pages. What was executed shows by the completion: the copy asks for one, memory does not.

use std::time::Duration;

use connectx::ifc::command::{self, header, reply};
use connectx::ifc::context::{sqc, wq};
use connectx::ifc::opcode;
use connectx::ifc::wqe::{cqe_opcode, send};
use connectx::platform::Function;

use crate::guest::{Cq, Guest, Pair, Qp, Side, input, remote, status};

const SIGNALLED: u8 = 0x08;
/// Two buffers of a register.
const BUFFERS: [u64; 2] = [0x800, 0x900];

/// A NOP of a queue: as in memory, unsignalled, or as it is copied.
fn nop(number: u32, index: u16, flags: u8) -> [u8; 64] {
    let mut wqe = [0; 64];
    wqe[1..3].copy_from_slice(&index.to_be_bytes());
    wqe[4..8].copy_from_slice(&((number << 8) | 1).to_be_bytes());
    wqe[11] = flags;
    wqe
}

/// Writes to a buffer of the driver's page in pieces of `size` bytes.
fn copy(guest: &Guest, buffer: u64, bytes: &[u8], size: usize) {
    let at = u64::from(guest.uar) * 4096 + buffer;
    for (i, piece) in bytes.chunks(size).enumerate() {
        guest.hca.bar_write(0, at + (i * size) as u64, piece);
    }
}

/// A queue pair connected to itself.
fn side() -> (Guest, Side) {
    let mut guest = crate::guest::guests(1).pop().unwrap();
    let side = Side::new(&mut guest);
    let own = crate::guest::Settings::to(1, side.qp.qpn);
    side.qp.connect(&mut guest, own);
    (guest, side)
}

/// Has the function wait for the rest of a copy for as long as it takes.
fn patient(guest: &Guest) {
    let long = Duration::from_secs(3600);
    guest
        .hca
        .with_device(|device| device.copies.patience = long);
}

/// Posts a silent NOP, and its signalled copy in pieces. Gives its index.
fn post(guest: &Guest, qp: &mut Qp, buffer: u64, size: usize) -> u16 {
    let index = qp.producer;
    qp.put(guest, send::NOP, 0, 0, &[]);
    copy(guest, buffer, &nop(qp.qpn, index, SIGNALLED), size);
    index
}

#[test]
pub fn a_copy_in_one_packet_is_executed_and_memory_is_not() {
    let (guest, mut side) = side();
    for round in 0..40 {
        let index = post(&guest, &mut side.qp, BUFFERS[round % 2], 64);
        let cqe = side.send.wait(&guest);
        assert_eq!((cqe.opcode, cqe.counter), (cqe_opcode::REQ, index));
    }
    assert_eq!(guest.count("blueflame_wqes"), 40);
}

#[test]
pub fn a_copy_in_pieces_is_one_once_the_page_is_known_for_copies() {
    for size in [4, 8, 16, 32] {
        let (guest, mut side) = side();
        patient(&guest);
        post(&guest, &mut side.qp, BUFFERS[0], size);
        assert_eq!(side.send.poll(&guest), None, "the first rang by its head");
        for round in 1..10 {
            let index = post(&guest, &mut side.qp, BUFFERS[round % 2], size);
            assert_eq!(side.send.wait(&guest).counter, index);
        }
        assert_eq!(guest.count("blueflame_wqes"), 9);
    }
}

#[test]
pub fn a_doorbell_alone_takes_the_wqe_from_memory_whatever_came_before() {
    let (guest, mut side) = side();
    let qp = &mut side.qp;
    for round in 0..3 {
        // A page that is known for copies, which takes twice as many each time that a doorbell follows…
        patient(&guest);
        for copy in 0..1 << round {
            post(&guest, qp, BUFFERS[copy % 2], 8);
        }
        assert_eq!(side.send.poll(&guest), None, "they rang by their heads");
        post(&guest, qp, BUFFERS[(1 << round) % 2], 8);
        side.send.wait(&guest);
        guest
            .hca
            .with_device(|device| device.copies.patience = Duration::from_millis(1));
        // …on which a doorbell rings: nothing else comes, and it is executed nevertheless.
        qp.put(&guest, send::NOP, SIGNALLED, 0, &[]);
        let index = qp.producer - 1;
        copy(&guest, BUFFERS[0], &nop(qp.qpn, index, 0)[..8], 8);
        assert_eq!(side.send.wait(&guest).counter, index);
    }
    assert_eq!(guest.count("blueflame_wqes"), 3);
}

#[test]
pub fn a_copy_that_came_too_late_is_one_all_the_same() {
    let (guest, mut side) = side();
    let qp = &mut side.qp;
    patient(&guest);
    post(&guest, qp, BUFFERS[0], 8);
    guest
        .hca
        .with_device(|device| device.copies.patience = Duration::from_millis(1));
    // The doorbell is held, rings from memory, and then the rest of the copy comes.
    let index = qp.producer;
    qp.put(&guest, send::NOP, SIGNALLED, 0, &[]);
    let bytes = nop(qp.qpn, index, SIGNALLED);
    copy(&guest, BUFFERS[1], &bytes[..8], 8);
    assert_eq!(side.send.wait(&guest).counter, index);
    let at = u64::from(guest.uar) * 4096 + BUFFERS[1];
    for piece in 1..8 {
        let bytes = &bytes[piece * 8..piece * 8 + 8];
        guest.hca.bar_write(0, at + (piece * 8) as u64, bytes);
    }
    assert_eq!(guest.count("blueflame_wqes"), 0);
    // So the next is held as before.
    patient(&guest);
    let index = post(&guest, qp, BUFFERS[0], 8);
    assert_eq!(side.send.wait(&guest).counter, index);
    assert_eq!(guest.count("blueflame_wqes"), 1);
}

#[test]
pub fn a_copy_that_is_broken_off_or_out_of_order_is_a_doorbell() {
    for (name, pieces) in [
        ("broken off", &[0usize, 1, 2, 3][..]),
        ("out of order", &[0, 1, 3, 2, 4, 5, 6, 7]),
        ("a gap", &[0, 1, 2, 4, 5, 6, 7]),
        ("twice the same", &[0, 1, 1, 2, 3, 4, 5, 6, 7]),
    ] {
        let (guest, mut side) = side();
        patient(&guest);
        let qp = &mut side.qp;
        post(&guest, qp, BUFFERS[0], 8);
        let index = qp.producer;
        // Here memory asks for the completion, and the copy for none.
        qp.put(&guest, send::NOP, SIGNALLED, 0, &[]);
        let bytes = nop(qp.qpn, index, 0);
        let at = u64::from(guest.uar) * 4096 + BUFFERS[1];
        for piece in pieces {
            let bytes = &bytes[piece * 8..piece * 8 + 8];
            guest.hca.bar_write(0, at + (piece * 8) as u64, bytes);
        }
        // Something else on the page, or a command, ends it.
        side.send.arm(&guest);
        let cqe = side.send.poll(&guest).expect(name);
        assert_eq!(cqe.counter, index, "{name}");
        assert_eq!(guest.count("blueflame_wqes"), 0, "{name}");
    }
}

#[test]
pub fn a_command_finds_what_was_rung_before_it() {
    let (mut guest, mut side) = side();
    patient(&guest);
    let qp = &mut side.qp;
    post(&guest, qp, BUFFERS[0], 8);
    qp.put(&guest, send::NOP, SIGNALLED, 0, &[]);
    copy(&guest, BUFFERS[1], &nop(qp.qpn, 1, SIGNALLED)[..40], 8);
    assert_eq!(guest.on_object(opcode::DESTROY_QP, qp.qpn), 0);
    assert_eq!(side.send.poll(&guest).unwrap().counter, 1);
    assert_eq!(guest.count("lost_doorbells"), 0);
}

#[test]
pub fn writes_to_another_page_do_not_break_a_copy_off() {
    let (mut guest, mut side) = side();
    patient(&guest);
    let other = guest.alloc(opcode::ALLOC_UAR);
    let second = Cq::new(&mut guest, 4);
    let pd = side.pd;
    let stranger = Qp::try_new(&mut guest, pd, other, &second, &second).unwrap();
    let qp = &mut side.qp;
    post(&guest, qp, BUFFERS[0], 8);
    let index = qp.producer;
    qp.put(&guest, send::NOP, 0, 0, &[]);
    let bytes = nop(qp.qpn, index, SIGNALLED);
    copy(&guest, BUFFERS[1], &bytes[..24], 8);
    stranger.ring(&guest, other);
    let at = u64::from(guest.uar) * 4096 + BUFFERS[1] + 24;
    guest.hca.bar_write(0, at, &bytes[24..]);
    assert_eq!(side.send.wait(&guest).counter, index);
    assert_eq!(guest.count("blueflame_wqes"), 1);
}

#[test]
pub fn data_comes_with_the_copy() {
    let Pair { guests, mut sides } = Pair::new();
    let [a, b] = &mut sides;
    let inline = |byte: u8, len: usize| {
        let mut bytes = vec![byte; (4 + len).next_multiple_of(16)];
        bytes[..4].copy_from_slice(&(0x8000_0000 | len as u32).to_be_bytes());
        bytes
            .chunks(16)
            .map(|c| c.try_into().unwrap())
            .collect::<Vec<[u8; 16]>>()
    };
    // One basic block, and three.
    for len in [8usize, 140] {
        let index = a.qp.producer;
        let wqe = |byte| [vec![remote(b.at, b.key)], inline(byte, len)].concat();
        a.qp.put(&guests[0], send::RDMA_WRITE, SIGNALLED, 0, &wqe(0x11));
        let segments = wqe(0x22);
        let mut bytes = vec![0; 16];
        bytes[1..4].copy_from_slice(&[(index >> 8) as u8, index as u8, send::RDMA_WRITE]);
        let count = 1 + segments.len() as u32;
        bytes[4..8].copy_from_slice(&((a.qp.qpn << 8) | count).to_be_bytes());
        bytes[11] = SIGNALLED;
        bytes.extend(segments.concat());
        bytes.resize(bytes.len().next_multiple_of(64), 0);
        copy(&guests[0], BUFFERS[0], &bytes, 256);
        assert_eq!(a.send.wait(&guests[0]).counter, index);
        assert_eq!(guests[1].ram.get(b.at, len), vec![0x22; len]);
    }
}

#[test]
pub fn a_copy_through_a_foreign_page_rings_nothing() {
    let (mut guest, mut side) = side();
    let own = guest.uar;
    side.qp.put(&guest, send::NOP, SIGNALLED, 0, &[]);
    guest.uar = guest.alloc(opcode::ALLOC_UAR);
    copy(&guest, BUFFERS[0], &nop(side.qp.qpn, 0, SIGNALLED), 64);
    assert_eq!(side.send.poll(&guest), None);
    assert_eq!(guest.count("foreign_doorbells"), 1);
    guest.uar = own;
    side.qp.ring(&guest, own);
    side.send.wait(&guest);
    assert_eq!(guest.count("blueflame_wqes"), 0, "its copy is forgotten");
}

#[test]
pub fn a_copy_of_what_is_not_next_is_taken_from_memory() {
    let (guest, mut side) = side();
    let qp = &mut side.qp;
    qp.put(&guest, send::NOP, 0, 0, &[]);
    qp.put(&guest, send::NOP, SIGNALLED, 0, &[]);
    copy(&guest, BUFFERS[0], &nop(qp.qpn, 1, 0), 64);
    assert_eq!(side.send.wait(&guest).counter, 1);
    assert_eq!(guest.count("blueflame_wqes"), 0);
}

#[test]
pub fn what_is_posted_beyond_a_copy_waits_for_its_own() {
    let (guest, mut side) = side();
    patient(&guest);
    let qp = &mut side.qp;
    // Two are in memory before the first one's copy is whole, as when the device is slower than the driver.
    for index in 0..2 {
        assert_eq!(qp.producer, index);
        qp.put(&guest, send::NOP, 0, 0, &[]);
    }
    for index in 0..2 {
        copy(&guest, BUFFERS[0], &nop(qp.qpn, index, SIGNALLED), 64);
        assert_eq!(side.send.wait(&guest).counter, index);
    }
    assert_eq!(guest.count("blueflame_wqes"), 2);
    // A copy that comes too late does not make the next one late too.
    qp.put(&guest, send::NOP, SIGNALLED, 0, &[]);
    qp.ring(&guest, guest.uar);
    assert_eq!(side.send.wait(&guest).counter, 2);
    qp.put(&guest, send::NOP, 0, 0, &[]);
    for index in 2..4 {
        copy(&guest, BUFFERS[0], &nop(qp.qpn, index, SIGNALLED), 64);
    }
    assert_eq!(side.send.wait(&guest).counter, 3);
    assert_eq!(guest.count("blueflame_wqes"), 3);
    // What is not rung for is found all the same.
    guest
        .hca
        .with_device(|device| device.copies.patience = Duration::from_millis(1));
    qp.put(&guest, send::NOP, 0, 0, &[]);
    qp.put(&guest, send::NOP, SIGNALLED, 0, &[]);
    copy(&guest, BUFFERS[0], &nop(qp.qpn, 4, SIGNALLED), 64);
    for index in 4..6 {
        assert_eq!(side.send.wait(&guest).counter, index);
    }
}

/// CREATE_SQ as core/wc.c sends it.
fn create_sq(guest: &mut Guest, cq: &Cq, log: u64, f: impl FnOnce(&mut [u8])) -> (u8, u32, u64) {
    let at = guest.ram.alloc(64 << log);
    let dbr = guest.ram.alloc(8);
    let mut create = input(opcode::CREATE_SQ, 0x110);
    let uar = u64::from(guest.uar);
    let context = command::create_sq_in::ctx.bytes_mut(&mut create);
    sqc::cqn.set(context, u64::from(cq.cqn));
    sqc::flush_in_error_en.set(context, 1);
    let queue = sqc::wq.bytes_mut(context);
    wq::wq_type.set(queue, 1);
    wq::log_wq_stride.set(queue, 6);
    wq::log_wq_sz.set(queue, log);
    wq::uar_page.set(queue, uar);
    wq::dbr_addr.set(queue, dbr);
    f(context);
    create.extend((0..(64u64 << log).div_ceil(4096)).flat_map(|p| (at + p * 4096).to_be_bytes()));
    let out = guest.command(create, 16);
    (status(&out), reply::object.get32(&out), dbr)
}

fn modify_sq(guest: &mut Guest, sqn: u32, from: u64, to: u64) -> u8 {
    let mut modify = input(opcode::MODIFY_SQ, 0x110);
    header::object.set(&mut modify, u64::from(sqn));
    command::modify_sq_in::sq_state.set(&mut modify, from);
    sqc::state.set(command::modify_sq_in::ctx.bytes_mut(&mut modify), to);
    status(&guest.command(modify, 16))
}

/// What mlx5_core does to find out whether writes are combined (core/wc.c): the first completion is of the last WQE, which
/// alone asks for one in memory, or of one before it, which asks in the copy only.
fn first_completion(size: usize, guest: &mut Guest) -> u16 {
    const WQES: u16 = 255;
    let mut cq = Cq::new(guest, 8);
    let at = guest.ram.alloc(0);
    let (status, sqn, dbr) = create_sq(guest, &cq, 8, |_| {});
    assert_eq!(status, 0);
    assert_eq!(modify_sq(guest, sqn, 0, 1), 0);
    for index in 0..WQES {
        let flags = if index + 1 == WQES { SIGNALLED } else { 0 };
        guest
            .ram
            .set(at + u64::from(index) * 64, &nop(sqn, index, flags));
        guest.ram.set(dbr + 4, &u32::from(index + 1).to_be_bytes());
        let buffer = BUFFERS[usize::from(index) % 2];
        copy(guest, buffer, &nop(sqn, index, SIGNALLED)[..size.max(8)], 8);
    }
    let first = cq.wait(guest).counter;
    assert_eq!(guest.on_object(opcode::DESTROY_SQ, sqn), 0);
    assert_eq!(guest.on_object(opcode::DESTROY_CQ, cq.cqn), 0);
    first
}

#[test]
pub fn the_driver_s_test_sees_whether_writes_are_combined() {
    let mut guest = crate::guest::guests(1).pop().unwrap();
    patient(&guest);
    assert_eq!(first_completion(64, &mut guest), 1, "whole copies");
    assert_eq!(first_completion(8, &mut guest), 254, "doorbells");
    assert_eq!(first_completion(16, &mut guest), 254, "broken copies");
}

#[test]
pub fn a_send_queue_has_its_own_commands_and_states() {
    const BAD_PARAM: u8 = 3;
    const BAD_RESOURCE: u8 = 5;
    const BAD_RESOURCE_STATE: u8 = 9;
    let (mut guest, mut side) = side();
    let mut cq = Cq::new(&mut guest, 4);
    let (status, sqn, dbr) = create_sq(&mut guest, &cq, 2, |_| {});
    assert_eq!(status, 0);
    // RST to RDY to ERR to RST, each from the state that it is in.
    assert_eq!(modify_sq(&mut guest, sqn, 1, 1), BAD_RESOURCE_STATE);
    assert_eq!(modify_sq(&mut guest, sqn, 0, 1), 0);
    assert_eq!(modify_sq(&mut guest, sqn, 1, 0), BAD_RESOURCE_STATE);
    assert_eq!(modify_sq(&mut guest, sqn, 1, 2), BAD_RESOURCE_STATE);
    let state = |guest: &mut Guest| {
        let mut query = input(opcode::QUERY_SQ, 16);
        header::object.set(&mut query, u64::from(sqn));
        let out = guest.ok(query, command::query_sq_out::SIZE);
        let context = command::query_sq_out::sq_context.bytes(&out);
        (sqc::state.get(context), sqc::cqn.get32(context))
    };
    assert_eq!(state(&mut guest), (1, cq.cqn));
    // Nothing but NOPs: what is sent needs a TIS.
    let at = dbr - 4096;
    let mut wqe = nop(sqn, 0, SIGNALLED);
    wqe[3] = send::SEND;
    guest.ram.set(at, &wqe);
    guest.ram.set(dbr + 4, &1u32.to_be_bytes());
    copy(&guest, BUFFERS[0], &wqe[..8], 8);
    assert_eq!(cq.wait(&guest).opcode, cqe_opcode::REQ_ERR);
    assert_eq!(state(&mut guest).0, 3);
    assert_eq!(modify_sq(&mut guest, sqn, 3, 0), 0);
    // Neither is the other.
    assert_eq!(guest.on_object(opcode::DESTROY_QP, sqn), BAD_RESOURCE);
    assert_eq!(guest.on_object(opcode::TO_RST_QP, sqn), BAD_RESOURCE);
    assert_eq!(
        guest.on_object(opcode::DESTROY_SQ, side.qp.qpn),
        BAD_RESOURCE
    );
    assert_eq!(
        guest.on_object(opcode::DESTROY_CQ, cq.cqn),
        BAD_RESOURCE_STATE
    );
    assert_eq!(guest.on_object(opcode::DESTROY_SQ, sqn), 0);
    assert_eq!(guest.on_object(opcode::DESTROY_CQ, cq.cqn), 0);
    let other = &side.send;
    for (f, expected) in [
        (
            &mut (|c: &mut [u8]| sqc::state.set(c, 1)) as &mut dyn FnMut(&mut [u8]),
            BAD_PARAM,
        ),
        (&mut |c| wq::wq_type.set(sqc::wq.bytes_mut(c), 0), BAD_PARAM),
        (
            &mut |c| wq::log_wq_stride.set(sqc::wq.bytes_mut(c), 4),
            BAD_PARAM,
        ),
        (
            &mut |c| wq::log_wq_sz.set(sqc::wq.bytes_mut(c), 31),
            BAD_PARAM,
        ),
        (&mut |c| sqc::cqn.set(c, 0xfff), BAD_RESOURCE),
        (
            &mut |c| wq::uar_page.set(sqc::wq.bytes_mut(c), 0xfff),
            BAD_RESOURCE,
        ),
    ] {
        assert_eq!(create_sq(&mut guest, other, 2, f).0, expected);
    }
    // The pair on the same page is none the worse.
    let index = post(&guest, &mut side.qp, BUFFERS[0], 64);
    assert_eq!(side.send.wait(&guest).counter, index);
}
