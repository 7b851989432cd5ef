// SPDX-License-Identifier: MIT OR Apache-2.0
//! A GPU of this machine as a [`Processor`], alone and with kernels to launch.

use super::{
    Gpu, HostRegistration,
    error::{Explain, failed},
};
use crate::{
    error::Result,
    memory::PAGE_BYTES,
    processor::{HostRange, Launched, Processor, Reached, no_kernel},
};
use cudarc::driver::{
    CudaModule, CudaStream, LaunchConfig, PushKernelArg, result,
    sys::{self, CUdeviceptr, CUresult},
};
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// Between two looks at a kernel.
const LOOK: Duration = Duration::from_micros(50);

/// GPU memory of this library's own.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    gpu: Gpu,
    allocated: CUdeviceptr,
    address: CUdeviceptr,
}

impl DeviceMemory {
    pub(crate) fn alloc(gpu: &Gpu, bytes: usize) -> Result<Self> {
        gpu.enter(|| {
            // SAFETY: it is filled before it is used.
            let allocated = unsafe { result::malloc_sync(bytes) }
                .explain(|| format!("cuMemAlloc of {bytes} bytes"))?;
            Ok(Self {
                gpu: gpu.clone(),
                allocated,
                address: allocated,
            })
        })
    }

    /// Whole pages, as a dma-buf needs them: what CUDA allocates begins anywhere, if it is less than 2 MiB.
    pub(crate) fn alloc_pages(gpu: &Gpu, bytes: usize) -> Result<Self> {
        let room = bytes.saturating_add(PAGE_BYTES as usize - 1);
        let mut memory = Self::alloc(gpu, room)?;
        memory.address = memory.allocated.next_multiple_of(PAGE_BYTES);
        Ok(memory)
    }

    pub(crate) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub(crate) fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Sets bytes, which lie inside.
    pub(crate) fn fill(&self, from: usize, bytes: usize, value: u8) -> Result<()> {
        self.gpu.enter(|| {
            // On a stream of its own, and waited for: cuMemsetD8 returns before it is done, behind whatever runs.
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
                .explain(|| "cuStreamCreate".to_owned())?;
            // SAFETY: inside, and no kernel uses it yet.
            let filled = unsafe {
                result::memset_d8_async(self.address + from as u64, value, bytes, stream)
                    .and_then(|()| result::stream::synchronize(stream))
            };
            // SAFETY: made above, and nothing is left to do in it.
            let _ = unsafe { result::stream::destroy(stream) };
            filled.explain(|| format!("cuMemsetD8Async of {bytes} bytes"))
        })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let free = || {
            // SAFETY: allocated by `alloc`; no kernel uses it any more, as of memory that is dropped.
            unsafe { sys::cuMemFree_v2(self.allocated) }
                .result()
                .explain(|| "cuMemFree".to_owned())
        };
        // Fails when the context is gone, and the memory with it.
        let _ = self.gpu.enter(free);
    }
}

impl Processor for Gpu {
    fn name(&self) -> String {
        format!("CUDA device {}", self.0.ordinal())
    }

    unsafe fn register(&self, range: &HostRange) -> Result<Reached> {
        // SAFETY: by this function's contract.
        let new = unsafe { HostRegistration::new(self, range.address, range.bytes, range.kind) }?;
        Ok(Reached::new(new.device_pointer(), new))
    }

    fn alloc(&self, bytes: usize) -> Result<Reached> {
        let memory = DeviceMemory::alloc(self, bytes)?;
        Ok(Reached::new(memory.address, memory))
    }

    unsafe fn write(&self, to: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: by this function's contract.
        let copy = || unsafe { result::memcpy_htod_sync(to, bytes) };
        self.enter(|| copy().explain(|| format!("copy {} bytes to the GPU", bytes.len())))
    }

    unsafe fn read(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        let len = bytes.len();
        // SAFETY: by this function's contract.
        let mut copy = || unsafe { result::memcpy_dtoh_sync(bytes, from) };
        self.enter(|| copy().explain(|| format!("copy {len} bytes from the GPU")))
    }
}

/// A GPU with a module of kernels.
#[derive(Clone, Debug)]
pub struct GpuKernels {
    gpu: Gpu,
    module: Arc<CudaModule>,
}

impl GpuKernels {
    /// The kernels of a module that was loaded in the GPU's context.
    pub fn new(gpu: &Gpu, module: &Arc<CudaModule>) -> Self {
        Self {
            gpu: gpu.clone(),
            module: Arc::clone(module),
        }
    }
}

impl Processor for GpuKernels {
    fn name(&self) -> String {
        self.gpu.name()
    }

    unsafe fn register(&self, range: &HostRange) -> Result<Reached> {
        // SAFETY: by this function's contract.
        unsafe { self.gpu.register(range) }
    }

    fn alloc(&self, bytes: usize) -> Result<Reached> {
        self.gpu.alloc(bytes)
    }

    unsafe fn write(&self, to: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.gpu.write(to, bytes) }
    }

    unsafe fn read(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.gpu.read(from, bytes) }
    }

    unsafe fn launch(&self, kernel: &str, blocks: u32, argument: u64) -> Result<Box<dyn Launched>> {
        let function = self.module.load_function(kernel);
        let function = function.map_err(|_| no_kernel(&self.name(), kernel))?;
        self.gpu.enter(|| {
            // One of its own, so that kernels that wait do not hold up others.
            let stream = self.gpu.context().new_stream();
            let stream = stream.explain(|| "cuStreamCreate".to_owned())?;
            let mut launch = stream.launch_builder(&function);
            launch.arg(&argument);
            let config = LaunchConfig {
                grid_dim: (blocks, 1, 1),
                block_dim: (1, 1, 1),
                shared_mem_bytes: 0,
            };
            // SAFETY: the kernel takes one argument of 64 bits, good by this function's contract.
            let launched = unsafe { launch.launch(config) };
            launched.explain(|| format!("cuLaunchKernel of {kernel} in {blocks} blocks"))?;
            let gpu = self.gpu.clone();
            let running: Box<dyn Launched> = Box::new(Running { gpu, stream });
            Ok(running)
        })
    }
}

struct Running {
    gpu: Gpu,
    stream: Arc<CudaStream>,
}

impl Launched for Running {
    fn wait(&mut self, patience: Duration) -> Result<bool> {
        let end = Instant::now() + patience;
        self.gpu.enter(|| {
            loop {
                // SAFETY: a stream of this context, which is current.
                match unsafe { sys::cuStreamQuery(self.stream.cu_stream()) } {
                    CUresult::CUDA_SUCCESS => return Ok(true),
                    CUresult::CUDA_ERROR_NOT_READY if Instant::now() < end => thread::sleep(LOOK),
                    CUresult::CUDA_ERROR_NOT_READY => return Ok(false),
                    error => {
                        let error = cudarc::driver::DriverError(error);
                        return Err(failed("a kernel", error));
                    }
                }
            }
        })
    }
}
