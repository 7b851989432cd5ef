// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whose objects a command may name. One case for each command that users may send and each object that it refers to: it is
//! refused to Bob when the object is Alice's, and carried out for Alice, so that it was the owner that was wrong.

use std::collections::BTreeSet;

use connectx::cmd;
use connectx::ifc::command::{self, header, reply};
use connectx::ifc::context::{
    cqc, dctc, mkc, qpc, rmpc, sched_context, sched_elem, set_pp_rate_limit_context, sqc, umem, wq,
    xrc_srqc,
};
use connectx::ifc::opcode as op;
use connectx::ifc::{Field, context};

use crate::guest::{Guest, guests, input, status};

const BAD_RESOURCE: u8 = 0x05;

/// What a user has made.
#[derive(Clone, Default)]
struct User {
    uid: u16,
    uar: u32,
    pd: u32,
    xrcd: u32,
    umem: u32,
    mkey: u32,
    psv: u32,
    cq: u32,
    qp: u32,
    sq: u32,
    srq: u32,
    rmp: u32,
    dct: u32,
    element: u32,
    /// Index of a rate of packet pacing.
    rate: u16,
}

/// Where the queues of an object lie in the user's UMEM, so that none of them needs pages of its own.
const QUEUE: u64 = 0;
const RECORD: u64 = 4096;

fn set(bytes: &mut [u8], field: Field, value: impl Into<u64>) {
    field.set(bytes, value.into());
}

fn create_umem(guest: &mut Guest) -> Vec<u8> {
    let at = guest.ram.alloc(2 * 4096);
    let mut create = input(op::CREATE_UMEM, 0x30);
    let context = command::create_umem_in::umem.bytes_mut(&mut create);
    set(context, umem::num_of_mtt, 2u64);
    create.extend((0..2).flat_map(|p| (at + p * 4096 + 3).to_be_bytes()));
    create
}

fn create_mkey(u: &User) -> Vec<u8> {
    let mut create = input(op::CREATE_MKEY, 0x110);
    set(&mut create, command::create_mkey_in::mkey_umem_valid, 1u64);
    set(&mut create, command::create_mkey_in::mkey_umem_id, u.umem);
    let c = command::create_mkey_in::mkc.bytes_mut(&mut create);
    set(c, mkc::access_mode_1_0, 1u64);
    set(c, mkc::pd, u.pd);
    set(c, mkc::len, 4096u64);
    set(c, mkc::log_page_size, 12u64);
    create
}

fn create_psv(u: &User) -> Vec<u8> {
    let mut create = input(op::CREATE_PSV, 16);
    set(&mut create, command::create_psv_in::num_psv, 1u64);
    set(&mut create, command::create_psv_in::pd, u.pd);
    create
}

fn create_cq(guest: &Guest, u: &User) -> Vec<u8> {
    let mut create = input(op::CREATE_CQ, 0x110);
    set(&mut create, command::create_cq_in::cq_umem_valid, 1u64);
    set(&mut create, command::create_cq_in::cq_umem_id, u.umem);
    set(&mut create, command::create_cq_in::cq_umem_offset, QUEUE);
    let c = command::create_cq_in::cqc.bytes_mut(&mut create);
    set(c, cqc::dbr_umem_valid, 1u64);
    set(c, cqc::dbr_umem_id, u.umem);
    set(c, cqc::dbr_addr, RECORD);
    set(c, cqc::log_cq_size, 2u64);
    set(c, cqc::c_eqn, guest.completions.eqn);
    set(c, cqc::uar_page, u.uar);
    create
}

fn create_qp(u: &User, receive: u64) -> Vec<u8> {
    let mut create = input(op::CREATE_QP, 0x110);
    set(&mut create, command::create_qp_in::wq_umem_valid, 1u64);
    set(&mut create, command::create_qp_in::wq_umem_id, u.umem);
    let c = command::create_qp_in::qpc.bytes_mut(&mut create);
    set(c, qpc::dbr_umem_valid, 1u64);
    set(c, qpc::dbr_umem_id, u.umem);
    set(c, qpc::dbr_addr, RECORD);
    set(c, qpc::pd, u.pd);
    set(c, qpc::log_sq_size, 2u64);
    set(c, qpc::uar_page, u.uar);
    set(c, qpc::cqn_snd, u.cq);
    set(c, qpc::cqn_rcv, u.cq);
    set(c, qpc::rq_type, receive);
    set(c, qpc::srqn_rmpn_xrqn, u.rmp);
    create
}

