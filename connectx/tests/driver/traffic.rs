// SPDX-License-Identifier: MIT OR Apache-2.0
//! Work that succeeds.

use connectx::ifc::context::mkc;
use connectx::ifc::wqe::{cqe_opcode, mkey_mask, send, syndrome, umr_ctrl};

use crate::guest::{LOG_SQ, Pair, REGION, pointer, remote};

/// Bytes that differ everywhere.
fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8 ^ seed).collect()
}

#[test]
pub fn writes_of_all_sizes_arrive() {
    let Pair { guests, mut sides } = Pair::new();
    // Around the MTU of 1024, unaligned, and long enough for acknowledgements inside the message.
    for (i, len) in [0usize, 1, 63, 1023, 1024, 1025, 4096, 100_000, 1_000_000]
        .into_iter()
        .enumerate()
    {
        let data = pattern(len, i as u8);
        let (from, to) = (sides[0].at + 3, sides[1].at + 5);
        guests[0].ram.set(from, &data);
        let (key, rkey) = (sides[0].key, sides[1].key);
        let qp = &mut sides[0].qp;
        qp.post(
            &guests[0],
            send::RDMA_WRITE,
            0,
            &[remote(to, rkey), pointer(len as u32, key, from)],
        );
        let cqe = sides[0].send.wait(&guests[0]);
        assert_eq!((cqe.opcode, cqe.counter), (cqe_opcode::REQ, i as u16));
        assert_eq!(guests[1].ram.get(to, len), data, "{len} bytes");
    }
    assert_eq!(guests[1].count("retransmissions"), 0);
}

#[test]
pub fn reads_bring_data_back() {
    let Pair { guests, mut sides } = Pair::new();
    for len in [1usize, 1024, 50_000] {
        let data = pattern(len, 9);
        guests[1].ram.set(sides[1].at, &data);
        let (key, rkey, at, to) = (sides[0].key, sides[1].key, sides[1].at, sides[0].at);
        let qp = &mut sides[0].qp;
        qp.post(
            &guests[0],
            send::RDMA_READ,
            0,
            &[remote(at, rkey), pointer(len as u32, key, to)],
        );
        let cqe = sides[0].send.wait(&guests[0]);
        assert_eq!((cqe.opcode, cqe.bytes), (cqe_opcode::REQ, len as u32));
        assert_eq!(guests[0].ram.get(to, len), data);
    }
}

#[test]
pub fn sends_use_up_receives_in_order() {
    let Pair { guests, mut sides } = Pair::new();
    let [a, b] = &mut sides;
    for i in 0..20u32 {
        b.qp.receive(&guests[1], b.key, b.at + u64::from(i) * 4096, 4096);
        let data = pattern(3000, i as u8);
        guests[0].ram.set(a.at, &data);
        a.qp.post(
            &guests[0],
            send::SEND_IMM,
            0xabc0 + i,
            &[pointer(3000, a.key, a.at)],
        );
        assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
        let cqe = b.receive.wait(&guests[1]);
        assert_eq!(cqe.opcode, cqe_opcode::RESP_SEND_IMM);
        assert_eq!(
            (cqe.counter, cqe.bytes, cqe.immediate),
            (i as u16, 3000, 0xabc0 + i)
        );
        assert_eq!(guests[1].ram.get(b.at + u64::from(i) * 4096, 3000), data);
    }
}

#[test]
pub fn write_with_immediate_needs_a_receive_and_tells_the_length() {
    let Pair { guests, mut sides } = Pair::new();
    let [a, b] = &mut sides;
    b.qp.receive(&guests[1], b.key, b.at, 0);
    a.qp.post(
        &guests[0],
        send::RDMA_WRITE_IMM,
        77,
        &[remote(b.at, b.key), pointer(2000, a.key, a.at)],
    );
    assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
    let cqe = b.receive.wait(&guests[1]);
    assert_eq!(
        (cqe.opcode, cqe.bytes, cqe.immediate),
        (cqe_opcode::RESP_WR_IMM, 2000, 77)
    );
}

