// SPDX-License-Identifier: MIT OR Apache-2.0
//! Serves a [`Function`] to QEMU's `vfio-user-pci` over a Unix socket.
//!
//! One thread and one client at a time for each function. What the protocol crate hands over is translated here:
//! config accesses to [`ConfigSpace`], what they mean and BAR accesses to the function, DMA maps to the function's
//! [`Port`], SET_IRQS to its [`Vectors`].

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, anyhow, bail};
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_INFO_EVENTFD, VFIO_IRQ_SET_ACTION_MASK, VFIO_IRQ_SET_ACTION_TRIGGER,
    VFIO_IRQ_SET_ACTION_TYPE_MASK, VFIO_IRQ_SET_ACTION_UNMASK, VFIO_IRQ_SET_DATA_EVENTFD,
    VFIO_IRQ_SET_DATA_NONE, VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_MSIX_IRQ_INDEX,
    VFIO_PCI_NUM_IRQS, VFIO_PCI_NUM_REGIONS, VFIO_REGION_INFO_FLAG_MMAP,
    VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE, vfio_region_info,
    vfio_region_sparse_mmap_area,
};
use vfio_user::{
    DmaMapFlags, DmaUnmapFlags, IrqInfo, Server, ServerBackend, ServerRegion, SparseArea,
};

use crate::bus::{Bus, Port};
use crate::irq::Vectors;
use crate::log::{Referee, Refusal};
use crate::mem::SharedMemory;
use crate::pci::{self, ConfigSpace, Event};
use crate::platform::{Dma, Function, Interrupts, ResetKind};

/// The longest access to a region that is served; no CPU makes a longer one, and the client's count is not to be trusted.
const MAX_ACCESS: usize = 4096;

/// A function with its socket, ready to be served.
pub struct Endpoint {
    server: Server,
    backend: Backend,
    /// Memory of BARs that the client maps itself; kept for as long as the server may hand out its file.
    _mapped: Vec<Arc<SharedMemory>>,
}

impl Endpoint {
    /// Binds the socket and connects the function to the bus as number `id`. A stale socket at `path` is replaced.
    pub fn new(
        path: &Path,
        id: usize,
        function: Arc<dyn Function>,
        bus: &Arc<Bus>,
        referee: Referee,
    ) -> anyhow::Result<Self> {
        remove_stale_socket(path)?;
        let sizes = function.bar_sizes();
        let mapped: Vec<_> = (0..sizes.len())
            .map(|bar| function.bar_window(bar))
            .collect();
        let regions = (0..VFIO_PCI_NUM_REGIONS)
            .map(|index| match index {
                VFIO_PCI_CONFIG_REGION_INDEX => region(index, pci::SIZE as u64, None),
                _ => {
                    let size = sizes.get(index as usize).copied().unwrap_or(0);
                    region(
                        index,
                        size,
                        mapped.get(index as usize).and_then(Option::as_ref),
                    )
                }
            })
            .collect();
        let vectors = function.msix_vectors();
        let irqs = (0..VFIO_PCI_NUM_IRQS)
            .map(|index| match index {
                VFIO_PCI_MSIX_IRQ_INDEX if vectors > 0 => IrqInfo {
                    index,
                    flags: VFIO_IRQ_INFO_EVENTFD,
                    count: u32::from(vectors),
                },
                _ => IrqInfo {
                    index,
                    flags: 0,
                    count: 0,
                },
            })
            .collect();
        let server = Server::new(path, true, irqs, regions)
            .with_context(|| format!("socket {}", path.display()))?;
        let card = Card::new(function, id, bus);
        let backend = Backend {
            card,
            referee,
            client: Arc::default(),
            busy: false,
        };
        Ok(Self {
            server,
            backend,
            _mapped: mapped
                .into_iter()
                .flatten()
                .map(|(memory, _)| memory)
                .collect(),
        })
    }

    /// The function as a card in its slot, for others to look at and to pull.
    pub fn card(&self) -> Arc<Card> {
        Arc::clone(&self.backend.card)
    }

