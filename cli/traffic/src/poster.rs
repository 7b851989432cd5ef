// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who posts: kernels of a GPU, or CPU threads that stand in for it, from the same source.

use anyhow::{Result, bail};
use clap::ValueEnum;
use ibgda::{Bdf, QueuePair, Status, abi::ibgda_error, abi::ibgda_qp, cuda::Gpu};
use ibgda_device::kernels::{
    cpu,
    gpu::{Kernels, Origin, load},
    requests::{ibgda_job, ibgda_request, ibgda_stream},
};
use std::{fmt, ptr, time::Duration};

/// Where kernels are to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum On {
    /// The GPU if CUDA shows it and lets it have the doorbell, else CPU threads.
    Auto,
    /// CPU threads.
    Cpu,
    /// The GPU, or fail.
    Gpu,
}

/// A GPU with kernels loaded, or CPU threads.
#[derive(Debug)]
pub enum Poster {
    /// With the reason.
    Cpu(String),
    Gpu {
        gpu: Gpu,
        kernels: Kernels,
        origin: Origin,
    },
}

impl fmt::Display for Poster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu(why) => write!(f, "CPU threads, which stand in for the GPU ({why})"),
            Self::Gpu { gpu, origin, .. } => {
                let name = gpu.context().name().unwrap_or_default();
                let bdf = gpu
                    .bdf()
                    .map_or_else(|_| String::new(), |bdf| bdf.to_string());
                write!(f, "the GPU {name} at {bdf} (code by {origin})")
            }
        }
    }
}

/// The requests of one QP, for [`Poster::jobs`].
pub struct Job<'a> {
    pub qp: &'a mut QueuePair,
    pub requests: &'a mut [ibgda_request],
}

/// How a job ended: its first failure, and how many requests were posted before.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    pub status: Status,
    pub done: usize,
}

impl Poster {
    /// Takes the GPU if it can ring for `qp`. `gpu` is its address, or `None` for the first that CUDA shows.
    pub fn choose(on: On, gpu: Option<Bdf>, qp: &QueuePair) -> Result<Self> {
        if on == On::Cpu {
            return Ok(Self::Cpu("as asked for".to_owned()));
        }
        match Self::on_gpu(gpu, qp) {
            Ok(poster) => Ok(poster),
            Err(error) if on == On::Auto => Ok(Self::Cpu(reason(&error))),
            Err(error) => bail!("kernels cannot run on the GPU: {error:#}"),
        }
    }

    fn on_gpu(gpu: Option<Bdf>, qp: &QueuePair) -> Result<Self> {
        let gpu = gpu.map_or_else(Gpu::first, Gpu::open)?;
        // As far as CUDA's gate for doorbells.
        qp.device_handle_on(&gpu)?;
        let (module, origin) = load(gpu.context())?;
        Ok(Self::Gpu {
            kernels: Kernels::new(gpu.context(), &module)?,
            gpu,
            origin,
        })
    }

    /// What to choose, to get the same once more.
    pub fn on(&self) -> On {
        match self {
            Self::Cpu(_) => On::Cpu,
            Self::Gpu { .. } => On::Gpu,
        }
    }

    /// `cpu` or `gpu`, for programs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Cpu(_) => "cpu",
            Self::Gpu { .. } => "gpu",
        }
    }

    fn handle(&self, qp: &mut QueuePair) -> Result<*mut ibgda_qp> {
        Ok(match self {
            Self::Cpu(_) => qp.device_handle(),
            Self::Gpu { gpu, .. } => {
                ptr::without_provenance_mut(qp.device_handle_on(gpu)? as usize)
            }
        })
    }

    /// Runs all jobs at the same time. `timeout` is for each wait.
    pub fn jobs(&self, jobs: &mut [Job<'_>], timeout: Duration) -> Result<Vec<Ended>> {
        let mut raw = Vec::with_capacity(jobs.len());
        for job in jobs.iter_mut() {
            raw.push(ibgda_job {
                qp: self.handle(job.qp)?,
                requests: job.requests.as_mut_ptr(),
                timeout_ns: nanoseconds(timeout),
                count: u32::try_from(job.requests.len())?,
                ..Default::default()
            });
        }
        match self {
            // SAFETY: each QP is borrowed by its job alone, and so are the requests, which are as many as the job says.
            Self::Cpu(_) => unsafe { cpu::jobs(&mut raw) },
            // SAFETY: as above; the handles are for this GPU.
            Self::Gpu { kernels, .. } => unsafe { kernels.jobs(&mut raw) }?,
        }
        Ok(raw
            .iter()
            .map(|job| Ended {
                status: Status(job.status),
                done: job.done as usize,
            })
            .collect())
    }

    /// Runs all streams at the same time, each on its QP.
    pub fn streams(&self, qps: &mut [QueuePair], streams: &mut [ibgda_stream]) -> Result<()> {
        anyhow::ensure!(qps.len() == streams.len(), "a stream for each QP");
        for (qp, stream) in qps.iter_mut().zip(streams.iter_mut()) {
            stream.qp = self.handle(qp)?;
        }
        match self {
            // SAFETY: each stream has a QP of its own, which is borrowed.
            Self::Cpu(_) => unsafe { cpu::streams(streams) },
            // SAFETY: as above; the handles are for this GPU.
            Self::Gpu { kernels, .. } => unsafe { kernels.streams(streams) }?,
        }
        Ok(())
    }

    /// What kernels have latched of a QP.
    pub fn first_error(&self, qp: &QueuePair) -> Result<Option<ibgda_error>> {
        Ok(match self {
            Self::Cpu(_) => {
                let receive = || qp.recv_cq().and_then(|cq| cq.error());
                qp.send_cq().error().or_else(receive)
            }
            Self::Gpu { .. } => qp.error_on_gpu()?,
        })
    }

    /// The same in words, for a job or stream that ended in `status`.
    pub fn explain(&self, qp: &QueuePair, status: Status) -> String {
        match self.first_error(qp) {
            Ok(Some(error)) => error.to_string(),
            Ok(None) => format!("QP {:#x}: {status}; {}", qp.number(), status.advice()),
            Err(error) => format!("QP {:#x}: {status}; {error:#}", qp.number()),
        }
    }
}

/// Without what to do about it: a CPU thread is no fault.
fn reason(error: &anyhow::Error) -> String {
    match error.downcast_ref::<ibgda::Error>() {
        Some(error) => format!("{}: {}", error.what(), error.why()),
        None => format!("{error:#}"),
    }
}

/// For a deadline of the device header.
pub fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
