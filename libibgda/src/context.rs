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
    proxy,
    qp::{QueuePair, QueuePairOptions},
    queue_pool::QueuePool,
    route::{self, Route, RouteReport},
    worker::{Home, lock},
};
use ibgda_uapi::IBGDA_STATE_READY;
use ibgda_verbs_sys::ibv_port_state;
#[cfg(feature = "cuda")]
use ibgda_verbs_sys::uverbs::UarType;
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
    /// The GPU's PCI address. The proxy and loopback routes do not look at it.
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

/// What a context has of its NIC, from binding it until it is lost, whatever rings it.
#[derive(Clone, Debug)]
struct Base {
    session: Session,
    device: Device,
    // Of the CQs: the page that would arm them.
    uar: Arc<Uar>,
    doorbells: Arc<DoorbellPool>,
    queue_pool: Arc<QueuePool>,
    pair: Pair,
    port: Port,
}

impl Base {
    fn new(session: Session, device: Device, pair: Pair, port: Port) -> Result<Self> {
        let uar = Arc::new(Uar::alloc(&device)?);
        let doorbells = DoorbellPool::new(&session, &device);
        let queue_pool = QueuePool::new(&session, &device);
        Ok(Self {
            session,
            device,
            uar,
            doorbells,
            queue_pool,
            pair,
            port,
        })
    }

    /// Binds the pair at the broker.
    fn bind(options: &OpenOptions) -> Result<Self> {
        let nic = match options.nic.parse() {
            Ok(bdf) => bdf,
            Err(_) => devx::device_bdf(&options.nic)?,
        };
        let (session, pair) = broker::Session::open(options.gpu, nic)?;
        Self::granted(session, pair, options.port)
    }

    /// A pair that the broker has bound.
    fn granted(session: Arc<broker::Session>, pair: Pair, port: u8) -> Result<Self> {
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
        Self::new(Session::Verbs(session), Device::Verbs(device), pair, port)
    }

    /// A generation of the proxy route.
    fn proxied(session: &Arc<proxy::Session>, generation: u32) -> Result<Self> {
        let (device, port, pair) = session.join(generation)?;
        let session = Session::Proxy(Arc::clone(session));
        Self::new(session, Device::Proxy(device), pair, port)
    }

    /// The model in this process.
    #[cfg(feature = "loopback")]
    fn loopback(session: Arc<loopback::Session>, pair: Pair, port: u8) -> Result<Self> {
        let device = loopback::Device::open(&session)?;
        let port = device.port(port)?;
        let session = Session::Loopback(session);
        Self::new(session, Device::Loopback(device), pair, port)
    }
}

#[derive(Debug)]
struct Joined {
    base: Base,
    route: RouteReport,
    // Of the cpu-doorbell route.
    carrier: Option<Arc<Carrier>>,
    // There is one when a queue has wanted it.
    hub: Mutex<Option<Arc<Hub>>>,
}

/// What rings a NIC that the broker has bound, on one of [`Route::GRANTED`].
fn ringer(base: &Base, route: Route, wanted: Route) -> Result<Option<Arc<Carrier>>> {
    match (route, &base.session) {
        (Route::CpuDoorbell, Session::Verbs(session)) => {
            let (session, generation) = (Arc::clone(session), base.pair.generation);
            Carrier::start(move || session.is_lost(generation)).map(Some)
        }
        _ if wanted == Route::Direct => Ok(None),
        _ => route::reaches(&base.pair).map(|()| None),
    }
}

impl Joined {
    fn open(options: &OpenOptions, monitor: &Arc<Monitor>) -> Result<Self> {
        match options.route {
            #[cfg(feature = "loopback")]
            Route::Loopback => {
                let (session, pair) = loopback::Session::open(options)?;
                return Ok(Self {
                    base: Base::loopback(session, pair, options.port)?,
                    route: RouteReport::loopback(),
                    carrier: None,
                    hub: Mutex::default(),
                });
            }
            #[cfg(not(feature = "loopback"))]
            Route::Loopback => return Err(crate::nic::no_loopback()),
            _ => {}
        }
        devx::check_name(&options.nic)?;
        if options.route == Route::Auto {
            // The proxy would do without: a wrong address is not to end in a slower route.
            devx::check_present(options.gpu)?;
        }
        // The pair is bound once for all routes that need it.
        let mut bound = None;
        let attempt = |route| match route {
            Route::Proxy => {
                let session = proxy::Session::open(options, monitor)?;
                Ok((Base::proxied(&session, 1)?, None))
            }
            route => {
                let bound = bound.get_or_insert_with(|| Base::bind(options));
                let base = bound.as_ref().map_err(Clone::clone)?;
                Ok((base.clone(), ringer(base, route, options.route)?))
            }
        };
        let ((base, carrier), route) = route::choose(&Route::BEST_FIRST, options.route, attempt)?;
        Ok(Self {
            base,
            route,
            carrier,
            hub: Mutex::default(),
        })
    }

