// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that the NIC may read and write.

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{
    context::Context,
    error::{Error, Result},
    mapping::Mapping,
    nic::Registration,
    processor::{self, HostKind, HostRange, Processor, Reached},
};
use ibgda_device::abi::ibgda_region;
use ibgda_verbs_sys::ibv_access_flags;
use memmap2::{MmapOptions, MmapRaw};
use std::ptr;
use std::sync::{Arc, Mutex};

/// Registrations begin and end on these: a smaller granule would give the NIC bytes that are not meant.
pub const PAGE_BYTES: u64 = 4096;

bitflags::bitflags! {
    /// What peers may do to a region. The NIC itself, for requests of this side, may always read and write it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Access: u32 {
        /// RDMA READ.
        const READ = 1;
        /// RDMA WRITE.
        const WRITE = 2;
        /// Atomics.
        const ATOMIC = 4;
    }
}

impl Access {
    pub(crate) fn verbs(self) -> ibv_access_flags {
        [
            (Self::READ, ibv_access_flags::IBV_ACCESS_REMOTE_READ),
            (Self::WRITE, ibv_access_flags::IBV_ACCESS_REMOTE_WRITE),
            (Self::ATOMIC, ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC),
        ]
        .into_iter()
        .filter(|(right, _)| self.contains(*right))
        .fold(
            ibv_access_flags::IBV_ACCESS_LOCAL_WRITE,
            |all, (_, flag)| all | flag,
        )
    }
}

/// How to treat a range that does not lie on page boundaries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// Refuse it, with the way to round.
    #[default]
    Exact,
    /// Register whole pages around it, and keep the range's own address and length (`IBGDA_MAP_ROUND`). Peers with the
    /// rkey can then reach all bytes of those pages.
    Outward,
}

/// The range to register for `address` and `length`.
fn pages(address: u64, length: u64, rounding: Rounding) -> Result<(u64, u64)> {
    let what = || format!("map_device of {length} bytes at {address:#x}");
    if length == 0 {
        return Err(Error::argument(
            what(),
            "the length is zero",
            "map at least one page of 4096 bytes",
        ));
    }
    let Some(end) = address
        .checked_add(length)
        .and_then(|end| end.checked_next_multiple_of(PAGE_BYTES))
    else {
        return Err(Error::argument(
            what(),
            "the range ends beyond the address space",
            "check address and length",
        ));
    };
    let start = address / PAGE_BYTES * PAGE_BYTES;
    let rounded = (start, end - start);
    if rounded != (address, length) && rounding == Rounding::Exact {
        return Err(Error::argument(
            what(),
            "address and length must be multiples of 4096",
            format!(
                "map {:#x} bytes at {start:#x}, or pass IBGDA_MAP_ROUND (Rounding::Outward) for the same with the address kept",
                rounded.1
            ),
        ));
    }
    Ok(rounded)
}

/// Registers whole pages, of the host or of a GPU.
///
/// # Safety
/// As of [`Context::map_device`].
#[cfg(feature = "cuda")]
unsafe fn register(
    context: &Context,
    start: u64,
    bytes: usize,
    access: Access,
) -> Result<Registration> {
    if cuda::is_gpu_memory(start)? {
        let dmabuf = cuda::DmaBuf::export(start, bytes)?;
        return Registration::of_dmabuf(context.device(), &dmabuf, access);
    }
    // SAFETY: by this function's contract.
    unsafe { Registration::new(context.device(), start, bytes, access) }.map_err(|error| {
        if error.errno() == libc::EFAULT && !cuda::is_loaded() {
            error.and_advice(
                "this process has not loaded CUDA's driver, so the address is of no GPU's memory",
            )
        } else {
            error
        }
    })
}

/// Registers whole pages.
///
/// # Safety
/// As of [`Context::map_device`].
#[cfg(not(feature = "cuda"))]
unsafe fn register(
    context: &Context,
    start: u64,
    bytes: usize,
    access: Access,
) -> Result<Registration> {
    // SAFETY: by this function's contract.
    unsafe { Registration::new(context.device(), start, bytes, access) }
}

