// SPDX-License-Identifier: GPL-2.0

//! Doorbell pages: imported from the dma-buf that uverbs exports for a UAR.
//!
//! The importer is the NIC's own PCI function, so that the DMA address it is given tells where in the NIC's BAR0 the page
//! lies. The exporter waits for its importers when a UAR is destroyed, a context closed or a device taken away; so the
//! invalidation unmaps at once, and nothing that can be in its way waits for anything itself.

use crate::{
    abi::{
        glue,
        uapi::*, //
    },
    decisions::life::Reason,
    grant::{
        self,
        Grant, //
    },
    observe,
    pci::Function,
    session::{
        new_pages,
        Object,
        Reservation,
        Session, //
    }, //
};
use core::{
    cell::UnsafeCell,
    ptr::NonNull, //
};
use kernel::{
    bindings,
    error::{
        code::*,
        from_err_ptr, //
    },
    fs::{
        File,
        LocalFile, //
    },
    page::{
        PAGE_SHIFT,
        PAGE_SIZE, //
    },
    prelude::*,
    sync::{
        aref::ARef,
        atomic::{
            Acquire,
            Atomic,
            Release, //
        },
        Arc, //
    }, //
};

/// Features for `IBGDA_IOC_INFO`.
pub(crate) const FEATURES: u64 =
    IBGDA_FEATURE_DOORBELL_UC as u64 | IBGDA_FEATURE_DOORBELL_WC as u64;

/// A doorbell of a session: a grant that may be mapped.
pub(crate) struct Doorbell {
    pub(crate) grant: Arc<Grant>,
    /// Mappings now lead to the sink page.
    pub(crate) revoked: bool,
}

/// A reference to a dma-buf.
struct DmaBuf(NonNull<bindings::dma_buf>);

// SAFETY: A dma-buf is reference counted, and what we read of it never changes.
unsafe impl Send for DmaBuf {}
// SAFETY: As above.
unsafe impl Sync for DmaBuf {}

impl DmaBuf {
    /// `EBADF`: not a descriptor, or not of a dma-buf.
    fn get(fd: i32) -> Result<Self> {
        // SAFETY: No requirements.
        let dmabuf = from_err_ptr(unsafe { bindings::dma_buf_get(fd) }).map_err(|_| EBADF)?;
        NonNull::new(dmabuf).map(Self).ok_or(EBADF)
    }

    fn as_ptr(&self) -> *mut bindings::dma_buf {
        self.0.as_ptr()
    }

    fn size(&self) -> usize {
        // SAFETY: We hold a reference.
        unsafe { (*self.as_ptr()).size }
    }

    /// Runs `action` with the reservation lock held.
    fn with_reservation<T>(&self, action: impl FnOnce() -> T) -> T {
        // SAFETY: We hold a reference to the dma-buf. Without a context the lock cannot fail.
        unsafe { bindings::dma_resv_lock((*self.as_ptr()).resv, core::ptr::null_mut()) };
        let result = action();
        // SAFETY: Locked above.
        unsafe { bindings::dma_resv_unlock((*self.as_ptr()).resv) };
        result
    }
}

impl Drop for DmaBuf {
    fn drop(&mut self) {
        // SAFETY: The reference is ours.
        unsafe { bindings::dma_buf_put(self.as_ptr()) };
    }
}

/// An attachment to a UAR's dma-buf, mapped until it is invalidated, and the two files that keep firmware from handing the
/// UAR out anew: the dma-buf keeps the UAR, and the uverbs file keeps its context from being torn down.
pub(crate) struct Import {
    pub(crate) session: Arc<Session>,
    nic: Function,
    /// The doorbell's page number in the session's file.
    page: u64,
    /// Set by the invalidation.
    revoked: Atomic<bool>,
    /// Written once, by the thread that creates the import; null when it did not get so far.
    attachment: UnsafeCell<*mut bindings::dma_buf_attachment>,
    /// Protected by the reservation lock; null when not mapped.
    table: UnsafeCell<*mut bindings::sg_table>,
    dmabuf: DmaBuf,
    _uverbs: ARef<File>,
}

// SAFETY: The cells are protected as their comments say.
unsafe impl Send for Import {}
// SAFETY: As above.
unsafe impl Sync for Import {}

static IMPORTER: bindings::dma_buf_attach_ops = bindings::dma_buf_attach_ops {
    allow_peer2peer: true,
    invalidate_mappings: Some(invalidate),
};

