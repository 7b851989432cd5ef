// SPDX-License-Identifier: MIT OR Apache-2.0
//! Functions for a process, without a VM: what rings their doorbells is a thread of the process, or a GPU that has its memory.
//!
//! The engine is the same as behind [`vfio`](crate::vfio), and objects are made by the same commands. What differs is
//! how the two sides meet. Queues, doorbell records and buffers are ordinary memory of the process, registered first; bus
//! addresses are virtual addresses. UAR pages are ordinary memory too, which one engine thread looks at. So doorbells cost
//! their writer a store, and a GPU can ring through memory that was given to `cudaHostRegister`. The engine asks nothing of
//! that memory but loads, stores and the processor's atomic exchange.
//!
//! ```
//! use connectx::inproc::{Access, Fabric, Options, QpSpec};
//!
//! let fabric = Fabric::new(&Options::default())?;
//! let nic = fabric.nic(0).unwrap();
//! let pd = nic.alloc_pd()?;
//! let memory = fabric.alloc(8192)?;
//! let key = nic.create_mkey(pd, memory.addr(), memory.len() as u64, Access::ALL)?;
//! let qp = nic.open_qp(pd, &QpSpec::default())?;
//! nic.connect(qp.qpn, &qp.peer(nic.lid()))?; // to itself
//! // Now build a WQE at qp.send_ring, update qp.record, and store to qp.doorbell.
//! # let _ = key;
//! # Ok::<(), connectx::inproc::Error>(())
//! ```

mod capi;
mod events;
mod memory;
mod nic;
mod queues;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::engine::doorbell::{self, Halves};
use crate::hca::{Hca, HcaConfig};
use crate::log::Referee;
use crate::platform::Function as _;
use crate::polling::{Page, Pause, Rings, Rung, Watched};
use crate::wire::fabric::Next;

use events::Events;
use memory::Registry;

pub use events::Event;
pub use memory::{Memory, PAGE, RegisterError};
pub use nic::{Access, CqSpec, Error, Loss, Nic, Peer, WqSpec};
pub use queues::{Place, Qp, QpSpec};

/// How a fabric is made.
#[derive(Debug, Clone)]
pub struct Options {
    /// Functions, 1 to 64. They reach each other, and themselves, by LID.
    pub nics: usize,
    /// How long after it last had work the engine thread looks without a pause. Then it sleeps between looks, longer the
    /// longer nothing comes, up to a millisecond, and after a second up to five. [`Duration::MAX`] never sleeps: for
    /// measurements with a core to spare.
    pub spin: Duration,
    /// Where refusals go.
    pub referee: Referee,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            nics: 2,
            spin: Duration::from_millis(2),
            referee: Referee::in_memory(),
        }
    }
}

/// What API and engine thread share.
struct Shared {
    fabric: Arc<crate::wire::Fabric>,
    registry: Arc<Registry>,
    pages: Watched<Vec<Page>>,
    events: Vec<Arc<Events>>,
    stop: AtomicBool,
    frozen: AtomicBool,
}

/// Functions of this process and the engine thread that serves them. Dropping it ends the thread; then nothing touches
/// registered memory any more.
pub struct Fabric {
    shared: Arc<Shared>,
    nics: Vec<Nic>,
    engine: Option<JoinHandle<()>>,
}

impl Fabric {
    /// A fabric with its functions brought up: `nic0`, `nic1` and so on, LIDs 1, 2 and so on.
    pub fn new(options: &Options) -> Result<Self, Error> {
        if !(1..=64).contains(&options.nics) {
            return Err(Error::Argument("a fabric has 1 to 64 functions"));
        }
        let wire = crate::wire::Fabric::polled(options.referee.clone());
        let hcas: Vec<Arc<Hca>> = (0..options.nics)
            .map(|index| Arc::new(Hca::new(&wire, HcaConfig::numbered(index))))
            .collect();
        let shared = Arc::new(Shared {
            fabric: wire,
            registry: Arc::default(),
            pages: Watched::default(),
            events: hcas.iter().map(|_| Arc::default()).collect(),
            stop: AtomicBool::new(false),
            frozen: AtomicBool::new(false),
        });
        let mut nics = Vec::new();
        for (index, hca) in hcas.into_iter().enumerate() {
            hca.connect(shared.registry.clone(), shared.events[index].clone());
            hca.bus_master(true);
            nics.push(Nic::new(&shared, index, hca)?);
        }
        let engine = {
            let (shared, spin) = (shared.clone(), options.spin);
            std::thread::Builder::new()
                .name("engine".into())
                .spawn(move || shared.run(spin))?
        };
        Ok(Self {
            shared,
            nics,
            engine: Some(engine),
        })
    }