/// A region registered with a NIC. Dropping it takes the NIC's right back.
#[derive(Debug)]
pub struct MemoryRegion {
    // First, as it ends with the memory.
    processor: Mutex<Option<(Arc<dyn Processor>, Reached)>>,
    // Before the memory, so that it is taken back before that is unmapped.
    registration: Registration,
    buffer: Option<Mapping>,
    address: u64,
    length: u64,
}

impl MemoryRegion {
    pub(crate) unsafe fn map(
        context: &Context,
        address: u64,
        length: u64,
        access: Access,
        rounding: Rounding,
    ) -> Result<Self> {
        let (start, bytes) = pages(address, length, rounding)?;
        // SAFETY: by the contract of `Context::map_device`.
        let registration = unsafe { register(context, start, bytes as usize, access) }?;
        Ok(Self {
            processor: Mutex::default(),
            registration,
            buffer: None,
            address,
            length,
        })
    }

    pub(crate) fn alloc(context: &Context, length: usize, access: Access) -> Result<Self> {
        if length == 0 {
            return Err(Error::argument(
                "alloc of 0 bytes",
                "the length is zero",
                "allocate at least one byte",
            ));
        }
        let bytes = length
            .checked_next_multiple_of(PAGE_BYTES as usize)
            .ok_or_else(|| {
                Error::argument(
                    format!("alloc of {length} bytes"),
                    "more than the address space has",
                    "",
                )
            })?;
        let buffer = MmapOptions::new()
            .len(bytes)
            .map_anon()
            .map(MmapRaw::from)
            // Where libibverbs keeps registered memory from children (ibv_fork_init), a child has none of it.
            .map(Mapping::new)
            .map_err(|error| {
                Error::errno_with(
                    crate::error::Source::Argument,
                    format!("mmap of {bytes} bytes"),
                    error.raw_os_error().unwrap_or(libc::ENOMEM),
                    "",
                    "",
                )
            })?;
        let address = buffer.address().expose_provenance() as u64;
        let device = context.device();
        // SAFETY: the mapping is anonymous, this region's own, and outlives the registration (field order).
        let registration = unsafe { Registration::new(device, address, bytes, access) }?;
        Ok(Self {
            processor: Mutex::default(),
            registration,
            buffer: Some(buffer),
            address,
            length: length as u64,
        })
    }

    /// Address for requests, of this and of the remote side.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Key for requests of this side.
    pub fn lkey(&self) -> u32 {
        self.registration.keys().0
    }

    /// Key for requests of peers.
    pub fn rkey(&self) -> u32 {
        self.registration.keys().1
    }

    /// As kernels take it, and peers need it.
    pub fn region(&self) -> ibgda_region {
        ibgda_region {
            address: self.address,
            length: self.length,
            lkey: self.lkey(),
            rkey: self.rkey(),
        }
    }

    /// Where a GPU sees memory that [`Context::alloc`] made, for kernels that read and write it themselves. Requests name
    /// it by [`MemoryRegion::address`] all the same. No kernel may use it when the region is dropped.
    ///
    /// # Errors
    /// `EINVAL`: the memory is the caller's own; `EBUSY`: it was asked for with another GPU; CUDA's of registering it.
    #[cfg(feature = "cuda")]
    pub fn device_pointer_on(&self, gpu: &cuda::Gpu) -> Result<u64> {
        let processor: Arc<dyn Processor> = Arc::new(gpu.clone());
        self.pointer_of(&processor)
    }

    /// The same of any processor.
    ///
    /// # Errors
    /// As of `device_pointer_on`, with the processor's errors.
    pub fn pointer_of(&self, processor: &Arc<dyn Processor>) -> Result<u64> {
        let what = || format!("region of {} bytes on {}", self.length, processor.name());
        let buffer = self.buffer.as_ref().ok_or_else(|| {
            Error::argument(
                what(),
                "the memory is not the region's own",
                "register it with cuMemHostRegister, as its owner",
            )
        })?;
        let mut slot = crate::worker::lock(&self.processor);
        match &*slot {
            Some((there, reached)) if there.name() == processor.name() => Ok(reached.address()),
            Some(_) => Err(processor::used_by_another(what())),
            None => {
                let range = HostRange {
                    address: buffer.address(),
                    bytes: buffer.len(),
                    kind: HostKind::Memory,
                    bar: None,
                };
                // SAFETY: the buffer is this region's, and unmapped after the registration (field order).
                let new = unsafe { processor.register(&range) }?;
                let pointer = new.address();
                *slot = Some((Arc::clone(processor), new));
                Ok(pointer)
            }
        }
    }

