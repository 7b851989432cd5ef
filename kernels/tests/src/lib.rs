// SPDX-License-Identifier: MIT OR Apache-2.0
//! The device calls, compiled for CPU threads, for tests written in Rust: `test_X` is `ibgda_X` of the device header.
//! [`Poster`] and [`Poller`] wrap them.

use ibgda_device::{
    Status,
    abi::{ibgda_cq, ibgda_cqe, ibgda_qp, ibgda_region},
};
use std::ffi::c_void;

/// A shared QP, that any number of threads post to.
#[derive(Debug)]
pub struct SharedPoster(*mut ibgda_qp);

// SAFETY: the device calls of a shared QP may be made by any number of threads.
unsafe impl Send for SharedPoster {}
// SAFETY: as above.
unsafe impl Sync for SharedPoster {}

impl SharedPoster {
    /// # Safety
    /// The handle is of a shared QP, and it and all memory that it and its CQ name stay valid as long as the poster lives.
    pub unsafe fn new(qp: *mut ibgda_qp) -> Self {
        Self(qp)
    }

    /// `count` times `ibgda_fetch_add` of 1, one completion in eight; then `ibgda_quiet`. `patience` in ns.
    ///
    /// # Errors
    /// The status of the call that failed.
    pub fn adds(
        &self,
        (remote, rkey): (u64, u32),
        (local, lkey): (u64, u32),
        count: u64,
        patience: u64,
    ) -> Result<(), Status> {
        let deadline = test_clock_ns() + patience;
        // SAFETY: by the contract of `new`; what the NIC is asked to move, it checks itself.
        Status(unsafe { test_shared_adds(self.0, remote, rkey, local, lkey, count, deadline) }).ok()
    }
}

/// The thread that posts to a QP and polls its send CQ.
#[derive(Debug)]
pub struct Poster(*mut ibgda_qp);

// SAFETY: the contract of `new` is about exclusive use, not about one particular thread.
unsafe impl Send for Poster {}

impl Poster {
    /// # Safety
    /// The handle, and all memory that it and its CQs name, stay valid and used by nobody else as long as the poster lives.
    pub unsafe fn new(qp: *mut ibgda_qp) -> Self {
        Self(qp)
    }

    /// `ibgda_put`; the request's index.
    ///
    /// # Errors
    /// The status, here and in the other calls.
    pub fn put(
        &mut self,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        bytes: u32,
        flags: u32,
    ) -> Result<u64, Status> {
        let mut request = 0;
        // SAFETY: by the contract of `new`; what the NIC is asked to move, it checks itself.
        Status(unsafe {
            test_put(
                self.0,
                remote,
                rkey,
                local,
                lkey,
                bytes,
                flags,
                &mut request,
            )
        })
        .ok()?;
        Ok(request)
    }

    /// `ibgda_put` by a kernel that knows of BlueFlame; the request's index.
    ///
    /// # Errors
    /// The status.
    pub fn put_blueflame(
        &mut self,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        bytes: u32,
    ) -> Result<u64, Status> {
        let mut request = 0;
        // SAFETY: as in `put`.
        Status(unsafe {
            test_put_blueflame(self.0, remote, rkey, local, lkey, bytes, &mut request)
        })
        .ok()?;
        Ok(request)
    }

    /// `ibgda_put_imm`.
    ///
    /// # Errors
    /// The status.
    #[expect(clippy::too_many_arguments, reason = "as in the device header")]
    pub fn put_imm(
        &mut self,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        bytes: u32,
        immediate: u32,
        flags: u32,
    ) -> Result<u64, Status> {
        let mut request = 0;
        // SAFETY: as in `put`.
        Status(unsafe {
            test_put_imm(
                self.0,
                remote,
                rkey,
                local,
                lkey,
                bytes,
                immediate,
                flags,
                &mut request,
            )
        })
        .ok()?;
        Ok(request)
    }

    /// `ibgda_put` between regions.
    ///
    /// # Errors
    /// The status.
    pub fn put_region(
        &mut self,
        to: &ibgda_region,
        to_offset: u64,
        from: &ibgda_region,
        from_offset: u64,
        bytes: u32,
    ) -> Result<(), Status> {
        // SAFETY: as in `put`.
        Status(unsafe { test_put_region(self.0, to, to_offset, from, from_offset, bytes) }).ok()
    }

    /// `ibgda_put_inline`.
    ///
    /// # Errors
    /// The status.
    pub fn put_inline(
        &mut self,
        remote: u64,
        rkey: u32,
        data: &[u8],
        flags: u32,
    ) -> Result<u64, Status> {
        let mut request = 0;
        let (data, bytes) = (data.as_ptr().cast(), data.len() as u32);
        // SAFETY: as in `put`; the call reads `bytes` bytes of `data`.
        Status(unsafe { test_put_inline(self.0, remote, rkey, data, bytes, flags, &mut request) })
            .ok()?;
        Ok(request)
    }

