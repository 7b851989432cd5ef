// SPDX-License-Identifier: MIT OR Apache-2.0
//! The decoder against what the device header writes, and against what it does not.

use super::*;
use ibgda_device::abi::{IBGDA_FENCED, IBGDA_SOLICITED, IBGDA_UNSIGNALED};
use ibgda_test_kernels::*;

const QPN: u32 = 0x4a5b6c;
const INDEX: u64 = 0x1_2345;
const RKEY: u32 = 0xa1b2_c3d4;
const LKEY: u32 = 0x0102_0304;
const REMOTE: u64 = 0x1122_3344_5566_7788;
const LOCAL: u64 = 0x99aa_bbcc_ddee_ff00;
const PEER: Remote = Remote {
    address: REMOTE,
    rkey: RKEY,
};

fn memory(bytes: u32) -> Data {
    Data {
        address: LOCAL,
        lkey: LKEY,
        bytes,
    }
}

/// The slot that the device header's builder makes; what is behind its segments is of an earlier lap.
fn built(build: impl FnOnce(*mut Slot) -> u32) -> Slot {
    let mut slot = [0; 64];
    let segments = build(&mut slot) as usize;
    slot[segments * SEGMENT..].fill(0xee);
    slot
}

fn write(opcode: u8, bytes: u32, flags: u32) -> Slot {
    // SAFETY: the builders write 64 bytes to a slot of 64, here and below.
    built(|out| unsafe {
        test_wqe_write(
            opcode.into(),
            INDEX,
            QPN,
            REMOTE,
            RKEY,
            LOCAL,
            LKEY,
            bytes,
            0xdead_beef,
            flags,
            out,
        )
    })
}

fn write_inline(bytes: u32) -> Slot {
    let data: Vec<u8> = (1..=bytes as u8).collect();
    let from = data.as_ptr().cast();
    // SAFETY: as above; the data has so many bytes.
    built(|out| unsafe { test_wqe_write_inline(INDEX, QPN, REMOTE, RKEY, from, bytes, 0, out) })
}

fn fetch_add() -> Slot {
    // SAFETY: as above.
    built(|out| unsafe {
        test_wqe_fetch_add(
            INDEX,
            QPN,
            REMOTE,
            RKEY,
            LOCAL,
            LKEY,
            0x0102_0304_0506_0708,
            0,
            out,
        )
    })
}

fn action(slot: &Slot) -> Action {
    decode(slot, INDEX, QPN).expect("one of ours").action
}

#[test]
fn every_request_of_the_device_header_is_understood() {
    let immediate = With::Immediate(0xdead_beef_u32.to_be_bytes());
    for (opcode, with) in [(0x08, With::Nothing), (0x09, immediate)] {
        for (bytes, payload) in [(0, Payload::Nothing), (4096, Payload::Memory(memory(4096)))] {
            let request = decode(&write(opcode, bytes, 0), INDEX, QPN).expect("a write");
            assert_eq!(request.action, Action::Write(PEER, payload, with));
            assert_eq!((request.opcode, request.fetches()), (opcode, 0));
        }
    }
    for bytes in [1, 12, 13, 28] {
        let mut data = [0; INLINE_BYTES];
        (0..bytes as usize).for_each(|at| data[at] = at as u8 + 1);
        let payload = Payload::Inline { data, bytes };
        let expected = Action::Write(PEER, payload, With::Nothing);
        assert_eq!(action(&write_inline(bytes)), expected);
    }
    // SAFETY: as above.
    let read = |out| unsafe { test_wqe_read(INDEX, QPN, REMOTE, RKEY, LOCAL, LKEY, 77, 0, out) };
    let slot = built(read);
    assert_eq!(action(&slot), Action::Read(PEER, Some(memory(77))));
    assert_eq!(decode(&slot, INDEX, QPN).expect("a read").fetches(), 77);
    for (opcode, with) in [
        (0x0a, With::Nothing),
        (0x0b, immediate),
        (0x01, With::Invalidate(0xdead_beef)),
    ] {
        for (bytes, payload) in [(0, Payload::Nothing), (8, Payload::Memory(memory(8)))] {
            // SAFETY: as above.
            let slot = built(|out| unsafe {
                test_wqe_send(opcode, INDEX, QPN, LOCAL, LKEY, bytes, 0xdead_beef, 0, out)
            });
            assert_eq!(action(&slot), Action::Send(payload, with));
        }
    }
    let add = Operation::FetchAdd(0x0102_0304_0506_0708);
    assert_eq!(action(&fetch_add()), Action::Atomic(PEER, memory(8), add));
    // SAFETY: as above.
    let slot = built(|out| unsafe {
        test_wqe_compare_swap(INDEX, QPN, REMOTE, RKEY, LOCAL, LKEY, 5, 6, 0, out)
    });
    let swap = Operation::CompareSwap {
        compare: 5,
        swap: 6,
    };
    assert_eq!(action(&slot), Action::Atomic(PEER, memory(8), swap));
    // SAFETY: as above.
    let slot = built(|out| unsafe { test_wqe_dump(INDEX, QPN, LOCAL, LKEY, 1, 0, out) });
    assert_eq!(action(&slot), Action::Flush(memory(1)));
    // SAFETY: as above.
    let slot = built(|out| unsafe { test_wqe_nop(INDEX, QPN, 0, out) });
    assert_eq!(action(&slot), Action::Nop);
}