/// The exporter takes its page back, and waits until we have unmapped it.
///
/// # Safety
///
/// For the dma-buf core: an attachment that [`Import::new`] made, with the reservation lock held.
unsafe extern "C" fn invalidate(attachment: *mut bindings::dma_buf_attachment) {
    // SAFETY: The import lives until the attachment is detached.
    let import = unsafe { &*(*attachment).importer_priv.cast::<Import>() };
    import.revoked.store(true, Release);
    observe::INVALIDATED.count();
    // The ib_client tells more exactly, before or after this.
    let leaves = import.nic.is_disconnected() || import.nic.rdma_function_leaves();
    let lost = leaves.then_some(Reason::NicReset);
    import.session.doorbell_invalidated(import.page, lost);
    // SAFETY: The reservation lock is held.
    unsafe { import.unmap(attachment) };
}

impl Import {
    fn new(
        session: &Arc<Session>,
        nic: Function,
        page: u64,
        dmabuf: DmaBuf,
        uverbs: ARef<File>,
    ) -> Result<Arc<Self>> {
        let import = Arc::new(
            Self {
                session: session.clone(),
                nic,
                page,
                revoked: Atomic::new(false),
                attachment: UnsafeCell::new(core::ptr::null_mut()),
                table: UnsafeCell::new(core::ptr::null_mut()),
                dmabuf,
                _uverbs: uverbs,
            },
            GFP_KERNEL_ACCOUNT,
        )?;
        // SAFETY: Both are valid, and the import stays where it is until it has detached.
        let attachment = from_err_ptr(unsafe {
            bindings::dma_buf_dynamic_attach(
                import.dmabuf.as_ptr(),
                import.nic.as_raw_device(),
                &IMPORTER,
                Arc::as_ptr(&import).cast_mut().cast(),
            )
        })?;
        // SAFETY: Nobody else reads it before the import is dropped.
        unsafe { *import.attachment.get() = attachment };
        Ok(import)
    }

    /// Maps the page for the NIC itself; its DMA address.
    fn map(&self) -> Result<u64> {
        self.dmabuf.with_reservation(|| {
            // SAFETY: `new` has attached.
            let attachment = unsafe { *self.attachment.get() };
            // SAFETY: The reservation lock is held.
            let table = from_err_ptr(unsafe {
                bindings::dma_buf_map_attachment(
                    attachment,
                    bindings::dma_data_direction::DMA_BIDIRECTIONAL,
                )
            })?;
            // SAFETY: The reservation lock is held.
            unsafe { *self.table.get() = table };
            // SAFETY: A mapped table has at least one entry.
            let (entries, address, length) = unsafe {
                let first = (*table).sgl;
                (
                    (*table).nents,
                    bindings::sg_dma_address(first),
                    bindings::sg_dma_len(first),
                )
            };
            if entries != 1 || length as usize != PAGE_SIZE {
                return Err(EINVAL);
            }
            Ok(address)
        })
    }

    /// # Safety
    ///
    /// `attachment` must be ours, and the reservation lock held.
    unsafe fn unmap(&self, attachment: *mut bindings::dma_buf_attachment) {
        // SAFETY: The reservation lock is held.
        let table = unsafe { self.table.get().replace(core::ptr::null_mut()) };
        if !table.is_null() {
            // SAFETY: The table is the attachment's, mapped in this direction and not unmapped yet.
            unsafe {
                bindings::dma_buf_unmap_attachment(
                    attachment,
                    table,
                    bindings::dma_data_direction::DMA_BIDIRECTIONAL,
                )
            };
        }
    }

    pub(crate) fn is_revoked(&self) -> bool {
        self.revoked.load(Acquire)
    }

    /// Where in BAR0 of the NIC the DMA address lies: its offset and CPU physical address.
    fn locate(&self, address: u64) -> Result<(u64, u64)> {
        let bar = self.nic.bar0().ok_or(ERANGE)?;
        // SAFETY: The device is valid; a domain lives as long as the device has it, and its driver is bound.
        let translated = unsafe {
            let domain = bindings::iommu_get_domain_for_dev(self.nic.as_raw_device());
            if domain.is_null() {
                0
            } else {
                bindings::iommu_iova_to_phys(domain, address)
            }
        };
        // Peer to peer below a switch the address is one of the bus, which the IOMMU does not know, or maps to itself; when
        // ACS sends the transaction up, it is the IOMMU's.
        let offset = if translated == 0 || translated == address {
            bar.offset_of_bus_page(address)
        } else {
            bar.offset_of_cpu_page(translated)
        };
        let offset = offset.ok_or(ERANGE)?;
        Ok((offset, bar.cpu_address(offset)))
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        let attachment = *self.attachment.get_mut();
        if attachment.is_null() {
            return;
        }
        self.dmabuf.with_reservation(|| {
            // SAFETY: The reservation lock is held.
            unsafe { self.unmap(attachment) }
        });
        // SAFETY: Attached by `new`, unmapped.
        unsafe { bindings::dma_buf_detach(self.dmabuf.as_ptr(), attachment) };
    }
}

