// SPDX-License-Identifier: MIT OR Apache-2.0
//! GPU memory as a dma-buf, which a NIC's driver can register.

use super::{
    Gpu,
    error::{Explain, failed},
    is_loaded,
};
use crate::{
    error::{Error, Result},
    memory::PAGE_BYTES,
};
use cudarc::driver::{
    CudaContext,
    sys::{self, CUdeviceptr, CUmemRangeHandleType, CUmemorytype, CUpointer_attribute, CUresult},
};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// Whole pages of GPU memory, exported. The memory may be freed before it: the pages stay as long as anyone has the dma-buf.
#[derive(Debug)]
pub struct DmaBuf {
    file: OwnedFd,
    address: CUdeviceptr,
    bytes: usize,
}

/// An attribute of a pointer; `None` for one that CUDA does not know.
fn attribute<T: Default>(which: CUpointer_attribute, address: CUdeviceptr) -> Result<Option<T>> {
    let mut value = T::default();
    // SAFETY: each attribute that is asked for here has the size of the type it is asked with.
    match unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), which, address) } {
        CUresult::CUDA_ERROR_INVALID_VALUE
        | CUresult::CUDA_ERROR_NOT_INITIALIZED
        | CUresult::CUDA_ERROR_INVALID_CONTEXT => Ok(None),
        other => {
            other
                .result()
                .explain(|| format!("cuPointerGetAttribute of {address:#x}"))?;
            Ok(Some(value))
        }
    }
}

/// Whether an address is one of GPU memory, which a CPU's page tables do not have. Costs nothing without CUDA.
pub(crate) fn is_gpu_memory(address: u64) -> Result<bool> {
    if !is_loaded() {
        return Ok(false);
    }
    let kind: Option<u32> = attribute(
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        address,
    )?;
    if kind != Some(CUmemorytype::CU_MEMORYTYPE_DEVICE as u32) {
        return Ok(false);
    }
    let managed: Option<u32> = attribute(
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        address,
    )?;
    if managed == Some(1) {
        return Err(Error::argument(
            format!("memory at {address:#x}"),
            "it is managed memory, whose pages move between host and GPU",
            "allocate with cudaMalloc or cuMemCreate",
        ));
    }
    Ok(true)
}

impl DmaBuf {
    /// Exports `bytes` bytes of GPU memory at `address`, of cudaMalloc or of cuMemMap.
    ///
    /// Address and length are multiples of 4096, the range lies in one allocation, and one of cuMemCreate was made with
    /// `gpuDirectRDMACapable`.
    ///
    /// # Errors
    /// `EINVAL`: the range breaks these rules, or is no GPU memory; `EOPNOTSUPP`: the GPU exports none; the driver's.
    pub fn export(address: CUdeviceptr, bytes: usize) -> Result<Self> {
        let what = || describe(address, bytes);
        if bytes == 0 || address % PAGE_BYTES != 0 || bytes as u64 % PAGE_BYTES != 0 {
            return Err(Error::argument(
                what(),
                "address and length must be multiples of 4096, and not zero",
                "round within the allocation: what cudaMalloc gives begins anywhere if it is less than 2 MiB, so ask it for a page more, or for whole 2 MiB",
            ));
        }
        super::initialise()?;
        let ordinal = attribute::<i32>(
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            address,
        )?;
        let Some(ordinal) = ordinal.and_then(|ordinal| usize::try_from(ordinal).ok()) else {
            return Err(Error::argument(
                what(),
                "CUDA does not know this address",
                "pass a pointer that cudaMalloc or cuMemMap gave to this process",
            ));
        };
        // The context is kept by this call only, and dropping it may change the current one too.
        super::keep_current(|| {
            let context = CudaContext::new(ordinal)
                .explain(|| format!("the primary context of CUDA device {ordinal}"))?;
            Gpu::with(context).enter(|| Self::export_here(address, bytes))
        })?
    }

    /// With a context of the memory's GPU current.
    fn export_here(address: CUdeviceptr, bytes: usize) -> Result<Self> {
        let (mut base, mut size) = (0, 0);
        // SAFETY: both are written.
        unsafe { sys::cuMemGetAddressRange_v2(&mut base, &mut size, address) }
            .result()
            .explain(|| format!("cuMemGetAddressRange of {address:#x}"))?;
        let end = address.checked_add(bytes as u64);
        if end.is_none_or(|end| end > base + size as u64) {
            return Err(Error::argument(
                describe(address, bytes),
                format!("the allocation there has {size} bytes at {base:#x}"),
                "export what lies in one allocation; allocate whole pages",
            ));
        }
        let mut file: i32 = -1;
        // SAFETY: a descriptor is written, which nobody else has.
        unsafe {
            sys::cuMemGetHandleForAddressRange(
                (&raw mut file).cast(),
                address,
                bytes,
                CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
                0,
            )
        }
        .result()
        .map_err(|error| {
            let what = format!(
                "cuMemGetHandleForAddressRange, {}",
                describe(address, bytes)
            );
            explain(failed(what, error))
        })?;
        Ok(Self {
            // SAFETY: open, and this is its only owner.
            file: unsafe { OwnedFd::from_raw_fd(file) },
            address,
            bytes,
        })
    }

    /// GPU address of its first byte.
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// The dma-buf alone.
    pub(crate) fn into_file(self) -> OwnedFd {
        self.file
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Never: there is at least a page.
    pub fn is_empty(&self) -> bool {
        false
    }
}

impl AsFd for DmaBuf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn describe(address: CUdeviceptr, bytes: usize) -> String {
    format!("dma-buf of {bytes} bytes of GPU memory at {address:#x}")
}

/// What the driver's refusals mean for an export.
fn explain(error: Error) -> Error {
    let advice = match error.errno() {
        libc::EOPNOTSUPP => {
            "needs nvidia-open's dma-buf support (Linux 5.12, driver 515), and a GPU with GPUDirect RDMA; see \
             CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED"
        }
        libc::EINVAL => {
            "memory of cuMemCreate is exported only if made with allocFlags.gpuDirectRDMACapable"
        }
        _ => return error,
    };
    Error::new(
        error.origin(),
        error.errno(),
        error.what(),
        error.why(),
        advice,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_that_is_not_of_whole_pages_is_refused_before_cuda_is_asked() {
        for (address, bytes) in [
            (0x7f00_0000_0200, 4096),
            (0x7f00_0000_0000, 100),
            (0x7f00_0000_0000, 0),
        ] {
            let error = DmaBuf::export(address, bytes).expect_err("no whole pages");
            assert_eq!(error.errno(), libc::EINVAL);
            assert!(error.to_string().contains("multiples of 4096"), "{error}");
        }
    }

    #[test]
    fn without_cuda_no_memory_is_a_gpus() {
        if !is_loaded() {
            let here = 0u64;
            assert!(!is_gpu_memory((&raw const here).addr() as u64).expect("no CUDA is asked"));
        }
    }
}
