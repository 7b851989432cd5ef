// SPDX-License-Identifier: MIT OR Apache-2.0
//! General objects, and what holds queue pairs to a rate.

use std::time::Instant;

use connectx::ifc::command::{
    create_sched_elem_in, general_obj_in_cmd_hdr, general_obj_out_cmd_hdr, header, modify_qp_in,
    set_pp_rate_limit_in,
};
use connectx::ifc::context::{qpc, qpc_ext, sched_context, sched_elem, set_pp_rate_limit_context};
use connectx::ifc::opcode;
use connectx::ifc::wqe::{cqe_opcode, send};

use crate::guest::{Guest, Pair, guests, input, pointer, remote, status};

const SCHEDULING_ELEMENT: u64 = 0x26;
const RESERVED_QPN: u64 = 0x2c;
const OK: u8 = 0;
const BAD_PARAM: u8 = 3;
const BAD_RESOURCE: u8 = 5;
const BUSY: u8 = 9;

fn general(op: u16, kind: u64, id: u32, len: usize) -> Vec<u8> {
    let mut bytes = input(op, len);
    general_obj_in_cmd_hdr::obj_type.set(&mut bytes, kind);
    general_obj_in_cmd_hdr::obj_id.set(&mut bytes, u64::from(id));
    bytes
}

/// A scheduling element of the NIC's hierarchy: status and number.
fn element(guest: &mut Guest, kind: u64, parent: u32, mbps: u32) -> (u8, u32) {
    let mut create = general(
        opcode::CREATE_GENERAL_OBJECT,
        SCHEDULING_ELEMENT,
        0,
        create_sched_elem_in::SIZE,
    );
    let given = create_sched_elem_in::sched_elem.bytes_mut(&mut create);
    sched_elem::scheduling_hierarchy.set(given, 3);
    sched_elem::modify_field_select.set(given, if mbps > 0 { 2 } else { 0 });
    let context = sched_elem::sched_context.bytes_mut(given);
    sched_context::element_type.set(context, kind);
    sched_context::parent_element_id.set(context, u64::from(parent));
    sched_context::max_average_bw.set(context, u64::from(mbps));
    let out = guest.command(create, 16);
    (status(&out), general_obj_out_cmd_hdr::obj_id.get32(&out))
}

fn destroy(guest: &mut Guest, kind: u64, id: u32) -> u8 {
    let bytes = general(opcode::DESTROY_GENERAL_OBJECT, kind, id, 16);
    status(&guest.command(bytes, 16))
}

/// Puts a queue pair in RTS into a queue group.
fn join(guest: &mut Guest, qpn: u32, group: u32) -> u8 {
    let len = modify_qp_in::qpc_data_ext.offset() + qpc_ext::SIZE;
    let mut bytes = input(opcode::RTS2RTS_QP, len);
    header::object.set(&mut bytes, u64::from(qpn));
    modify_qp_in::qpc_ext.set(&mut bytes, 1);
    modify_qp_in::opt_param_mask_95_32.set(&mut bytes, 2);
    let extension = modify_qp_in::qpc_data_ext.bytes_mut(&mut bytes);
    qpc_ext::qos_queue_group_id_requester.set(extension, u64::from(group));
    status(&guest.command(bytes, 16))
}

/// Writes so many bytes and gives how long it took, in microseconds.
fn write(pair: &mut Pair, messages: u32, len: u32) -> u128 {
    let (at, key) = (pair.sides[1].at, pair.sides[1].key);
    let a = &mut pair.sides[0];
    let started = Instant::now();
    for _ in 0..messages {
        let segments = [remote(at, key), pointer(len, a.key, a.at)];
        a.qp.post(&pair.guests[0], send::RDMA_WRITE, 0, &segments);
        assert_eq!(a.send.wait(&pair.guests[0]).opcode, cqe_opcode::REQ);
    }
    started.elapsed().as_micros()
}

