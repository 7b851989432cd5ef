// SPDX-License-Identifier: MIT OR Apache-2.0
//! A QP as the kernels of a GPU use it: its handles in GPU memory, pointing to what the GPU sees of queues and doorbell.

use super::{
    Gpu, HostKind, HostRegistration,
    error::{Explain, failed},
};
use crate::error::{Error, Result};
use cudarc::driver::{
    result,
    sys::{self, CUdeviceptr},
};
use ibgda_device::abi::{ibgda_cq, ibgda_error, ibgda_qp};
use std::mem::{offset_of, size_of};

/// Host memory of a QP, or of a CQ of its.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostRange {
    pub(crate) address: *const u8,
    pub(crate) bytes: usize,
    pub(crate) kind: HostKind,
}

/// What the host has of a QP, as its kernels on the CPU would find it.
#[derive(Debug)]
pub(crate) struct HostQueues {
    pub(crate) qp: ibgda_qp,
    pub(crate) send_cq: ibgda_cq,
    pub(crate) recv_cq: Option<ibgda_cq>,
    pub(crate) ready: Vec<u64>,
    /// Whatever the pointers of these point into, but for the handles themselves and the ready words.
    pub(crate) ranges: Vec<HostRange>,
}

/// GPU memory of this library's own.
#[derive(Debug)]
struct DeviceMemory {
    gpu: Gpu,
    address: CUdeviceptr,
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let free = || {
            // SAFETY: allocated by `GpuQueues::new`; no kernel uses it any more, as of a QP that is dropped.
            unsafe { sys::cuMemFree_v2(self.address) }
                .result()
                .explain(|| "cuMemFree".to_owned())
        };
        // Fails when the context is gone, and the memory with it.
        let _ = self.gpu.enter(free);
    }
}

/// The handles in one piece of GPU memory: the QP, its send CQ, its receive CQ, the ready words.
#[derive(Debug)]
pub(crate) struct GpuQueues {
    // Before what it points to.
    handles: DeviceMemory,
    _registrations: Vec<HostRegistration>,
}

const SEND_CQ: usize = size_of::<ibgda_qp>();
const RECV_CQ: usize = SEND_CQ + size_of::<ibgda_cq>();
const READY: usize = RECV_CQ + size_of::<ibgda_cq>();

fn on_gpu<T>(registrations: &[HostRegistration], pointer: *const T) -> Result<*mut T> {
    if pointer.is_null() {
        return Ok(std::ptr::null_mut());
    }
    registrations
        .iter()
        .find_map(|registration| registration.translate(pointer))
        .map(device)
        .ok_or_else(|| {
            Error::argument(
                format!("a QP's pointer {pointer:p}"),
                "it is in none of the QP's memory",
                "",
            )
        })
}

/// A GPU address in a C struct; the host does not use it.
fn device<T>(address: CUdeviceptr) -> *mut T {
    std::ptr::without_provenance_mut(address as usize)
}

impl GpuQueues {
    /// # Safety
    /// The ranges stay mapped as long as this lives, and no kernel uses the handles when it is dropped.
    pub(crate) unsafe fn new(gpu: &Gpu, host: &HostQueues) -> Result<Self> {
        let mut registrations = Vec::new();
        for range in &host.ranges {
            // SAFETY: by this function's contract.
            registrations.push(unsafe {
                HostRegistration::new(gpu, range.address, range.bytes, range.kind)
            }?);
        }
        let bytes = READY + size_of_val(host.ready.as_slice());
        let handles = gpu.enter(|| {
            // SAFETY: it is filled before it is used.
            let address = unsafe { result::malloc_sync(bytes) }
                .explain(|| format!("cuMemAlloc of {bytes} bytes"))?;
            Ok(DeviceMemory {
                gpu: gpu.clone(),
                address,
            })
        })?;
        let at = |offset: usize| handles.address + offset as u64;
        let cq = |cq: &ibgda_cq, limit: *mut u64| -> Result<ibgda_cq> {
            Ok(ibgda_cq {
                ring: on_gpu(&registrations, cq.ring)?,
                doorbell_record: on_gpu(&registrations, cq.doorbell_record)?,
                status_page: on_gpu(&registrations, cq.status_page)?,
                arm_doorbell: on_gpu(&registrations, cq.arm_doorbell)?,
                events: on_gpu(&registrations, cq.events)?,
                limit,
                ..*cq
            })
        };
        let limit = device(at(offset_of!(ibgda_qp, limit)));
        let send_cq = cq(&host.send_cq, limit)?;
        let recv_cq = host.recv_cq.as_ref();
        let recv_cq = recv_cq.map(|queue| cq(queue, std::ptr::null_mut()));
        let recv_cq = recv_cq.transpose()?;
        let qp = ibgda_qp {
            send_ring: on_gpu(&registrations, host.qp.send_ring)?,
            recv_ring: on_gpu(&registrations, host.qp.recv_ring)?,
            doorbell_record: on_gpu(&registrations, host.qp.doorbell_record)?,
            doorbell: on_gpu(&registrations, host.qp.doorbell)?,
            send_cq: device(at(SEND_CQ)),
            recv_cq: match recv_cq {
                Some(_) => device(at(RECV_CQ)),
                None => std::ptr::null_mut(),
            },
            ready: match host.ready.as_slice() {
                [] => std::ptr::null_mut(),
                _ => device(at(READY)),
            },
            ..host.qp
        };
        gpu.enter(|| {
            copy(at(0), &[qp])?;
            copy(at(SEND_CQ), &[send_cq])?;
            copy(at(RECV_CQ), &[recv_cq.unwrap_or_default()])?;
            copy(at(READY), &host.ready)
        })?;
        Ok(Self {
            handles,
            _registrations: registrations,
        })
    }

    pub(crate) fn gpu(&self) -> &Gpu {
        &self.handles.gpu
    }

    /// The QP's handle.
    pub(crate) fn qp(&self) -> CUdeviceptr {
        self.handles.address
    }

    /// The first error that a poller of the send CQ latched, or of the receive CQ's.
    pub(crate) fn error(&self, receive: bool) -> Result<Option<ibgda_error>> {
        let cq = if receive { RECV_CQ } else { SEND_CQ };
        let place = self.handles.address + (cq + offset_of!(ibgda_cq, error)) as u64;
        let mut error = [ibgda_error::default()];
        self.gpu().enter(|| {
            // SAFETY: the record is inside the handles, and may hold any bytes.
            unsafe { result::memcpy_dtoh_sync(&mut error, place) }
                .map_err(|error| failed("read a CQ's error from the GPU", error))
        })?;
        Ok((error[0].status != 0).then_some(error[0]))
    }
}

fn copy<T>(to: CUdeviceptr, from: &[T]) -> Result<()> {
    if from.is_empty() {
        return Ok(());
    }
    // SAFETY: the handles' memory has room for each of them, as computed in `new`.
    unsafe { result::memcpy_htod_sync(to, from) }
        .explain(|| "copy a QP's handle to the GPU".to_owned())
}
