// SPDX-License-Identifier: MIT OR Apache-2.0
//! Atomics, plain and with masks, of 8 bytes and of 4. Operands and results are written down from the WQE format (UCX
//! `ib_mlx5.h`, `uct_ib_mlx5_atomic_*_seg`) and the rules of the operations, not from the engine.

use connectx::ifc::cap::atomic_caps;
use connectx::ifc::command::{header, query_hca_cap_out};
use connectx::ifc::opcode;
use connectx::ifc::wqe::{cqe_opcode, send, syndrome};

use crate::guest::{Cqe, Pair, Settings, input, pointer, remote, status};

const QUAD: u8 = 9;
const WORD: u8 = 8;

/// Results in the host's byte order, as mlx5_core asks for, or big-endian.
fn host_order(pair: &mut Pair, on: bool) {
    let mut set = input(opcode::SET_HCA_CAP, 4112);
    header::op_mod.set(&mut set, 3 << 1);
    set[16 + 8] = if on { 0x40 } else { 0 };
    for guest in &mut pair.guests {
        assert_eq!(status(&guest.command(set.clone(), 16)), 0);
    }
}

fn quads(first: u64, second: u64) -> [u8; 16] {
    let mut s = [0; 16];
    s[..8].copy_from_slice(&first.to_be_bytes());
    s[8..].copy_from_slice(&second.to_be_bytes());
    s
}

fn words(list: [u32; 4]) -> [u8; 16] {
    let mut s = [0; 16];
    for (to, word) in s.chunks_mut(4).zip(list) {
        to.copy_from_slice(&word.to_be_bytes());
    }
    s
}

/// Executes one atomic on side 1's region, `offset` bytes from its start.
fn go(pair: &mut Pair, op: (u8, u8), operands: &[[u8; 16]], offset: u64, len: u32) -> Cqe {
    let Pair { guests, sides } = pair;
    let [a, b] = sides;
    let mut segments = vec![remote(b.at + offset, b.key)];
    segments.extend(operands);
    segments.push(pointer(len, a.key, a.at));
    a.qp.put_modified(&guests[0], op, 0x08, 0, &segments);
    a.qp.ring(&guests[0], guests[0].uar);
    a.send.wait(&guests[0])
}

/// An atomic that succeeds: memory before and after, the result, and the bytes around it untouched.
fn changes<const N: usize>(
    pair: &mut Pair,
    op: (u8, u8),
    operands: &[[u8; 16]],
    before: [u8; N],
    after: [u8; N],
) {
    const AROUND: [u8; 8] = [0x5a; 8];
    // A word is tried in both halves of its quadword.
    for offset in (8..16u64).step_by(N) {
        let at = pair.sides[1].at;
        pair.guests[1].ram.set(at, &[AROUND; 3].concat());
        pair.guests[1].ram.set(at + offset, &before);
        pair.guests[0].ram.set(pair.sides[0].at, &AROUND);
        let cqe = go(pair, op, operands, offset, N as u32);
        assert_eq!((cqe.opcode, cqe.bytes), (cqe_opcode::REQ, N as u32));
        let mut expected = [AROUND; 3].concat();
        expected[offset as usize..offset as usize + N].copy_from_slice(&after);
        assert_eq!(pair.guests[1].ram.get(at, 24), expected, "{op:x?}");
        let result = pair.guests[0].ram.get(pair.sides[0].at, 8);
        assert_eq!(result[..N], before, "the old value");
        assert_eq!(result[N..], AROUND[N..], "and no more");
    }
}

#[test]
pub fn what_the_device_has_is_in_its_capabilities() {
    let mut guest = crate::guest::guests(1).pop().unwrap();
    let mut query = input(opcode::QUERY_HCA_CAP, 16);
    header::op_mod.set(&mut query, (3 << 1) | 1);
    let out = guest.ok(query, query_hca_cap_out::SIZE);
    let caps = query_hca_cap_out::capability.bytes(&out);
    // Compare-swap, fetch-add and both with masks (include/linux/mlx5/driver.h, MLX5_ATOMIC_OPS_*); 4 and 8 bytes.
    assert_eq!(atomic_caps::atomic_operations.get(caps), 0xf);
    assert_eq!(atomic_caps::atomic_size_qp.get(caps), 0xc);
}

#[test]
pub fn plain_atomics_change_and_return() {
    let mut pair = Pair::new();
    for (on, bytes) in [
        (true, u64::to_ne_bytes as fn(u64) -> [u8; 8]),
        (false, u64::to_be_bytes),
    ] {
        host_order(&mut pair, on);
        let pair = &mut pair;
        let (cs, fa) = ((send::ATOMIC_CS, 0), (send::ATOMIC_FA, 0));
        changes(pair, fa, &[quads(10, 0)], bytes(5), bytes(15));
        changes(pair, fa, &[quads(2, 0)], bytes(u64::MAX), bytes(1));
        changes(pair, cs, &[quads(99, 15)], bytes(15), bytes(99));
        changes(pair, cs, &[quads(1, 15)], bytes(99), bytes(99));
    }
}