#[test]
fn the_flags_of_the_device_header_are_understood() {
    for (flags, expected) in [
        (0, (true, false, false)),
        (IBGDA_UNSIGNALED, (false, false, false)),
        (IBGDA_SOLICITED, (true, true, false)),
        (IBGDA_FENCED, (true, false, true)),
    ] {
        let request = decode(&write(8, 8, flags), INDEX, QPN).expect("a write");
        assert_eq!(
            (request.wants_cqe, request.solicited, request.fenced),
            expected,
            "{flags:#x}"
        );
    }
}

#[test]
fn each_wrong_field_is_refused_with_its_own_code() {
    let with = |slot: Slot, at: usize, value: u8| {
        let mut slot = slot;
        slot[at] = value;
        slot
    };
    let (put, inline, add) = (write(8, 8, 0), write_inline(12), fetch_add());
    // SAFETY: as above.
    let (masked, nop) = unsafe {
        (
            built(|out| test_wqe_fetch_add32(INDEX, QPN, REMOTE, RKEY, LOCAL, LKEY, 1, 0, out)),
            built(|out| test_wqe_nop(INDEX, QPN, 0, out)),
        )
    };
    let cases = [
        ("modifier", with(put, 0, 1), vendor::RESERVED),
        ("index", with(put, 2, 0x46), vendor::INDEX),
        ("opcode UMR", with(put, 3, 0x25), vendor::OPCODE),
        ("QPN", with(put, 6, 0), vendor::QPN),
        ("no segments", with(put, 7, 0), vendor::SEGMENTS),
        ("five segments", with(put, 7, 5), vendor::SEGMENTS),
        ("signature", with(put, 8, 1), vendor::RESERVED),
        ("stream", with(put, 9, 1), vendor::RESERVED),
        ("stream, low", with(put, 10, 1), vendor::RESERVED),
        ("reserved flag 0", with(put, 11, 0x09), vendor::RESERVED),
        ("reserved flag 4", with(put, 11, 0x18), vendor::RESERVED),
        (
            "completion at the first error",
            with(put, 11, 0x04),
            vendor::FLAGS,
        ),
        ("completion with event", with(put, 11, 0x0c), vendor::FLAGS),
        ("small fence", with(put, 11, 0x28), vendor::FLAGS),
        ("strong order", with(put, 11, 0x68), vendor::FLAGS),
        ("remote, reserved", with(put, 31, 1), vendor::RESERVED),
        ("a write of one segment", with(put, 7, 1), vendor::SEGMENTS),
        ("two lists", with(put, 7, 4), vendor::SEGMENTS),
        ("no bytes", with(put, 35, 0), vendor::SEGMENT),
        ("inline of 0", with(inline, 35, 0), vendor::SEGMENT),
        (
            "inline of 13 in one",
            with(inline, 35, 13),
            vendor::SEGMENTS,
        ),
        ("inline of 200", with(inline, 35, 200), vendor::SEGMENT),
        (
            "inline, a segment too many",
            with(inline, 7, 4),
            vendor::SEGMENTS,
        ),
        ("a read into inline", with(inline, 3, 0x10), vendor::SEGMENT),
        ("a NOP with a segment", with(nop, 7, 2), vendor::SEGMENTS),
        ("a flush of nothing", with(nop, 3, 0x23), vendor::SEGMENTS),
        ("an atomic without data", with(add, 7, 3), vendor::SEGMENTS),
        ("an atomic at 4", with(add, 23, 0x84), vendor::ALIGNMENT),
        ("an atomic of 4 bytes", with(add, 51, 4), vendor::SEGMENT),
        (
            "an addition that compares",
            with(add, 47, 1),
            vendor::RESERVED,
        ),
        ("32 bits", masked, vendor::MASKED_ATOMIC),
    ];
    for (what, slot, code) in cases {
        assert_eq!(decode(&slot, INDEX, QPN), Err(Fault::local(code)), "{what}");
    }
    let long = with(with(put, 32, 0x40), 35, 1);
    let too_long = Fault {
        syndrome: syndrome::LOCAL_LENGTH,
        vendor: 0,
    };
    assert_eq!(decode(&long, INDEX, QPN), Err(too_long));
}

/// Whatever lies in a slot, it is understood or refused.
#[test]
fn no_bytes_confuse_the_decoder() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let seeds = [write(8, 8, 0), write_inline(28), fetch_add()];
    let (mut good, mut refused) = (0, 0);
    for round in 0..200_000_usize {
        let mut slot = seeds[round % seeds.len()];
        for _ in 0..=random() % 3 {
            slot[random() as usize % 64] = random() as u8;
        }
        match decode(&slot, INDEX, QPN) {
            Ok(_) => good += 1,
            Err(fault) => {
                assert!(fault.syndrome == 1 || ibgda_device::proxy_fault::INDEX <= fault.vendor);
                refused += 1;
            }
        }
    }
    assert!(good > 1_000 && refused > 1_000, "{good}, {refused}");
}

#[test]
fn a_receive_has_a_buffer_of_a_message_s_length() {
    let slot = |bytes: u32| {
        let mut slot = [0; 16];
        slot[..4].copy_from_slice(&bytes.to_be_bytes());
        slot[4..8].copy_from_slice(&LKEY.to_be_bytes());
        slot[8..].copy_from_slice(&LOCAL.to_be_bytes());
        slot
    };
    assert_eq!(decode_receive(&slot(1 << 30)), Ok(memory(1 << 30)));
    for bytes in [0, INLINE | 8] {
        assert_eq!(
            decode_receive(&slot(bytes)),
            Err(Fault::local(vendor::RECEIVE))
        );
    }
    let long = decode_receive(&slot((1 << 30) + 1)).expect_err("too long");
    assert_eq!(long.syndrome, syndrome::LOCAL_LENGTH);
}
