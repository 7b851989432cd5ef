// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads of this process: they see its memory as it is.

use super::{HostRange, Launched, Processor, Reached, no_kernel};
use crate::error::{Error, Result, Source};
use std::{
    ptr::with_exposed_provenance_mut,
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::Duration,
};

/// A kernel compiled for CPU threads: it takes its argument, and the number of the block that it is.
pub type Kernel = unsafe extern "C" fn(argument: *const std::ffi::c_void, block: u32);

/// Threads of this process, one for each block of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Threads(&'static [(&'static str, Kernel)]);

impl Threads {
    /// Threads that run these kernels, by name.
    pub const fn new(kernels: &'static [(&'static str, Kernel)]) -> Self {
        Self(kernels)
    }
}

impl Processor for Threads {
    fn name(&self) -> String {
        "CPU threads".to_owned()
    }

    unsafe fn register(&self, range: &HostRange) -> Result<Reached> {
        Ok(Reached::new(range.address.expose_provenance() as u64, ()))
    }

    fn alloc(&self, bytes: usize) -> Result<Reached> {
        // As aligned as handles must be, and more.
        let memory = vec![[0u64; 16]; bytes.div_ceil(128) + 1];
        let start = memory.as_ptr().expose_provenance() as u64;
        Ok(Reached::new(start.next_multiple_of(128), memory))
    }

    unsafe fn write(&self, to: u64, bytes: &[u8]) -> Result<()> {
        let to = with_exposed_provenance_mut::<u8>(to as usize);
        // SAFETY: by this function's contract.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    unsafe fn read(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        let from = with_exposed_provenance_mut::<u8>(from as usize);
        // SAFETY: by this function's contract.
        unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    unsafe fn launch(&self, kernel: &str, blocks: u32, argument: u64) -> Result<Box<dyn Launched>> {
        let found = self.0.iter().find(|(name, _)| *name == kernel);
        let (_, run) = *found.ok_or_else(|| no_kernel(&self.name(), kernel))?;
        let (tell, ended) = channel();
        // Dropped early, it waits for those that have been started.
        let mut running = Running { ended, left: 0 };
        for block in 0..blocks {
            let tell = tell.clone();
            let body = move || {
                let argument = with_exposed_provenance_mut(argument as usize);
                // SAFETY: by this function's contract.
                unsafe { run(argument, block) };
                let _ = tell.send(());
            };
            let started = thread::Builder::new().name(format!("block-{block}"));
            started.spawn(body).map_err(|error| {
                Error::errno_with(
                    Source::Argument,
                    format!("launch {kernel} on {blocks} threads"),
                    error.raw_os_error().unwrap_or(libc::EAGAIN),
                    "",
                    "",
                )
            })?;
            running.left += 1;
        }
        Ok(Box::new(running))
    }
}

struct Running {
    ended: Receiver<()>,
    left: u32,
}

impl Launched for Running {
    fn wait(&mut self, patience: Duration) -> Result<bool> {
        while self.left > 0 {
            match self.ended.recv_timeout(patience) {
                Ok(()) => self.left -= 1,
                Err(RecvTimeoutError::Timeout) => return Ok(false),
                // A thread that ended without a word would have aborted the process.
                Err(RecvTimeoutError::Disconnected) => self.left = 0,
            }
        }
        Ok(true)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // What the threads use may go after this.
        while self.left > 0 && self.ended.recv().is_ok() {
            self.left -= 1;
        }
    }
}