#[test]
fn a_queue_pair_is_held_to_its_groups_bandwidth() {
    let mut pair = Pair::new();
    let guest = &mut pair.guests[0];
    let (_, root) = element(guest, 0, 0, 0);
    // 8 Mbit/s: a byte a microsecond.
    let (_, node) = element(guest, 0, root, 8);
    let (made, leaf) = element(guest, 4, node, 0);
    assert_eq!(made, OK);
    assert_eq!(
        join(guest, pair.sides[0].qp.qpn, node),
        BAD_PARAM,
        "no queue group"
    );
    assert_eq!(join(guest, pair.sides[0].qp.qpn, leaf), OK);
    // The last message may go before its time is over.
    assert!(write(&mut pair, 5, 5000) >= 20_000);
    let guest = &mut pair.guests[0];
    assert_eq!(
        destroy(guest, SCHEDULING_ELEMENT, leaf),
        BUSY,
        "has a queue pair"
    );
    assert_eq!(join(guest, pair.sides[0].qp.qpn, 0), OK);
    assert_eq!(destroy(guest, SCHEDULING_ELEMENT, node), BUSY, "has a leaf");
    for id in [leaf, node, root] {
        assert_eq!(destroy(guest, SCHEDULING_ELEMENT, id), OK);
    }
    assert_eq!(
        destroy(guest, SCHEDULING_ELEMENT, root),
        BAD_RESOURCE,
        "gone"
    );
}

#[test]
fn a_tree_has_leaves_only_at_its_ends_and_a_bounded_depth() {
    let guest = &mut guests(1)[0];
    assert_eq!(
        element(guest, 4, 0, 0).0,
        BAD_RESOURCE,
        "a leaf without a tree"
    );
    assert_eq!(element(guest, 1, 0, 0).0, BAD_PARAM, "a vport");
    let (_, root) = element(guest, 0, 0, 0);
    let (_, leaf) = element(guest, 4, root, 0);
    assert_eq!(element(guest, 0, leaf, 0).0, BAD_PARAM, "below a leaf");
    let mut last = root;
    let deep = (0..20).find(|_| {
        let (made, id) = element(guest, 0, last, 0);
        last = id;
        made != OK
    });
    assert_eq!(deep, Some(15));
}

fn set_rate(guest: &mut Guest, index: u16, kbps: u32) -> u8 {
    let mut bytes = input(opcode::SET_PP_RATE_LIMIT, set_pp_rate_limit_in::SIZE);
    set_pp_rate_limit_in::rate_limit_index.set(&mut bytes, u64::from(index));
    let context = set_pp_rate_limit_in::ctx.bytes_mut(&mut bytes);
    set_pp_rate_limit_context::rate_limit.set(context, u64::from(kbps));
    status(&guest.command(bytes, 16))
}

#[test]
fn a_queue_pair_is_held_to_its_rate() {
    let mut pair = Pair::new();
    let guest = &mut pair.guests[0];
    assert_eq!(set_rate(guest, 0, 8000), BAD_PARAM, "stands for no limit");
    assert_eq!(set_rate(guest, 128, 8000), BAD_PARAM, "beyond the table");
    assert_eq!(set_rate(guest, 1, u32::MAX), BAD_PARAM, "too fast");
    assert_eq!(set_rate(guest, 5, 8000), OK);
    let choose = |guest: &mut Guest, index: u64| {
        let mut bytes = input(opcode::RTS2RTS_QP, 0x110);
        header::object.set(&mut bytes, u64::from(pair.sides[0].qp.qpn));
        modify_qp_in::opt_param_mask.set(&mut bytes, 1 << 22);
        let context = modify_qp_in::qpc.bytes_mut(&mut bytes);
        qpc::packet_pacing_rate_limit_index.set(context, index);
        status(&guest.command(bytes, 16))
    };
    assert_eq!(choose(guest, 6), BAD_RESOURCE, "no such rate");
    assert_eq!(choose(guest, 5), OK);
    assert!(write(&mut pair, 5, 5000) >= 20_000);
    assert_eq!(set_rate(&mut pair.guests[0], 5, 0), OK);
}

#[test]
fn reserved_numbers_are_nobody_elses() {
    let guest = &mut guests(1)[0];
    let reserve = |guest: &mut Guest, log: u64| {
        let mut create = general(opcode::CREATE_GENERAL_OBJECT, RESERVED_QPN, 0, 32);
        general_obj_in_cmd_hdr::log_obj_range.set(&mut create, log);
        let out = guest.command(create, 16);
        (status(&out), general_obj_out_cmd_hdr::obj_id.get32(&out))
    };
    assert_eq!(
        reserve(guest, 3).0,
        BAD_PARAM,
        "not as many as the capability says"
    );
    let (first, second) = (reserve(guest, 5).1, reserve(guest, 5).1);
    assert_eq!((first % 32, first.abs_diff(second)), (0, 32));
    assert_eq!(
        destroy(guest, RESERVED_QPN, first + 1),
        BAD_RESOURCE,
        "inside a block"
    );
    assert_eq!(destroy(guest, RESERVED_QPN, first), OK);
    assert_eq!(destroy(guest, RESERVED_QPN, first), BAD_RESOURCE, "gone");
    assert_eq!(destroy(guest, RESERVED_QPN, second), OK);
}
