// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queue pairs of every service and size, and shared receive queues.

use connectx::ifc::command::{create_rmp_in, create_xrc_srq_in, reply};
use connectx::ifc::context::{qpc, rmpc, wq, xrc_srqc};
use connectx::ifc::opcode;
use connectx::objects::qp::Service;

use crate::{Cq, Guest, LOG_RQ, LOG_SQ, input, pointer};

/// Service and sizes of a queue pair.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub service: Service,
    pub log_sq: u32,
    pub log_rq: u32,
    /// Log2 of the bytes of a receive WQE.
    pub log_stride: u32,
    /// Shared receive queue.
    pub srqn: Option<u32>,
    pub xrcd: u32,
    /// What it wants to have in completions: `cs_req` and `cs_res`.
    pub scatter: (u64, u64),
    /// Log2 of the streams of an initiator, and of those that may be in error.
    pub log_streams: (u32, u32),
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            service: Service::Rc,
            log_sq: LOG_SQ,
            log_rq: LOG_RQ,
            log_stride: 5,
            srqn: None,
            xrcd: 0,
            scatter: (0, 0),
            log_streams: (0, 0),
        }
    }
}

impl Shape {
    pub fn of(service: Service) -> Self {
        Self {
            service,
            ..Self::default()
        }
    }

    fn own(&self) -> bool {
        self.srqn.is_none() && !matches!(self.service, Service::Xrc | Service::Dci)
    }

    /// Bytes of the receive queue, before the send queue.
    pub(crate) fn receive_len(&self) -> u64 {
        if self.own() {
            (1u64 << (self.log_rq + self.log_stride)).next_multiple_of(64)
        } else {
            0
        }
    }

    pub(crate) fn describe(&self, context: &mut [u8]) {
        qpc::st.set(context, self.service as u64);
        qpc::xrcd.set(context, u64::from(self.xrcd));
        qpc::cs_req.set(context, self.scatter.0);
        qpc::cs_res.set(context, self.scatter.1);
        let (streams, errored) = self.log_streams;
        qpc::log_num_dci_stream_channels.set(context, u64::from(streams));
        qpc::log_num_dci_errored_streams.set(context, u64::from(errored));
        // 0 own queue, 1 shared, 3 none.
        let kind = match self.srqn {
            Some(_) => 1,
            None if self.own() => 0,
            None => 3,
        };
        qpc::rq_type.set(context, kind);
        qpc::srqn_rmpn_xrqn.set(context, u64::from(self.srqn.unwrap_or(0)));
    }
}

/// A shared receive queue: a receive memory pool or, with an XRC domain, an XRC SRQ.
pub struct Srq {
    pub number: u32,
    pub at: u64,
    pub dbr: u64,
    pub posted: u16,
    log: u32,
}

/// Log2 of the bytes of an entry: the link, and three pointers.
const LOG_ENTRY: u32 = 6;

impl Srq {
    pub fn new(guest: &mut Guest, pd: u32, log: u32, xrc: Option<(u32, &Cq)>) -> Self {
        let len = 1u64 << (log + LOG_ENTRY);
        let (at, dbr) = (guest.ram.alloc(len), guest.ram.alloc(8));
        for index in 0..1u64 << log {
            let mut entry = [0u8; 16];
            // The entries are a list in the order of their places.
            let next = (index as u16 + 1) & ((1 << log) - 1);
            entry[2..4].copy_from_slice(&next.to_be_bytes());
            guest.ram.set(at + (index << LOG_ENTRY), &entry);
        }
        let pages = (0..len.div_ceil(4096)).flat_map(|p| (at + p * 4096).to_be_bytes());
        let create = match xrc {
            Some((xrcd, cq)) => {
                let mut create = input(opcode::CREATE_XRC_SRQ, 0x110);
                let context = create_xrc_srq_in::srqc.bytes_mut(&mut create);
                xrc_srqc::log_xrc_srq_size.set(context, u64::from(log));
                xrc_srqc::log_rq_stride.set(context, u64::from(LOG_ENTRY) - 4);
                xrc_srqc::pd.set(context, u64::from(pd));
                xrc_srqc::cqn.set(context, u64::from(cq.cqn));
                xrc_srqc::xrcd.set(context, u64::from(xrcd));
                xrc_srqc::db_record_addr_h.set(context, dbr >> 32);
                xrc_srqc::db_record_addr_l.set(context, (dbr & 0xffff_ffff) >> 2);
                create.extend(pages);
                create
            }
            None => {
                let start = create_rmp_in::rmpc.offset() + rmpc::wq.offset();
                let mut create = input(opcode::CREATE_RMP, start + wq::SIZE);
                let context = &mut create[start..];
                wq::log_wq_sz.set(context, u64::from(log));
                wq::log_wq_stride.set(context, u64::from(LOG_ENTRY));
                wq::pd.set(context, u64::from(pd));
                wq::dbr_addr.set(context, dbr);
                create.extend(pages);
                create
            }
        };
        let out = guest.ok(create, 16);
        Self {
            number: reply::object.get32(&out),
            at,
            dbr,
            posted: 0,
            log,
        }
    }

    /// Posts the entry that is next in the list.
    pub fn post(&mut self, guest: &Guest, pointers: &[[u8; 16]]) {
        let slot = u64::from(self.posted) & ((1 << self.log) - 1);
        let mut list = pointers.concat();
        if pointers.len() < 3 {
            list.extend(pointer(0, 0x100, 0));
        }
        guest.ram.set(self.at + (slot << LOG_ENTRY) + 16, &list);
        self.posted = self.posted.wrapping_add(1);
        let posted = u32::from(self.posted);
        guest.ram.set(self.dbr, &posted.to_be_bytes());
    }
}

/// The three segments that address a datagram.
pub fn address_vector(lid: u16, qpn: u32, qkey: u32) -> [[u8; 16]; 3] {
    let mut first = [0u8; 16];
    first[..4].copy_from_slice(&qkey.to_be_bytes());
    first[8..12].copy_from_slice(&(qpn | 0x8000_0000).to_be_bytes());
    first[14..16].copy_from_slice(&lid.to_be_bytes());
    [first, [0; 16], [0; 16]]
}
