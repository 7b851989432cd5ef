// SPDX-License-Identifier: MIT OR Apache-2.0
//! A NIC and a GPU, joined by the broker.

#[cfg(feature = "cuda")]
use crate::cuda;
#[cfg(feature = "loopback")]
use crate::loopback;
use crate::{
    address::LinkLayer,
    broker::{self, Pair, SessionState},
    carrier::Carrier,
    cq::{CompletionQueue, CompletionQueueOptions},
    devx,
    doorbell::DoorbellPool,
    error::{Error, Result, Source},
    event::AsyncEvent,
    hub::Hub,
    memory::{Access, MemoryRegion, Rounding},
    monitor::Monitor,
    nic::{Device, Session, Uar},
    pci::Bdf,
    qp::{QueuePair, QueuePairOptions},
    route::{self, Route, RouteReport},
    worker::{Home, lock},
};
use ibgda_uapi::IBGDA_STATE_READY;
use ibgda_verbs_sys::ibv_port_state;
use std::{
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

/// Which NIC and GPU to use, and how.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The NIC: its verbs device (`mlx5_0`) or its PCI address (`0000:03:00.0`); on the loopback route `loopback0` and on.
    pub nic: String,
    /// The GPU's PCI address. The loopback route does not look at it.
    pub gpu: Bdf,
    /// The NIC's port, from 1.
    pub port: u8,
    /// How doorbells reach the NIC.
    pub route: Route,
}

impl OpenOptions {
    /// Port 1 of the NIC, by the best route that works.
    pub fn new(nic: impl Into<String>, gpu: Bdf) -> Self {
        Self {
            nic: nic.into(),
            gpu,
            port: 1,
            route: Route::Auto,
        }
    }
}

/// The port of a context as its QPs' peers see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Port {
    pub(crate) number: u8,
    pub(crate) link_layer: LinkLayer,
    pub(crate) lid: u16,
    pub(crate) mtu: u8,
    pub(crate) gid: [u8; 16],
    /// Of that GID, in the port's table.
    pub(crate) gid_index: u8,
}

/// What a context has of its NIC, from binding it until it is lost.
#[derive(Debug)]
struct Joined {
    session: Session,
    device: Device,
    // Of the CQs: the page that would arm them.
    uar: Arc<Uar>,
    doorbells: Arc<DoorbellPool>,
    pair: Pair,
    port: Port,
    route: RouteReport,
    // Of the cpu-doorbell route.
    carrier: Option<Arc<Carrier>>,
    // There is one when a queue has wanted it.
    hub: Mutex<Option<Arc<Hub>>>,
}

impl Joined {
    fn new(session: Session, pair: Pair, port: u8, wanted: Route) -> Result<Self> {
        let (device, port) = match &session {
            Session::Verbs(_) => Self::open_verbs(&pair, port)?,
            #[cfg(feature = "loopback")]
            Session::Loopback(session) => {
                let device = loopback::Device::open(session)?;
                let port = device.port(port)?;
                (Device::Loopback(device), port)
            }
        };
        let uar = Arc::new(Uar::alloc(&device)?);
        let doorbells = DoorbellPool::new(&session, &device);
        let (carrier, route) = match &session {
            Session::Verbs(session) => route::choose(wanted, |route| match route {
                Route::CpuDoorbell => {
                    let (session, generation) = (Arc::clone(session), pair.generation);
                    Carrier::start(move || session.is_lost(generation)).map(Some)
                }
                _ if wanted == Route::Direct => Ok(None),
                _ => route::reaches(&pair).map(|()| None),
            })?,
            #[cfg(feature = "loopback")]
            Session::Loopback(_) => (None, RouteReport::loopback()),
        };
        Ok(Self {
            session,
            device,
            uar,
            doorbells,
            pair,
            port,
            route,
            carrier,
            hub: Mutex::default(),
        })
    }

    fn open_verbs(pair: &Pair, port: u8) -> Result<(Device, Port)> {
        let name = devx::device_name(pair.nic)?;
        if name != pair.ibdev_name {
            return Err(Error::new(
                Source::Broker,
                libc::ENODEV,
                format!("NIC {}", pair.nic),
                format!(
                    "the broker bound {}, but sysfs shows {name}",
                    pair.ibdev_name
                ),
                "was the device renamed or replaced just now? open it again",
            ));
        }
        let device = devx::Device::open(&name)?;
        let port = active_port(&device, port)?;
        Ok((Device::Verbs(device), port))
    }
}

