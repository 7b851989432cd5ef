// SPDX-License-Identifier: MIT OR Apache-2.0
//! How memory requests of the model's functions find their target: system memory, or a BAR of another function.
//!
//! Each function has a [`Port`]. Its DMA goes to what the host mapped for it ([`DmaTable`]), else to a peer's BAR that
//! is plain memory. Only [`Dma::post`] reaches registers: an engine that holds its function's lock while it writes must
//! never wait for another function's, or two NICs that write to each other's BARs would wait for ever.

use std::sync::{Arc, PoisonError, RwLock, Weak};

use vm_memory::VolatileSlice;

use crate::dma::DmaTable;
use crate::mem::SharedMemory;
use crate::platform::{Dma, DmaFault, Function};

/// A BAR that the host placed.
struct Window {
    function: Weak<dyn Function>,
    owner: usize,
    bar: usize,
    base: u64,
    size: u64,
    memory: Option<Arc<SharedMemory>>,
}

/// The BARs of every function in the process, by bus address.
#[derive(Default)]
pub struct Bus {
    windows: RwLock<Vec<Window>>,
}

/// Where an access goes when it is not to system memory.
struct Target {
    function: Arc<dyn Function>,
    bar: usize,
    offset: u64,
    memory: Option<Arc<SharedMemory>>,
}

impl Bus {
    /// An empty bus.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    fn place(&self, owner: usize, function: &Arc<dyn Function>, bar: usize, address: Option<u64>) {
        let mut windows = self.windows.write().unwrap_or_else(PoisonError::into_inner);
        windows.retain(|w| (w.owner, w.bar) != (owner, bar));
        if let Some(base) = address {
            let size = function.bar_sizes()[bar];
            let (function, memory) = (Arc::downgrade(function), function.bar_memory(bar));
            windows.push(Window {
                function,
                owner,
                bar,
                base,
                size,
                memory,
            });
        }
    }

    /// The BAR of another function than `from` that holds the whole access.
    fn route(&self, from: usize, addr: u64, len: usize) -> Option<Target> {
        let windows = self.windows.read().unwrap_or_else(PoisonError::into_inner);
        let holds = |w: &&Window| {
            let offset = addr.checked_sub(w.base);
            let end = offset.and_then(|offset| offset.checked_add(len as u64));
            w.owner != from && end.is_some_and(|end| end <= w.size)
        };
        let window = windows.iter().find(holds)?;
        Some(Target {
            function: window.function.upgrade()?,
            bar: window.bar,
            offset: addr - window.base,
            memory: window.memory.clone(),
        })
    }
}

/// A function's connection to the bus: its requests leave here.
pub struct Port {
    bus: Arc<Bus>,
    id: usize,
    system: DmaTable,
}

impl Port {
    /// A port of the function numbered `id`, which no other port on the bus has.
    pub fn new(bus: &Arc<Bus>, id: usize) -> Arc<Self> {
        Arc::new(Self {
            bus: Arc::clone(bus),
            id,
            system: DmaTable::default(),
        })
    }

    /// System memory as the host maps it for this function.
    pub fn system(&self) -> &DmaTable {
        &self.system
    }

    /// Makes a BAR of the port's function reachable at a bus address, or not at all.
    pub fn place(&self, function: &Arc<dyn Function>, bar: usize, address: Option<u64>) {
        self.bus.place(self.id, function, bar, address);
    }

    fn peer_memory<T>(
        &self,
        fault: DmaFault,
        access: impl FnOnce(&SharedMemory, u64) -> Result<T, crate::mem::OutOfReach>,
    ) -> Result<T, DmaFault> {
        // While bus mastering is off nothing may leave the port.
        if !self.system.enabled() {
            return Err(fault);
        }
        let target = self
            .bus
            .route(self.id, fault.addr, fault.len)
            .ok_or(fault)?;
        let memory = target.memory.ok_or(fault)?;
        access(&memory, target.offset).map_err(|_| fault)
    }
}

/// The whole access as a fault, for the attempt at a peer: system memory's fault names the first missing byte only.
fn whole(addr: u64, len: usize, write: bool) -> DmaFault {
    DmaFault { addr, len, write }
}

impl Dma for Port {
    fn read(&self, addr: u64, buf: &mut [u8]) -> Result<(), DmaFault> {
        self.system.read(addr, buf).or_else(|fault| {
            let len = buf.len();
            self.peer_memory(whole(addr, len, false), |m, at| m.read(at, buf))
                .map_err(|_| fault)
        })
    }

    fn write(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault> {
        self.system.write(addr, buf).or_else(|fault| {
            self.peer_memory(whole(addr, buf.len(), true), |m, at| m.write(at, buf))
                .map_err(|_| fault)
        })
    }

    fn publish(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault> {
        self.system.publish(addr, buf).or_else(|fault| {
            self.peer_memory(whole(addr, buf.len(), true), |m, at| m.publish(at, buf))
                .map_err(|_| fault)
        })
    }

    fn write_entry(&self, addr: u64, entry: &[u8]) -> Result<(), DmaFault> {
        self.system.write_entry(addr, entry).or_else(|fault| {
            let last = entry.len().saturating_sub(8);
            self.peer_memory(whole(addr, entry.len(), true), |m, at| {
                m.write(at, &entry[..last])?;
                m.publish(at + last as u64, &entry[last..])
            })
            .map_err(|_| fault)
        })
    }

    fn atomic64(&self, addr: u64, f: &mut dyn FnMut(u64) -> Option<u64>) -> Result<u64, DmaFault> {
        self.system.atomic64(addr, f).or_else(|fault| {
            self.peer_memory(whole(addr, 8, true), |m, at| m.atomic64(at, f))
                .map_err(|_| fault)
        })
    }

    fn lend(
        &self,
        addr: u64,
        len: usize,
        write: bool,
        f: &mut dyn FnMut(VolatileSlice<'_>),
    ) -> Result<(), DmaFault> {
        let mut begun = false;
        let mut lend = |slice: VolatileSlice<'_>| {
            begun = true;
            f(slice);
        };
        match self.system.lend(addr, len, write, &mut lend) {
            // What has been lent is not lent again.
            Err(fault) if !begun => self
                .peer_memory(whole(addr, len, write), |m, at| {
                    f(m.slice(at, len, write)?);
                    Ok(())
                })
                .map_err(|_| fault),
            result => result,
        }
    }

    fn post(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault> {
        if !self.system.enabled() {
            return Err(whole(addr, buf.len(), true));
        }
        match self.bus.route(self.id, addr, buf.len()) {
            Some(target) => {
                target.function.bar_write(target.bar, target.offset, buf);
                Ok(())
            }
            None => self.system.write(addr, buf),
        }
    }
}
