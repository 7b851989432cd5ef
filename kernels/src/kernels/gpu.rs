// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels on a GPU.

use super::{
    SOURCE, nvrtc,
    requests::{ibgda_job, ibgda_request, ibgda_stream},
};
use crate::{Status, abi::ibgda_region};
use cudarc::{
    driver::{
        CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream, DevicePtr as _, DeviceRepr,
        DriverError, LaunchConfig, PushKernelArg, sys::CUdeviceptr,
    },
    nvrtc::Ptx,
};
use std::{fmt, sync::Arc, time::Duration};

/// What nvcc made of the kernels when this crate was built, for several architectures; `None` where there was no nvcc.
pub const IMAGE: Option<&[u8]> = include!(concat!(env!("OUT_DIR"), "/transfer-image.rs"));

/// Where code comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// nvcc, when the crate was built.
    Nvcc,
    /// NVRTC, just now.
    Nvrtc,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nvcc => "nvcc at build time",
            Self::Nvrtc => "NVRTC at run time",
        })
    }
}

/// Why kernels were not loaded, or not run.
#[derive(Clone, Debug)]
pub enum Error {
    /// There is no code by nvcc in this build.
    NoImage,
    /// NVRTC.
    Nvrtc(nvrtc::Error),
    /// A call of the CUDA driver.
    Driver(&'static str, DriverError),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoImage => {
                write!(
                    f,
                    "this program was built without nvcc; build it with one in PATH or NVCC"
                )
            }
            Self::Nvrtc(error) => write!(f, "{error}"),
            Self::Driver(call, error) => write!(f, "{call}: {:?} ({})", error.0, error.0 as u32),
        }
    }
}

impl std::error::Error for Error {}

impl From<nvrtc::Error> for Error {
    fn from(error: nvrtc::Error) -> Self {
        Self::Nvrtc(error)
    }
}

/// The module of the kernels for a GPU: nvcc's code if this build has it, else NVRTC's.
///
/// # Errors
/// Neither can be had, or the driver refuses it.
pub fn load(context: &Arc<CudaContext>) -> Result<(Arc<CudaModule>, Origin), Error> {
    let origin = match IMAGE {
        Some(_) => Origin::Nvcc,
        None => Origin::Nvrtc,
    };
    Ok((load_from(context, origin)?, origin))
}

/// As [`load`], from where the caller says.
///
/// # Errors
/// As of [`load`].
pub fn load_from(context: &Arc<CudaContext>, origin: Origin) -> Result<Arc<CudaModule>, Error> {
    load_one(context, origin, IMAGE, SOURCE)
}

/// The code of one source, by nvcc or by NVRTC.
pub(super) fn load_one(
    context: &Arc<CudaContext>,
    origin: Origin,
    image: Option<&[u8]>,
    source: &str,
) -> Result<Arc<CudaModule>, Error> {
    let image = match origin {
        Origin::Nvcc => image.ok_or(Error::NoImage)?.to_vec(),
        Origin::Nvrtc => {
            let (major, minor) = context
                .compute_capability()
                .map_err(|error| Error::Driver("cuDeviceGetAttribute", error))?;
            nvrtc::compile(source, &format!("sm_{major}{minor}"))?.image
        }
    };
    context
        .load_module(Ptx::from_binary(image))
        .map_err(|error| Error::Driver("cuModuleLoadData", error))
}

// SAFETY: it is plain data, laid out as in C.
unsafe impl DeviceRepr for ibgda_region {}
// SAFETY: as above.
unsafe impl DeviceRepr for ibgda_request {}
// SAFETY: as above; its pointers are the GPU's.
unsafe impl DeviceRepr for ibgda_job {}
// SAFETY: as above.
unsafe impl DeviceRepr for ibgda_stream {}

/// The kernels of a loaded module, launched on a stream of their own.
#[derive(Debug)]
pub struct Kernels {
    stream: Arc<CudaStream>,
    put_blocks: CudaFunction,
    wait: CudaFunction,
    jobs: CudaFunction,
    streams: CudaFunction,
}