fn work_queue(queue: &mut [u8], u: &User) {
    set(queue, wq::wq_umem_valid, 1u64);
    set(queue, wq::wq_umem_id, u.umem);
    set(queue, wq::dbr_umem_valid, 1u64);
    set(queue, wq::dbr_umem_id, u.umem);
    set(queue, wq::dbr_addr, RECORD);
    set(queue, wq::pd, u.pd);
    set(queue, wq::log_wq_sz, 2u64);
    set(queue, wq::log_wq_stride, 6u64);
    set(queue, wq::wq_type, 1u64);
    set(queue, wq::uar_page, u.uar);
}

fn create_sq(u: &User) -> Vec<u8> {
    let mut create = input(op::CREATE_SQ, 0x110);
    let c = command::create_sq_in::ctx.bytes_mut(&mut create);
    set(c, sqc::cqn, u.cq);
    work_queue(sqc::wq.bytes_mut(c), u);
    create
}

fn create_rmp(u: &User) -> Vec<u8> {
    let mut create = input(op::CREATE_RMP, 0x110);
    let c = command::create_rmp_in::rmpc.bytes_mut(&mut create);
    work_queue(rmpc::wq.bytes_mut(c), u);
    create
}

fn create_srq(u: &User) -> Vec<u8> {
    use command::create_xrc_srq_in as fields;
    let mut create = input(op::CREATE_XRC_SRQ, 0x110);
    set(&mut create, fields::xrc_srq_umem_valid, 1u64);
    set(&mut create, fields::xrc_srq_umem_id, u.umem);
    let c = fields::srqc.bytes_mut(&mut create);
    set(c, xrc_srqc::dbr_umem_valid, 1u64);
    set(c, xrc_srqc::db_record_addr_l, RECORD / 4);
    set(c, xrc_srqc::log_xrc_srq_size, 2u64);
    set(c, xrc_srqc::log_rq_stride, 1u64);
    set(c, xrc_srqc::pd, u.pd);
    set(c, xrc_srqc::cqn, u.cq);
    set(c, xrc_srqc::xrcd, u.xrcd);
    create
}

fn create_dct(u: &User) -> Vec<u8> {
    let mut create = input(op::CREATE_DCT, command::create_dct_in::SIZE);
    let c = command::create_dct_in::dct_context_entry.bytes_mut(&mut create);
    set(c, dctc::pd, u.pd);
    set(c, dctc::cqn, u.cq);
    set(c, dctc::srqn_xrqn, u.rmp);
    set(c, dctc::mtu, 3u64);
    create
}

/// A command for a scheduling element: with it, or below it.
fn general(opcode: u16, id: u32, parent: u32) -> Vec<u8> {
    let mut bytes = input(opcode, command::create_sched_elem_in::SIZE);
    set(
        &mut bytes,
        command::general_obj_in_cmd_hdr::obj_type,
        0x26u64,
    );
    set(&mut bytes, command::general_obj_in_cmd_hdr::obj_id, id);
    let c = command::create_sched_elem_in::sched_elem.bytes_mut(&mut bytes);
    set(c, sched_elem::scheduling_hierarchy, 3u64);
    let c = sched_elem::sched_context.bytes_mut(c);
    set(c, sched_context::parent_element_id, parent);
    bytes
}

fn set_rate(u: &User) -> Vec<u8> {
    let mut bytes = input(op::SET_PP_RATE_LIMIT, command::set_pp_rate_limit_in::SIZE);
    set(
        &mut bytes,
        command::set_pp_rate_limit_in::rate_limit_index,
        u.rate,
    );
    let c = command::set_pp_rate_limit_in::ctx.bytes_mut(&mut bytes);
    set(c, set_pp_rate_limit_context::rate_limit, 1000u64);
    bytes
}

/// A command that names an object and needs nothing else.
fn on(opcode: u16, number: u32, len: usize) -> Vec<u8> {
    let mut bytes = input(opcode, len);
    header::object.set(&mut bytes, u64::from(number));
    bytes
}

fn make(guest: &mut Guest, command: Vec<u8>) -> u32 {
    reply::object.get32(&guest.ok(command, 16))
}

