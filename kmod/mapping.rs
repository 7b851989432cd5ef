// SPDX-License-Identifier: GPL-2.0

//! Mappings of a session's file: doorbells, queue memory, the status page.
//!
//! Page-table entries are made by faults only (and by POPULATE, which is a fault asked for), under the session's lock: an
//! entry that `mmap` itself made could be missed by a zap that runs before the mapping is listed.

use crate::{
    abi::{
        glue,
        uapi::*, //
    },
    session::{
        Object,
        Session, //
    }, //
};
use kernel::{
    bindings,
    error::code::*,
    mm::virt::{
        flags,
        VmaNew, //
    },
    page::{
        PAGE_SHIFT,
        PAGE_SIZE, //
    },
    prelude::*,
    sync::{
        Arc,
        ArcBorrow, //
    },
    types::ForeignOwnable, //
};

/// Makes a table of functions shareable between threads.
struct Shared<T>(T);

// SAFETY: Function pointers, never changed.
unsafe impl<T> Sync for Shared<T> {}

/// No `access`: debuggers and `/proc/<pid>/mem` do not read registers. No `open`: there are no copies.
static OPERATIONS: Shared<bindings::vm_operations_struct> =
    Shared(bindings::vm_operations_struct {
        fault: Some(fault),
        may_split: Some(may_split),
        mremap: Some(mremap),
        ..pin_init::zeroed()
    });

/// # Safety
///
/// For the mm core: a mapping that [`mmap`] set up.
unsafe extern "C" fn may_split(_vma: *mut bindings::vm_area_struct, _address: usize) -> c_int {
    EINVAL.to_errno()
}

/// # Safety
///
/// For the mm core: a mapping that [`mmap`] set up.
unsafe extern "C" fn mremap(_vma: *mut bindings::vm_area_struct) -> c_int {
    EINVAL.to_errno()
}

/// # Safety
///
/// For the mm core: a fault in a mapping that [`mmap`] set up.
unsafe extern "C" fn fault(vmf: *mut bindings::vm_fault) -> bindings::vm_fault_t {
    // SAFETY: A valid fault, with its mapping locked.
    unsafe {
        let place = &(*vmf).__bindgen_anon_1;
        let session = session_of(place.vma);
        insert(&session, place.vma, place.address)
    }
}

/// # Safety
///
/// A mapping that [`mmap`] set up, which holds the file for as long as the result is used.
unsafe fn session_of<'a>(vma: *mut bindings::vm_area_struct) -> ArcBorrow<'a, Session> {
    // SAFETY: The file is not released before its mappings are gone, and has an `Arc<Session>` until then.
    unsafe { <Arc<Session> as ForeignOwnable>::borrow((*(*vma).vm_file).private_data) }
}

/// Makes the page-table entry for an address.
///
/// # Safety
///
/// `vma` must be a mapping of the session's, set up by [`mmap`] and locked, and `address` page-aligned and in it.
unsafe fn insert(
    session: &Session,
    vma: *mut bindings::vm_area_struct,
    address: usize,
) -> bindings::vm_fault_t {
    const SIGBUS: bindings::vm_fault_t = bindings::vm_fault_reason_VM_FAULT_SIGBUS;

    // SAFETY: The caller's promise.
    let (mm, page, start, prot) = unsafe {
        (
            (*vma).vm_mm,
            (*vma).vm_pgoff as u64,
            vma_start(vma),
            (*vma).vm_page_prot,
        )
    };
    if !core::ptr::eq(mm, session.owner.mm().as_raw()) {
        return SIGBUS;
    }
    // SAFETY: The mapping is MIXEDMAP, of this object; the page is valid. (The closure is called for such only.)
    let insert_page = |page| match unsafe { bindings::vm_insert_page(vma, address, page) } {
        0 => bindings::vm_fault_reason_VM_FAULT_NOPAGE,
        // Another thread was first.
        error if error == EBUSY.to_errno() => bindings::vm_fault_reason_VM_FAULT_NOPAGE,
        error if error == ENOMEM.to_errno() => bindings::vm_fault_reason_VM_FAULT_OOM,
        _ => SIGBUS,
    };
    if page == session.status_page {
        return insert_page(session.status_memory());
    }
    let inner = session.lock();
    match inner.objects.get(&page).map(|named| &named.object) {
        Some(Object::Doorbell(doorbell)) => {
            let pfn = if doorbell.revoked {
                session.sink.pfn()
            } else {
                (doorbell.grant.page >> PAGE_SHIFT) as usize
            };
            // SAFETY: The mapping is PFNMAP and shared. Its page is the owner's until it is dead; the sink page is the
            // session's, which the mapping's file holds.
            unsafe { bindings::vmf_insert_pfn_prot(vma, address, pfn, prot) }
        }
        Some(Object::Queue(queue)) => match queue.page((address - start) >> PAGE_SHIFT) {
            Some(page) => insert_page(page),
            None => SIGBUS,
        },
        None => SIGBUS,
    }
}

