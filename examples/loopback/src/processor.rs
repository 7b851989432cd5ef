// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where kernels run.

use anyhow::Result;
use ibgda::{QueuePair, Status, abi::ibgda_region, cuda::Gpu};
use ibgda_device::kernels::{cpu, gpu::Kernels, gpu::Origin};
use std::{fmt, time::Duration};

/// A GPU with kernels loaded, or CPU threads.
pub enum Processor<'a> {
    Cpu,
    Gpu {
        gpu: &'a Gpu,
        kernels: Kernels,
        origin: Origin,
    },
}

impl fmt::Display for Processor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => write!(f, "on a CPU thread"),
            Self::Gpu { origin, .. } => write!(f, "by the GPU (code by {origin})"),
        }
    }
}

impl Processor<'_> {
    /// Writes `from`, in blocks, to the same offsets of `to`, and waits for the last.
    pub fn put_blocks(
        &self,
        qp: &QueuePair,
        to: ibgda_region,
        from: ibgda_region,
        block_bytes: u32,
        timeout: Duration,
    ) -> Result<Status> {
        match self {
            Self::Cpu => {
                let handle = qp.device_handle();
                // SAFETY: the QP is borrowed, and this program runs one kernel at a time on it.
                Ok(unsafe { cpu::put_blocks(handle, to, from, block_bytes, timeout) })
            }
            Self::Gpu { gpu, kernels, .. } => {
                let handle = qp.device_handle_on(gpu)?;
                // SAFETY: as above; the handle is for this GPU.
                Ok(unsafe { kernels.put_blocks(handle, to, from, block_bytes, timeout) }?)
            }
        }
    }

    /// Waits for a completion of the send queue.
    pub fn wait(&self, qp: &QueuePair, timeout: Duration) -> Result<Status> {
        match self {
            // SAFETY: as in `put_blocks`.
            Self::Cpu => Ok(unsafe { cpu::wait(qp.device_handle(), timeout) }),
            Self::Gpu { gpu, kernels, .. } => {
                let handle = qp.device_handle_on(gpu)?;
                // SAFETY: as in `put_blocks`.
                Ok(unsafe { kernels.wait(handle, timeout) }?)
            }
        }
    }

    /// What kernels have latched of a QP, in words.
    pub fn first_error(&self, qp: &QueuePair) -> Result<String> {
        let error = match self {
            Self::Cpu => qp.send_cq().error(),
            Self::Gpu { .. } => qp.error_on_gpu()?,
        };
        Ok(error.map_or_else(
            || "no error completion".to_owned(),
            |error| error.to_string(),
        ))
    }
}