/// A user with one object of each kind.
fn user(guest: &mut Guest) -> User {
    guest.uid = 0;
    let out = guest.ok(input(op::CREATE_UCTX, 64), 16);
    let mut u = User {
        uid: command::create_uctx_out::uid.get(&out) as u16,
        ..User::default()
    };
    guest.uid = u.uid;
    u.uar = guest.alloc(op::ALLOC_UAR);
    u.pd = guest.alloc(op::ALLOC_PD);
    u.xrcd = guest.alloc(op::ALLOC_XRCD);
    let command = create_umem(guest);
    u.umem = make(guest, command);
    u.mkey = make(guest, create_mkey(&u));
    u.psv = command::create_psv_out::psv0_index.get32(&guest.ok(create_psv(&u), 32));
    let command = create_cq(guest, &u);
    u.cq = make(guest, command);
    u.rmp = make(guest, create_rmp(&u));
    u.srq = make(guest, create_srq(&u));
    u.qp = make(guest, create_qp(&u, 0));
    u.sq = make(guest, create_sq(&u));
    u.dct = make(guest, create_dct(&u));
    let out = guest.ok(general(op::CREATE_GENERAL_OBJECT, 0, 0), 16);
    u.element = command::general_obj_out_cmd_hdr::obj_id.get32(&out);
    u.rate = u.uid;
    guest.ok(set_rate(&u), 16);
    u
}