    /// The same of a NIC that is back, when its session has begun another generation.
    fn again(&self, bound: &Bound, wanted: Route) -> Result<Self> {
        let port = self.base.port.number;
        match bound {
            Bound::Granted(session, pair) => {
                let base = Base::granted(Arc::clone(session), pair.clone(), port)?;
                let attempt = |route| ringer(&base, route, wanted);
                let (carrier, route) = route::choose(&Route::GRANTED, wanted, attempt)?;
                Ok(Self {
                    base,
                    route,
                    carrier,
                    hub: Mutex::default(),
                })
            }
            Bound::Proxied(session, generation) => Ok(Self {
                base: Base::proxied(session, *generation)?,
                route: self.route.clone(),
                carrier: None,
                hub: Mutex::default(),
            }),
            #[cfg(feature = "loopback")]
            Bound::Loopback(session, pair) => Ok(Self {
                base: Base::loopback(Arc::clone(session), pair.clone(), port)?,
                route: self.route.clone(),
                carrier: None,
                hub: Mutex::default(),
            }),
        }
    }
}

/// A session that has begun another generation.
#[derive(Debug)]
enum Bound {
    Granted(Arc<broker::Session>, Pair),
    Proxied(Arc<proxy::Session>, u32),
    #[cfg(feature = "loopback")]
    Loopback(Arc<loopback::Session>, Pair),
}

impl Bound {
    fn of(base: &Base) -> Result<Self> {
        let (gpu, nic) = (base.pair.gpu, base.pair.nic);
        match &base.session {
            Session::Verbs(session) => Ok(Self::Granted(
                Arc::clone(session),
                session.rebind(gpu, nic)?,
            )),
            Session::Proxy(session) => Ok(Self::Proxied(Arc::clone(session), session.next()?)),
            #[cfg(feature = "loopback")]
            Session::Loopback(session) => {
                Ok(Self::Loopback(Arc::clone(session), session.rebind(gpu)?))
            }
        }
    }

    /// Whether that generation is lost in its turn. On the proxy route it begins only when the device is opened.
    fn is_over(&self) -> bool {
        let over = |state: SessionState, pair: &Pair| {
            (state.state, state.generation) != (IBGDA_STATE_READY, pair.generation)
        };
        match self {
            Self::Granted(session, pair) => over(session.state(), pair),
            Self::Proxied(..) => false,
            #[cfg(feature = "loopback")]
            Self::Loopback(session, pair) => over(session.state(), pair),
        }
    }
}

/// A NIC and a GPU that may drive it. Queues and regions made from it live on their own; it may be dropped before them.
#[derive(Debug)]
pub struct Context {
    joined: Joined,
    // By a `rebind` that then could not open the NIC.
    bound: Option<Bound>,
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
    /// works: then [`Context::route_report`] says why not a better one. On the proxy route there is no broker, and the NIC
    /// is opened as any verbs program does.
    ///
    /// # Errors
    /// The broker's errno of `IBGDA_IOC_BIND`, if a route was asked for that needs it; `EINVAL` for names that name
    /// nothing; `ENETDOWN` for a port that is not active; errors of libibverbs; `EADDRNOTAVAIL`: no GID of RoCE v2;
    /// `EAGAIN`: no thread for the cpu-doorbell or proxy route.
    pub fn open(options: &OpenOptions) -> Result<Self> {
        let monitor = Monitor::new();
        let joined = Joined::open(options, &monitor)?;
        monitor.watch(joined.base.device.verbs());
        Ok(Self {
            joined,
            bound: None,
            wanted: options.route,
            monitor,
            home: Home::here(),
        })
    }

    /// Whether something can be made from it now: it is this process's, and its NIC is there.
    ///
    /// # Errors
    /// `EPERM`: a forked child; `ENOLINK`: the NIC was lost, and why.
    pub(crate) fn check_usable(&self, what: &str) -> Result<()> {
        let what = || format!("{what} on {}", self.device_name());
        self.home.check(what)?;
        let state = self.state();
        if (state.state, state.generation) == (IBGDA_STATE_READY, self.generation()) {
            return Ok(());
        }
        Err(Error::new(
            Source::Broker,
            libc::ENOLINK,
            what(),
            format!(
                "the NIC of generation {} is lost: {}",
                self.generation(),
                state.reason_text()
            ),
            "drop what was made from the context, rebind it, and make new queues and regions",
        ))
    }

