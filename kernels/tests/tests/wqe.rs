// SPDX-License-Identifier: MIT OR Apache-2.0
//! The WQE builders byte for byte, against vectors derived by hand from the layouts of rdma-core's mlx5dv.h.

use ibgda_device::abi::{IBGDA_FENCED, IBGDA_SOLICITED, IBGDA_UNSIGNALED};
use ibgda_test_kernels::*;

const QPN: u32 = 0x4a5b6c;
const REMOTE: u64 = 0x1122_3344_5566_7788;
const RKEY: u32 = 0xa1b2_c3d4;
const LOCAL: u64 = 0x99aa_bbcc_ddee_ff00;
const LKEY: u32 = 0x0102_0304;

/// The builder's slot as hexadecimal, one 16-byte segment a line, only those that count.
fn segments(build: impl FnOnce(*mut [u8; 64]) -> u32) -> Vec<String> {
    let mut slot = [0xee; 64];
    let count = build(&mut slot) as usize;
    assert!((1..=4).contains(&count), "{count} segments");
    slot[..16 * count]
        .chunks_exact(16)
        .map(|segment| {
            format!(
                "{:032x}",
                u128::from_be_bytes(segment.try_into().expect("16 bytes"))
            )
        })
        .collect()
}

#[test]
fn write() {
    // SAFETY: the builder writes 64 bytes to a slot of 64.
    let wqe = segments(|out| unsafe {
        test_wqe_write(
            0x08, 0x1_2345, QPN, REMOTE, RKEY, LOCAL, LKEY, 0x1000, 0, 0, out,
        )
    });
    assert_eq!(
        wqe,
        [
            // opmod 0, index 0x2345 (16 bits of it), opcode 8 | QPN, 3 segments | signature, stream, CQ_UPDATE | immediate
            "002345084a5b6c030000000800000000",
            "1122334455667788a1b2c3d400000000",
            "000010000102030499aabbccddeeff00",
        ]
    );
}

#[test]
fn write_with_immediate_unsignaled_fenced_solicited() {
    let flags = IBGDA_UNSIGNALED | IBGDA_FENCED | IBGDA_SOLICITED;
    // SAFETY: as above.
    let wqe = segments(|out| unsafe {
        test_wqe_write(
            0x09,
            0xffff,
            QPN,
            REMOTE,
            RKEY,
            LOCAL,
            LKEY,
            1,
            0xcafe_f00d,
            flags,
            out,
        )
    });
    assert_eq!(
        wqe,
        [
            "00ffff094a5b6c0300000082cafef00d",
            "1122334455667788a1b2c3d400000000",
            "000000010102030499aabbccddeeff00",
        ]
    );
}

#[test]
fn an_empty_write_has_no_data_segment() {
    // SAFETY: as above.
    let wqe = segments(|out| unsafe {
        test_wqe_write(0x08, 0, QPN, REMOTE, RKEY, LOCAL, LKEY, 0, 0, 0, out)
    });
    assert_eq!(
        wqe,
        [
            "000000084a5b6c020000000800000000",
            "1122334455667788a1b2c3d400000000"
        ]
    );
}

#[test]
fn read() {
    // SAFETY: as above.
    let wqe = segments(|out| unsafe {
        test_wqe_read(7, QPN, REMOTE, RKEY, LOCAL, LKEY, 0x4000_0000, 0, out)
    });
    assert_eq!(
        wqe,
        [
            "000007104a5b6c030000000800000000",
            "1122334455667788a1b2c3d400000000",
            "400000000102030499aabbccddeeff00",
        ]
    );
}

#[test]
fn inline_data_takes_three_segments_up_to_12_bytes_and_four_up_to_28() {
    let data: Vec<u8> = (1..=28).collect();
    let inline = |bytes: u32| {
        // SAFETY: as above; `data` has 28 bytes, and no case asks for more.
        segments(|out| unsafe {
            test_wqe_write_inline(1, QPN, REMOTE, RKEY, data.as_ptr().cast(), bytes, 0, out)
        })
    };
    let head = [
        "000001084a5b6c030000000800000000",
        "1122334455667788a1b2c3d400000000",
    ];
    let head4 = [
        "000001084a5b6c040000000800000000",
        "1122334455667788a1b2c3d400000000",
    ];

    assert_eq!(
        inline(1),
        [head[0], head[1], "80000001010000000000000000000000"]
    );
    assert_eq!(
        inline(5),
        [head[0], head[1], "80000005010203040500000000000000"]
    );
    assert_eq!(
        inline(12),
        [head[0], head[1], "8000000c0102030405060708090a0b0c"]
    );
    assert_eq!(
        inline(13),
        [
            head4[0],
            head4[1],
            "8000000d0102030405060708090a0b0c",
            "0d000000000000000000000000000000"
        ]
    );
    assert_eq!(
        inline(28),
        [
            head4[0],
            head4[1],
            "8000001c0102030405060708090a0b0c",
            "0d0e0f101112131415161718191a1b1c"
        ]
    );
}

