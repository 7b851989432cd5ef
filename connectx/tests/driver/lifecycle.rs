// SPDX-License-Identifier: MIT OR Apache-2.0
//! Start, shutdown, reset, ownership.

use connectx::hca::{Hca, HcaConfig};
use connectx::ifc::command::{self, header};
use connectx::ifc::opcode;
use connectx::ifc::wqe::send;
use connectx::log::Referee;
use connectx::objects::table::Reuse;
use connectx::platform::{Function, ResetKind};
use connectx::wire::Fabric;

use crate::guest::{Guest, Settings, Side, guests, input, status};

#[test]
pub fn commands_wait_for_their_phase() {
    let referee = Referee::in_memory();
    let fabric = Fabric::new(referee.clone());
    let mut guest = Guest::cold(Hca::new(&fabric, HcaConfig::numbered(0)), referee);
    guest.start_up();
    assert_eq!(guest.on_object(opcode::TEARDOWN_HCA, 0), 0);
    assert_eq!(
        guest.on_object(opcode::ALLOC_PD, 0),
        0x04,
        "bad system state"
    );
    assert_eq!(guest.on_object(0x0fff, 0), 0x02, "bad opcode");
    assert_eq!(
        guest.on_object(opcode::CREATE_XRQ, 0),
        0x02,
        "not supported"
    );
    let last = guest.referee.recent(1).pop().unwrap().refusal;
    assert!(last.object.contains("CREATE_XRQ"), "{last}");
}

#[test]
pub fn freed_uar_pages_come_back_in_the_order_that_was_chosen() {
    let reused = |guest: &mut Guest| -> Vec<bool> {
        let pages = [(); 3].map(|()| guest.alloc(opcode::ALLOC_UAR));
        for page in pages {
            assert_eq!(guest.on_object(opcode::DEALLOC_UAR, page), 0);
        }
        let again = [(); 3].map(|()| guest.alloc(opcode::ALLOC_UAR));
        for page in again {
            assert_eq!(guest.on_object(opcode::DEALLOC_UAR, page), 0);
        }
        let mut newest = pages;
        newest.reverse();
        vec![again == newest, again == pages]
    };
    for (order, other) in [
        (Reuse::NewestFirst, "oldest-first"),
        (Reuse::OldestFirst, "newest-first"),
    ] {
        let (referee, expected) = (Referee::in_memory(), order == Reuse::NewestFirst);
        let fabric = Fabric::new(referee.clone());
        let config = HcaConfig {
            uar_reuse: order,
            ..HcaConfig::numbered(0)
        };
        let mut guest = Guest::cold(Hca::new(&fabric, config), referee);
        guest.bring_up();
        assert_eq!(reused(&mut guest), [expected, !expected], "{order:?}");
        // While it runs, by the control socket.
        guest.hca.steer("fault", &["uars", other]).unwrap();
        assert_eq!(reused(&mut guest), [!expected, expected], "{other}");
    }
}

#[test]
pub fn capabilities_that_were_taken_away_stay_away_through_a_reset() {
    let referee = Referee::in_memory();
    let fabric = Fabric::new(referee.clone());
    let mut config = HcaConfig::numbered(0);
    config.capabilities.set("bf=0").unwrap();
    let mut guest = Guest::cold(Hca::new(&fabric, config), referee);
    for _ in 0..2 {
        guest.start_up();
        let mut query = input(opcode::QUERY_HCA_CAP, 16);
        header::op_mod.set(&mut query, 1);
        let out = guest.ok(query, command::query_hca_cap_out::SIZE);
        let caps = command::query_hca_cap_out::capability.bytes(&out);
        assert!(!connectx::ifc::cap::cmd_hca_cap::bf.is_set(caps));
        guest.hca.reset(ResetKind::FunctionLevel);
    }
}

#[test]
pub fn pages_come_back_on_shutdown() {
    let mut guest = guests(1).pop().unwrap();
    assert_eq!(guest.count("pages"), 3);
    guest.ok(input(opcode::TEARDOWN_HCA, 16), 16);
    let mut take = input(opcode::MANAGE_PAGES, 16);
    header::op_mod.set(&mut take, 2);
    command::manage_pages_in::input_num_entries.set(&mut take, 2);
    let out = guest.ok(take.clone(), 16 + 2 * 8);
    assert_eq!(command::manage_pages_out::output_num_entries.get(&out), 2);
    let out = guest.ok(take, 16 + 2 * 8);
    assert_eq!(command::manage_pages_out::output_num_entries.get(&out), 1);
    guest.ok(input(opcode::DISABLE_HCA, 16), 12);
    for kind in ["uar", "eq", "pages"] {
        assert_eq!(guest.count(kind), 0, "{kind}");
    }
}