#[test]
pub fn unsignalled_work_is_silent_and_the_ring_wraps() {
    let Pair { guests, mut sides } = Pair::new();
    let [a, b] = &mut sides;
    for round in 0..10u16 {
        // All but the last of a full queue are unsignalled.
        for i in 0..1u16 << LOG_SQ {
            let flags = if i + 1 == 1 << LOG_SQ { 0x08 } else { 0 };
            let at = b.at + u64::from((round << LOG_SQ) | i) * 8;
            guests[0].ram.set(a.at, &[round as u8; 8]);
            a.qp.put(
                &guests[0],
                send::RDMA_WRITE,
                flags,
                0,
                &[remote(at, b.key), pointer(8, a.key, a.at)],
            );
        }
        a.qp.ring(&guests[0], guests[0].uar);
        let cqe = a.send.wait(&guests[0]);
        assert_eq!(
            (cqe.opcode, cqe.counter),
            (cqe_opcode::REQ, (round << LOG_SQ) + (1 << LOG_SQ) - 1)
        );
    }
    assert_eq!(a.send.poll(&guests[0]), None);
    let all = guests[1].ram.get(b.at, (8 * 10) << LOG_SQ);
    let expected: Vec<u8> = (0..10u8).flat_map(|r| vec![r; 8 << LOG_SQ]).collect();
    assert_eq!(all, expected);
}

#[test]
pub fn a_dump_waits_for_the_read_before_it_and_checks_its_key() {
    let Pair { guests, mut sides } = Pair::new();
    let [a, b] = &mut sides;
    guests[1].ram.set(b.at, b"data");
    let local = pointer(4, a.key, a.at);
    a.qp.put(
        &guests[0],
        send::RDMA_READ,
        0,
        0,
        &[remote(b.at, b.key), local],
    );
    a.qp.post(&guests[0], send::DUMP, 0, &[local]);
    assert_eq!(a.send.wait(&guests[0]).counter, 1);
    assert_eq!(guests[0].ram.get(a.at, 4), b"data");
    a.qp.post(&guests[0], send::DUMP, 0, &[pointer(4, a.key, a.at - 1)]);
    assert_eq!(a.send.wait(&guests[0]).syndrome, syndrome::LOCAL_PROT);
}