/// Every command with every object of Alice's that it can name; `bob` has the rest.
fn cases(guest: &mut Guest, alice: &User, bob: &User) -> Vec<(&'static str, Vec<u8>)> {
    let mut cases: Vec<(&'static str, Vec<u8>)> = Vec::new();
    // A creation by Bob, of his own objects but for one.
    let mixed = |f: fn(&mut User, &User)| {
        let mut u = bob.clone();
        f(&mut u, alice);
        u
    };
    let (pd, uar) = (mixed(|u, a| u.pd = a.pd), mixed(|u, a| u.uar = a.uar));
    let (cq, umem) = (mixed(|u, a| u.cq = a.cq), mixed(|u, a| u.umem = a.umem));
    let (xrcd, rmp) = (mixed(|u, a| u.xrcd = a.xrcd), mixed(|u, a| u.rmp = a.rmp));
    cases.extend([
        ("mkey pd", create_mkey(&pd)),
        ("mkey umem", create_mkey(&umem)),
        ("psv pd", create_psv(&pd)),
        ("cq uar", create_cq(guest, &uar)),
        ("qp pd", create_qp(&pd, 0)),
        ("qp uar", create_qp(&uar, 0)),
        ("qp rmp", create_qp(&rmp, 1)),
        ("sq pd", create_sq(&pd)),
        ("sq uar", create_sq(&uar)),
        ("sq cq", create_sq(&cq)),
        ("rmp pd", create_rmp(&pd)),
        ("srq pd", create_srq(&pd)),
        ("srq cq", create_srq(&cq)),
        ("srq xrcd", create_srq(&xrcd)),
        ("srq umem", create_srq(&umem)),
        ("dct pd", create_dct(&pd)),
        ("dct cq", create_dct(&cq)),
        ("dct rmp", create_dct(&rmp)),
        (
            "element",
            general(op::CREATE_GENERAL_OBJECT, 0, alice.element),
        ),
    ]);
    // Fields of which one command has two of a kind.
    let both = |mut bytes: Vec<u8>, at: Field, number: u32| {
        at.set(&mut bytes, u64::from(number));
        bytes
    };
    let inner = |outer: Field, inner: Field| {
        let byte = (outer.offset() + inner.offset()) as u16;
        Field::new(byte, inner.bit(), inner.width())
    };
    let in_qp = |f| inner(command::create_qp_in::qpc, f);
    let in_cq = |f| inner(command::create_cq_in::cqc, f);
    let in_sq = |f| inner(inner(command::create_sq_in::ctx, context::sqc::wq), f);
    let in_rmp = |f| inner(inner(command::create_rmp_in::rmpc, context::rmpc::wq), f);
    let a = alice;
    cases.extend([
        (
            "qp cqn_snd",
            both(create_qp(bob, 0), in_qp(qpc::cqn_snd), a.cq),
        ),
        (
            "qp cqn_rcv",
            both(create_qp(bob, 0), in_qp(qpc::cqn_rcv), a.cq),
        ),
        (
            "qp umem",
            both(create_qp(bob, 0), command::create_qp_in::wq_umem_id, a.umem),
        ),
        (
            "qp dbr",
            both(create_qp(bob, 0), in_qp(qpc::dbr_umem_id), a.umem),
        ),
        (
            "cq umem",
            both(
                create_cq(guest, bob),
                command::create_cq_in::cq_umem_id,
                a.umem,
            ),
        ),
        (
            "cq dbr",
            both(create_cq(guest, bob), in_cq(cqc::dbr_umem_id), a.umem),
        ),
        (
            "sq umem",
            both(create_sq(bob), in_sq(wq::wq_umem_id), a.umem),
        ),
        (
            "sq dbr",
            both(create_sq(bob), in_sq(wq::dbr_umem_id), a.umem),
        ),
        (
            "rmp umem",
            both(create_rmp(bob), in_rmp(wq::wq_umem_id), a.umem),
        ),
        (
            "rmp dbr",
            both(create_rmp(bob), in_rmp(wq::dbr_umem_id), a.umem),
        ),
    ]);
    let mut init = on(op::RST2INIT_QP, a.qp, 0x110);
    set(&mut init, header::op_mod, 0u64);
    let mut ready = on(op::INIT2RTR_QP, a.qp, 0x110);
    let c = command::modify_qp_in::qpc.bytes_mut(&mut ready);
    set(c, qpc::mtu, 3u64);
    set(c, qpc::log_msg_max, 30u64);
    // In an order in which each succeeds for Alice.
    cases.extend([
        ("query", on(op::QUERY_MKEY, a.mkey, 16)),
        ("query", on(op::QUERY_CQ, a.cq, 16)),
        ("query", on(op::QUERY_QP, a.qp, 16)),
        ("query", on(op::QUERY_SQ, a.sq, 16)),
        ("query", on(op::QUERY_XRC_SRQ, a.srq, 16)),
        ("query", on(op::QUERY_RMP, a.rmp, 16)),
        ("query", on(op::QUERY_DCT, a.dct, 16)),
        ("query", general(op::QUERY_GENERAL_OBJECT, a.element, 0)),
        ("modify", general(op::MODIFY_GENERAL_OBJECT, a.element, 0)),
        ("modify", set_rate(a)),
        ("modify", on(op::MODIFY_CQ, a.cq, 0x110)),
        ("modify", on(op::MODIFY_RMP, a.rmp, 0x110)),
        ("modify", on(op::MODIFY_SQ, a.sq, 0x110)),
        ("arm", on(op::ARM_XRC_SRQ, a.srq, 16)),
        ("arm", on(op::ARM_DCT_FOR_KEY_VIOLATION, a.dct, 16)),
        ("modify", init),
        ("modify", on(op::INIT2INIT_QP, a.qp, 0x110)),
        ("modify", ready),
        ("modify", on(op::RTR2RTS_QP, a.qp, 0x110)),
        ("modify", on(op::RTS2RTS_QP, a.qp, 0x110)),
        ("modify", on(op::SQERR2RTS_QP, a.qp, 0x110)),
        ("modify", on(op::SQD_RTS_QP, a.qp, 0x110)),
        ("modify", on(op::TO_ERR_QP, a.qp, 16)),
        ("modify", on(op::TO_RST_QP, a.qp, 16)),
        ("attach", on(op::ATTACH_TO_MCG, a.qp, 32)),
        ("detach", on(op::DETACH_FROM_MCG, a.qp, 32)),
        ("destroy", on(op::DRAIN_DCT, a.dct, 16)),
        ("destroy", on(op::DESTROY_DCT, a.dct, 16)),
        ("destroy", general(op::DESTROY_GENERAL_OBJECT, a.element, 0)),
        ("destroy", on(op::DESTROY_SQ, a.sq, 16)),
        ("destroy", on(op::DESTROY_QP, a.qp, 16)),
        ("destroy", on(op::DESTROY_XRC_SRQ, a.srq, 16)),
        ("destroy", on(op::DESTROY_RMP, a.rmp, 16)),
        ("destroy", on(op::DESTROY_CQ, a.cq, 16)),
        ("destroy", on(op::DESTROY_MKEY, a.mkey, 16)),
        ("destroy", on(op::DESTROY_PSV, a.psv, 16)),
        ("destroy", on(op::DESTROY_UMEM, a.umem, 16)),
        ("dealloc", on(op::DEALLOC_XRCD, a.xrcd, 16)),
        ("dealloc", on(op::DEALLOC_PD, a.pd, 16)),
        ("dealloc", on(op::DEALLOC_UAR, a.uar, 16)),
    ]);
    cases
}

#[test]
pub fn no_command_takes_another_user_s_object() {
    let mut guest = guests(1).pop().unwrap();
    let (alice, bob) = (user(&mut guest), user(&mut guest));
    let cases = cases(&mut guest, &alice, &bob);
    let before = guest.hca.with_device(|device| device.counts());
    for (what, command) in &cases {
        guest.uid = bob.uid;
        let opcode = header::opcode.get(command) as u16;
        let out = guest.command(command.clone(), 0x210);
        let what = format!("{:?}, {what}", op::name(opcode));
        assert_eq!(status(&out), BAD_RESOURCE, "{what}");
        let last = guest.referee.recent(1).pop().unwrap().refusal;
        assert!(
            last.rule
                .starts_with("an object is used by its owner's uid only"),
            "{what}: {last:?}"
        );
    }
    // Nothing has come of it.
    let after = guest.hca.with_device(|device| device.counts());
    let kinds = [
        "uctx", "uar", "pd", "mkey", "psv", "umem", "cq", "qp", "srq", "xrcd",
    ];
    let objects = |counts: &[(&'static str, u64)]| -> Vec<_> {
        counts
            .iter()
            .filter(|(kind, _)| kinds.contains(kind))
            .copied()
            .collect()
    };
    assert_eq!(objects(&before), objects(&after));
    // The owner may: what was refused was nothing but the owner.
    for (what, command) in &cases {
        let opcode = header::opcode.get(command) as u16;
        let never = [op::SQERR2RTS_QP, op::SQD_RTS_QP];
        if !matches!(
            *what,
            "query" | "modify" | "arm" | "attach" | "detach" | "destroy" | "dealloc"
        ) || never.contains(&opcode)
        {
            continue;
        }
        guest.uid = alice.uid;
        let out = guest.command(command.clone(), 0x210);
        let why = guest.referee.recent(1);
        assert_eq!(status(&out), 0, "{:?}, {what}: {why:?}", op::name(opcode));
    }
    // Every command that users may send has a case, or names no object.
    let nameless = [
        op::QUERY_HCA_CAP,
        op::QUERY_HCA_VPORT_CONTEXT,
        op::ALLOC_UAR,
        op::ALLOC_PD,
        op::ALLOC_XRCD,
        op::CREATE_UMEM,
        // Event queues are the driver's alone.
        op::CREATE_EQ,
        op::DESTROY_EQ,
    ];
    let covered: BTreeSet<u16> = cases
        .iter()
        .map(|(_, command)| header::opcode.get(command) as u16)
        .chain(nameless)
        .collect();
    for opcode in cmd::of_users() {
        assert!(
            covered.contains(&opcode),
            "no case for {:?}",
            op::name(opcode)
        );
    }
}

#[test]
pub fn creations_are_carried_out_for_who_owns_everything() {
    let mut guest = guests(1).pop().unwrap();
    let u = user(&mut guest);
    let cq = create_cq(&guest, &u);
    for command in [
        create_mkey(&u),
        cq,
        create_qp(&u, 0),
        create_qp(&u, 1),
        create_sq(&u),
        create_rmp(&u),
        create_srq(&u),
        create_dct(&u),
        general(op::CREATE_GENERAL_OBJECT, 0, u.element),
    ] {
        guest.ok(command, 16);
    }
}

#[test]
pub fn only_the_driver_sends_the_driver_s_commands() {
    let mut guest = guests(1).pop().unwrap();
    guest.uid = user(&mut guest).uid;
    for opcode in cmd::of_driver() {
        let out = guest.command(input(opcode, 0x1100), 0x1100);
        assert_eq!(status(&out), 0x02, "{:?}", op::name(opcode));
    }
    for opcode in [op::CREATE_EQ, op::DESTROY_EQ] {
        let out = guest.command(input(opcode, 0x110), 16);
        assert_eq!(status(&out), 0x03, "{:?}", op::name(opcode));
    }
}