#[test]
fn send_and_send_with_immediate() {
    // SAFETY: as above.
    let wqe = segments(|out| unsafe { test_wqe_send(0x0a, 2, QPN, LOCAL, LKEY, 64, 0, 0, out) });
    assert_eq!(
        wqe,
        [
            "0000020a4a5b6c020000000800000000",
            "000000400102030499aabbccddeeff00"
        ]
    );
    // SAFETY: as above.
    let wqe = segments(|out| unsafe { test_wqe_send(0x0b, 2, QPN, LOCAL, LKEY, 0, 5, 0, out) });
    assert_eq!(wqe, ["0000020b4a5b6c010000000800000005"]);
}

#[test]
fn atomics() {
    // SAFETY: as above.
    let wqe = segments(|out| unsafe {
        test_wqe_fetch_add(
            3,
            QPN,
            REMOTE,
            RKEY,
            LOCAL,
            LKEY,
            0x0123_4567_89ab_cdef,
            0,
            out,
        )
    });
    assert_eq!(
        wqe,
        [
            "000003124a5b6c040000000800000000",
            "1122334455667788a1b2c3d400000000",
            "0123456789abcdef0000000000000000",
            "000000080102030499aabbccddeeff00",
        ]
    );
    // SAFETY: as above.
    let wqe = segments(|out| unsafe {
        test_wqe_compare_swap(
            4,
            QPN,
            REMOTE,
            RKEY,
            LOCAL,
            LKEY,
            0x1111_2222_3333_4444,
            0x5555_6666_7777_8888,
            0,
            out,
        )
    });
    assert_eq!(
        wqe,
        [
            "000004114a5b6c040000000800000000",
            "1122334455667788a1b2c3d400000000",
            // swap comes before compare
            "55556666777788881111222233334444",
            "000000080102030499aabbccddeeff00",
        ]
    );
}

#[test]
fn atomics_on_4_bytes_are_masked_ones_with_open_masks() {
    // SAFETY: as above.
    let wqe = segments(|out| unsafe {
        test_wqe_fetch_add32(5, QPN, REMOTE, RKEY, LOCAL, LKEY, 0x0123_4567, 0, out)
    });
    assert_eq!(
        wqe,
        [
            // opmod 8: extended atomic of 4 bytes; opcode 0x15
            "080005154a5b6c040000000800000000",
            "1122334455667788a1b2c3d400000000",
            "01234567000000000000000000000000",
            "000000040102030499aabbccddeeff00",
        ]
    );
    // SAFETY: as above.
    let wqe = segments(|out| unsafe {
        test_wqe_compare_swap32(
            6,
            QPN,
            REMOTE,
            RKEY,
            LOCAL,
            LKEY,
            0x1111_2222,
            0x5555_6666,
            IBGDA_UNSIGNALED,
            out,
        )
    });
    assert_eq!(
        wqe,
        [
            "080006144a5b6c040000000000000000",
            "1122334455667788a1b2c3d400000000",
            // swap, compare, and which bits of each
            "5555666611112222ffffffffffffffff",
            "000000040102030499aabbccddeeff00",
        ]
    );
}

#[test]
fn values_from_registers() {
    // SAFETY: as above.
    let wqe = segments(|out| unsafe {
        test_wqe_write_value(1, QPN, REMOTE, RKEY, 0x0807_0605_0403_0201, 8, 0, out)
    });
    assert_eq!(
        wqe,
        [
            "000001084a5b6c030000000800000000",
            "1122334455667788a1b2c3d400000000",
            "80000008010203040506070800000000"
        ]
    );
}

#[test]
fn dump_nop_and_send_with_invalidate() {
    // SAFETY: as above.
    let wqe = segments(|out| unsafe { test_wqe_dump(9, QPN, LOCAL, LKEY, 1, IBGDA_FENCED, out) });
    assert_eq!(
        wqe,
        [
            "000009234a5b6c020000008800000000",
            "000000010102030499aabbccddeeff00"
        ]
    );
    // SAFETY: as above.
    let wqe = segments(|out| unsafe { test_wqe_nop(10, QPN, 0, out) });
    assert_eq!(wqe, ["00000a004a5b6c010000000800000000"]);
    // SAFETY: as above.
    let wqe = segments(|out| unsafe { test_wqe_send(0x01, 2, QPN, LOCAL, LKEY, 64, RKEY, 0, out) });
    assert_eq!(
        wqe,
        [
            "000002014a5b6c0200000008a1b2c3d4",
            "000000400102030499aabbccddeeff00"
        ]
    );
}

#[test]
fn the_doorbell_carries_the_next_free_index_and_the_qp() {
    assert_eq!(
        test_doorbell_value(0x1_2346, QPN).to_ne_bytes(),
        [0x00, 0x23, 0x46, 0x00, 0x4a, 0x5b, 0x6c, 0x00]
    );
}
