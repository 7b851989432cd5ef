// SPDX-License-Identifier: MIT OR Apache-2.0
//! A QP as the kernels of a processor use it: its handles in the processor's memory, pointing to what it sees of queues and
//! doorbell.

use super::{HostRange, Processor, Reached};
use crate::error::{Error, Result};
use ibgda_device::abi::{ibgda_cq, ibgda_error, ibgda_qp};
use std::{
    mem::{offset_of, size_of},
    ops, slice,
    sync::Arc,
};

/// What the host has of a QP, as its kernels on the CPU would find it.
#[derive(Debug)]
pub(crate) struct HostQueues {
    pub(crate) qp: ibgda_qp,
    pub(crate) send_cq: ibgda_cq,
    pub(crate) recv_cq: Option<ibgda_cq>,
    pub(crate) ready: Vec<u64>,
    /// Whatever the pointers of these point into, but for the handles themselves and the ready words.
    pub(crate) ranges: Vec<HostRange>,
    /// Or point into: memory of the processor, whose addresses stay.
    pub(crate) there: Vec<ops::Range<u64>>,
}

/// The handles in one piece of the processor's memory: the QP, its send CQ, its receive CQ, the ready words.
#[derive(Debug)]
pub(crate) struct ProcessorQueues {
    processor: Arc<dyn Processor>,
    // Before what it points to.
    handles: Reached,
    _ranges: Vec<Range>,
}

/// Host memory, and where the processor sees it.
#[derive(Debug)]
struct Range {
    start: usize,
    bytes: usize,
    reached: Reached,
}

const SEND_CQ: usize = size_of::<ibgda_qp>();
const RECV_CQ: usize = SEND_CQ + size_of::<ibgda_cq>();
const READY: usize = RECV_CQ + size_of::<ibgda_cq>();

fn translate<T>(there: &[ops::Range<u64>], ranges: &[Range], pointer: *const T) -> Result<*mut T> {
    let address = pointer.addr() as u64;
    if pointer.is_null() || there.iter().any(|range| range.contains(&address)) {
        return Ok(device(address));
    }
    let found = ranges.iter().find_map(|range| {
        let offset = pointer.addr().checked_sub(range.start)?;
        (offset < range.bytes).then(|| range.reached.address() + offset as u64)
    });
    found.map(device).ok_or_else(|| {
        Error::argument(
            format!("a QP's pointer {pointer:p}"),
            "it is in none of the QP's memory",
            "",
        )
    })
}

/// A processor's address in a C struct; the host does not use it.
fn device<T>(address: u64) -> *mut T {
    std::ptr::without_provenance_mut(address as usize)
}

impl ProcessorQueues {
    /// # Safety
    /// The ranges stay mapped as long as this lives, and no kernel uses the handles when it is dropped.
    pub(crate) unsafe fn new(processor: &Arc<dyn Processor>, host: &HostQueues) -> Result<Self> {
        let mut ranges = Vec::new();
        for range in &host.ranges {
            ranges.push(Range {
                start: range.address.expose_provenance(),
                bytes: range.bytes,
                // SAFETY: by this function's contract.
                reached: unsafe { processor.register(range) }?,
            });
        }
        let handles = processor.alloc(READY + size_of_val(host.ready.as_slice()))?;
        let there = host.there.as_slice();
        let at = |offset: usize| handles.address() + offset as u64;
        let cq = |cq: &ibgda_cq, limit: *mut u64| -> Result<ibgda_cq> {
            Ok(ibgda_cq {
                ring: translate(there, &ranges, cq.ring)?,
                doorbell_record: translate(there, &ranges, cq.doorbell_record)?,
                status_page: translate(there, &ranges, cq.status_page)?,
                arm_doorbell: translate(there, &ranges, cq.arm_doorbell)?,
                events: translate(there, &ranges, cq.events)?,
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
            send_ring: translate(there, &ranges, host.qp.send_ring)?,
            recv_ring: translate(there, &ranges, host.qp.recv_ring)?,
            doorbell_record: translate(there, &ranges, host.qp.doorbell_record)?,
            doorbell: translate(there, &ranges, host.qp.doorbell)?,
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
        let recv_cq = recv_cq.unwrap_or_default();
        let parts = [
            bytes_of(slice::from_ref(&qp)),
            bytes_of(slice::from_ref(&send_cq)),
            bytes_of(slice::from_ref(&recv_cq)),
            bytes_of(&host.ready),
        ];
        // SAFETY: the memory is of that length, and no kernel knows it yet.
        unsafe { processor.write(handles.address(), &parts.concat()) }?;
        Ok(Self {
            processor: Arc::clone(processor),
            handles,
            _ranges: ranges,
        })
    }

    pub(crate) fn processor(&self) -> &Arc<dyn Processor> {
        &self.processor
    }

    /// The QP's handle.
    pub(crate) fn qp(&self) -> u64 {
        self.handles.address()
    }

    /// The first error that a poller of the send CQ latched, or of the receive CQ's.
    pub(crate) fn error(&self, receive: bool) -> Result<Option<ibgda_error>> {
        let cq = if receive { RECV_CQ } else { SEND_CQ };
        let place = self.qp() + (cq + offset_of!(ibgda_cq, error)) as u64;
        let mut bytes = [0; size_of::<ibgda_error>()];
        // SAFETY: the record is inside the handles.
        unsafe { self.processor.read(place, &mut bytes) }?;
        // SAFETY: integers, of which every pattern is a value.
        let error: ibgda_error = unsafe { std::mem::transmute(bytes) };
        Ok((error.status != 0).then_some(error))
    }
}

/// Handles and words, without padding, as bytes.
fn bytes_of<T>(values: &[T]) -> &[u8] {
    // SAFETY: called with C structs whose every byte is of a field, and with integers.
    unsafe { slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}