    /// Set while a client is known to be there.
    pub fn client(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.backend.client)
    }

    /// Serves one client until it goes away, then leaves the function as after power-on.
    ///
    /// `Ok` tells how the client went; `Err` is a failure of the model's own.
    pub fn serve(&mut self) -> anyhow::Result<Departure> {
        let (server, backend) = (&self.server, &mut self.backend);
        // The protocol crate panics on some malformed messages (a VERSION whose length or text is wrong).
        let outcome = catch_unwind(AssertUnwindSafe(|| server.run(backend)));
        if outcome.is_err() && self.backend.busy {
            bail!("{} panicked", self.backend.card.name());
        }
        self.backend.client_gone();
        match outcome {
            Ok(Ok(())) => Ok(Departure::Closed),
            Ok(Err(error @ vfio_user::Error::SocketAccept(_))) => Err(error.into()),
            Ok(Err(error)) => Ok(Departure::Broken(error.to_string())),
            Err(_) => Ok(Departure::Broken("a message that makes no sense".into())),
        }
    }
}

/// How a client went away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Departure {
    /// It closed the connection between two messages.
    Closed,
    /// The connection broke, or what came was not the protocol.
    Broken(String),
}

/// Removes a socket that an earlier process left; anything else in its place is an error.
pub fn remove_stale_socket(path: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::FileTypeExt;
    match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => {
            std::fs::remove_file(path).with_context(|| format!("stale socket {}", path.display()))
        }
        Ok(_) => Err(anyhow!("{} exists and is no socket", path.display())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

fn region(index: u32, size: u64, window: Option<&(Arc<SharedMemory>, Range<u64>)>) -> ServerRegion {
    let mut flags = 0;
    if size > 0 {
        flags = VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;
    }
    if window.is_some() {
        flags |= VFIO_REGION_INFO_FLAG_MMAP;
    }
    ServerRegion {
        region_info: vfio_region_info {
            argsz: size_of::<vfio_region_info>() as u32,
            flags,
            index,
            size,
            ..Default::default()
        },
        sparse_areas: window
            .map(|(_, range)| SparseArea {
                area: vfio_region_sparse_mmap_area {
                    offset: range.start,
                    size: range.end - range.start,
                },
            })
            .into_iter()
            .collect(),
        mmap_fd: window.map(|(memory, _)| memory.file().as_raw_fd()),
    }
}

/// A function in a slot of its host, from which it can be pulled.
pub struct Card {
    function: Arc<dyn Function>,
    /// Locked for single accesses only, never while the function is called.
    config: Mutex<ConfigSpace>,
    port: Arc<Port>,
    vectors: Arc<Vectors>,
    /// True while the slot is empty. Held while a request of the host's is carried out.
    pulled: Mutex<bool>,
}

impl Card {
    /// Connects a function to the bus as number `id`.
    pub fn new(function: Arc<dyn Function>, id: usize, bus: &Arc<Bus>) -> Arc<Self> {
        let port = Port::new(bus, id);
        let vectors = Arc::new(Vectors::new(function.msix_vectors()));
        function.connect(
            Arc::clone(&port) as Arc<dyn Dma>,
            Arc::clone(&vectors) as Arc<dyn Interrupts>,
        );
        Arc::new(Self {
            config: Mutex::new(function.config_space()),
            function,
            port,
            vectors,
            pulled: Mutex::default(),
        })
    }

    /// The function.
    pub fn function(&self) -> &Arc<dyn Function> {
        &self.function
    }

    fn name(&self) -> &str {
        self.function.name()
    }

    /// Its config space, to look at and to report errors in.
    pub fn config(&self) -> MutexGuard<'_, ConfigSpace> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pulled(&self) -> MutexGuard<'_, bool> {
        self.pulled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory as the host gives it.
    #[cfg(test)]
    pub(crate) fn give_memory(
        &self,
        address: u64,
        bytes: u64,
        file: File,
        offset: u64,
    ) -> io::Result<()> {
        self.port.system().map(address, bytes, file, offset, true)
    }

    /// Memory that the host has given it, at its bus addresses.
    pub fn memory(&self) -> Vec<crate::dma::Mapping> {
        self.port.system().list()
    }

    /// Pulls the card: when this returns it reaches no memory and raises no interrupt any more, reads of it give all
    /// ones, and writes go nowhere. The host is not told, as it is not when a card is torn out: its slot goes on to say
    /// that there is one (a slot is the host's, and vfio-user has no word for it). False if it was pulled already.
    pub fn pull(&self) -> bool {
        let mut pulled = self.pulled();
        if std::mem::replace(&mut *pulled, true) {
            return false;
        }
        self.lose_power();
        true
    }

    /// Puts the card back, as after power-on. False if it was there.
    pub fn insert(&self) -> bool {
        std::mem::replace(&mut *self.pulled(), false)
    }

    fn lose_power(&self) {
        let events = self.config().reset(ResetKind::Bus);
        self.apply(events);
        *self.config() = self.function.config_space();
    }

    fn apply(&self, events: Vec<Event>) {
        for event in events {
            tracing::debug!("{}: {event:?}", self.name());
            match event {
                Event::BusMaster(true) => {
                    self.port.system().enable(true);
                    self.function.bus_master(true);
                }
                Event::BusMaster(false) => {
                    self.function.bus_master(false);
                    self.port.system().enable(false);
                }
                Event::BarPlaced(bar, address) => {
                    self.port.place(&self.function, bar, address);
                    self.function.bar_placed(bar, address);
                }
                Event::InterruptMask(masked) => self.vectors.mask_function(masked),
                Event::Reset(kind) => {
                    self.vectors.reset();
                    self.function.reset(kind);
                }
            }
        }
    }
}

/// Translates one client's requests.
struct Backend {
    card: Arc<Card>,
    referee: Referee,
    client: Arc<AtomicBool>,
    /// Set while a request is being carried out, so that a panic there is told from one in the protocol crate.
    busy: bool,
}

impl Backend {
    /// Carries out a request.
    fn busy<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        if !self.client.swap(true, Ordering::AcqRel) {
            tracing::info!("{}: a client is connected", self.card.name());
        }
        self.busy = true;
        let result = work(self);
        self.busy = false;
        result
    }

    fn client_gone(&mut self) {
        let mut pulled = self.card.pulled();
        self.card.lose_power();
        *pulled = false;
        self.card.vectors.clear();
        self.card.port.system().clear();
        self.client.store(false, Ordering::Release);
    }

    /// The BAR that an access lies in, or a refusal.
    fn bar(&self, region: u32, offset: u64, len: usize) -> Option<usize> {
        let sizes = self.card.function.bar_sizes();
        let bar = usize::try_from(region)
            .ok()
            .filter(|&bar| bar < sizes.len());
        let end = offset.checked_add(len as u64);
        let inside = bar.filter(|&bar| end.is_some_and(|end| end <= sizes[bar]));
        if inside.is_none() {
            self.refuse(
                format!("region {region}"),
                "offset",
                format!("{offset:#x}, {len} bytes"),
                "an access lies within the region",
            );
        }
        inside
    }

    /// Lays the MSI-X pending bits over what was read of a BAR. (The table is the host's: it emulates it, and tells of
    /// masks by SET_IRQS.)
    fn read_pending(&self, bar: usize, offset: u64, data: &mut [u8]) {
        let Some((place, start)) = self.card.config().msix_pending() else {
            return;
        };
        if place != bar {
            return;
        }
        for (at, bits) in (start..).zip(self.card.vectors.pending()) {
            let index = at.checked_sub(offset).and_then(|i| usize::try_from(i).ok());
            if let Some(byte) = index.and_then(|i| data.get_mut(i)) {
                *byte = bits;
            }
        }
    }

    #[track_caller]
    fn refuse(&self, object: String, field: &str, value: String, rule: &str) {
        self.referee.refuse(Refusal {
            function: self.card.function.name().into(),
            object,
            field: field.into(),
            value,
            rule: rule.into(),
            source: "vfio-user protocol".into(),
        });
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

impl ServerBackend for Backend {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.busy(|b| b.do_region_read(region, offset, data))
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        self.busy(|b| b.do_region_write(region, offset, data))
    }

    fn dma_map(
        &mut self,
        flags: DmaMapFlags,
        offset: u64,
        address: u64,
        size: u64,
        fd: Option<File>,
    ) -> io::Result<()> {
        self.busy(|b| b.do_dma_map(flags, offset, address, size, fd))
    }

    fn dma_unmap(&mut self, flags: DmaUnmapFlags, address: u64, size: u64) -> io::Result<()> {
        self.busy(|b| b.do_dma_unmap(flags, address, size))
    }

    fn reset(&mut self) -> io::Result<()> {
        self.busy(Self::do_reset)
    }

    fn set_irqs(
        &mut self,
        index: u32,
        flags: u32,
        start: u32,
        count: u32,
        fds: Vec<File>,
    ) -> io::Result<()> {
        self.busy(|b| b.do_set_irqs(index, flags, start, count, fds))
    }
}

/// The requests themselves.
impl Backend {
    fn do_region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        if data.len() > MAX_ACCESS {
            return Err(invalid("read too long"));
        }
        let card = Arc::clone(&self.card);
        let pulled = card.pulled();
        if *pulled {
            data.fill(0xff);
            return Ok(());
        }
        if region == VFIO_PCI_CONFIG_REGION_INDEX {
            self.card
                .config()
                .read(usize::try_from(offset).unwrap_or(usize::MAX), data);
        } else if let Some(bar) = self.bar(region, offset, data.len()) {
            self.card.function.bar_read(bar, offset, data);
            self.read_pending(bar, offset, data);
        } else {
            data.fill(0xff);
        }
        Ok(())
    }

    fn do_region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        if data.len() > MAX_ACCESS {
            return Err(invalid("write too long"));
        }
        let card = Arc::clone(&self.card);
        let pulled = card.pulled();
        if *pulled {
            return Ok(());
        }
        if region == VFIO_PCI_CONFIG_REGION_INDEX {
            let events = card
                .config()
                .write(usize::try_from(offset).unwrap_or(usize::MAX), data);
            self.card.apply(events);
        } else if let Some(bar) = self.bar(region, offset, data.len()) {
            self.card.function.bar_write(bar, offset, data);
        }
        Ok(())
    }

    fn do_dma_map(
        &mut self,
        flags: DmaMapFlags,
        offset: u64,
        address: u64,
        size: u64,
        fd: Option<File>,
    ) -> io::Result<()> {
        // ROMs and other devices' registers come without a file: nothing that DMA could reach.
        let Some(file) = fd else { return Ok(()) };
        let writable = flags.contains(DmaMapFlags::WRITE);
        self.card
            .port
            .system()
            .map(address, size, file, offset, writable)
            .inspect_err(|error| {
                self.refuse(
                    format!("dma map {address:#x}"),
                    "size",
                    format!("{size:#x}"),
                    &error.to_string(),
                );
            })
    }

    fn do_dma_unmap(&mut self, flags: DmaUnmapFlags, address: u64, size: u64) -> io::Result<()> {
        if flags.contains(DmaUnmapFlags::UNMAP_ALL) {
            self.card.port.system().clear();
        } else {
            self.card.port.system().unmap(address, size);
        }
        Ok(())
    }

    fn do_reset(&mut self) -> io::Result<()> {
        let pulled = self.card.pulled();
        if !*pulled {
            let events = self.card.config().reset(ResetKind::Bus);
            self.card.apply(events);
        }
        Ok(())
    }

    fn do_set_irqs(
        &mut self,
        index: u32,
        flags: u32,
        start: u32,
        count: u32,
        fds: Vec<File>,
    ) -> io::Result<()> {
        if index != VFIO_PCI_MSIX_IRQ_INDEX {
            return Err(invalid("only MSI-X is offered"));
        }
        // Without file descriptors the vectors are disconnected; with them there is one for each.
        let start = start as usize;
        let range = start.checked_add(count as usize).map(|end| start..end);
        let vectors = usize::from(self.card.function.msix_vectors());
        let range = range.filter(|range| range.end <= vectors);
        let range = range.ok_or(invalid("no such vector"))?;
        let without_data = flags & VFIO_IRQ_SET_DATA_NONE != 0;
        match flags & VFIO_IRQ_SET_ACTION_TYPE_MASK {
            VFIO_IRQ_SET_ACTION_TRIGGER => {}
            action @ (VFIO_IRQ_SET_ACTION_MASK | VFIO_IRQ_SET_ACTION_UNMASK) if without_data => {
                let masked = action == VFIO_IRQ_SET_ACTION_MASK;
                range.for_each(|vector| self.card.vectors.mask(vector, masked));
                return Ok(());
            }
            _ => return Err(invalid("vectors are triggered, or masked without data")),
        }
        if without_data {
            if count == 0 {
                self.card.vectors.clear();
            } else {
                // A trigger without data is the host asking for the interrupts.
                range.for_each(|vector| self.card.vectors.raise(vector as u16));
            }
            return Ok(());
        }
        if flags & VFIO_IRQ_SET_DATA_EVENTFD == 0 {
            return Err(invalid("no eventfds"));
        }
        if !fds.is_empty() && fds.len() != range.len() {
            return Err(invalid("one eventfd for each vector"));
        }
        let mut fds = fds.into_iter();
        for vector in range {
            self.card.vectors.assign(vector, fds.next())?;
        }
        Ok(())
    }
}