    /// Copies bytes into memory that [`Context::alloc`] made.
    ///
    /// # Errors
    /// `EINVAL`: the range is not inside, or the memory is the caller's own.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let to = self.inside("write", offset, bytes.len())?;
        // SAFETY: the range is inside the mapping. The NIC may write there at the same time: bytes then come out mixed, as
        // with any RDMA buffer, but no reference to them exists.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Copies bytes out of memory that [`Context::alloc`] made.
    ///
    /// # Errors
    /// As [`MemoryRegion::write`].
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let from = self.inside("read", offset, bytes.len())?;
        // SAFETY: as in `write`.
        unsafe { ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn inside(&self, call: &str, offset: usize, bytes: usize) -> Result<*mut u8> {
        let what = || {
            format!(
                "{call} of {bytes} bytes at offset {offset} of a region of {}",
                self.length
            )
        };
        let buffer = self.buffer.as_ref().ok_or_else(|| {
            Error::argument(
                what(),
                "the memory is not the region's own",
                "use the pointer it was mapped with",
            )
        })?;
        let end = offset
            .checked_add(bytes)
            .filter(|&end| end as u64 <= self.length);
        end.ok_or_else(|| {
            Error::argument(
                what(),
                "the range is not inside the region",
                "check offset and length",
            )
        })?;
        // SAFETY: the offset was just found inside the mapping.
        Ok(unsafe { buffer.address().add(offset) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_pass_as_they_are() {
        assert_eq!(
            pages(0x10000, 0x2000, Rounding::Exact).expect("aligned"),
            (0x10000, 0x2000)
        );
        assert_eq!(
            pages(0x10000, 0x2000, Rounding::Outward).expect("aligned"),
            (0x10000, 0x2000)
        );
    }

    #[test]
    fn an_unaligned_range_is_refused_with_the_way_to_round() {
        let error = pages(0x10010, 100, Rounding::Exact).expect_err("unaligned");
        assert_eq!(error.errno(), libc::EINVAL);
        assert!(
            error.to_string().contains("map 0x1000 bytes at 0x10000"),
            "{error}"
        );
        let error = pages(0x10ff0, 0x20, Rounding::Exact).expect_err("unaligned");
        assert!(
            error.to_string().contains("map 0x2000 bytes at 0x10000"),
            "{error}"
        );
        pages(0x10000, 0x1001, Rounding::Exact).expect_err("unaligned length");
        assert_eq!(
            pages(0x10ff0, 0x20, Rounding::Outward).expect("rounded"),
            (0x10000, 0x2000)
        );
    }

    #[test]
    fn zero_and_endless_ranges_are_refused_even_with_rounding() {
        for rounding in [Rounding::Exact, Rounding::Outward] {
            assert_eq!(
                pages(0x10000, 0, rounding).expect_err("empty").errno(),
                libc::EINVAL
            );
            assert_eq!(
                pages(u64::MAX - 4095, 4096, rounding)
                    .expect_err("wraps")
                    .errno(),
                libc::EINVAL
            );
            assert_eq!(
                pages(u64::MAX - 8191, 8190, rounding)
                    .expect_err("rounds to 2^64")
                    .errno(),
                libc::EINVAL
            );
        }
    }

    #[test]
    fn rights_become_verbs_flags() {
        let local = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE;
        assert_eq!(Access::empty().verbs(), local);
        assert_eq!((Access::READ | Access::ATOMIC).verbs().0, local.0 | 4 | 8);
        assert_eq!(Access::WRITE.verbs().0, local.0 | 2);
    }
}
