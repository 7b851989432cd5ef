// SPDX-License-Identifier: MIT OR Apache-2.0
//! Completion queues.

use crate::{
    context::Context,
    error::{Error, Result},
    ifc::{self, Block, cqc, create_cq, opcode},
    monitor::Watched,
    nic::{Device, Object, QueueMemory, Uar, Umem},
    queue::{Handle, depth},
};
use ibgda_device::abi::{IBGDA_CQE_BYTES, ibgda_cq, ibgda_error};
use std::{
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// Ownership byte of a completion that nobody has written: kind 15, invalid.
const CQE_NEVER_WRITTEN: u8 = 0xf0;

/// A ring of completions in broker memory. It serves one work queue.
#[derive(Debug)]
pub struct CompletionQueue {
    // Dropped in this order: what looks at the handle, the object, then the memory it lies in, then what that was made
    // from.
    _watched: Watched,
    object: Object,
    _umem: Umem,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only kept"))]
    memory: QueueMemory,
    _uar: Arc<Uar>,
    device: Device,
    handle: Handle<ibgda_cq>,
    taken: AtomicBool,
}

impl CompletionQueue {
    pub(crate) fn create(context: &Context, entries: u32) -> Result<Self> {
        let log = depth("CQ", entries, 1)?;
        let ring_bytes = entries as usize * IBGDA_CQE_BYTES as usize;
        // The doorbell record has a cache line of its own behind the ring.
        let memory = QueueMemory::alloc(context.session(), ring_bytes + 64)?;
        let ring = memory.address();
        for entry in 0..entries as usize {
            // SAFETY: inside the ring; nobody else knows the memory yet.
            unsafe {
                ring.add(entry * IBGDA_CQE_BYTES as usize + 63)
                    .write(CQE_NEVER_WRITTEN)
            };
        }
        // SAFETY: the UMEM is dropped before the memory (field order), and only the queue's protocol touches it.
        let umem = unsafe { Umem::register(context.device(), ring, memory.len()) }?;

        let field = |field: ifc::Field| field.at(ifc::CREATE_CQ_CQC);
        let uar = Arc::clone(context.uar());
        let command = Block::<{ ifc::CREATE_CQ_BYTES }>::command(opcode::CREATE_CQ)
            .set(create_cq::UMEM_ID, umem.id().into())
            .set(create_cq::UMEM_OFFSET, 0)
            .set(create_cq::UMEM_VALID, 1)
            .set(field(cqc::CQE_SIZE), 0)
            .set(field(cqc::LOG_SIZE), log.into())
            .set(field(cqc::UAR_PAGE), uar.page_id().into())
            .set(field(cqc::EQN), context.device().eqn()?.into())
            .set(field(cqc::LOG_PAGE_SIZE), 0)
            .set(field(cqc::DBR_UMEM_VALID), 1)
            .set(field(cqc::DBR_UMEM_ID), umem.id().into())
            .set(field(cqc::DBR_ADDR), ring_bytes as u64);
        let object = Object::create(
            context.device(),
            &format!("CREATE_CQ ({entries} entries)"),
            &command,
        )?;

        let handle = Handle::new(ibgda_cq {
            ring,
            // SAFETY: the record lies behind the ring in the same memory.
            doorbell_record: unsafe { ring.add(ring_bytes) }.cast(),
            status_page: context.session().status_page(),
            number: object.number(),
            depth: entries,
            generation: context.generation(),
            ..Default::default()
        });
        // SAFETY: the handle is dropped after what watches it (field order).
        let watched = unsafe { context.monitor().add(handle.as_ptr(), object.number()) };
        Ok(Self {
            _watched: watched,
            object,
            _umem: umem,
            memory,
            _uar: uar,
            device: context.device().clone(),
            handle,
            taken: AtomicBool::new(false),
        })
    }

    /// CQ number.
    pub fn number(&self) -> u32 {
        self.object.number()
    }

    /// Completions it holds.
    pub fn depth(&self) -> u32 {
        // SAFETY: set at creation and constant.
        unsafe { (*self.handle.as_ptr()).depth }
    }

    /// What a kernel polls. Valid as long as the queue lives; one thread at a time may use it.
    pub fn device_handle(&self) -> *mut ibgda_cq {
        self.handle.as_ptr()
    }

    /// The first error that a poller latched, if any yet. Its sentence is its `Display`.
    pub fn error(&self) -> Option<ibgda_error> {
        // SAFETY: the handle lives as long as `self`; a poller may write the record meanwhile, so that it is read once, and
        // its status, written with the rest, decides.
        let error = unsafe { ptr::read_volatile(&raw const (*self.handle.as_ptr()).error) };
        (error.status != 0).then_some(error)
    }

    /// Gives the queue to a work queue of the same device, which must be the first, of a QP that is used in `mode`.
    pub(crate) fn take(
        &self,
        device: &Device,
        what: &str,
        work_depth: u32,
        mode: u32,
    ) -> Result<()> {
        if !self.device.is(device) {
            return Err(Error::argument(
                format!(
                    "{what} with CQ {:#x} of {}",
                    self.number(),
                    self.device.name()
                ),
                "this CQ was made from another context, or before the NIC was lost",
                "create the CQ from the context that the QP is made from",
            ));
        }
        if self.depth() < work_depth {
            return Err(Error::argument(
                format!(
                    "{what} of depth {work_depth} with a CQ of {} entries",
                    self.depth()
                ),
                "completions of a full queue would overrun the CQ",
                format!("create the CQ with at least {work_depth} entries"),
            ));
        }
        if self.taken.swap(true, Ordering::Relaxed) {
            return Err(Error::new(
                crate::error::Source::Argument,
                libc::EBUSY,
                format!("{what} with CQ {:#x}", self.number()),
                "this CQ serves a work queue, or has served one",
                "create one CQ for each send queue and each receive queue",
            ));
        }
        // SAFETY: no kernel uses the handle: the work queue that took this CQ is being made.
        unsafe { (*self.handle.as_ptr()).mode = mode };
        Ok(())
    }

    /// The word of the send queue that an error of this queue is to clear.
    pub(crate) fn stop_at_errors(&self, limit: *mut u64) {
        // SAFETY: no kernel uses the handle: the work queue that took this CQ is being made, or is gone.
        unsafe { (*self.handle.as_ptr()).limit = limit };
    }

    pub(crate) fn give_back(&self) {
        self.stop_at_errors(ptr::null_mut());
        self.taken.store(false, Ordering::Relaxed);
    }

    /// Its memory, for a GPU to reach.
    #[cfg(feature = "cuda")]
    pub(crate) fn memory(&self) -> &QueueMemory {
        &self.memory
    }

    pub(crate) fn handle_ptr(&self) -> *mut ibgda_cq {
        self.handle.as_ptr()
    }
}