/// A NIC and a GPU that may drive it. Queues and regions made from it live on their own; it may be dropped before them.
#[derive(Debug)]
pub struct Context {
    joined: Joined,
    wanted: Route,
    monitor: Arc<Monitor>,
    home: Home,
}

impl Drop for Context {
    fn drop(&mut self) {
        // A forked child's copy may be locked for ever.
        if self.home.is_here() {
            self.monitor.end();
            self.monitor.watch(None);
        }
    }
}

impl Context {
    /// Binds the pair at the broker, opens the NIC with DevX, and takes the route that is asked for, or the best that
    /// works: then [`Context::route_report`] says why not a better one.
    ///
    /// # Errors
    /// The broker's errno of `IBGDA_IOC_BIND`; `EINVAL` for names that name nothing; `ENETDOWN` for a port that is not
    /// active; errors of libibverbs; `EAGAIN`: no thread for the cpu-doorbell route.
    pub fn open(options: &OpenOptions) -> Result<Self> {
        let (session, pair) = match options.route {
            #[cfg(feature = "loopback")]
            Route::Loopback => {
                let (session, pair) = loopback::Session::open(options)?;
                (Session::Loopback(session), pair)
            }
            #[cfg(not(feature = "loopback"))]
            Route::Loopback => return Err(crate::nic::no_loopback()),
            _ => {
                let nic = match options.nic.parse() {
                    Ok(bdf) => bdf,
                    Err(_) => devx::device_bdf(&options.nic)?,
                };
                let (session, pair) = broker::Session::open(options.gpu, nic)?;
                (Session::Verbs(session), pair)
            }
        };
        let joined = Joined::new(session, pair, options.port, options.route)?;
        let monitor = Monitor::new();
        monitor.watch(joined.device.verbs());
        Ok(Self {
            joined,
            wanted: options.route,
            monitor,
            home: Home::here(),
        })
    }

    /// Whether something can be made from it now: it is this process's, and its NIC is there.
    ///
    /// # Errors
    /// `EPERM`: a forked child; `ENOLINK`: the NIC was lost, and why.
    fn check_usable(&self, what: &str) -> Result<()> {
        let failed = |errno, why: String, advice: &str| {
            let what = format!("{what} on {}", self.device_name());
            Err(Error::new(Source::Broker, errno, what, why, advice))
        };
        if !self.home.is_here() {
            return failed(
                libc::EPERM,
                "the context is of another process, whose child this is".into(),
                "open a context of your own after fork",
            );
        }
        let state = self.state();
        if (state.state, state.generation) == (IBGDA_STATE_READY, self.generation()) {
            return Ok(());
        }
        failed(
            libc::ENOLINK,
            format!(
                "the NIC of generation {} is lost: {}",
                self.generation(),
                state.reason_text()
            ),
            "drop what was made from the context, rebind it, and make new queues and regions",
        )
    }