    /// `ibgda_get`.
    ///
    /// # Errors
    /// The status.
    pub fn get(
        &mut self,
        local: u64,
        lkey: u32,
        remote: u64,
        rkey: u32,
        bytes: u32,
        flags: u32,
    ) -> Result<u64, Status> {
        let mut request = 0;
        // SAFETY: as in `put`.
        Status(unsafe {
            test_get(
                self.0,
                local,
                lkey,
                remote,
                rkey,
                bytes,
                flags,
                &mut request,
            )
        })
        .ok()?;
        Ok(request)
    }

    /// `ibgda_send`.
    ///
    /// # Errors
    /// The status.
    pub fn send(&mut self, local: u64, lkey: u32, bytes: u32, flags: u32) -> Result<u64, Status> {
        let mut request = 0;
        // SAFETY: as in `put`.
        Status(unsafe { test_send(self.0, local, lkey, bytes, flags, &mut request) }).ok()?;
        Ok(request)
    }

    /// `ibgda_fetch_add`.
    ///
    /// # Errors
    /// The status.
    pub fn fetch_add(
        &mut self,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        add: u64,
    ) -> Result<u64, Status> {
        let mut request = 0;
        // SAFETY: as in `put`.
        Status(unsafe { test_fetch_add(self.0, remote, rkey, local, lkey, add, 0, &mut request) })
            .ok()?;
        Ok(request)
    }

    /// `ibgda_compare_swap`.
    ///
    /// # Errors
    /// The status.
    pub fn compare_swap(
        &mut self,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        compare: u64,
        swap: u64,
    ) -> Result<u64, Status> {
        let mut request = 0;
        // SAFETY: as in `put`.
        Status(unsafe {
            test_compare_swap(
                self.0,
                remote,
                rkey,
                local,
                lkey,
                compare,
                swap,
                0,
                &mut request,
            )
        })
        .ok()?;
        Ok(request)
    }

    /// `ibgda_recv`.
    ///
    /// # Errors
    /// The status.
    pub fn recv(&mut self, local: u64, lkey: u32, bytes: u32) -> Result<(), Status> {
        // SAFETY: as in `put`.
        Status(unsafe { test_recv(self.0, local, lkey, bytes) }).ok()
    }

    /// `ibgda_wait`, for `patience_ns` from now; 0 looks once.
    ///
    /// # Errors
    /// The status.
    pub fn wait(&mut self, request: u64, patience_ns: u64) -> Result<(), Status> {
        // SAFETY: as in `put`.
        Status(unsafe { test_wait(self.0, request, deadline(patience_ns)) }).ok()
    }

    /// `ibgda_quiet`, for `patience_ns` from now.
    ///
    /// # Errors
    /// The status.
    pub fn quiet(&mut self, patience_ns: u64) -> Result<(), Status> {
        // SAFETY: as in `put`.
        Status(unsafe { test_quiet(self.0, deadline(patience_ns)) }).ok()
    }

    /// `ibgda_write_doorbell`.
    ///
    /// # Errors
    /// The status.
    pub fn write_doorbell(&mut self, producer_index: u64) -> Result<(), Status> {
        // SAFETY: as in `put`.
        Status(unsafe { test_write_doorbell(self.0, producer_index) }).ok()
    }

    /// `ibgda_reserve`; the slot's index.
    ///
    /// # Errors
    /// The status.
    pub fn reserve(&mut self) -> Result<u64, Status> {
        let mut index = 0;
        // SAFETY: as in `put`.
        Status(unsafe { test_reserve(self.0, &mut index) }).ok()?;
        Ok(index)
    }

    /// `count` 8-byte inline writes, each of its request's index to `remote + index % slots * 8`, one completion in
    /// `signal_every` and one doorbell in `doorbell_every`; then quiet, for `patience_ns` from now.
    ///
    /// # Errors
    /// The status of the first that failed.
    #[expect(
        clippy::too_many_arguments,
        reason = "a test's parameters, all of one kind"
    )]
    pub fn storm(
        &mut self,
        remote: u64,
        rkey: u32,
        slots: u64,
        count: u64,
        signal_every: u64,
        doorbell_every: u64,
        patience_ns: u64,
    ) -> Result<(), Status> {
        let deadline = deadline(patience_ns);
        // SAFETY: as in `put`.
        Status(unsafe {
            test_put_storm(
                self.0,
                remote,
                rkey,
                slots,
                count,
                signal_every,
                doorbell_every,
                deadline,
            )
        })
        .ok()
    }
}

/// The thread that polls a CQ.
#[derive(Debug)]
pub struct Poller(*mut ibgda_cq);

