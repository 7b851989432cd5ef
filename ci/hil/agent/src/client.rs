// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the guest asks for, one request after the other.

use crate::space::{Mapped, Space};
use anyhow::{Context as _, Result, bail, ensure};
use ibgda::{
    Processor,
    outside::protocol::{Answer, Envelope, Kind, MOST_BYTES, MOST_LINE, Request, VERSION},
    processor::{HostKind, HostRange, Launched, Reached},
};
use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Write},
    mem,
    os::unix::net::UnixStream,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// How long a kernel that its client has left may run on: longer than any deadline that a test gives one.
const LAST_KERNEL: Duration = Duration::from_secs(120);
/// The longest wait of one request: a client that is gone should not keep the next one waiting.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// What a client has.
enum Thing {
    /// The GPU's registration goes before the mapping.
    Memory {
        reached: Reached,
        bytes: u64,
        _mapped: Option<Mapped>,
    },
    Kernel(Box<dyn Launched>),
}

struct Client<'a> {
    name: &'a str,
    processor: &'a Arc<dyn Processor>,
    space: Space,
    things: BTreeMap<u64, Thing>,
    next: u64,
}

/// Serves until the guest's port closes.
pub fn serve(
    stream: &UnixStream,
    name: &str,
    processor: &Arc<dyn Processor>,
    control: &Path,
) -> Result<()> {
    let mut client = Client {
        name,
        processor,
        space: Space::new(control),
        things: BTreeMap::new(),
        next: 1,
    };
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        let read = (&mut reader)
            .take(MOST_LINE as u64)
            .read_until(b'\n', &mut line)
            .context("the guest's port")?;
        if read == 0 {
            return client.let_go();
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        // What an earlier client left unfinished is no request.
        let Ok(request) = serde_json::from_slice::<Envelope<Request>>(&line) else {
            continue;
        };
        let message = client.answer(request.message).unwrap_or_else(|error| {
            let errno = error.downcast_ref::<ibgda::Error>();
            Answer::Failed {
                errno: errno.map_or(libc::EIO, ibgda::Error::errno),
                why: format!("{error:#}"),
            }
        });
        let number = request.number;
        let mut text = serde_json::to_string(&Envelope { number, message })?;
        text.push('\n');
        (&mut &*stream).write_all(text.as_bytes())?;
    }
}