#[test]
pub fn masked_atomics_of_eight_bytes() {
    let mut pair = Pair::new();
    host_order(&mut pair, true);
    let pair = &mut pair;
    let (cs, fa) = (
        (send::ATOMIC_MASKED_CS, QUAD),
        (send::ATOMIC_MASKED_FA, QUAD),
    );
    let b = u64::to_ne_bytes;
    // Compares the low byte, swaps the second.
    let operands = [quads(0x0900, 0x05), quads(0xff00, 0xff)];
    changes(pair, cs, &operands, b(0xaabb_1205), b(0xaabb_0905));
    changes(pair, cs, &operands, b(0xaabb_1206), b(0xaabb_1206));
    // Two fields of 32 bits: no carry from one into the other, nor out of the upper one.
    let boundary = 0x8000_0000_8000_0000;
    let add = [quads(0x0000_0001_0000_0001, boundary)];
    changes(pair, fa, &add, b(0x5_ffff_ffff), b(0x6_0000_0000));
    changes(pair, fa, &add, b(0xffff_ffff_0000_0007), b(8));
    changes(pair, fa, &[quads(3, 0)], b(u64::MAX), b(2));
}

#[test]
pub fn masked_atomics_of_four_bytes() {
    let mut pair = Pair::new();
    for (on, b) in [
        (true, u32::to_ne_bytes as fn(u32) -> [u8; 4]),
        (false, u32::to_be_bytes),
    ] {
        host_order(&mut pair, on);
        let pair = &mut pair;
        let (cs, fa) = (
            (send::ATOMIC_MASKED_CS, WORD),
            (send::ATOMIC_MASKED_FA, WORD),
        );
        let swap = [words([0xbeef_0000, 0x12, 0xffff_0000, 0xff])];
        changes(pair, cs, &swap, b(0x1234_5612), b(0xbeef_5612));
        changes(pair, cs, &swap, b(0x1234_5613), b(0x1234_5613));
        changes(pair, fa, &[words([5, 0, 0, 0])], b(u32::MAX), b(4));
        let fields = [words([0x0001_0001, 0x8000_8000, 0, 0])];
        changes(pair, fa, &fields, b(0x0007_ffff), b(0x0008_0000));
    }
}

#[test]
pub fn an_atomic_that_is_none_fails_here() {
    let segment = quads(1, 0);
    for (op, operands, len) in [
        // Sizes that atomic_size_qp does not list, and a modifier that is none.
        ((send::ATOMIC_MASKED_FA, 10), &[segment][..], 16),
        ((send::ATOMIC_MASKED_FA, 0), &[segment], 8),
        // Less or more room than the result takes.
        ((send::ATOMIC_MASKED_FA, WORD), &[segment], 8),
        ((send::ATOMIC_FA, 0), &[segment], 4),
        // One mask segment too few.
        ((send::ATOMIC_MASKED_CS, QUAD), &[], 8),
    ] {
        let mut pair = Pair::new();
        let cqe = go(&mut pair, op, operands, 0, len);
        assert_eq!(cqe.syndrome, syndrome::LOCAL_QP_OP, "{op:x?} {len}");
    }
}

#[test]
pub fn an_unaligned_target_is_an_invalid_request() {
    for (op, offset, len) in [
        ((send::ATOMIC_FA, 0), 4, 8),
        ((send::ATOMIC_MASKED_FA, WORD), 2, 4),
    ] {
        let mut pair = Pair::new();
        let cqe = go(&mut pair, op, &[quads(1, 0)], offset, len);
        assert_eq!(cqe.syndrome, syndrome::REMOTE_INVAL_REQ);
        assert_eq!(pair.guests[1].ram.get(pair.sides[1].at, 16), [0; 16]);
    }
}

#[test]
pub fn the_mode_of_the_queue_pair_says_what_it_answers() {
    const NONE: u64 = 0;
    const AS_SPECIFIED: u64 = 1;
    let (plain, masked, word) = (
        (send::ATOMIC_FA, 0),
        (send::ATOMIC_MASKED_FA, QUAD),
        (send::ATOMIC_MASKED_FA, WORD),
    );
    for (mode, op, operand, len, answered) in [
        (NONE, plain, quads(1, 0), 8, false),
        (AS_SPECIFIED, plain, quads(1, 0), 8, true),
        (AS_SPECIFIED, masked, quads(1, 1 << 31), 8, false),
        (AS_SPECIFIED, word, words([1, 0, 0, 0]), 4, false),
        (3, masked, quads(1, 1 << 31), 8, true),
        (3, word, words([1, 0, 0, 0]), 4, true),
    ] {
        let mut pair = Pair::with(|s: &mut Settings| s.atomic_mode = mode);
        let cqe = go(&mut pair, op, &[operand], 0, len);
        let expected = if answered {
            0
        } else {
            syndrome::REMOTE_INVAL_REQ
        };
        assert_eq!(cqe.syndrome, expected, "mode {mode} {op:x?}");
    }
}
