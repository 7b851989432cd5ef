// SPDX-License-Identifier: MIT OR Apache-2.0
//! What queues lie in: memory of the broker's, or memory that the application exports as a dma-buf, of a GPU above all.

use crate::{
    context::Context,
    error::{Error, Result, Source},
    memory::PAGE_BYTES,
    nic::{Session, Umem},
    queue_pool::QueueSlice,
};
#[cfg(feature = "cuda")]
use crate::{
    cuda::{DmaBuf, Gpu},
    processor::Processor as _,
};
use std::{
    fmt,
    ops::Range,
    os::fd::{AsFd, OwnedFd},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// Where the memory is written before the queue is made.
enum Writer {
    /// It is mapped in this process.
    Mapped(*mut u8),
    #[cfg(feature = "cuda")]
    Gpu(crate::cuda::DeviceMemory),
}

// SAFETY: the pointer is used by `fill` only, whose caller has the memory for itself.
unsafe impl Send for Writer {}
// SAFETY: as above.
unsafe impl Sync for Writer {}

/// Memory for one queue, exported as a dma-buf: the NIC reaches it through that, and who posts and polls by `address`. So
/// a GPU's queues lie in the GPU's memory, where it reads them fastest. See
/// [`QueuePairOptions::memory`](crate::QueuePairOptions::memory).
pub struct ExportedMemory {
    file: OwnedFd,
    offset: u64,
    bytes: usize,
    address: u64,
    writer: Writer,
    used: AtomicBool,
}

impl fmt::Debug for ExportedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ExportedMemory({} bytes at {:#x})",
            self.bytes, self.address
        )
    }
}

impl ExportedMemory {
    /// `bytes` bytes from byte `offset` of a dma-buf on, which this process has mapped at `address` for its processors to
    /// read and write: for queues of threads. Offset, address and length are multiples of 4096.
    ///
    /// # Errors
    /// `EINVAL`: they are not, the address or the length is 0, or the address is one of a GPU's memory.
    ///
    /// # Safety
    /// Those bytes of the dma-buf are mapped there for reading and writing until the value and the queue in it are gone,
    /// and nobody else uses them.
    pub unsafe fn mapped(
        file: OwnedFd,
        offset: u64,
        address: *mut u8,
        bytes: usize,
    ) -> Result<Arc<Self>> {
        let start = address.expose_provenance() as u64;
        let whole = |number: u64| number % PAGE_BYTES == 0;
        if bytes == 0 || start == 0 || ![offset, start, bytes as u64].into_iter().all(whole) {
            return Err(Error::argument(
                format!(
                    "queue memory: {bytes} bytes at {start:#x}, offset {offset:#x} of a dma-buf"
                ),
                "address, offset and length must be multiples of 4096, and address and length not zero",
                "round up what memory_bytes of the queue's options asks for",
            ));
        }
        #[cfg(feature = "cuda")]
        if crate::cuda::is_gpu_memory(start)? {
            return Err(Error::argument(
                format!("queue memory at {start:#x}"),
                "that is memory of a GPU, which no thread of the host can write",
                "ExportedMemory::on_gpu (ibgda_alloc_queue_memory) allocates and exports a GPU's",
            ));
        }
        Ok(Arc::new(Self {
            file,
            offset,
            bytes,
            address: start,
            writer: Writer::Mapped(address),
            used: AtomicBool::new(false),
        }))
    }

