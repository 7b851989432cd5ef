// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the plain verbs do not have: copies within local memory, send queues without a doorbell record, padded CQ entries.

use connectx::ifc::command::{self, header, modify_qp_in, reply};
use connectx::ifc::context::{cqc, qpc, qpc_ext};
use connectx::ifc::opcode;
use connectx::ifc::wqe::{MMO_DMA, cqe_opcode, send, syndrome, uar};
use connectx::platform::Function;

use crate::guest::{Guest, Pair, Qp, Settings, Side, guests, input, pointer, remote, status};

/// A side whose queue pair can copy, connected to itself.
fn copier(guest: &mut Guest) -> Side {
    let side = Side::new(guest);
    let settings = Settings::to(1, side.qp.qpn);
    side.qp.to_init(guest, settings);
    let len = modify_qp_in::qpc_data_ext.offset() + qpc_ext::SIZE;
    let mut bytes = input(opcode::INIT2INIT_QP, len);
    header::object.set(&mut bytes, u64::from(side.qp.qpn));
    modify_qp_in::qpc_ext.set(&mut bytes, 1);
    modify_qp_in::opt_param_mask_95_32.set(&mut bytes, 1 << 3);
    qpc_ext::mmo.set(modify_qp_in::qpc_data_ext.bytes_mut(&mut bytes), 1);
    assert_eq!(status(&guest.command(bytes, 16)), 0);
    side.qp.to_ready_to_receive(guest, settings);
    side.qp.to_ready_to_send(guest, settings);
    side
}

/// Copies and gives the syndrome; 0 if it has worked.
fn copy(guest: &Guest, side: &mut Side, from: [u8; 16], to: [u8; 16]) -> u8 {
    let segments = [[0; 16], from, to];
    let qp = &mut side.qp;
    qp.put_modified(guest, (send::MMO, MMO_DMA), 0x08, 0, &segments);
    qp.ring(guest, guest.uar);
    side.send.wait(guest).syndrome
}

#[test]
fn a_copy_goes_from_key_to_key() {
    let mut guest = guests(1).remove(0);
    let mut side = copier(&mut guest);
    let (at, key) = (side.at, side.key);
    let data: Vec<u8> = (0..5000u32).map(|i| (i % 251) as u8).collect();
    guest.ram.set(at, &data);
    let from = pointer(5000, key, at);
    assert_eq!(
        copy(&guest, &mut side, from, pointer(5000, key, at + 10_000)),
        0
    );
    assert_eq!(guest.ram.get(at + 10_000, 5000), data);
}

#[test]
fn a_copy_needs_its_keys_and_its_queue_pair_to_permit_it() {
    let from_to = |length: (u32, u32), same_pd: bool, rights: u64| {
        let mut guest = guests(1).remove(0);
        let mut side = copier(&mut guest);
        let other = guest.alloc(opcode::ALLOC_PD);
        let pd = if same_pd { side.pd } else { other };
        let key = guest.key(pd, side.at, 1 << 16, rights);
        let (from, to) = (
            pointer(length.0, side.key, side.at),
            pointer(length.1, key, side.at + 8192),
        );
        copy(&guest, &mut side, from, to)
    };
    let all = 0x1f;
    assert_eq!(from_to((64, 64), true, all), 0);
    assert_eq!(
        from_to((64, 64), false, all),
        syndrome::LOCAL_PROT,
        "another domain"
    );
    assert_eq!(
        from_to((64, 64), true, 0),
        syndrome::LOCAL_PROT,
        "nothing permitted"
    );
    assert_eq!(
        from_to((64, 65), true, all),
        syndrome::LOCAL_QP_OP,
        "two lengths"
    );
    assert_eq!(
        from_to((1 << 21, 1 << 21), true, all),
        syndrome::LOCAL_QP_OP,
        "too long"
    );
    let Pair { guests, mut sides } = Pair::new();
    let pointer = pointer(8, sides[0].key, sides[0].at);
    let refused = copy(&guests[0], &mut sides[0], pointer, pointer);
    assert_eq!(refused, syndrome::LOCAL_QP_OP, "not enabled");
}

