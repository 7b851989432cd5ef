// SPDX-License-Identifier: MIT OR Apache-2.0
//! The C side of [`inproc`](super): `include/connectx_inproc.h` documents each call. `cargo rustc -p connectx --lib
//! --release --crate-type staticlib` builds the library, so that the ordinary build has nothing to do with it.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::time::Duration;

use super::{Access, Error, Fabric, Loss, Nic, Options, Place, QpSpec};

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

fn failed(error: &dyn std::fmt::Display) -> c_int {
    let text = error.to_string().replace('\0', " ");
    LAST.with(|last| *last.borrow_mut() = CString::new(text).unwrap_or_default());
    -1
}

/// Runs a call and stores its result.
///
/// # Safety
/// `out` is null or valid for a store.
unsafe fn give<T>(out: *mut T, call: impl FnOnce() -> Result<T, Error>) -> c_int {
    match call() {
        Ok(value) if !out.is_null() => {
            // SAFETY: as required of the caller.
            unsafe { out.write(value) };
            0
        }
        Ok(_) => 0,
        Err(error) => failed(&error),
    }
}

/// # Safety
/// `fabric` is null or came from `cx_open` and was not closed.
unsafe fn nic<'a>(fabric: *const Fabric, index: u32) -> Result<&'a Nic, Error> {
    // SAFETY: as required of the caller.
    unsafe { fabric.as_ref() }
        .and_then(|fabric| fabric.nic(index as usize))
        .ok_or(Error::Argument("the fabric has no such function"))
}

/// `struct cx_qp`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct CxQp {
    pub qpn: u32,
    pub uar: u32,
    pub send_cqn: u32,
    pub recv_cqn: u32,
    pub send_ring: u64,
    pub recv_ring: u64,
    pub record: u64,
    pub send_cq_ring: u64,
    pub send_cq_record: u64,
    pub recv_cq_ring: u64,
    pub recv_cq_record: u64,
    pub doorbell: u64,
    pub arm: u64,
}

/// Why the last call of this thread failed.
#[unsafe(no_mangle)]
pub extern "C" fn cx_error() -> *const c_char {
    LAST.with(|last| last.borrow().as_ptr())
}

/// Makes a fabric.
#[unsafe(no_mangle)]
pub extern "C" fn cx_open(nics: u32, spin_ns: u64) -> *mut Fabric {
    let spin = match spin_ns {
        u64::MAX => Duration::MAX,
        ns => Duration::from_nanos(ns),
    };
    let options = Options {
        nics: nics as usize,
        spin,
        ..Options::default()
    };
    match Fabric::new(&options) {
        Ok(fabric) => Box::into_raw(Box::new(fabric)),
        Err(error) => {
            failed(&error);
            std::ptr::null_mut()
        }
    }
}

/// Ends a fabric.
///
/// # Safety
/// `fabric` is null or came from [`cx_open`]; it is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cx_close(fabric: *mut Fabric) {
    if !fabric.is_null() {
        // SAFETY: as required of the caller.
        drop(unsafe { Box::from_raw(fabric) });
    }
}

/// Registers memory.
///
/// # Safety
/// As [`Fabric::register`]; `fabric` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cx_register(fabric: *const Fabric, addr: *mut u8, len: usize) -> c_int {
    // SAFETY: as required of the caller.
    let Some(fabric) = (unsafe { fabric.as_ref() }) else {
        return failed(&"no fabric");
    };
    // SAFETY: as required of the caller.
    unsafe { give(&mut (), || fabric.register(addr, len)) }
}

/// Ends a registration.
///
/// # Safety
/// `fabric` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cx_unregister(fabric: *const Fabric, addr: *mut u8) -> c_int {
    // SAFETY: as required of the caller.
    let fabric = unsafe { fabric.as_ref() };
    match fabric.is_some_and(|fabric| fabric.unregister(addr)) {
        true => 0,
        false => failed(&"no registered range starts there"),
    }
}

/// Stops or lets go the engine.
///
/// # Safety
/// `fabric` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cx_freeze(fabric: *const Fabric, frozen: c_int) {
    // SAFETY: as required of the caller.
    if let Some(fabric) = unsafe { fabric.as_ref() } {
        fabric.freeze(frozen != 0);
    }
}

/// LID of a function.
///
/// # Safety
/// `fabric` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cx_lid(fabric: *const Fabric, index: u32) -> u16 {
    // SAFETY: as required of the caller.
    unsafe { nic(fabric, index) }.map_or(0, Nic::lid)
}

/// Status page of a function.
///
/// # Safety
/// `fabric` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cx_status_page(fabric: *const Fabric, index: u32) -> u64 {
    // SAFETY: as required of the caller.
    unsafe { nic(fabric, index) }.map_or(0, Nic::status_page)
}

/// A counter of a function.
///
/// # Safety
/// `fabric` is open; `name` is a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cx_count(fabric: *const Fabric, index: u32, name: *const c_char) -> u64 {
    if name.is_null() {
        return 0;
    }
    // SAFETY: as required of the caller.
    let (nic, name) = unsafe { (nic(fabric, index), CStr::from_ptr(name)) };
    nic.map_or(0, |nic| nic.count(&name.to_string_lossy()))
}