impl Client<'_> {
    /// Ends everything, kernels first.
    fn let_go(&mut self) -> Result<()> {
        if let Err(error) = self.wait_for_kernels() {
            // Memory that a kernel may still use is not unmapped under it, nor is its end waited for any longer.
            mem::forget(mem::take(&mut self.things));
            return Err(error);
        }
        // A client that drops things in order frees handles before what they point to.
        while self.things.pop_last().is_some() {}
        Ok(())
    }

    fn wait_for_kernels(&mut self) -> Result<()> {
        let end = Instant::now() + LAST_KERNEL;
        for thing in self.things.values_mut() {
            if let Thing::Kernel(kernel) = thing {
                let left = end.saturating_duration_since(Instant::now());
                ensure!(
                    kernel.wait(left)?,
                    "a kernel of a client that is gone runs for more than {LAST_KERNEL:?}"
                );
            }
        }
        Ok(())
    }

    fn keep(&mut self, thing: Thing) -> u64 {
        let id = self.next;
        self.next += 1;
        self.things.insert(id, thing);
        id
    }

    fn answer(&mut self, request: Request) -> Result<Answer> {
        match request {
            Request::Hello { version } => {
                ensure!(
                    version == VERSION,
                    "the guest's library speaks version {version}, this agent {VERSION}"
                );
                self.let_go()?;
                let processor = self.name.to_owned();
                Ok(Answer::Hello { processor })
            }
            Request::Register { kind, pages } => self.register(kind, &pages),
            Request::Alloc { bytes } => {
                let reached = self.processor.alloc(usize::try_from(bytes)?)?;
                let address = reached.address();
                let _mapped = None;
                let id = self.keep(Thing::Memory {
                    reached,
                    bytes,
                    _mapped,
                });
                Ok(Answer::Memory { id, address })
            }
            Request::Release { id } => self.release(id),
            Request::Write { address, bytes } => {
                self.check(address, bytes.len())?;
                // SAFETY: inside memory that the GPU reaches, as was checked; the client answers for its kernels.
                unsafe { self.processor.write(address, &bytes) }?;
                Ok(Answer::Done)
            }
            Request::Read { address, bytes } => {
                let mut copy = vec![0; usize::try_from(bytes)?.min(MOST_BYTES + 1)];
                self.check(address, copy.len())?;
                // SAFETY: as above.
                unsafe { self.processor.read(address, &mut copy) }?;
                Ok(Answer::Bytes { bytes: copy })
            }
            Request::Launch {
                kernel,
                blocks,
                argument,
            } => {
                ensure!(
                    (1..=1024).contains(&blocks),
                    "{blocks} blocks; at most 1024"
                );
                self.check(argument, 8)?;
                // SAFETY: as far as it can be known here; the client answers for what its argument says.
                let launched = unsafe { self.processor.launch(&kernel, blocks, argument) }?;
                let id = self.keep(Thing::Kernel(launched));
                Ok(Answer::Launched { id })
            }
            Request::Wait { id, milliseconds } => match self.things.get_mut(&id) {
                Some(Thing::Kernel(kernel)) => {
                    let patience = Duration::from_millis(milliseconds).min(LONGEST_WAIT);
                    let ended = kernel.wait(patience)?;
                    Ok(Answer::Ended { ended })
                }
                _ => bail!("{id} is no kernel of this client"),
            },
        }
    }

    fn register(&mut self, kind: Kind, pages: &[(u64, u64)]) -> Result<Answer> {
        let mapped = self.space.map(kind, pages)?;
        let range = HostRange {
            address: mapped.start(),
            bytes: mapped.bytes(),
            kind: match kind {
                // To the driver it is memory: a file's page, which stands for MMIO.
                Kind::Memory | Kind::Doorbell => HostKind::Memory,
                Kind::ReadOnly => HostKind::ReadOnly,
            },
            bar: None,
        };
        // SAFETY: mapped until after the registration (order in `Thing`), and shared with the guest anyway.
        let reached = unsafe { self.processor.register(&range) }?;
        let (address, bytes) = (reached.address(), mapped.bytes() as u64);
        let _mapped = Some(mapped);
        let id = self.keep(Thing::Memory {
            reached,
            bytes,
            _mapped,
        });
        Ok(Answer::Memory { id, address })
    }

    fn release(&mut self, id: u64) -> Result<Answer> {
        if let Some(Thing::Kernel(kernel)) = self.things.get_mut(&id) {
            ensure!(
                kernel.wait(LAST_KERNEL)?,
                "the kernel runs for more than {LAST_KERNEL:?}"
            );
        }
        let thing = self.things.remove(&id);
        ensure!(thing.is_some(), "{id} is nothing of this client's");
        Ok(Answer::Done)
    }

    /// Whether the client has memory at an address of the GPU's.
    fn check(&self, address: u64, bytes: usize) -> Result<()> {
        let inside = |thing: &Thing| match thing {
            Thing::Memory {
                reached,
                bytes: len,
                ..
            } => address
                .checked_sub(reached.address())
                .and_then(|offset| offset.checked_add(bytes as u64))
                .is_some_and(|end| end <= *len),
            Thing::Kernel(_) => false,
        };
        ensure!(
            bytes <= MOST_BYTES && self.things.values().any(inside),
            "{bytes} bytes at {address:#x} are not in one piece of memory of this client's, or more than {MOST_BYTES}"
        );
        Ok(())
    }
}