impl Kernels {
    /// The kernels of what [`load`] gave.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(context: &Arc<CudaContext>, module: &Arc<CudaModule>) -> Result<Self, Error> {
        let function = |name| {
            let function = module.load_function(name);
            function.map_err(|error| Error::Driver("cuModuleGetFunction", error))
        };
        Ok(Self {
            stream: context
                .new_stream()
                .map_err(|error| Error::Driver("cuStreamCreate", error))?,
            put_blocks: function("ibgda_kernel_put_blocks")?,
            wait: function("ibgda_kernel_wait")?,
            jobs: function("ibgda_kernel_jobs")?,
            streams: function("ibgda_kernel_streams")?,
        })
    }

    /// Writes `from`, in blocks of `block_bytes`, to the same offsets of `to`, and waits for the last.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// `qp` is a QP's handle for this GPU; the QP lives, and nobody else uses the handle meanwhile.
    pub unsafe fn put_blocks(
        &self,
        qp: CUdeviceptr,
        to: ibgda_region,
        from: ibgda_region,
        block_bytes: u32,
        timeout: Duration,
    ) -> Result<Status, Error> {
        let timeout = nanoseconds(timeout);
        let mut result = self.result()?;
        let mut launch = self.stream.launch_builder(&self.put_blocks);
        launch
            .arg(&qp)
            .arg(&to)
            .arg(&from)
            .arg(&block_bytes)
            .arg(&timeout)
            .arg(&mut result);
        // SAFETY: the arguments are those of the kernel; the handle is good by this function's contract.
        let launched = unsafe { launch.launch(ONE_THREAD) };
        launched.map_err(|error| Error::Driver("cuLaunchKernel", error))?;
        self.status(&result)
    }

    /// Waits for a completion of the send queue.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// As of [`Kernels::put_blocks`].
    pub unsafe fn wait(&self, qp: CUdeviceptr, timeout: Duration) -> Result<Status, Error> {
        let timeout = nanoseconds(timeout);
        let mut result = self.result()?;
        let mut launch = self.stream.launch_builder(&self.wait);
        launch.arg(&qp).arg(&timeout).arg(&mut result);
        // SAFETY: the arguments are those of the kernel; the handle is good by this function's contract.
        let launched = unsafe { launch.launch(ONE_THREAD) };
        launched.map_err(|error| Error::Driver("cuLaunchKernel", error))?;
        self.status(&result)
    }

    /// Runs jobs at the same time, a block each, and waits for all. Their requests are copied to the GPU and back.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// Of each, `qp` is a QP's handle for this GPU; the QP lives, nobody else uses the handle meanwhile, and no two jobs
    /// share it. `requests` are `count` requests of the host's.
    pub unsafe fn jobs(&self, jobs: &mut [ibgda_job]) -> Result<(), Error> {
        let mut on_gpu = jobs.to_vec();
        let mut kept = Vec::new();
        for job in &mut on_gpu {
            // SAFETY: by this function's contract.
            let requests = unsafe { std::slice::from_raw_parts(job.requests, job.count as usize) };
            let there = self.copy(requests)?;
            job.requests =
                std::ptr::without_provenance_mut(there.device_ptr(&self.stream).0 as usize);
            kept.push(there);
        }
        self.blocks(&self.jobs, &mut on_gpu)?;
        for ((job, ran), there) in jobs.iter_mut().zip(on_gpu).zip(kept) {
            (job.status, job.done) = (ran.status, ran.done);
            // SAFETY: as above; the host's requests are borrowed with the jobs.
            let requests =
                unsafe { std::slice::from_raw_parts_mut(job.requests, job.count as usize) };
            requests.copy_from_slice(&self.fetch(&there)?);
        }
        Ok(())
    }

    /// Runs streams at the same time, a block each, and waits for all.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// As of [`Kernels::jobs`].
    pub unsafe fn streams(&self, streams: &mut [ibgda_stream]) -> Result<(), Error> {
        self.blocks(&self.streams, streams)
    }

    /// Launches a kernel with one block of one thread for each element, which it changes.
    fn blocks<T: DeviceRepr + Copy>(
        &self,
        kernel: &CudaFunction,
        arguments: &mut [T],
    ) -> Result<(), Error> {
        if arguments.is_empty() {
            return Ok(());
        }
        let mut there = self.copy(arguments)?;
        let mut launch = self.stream.launch_builder(kernel);
        launch.arg(&mut there);
        let grid = LaunchConfig {
            grid_dim: (arguments.len() as u32, 1, 1),
            ..ONE_THREAD
        };
        // SAFETY: the argument is the kernel's; what its elements name is good by the contracts of the callers.
        let launched = unsafe { launch.launch(grid) };
        launched.map_err(|error| Error::Driver("cuLaunchKernel", error))?;
        arguments.copy_from_slice(&self.fetch(&there)?);
        Ok(())
    }

    fn copy<T: DeviceRepr>(&self, values: &[T]) -> Result<CudaSlice<T>, Error> {
        let there = self.stream.clone_htod(values);
        there.map_err(|error| Error::Driver("cuMemcpyHtoD", error))
    }

    /// Waits for the kernel.
    fn fetch<T: DeviceRepr>(&self, there: &CudaSlice<T>) -> Result<Vec<T>, Error> {
        let values = self.stream.clone_dtoh(there);
        let values = values.map_err(|error| Error::Driver("cuMemcpyDtoH after a kernel", error))?;
        // Copies to pageable memory may return early.
        let done = self.stream.synchronize();
        done.map_err(|error| Error::Driver("cuStreamSynchronize", error))?;
        Ok(values)
    }

    fn result(&self) -> Result<CudaSlice<u32>, Error> {
        let result = self.stream.alloc_zeros(1);
        result.map_err(|error| Error::Driver("cuMemAlloc", error))
    }

    /// Waits for the kernel.
    fn status(&self, result: &CudaSlice<u32>) -> Result<Status, Error> {
        let result = self.stream.clone_dtoh(result);
        let result = result.map_err(|error| Error::Driver("cuMemcpyDtoH after a kernel", error))?;
        Ok(Status(result[0]))
    }
}

const ONE_THREAD: LaunchConfig = LaunchConfig {
    grid_dim: (1, 1, 1),
    block_dim: (1, 1, 1),
    shared_mem_bytes: 0,
};

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_with_nvcc_has_code_of_it() {
        let asked = std::env::var_os("NVCC").is_some_and(|nvcc| !nvcc.is_empty());
        let Some(image) = IMAGE else {
            assert!(!asked, "NVCC is set, and there is no code by it");
            return;
        };
        // __fatBinC_Wrapper_t's magic of a fat binary, fatbinary_section.h.
        assert_eq!(image[..4], 0xba55_ed50_u32.to_le_bytes());
    }

    #[test]
    fn errors_say_what_to_do() {
        assert!(Error::NoImage.to_string().contains("NVCC"));
        let error = Error::Driver(
            "cuModuleLoadData",
            DriverError(cudarc::driver::sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU),
        );
        assert_eq!(
            error.to_string(),
            "cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU (209)"
        );
        let missing: Error = nvrtc::Error::Missing.into();
        assert!(missing.to_string().contains("LD_LIBRARY_PATH"));
    }
}