/// # Safety
///
/// `vma` must be valid and locked.
unsafe fn vma_start(vma: *mut bindings::vm_area_struct) -> usize {
    // SAFETY: The caller's promise.
    unsafe { (*vma).__bindgen_anon_1.__bindgen_anon_1.vm_start }
}

/// What is at a place in the file.
enum Kind {
    Doorbell(u32),
    Queue(u32),
    Status,
}

/// # Safety
///
/// The mapping is being set up by this thread.
unsafe fn set_type(vma: *mut bindings::vm_area_struct, mem_type: u32) {
    // SAFETY: The caller's promise.
    unsafe {
        let prot = &mut (*vma).vm_page_prot.pgprot;
        *prot = glue::ibgda_c_pgprot(*prot, mem_type);
    }
}

/// `mmap`.
pub(crate) fn mmap(session: &Session, vma: &VmaNew) -> Result {
    session.owner.check()?;
    let raw = vma.as_ptr();
    // SAFETY: The mapping is being set up by this thread.
    let page = unsafe { (*raw).vm_pgoff } as u64;
    let (kind, pages) = if page == session.status_page {
        (Kind::Status, 1)
    } else {
        let inner = session.lock();
        match inner.objects.get(&page).map(|named| &named.object) {
            Some(Object::Doorbell(doorbell)) => (Kind::Doorbell(doorbell.grant.mem_type), 1),
            Some(Object::Queue(queue)) => (Kind::Queue(queue.mem_type()), queue.pages()),
            None => return Err(EINVAL),
        }
    };
    if vma.end() - vma.start() != pages * PAGE_SIZE {
        return Err(EINVAL);
    }
    // A private writable mapping would be a copy. A file opened for reading only has no VM_SHARED, but what it maps then
    // cannot become writable either.
    if vma.flags() & flags::MAYSHARE == 0 {
        return Err(EINVAL);
    }
    vma.try_clear_mayexec()?;
    vma.set_dontexpand();
    vma.set_dontcopy();
    vma.set_dontdump();
    match kind {
        Kind::Doorbell(mem_type) => {
            if vma.flags() & flags::SHARED == 0 {
                return Err(EINVAL);
            }
            vma.set_io();
            // SAFETY: The mapping is being set up by this thread, and is shared, as PFNMAP wants it.
            unsafe {
                (*raw).__bindgen_anon_2.vm_flags |= flags::PFNMAP;
                set_type(raw, mem_type);
            }
        }
        Kind::Queue(mem_type) => {
            if vma.flags() & flags::SHARED == 0 {
                return Err(EINVAL);
            }
            vma.set_mixedmap();
            // SAFETY: The mapping is being set up by this thread.
            unsafe { set_type(raw, mem_type) };
        }
        Kind::Status => {
            vma.try_clear_maywrite()?;
            vma.set_mixedmap();
        }
    }
    // SAFETY: The mapping is being set up by this thread.
    unsafe { (*raw).vm_ops = &OPERATIONS.0 };
    Ok(())
}

/// `IBGDA_IOC_POPULATE`.
pub(crate) fn populate(session: &Session, argument: &ibgda_populate) -> Result {
    let page = {
        let inner = session.lock();
        let (page, revoked) = inner
            .objects
            .iter()
            .find_map(|(page, named)| match &named.object {
                Object::Doorbell(doorbell) if named.handle == argument.handle => {
                    Some((*page, doorbell.revoked))
                }
                _ => None,
            })
            .ok_or(ENOENT)?;
        if revoked {
            return Err(ENOLINK);
        }
        page
    };
    let current = kernel::current!();
    let mmap_lock = current.mm().ok_or(EFAULT)?.mmap_read_lock();
    let address = usize::try_from(argument.address).map_err(|_| EFAULT)?;
    let vma = mmap_lock.vma_lookup(address).ok_or(EFAULT)?.as_ptr();
    // SAFETY: The mapping is locked. That it is one of ours is known from its operations, which nobody else has.
    let mine = unsafe {
        core::ptr::eq((*vma).vm_ops, &OPERATIONS.0)
            && core::ptr::eq(&*session_of(vma), session)
            && (*vma).vm_pgoff as u64 == page
            && vma_start(vma) == address
    };
    if !mine {
        return Err(EFAULT);
    }
    // SAFETY: As checked.
    match unsafe { insert(session, vma, address) } {
        bindings::vm_fault_reason_VM_FAULT_NOPAGE => {}
        bindings::vm_fault_reason_VM_FAULT_OOM => return Err(ENOMEM),
        _ => return Err(EFAULT),
    }
    drop(mmap_lock);
    // A loss since the first look leaves the sink page there.
    let inner = session.lock();
    match inner.objects.get(&page).map(|named| &named.object) {
        Some(Object::Doorbell(doorbell)) if !doorbell.revoked => Ok(()),
        Some(_) => Err(ENOLINK),
        None => Err(ENOENT),
    }
}