#[test]
pub fn references_keep_objects() {
    let mut guest = guests(1).pop().unwrap();
    let side = Side::new(&mut guest);
    const BUSY: u8 = 0x09;
    let uar = guest.uar;
    assert_eq!(guest.on_object(opcode::DEALLOC_PD, side.pd), BUSY);
    assert_eq!(guest.on_object(opcode::DESTROY_CQ, side.send.cqn), BUSY);
    assert_eq!(
        guest.on_object(opcode::DEALLOC_UAR, uar),
        BUSY,
        "event queues are rung through it"
    );
    assert_eq!(guest.on_object(opcode::DESTROY_QP, side.qp.qpn), 0);
    assert_eq!(guest.on_object(opcode::DESTROY_QP, side.qp.qpn), 0x05);
    assert_eq!(guest.on_object(opcode::DESTROY_CQ, side.send.cqn), 0);
    assert_eq!(guest.on_object(opcode::DESTROY_CQ, side.receive.cqn), 0);
    assert_eq!(
        guest.on_object(opcode::DEALLOC_PD, side.pd),
        BUSY,
        "its key"
    );
    assert_eq!(guest.on_object(opcode::DESTROY_MKEY, side.key >> 8), 0);
    assert_eq!(guest.on_object(opcode::DEALLOC_PD, side.pd), 0);
}

/// As a process leaves that closes its context before its queues.
#[test]
fn a_users_page_goes_before_its_queues() {
    let mut guest = guests(1).pop().unwrap();
    let out = guest.ok(input(opcode::CREATE_UCTX, 64), 16);
    let uid = command::create_uctx_out::uid.get(&out) as u16;
    let driver = guest.uar;
    guest.uid = uid;
    guest.uar = guest.alloc(opcode::ALLOC_UAR);
    let (page, mut side) = (guest.uar, Side::new(&mut guest));
    side.qp.connect(&mut guest, Settings::to(1, side.qp.qpn));
    assert_eq!(guest.on_object(opcode::DEALLOC_UAR, page), 0);
    // The page is somebody else's now, who cannot ring what was rung through it.
    guest.uid = 0;
    assert_eq!(guest.alloc(opcode::ALLOC_UAR), page);
    side.qp.post(&guest, send::NOP, 0, &[]);
    assert_eq!(guest.count("foreign_doorbells"), 1);
    assert_eq!(side.send.poll(&guest), None);
    assert_eq!(guest.on_object(opcode::DEALLOC_UAR, page), 0);
    guest.uid = uid;
    for (op, number) in [
        (opcode::DESTROY_QP, side.qp.qpn),
        (opcode::DESTROY_CQ, side.send.cqn),
        (opcode::DESTROY_CQ, side.receive.cqn),
        (opcode::DESTROY_MKEY, side.key >> 8),
        (opcode::DEALLOC_PD, side.pd),
    ] {
        assert_eq!(guest.on_object(op, number), 0);
    }
    (guest.uid, guest.uar) = (0, driver);
    let mut destroy = input(opcode::DESTROY_UCTX, 16);
    command::destroy_uctx_in::uid.set(&mut destroy, u64::from(uid));
    assert_eq!(status(&guest.command(destroy, 16)), 0);
}

