// SPDX-License-Identifier: MIT OR Apache-2.0
//! What runs kernels: a GPU ([`cuda`](crate::cuda)), threads of this process ([`Threads`]), or a GPU outside the virtual
//! machine that this process is in ([`outside`](crate::outside)).
//!
//! A processor sees memory of this process where it was registered with it, under addresses of its own, and has memory of
//! its own for the handles of QPs.

mod queues;
mod threads;

pub(crate) use queues::{HostQueues, ProcessorQueues};
pub use threads::{Kernel, Threads};

use crate::{
    error::{Error, Result, Source},
    pci::Bdf,
};
use std::{any::Any, fmt, time::Duration};

/// What a range of host memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostKind {
    /// Ordinary memory, a memfd's too.
    Memory,
    /// Memory that is mapped for reading only, such as the broker's status page.
    ReadOnly,
    /// A doorbell page: MMIO of a NIC.
    Doorbell,
}

/// Memory of this process, for kernels.
#[derive(Clone, Copy, Debug)]
pub struct HostRange {
    /// First byte.
    pub address: *const u8,
    /// Length.
    pub bytes: usize,
    /// What it is.
    pub kind: HostKind,
    /// Of a doorbell page that the broker granted: its NIC, and its offset in BAR 0.
    pub bar: Option<(Bdf, u64)>,
}

/// Memory that a processor reaches; until it is dropped, by which time no kernel may use it.
pub struct Reached {
    address: u64,
    _owner: Box<dyn Any + Send + Sync>,
}

impl fmt::Debug for Reached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reached({:#x})", self.address)
    }
}

impl Reached {
    /// Memory at an address of the processor's, which ends with `owner`.
    pub fn new(address: u64, owner: impl Any + Send + Sync) -> Self {
        Self {
            address,
            _owner: Box::new(owner),
        }
    }

    /// Where the processor sees its first byte.
    pub fn address(&self) -> u64 {
        self.address
    }
}

/// A kernel that was launched.
pub trait Launched: Send {
    /// Waits for its end, for at most about so long. Whether it has ended.
    ///
    /// # Errors
    /// The kernel has failed, or there is no word of it.
    fn wait(&mut self, patience: Duration) -> Result<bool>;
}

/// Something that runs kernels.
pub trait Processor: fmt::Debug + Send + Sync {
    /// Tells it from others.
    fn name(&self) -> String;

    /// Lets its kernels reach host memory.
    ///
    /// # Errors
    /// Why it cannot.
    ///
    /// # Safety
    /// The range stays mapped as long as the result lives, and bears access by a device.
    unsafe fn register(&self, range: &HostRange) -> Result<Reached>;

    /// Memory of its own; its contents are not defined.
    ///
    /// # Errors
    /// There is none.
    fn alloc(&self, bytes: usize) -> Result<Reached>;

    /// Copies bytes to an address of its own.
    ///
    /// # Errors
    /// It does not answer.
    ///
    /// # Safety
    /// The range is inside memory that it reaches, and no kernel uses it meanwhile.
    unsafe fn write(&self, to: u64, bytes: &[u8]) -> Result<()>;

    /// Copies bytes from an address of its own.
    ///
    /// # Errors
    /// It does not answer.
    ///
    /// # Safety
    /// The range is inside memory that it reaches.
    unsafe fn read(&self, from: u64, bytes: &mut [u8]) -> Result<()>;

    /// Starts a kernel of one argument, in `blocks` blocks of one thread that all run at the same time.
    ///
    /// # Errors
    /// There is no such kernel, or it cannot be started.
    ///
    /// # Safety
    /// What the argument says of memory and QPs is so until the kernel has ended.
    unsafe fn launch(&self, kernel: &str, blocks: u32, argument: u64) -> Result<Box<dyn Launched>> {
        let _ = (blocks, argument);
        Err(no_kernel(&self.name(), kernel))
    }
}

/// There is no kernel of that name.
pub(crate) fn no_kernel(processor: &str, kernel: &str) -> Error {
    Error::new(
        Source::Argument,
        libc::ENOENT,
        format!("launch {kernel} on {processor}"),
        "no kernel of that name is loaded with it",
        "the kernels of kernels/library are named ibgda_kernel_…",
    )
}

/// One QP, one region is of one processor.
pub(crate) fn used_by_another(what: String) -> Error {
    Error::new(
        Source::Argument,
        libc::EBUSY,
        what,
        "another GPU has it already",
        "make one for each GPU",
    )
}
