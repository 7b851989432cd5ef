// SPDX-License-Identifier: MIT OR Apache-2.0
//! The device calls, compiled for CPU threads, for tests written in Rust: `test_X` is `ibgda_X` of the device header.
//! Statuses are plain numbers, see [`ibgda_device::Status`].
#![allow(missing_docs)]

use ibgda_device::abi::{ibgda_cq, ibgda_cqe, ibgda_qp, ibgda_region};
use std::ffi::c_void;

unsafe extern "C" {
    pub fn test_wqe_write(
        opcode: u32,
        index: u64,
        qpn: u32,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        bytes: u32,
        immediate: u32,
        flags: u32,
        out: *mut [u8; 64],
    ) -> u32;
    pub fn test_wqe_read(
        index: u64,
        qpn: u32,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        bytes: u32,
        flags: u32,
        out: *mut [u8; 64],
    ) -> u32;
    pub fn test_wqe_write_inline(
        index: u64,
        qpn: u32,
        remote: u64,
        rkey: u32,
        data: *const c_void,
        bytes: u32,
        flags: u32,
        out: *mut [u8; 64],
    ) -> u32;
    pub fn test_wqe_send(
        opcode: u32,
        index: u64,
        qpn: u32,
        local: u64,
        lkey: u32,
        bytes: u32,
        immediate: u32,
        flags: u32,
        out: *mut [u8; 64],
    ) -> u32;
    pub fn test_wqe_fetch_add(
        index: u64,
        qpn: u32,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        add: u64,
        flags: u32,
        out: *mut [u8; 64],
    ) -> u32;
    pub fn test_wqe_compare_swap(
        index: u64,
        qpn: u32,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        compare: u64,
        swap: u64,
        flags: u32,
        out: *mut [u8; 64],
    ) -> u32;
    pub safe fn test_doorbell_value(producer_index: u64, qpn: u32) -> u64;
    pub safe fn test_clock_ns() -> u64;

    pub fn test_put(
        qp: *mut ibgda_qp,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        bytes: u32,
        flags: u32,
        request: *mut u64,
    ) -> u32;
    pub fn test_put_imm(
        qp: *mut ibgda_qp,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        bytes: u32,
        immediate: u32,
        flags: u32,
        request: *mut u64,
    ) -> u32;
    pub fn test_put_region(
        qp: *mut ibgda_qp,
        to: *const ibgda_region,
        to_offset: u64,
        from: *const ibgda_region,
        from_offset: u64,
        bytes: u32,
    ) -> u32;
    pub fn test_put_inline(
        qp: *mut ibgda_qp,
        remote: u64,
        rkey: u32,
        data: *const c_void,
        bytes: u32,
        flags: u32,
        request: *mut u64,
    ) -> u32;
    pub fn test_get(
        qp: *mut ibgda_qp,
        local: u64,
        lkey: u32,
        remote: u64,
        rkey: u32,
        bytes: u32,
        flags: u32,
        request: *mut u64,
    ) -> u32;
    pub fn test_send(
        qp: *mut ibgda_qp,
        local: u64,
        lkey: u32,
        bytes: u32,
        flags: u32,
        request: *mut u64,
    ) -> u32;
    pub fn test_fetch_add(
        qp: *mut ibgda_qp,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        add: u64,
        flags: u32,
        request: *mut u64,
    ) -> u32;
    pub fn test_compare_swap(
        qp: *mut ibgda_qp,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        compare: u64,
        swap: u64,
        flags: u32,
        request: *mut u64,
    ) -> u32;
    pub fn test_recv(qp: *mut ibgda_qp, local: u64, lkey: u32, bytes: u32) -> u32;
    pub fn test_wait(qp: *mut ibgda_qp, request: u64, deadline_ns: u64) -> u32;
    pub fn test_quiet(qp: *mut ibgda_qp, deadline_ns: u64) -> u32;
    pub fn test_poll_cq(cq: *mut ibgda_cq, cqe: *mut ibgda_cqe, deadline_ns: u64) -> u32;
    pub fn test_write_doorbell(qp: *mut ibgda_qp, producer_index: u64) -> u32;
    pub fn test_reserve(qp: *mut ibgda_qp, index: *mut u64) -> u32;
    pub fn test_put_storm(
        qp: *mut ibgda_qp,
        remote: u64,
        rkey: u32,
        slots: u64,
        count: u64,
        signal_every: u64,
        doorbell_every: u64,
        deadline_ns: u64,
    ) -> u32;
}