// SAFETY: as for `Poster`.
unsafe impl Send for Poller {}

impl Poller {
    /// # Safety
    /// As [`Poster::new`]; a poster of the same queue may live, if it runs on the same thread.
    pub unsafe fn new(cq: *mut ibgda_cq) -> Self {
        Self(cq)
    }

    /// `ibgda_poll_cq`, for `patience_ns` from now; 0 looks once.
    pub fn poll(&mut self, patience_ns: u64) -> (Status, ibgda_cqe) {
        let mut cqe = ibgda_cqe::default();
        // SAFETY: by the contract of `new`.
        let status = unsafe { test_poll_cq(self.0, &mut cqe, deadline(patience_ns)) };
        (Status(status), cqe)
    }

    /// `ibgda_wait_for_cq_event`, for `patience_ns` from now; 0 looks once.
    pub fn wait_event(&mut self, patience_ns: u64) -> Status {
        // SAFETY: by the contract of `new`.
        Status(unsafe { test_wait_for_cq_event(self.0, deadline(patience_ns)) })
    }
}

fn deadline(patience_ns: u64) -> u64 {
    if patience_ns == 0 {
        0
    } else {
        test_clock_ns() + patience_ns
    }
}

#[allow(missing_docs)]
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
    pub fn test_wqe_write_value(
        index: u64,
        qpn: u32,
        remote: u64,
        rkey: u32,
        value: u64,
        bytes: u32,
        flags: u32,
        out: *mut [u8; 64],
    ) -> u32;
    pub fn test_wqe_fetch_add32(
        index: u64,
        qpn: u32,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        add: u32,
        flags: u32,
        out: *mut [u8; 64],
    ) -> u32;
    pub fn test_wqe_compare_swap32(
        index: u64,
        qpn: u32,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        compare: u32,
        swap: u32,
        flags: u32,
        out: *mut [u8; 64],
    ) -> u32;
    pub fn test_wqe_dump(
        index: u64,
        qpn: u32,
        local: u64,
        lkey: u32,
        bytes: u32,
        flags: u32,
        out: *mut [u8; 64],
    ) -> u32;
    pub fn test_wqe_nop(index: u64, qpn: u32, flags: u32, out: *mut [u8; 64]) -> u32;
    pub safe fn test_doorbell_value(producer_index: u64, qpn: u32) -> u64;
    pub safe fn test_clock_ns() -> u64;

    fn test_put(
        qp: *mut ibgda_qp,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        bytes: u32,
        flags: u32,
        request: *mut u64,
    ) -> u32;
    fn test_put_imm(
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
    fn test_put_region(
        qp: *mut ibgda_qp,
        to: *const ibgda_region,
        to_offset: u64,
        from: *const ibgda_region,
        from_offset: u64,
        bytes: u32,
    ) -> u32;
    fn test_put_inline(
        qp: *mut ibgda_qp,
        remote: u64,
        rkey: u32,
        data: *const c_void,
        bytes: u32,
        flags: u32,
        request: *mut u64,
    ) -> u32;
    fn test_get(
        qp: *mut ibgda_qp,
        local: u64,
        lkey: u32,
        remote: u64,
        rkey: u32,
        bytes: u32,
        flags: u32,
        request: *mut u64,
    ) -> u32;
    fn test_send(
        qp: *mut ibgda_qp,
        local: u64,
        lkey: u32,
        bytes: u32,
        flags: u32,
        request: *mut u64,
    ) -> u32;
    fn test_fetch_add(
        qp: *mut ibgda_qp,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        add: u64,
        flags: u32,
        request: *mut u64,
    ) -> u32;
    fn test_compare_swap(
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
    fn test_shared_adds(
        qp: *mut ibgda_qp,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        count: u64,
        deadline_ns: u64,
    ) -> u32;
    fn test_recv(qp: *mut ibgda_qp, local: u64, lkey: u32, bytes: u32) -> u32;
    fn test_wait(qp: *mut ibgda_qp, request: u64, deadline_ns: u64) -> u32;
    fn test_quiet(qp: *mut ibgda_qp, deadline_ns: u64) -> u32;
    fn test_put_blueflame(
        qp: *mut ibgda_qp,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        bytes: u32,
        request: *mut u64,
    ) -> u32;
    fn test_wait_for_cq_event(cq: *mut ibgda_cq, deadline_ns: u64) -> u32;
    fn test_poll_cq(cq: *mut ibgda_cq, cqe: *mut ibgda_cqe, deadline_ns: u64) -> u32;
    fn test_write_doorbell(qp: *mut ibgda_qp, producer_index: u64) -> u32;
    fn test_reserve(qp: *mut ibgda_qp, index: *mut u64) -> u32;
    fn test_put_storm(
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