/// A kernel mapping that reserves the memory type of a page for as long as it exists: what x86 then gives to every other
/// mapping of that page.
pub(crate) struct MemoryType(NonNull<c_void>);

// SAFETY: The mapping is never accessed, and may be undone by any thread.
unsafe impl Send for MemoryType {}
// SAFETY: As above.
unsafe impl Sync for MemoryType {}

impl MemoryType {
    /// `EBUSY`: the page has another type already. Whoever maps a page first settles it: for a UAR that is libmlx5, which
    /// maps what it allocates at once, BlueFlame write-combining and all others uncached.
    fn reserve(address: u64, mem_type: u32) -> Result<Self> {
        let map = if mem_type == IBGDA_MEM_WC {
            bindings::ioremap_wc
        } else {
            bindings::ioremap
        };
        // SAFETY: The page lies in BAR0 of a device that has a driver; nothing is accessed through this mapping.
        let mapping = NonNull::new(unsafe { map(address, PAGE_SIZE) }).ok_or(EBUSY)?;
        let this = Self(mapping);
        // SAFETY: Mapped just now.
        let in_force = unsafe { glue::ibgda_c_mem_type(mapping.as_ptr(), mem_type) };
        if in_force == mem_type {
            Ok(this)
        } else {
            Err(EBUSY)
        }
    }
}

impl Drop for MemoryType {
    fn drop(&mut self) {
        // SAFETY: Mapped by `reserve`.
        unsafe { bindings::iounmap(self.0.as_ptr()) };
    }
}

/// The uverbs file behind a descriptor. `EBADF`: none, or of another kind.
fn uverbs_file(fd: i32) -> Result<ARef<File>> {
    let file = LocalFile::fget(u32::try_from(fd).map_err(|_| EBADF)?)?;
    // SAFETY: We hold a reference.
    if !unsafe { glue::ibgda_c_is_uverbs(file.as_ptr()) } {
        return Err(EBADF);
    }
    // SAFETY: An ioctl has no file position of the current thread's in use.
    Ok(unsafe { LocalFile::assume_no_fdget_pos(file) })
}

/// `IBGDA_IOC_DOORBELL_IMPORT`.
pub(crate) fn import(session: &Arc<Session>, argument: &mut ibgda_doorbell_import) -> Result {
    match argument.mem_type {
        IBGDA_MEM_UC | IBGDA_MEM_WC => {}
        IBGDA_MEM_WB => return Err(EOPNOTSUPP),
        _ => return Err(EINVAL),
    }
    let nic = session.ready_nic()?;
    let dmabuf = DmaBuf::get(argument.dmabuf_fd)?;
    let uverbs = uverbs_file(argument.uverbs_fd)?;
    // SAFETY: We hold references to both.
    if !unsafe { glue::ibgda_c_dmabuf_of(dmabuf.as_ptr(), uverbs.as_ptr()) }
        || dmabuf.size() != PAGE_SIZE
    {
        return Err(EINVAL);
    }

    let reservation = Reservation::new(GFP_KERNEL_ACCOUNT)?;
    let page = new_pages(1)?;
    let import = Import::new(session, nic, page, dmabuf, uverbs)?;
    let address = import.map().map_err(|error| {
        if let Err(lost) = session.ready_nic() {
            lost
        } else if error == ENODEV {
            // Revoked: its UAR is destroyed.
            EINVAL
        } else {
            // A page that this NIC cannot even reach is not its own.
            ERANGE
        }
    })?;
    let (bar_offset, physical) = import.locate(address)?;
    let memory_type = MemoryType::reserve(physical, argument.mem_type)?;
    let grant = Arc::new(
        Grant {
            page: physical,
            number: page,
            mem_type: argument.mem_type,
            _memory_type: memory_type,
            import,
        },
        GFP_KERNEL_ACCOUNT,
    )?;
    grant::claim(&grant)?;
    let object = Object::Doorbell(Doorbell {
        grant: grant.clone(),
        revoked: false,
    });
    match session.insert(reservation, page, object) {
        Ok(handle) => {
            argument.handle = handle;
            argument.mmap_offset = page << PAGE_SHIFT;
            argument.bar_offset = bar_offset;
            Ok(())
        }
        Err(error) => {
            // It was never mapped, so no GPU can have it.
            grant::withdraw(&grant);
            Err(error)
        }
    }
}
