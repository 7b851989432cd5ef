// SPDX-License-Identifier: MIT OR Apache-2.0
//! A reliable connection with all its memory: what a device header needs to know, in one block that can lie anywhere.

use std::ops::Range;
use std::sync::Arc;

use super::memory::{Memory, PAGE};
use super::nic::{CqSpec, Error, Nic, Peer, WqSpec};
use crate::ifc::wqe::uar;
use crate::objects::qp::Service;

/// Sizes of a QP's queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpSpec {
    /// Slots of the send queue and entries of its CQ: a power of two up to 32768.
    pub send_depth: u32,
    /// Slots of the receive queue and entries of its CQ, or 0.
    pub recv_depth: u32,
    /// The send CQ is collapsed: every entry overwrites the first.
    pub collapsed: bool,
}

impl Default for QpSpec {
    fn default() -> Self {
        Self {
            send_depth: 128,
            recv_depth: 0,
            collapsed: false,
        }
    }
}

/// Where the parts lie in the block.
struct Layout {
    rings: Range<usize>,
    send_ring: usize,
    send_cq: Range<usize>,
    recv_cq: Range<usize>,
    records: usize,
    uar: usize,
    len: usize,
}

impl QpSpec {
    pub(super) fn check(&self) -> Result<(), Error> {
        let good = |depth: u32| depth.is_power_of_two() && depth <= 1 << 15;
        if good(self.send_depth) && (self.recv_depth == 0 || good(self.recv_depth)) {
            return Ok(());
        }
        Err(Error::Argument(
            "a queue's depth is a power of two, at most 32768",
        ))
    }

    fn layout(&self) -> Layout {
        let (send, recv) = (self.send_depth as usize, self.recv_depth as usize);
        let mut end = 0;
        let mut take = |len: usize| {
            let start = end;
            end += len.next_multiple_of(PAGE);
            start..start + len
        };
        let send_ring = (recv * 16).next_multiple_of(64);
        Layout {
            rings: take(send_ring + send * 64),
            send_ring,
            send_cq: take(send * 64),
            recv_cq: take(recv.max(1) * 64),
            records: take(PAGE).start,
            uar: take(PAGE).start,
            len: end,
        }
    }

    /// Bytes of the block that holds such a QP's queues, records and UAR page; a multiple of a page.
    pub fn bytes(&self) -> usize {
        self.layout().len
    }
}

/// Where a QP's memory is.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// [`QpSpec::bytes`] of registered memory, aligned to a page.
    pub block: *mut u8,
    /// The UAR page, aligned to a page; `None` for the block's own. It need not be registered.
    pub uar: Option<*mut u8>,
}

/// A queue pair of service RC with CQs and UAR page of its own. Addresses are those of the process. It exists until
/// [`Nic::close_qp`], [`Nic::lose`] or the end of the fabric.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Qp {
    pub qpn: u32,
    pub uar: u32,
    pub send_cqn: u32,
    pub recv_cqn: u32,
    pub spec: QpSpec,
    pub send_ring: u64,
    pub recv_ring: u64,
    /// Two big-endian words: receive counter, send counter.
    pub record: u64,
    pub send_cq_ring: u64,
    pub send_cq_record: u64,
    pub recv_cq_ring: u64,
    pub recv_cq_record: u64,
    /// Send doorbell register.
    pub doorbell: u64,
    /// CQ doorbell register.
    pub arm: u64,
    memory: Option<Arc<Memory>>,
}

impl Qp {
    /// This queue pair as another's peer, at a port.
    pub fn peer(&self, lid: u16) -> Peer {
        Peer::new(lid, self.qpn)
    }

    /// The block, if it is not the caller's.
    pub fn memory(&self) -> Option<&Memory> {
        self.memory.as_deref()
    }
}

impl Nic {
    /// Makes an RC queue pair in RESET, with CQs and a UAR page of its own, in new memory.
    pub fn open_qp(&self, pd: u32, spec: &QpSpec) -> Result<Qp, Error> {
        spec.check()?;
        let memory = Arc::new(Memory::new(self.registry(), spec.bytes())?);
        let place = Place {
            block: memory.as_ptr(),
            uar: None,
        };
        // SAFETY: the memory is kept until the UAR page in it is freed or the fabric dropped.
        unsafe { self.open(pd, spec, &place, Some(memory)) }
    }

