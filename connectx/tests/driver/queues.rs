// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queues in UMEMs, and what of them does not fit.

use connectx::ifc::command::{self, reply};
use connectx::ifc::context::{cqc, umem};
use connectx::ifc::opcode;

use connectx::ifc::wqe::{cqe_opcode, send};

use crate::guest::{Guest, Pair, guests, input, pointer, remote, status};

fn register(guest: &mut Guest, pages: u64, offset: u64) -> u32 {
    let at = guest.ram.alloc(pages * 4096);
    let mut create = input(opcode::CREATE_UMEM, 0x30);
    let context = command::create_umem_in::umem.bytes_mut(&mut create);
    umem::num_of_mtt.set(context, pages);
    umem::page_offset.set(context, offset);
    // The low bits say that the pages may be read and written.
    create.extend((0..pages).flat_map(|p| (at + p * 4096 + 3).to_be_bytes()));
    reply::object.get32(&guest.ok(create, 16))
}

fn create_cq(guest: &mut Guest, id: u32, offset: u64, dbr: u64, log: u64) -> (u8, u32) {
    let mut create = input(opcode::CREATE_CQ, 0x110);
    command::create_cq_in::cq_umem_valid.set(&mut create, 1);
    command::create_cq_in::cq_umem_id.set(&mut create, u64::from(id));
    command::create_cq_in::cq_umem_offset.set(&mut create, offset);
    let eqn = u64::from(guest.completions.eqn);
    let uar = u64::from(guest.uar);
    let context = command::create_cq_in::cqc.bytes_mut(&mut create);
    cqc::dbr_umem_valid.set(context, 1);
    cqc::dbr_umem_id.set(context, u64::from(id));
    cqc::dbr_addr.set(context, dbr);
    cqc::log_cq_size.set(context, log);
    cqc::c_eqn.set(context, eqn);
    cqc::uar_page.set(context, uar);
    let out = guest.command(create, 16);
    (status(&out), reply::object.get32(&out))
}

#[test]
pub fn a_queue_fits_its_umem_or_is_refused() {
    let mut guest = guests(1).pop().unwrap();
    let id = register(&mut guest, 2, 64);
    const BAD_PARAM: u8 = 0x03;
    let usable = 2 * 4096 - 64;
    assert_eq!(create_cq(&mut guest, id, 0, usable - 8, 6).0, 0);
    assert_eq!(create_cq(&mut guest, id, usable - 4096, 0, 6).0, 0);
    assert_eq!(create_cq(&mut guest, id, usable - 4095, 0, 6).0, BAD_PARAM);
    assert_eq!(create_cq(&mut guest, id, 0, 0, 7).0, BAD_PARAM);
    assert_eq!(create_cq(&mut guest, id, u64::MAX, 0, 6).0, BAD_PARAM);
    assert_eq!(create_cq(&mut guest, id, 0, usable, 6).0, BAD_PARAM);
    assert_eq!(
        create_cq(&mut guest, id, 0, 4, 6).0,
        BAD_PARAM,
        "unaligned record"
    );
    assert_eq!(
        create_cq(&mut guest, id + 1, 0, 0, 6).0,
        0x05,
        "no such UMEM"
    );
}

#[test]
pub fn a_umem_stays_while_queues_lie_in_it() {
    let mut guest = guests(1).pop().unwrap();
    let id = register(&mut guest, 2, 0);
    let (status, cqn) = create_cq(&mut guest, id, 0, 4096, 6);
    assert_eq!(status, 0);
    assert_eq!(guest.on_object(opcode::DESTROY_UMEM, id), 0x09);
    assert_eq!(guest.on_object(opcode::DESTROY_CQ, cqn), 0);
    assert_eq!(guest.on_object(opcode::DESTROY_UMEM, id), 0);
    assert_eq!(guest.count("umem"), 0);
}

#[test]
pub fn a_umem_of_another_user_is_refused() {
    let mut guest = guests(1).pop().unwrap();
    let mut user = || {
        let out = guest.ok(input(opcode::CREATE_UCTX, 64), 16);
        command::create_uctx_out::uid.get(&out) as u16
    };
    let (alice, bob) = (user(), user());
    guest.uid = alice;
    let id = register(&mut guest, 2, 0);
    guest.uid = bob;
    guest.uar = guest.alloc(opcode::ALLOC_UAR);
    assert_eq!(create_cq(&mut guest, id, 0, 4096, 6).0, 0x05);
    let own = register(&mut guest, 2, 0);
    assert_eq!(create_cq(&mut guest, own, 0, 4096, 6).0, 0);
}

#[test]
pub fn a_queue_moves_to_larger_memory_without_losing_anything() {
    let Pair {
        mut guests,
        mut sides,
    } = Pair::new();
    let [a, b] = &mut sides;
    let write = [remote(b.at, b.key), pointer(4, a.key, a.at)];
    for _ in 0..3 {
        a.qp.post(&guests[0], send::RDMA_WRITE, 0, &write);
    }
    assert_eq!(
        a.send.resize(&mut guests[0], 1),
        0x40,
        "three are outstanding"
    );
    assert_eq!(a.send.resize(&mut guests[0], 8), 0);
    for counter in 0..3 {
        assert_eq!(a.send.wait(&guests[0]).counter, counter);
    }
    assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::RESIZE_CQ);
    a.send.switch();
    for counter in 3..300u16 {
        a.qp.post(&guests[0], send::RDMA_WRITE, 0, &write);
        assert_eq!(a.send.wait(&guests[0]).counter, counter);
    }
}