    /// Joins the NIC again after it was lost, and chooses the route anew. Queues and regions made before stay dead:
    /// drop them, and make new ones. The callback of [`Context::on_error`] stays.
    ///
    /// Waits up to `patience` for the NIC to come back.
    ///
    /// # Errors
    /// `EAGAIN`, `EHOSTDOWN`: it did not; `EACCES`: the pair is no longer allowed; `EINVAL`: it was not lost.
    pub fn rebind(&mut self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        let (gpu, nic, port) = (self.pair().gpu, self.pair().nic, self.port().number);
        let mut pair = None;
        loop {
            let joined = match pair.take() {
                Some(pair) => Ok(pair),
                None => match self.session() {
                    Session::Verbs(session) => session.rebind(gpu, nic),
                    #[cfg(feature = "loopback")]
                    Session::Loopback(session) => session.rebind(gpu),
                },
            }
            .and_then(|bound| {
                // Bound is for good: what is tried again is only the opening of its verbs device.
                pair = Some(bound.clone());
                Joined::new(self.session().clone(), bound, port, self.wanted)
            });
            match joined {
                Ok(joined) => {
                    self.monitor.watch(joined.device.verbs());
                    self.joined = joined;
                    return Ok(());
                }
                Err(error) => {
                    let not_yet =
                        pair.is_some() || matches!(error.errno(), libc::EAGAIN | libc::EHOSTDOWN);
                    if !not_yet || Instant::now() >= deadline {
                        return Err(error);
                    }
                }
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// The route that doorbells take: never [`Route::Auto`].
    pub fn route(&self) -> Route {
        self.joined.route.route()
    }

    /// Which route is used, and of each better one why it is not.
    pub fn route_report(&self) -> &RouteReport {
        &self.joined.route
    }

    /// Has `callback` called for what happens without being asked for: loss and return of the NIC, changes of the
    /// port's state and other asynchronous events of the verbs device, the first error of each CQ once a kernel has
    /// found it, and what the NIC says of QPs and CQs that are made while there is a callback. Within 10 ms, if the machine lets the thread run. What the broker has told before and nobody has heard
    /// comes first.
    ///
    /// It is called on a thread of the context's, one call at a time, with no lock held. It may call everything of this
    /// library, set another callback, and drop the context, after which it is not called again. It may not wait for a
    /// thread that drops the context or sets a callback: these wait until a call under way has returned. As long as it
    /// runs, later events wait. What it captures lives as long as the context, so a reference to the context itself
    /// should be weak.
    ///
    /// When this returns, the former callback is not running and will not be called again, unless it is the caller.
    ///
    /// # Errors
    /// `EAGAIN`: no thread; `EMFILE`: no descriptors; the broker's of `IBGDA_IOC_EVENTFD` (`EPERM` after fork).
    pub fn on_error(&self, callback: impl FnMut(&AsyncEvent) + Send + 'static) -> Result<()> {
        self.monitor.set(self.session().verbs(), Box::new(callback))
    }

    /// Ends what [`Context::on_error`] began.
    pub fn ignore_errors(&self) {
        self.monitor.end();
    }

    /// What the broker knows of the pair.
    pub fn pair(&self) -> &Pair {
        &self.joined.pair
    }

    /// The verbs device.
    pub fn device_name(&self) -> &str {
        self.device().name()
    }

    /// The broker's word on the NIC, from the status page: no system call. All 0 in a forked child, which has no such page.
    pub fn state(&self) -> SessionState {
        self.session().state()
    }

    /// Makes memory usable by the NIC: 4 KiB-aligned `length` bytes at `address`, or any range with [`Rounding::Outward`].
    /// Memory of a GPU (of cudaMalloc or cuMemMap) is known as such where the process has loaded CUDA, and goes to the NIC
    /// as a dma-buf; the whole range must be in one allocation.
    ///
    /// # Errors
    /// `EINVAL`: unaligned, zero, or beyond the address space or the allocation; `EFAULT`: not mapped; `ENOMEM`:
    /// RLIMIT_MEMLOCK; `EOPNOTSUPP`: GPU memory that cannot be exported, or on the loopback route; CUDA's. As of every
    /// call that makes something from the context: `ENOLINK`: the NIC was lost; `EPERM`: in a forked child.
    ///
    /// # Safety
    /// The memory must stay mapped as long as the region lives, and no reference may rely on its contents, since peers and
    /// kernels change them.
    pub unsafe fn map_device(
        &self,
        address: *mut u8,
        length: usize,
        access: Access,
        rounding: Rounding,
    ) -> Result<MemoryRegion> {
        self.check_usable("map memory")?;
        // SAFETY: by this function's contract.
        unsafe {
            MemoryRegion::map(
                self,
                address.expose_provenance() as u64,
                length as u64,
                access,
                rounding,
            )
        }
    }

    /// Allocates zeroed memory and makes it usable by the NIC.
    ///
    /// # Errors
    /// `EINVAL`: zero; `ENOMEM`.
    pub fn alloc(&self, length: usize, access: Access) -> Result<MemoryRegion> {
        self.check_usable("allocate memory")?;
        MemoryRegion::alloc(self, length, access)
    }

    /// Creates a completion queue of `entries` entries, a power of two, 1 to 32768.
    ///
    /// # Errors
    /// `EINVAL`; the broker's of `IBGDA_IOC_QUEUE_ALLOC`; firmware's.
    pub fn create_cq(&self, entries: u32) -> Result<Arc<CompletionQueue>> {
        self.create_cq_with(&CompletionQueueOptions {
            depth: entries,
            ..Default::default()
        })
    }

    /// Creates a completion queue.
    ///
    /// # Errors
    /// As [`Context::create_cq`]; with events also the broker's of `IBGDA_IOC_DOORBELL_IMPORT`, `EAGAIN`: no thread, and
    /// the kernel's of a DevX event channel.
    pub fn create_cq_with(&self, options: &CompletionQueueOptions) -> Result<Arc<CompletionQueue>> {
        self.check_usable("create a CQ")?;
        CompletionQueue::create(self, options).map(Arc::new)
    }

    /// Creates a queue pair with a doorbell page of its own, granted by the broker.
    ///
    /// # Errors
    /// `EINVAL`: depths, or a CQ that is too small or missing; `EBUSY`: a CQ that serves another queue; the broker's of
    /// `IBGDA_IOC_DOORBELL_IMPORT` and `_QUEUE_ALLOC`; firmware's.
    pub fn create_qp(
        &self,
        options: &QueuePairOptions,
        send_cq: &Arc<CompletionQueue>,
        recv_cq: Option<&Arc<CompletionQueue>>,
    ) -> Result<QueuePair> {
        self.check_usable("create a QP")?;
        QueuePair::create(self, options, send_cq, recv_cq)
    }

    /// Whether kernels of `gpu` can ring this NIC: takes a doorbell page and registers it with CUDA, for a moment.
    ///
    /// # Errors
    /// Why not, and what would let them: the reason for which a slower route is taken. The broker's of granting a page.
    #[cfg(feature = "cuda")]
    pub fn check_gpu_doorbell(&self, gpu: &cuda::Gpu) -> Result<()> {
        let page = self.joined.doorbells.take()?;
        let (address, bytes) = (page.page().address(), crate::PAGE_BYTES as usize);
        // SAFETY: the page stays mapped until it is given back, after the registration.
        unsafe { cuda::HostRegistration::new(gpu, address, bytes, page.page().kind()) }.map(drop)
    }

    pub(crate) fn session(&self) -> &Session {
        &self.joined.session
    }

    pub(crate) fn device(&self) -> &Device {
        &self.joined.device
    }

    pub(crate) fn uar(&self) -> &Arc<Uar> {
        &self.joined.uar
    }

    pub(crate) fn doorbells(&self) -> &Arc<DoorbellPool> {
        &self.joined.doorbells
    }

    /// The thread that carries doorbells, if the route has one.
    pub(crate) fn carrier(&self) -> Option<&Arc<Carrier>> {
        self.joined.carrier.as_ref()
    }

    pub(crate) fn monitor(&self) -> &Arc<Monitor> {
        &self.monitor
    }

    /// Who takes the events of its queues.
    pub(crate) fn hub(&self) -> Result<Arc<Hub>> {
        let mut hub = lock(&self.joined.hub);
        if let Some(hub) = &*hub {
            return Ok(Arc::clone(hub));
        }
        let new = Hub::of(self.device())?;
        *hub = Some(Arc::clone(&new));
        Ok(new)
    }

    pub(crate) fn generation(&self) -> u32 {
        self.joined.pair.generation
    }

    pub(crate) fn port(&self) -> Port {
        self.joined.port
    }
}

/// A port's state as ibv_devinfo names it, and what to do when it is not active.
fn port_state(state: ibv_port_state::Type) -> (&'static str, &'static str) {
    match state {
        ibv_port_state::IBV_PORT_DOWN => (
            "DOWN",
            "is the cable in, the other end up, and the port enabled? see ibv_devinfo, and ip link",
        ),
        ibv_port_state::IBV_PORT_INIT => (
            "INIT",
            "the link is up, and no subnet manager has configured it: start opensm in this fabric",
        ),
        ibv_port_state::IBV_PORT_ARMED => (
            "ARMED",
            "the subnet manager is configuring it: try again in a second",
        ),
        ibv_port_state::IBV_PORT_ACTIVE => ("ACTIVE", ""),
        ibv_port_state::IBV_PORT_ACTIVE_DEFER => (
            "ACTIVE_DEFER",
            "the link had an error and recovers: try again in a second",
        ),
        _ => ("NOP", "the driver does not know its state; see dmesg"),
    }
}

fn active_port(device: &devx::Device, number: u8) -> Result<Port> {
    /// `IBV_LINK_LAYER_INFINIBAND`; drivers may also leave it unspecified.
    const INFINIBAND: [u8; 2] = [0, 1];
    let attr = device.port(number)?;
    let what = format!("port {number} of {}", device.name());
    if !INFINIBAND.contains(&attr.link_layer) {
        return Err(Error::new(
            Source::Argument,
            libc::EOPNOTSUPP,
            what,
            "its link layer is not InfiniBand",
            "the direct route drives InfiniBand ports",
        ));
    }
    let (state, advice) = port_state(attr.state);
    if attr.state != ibv_port_state::IBV_PORT_ACTIVE {
        return Err(Error::new(
            Source::Argument,
            libc::ENETDOWN,
            what,
            format!("its state is {state}, not ACTIVE"),
            advice,
        ));
    }
    Ok(Port {
        number,
        link_layer: LinkLayer::InfiniBand,
        lid: attr.lid,
        mtu: attr.active_mtu as u8,
        gid: device.gid(number)?,
        gid_index: 0,
    })
}