    /// Allocates at least `bytes` bytes of a GPU's memory and exports them.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: the GPU exports none; CUDA's.
    #[cfg(feature = "cuda")]
    pub fn on_gpu(gpu: &Gpu, bytes: usize) -> Result<Arc<Self>> {
        let page = PAGE_BYTES as usize;
        let whole = bytes.max(1).checked_next_multiple_of(page);
        let bytes = whole.ok_or_else(|| {
            Error::argument(
                format!("queue memory of {bytes} bytes on {}", gpu.name()),
                "no GPU has so much",
                "memory_bytes of the queue's options says how many a queue takes",
            )
        })?;
        let memory = crate::cuda::DeviceMemory::alloc_pages(gpu, bytes)?;
        let address = memory.address();
        let dmabuf = DmaBuf::export(address, bytes)?;
        Ok(Arc::new(Self {
            file: dmabuf.into_file(),
            offset: 0,
            bytes,
            address,
            writer: Writer::Gpu(memory),
            used: AtomicBool::new(false),
        }))
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Never: there is at least a page.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Where who posts and polls sees it.
    pub fn address(&self) -> u64 {
        self.address
    }

    fn fill(&self, from: usize, bytes: usize, value: u8) -> Result<()> {
        debug_assert!(from + bytes <= self.bytes);
        match &self.writer {
            Writer::Mapped(address) => {
                // SAFETY: inside the mapping, which is this value's by the contract of `mapped`, and no queue is in it yet.
                unsafe { ptr::write_bytes(address.add(from), value, bytes) };
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Writer::Gpu(memory) => memory.fill(from, bytes, value),
        }
    }
}

/// The use of exported memory by one queue, which ends with the queue, or with the attempt to make it.
#[derive(Debug)]
pub(crate) struct Claim(Arc<ExportedMemory>);

impl Claim {
    /// `None`: another queue has it.
    fn on(memory: &Arc<ExportedMemory>) -> Option<Self> {
        let taken = memory.used.swap(true, Ordering::AcqRel);
        (!taken).then(|| Self(Arc::clone(memory)))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.0.used.store(false, Ordering::Release);
    }
}

/// What one queue lies in.
#[derive(Debug)]
pub(crate) enum Place {
    Broker(QueueSlice),
    Exported {
        // Before what it names.
        umem: Umem,
        memory: Claim,
        /// Whose status page the queue's handle names.
        _session: Session,
    },
}

impl Place {
    /// `bytes` bytes, zeroed but for the first `ring` bytes of a ring of completions, in which none is valid.
    pub(crate) fn take(
        context: &Context,
        exported: Option<&Arc<ExportedMemory>>,
        bytes: usize,
        ring: usize,
    ) -> Result<Self> {
        /// A completion of kind 15, invalid, whoever looks at it.
        const INVALID: u8 = 0xff;
        let Some(exported) = exported else {
            let memory = context.queue_pool().take(bytes)?;
            // SAFETY: inside the memory, which nobody else knows yet.
            unsafe { ptr::write_bytes(memory.address(), INVALID, ring) };
            return Ok(Self::Broker(memory));
        };
        let what = || format!("a queue of {bytes} bytes in {exported:?}");
        if exported.bytes < bytes {
            return Err(Error::argument(
                what(),
                "it does not fit",
                "memory_bytes of the queue's options says how many it takes",
            ));
        }
        let Some(memory) = Claim::on(exported) else {
            return Err(Error::new(
                Source::Argument,
                libc::EBUSY,
                what(),
                "another queue lies in it",
                "make memory for each queue",
            ));
        };
        exported.fill(0, exported.bytes, 0)?;
        exported.fill(0, ring, INVALID)?;
        let (file, offset) = (exported.file.as_fd(), exported.offset);
        Ok(Self::Exported {
            umem: Umem::of_dmabuf(context.device(), file, offset, exported.bytes)?,
            memory,
            _session: context.session().clone(),
        })
    }

    /// Where who posts and polls sees it.
    pub(crate) fn address(&self) -> *mut u8 {
        match self {
            Self::Broker(memory) => memory.address(),
            Self::Exported { memory, .. } => {
                ptr::with_exposed_provenance_mut(memory.0.address as usize)
            }
        }
    }

    /// The UMEM that it lies in.
    pub(crate) fn umem_id(&self) -> u32 {
        match self {
            Self::Broker(memory) => memory.umem_id(),
            Self::Exported { umem, .. } => umem.id(),
        }
    }

    /// Where in the UMEM it begins.
    pub(crate) fn umem_offset(&self) -> u64 {
        match self {
            Self::Broker(memory) => memory.umem_offset(),
            Self::Exported { .. } => 0,
        }
    }

    /// Its memory of the host, for a GPU to reach; `None`: it is exported.
    pub(crate) fn of_host(&self) -> Option<&QueueSlice> {
        match self {
            Self::Broker(memory) => Some(memory),
            Self::Exported { .. } => None,
        }
    }

    /// The exported memory's addresses on the processor of this name, whose memory it is; `None`: it is of the host.
    pub(crate) fn of_processor(&self, processor: &str) -> Result<Option<Range<u64>>> {
        match self {
            Self::Broker(_) => Ok(None),
            Self::Exported {
                memory: Claim(memory),
                ..
            } => match &memory.writer {
                #[cfg(feature = "cuda")]
                Writer::Gpu(of) if of.gpu().name() == processor => {
                    Ok(Some(memory.address..memory.address + memory.bytes as u64))
                }
                _ => Err(Error::argument(
                    format!("a queue in {memory:?}, for {processor}"),
                    "that is no memory of its own",
                    "make it with ExportedMemory::on_gpu (ibgda_alloc_queue_memory)",
                )),
            },
        }
    }
}