#[test]
pub fn a_queue_pair_talks_to_itself() {
    let mut guests = crate::guest::guests(1);
    let mut side = crate::guest::Side::new(&mut guests[0]);
    let settings = crate::guest::Settings::to(1, side.qp.qpn);
    side.qp.connect(&mut guests[0], settings);
    guests[0].ram.set(side.at, b"loop");
    let to = side.at + REGION / 2;
    let segments = [remote(to, side.key), pointer(4, side.key, side.at)];
    side.qp.post(&guests[0], send::RDMA_WRITE, 0, &segments);
    assert_eq!(side.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
    assert_eq!(guests[0].ram.get(to, 4), b"loop");
}

#[test]
pub fn completions_make_one_event_for_one_arming() {
    let Pair {
        mut guests,
        mut sides,
    } = Pair::new();
    let [a, b] = &mut sides;
    let write = [remote(b.at, b.key), pointer(4, a.key, a.at)];
    a.send.arm(&guests[0]);
    guests[0].arm_completions();
    assert_eq!(guests[0].vectors.count(1), 0);
    for _ in 0..3 {
        a.qp.post(&guests[0], send::RDMA_WRITE, 0, &write);
        a.send.wait(&guests[0]);
    }
    assert_eq!(guests[0].completion_event(), Some(a.send.cqn));
    assert_eq!(guests[0].completion_event(), None, "armed once");
    assert_eq!(guests[0].vectors.count(1), 1);
    // Arming with entries that had no event reports them at once.
    a.send.consumer -= 1;
    a.send.arm(&guests[0]);
    assert_eq!(guests[0].completion_event(), Some(a.send.cqn));
    // But an entry has one event only.
    a.send.arm(&guests[0]);
    assert_eq!(guests[0].completion_event(), None);
    // The event queue was not armed again, so there was no other interrupt; arming it late makes up for it.
    assert_eq!(guests[0].vectors.count(1), 1);
    a.send.consumer += 1;
    a.send.arm(&guests[0]);
    a.qp.post(&guests[0], send::RDMA_WRITE, 0, &write);
    a.send.wait(&guests[0]);
    guests[0].arm_completions();
    assert_eq!(guests[0].vectors.count(1), 2);
}

/// Segments that bind window `key` to `len` bytes at `at` under `under`, for one queue pair.
fn bind(key: u32, qpn: u32, under: u32, at: u64, len: u64) -> Vec<[u8; 16]> {
    let mut control = [0u8; umr_ctrl::SIZE];
    umr_ctrl::is_inline.set(&mut control, 1);
    umr_ctrl::fail_if_not_free.set(&mut control, 1);
    umr_ctrl::translation_offset_en.set(&mut control, 1);
    umr_ctrl::xlt_octowords.set(&mut control, 4);
    let mask = mkey_mask::LEN
        | mkey_mask::START_ADDR
        | mkey_mask::KEY
        | mkey_mask::QPN
        | mkey_mask::RW
        | mkey_mask::FREE;
    umr_ctrl::mkey_mask.set(&mut control, mask);
    let mut context = [0u8; mkc::SIZE];
    mkc::mkey_7_0.set(&mut context, u64::from(key & 0xff));
    mkc::qpn.set(&mut context, u64::from(qpn));
    mkc::rw.set(&mut context, 1);
    mkc::start_addr.set(&mut context, at);
    mkc::len.set(&mut context, len);
    let mut entries = [0u8; 64];
    entries[..16].copy_from_slice(&pointer(len as u32, under, at));
    let bytes = [&control[..], &context[..], &entries[..]].concat();
    bytes.chunks(16).map(|c| c.try_into().unwrap()).collect()
}

#[test]
pub fn a_window_opens_for_its_queue_pair_until_it_is_invalidated() {
    let Pair {
        mut guests,
        mut sides,
    } = Pair::new();
    let window = guests[1].window(sides[1].pd) | 7;
    let [a, b] = &mut sides;
    let (at, len) = (b.at + 100, 64);
    b.qp.post(
        &guests[1],
        send::UMR,
        window,
        &bind(window, b.qp.qpn, b.key, at, len),
    );
    assert_eq!(b.send.wait(&guests[1]).opcode, cqe_opcode::REQ);
    guests[0].ram.set(a.at, b"window");
    let write = |at, key| [remote(at, key), pointer(6, a.key, a.at)];
    a.qp.post(&guests[0], send::RDMA_WRITE, 0, &write(at + 58, window));
    assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
    assert_eq!(guests[1].ram.get(at + 58, 6), b"window");
    // The owner closes it, and a late writer is refused.
    b.qp.post(&guests[1], send::LOCAL_INVAL, window, &[]);
    assert_eq!(b.send.wait(&guests[1]).opcode, cqe_opcode::REQ);
    a.qp.post(&guests[0], send::RDMA_WRITE, 0, &write(at, window));
    assert_eq!(a.send.wait(&guests[0]).syndrome, syndrome::REMOTE_ACCESS);
}

#[test]
pub fn the_peer_may_close_a_window_with_its_message() {
    let Pair {
        mut guests,
        mut sides,
    } = Pair::new();
    let window = guests[1].window(sides[1].pd) | 9;
    let [a, b] = &mut sides;
    b.qp.post(
        &guests[1],
        send::UMR,
        window,
        &bind(window, b.qp.qpn, b.key, b.at, 64),
    );
    assert_eq!(b.send.wait(&guests[1]).opcode, cqe_opcode::REQ);
    b.qp.receive(&guests[1], b.key, b.at, 64);
    a.qp.post(
        &guests[0],
        send::SEND_INVAL,
        window,
        &[pointer(4, a.key, a.at)],
    );
    assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
    let cqe = b.receive.wait(&guests[1]);
    assert_eq!(
        (cqe.opcode, cqe.immediate),
        (cqe_opcode::RESP_SEND_INV, window)
    );
    a.qp.post(
        &guests[0],
        send::RDMA_WRITE,
        0,
        &[remote(b.at, window), pointer(4, a.key, a.at)],
    );
    assert_eq!(a.send.wait(&guests[0]).syndrome, syndrome::REMOTE_ACCESS);
}

#[test]
pub fn the_peer_cannot_close_what_does_not_permit_it() {
    let Pair { guests, mut sides } = Pair::new();
    let [a, b] = &mut sides;
    b.qp.receive(&guests[1], b.key, b.at, 64);
    a.qp.post(
        &guests[0],
        send::SEND_INVAL,
        b.key,
        &[pointer(4, a.key, a.at)],
    );
    assert_eq!(a.send.wait(&guests[0]).syndrome, syndrome::REMOTE_ACCESS);
    assert_eq!(b.receive.wait(&guests[1]).opcode, cqe_opcode::RESP_ERR);
}

#[test]
pub fn a_window_is_bound_once_and_page_entries_are_the_driver_s() {
    for bound_twice in [true, false] {
        let Pair {
            mut guests,
            mut sides,
        } = Pair::new();
        let window = guests[1].window(sides[1].pd) | 7;
        let b = &mut sides[1];
        let segments = bind(window, b.qp.qpn, b.key, b.at, 64);
        let key = if bound_twice {
            b.qp.post(&guests[1], send::UMR, window, &segments);
            assert_eq!(b.send.wait(&guests[1]).opcode, cqe_opcode::REQ);
            window
        } else {
            b.key
        };
        b.qp.post(&guests[1], send::UMR, key, &segments);
        assert_eq!(b.send.wait(&guests[1]).syndrome, syndrome::MW_BIND);
    }
}