/// Makes a queue pair with a `send_dbr_mode`.
fn with_mode(guest: &mut Guest, side: &Side, mode: u64) -> Result<Qp, u8> {
    // As `Qp::new` does, with one field more.
    let before = guest.record.replace(Vec::new());
    let model = Qp::new(guest, side.pd, &side.send, &side.receive);
    let commands = std::mem::replace(&mut guest.record, before).unwrap();
    let (mut create, _) = commands.into_iter().last().unwrap();
    assert_eq!(guest.on_object(opcode::DESTROY_QP, model.qpn), 0);
    qpc::send_dbr_mode.set(command::create_qp_in::qpc.bytes_mut(&mut create), mode);
    let out = guest.command(create, 16);
    match status(&out) {
        0 => Ok(Qp {
            qpn: reply::object.get32(&out),
            ..model
        }),
        refused => Err(refused),
    }
}

#[test]
fn a_queue_without_a_doorbell_record_is_told_by_its_doorbell() {
    let mut guest = guests(1).remove(0);
    let mut side = Side::new(&mut guest);
    assert_eq!(with_mode(&mut guest, &side, 2).err(), Some(3));
    let mut qp = with_mode(&mut guest, &side, 1).unwrap();
    qp.connect(&mut guest, Settings::to(1, qp.qpn));
    let segments = [
        remote(side.at + 64, side.key),
        pointer(8, side.key, side.at),
    ];
    guest.ram.set(side.at, b"no dbr..");
    for _ in 0..20 {
        let index = qp.producer;
        qp.put(&guest, send::RDMA_WRITE, 0x08, 0, &segments);
        // Whatever is in the place of the record, it is not looked at.
        guest.ram.set(qp.dbr + 4, &[0xff; 4]);
        let mut doorbell = [0u8; 8];
        doorbell[..4].copy_from_slice(&((u32::from(index) << 8) | 8).to_be_bytes());
        doorbell[4..].copy_from_slice(&((qp.qpn << 8) | 3).to_be_bytes());
        let register = u64::from(guest.uar) * uar::PAGE + uar::SQ_DBR_LESS;
        guest.hca.bar_write(0, register, &doorbell);
        let cqe = side.send.wait(&guest);
        assert_eq!((cqe.opcode, cqe.counter), (cqe_opcode::REQ, index));
    }
    assert_eq!(guest.ram.get(side.at + 64, 8), b"no dbr..");
    // The other register is not its own.
    qp.put(&guest, send::RDMA_WRITE, 0x08, 0, &segments);
    qp.ring(&guest, guest.uar);
    assert_eq!(guest.count("lost_doorbells"), 1);
    assert_eq!(side.send.poll(&guest), None);
}

#[test]
fn a_padded_entry_is_written_as_a_whole() {
    let mut guest = guests(1).remove(0);
    let side = Side::new(&mut guest);
    let (at, dbr) = (guest.ram.alloc(4096), guest.ram.alloc(8));
    guest.ram.set(at, &[0xff; 4096]);
    let mut create = input(opcode::CREATE_CQ, 0x110);
    let context = command::create_cq_in::cqc.bytes_mut(&mut create);
    for (field, value) in [
        (cqc::cqe_sz, 2),
        (cqc::log_cq_size, 4),
        (cqc::uar_page, u64::from(guest.uar)),
        (cqc::c_eqn, u64::from(guest.completions.eqn)),
        (cqc::dbr_addr, dbr),
    ] {
        field.set(context, value);
    }
    create.extend(at.to_be_bytes());
    let cqn = reply::object.get32(&guest.ok(create, 16));
    let mut cq = crate::guest::Cq::new(&mut guest, 4);
    cq.cqn = cqn;
    let mut qp = Qp::new(&mut guest, side.pd, &cq, &side.receive);
    qp.connect(&mut guest, Settings::to(1, qp.qpn));
    let segments = [
        remote(side.at + 64, side.key),
        pointer(8, side.key, side.at),
    ];
    qp.post(&guest, send::RDMA_WRITE, 0, &segments);
    let entry = crate::guest::eventually(|| {
        let entry = guest.ram.get(at, 128);
        (entry[127] >> 4 == cqe_opcode::REQ).then_some(entry)
    });
    assert_eq!(entry[..64], [0; 64]);
    assert_eq!(
        guest.ram.get(at + 128, 128),
        [0xff; 128],
        "the next one is untouched"
    );
}