    /// As [`Nic::open_qp`], in memory of the caller: a memfd's, or what was given to `cudaHostRegister`.
    ///
    /// # Safety
    /// The block stays mapped until [`Nic::close_qp`] returns or the fabric is dropped, and so does the UAR page. What
    /// else of the block is registered is checked at each access.
    pub unsafe fn open_qp_at(&self, pd: u32, spec: &QpSpec, place: &Place) -> Result<Qp, Error> {
        spec.check()?;
        // SAFETY: as required of the caller.
        unsafe { self.open(pd, spec, place, None) }
    }

    /// # Safety
    /// As [`Nic::open_qp_at`], unless the place is `memory`.
    unsafe fn open(
        &self,
        pd: u32,
        spec: &QpSpec,
        place: &Place,
        memory: Option<Arc<Memory>>,
    ) -> Result<Qp, Error> {
        if place.block.is_null() || place.block.addr() % PAGE != 0 {
            return Err(Error::Argument("a block is aligned to 4096 bytes"));
        }
        let layout = spec.layout();
        let base = place.block as u64;
        let at = |offset: usize| base + offset as u64;
        let own = place.block.wrapping_add(layout.uar);
        let page = place.uar.unwrap_or(own);
        // SAFETY: the caller keeps the block mapped; these parts lie in it. Nobody else uses it yet.
        unsafe {
            place.block.write_bytes(0, layout.len);
            // Entries are invalid until the device writes them.
            for cq in [&layout.send_cq, &layout.recv_cq] {
                place.block.add(cq.start).write_bytes(0xff, cq.len());
            }
        }
        // SAFETY: as required of the caller.
        let uar = unsafe { self.alloc_uar(page) }?;
        if let Some(memory) = &memory {
            self.keep(uar, memory);
        }
        let cq = |ring, record, depth: u32, collapsed| CqSpec {
            uar,
            ring: at(ring),
            record: at(layout.records + record),
            log_size: depth.max(1).ilog2(),
            collapsed,
            overrun_ignore: collapsed,
        };
        let mut made = Made::new(self, uar);
        let send_cqn = made.cq(&cq(
            layout.send_cq.start,
            64,
            spec.send_depth,
            spec.collapsed,
        ))?;
        let recv_cqn = made.cq(&cq(layout.recv_cq.start, 128, spec.recv_depth, false))?;
        let qpn = self.create_qp(&WqSpec {
            service: Service::Rc,
            pd,
            uar,
            send_cq: send_cqn,
            recv_cq: recv_cqn,
            ring: at(layout.rings.start),
            record: at(layout.records),
            log_send: Some(spec.send_depth.ilog2()),
            log_recv: (spec.recv_depth > 0).then(|| spec.recv_depth.ilog2()),
            user_index: 0,
        })?;
        made.keep();
        Ok(Qp {
            qpn,
            uar,
            send_cqn,
            recv_cqn,
            spec: *spec,
            send_ring: at(layout.rings.start + layout.send_ring),
            recv_ring: at(layout.rings.start),
            record: at(layout.records),
            send_cq_ring: at(layout.send_cq.start),
            send_cq_record: at(layout.records + 64),
            recv_cq_ring: at(layout.recv_cq.start),
            recv_cq_record: at(layout.records + 128),
            doorbell: page as u64 + uar::SQ,
            arm: page as u64 + uar::CQ,
            memory,
        })
    }

    /// Ends a queue pair with its CQs and its UAR page. On a lost function there is nothing left to end.
    pub fn close_qp(&self, qp: &Qp) -> Result<(), Error> {
        self.destroy_qp(qp.qpn)?;
        self.destroy_cq(qp.send_cqn)?;
        self.destroy_cq(qp.recv_cqn)?;
        self.dealloc_uar(qp.uar)
    }
}

/// What has been made so far, ended again unless all is.
struct Made<'a> {
    nic: &'a Nic,
    uar: Option<u32>,
    cqs: Vec<u32>,
}

impl<'a> Made<'a> {
    fn new(nic: &'a Nic, uar: u32) -> Self {
        Self {
            nic,
            uar: Some(uar),
            cqs: Vec::new(),
        }
    }

    fn cq(&mut self, spec: &CqSpec) -> Result<u32, Error> {
        let cqn = self.nic.create_cq(spec)?;
        self.cqs.push(cqn);
        Ok(cqn)
    }

    fn keep(mut self) {
        self.uar = None;
        self.cqs.clear();
    }
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        let mut results = Vec::new();
        // In this order: a CQ refers to its UAR page.
        for cqn in self.cqs.drain(..) {
            results.push(self.nic.destroy_cq(cqn));
        }
        results.extend(self.uar.take().map(|uar| self.nic.dealloc_uar(uar)));
        for error in results.into_iter().filter_map(Result::err) {
            tracing::warn!("{}: {error}", self.nic.name());
        }
    }
}