#[test]
pub fn users_are_kept_apart() {
    let mut guest = guests(1).pop().unwrap();
    let mut user = || {
        let out = guest.ok(input(opcode::CREATE_UCTX, 64), 16);
        command::create_uctx_out::uid.get(&out) as u16
    };
    let (alice, bob) = (user(), user());
    assert_ne!(alice, bob);
    guest.uid = alice;
    let pd = guest.alloc(opcode::ALLOC_PD);
    let uar = guest.alloc(opcode::ALLOC_UAR);
    guest.uid = bob;
    assert_eq!(guest.on_object(opcode::DEALLOC_PD, pd), 0x05);
    assert_eq!(guest.on_object(opcode::DEALLOC_UAR, uar), 0x05);
    assert_eq!(
        guest.on_object(opcode::INIT_HCA, 0),
        0x02,
        "the driver's command"
    );
    guest.uid = 0x3ff;
    assert_eq!(guest.on_object(opcode::ALLOC_PD, 0), 0x05, "no such user");
    guest.uid = 0;
    let mut destroy = input(opcode::DESTROY_UCTX, 16);
    command::destroy_uctx_in::uid.set(&mut destroy, u64::from(alice));
    assert_eq!(
        status(&guest.command(destroy.clone(), 16)),
        0x09,
        "owns something"
    );
    guest.uid = alice;
    assert_eq!(guest.on_object(opcode::DEALLOC_PD, pd), 0);
    assert_eq!(guest.on_object(opcode::DEALLOC_UAR, uar), 0);
    // A freed page is given out again at once, also to somebody else.
    guest.uid = bob;
    assert_eq!(guest.alloc(opcode::ALLOC_UAR), uar);
    guest.uid = 0;
    assert_eq!(status(&guest.command(destroy, 16)), 0);
}

#[test]
pub fn a_reset_leaves_nothing() {
    for kind in [ResetKind::Bus, ResetKind::FunctionLevel] {
        let mut guest = guests(1).pop().unwrap();
        Side::new(&mut guest);
        guest.hca.reset(kind);
        for name in ["uar", "pd", "cq", "qp", "mkey", "eq", "pages"] {
            assert_eq!(guest.count(name), 0, "{name}");
        }
        guest.bring_up();
        Side::new(&mut guest);
    }
}

#[test]
pub fn the_driver_may_come_back_without_a_reset() {
    let mut guest = guests(1).pop().unwrap();
    Side::new(&mut guest);
    guest.bring_up();
    assert_eq!(guest.count("qp"), 0);
    assert_eq!(guest.count("eq"), 2);
    assert_eq!(guest.count("pages"), 3);
}

#[test]
pub fn capabilities_that_the_device_does_not_have_are_zeros_in_groups_that_firmware_knows() {
    let mut guest = guests(1).remove(0);
    let query = |guest: &mut Guest, group: u64| {
        let mut bytes = input(opcode::QUERY_HCA_CAP, 16);
        header::op_mod.set(&mut bytes, group << 1);
        guest.command(bytes, 0x1010)
    };
    // Flow tables, and a group that the interface does not have.
    let out = query(&mut guest, 7);
    assert_eq!(status(&out), 0);
    assert!(out.iter().all(|byte| *byte == 0));
    assert_ne!(status(&query(&mut guest, 0x7f)), 0);
}

#[test]
fn a_port_announces_the_agents_that_its_driver_says_it_has() {
    use command::{modify_hca_vport_context_in as modify, query_hca_vport_context_out as query};
    use connectx::ifc::context::hca_vport_context as port;
    const CM: u64 = 1 << 16;
    let caps = |guest: &mut Guest| {
        let out = guest.ok(input(opcode::QUERY_HCA_VPORT_CONTEXT, 16), query::SIZE);
        let context = query::hca_vport_context.bytes(&out);
        assert!(port::cap_mask1_field_select.get(context) & CM != 0);
        port::cap_mask1.get(context)
    };
    let mut guest = guests(1).remove(0);
    let before = caps(&mut guest);
    for (select, value, wanted, result) in [
        (CM, 0, before & !CM, 0),
        (1 << 19, !0, before & !CM | (1 << 19), 0),
        // Automatic migration is not the driver's to say.
        (1 << 3, 0, before & !CM | (1 << 19), 0x03),
        (CM, CM, before | CM | (1 << 19), 0),
    ] {
        let mut bytes = input(opcode::MODIFY_HCA_VPORT_CONTEXT, modify::SIZE);
        let context = modify::hca_vport_context.bytes_mut(&mut bytes);
        port::cap_mask1_field_select.set(context, select);
        port::cap_mask1.set(context, value & 0xffff_ffff);
        let out = guest.command(bytes, 8);
        assert_eq!(status(&out), result, "{select:#x}");
        assert_eq!(caps(&mut guest), wanted);
    }
}
