// SPDX-License-Identifier: MIT OR Apache-2.0
//! A queue pair by mlx5dv alone, of the objects that libibgda makes: a doorbell page, and memory, a UMEM and a firmware
//! object for the completion queue and for the queue pair.

use crate::verbs::{
    MTU_4096, Object, Place, UarMapping, Umem, Verbs, connect_to_itself, create_cq, create_qp,
};
use ibgda_verbs_sys::uverbs::Uar;
use memmap2::MmapMut;

const CQE: usize = 64;
const WQEBB: usize = 64;

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
        let place = |umem, record: usize, uar: &Uar| Place {
            umem,
            queue: 0,
            record: record as u64,
            log_entries: depth.ilog2().into(),
            uar_page: uar.page_id.into(),
        };
        let cq = create_cq(self.verbs, &place(cq_id, depth * CQE, &self.uar), self.eqn);

        let uar = self.verbs.alloc_uar();
        let page = self.verbs.map(&uar);
        let memory = memory(depth * WQEBB + 128);
        let (umem, id) = umem(self.verbs, &memory);
        let qp = create_qp(self.verbs, &place(id, depth * WQEBB, &uar), self.pdn, &cq);
        connect_to_itself(&qp, self.lid, MTU_4096);
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
