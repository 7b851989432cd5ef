// SPDX-License-Identifier: MIT OR Apache-2.0
//! A GPU outside the virtual machine that this process is in.
//!
//! The guest's RAM and the doorbell pages of its NIC are files outside, so a process there that knows where in them a range
//! lies can let a GPU reach it: the agent (`ci/hil/agent`). It is told by page lists, of exactly what this library registers with
//! any [`Processor`]: queue memory and the doorbell page that the broker granted, the broker's status page, and memory
//! registered with the NIC, whose pages stay where they are for that reason. The frames of pages are the kernel's word
//! (`/proc/self/pagemap`), which it gives to root only; a doorbell page's place in BAR 0 is the broker's.
//!
//! For tests and demonstrations: whoever may talk to the agent can have it map any memory of the guest.

mod channel;
mod pages;
pub mod protocol;

use crate::{
    error::{Error, Result, Source},
    processor::{HostKind, HostRange, Launched, Processor, Reached},
};
use channel::Channel;
use protocol::{Answer, Kind, MOST_BYTES, Request, VERSION};
use std::{
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// The guest's port to the agent, as `ci/vm --outside-gpu` makes it.
pub const PORT: &str = "/dev/virtio-ports/org.ibgda.gpu";

/// The agent may be busy with another's kernels, and the guest is emulated.
const PATIENCE: Duration = Duration::from_secs(60);
/// Others of this process want to ask too.
const ONE_WAIT: Duration = Duration::from_millis(200);

/// A GPU behind an agent. One process at a time.
#[derive(Clone, Debug)]
pub struct Outside(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    channel: Mutex<Channel>,
    name: String,
}

impl Outside {
    /// Begins to talk to the agent, which forgets whoever talked to it before.
    ///
    /// # Errors
    /// `ENODEV`: no such port; `ETIMEDOUT`: nobody answers; `EPROTO`: an agent of another version.
    pub fn open(port: impl AsRef<Path>) -> Result<Self> {
        let mut channel = Channel::open(port.as_ref())?;
        match channel.ask(Request::Hello { version: VERSION }, PATIENCE)? {
            Answer::Hello { processor } => Ok(Self(Arc::new(Shared {
                channel: channel.into(),
                name: format!("{processor}, outside"),
            }))),
            other => Err(unexpected("open", &other)),
        }
    }

    fn ask(&self, request: Request, patience: Duration) -> Result<Answer> {
        crate::worker::lock(&self.0.channel).ask(request, patience)
    }

    fn memory(&self, what: &str, request: Request) -> Result<Reached> {
        match self.ask(request, PATIENCE)? {
            Answer::Memory { id, address } => {
                let outside = self.clone();
                Ok(Reached::new(address, Held { outside, id }))
            }
            other => Err(unexpected(what, &other)),
        }
    }
}

/// Something that the agent has for us.
struct Held {
    outside: Outside,
    id: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        // The agent forgets all when the next client comes, too.
        let _ = self.outside.ask(Request::Release { id: self.id }, PATIENCE);
    }
}

fn unexpected(what: &str, answer: &Answer) -> Error {
    Error::new(
        Source::Agent,
        libc::EPROTO,
        format!("{what}, by the agent of a GPU outside"),
        format!("it answered {answer:?}"),
        "are agent and library of one build?",
    )
}

impl Processor for Outside {
    fn name(&self) -> String {
        self.0.name.clone()
    }

    unsafe fn register(&self, range: &HostRange) -> Result<Reached> {
        let (kind, pages) = match range.kind {
            HostKind::Doorbell => (Kind::Doorbell, pages::doorbell(range)?),
            // SAFETY: mapped, by this function's contract.
            HostKind::Memory => (Kind::Memory, unsafe { pages::frames(range) }?),
            // SAFETY: as above.
            HostKind::ReadOnly => (Kind::ReadOnly, unsafe { pages::frames(range) }?),
        };
        let offset = range.address.addr() as u64 % pages::PAGE;
        let reached = self.memory("register memory", Request::Register { kind, pages })?;
        Ok(Reached::new(reached.address() + offset, reached))
    }

    fn alloc(&self, bytes: usize) -> Result<Reached> {
        let bytes = bytes as u64;
        self.memory("allocate memory", Request::Alloc { bytes })
    }

    unsafe fn write(&self, to: u64, bytes: &[u8]) -> Result<()> {
        for (at, part) in (to..).step_by(MOST_BYTES).zip(bytes.chunks(MOST_BYTES)) {
            let (address, bytes) = (at, part.to_vec());
            match self.ask(Request::Write { address, bytes }, PATIENCE)? {
                Answer::Done => {}
                other => return Err(unexpected("write memory", &other)),
            }
        }
        Ok(())
    }

    unsafe fn read(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        for (at, part) in (from..)
            .step_by(MOST_BYTES)
            .zip(bytes.chunks_mut(MOST_BYTES))
        {
            let (address, bytes) = (at, part.len() as u64);
            match self.ask(Request::Read { address, bytes }, PATIENCE)? {
                Answer::Bytes { bytes } if bytes.len() == part.len() => {
                    part.copy_from_slice(&bytes)
                }
                other => return Err(unexpected("read memory", &other)),
            }
        }
        Ok(())
    }

    unsafe fn launch(&self, kernel: &str, blocks: u32, argument: u64) -> Result<Box<dyn Launched>> {
        let kernel = kernel.to_owned();
        let request = Request::Launch {
            kernel,
            blocks,
            argument,
        };
        match self.ask(request, PATIENCE)? {
            Answer::Launched { id } => {
                let outside = self.clone();
                Ok(Box::new(Running(Held { outside, id })))
            }
            other => Err(unexpected("launch", &other)),
        }
    }
}

/// A kernel that was launched. Dropping it waits for its end, as the agent does.
struct Running(Held);

impl Launched for Running {
    fn wait(&mut self, patience: Duration) -> Result<bool> {
        let end = Instant::now() + patience;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let milliseconds = left.min(ONE_WAIT).as_millis() as u64;
            let id = self.0.id;
            let request = Request::Wait { id, milliseconds };
            match self.0.outside.ask(request, PATIENCE)? {
                Answer::Ended { ended } if ended || left <= ONE_WAIT => return Ok(ended),
                Answer::Ended { .. } => {}
                other => return Err(unexpected("wait", &other)),
            }
        }
    }
}
