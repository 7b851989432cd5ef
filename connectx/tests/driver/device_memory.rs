// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory on the device: allocated in the BAR, loaded and stored by CPUs, named by keys.

use connectx::ifc::command::{
    alloc_memic_in, alloc_memic_out, create_mkey_in, dealloc_memic_in, reply,
};
use connectx::ifc::context::mkc;
use connectx::ifc::opcode;
use connectx::ifc::wqe::{cqe_opcode, send, syndrome};
use connectx::objects::memic::{SIZE, START};
use connectx::platform::Function;

use crate::guest::{Guest, Pair, guests, input, pointer, remote, status};

fn alloc(guest: &mut Guest, len: u64) -> Vec<u8> {
    let mut bytes = input(opcode::ALLOC_MEMIC, 0x20);
    alloc_memic_in::range_start_addr.set(&mut bytes, START);
    alloc_memic_in::range_size.set(&mut bytes, SIZE);
    alloc_memic_in::memic_size.set(&mut bytes, len);
    guest.command(bytes, 16)
}

fn free(guest: &mut Guest, at: u64, len: u64) -> u8 {
    let mut bytes = input(opcode::DEALLOC_MEMIC, 0x20);
    dealloc_memic_in::memic_start_addr.set(&mut bytes, at);
    dealloc_memic_in::memic_size.set(&mut bytes, len);
    status(&guest.command(bytes, 8))
}

/// A key with all rights.
fn key(guest: &mut Guest, pd: u32, at: u64, len: u64) -> Vec<u8> {
    let mut bytes = input(opcode::CREATE_MKEY, 0x110);
    let context = create_mkey_in::mkc.bytes_mut(&mut bytes);
    for field in [mkc::lr, mkc::lw, mkc::rr, mkc::rw, mkc::a] {
        field.set(context, 1);
    }
    mkc::access_mode_4_2.set(context, 1);
    mkc::access_mode_1_0.set(context, 1);
    mkc::pd.set(context, u64::from(pd));
    mkc::start_addr.set(context, at);
    mkc::len.set(context, len);
    guest.command(bytes, 16)
}

#[test]
pub fn data_goes_from_and_to_device_memory() {
    let Pair {
        mut guests,
        mut sides,
    } = Pair::new();
    let mut made = vec![];
    for (guest, side) in guests.iter_mut().zip(&sides) {
        alloc(guest, 64);
        let out = alloc(guest, 8192);
        assert_eq!(status(&out), 0);
        let at = alloc_memic_out::memic_start_addr.get(&out);
        let out = key(guest, side.pd, at, 8192);
        assert_eq!(status(&out), 0, "{:?}", guest.referee.recent(1));
        made.push((at, reply::object.get32(&out) << 8));
    }
    // Longer than what goes by the shortest way.
    let data: Vec<u8> = (0..6000u32).map(|i| (i * 7 + i / 251) as u8).collect();
    for (i, piece) in data.chunks(8).enumerate() {
        guests[0].hca.bar_write(0, made[0].0 + i as u64 * 8, piece);
    }
    let len = data.len() as u32;
    // Addresses under such a key begin at 0, wherever it lies.
    let segments = [remote(100, made[1].1), pointer(len, made[0].1, 0)];
    sides[0].qp.post(&guests[0], send::RDMA_WRITE, 0, &segments);
    let cqe = sides[0].send.wait(&guests[0]);
    assert_eq!(cqe.opcode, cqe_opcode::REQ);
    let mut there = vec![0; data.len()];
    for (i, piece) in there.chunks_mut(4).enumerate() {
        guests[1]
            .hca
            .bar_read(0, made[1].0 + 100 + i as u64 * 4, piece);
    }
    assert_eq!(there, data);
    // And out of it again.
    let (own_key, own) = (sides[0].key, sides[0].at);
    let segments = [remote(100, made[1].1), pointer(len, own_key, own)];
    sides[0].qp.post(&guests[0], send::RDMA_READ, 0, &segments);
    assert_eq!(sides[0].send.wait(&guests[0]).opcode, cqe_opcode::REQ);
    assert_eq!(guests[0].ram.get(own, data.len()), data);
    let segments = [remote(8190, made[1].1), pointer(4, own_key, own)];
    sides[0].qp.post(&guests[0], send::RDMA_WRITE, 0, &segments);
    let cqe = sides[0].send.wait(&guests[0]);
    assert_eq!(cqe.syndrome, syndrome::REMOTE_ACCESS, "beyond its end");
}

#[test]
pub fn device_memory_is_given_once_and_taken_when_no_key_names_it() {
    let mut guest = guests(1).remove(0);
    let pd = guest.alloc(opcode::ALLOC_PD);
    assert_ne!(status(&alloc(&mut guest, 100)), 0, "units of 64 bytes");
    assert_ne!(status(&alloc(&mut guest, SIZE + 64)), 0);
    let at = alloc_memic_out::memic_start_addr.get(&alloc(&mut guest, SIZE));
    assert_eq!(at, START);
    assert_ne!(status(&alloc(&mut guest, 64)), 0, "there is no more");
    assert_ne!(
        status(&key(&mut guest, pd, at + 64, SIZE)),
        0,
        "beyond the end"
    );
    assert_ne!(
        status(&key(&mut guest, pd, at - 64, 64)),
        0,
        "before the start"
    );
    let mkey = reply::object.get32(&key(&mut guest, pd, at + 64, 64));
    assert_ne!(free(&mut guest, at, SIZE), 0, "a key names it");
    assert_eq!(guest.on_object(opcode::DESTROY_MKEY, mkey), 0);
    assert_ne!(free(&mut guest, at, 64), 0, "all or nothing");
    assert_eq!(free(&mut guest, at, SIZE), 0);
    assert_ne!(free(&mut guest, at, SIZE), 0);
    assert_eq!(guest.count("memic"), 0);
}