    /// Joins the NIC again after it was lost, and chooses anew between the routes for which the broker grants; a context
    /// on the proxy route stays there. Queues and regions made before stay dead: drop them, and make new ones. The
    /// callback of [`Context::on_error`] stays.
    ///
    /// Waits up to `patience` for the NIC to come back. If it fails, it may be called again.
    ///
    /// # Errors
    /// `EAGAIN`, `EHOSTDOWN`: it did not; `ENETDOWN`: it did, and its port is not active yet; `EACCES`: the pair is no
    /// longer allowed; `EINVAL`: it was not lost; `EPERM`: in a forked child, at once.
    pub fn rebind(&mut self, patience: Duration) -> Result<()> {
        self.home
            .check(|| format!("rebind {}", self.device_name()))?;
        // A patience beyond the clock's is for ever.
        let deadline = Instant::now().checked_add(patience);
        loop {
            let error = match self.join_again() {
                Ok(joined) => {
                    self.monitor.watch(joined.base.device.verbs());
                    self.joined = joined;
                    self.bound = None;
                    return Ok(());
                }
                Err(error) => error,
            };
            let not_yet =
                self.bound.is_some() || matches!(error.errno(), libc::EAGAIN | libc::EHOSTDOWN);
            if !not_yet || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(error);
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Begins a generation, unless one has begun whose NIC could not be opened, and opens the NIC.
    fn join_again(&mut self) -> Result<Joined> {
        let bound = match self.bound.take().filter(|bound| !bound.is_over()) {
            Some(bound) => bound,
            None => Bound::of(&self.joined.base)?,
        };
        self.joined.again(self.bound.insert(bound), self.wanted)
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
    /// found it, and what the NIC says of QPs and CQs that are made while there is a callback. Within 10 ms, if the
    /// machine lets the thread run. What the broker has told before and nobody has heard comes first.
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
        &self.joined.base.pair
    }

    /// The verbs device.
    pub fn device_name(&self) -> &str {
        self.device().name()
    }

    /// The broker's word on the NIC, or the proxy's thread's, from the status page: no system call. All 0 in a forked child, which has no such page.
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
    /// `EINVAL`: depths, or a CQ that is too small, missing, or collapsed and for receives; `EBUSY`: a CQ that serves
    /// another queue, or a doorbell page that is mapped with another memory type; `EOPNOTSUPP`: BlueFlame, where writes do
    /// not combine; the broker's of `IBGDA_IOC_DOORBELL_IMPORT` and `_QUEUE_ALLOC`; firmware's.
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
        let page = self.joined.base.doorbells.take(UarType::NonCached)?;
        let (address, bytes) = (page.page().address(), crate::PAGE_BYTES as usize);
        // SAFETY: the page stays mapped until it is given back, after the registration.
        unsafe { cuda::HostRegistration::new(gpu, address, bytes, page.page().kind()) }.map(drop)
    }

    pub(crate) fn session(&self) -> &Session {
        &self.joined.base.session
    }

    pub(crate) fn device(&self) -> &Device {
        &self.joined.base.device
    }

    pub(crate) fn uar(&self) -> &Arc<Uar> {
        &self.joined.base.uar
    }

    pub(crate) fn doorbells(&self) -> &Arc<DoorbellPool> {
        &self.joined.base.doorbells
    }

    pub(crate) fn queue_pool(&self) -> &Arc<QueuePool> {
        &self.joined.base.queue_pool
    }

    /// The thread that carries doorbells, if the route has one.
    pub(crate) fn carrier(&self) -> Option<&Arc<Carrier>> {
        self.joined.carrier.as_ref()
    }

    pub(crate) fn monitor(&self) -> &Arc<Monitor> {
        &self.monitor
    }

    /// Who takes the events of its queues; nobody on the proxy route.
    pub(crate) fn hub(&self) -> Result<Option<Arc<Hub>>> {
        let mut hub = lock(&self.joined.hub);
        if hub.is_none() {
            *hub = Hub::of(self.device())?;
        }
        Ok(hub.clone())
    }

    pub(crate) fn generation(&self) -> u32 {
        self.joined.base.pair.generation
    }

    pub(crate) fn port(&self) -> Port {
        self.joined.base.port
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
            "use route proxy, which drives RoCE too",
        ));
    }
    if attr.state != ibv_port_state::IBV_PORT_ACTIVE {
        return Err(devx::not_active(what, attr.state));
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
