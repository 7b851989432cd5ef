// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where kernels run: on a GPU, or on CPU threads that stand in for one.

use crate::{
    error::{Error, Result},
    view::View,
};
use std::{marker::PhantomData, str::FromStr, thread};

#[cfg(feature = "cuda")]
use ibgda::cuda::{
    Gpu,
    cudarc::{
        driver::{CudaFunction, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg},
        nvrtc::Ptx,
    },
};
#[cfg(feature = "cuda")]
use std::sync::Arc;

/// A GPU, or CPU threads.
#[derive(Clone, Debug)]
pub enum Processor {
    /// CPU threads.
    Cpu,
    /// A GPU.
    #[cfg(feature = "cuda")]
    Gpu(Gpu),
}

impl FromStr for Processor {
    type Err = Error;

    /// `cpu`, or `gpu`: the first that CUDA shows.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "cpu" => Ok(Self::Cpu),
            #[cfg(feature = "cuda")]
            "gpu" => Ok(Self::Gpu(Gpu::first()?)),
            #[cfg(not(feature = "cuda"))]
            "gpu" => Err(Error::Argument(
                "this program is built without the feature cuda".into(),
            )),
            _ => Err(Error::Argument(format!(
                "no processor {text:?}: they are cpu and gpu"
            ))),
        }
    }
}

impl std::fmt::Display for Processor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("on CPU threads"),
            #[cfg(feature = "cuda")]
            Self::Gpu(gpu) => match gpu.context().name() {
                Ok(name) => write!(f, "by the GPU, {name}"),
                Err(_) => f.write_str("by the GPU"),
            },
        }
    }
}

/// A kernel in both forms. `A` is what it is given besides the team: plain data, laid out as in C.
#[derive(Clone, Copy, Debug)]
pub struct Kernel<A> {
    /// Its name in the source.
    pub name: &'static str,
    /// The source, with the text of `team.cuh` before it.
    pub source: &'static str,
    /// What nvcc made of it, if it did: a fat binary.
    pub image: Option<&'static [u8]>,
    /// Threads on a GPU, of one block, 1 to 256.
    pub threads: u32,
    /// The same, compiled for a CPU thread.
    pub cpu: unsafe extern "C" fn(View, A),
}

/// A kernel that is ready to run: loading one can wait for others that run, so all are loaded before any does.
#[derive(Debug)]
pub struct Loaded<A> {
    pub(crate) name: &'static str,
    code: Code<A>,
}

#[derive(Debug)]
enum Code<A> {
    Cpu(unsafe extern "C" fn(View, A)),
    #[cfg(feature = "cuda")]
    Gpu {
        function: CudaFunction,
        stream: Arc<CudaStream>,
        threads: u32,
        arguments: PhantomData<A>,
    },
    #[cfg(not(feature = "cuda"))]
    #[allow(dead_code, reason = "it keeps A in use")]
    None(PhantomData<A>),
}

/// A structure on its way to CUDA.
#[cfg(feature = "cuda")]
#[repr(transparent)]
struct Plain<T>(T);

#[cfg(feature = "cuda")]
// SAFETY: those who make one promise that it is plain data, laid out as in C.
unsafe impl<T> DeviceRepr for Plain<T> {}

#[cfg(feature = "cuda")]
fn gpu_error<E: std::fmt::Debug>(call: &'static str) -> impl FnOnce(E) -> Error {
    move |error| Error::Gpu(format!("{call}: {error:?}"))
}

impl Processor {
    pub(crate) fn load<A>(&self, kernel: &Kernel<A>) -> Result<Loaded<A>> {
        let code = match self {
            Self::Cpu => Code::Cpu(kernel.cpu),
            #[cfg(feature = "cuda")]
            Self::Gpu(gpu) => {
                let context = gpu.context();
                let image = match kernel.image {
                    Some(image) => image.to_vec(),
                    None => {
                        let (major, minor) = context
                            .compute_capability()
                            .map_err(gpu_error("cuDeviceGetAttribute"))?;
                        let target = format!("sm_{major}{minor}");
                        let compiled =
                            ibgda_device::kernels::nvrtc::compile(kernel.source, &target);
                        compiled
                            .map_err(|error| Error::Gpu(error.to_string()))?
                            .image
                    }
                };
                let module = context
                    .load_module(Ptx::from_binary(image))
                    .map_err(gpu_error("cuModuleLoadData"))?;
                Code::Gpu {
                    function: module
                        .load_function(kernel.name)
                        .map_err(gpu_error("cuModuleGetFunction"))?,
                    stream: context.new_stream().map_err(gpu_error("cuStreamCreate"))?,
                    threads: kernel.threads,
                    arguments: PhantomData,
                }
            }
        };
        Ok(Loaded {
            name: kernel.name,
            code,
        })
    }
}

impl<A: Copy + Send> Loaded<A> {
    /// Runs it to its end.
    ///
    /// # Safety
    /// What `view` and `arguments` point to is there for the processor, and nobody else uses the QPs meanwhile; `A` is what
    /// the kernel takes.
    pub(crate) unsafe fn run(&self, view: View, arguments: A) -> Result<()> {
        match &self.code {
            Code::Cpu(kernel) => {
                thread::scope(|scope| {
                    // SAFETY: by this function's contract.
                    scope.spawn(move || unsafe { kernel(view, arguments) });
                });
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Code::Gpu {
                function,
                stream,
                threads,
                ..
            } => {
                let (view, arguments) = (Plain(view), Plain(arguments));
                let mut launch = stream.launch_builder(function);
                launch.arg(&view).arg(&arguments);
                // SAFETY: the arguments are those of the kernel; the rest is this function's contract.
                let launched = unsafe {
                    launch.launch(LaunchConfig {
                        grid_dim: (1, 1, 1),
                        block_dim: (*threads, 1, 1),
                        shared_mem_bytes: 0,
                    })
                };
                launched.map_err(gpu_error("cuLaunchKernel"))?;
                stream
                    .synchronize()
                    .map_err(gpu_error("cuStreamSynchronize"))
            }
            #[cfg(not(feature = "cuda"))]
            Code::None(_) => unreachable!("none is made"),
        }
    }
}
