// SPDX-License-Identifier: GPL-2.0

//! Queue memory: zeroed pages that stay where they are, for work queues, completion queues and doorbell records.
//!
//! They are ordinary pages in an ordinary mapping, so that mlx5's UMEM registration and CUDA's host registration both
//! accept it; either may outlive our handle, and then keeps the pages by its own references.
//!
//! Uncacheable and write-combining memory are so in the kernel's own mapping too, so that no page ever has two types. It
//! becomes write-back again when it is given back, after the last mapping of it by user space is gone.

use crate::{
    abi::{
        glue,
        uapi::*, //
    },
    session::{
        new_pages,
        Object,
        Reservation,
        Session, //
    }, //
};
use kernel::{
    bindings,
    error::{
        code::*,
        to_result, //
    },
    mm::{
        Mm,
        MmWithUser, //
    },
    page::{
        PAGE_SHIFT,
        PAGE_SIZE, //
    },
    prelude::*,
    sync::{
        aref::ARef,
        Arc, //
    }, //
};

/// Bytes of one queue memory.
pub(crate) const MAX_BYTES: u64 = 64 << 20;

/// Pages that count against the owner's `RLIMIT_MEMLOCK`.
struct LockedPages {
    mm: ARef<Mm>,
    count: usize,
}

impl LockedPages {
    /// `EDQUOT`: over the limit.
    fn charge(mm: &Mm, count: usize) -> Result<Self> {
        // SAFETY: The caller's own address space.
        match unsafe { bindings::account_locked_vm(mm.as_raw(), count, true) } {
            0 => Ok(Self {
                mm: ARef::from(mm),
                count,
            }),
            _ => Err(EDQUOT),
        }
    }
}

impl Drop for LockedPages {
    fn drop(&mut self) {
        // Gone with the process, when that is.
        if let Some(mm) = self.mm.mmget_not_zero() {
            // SAFETY: The address space is alive, and was charged with this count.
            unsafe { bindings::account_locked_vm(mm.as_raw(), self.count, false) };
            // The last user may not be torn down here.
            drop(MmWithUser::into_mmput_async(mm));
        }
    }
}

/// As `ibgda_info` has it.
pub(crate) const FEATURES: u64 = if cfg!(CONFIG_X86) {
    IBGDA_FEATURE_QUEUE_UC as u64 | IBGDA_FEATURE_QUEUE_WC as u64
} else {
    0
};

/// See the module's documentation.
pub(crate) struct Queue {
    pages: KVVec<*mut bindings::page>,
    mem_type: u32,
    _locked: LockedPages,
}

// SAFETY: The pages are ours, and pages may be used from any thread.
unsafe impl Send for Queue {}
// SAFETY: As above.
unsafe impl Sync for Queue {}

impl Queue {
    fn new(mm: &Mm, count: usize, node: i32, mem_type: u32) -> Result<Self> {
        let locked = LockedPages::charge(mm, count)?;
        let mut queue = Self {
            pages: KVVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?,
            mem_type: IBGDA_MEM_WB,
            _locked: locked,
        };
        // What a user asks for must not have the kernel kill processes for it.
        let flags = bindings::GFP_KERNEL_ACCOUNT
            | bindings::__GFP_ZERO
            | bindings::__GFP_NOWARN
            | 1 << bindings::___GFP_RETRY_MAYFAIL_BIT;
        for _ in 0..count {
            let mut page = core::ptr::null_mut();
            // SAFETY: The node has memory, or is none; there is room for one page.
            unsafe {
                if node < 0 {
                    page = bindings::alloc_pages(flags, 0);
                } else {
                    bindings::alloc_pages_bulk_noprof(
                        flags,
                        node,
                        core::ptr::null_mut(),
                        1,
                        &mut page,
                    );
                }
            }
            if page.is_null() {
                return Err(ENOMEM);
            }
            queue.pages.push(page, GFP_KERNEL_ACCOUNT)?;
        }
        if mem_type != IBGDA_MEM_WB {
            queue.set_type(mem_type)?;
            queue.mem_type = mem_type;
        }
        Ok(queue)
    }

    /// Of all pages, or of none. `EOPNOTSUPP`: the architecture or its settings do not have the type.
    fn set_type(&mut self, mem_type: u32) -> Result {
        // SAFETY: The pages are ours, and user space maps none of them now.
        to_result(unsafe {
            glue::ibgda_c_set_pages_type(
                self.pages.as_mut_ptr(),
                self.pages.len() as c_int,
                mem_type,
            )
        })
    }

    /// The type in force.
    pub(crate) fn mem_type(&self) -> u32 {
        self.mem_type
    }

    /// How many.
    pub(crate) fn pages(&self) -> usize {
        self.pages.len()
    }

    /// One of them.
    pub(crate) fn page(&self, index: usize) -> Option<*mut bindings::page> {
        self.pages.get(index).copied()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.mem_type != IBGDA_MEM_WB && self.set_type(IBGDA_MEM_WB).is_err() {
            // Who gets such a page next would be slow and not know why.
            pr_warn!("{} pages stay uncacheable and are lost\n", self.pages.len());
            return;
        }
        for &page in &self.pages {
            // SAFETY: Our reference; mappings and pins have their own.
            unsafe { bindings::__free_pages(page, 0) };
        }
    }
}

/// `IBGDA_IOC_QUEUE_ALLOC`.
pub(crate) fn alloc(session: &Arc<Session>, argument: &mut ibgda_queue_alloc) -> Result {
    let nic = session.ready_nic()?;
    if argument.length == 0
        || argument.length % PAGE_SIZE as u64 != 0
        || argument.length > MAX_BYTES
    {
        return Err(EINVAL);
    }
    match argument.mem_type {
        IBGDA_MEM_WB => {}
        IBGDA_MEM_UC | IBGDA_MEM_WC if FEATURES != 0 => {}
        IBGDA_MEM_UC | IBGDA_MEM_WC => return Err(EOPNOTSUPP),
        _ => return Err(EINVAL),
    }
    let node = match argument.node {
        -1 => nic.node(),
        // SAFETY: Any number will do.
        node if unsafe { glue::ibgda_c_node_has_memory(node) } => node,
        _ => return Err(EINVAL),
    };

    let count = (argument.length >> PAGE_SHIFT) as usize;
    let queue = Queue::new(session.owner.mm(), count, node, argument.mem_type)?;
    let page = new_pages(count as u64)?;
    let reservation = Reservation::new(GFP_KERNEL_ACCOUNT)?;
    argument.handle = session.insert(reservation, page, Object::Queue(queue))?;
    argument.mmap_offset = page << PAGE_SHIFT;
    Ok(())
}