    /// The functions.
    pub fn nics(&self) -> &[Nic] {
        &self.nics
    }

    /// A function.
    pub fn nic(&self, index: usize) -> Option<&Nic> {
        self.nics.get(index)
    }

    /// New zeroed memory of at least `len` bytes, registered as long as it lives.
    pub fn alloc(&self, len: usize) -> Result<Memory, Error> {
        Ok(Memory::new(&self.shared.registry, len)?)
    }

    /// Lets the functions' bus masters reach memory of the caller. Memory keys can then be made for it, and queues in it.
    ///
    /// # Safety
    /// The range must be mapped for reading and writing until [`Fabric::unregister`] returns or the fabric is dropped,
    /// and nothing may rely on its bytes in ways that a concurrent store by a device would break.
    pub unsafe fn register(&self, addr: *mut u8, len: usize) -> Result<(), Error> {
        // SAFETY: as required of the caller; a dropped fabric has no engine that could access it.
        Ok(unsafe { self.shared.registry.add(addr as u64, len as u64) }?)
    }

    /// Takes memory back. When this returns no access to it is under way, and every later one is a DMA fault. `false` if
    /// no registered range starts at `addr`.
    pub fn unregister(&self, addr: *mut u8) -> bool {
        self.shared.registry.remove(addr as u64)
    }

    /// Stops the engine, as firmware that hangs does: no doorbell is seen, nothing moves, until it is let go again.
    pub fn freeze(&self, frozen: bool) {
        self.shared.frozen.store(frozen, Ordering::SeqCst);
        // What the engine thread was at has ended once the lock it holds meanwhile was free.
        drop(self.shared.pages.change());
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(engine) = self.engine.take() {
            engine.thread().unpark();
            if engine.join().is_err() {
                tracing::error!("the engine thread has panicked");
            }
        }
    }
}

impl Shared {
    /// The engine thread.
    fn run(&self, spin: Duration) {
        let mut pause = Pause::new(spin);
        let mut rings = Rings::default();
        let mut next = Next::AtOnce;
        while !self.stop.load(Ordering::Relaxed) {
            if self.look(&mut rings, &mut next) {
                pause.worked();
            } else {
                pause.wait(&next);
            }
        }
    }

    /// Looks at pages, at all if need be, and does what is to be done. Returns whether there was anything.
    fn look(&self, rings: &mut Rings, next: &mut Next) -> bool {
        let pages = self.pages.look();
        if self.frozen.load(Ordering::SeqCst) {
            *next = Next::At(None);
            return false;
        }
        rings.take(&pages, 0);
        let due = match next {
            Next::AtOnce => true,
            Next::At(deadline) => deadline.is_some_and(|deadline| deadline <= Instant::now()),
        };
        if rings.found.is_empty() && !due && !self.fabric.needs_attention() {
            return false;
        }
        *next = self.fabric.poll(|devices| {
            for Rung { at, ring, .. } in &rings.found {
                let Some((page, device)) = pages
                    .get(*at)
                    .and_then(|page| Some((page, devices.get_mut(page.nic)?)))
                else {
                    continue;
                };
                // Whole doorbells only, so that no halves are to be kept.
                let mut halves = Halves::default();
                doorbell::write(device, &mut halves, page.number, ring.offset, &ring.value);
                if page.queue_pairs.len() > 1 {
                    doorbell::merged(device, page.queue_pairs.iter().copied());
                }
            }
        });
        drop(pages);
        for (nic, events) in self.events.iter().enumerate() {
            if events.raised() {
                self.fabric.drive(nic, |device| events.take(device));
            }
        }
        true
    }
}
