// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a guest can have the model hold is bounded, however small the guest's own memory is.

use connectx::ifc::command::{self, header, reply};
use connectx::ifc::context::{mkc, umem};
use connectx::ifc::opcode;
use connectx::ifc::wqe::send;

use crate::guest::{Pair, Side, guests, input, pointer, status};

const NO_RESOURCES: u8 = 0x0f;

/// The largest lists that one command can bring, of the same pages again and again.
#[test]
pub fn lists_of_all_objects_together_have_a_limit() {
    let mut guest = guests(1).pop().unwrap();
    let most = connectx::objects::device::TRANSLATIONS as u64;
    const PAGES: u64 = 1 << 17;
    let mut create = input(opcode::CREATE_UMEM, 0x30);
    let context = command::create_umem_in::umem.bytes_mut(&mut create);
    umem::num_of_mtt.set(context, PAGES);
    create.extend((0..PAGES).flat_map(|_| 0x1_0000_0003u64.to_be_bytes()));
    let mut made = vec![];
    let refused = loop {
        let out = guest.command(create.clone(), 16);
        if status(&out) != 0 {
            break status(&out);
        }
        made.push(reply::object.get32(&out));
        assert!(made.len() as u64 <= most / PAGES, "no limit");
    };
    assert_eq!(refused, NO_RESOURCES);
    assert!(guest.count("translations") <= most);
    // Keys that are free have their room at once.
    let pd = guest.alloc(opcode::ALLOC_PD);
    let mut key = input(opcode::CREATE_MKEY, 0x110);
    let context = command::create_mkey_in::mkc.bytes_mut(&mut key);
    mkc::free.set(context, 1);
    mkc::access_mode_1_0.set(context, 1);
    mkc::pd.set(context, u64::from(pd));
    mkc::translations_octword_size.set(context, 1 << 16);
    while status(&guest.command(key.clone(), 16)) == 0 {}
    assert!(guest.count("translations") <= most);
    // What is destroyed makes room again.
    assert_eq!(guest.on_object(opcode::DESTROY_UMEM, made[0]), 0);
    assert_eq!(status(&guest.command(create, 16)), 0);
}

#[test]
pub fn one_page_cannot_be_given_for_ever() {
    let mut guest = guests(1).pop().unwrap();
    let mut give = input(opcode::MANAGE_PAGES, 16);
    header::op_mod.set(&mut give, 1);
    command::manage_pages_in::input_num_entries.set(&mut give, 1 << 16);
    give.extend((0..1u64 << 16).flat_map(|_| 0x1000u64.to_be_bytes()));
    let given = (0..20).take_while(|_| status(&guest.command(give.clone(), 16)) == 0);
    assert_eq!(given.count(), 15);
    assert!(guest.count("pages") <= 1 << 20);
}

/// A deadline in hours and one in microseconds, again and again: the timers hold one of each queue pair's halves.
#[test]
pub fn deadlines_do_not_pile_up() {
    let Pair {
        mut guests,
        mut sides,
    } = Pair::with(|s| s.ack_timeout = 31);
    let [a, _] = &mut sides;
    // Nobody posts a receive WQE: the sender tries for ever.
    a.qp.post(&guests[0], send::SEND, 0, &[pointer(4, a.key, a.at)]);
    crate::guest::eventually(|| (guests[0].count("rnr_naks") > 50).then_some(()));
    assert!(guests[0].count("timers") <= 2);
    for _ in 0..20 {
        let side = Side::new(&mut guests[0]);
        side.qp
            .connect(&mut guests[0], crate::guest::Settings::to(9, 1));
        let mut side = side;
        side.qp
            .post(&guests[0], send::SEND, 0, &[pointer(4, side.key, side.at)]);
        assert_eq!(guests[0].on_object(opcode::DESTROY_QP, side.qp.qpn), 0);
    }
    assert!(guests[0].count("timers") <= 2);
    assert_eq!(guests[0].on_object(opcode::DESTROY_QP, a.qp.qpn), 0);
    assert_eq!(guests[0].count("timers"), 0);
}

#[test]
pub fn a_umem_stays_while_a_key_has_its_pages() {
    let mut guest = guests(1).pop().unwrap();
    let pd = guest.alloc(opcode::ALLOC_PD);
    let at = guest.ram.alloc(4096);
    let mut create = input(opcode::CREATE_UMEM, 0x30);
    umem::num_of_mtt.set(command::create_umem_in::umem.bytes_mut(&mut create), 1);
    create.extend((at | 3).to_be_bytes());
    let id = reply::object.get32(&guest.ok(create, 16));
    let mut key = input(opcode::CREATE_MKEY, 0x110);
    command::create_mkey_in::mkey_umem_valid.set(&mut key, 1);
    command::create_mkey_in::mkey_umem_id.set(&mut key, u64::from(id));
    let context = command::create_mkey_in::mkc.bytes_mut(&mut key);
    mkc::access_mode_1_0.set(context, 1);
    mkc::pd.set(context, u64::from(pd));
    mkc::len.set(context, 4096);
    mkc::log_page_size.set(context, 12);
    let index = reply::object.get32(&guest.ok(key, 16));
    assert_eq!(guest.on_object(opcode::DESTROY_UMEM, id), 0x09, "busy");
    assert_eq!(guest.on_object(opcode::DESTROY_MKEY, index), 0);
    assert_eq!(guest.on_object(opcode::DESTROY_UMEM, id), 0);
}
