// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CUDA side: GPUs, host memory that they reach, GPU memory that the NIC reaches, and QPs as kernels use them.
//!
//! CUDA's driver (`libcuda.so.1`) is loaded by the first call that needs it. Without it those calls fail with `ENODEV`, and
//! everything else of the library works.

mod dmabuf;
mod doorbell;
mod error;
mod host;
mod kernels;

pub use crate::processor::HostKind;
pub use cudarc;
pub use dmabuf::DmaBuf;
pub use host::HostRegistration;
pub use kernels::GpuKernels;

pub(crate) use dmabuf::is_gpu_memory;
pub(crate) use kernels::DeviceMemory;

use crate::{
    error::{Error, Result, Source},
    pci::Bdf,
};
use cudarc::driver::{CudaContext, result, sys};
use error::{Explain, failed};
use std::{
    ffi::{CStr, CString, c_int, c_void},
    ptr,
    sync::Arc,
};

/// A GPU with its primary context, which is kept as long as this value or anything made with it lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu(Arc<CudaContext>);

impl Gpu {
    /// The GPU at a PCI address.
    ///
    /// # Errors
    /// `ENODEV`: no CUDA driver, or no such GPU; the driver's.
    pub fn open(bdf: Bdf) -> Result<Self> {
        initialise()?;
        let name = CString::new(bdf.to_string()).expect("an address has no NUL");
        let mut device = 0;
        // SAFETY: the device is written, the name read.
        unsafe { sys::cuDeviceGetByPCIBusId(&mut device, name.as_ptr()) }
            .result()
            .explain(|| format!("cuDeviceGetByPCIBusId {bdf}"))?;
        // A CUdevice is the device's ordinal.
        Self::with_ordinal(device as usize)
    }

    /// The first GPU that CUDA shows.
    ///
    /// # Errors
    /// `ENODEV`: no CUDA driver, or no GPU; the driver's.
    pub fn first() -> Result<Self> {
        initialise()?;
        Self::with_ordinal(0)
    }

    /// The GPU of a context that the program has already.
    pub fn with(context: Arc<CudaContext>) -> Self {
        Self(context)
    }

    fn with_ordinal(ordinal: usize) -> Result<Self> {
        let context = keep_current(|| CudaContext::new(ordinal))?;
        let context =
            context.explain(|| format!("the primary context of CUDA device {ordinal}"))?;
        Ok(Self(context))
    }

    /// Its context, for kernels and memory of the program's own.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.0
    }

    /// Its PCI address.
    ///
    /// # Errors
    /// The driver's.
    pub fn bdf(&self) -> Result<Bdf> {
        let mut name = [0; 32];
        // SAFETY: the buffer has the length that is passed, and is terminated even if it is too short.
        unsafe {
            sys::cuDeviceGetPCIBusId(name.as_mut_ptr(), name.len() as i32, self.0.cu_device())
        }
        .result()
        .explain(|| "cuDeviceGetPCIBusId".to_owned())?;
        // SAFETY: terminated, see above.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy();
        name.parse().map_err(|error: crate::ParseBdfError| {
            Error::argument("cuDeviceGetPCIBusId", error.to_string(), "")
        })
    }

    /// Does something with its context current, and leaves the thread as it was.
    fn enter<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        keep_current(|| {
            self.0
                .bind_to_thread()
                .explain(|| "cuCtxSetCurrent".to_owned())?;
            call()
        })?
    }
}

/// Does something that changes the thread's current context, and then makes the former current again.
fn keep_current<T>(call: impl FnOnce() -> T) -> Result<T> {
    let current = || result::ctx::get_current().explain(|| "cuCtxGetCurrent".to_owned());
    let former = current()?;
    let value = call();
    if current()? != former {
        // SAFETY: the context was current, or null, which makes none current.
        unsafe { result::ctx::set_current(former.unwrap_or(ptr::null_mut())) }
            .explain(|| "cuCtxSetCurrent".to_owned())?;
    }
    Ok(value)
}

/// Loads the driver.
fn initialise() -> Result<()> {
    // SAFETY: a library named so is CUDA's driver.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::new(
            Source::Cuda { code: 0 },
            libc::ENODEV,
            "load libcuda.so.1",
            "it is not found: NVIDIA's driver is not installed here",
            "install it, or run kernels on CPU threads; in a container, add the driver's libraries (--gpus all)",
        ));
    }
    result::init().map_err(|error| failed("cuInit", error))
}

/// Whether this process has loaded the driver, whoever did: then pointers may be to GPU memory.
///
/// Not asked by dlopen with RTLD_NOLOAD: for a library that is not loaded that opens its file wherever it may be, which
/// costs more than registering memory does.
pub(crate) fn is_loaded() -> bool {
    // SAFETY: the callback is called with each library that is loaded, and keeps nothing of it.
    unsafe { libc::dl_iterate_phdr(Some(is_driver), ptr::null_mut()) != 0 }
}

/// 1 for the driver's library, which ends the search.
unsafe extern "C" fn is_driver(
    library: *mut libc::dl_phdr_info,
    _bytes: usize,
    _data: *mut c_void,
) -> c_int {
    // SAFETY: the loader passes a library whose name is null or terminated.
    let name = unsafe {
        match (*library).dlpi_name {
            name if name.is_null() => return 0,
            name => CStr::from_ptr(name).to_bytes(),
        }
    };
    let file = name.rsplit(|&byte| byte == b'/').next().unwrap_or(name);
    c_int::from(file == b"libcuda.so" || file.starts_with(b"libcuda.so."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_driver_the_error_says_so() {
        // SAFETY: as in `initialise`.
        if unsafe { sys::is_culib_present() } {
            return;
        }
        let gpu = "0000:65:00.0".parse().expect("an address");
        for error in [
            Gpu::open(gpu).expect_err("no driver"),
            Gpu::first().expect_err("no driver"),
        ] {
            assert_eq!(error.errno(), libc::ENODEV);
            assert_eq!(error.origin(), Source::Cuda { code: 0 });
            assert!(
                error
                    .to_string()
                    .contains("NVIDIA's driver is not installed"),
                "{error}"
            );
        }
        assert!(!is_loaded(), "looking for it has loaded nothing");
    }

    #[test]
    fn the_driver_is_known_by_the_name_of_its_file() {
        for (name, expected) in [
            (Some(c"/usr/lib/x86_64-linux-gnu/libcuda.so.1"), 1),
            (Some(c"libcuda.so.570.86.15"), 1),
            (Some(c"/opt/cuda/stubs/libcuda.so"), 1),
            (Some(c"/usr/lib/libcudart.so.13"), 0),
            (Some(c"/opt/libcuda.so.1/libc.so.6"), 0),
            (Some(c""), 0),
            (None, 0),
        ] {
            // SAFETY: all zero is a value of it.
            let mut library: libc::dl_phdr_info = unsafe { std::mem::zeroed() };
            library.dlpi_name = name.map_or(ptr::null(), CStr::as_ptr);
            // SAFETY: the name is null or terminated.
            let found = unsafe { is_driver(&mut library, 0, ptr::null_mut()) };
            assert_eq!(found, expected, "{name:?}");
        }
    }
}