/// Makes a protection domain.
///
/// # Safety
/// `fabric` is open; `pd` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cx_alloc_pd(fabric: *const Fabric, index: u32, pd: *mut u32) -> c_int {
    // SAFETY: as required of the caller.
    unsafe { give(pd, || nic(fabric, index)?.alloc_pd()) }
}

/// Makes a memory key.
///
/// # Safety
/// `fabric` is open; `key` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cx_create_mkey(
    fabric: *const Fabric,
    index: u32,
    pd: u32,
    addr: u64,
    len: u64,
    access: u32,
    key: *mut u32,
) -> c_int {
    let access = Access {
        local_write: access & 1 != 0,
        remote_read: access & 2 != 0,
        remote_write: access & 4 != 0,
        remote_atomic: access & 8 != 0,
    };
    // SAFETY: as required of the caller.
    unsafe {
        give(key, || {
            nic(fabric, index)?.create_mkey(pd, addr, len, access)
        })
    }
}

fn spec(send_depth: u32, recv_depth: u32, collapsed: c_int) -> QpSpec {
    QpSpec {
        send_depth,
        recv_depth,
        collapsed: collapsed != 0,
    }
}

/// Bytes of a QP's block; 0 for depths that no QP has.
#[unsafe(no_mangle)]
pub extern "C" fn cx_qp_bytes(send_depth: u32, recv_depth: u32) -> usize {
    let spec = spec(send_depth, recv_depth, 0);
    spec.check().map_or(0, |()| spec.bytes())
}

/// Makes a QP in the caller's memory.
///
/// # Safety
/// As [`Nic::open_qp_at`]; `fabric` is open; `out` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cx_open_qp(
    fabric: *const Fabric,
    index: u32,
    pd: u32,
    send_depth: u32,
    recv_depth: u32,
    collapsed: c_int,
    block: *mut u8,
    uar: *mut u8,
    out: *mut CxQp,
) -> c_int {
    let spec = spec(send_depth, recv_depth, collapsed);
    let uar = (!uar.is_null()).then_some(uar);
    let call = || {
        // SAFETY: as required of the caller.
        let qp = unsafe { nic(fabric, index)?.open_qp_at(pd, &spec, &Place { block, uar }) }?;
        Ok(CxQp {
            qpn: qp.qpn,
            uar: qp.uar,
            send_cqn: qp.send_cqn,
            recv_cqn: qp.recv_cqn,
            send_ring: qp.send_ring,
            recv_ring: qp.recv_ring,
            record: qp.record,
            send_cq_ring: qp.send_cq_ring,
            send_cq_record: qp.send_cq_record,
            recv_cq_ring: qp.recv_cq_ring,
            recv_cq_record: qp.recv_cq_record,
            doorbell: qp.doorbell,
            arm: qp.arm,
        })
    };
    // SAFETY: as required of the caller.
    unsafe { give(out, call) }
}

/// Connects a QP.
///
/// # Safety
/// `fabric` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cx_connect(
    fabric: *const Fabric,
    index: u32,
    qpn: u32,
    lid: u16,
    peer: u32,
) -> c_int {
    // SAFETY: as required of the caller.
    let call = || unsafe { nic(fabric, index) }?.connect(qpn, &super::Peer::new(lid, peer));
    // SAFETY: the unit value can be written.
    unsafe { give(&mut (), call) }
}

/// Puts a QP in error.
///
/// # Safety
/// `fabric` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cx_to_error(fabric: *const Fabric, index: u32, qpn: u32) -> c_int {
    // SAFETY: as required of the caller; the unit value can be written.
    unsafe { give(&mut (), || nic(fabric, index)?.to_error(qpn)) }
}

/// Ends a QP with its CQs and UAR page.
///
/// # Safety
/// `fabric` is open; `qp` came from [`cx_open_qp`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cx_close_qp(fabric: *const Fabric, index: u32, qp: *const CxQp) -> c_int {
    let call = || {
        // SAFETY: as required of the caller.
        let (nic, qp) = unsafe { (nic(fabric, index)?, qp.as_ref()) };
        let qp = qp.ok_or(Error::Argument("no queue pair"))?;
        nic.destroy_qp(qp.qpn)?;
        nic.destroy_cq(qp.send_cqn)?;
        nic.destroy_cq(qp.recv_cqn)?;
        nic.dealloc_uar(qp.uar)
    };
    // SAFETY: the unit value can be written.
    unsafe { give(&mut (), call) }
}

/// Takes a function away, or brings it back.
///
/// # Safety
/// `fabric` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cx_lose(fabric: *const Fabric, index: u32, lost: c_int) -> c_int {
    let call = || {
        // SAFETY: as required of the caller.
        let nic = unsafe { nic(fabric, index) }?;
        if lost == 0 {
            return nic.recover();
        }
        nic.lose(Loss::Reset);
        Ok(())
    };
    // SAFETY: the unit value can be written.
    unsafe { give(&mut (), call) }
}
