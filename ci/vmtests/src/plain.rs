// SPDX-License-Identifier: MIT OR Apache-2.0
//! A queue pair by mlx5dv alone, of the objects that libibgda makes: a doorbell page, and memory, a UMEM and a firmware
//! object for the completion queue and for the queue pair.

use crate::verbs::{Command, Object, UarMapping, Umem, Verbs};
use ibgda_verbs_sys::uverbs::Uar;
use memmap2::MmapMut;

const CQE: usize = 64;
const WQEBB: usize = 64;
/// Of `create_qp_in`, its context, and the address path in it.
const QPC: usize = 0x18;
const PATH: usize = QPC + 0x18;

/// What every queue pair of a context needs to know once.
#[derive(Debug)]
pub struct Plain<'a> {
    verbs: &'a Verbs,
    lid: u64,
    pdn: u64,
    eqn: u64,
    /// Of the completion queues, which nobody arms.
    uar: Uar,
}

impl<'a> Plain<'a> {
    pub fn new(verbs: &'a Verbs) -> Self {
        Self {
            verbs,
            lid: verbs.lid(),
            pdn: verbs.pdn(),
            eqn: verbs.eqn(),
            uar: verbs.alloc_uar(),
        }
    }

    /// A queue pair of so many slots, connected to itself.
    pub fn connected(&self, depth: usize) -> PlainQp<'a> {
        let cq_memory = memory(depth * CQE + 64);
        let (cq_umem, cq_id) = umem(self.verbs, &cq_memory);
        let log = u64::from(depth.ilog2());
        let cq = Object::create(
            self.verbs,
            Command::new(0x400, 0x110)
                .set((0x50, 0, 64), 0)
                .set((0x58, 0, 32), cq_id)
                .set((0x5c, 0, 1), 1)
                .set((0x10, 6, 1), 1)
                .set((0x14, 0, 32), cq_id)
                .set((0x1c, 3, 5), log)
                .set((0x1d, 0, 24), self.uar.page_id.into())
                .set((0x24, 0, 32), self.eqn)
                .set((0x48, 0, 64), (depth * CQE) as u64),
        );

        let uar = self.verbs.alloc_uar();
        let page = self.verbs.map(&uar);
        let memory = memory(depth * WQEBB + 128);
        let (umem, id) = umem(self.verbs, &memory);
        let qp = Object::create(
            self.verbs,
            Command::new(0x500, 0x110)
                .set((0x100, 0, 64), 0)
                .set((0x108, 0, 32), id)
                .set((0x10c, 0, 1), 1)
                .set((QPC + 0x02, 3, 2), 3)
                .set((QPC + 0x05, 0, 24), self.pdn)
                .set((QPC + 0x0a, 1, 4), log)
                .set((QPC + 0x0d, 0, 24), uar.page_id.into())
                .set((QPC + 0x7d, 0, 24), cq.number.into())
                .set((QPC + 0x9d, 0, 24), cq.number.into())
                .set((QPC + 0xa0, 0, 64), (depth * WQEBB) as u64)
                .set((QPC + 0xac, 5, 3), 3)
                .set((QPC + 0xd0, 3, 1), 1)
                .set((QPC + 0xe4, 0, 32), id),
        );
        let change = |opcode| {
            Command::new(opcode, 0x110)
                .set((0x09, 0, 24), qp.number.into())
                .set((QPC + 0x02, 3, 2), 3)
                .set((QPC + 0x92, 1, 1), 1)
                .set((PATH + 0x25, 0, 8), 1)
        };
        qp.modify(change(0x502));
        qp.modify(
            change(0x503)
                .set((QPC + 0x08, 0, 3), 5)
                .set((QPC + 0x08, 3, 5), 30)
                .set((QPC + 0x15, 0, 24), qp.number.into())
                .set((PATH + 0x06, 0, 16), self.lid),
        );
        qp.modify(
            change(0x504)
                .set((QPC + 0x71, 5, 3), 7)
                .set((PATH + 0x08, 0, 5), 14),
        );
        PlainQp {
            _qp: qp,
            _cq: cq,
            _umems: [umem, cq_umem],
            _memory: [memory, cq_memory],
            _page: page,
            uar: Some(uar),
            verbs: self.verbs,
        }
    }
}

fn memory(bytes: usize) -> MmapMut {
    MmapMut::map_anon(bytes.next_multiple_of(4096)).expect("memory for a queue")
}

fn umem(verbs: &Verbs, memory: &MmapMut) -> (Umem, u64) {
    // SAFETY: both are kept by the queue pair, the UMEM in front of the memory.
    let umem = unsafe { Umem::register(verbs, memory.as_ptr().cast_mut(), memory.len()) };
    let id = umem.id();
    (umem, id)
}

/// The queue pair.
#[derive(Debug)]
pub struct PlainQp<'a> {
    // Dropped in this order.
    _qp: Object,
    _cq: Object,
    _umems: [Umem; 2],
    _memory: [MmapMut; 2],
    _page: UarMapping,
    uar: Option<Uar>,
    verbs: &'a Verbs,
}

impl PlainQp<'_> {
    /// Ends it, with its doorbell page.
    pub fn destroy(mut self) {
        let (uar, verbs) = (self.uar.take(), self.verbs);
        drop(self);
        if let Some(uar) = uar {
            verbs.destroy(uar);
        }
    }
}
