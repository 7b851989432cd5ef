// SPDX-License-Identifier: GPL-2.0

//! A session: one open file, of one process, bound to one GPU and one NIC.
//!
//! Lock order: the registry's lock, or `dma_resv` of a doorbell's dma-buf, or `mmap_lock` · a session's lock · `i_mmap`.
//! Under a session's lock nothing is allocated but page tables, user memory is not touched, and nothing is waited for: the
//! invalidation of a dma-buf takes it, and mlx5's recovery waits for that.

use crate::{
    abi::uapi::*,
    decisions::{
        bdf::Bdf,
        life::{
            Life,
            Reason,
            State, //
        }, //
    },
    doorbell::Doorbell,
    events::Events,
    grant,
    ibclient::NAME_BYTES,
    observe,
    owner::Owner,
    pci::{
        Function,
        Path, //
    },
    policy::{
        self,
        Permission, //
    },
    queue::Queue,
    registry::{
        Registry,
        REGISTRY, //
    },
    status::{
        SinkPage,
        StatusPage, //
    }, //
};
use kernel::{
    bindings,
    error::code::*,
    fmt,
    fs::File,
    new_mutex,
    page::PAGE_SHIFT,
    prelude::*,
    rbtree::{
        RBTree,
        RBTreeNodeReservation, //
    },
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Relaxed,
            Release, //
        },
        lock::{
            mutex::MutexBackend,
            Guard, //
        },
        Arc,
        Mutex, //
    }, //
};

/// Doorbells that one session may hold.
pub(crate) const MAX_DOORBELLS: u32 = 1024;
/// Queue memories that one session may hold.
pub(crate) const MAX_QUEUES: u32 = 256;

/// What a session is bound to.
pub(crate) struct Pair {
    pub(crate) gpu: Function,
    pub(crate) nic: Function,
    path: Path,
    ibdev_name: [u8; NAME_BYTES],
}

impl Pair {
    /// Whether a permission covers the way the two reach each other.
    pub(crate) fn permitted(&self, permission: Permission) -> bool {
        self.path.class != IBGDA_PATH_NONE || permission.any_path
    }

    /// Finds the two, checks what they are and that they are allowed; with the NIC's port word.
    fn resolve(registry: &Registry, gpu: Function, nic: Function) -> Result<(Self, u64)> {
        if !gpu.is_gpu() {
            return Err(EINVAL);
        }
        let known = registry
            .nics
            .iter()
            .find(|known| known.function.looks_like(&nic))
            .ok_or(EINVAL)?;
        let permission = policy::permission(registry, gpu.bdf, nic.bdf).ok_or(EACCES)?;
        if !known.is_up() {
            return Err(EHOSTDOWN);
        }
        let pair = Self {
            path: Path::between(&gpu, &nic),
            ibdev_name: known.name,
            gpu,
            nic,
        };
        if !pair.permitted(permission) {
            return Err(EXDEV);
        }
        Ok((pair, known.port))
    }

    fn describe(&self, life: &Life, argument: &mut ibgda_bind) {
        argument.gpu = bdf_to_user(self.gpu.bdf);
        argument.nic = bdf_to_user(self.nic.bdf);
        argument.ibdev_name = self.ibdev_name;
        argument.path = self.path.class;
        argument.path_distance = self.path.distance;
        argument.gpu_node = self.gpu.node();
        argument.nic_node = self.nic.node();
        argument.gpu_link = self.gpu.link();
        argument.nic_link = self.nic.link();
        argument.generation = life.generation();
        argument.reserved = 0;
    }
}

fn bdf_to_user(bdf: Bdf) -> ibgda_bdf {
    ibgda_bdf {
        domain: bdf.domain(),
        bus: bdf.bus(),
        device: bdf.devfn() >> 3,
        function: bdf.devfn() & 7,
        reserved: 0,
    }
}

fn bdf_from_user(bdf: ibgda_bdf) -> Result<Bdf> {
    if bdf.reserved != 0 {
        return Err(EINVAL);
    }
    Bdf::new(bdf.domain, bdf.bus, bdf.device, bdf.function).ok_or(EINVAL)
}

/// Something with a handle and a place in the file.
pub(crate) enum Object {
    Doorbell(Doorbell),
    Queue(Queue),
}

/// A handle and what it stands for.
pub(crate) struct Named {
    pub(crate) handle: u32,
    pub(crate) object: Object,
}

/// Memory for one more object, allocated before the lock is taken.
pub(crate) type Reservation = RBTreeNodeReservation<u64, Named>;

/// What the session's lock protects.
pub(crate) struct Inner {
    pub(crate) life: Life,
    pair: Option<Pair>,
    port: u64,
    /// By first page in the file.
    pub(crate) objects: RBTree<u64, Named>,
    last_handle: u32,
    doorbells: u32,
    queues: u32,
    pub(crate) events: Events,
    /// The file is gone, and `Session::mapping` with it.
    closed: bool,
}

/// See the module's documentation.
#[pin_data]
pub(crate) struct Session {
    pub(crate) number: u64,
    pub(crate) owner: Owner,
    /// Where the file's mappings are listed. It is that of the node opened, and a second node has another one. Valid until
    /// the file is released.
    mapping: *mut bindings::address_space,
    status: StatusPage,
    pub(crate) status_page: u64,
    pub(crate) sink: SinkPage,
    /// Grants in the table, under the table's lock.
    pub(crate) grants: Atomic<u32>,
    /// The file is released; set under the table's lock.
    released: Atomic<bool>,
    #[pin]
    inner: Mutex<Inner>,
}

// SAFETY: `mapping` may be used from any thread while the file exists.
unsafe impl Send for Session {}
// SAFETY: As above; everything else is `Sync`.
unsafe impl Sync for Session {}

/// Page numbers in the file are handed out once, whichever session asks: a zap by page number then never meets a mapping
/// of another session on the same node.
pub(crate) fn new_pages(count: u64) -> Result<u64> {
    static NEXT: Atomic<u64> = Atomic::new(1);
    const END: u64 = 1 << (63 - PAGE_SHIFT);

    let first = NEXT.fetch_add(count, Relaxed);
    if first >= END - count {
        return Err(ENOSPC);
    }
    Ok(first)
}

impl Session {
    /// A session of the caller's.
    pub(crate) fn open(file: &File) -> Result<Arc<Self>> {
        static NUMBERS: Atomic<u64> = Atomic::new(1);

        grant::reap();
        // SAFETY: The file is valid, and this field is set before open and never changed.
        let mapping = unsafe { (*file.as_ptr()).f_mapping };
        let session = Arc::pin_init(
            try_pin_init!(Self {
                number: NUMBERS.fetch_add(1, Relaxed),
                owner: Owner::current()?,
                mapping,
                status: StatusPage::new()?,
                status_page: new_pages(1)?,
                sink: SinkPage::new()?,
                grants: Atomic::new(0),
                released: Atomic::new(false),
                inner <- new_mutex!(Inner {
                    life: Life::new(),
                    pair: None,
                    port: 0,
                    objects: RBTree::new(),
                    last_handle: 0,
                    doorbells: 0,
                    queues: 0,
                    events: Events::new(),
                    closed: false,
                }, "ibgda::Session::inner"),
            }? Error),
            GFP_KERNEL_ACCOUNT,
        )?;
        Registry::add(&session)?;
        observe::SESSIONS.count();
        Ok(session)
    }

    /// The file is released: no mapping of it is left. Its grants stay until the owner is dead.
    pub(crate) fn release(&self) {
        Registry::remove(self);
        let mut inner = self.inner.lock();
        inner.closed = true;
        let objects = core::mem::take(&mut inner.objects);
        let pair = inner.pair.take();
        let eventfd = inner.events.set_eventfd(None);
        drop(inner);
        drop((objects, pair, eventfd));
        grant::file_released(self);
    }

    pub(crate) fn lock(&self) -> Guard<'_, Inner, MutexBackend> {
        self.inner.lock()
    }

    pub(crate) fn is_released(&self) -> bool {
        self.released.load(Acquire)
    }

    /// The caller holds the grant table's lock.
    pub(crate) fn set_released(&self) {
        self.released.store(true, Release);
    }

    /// `IBGDA_IOC_BIND`.
    pub(crate) fn bind(&self, argument: &mut ibgda_bind) -> Result {
        let (gpu, nic) = (bdf_from_user(argument.gpu)?, bdf_from_user(argument.nic)?);
        if self.inner.lock().life.is_bound() {
            return Err(EALREADY);
        }
        let registry = REGISTRY.lock();
        // With the lock held: who leaves after this look is lost by the notifier, which waits for the lock.
        let (gpu, nic) = (Function::find(gpu)?, Function::find(nic)?);
        let (pair, port) = Pair::resolve(&registry, gpu, nic)?;
        let mut inner = self.inner.lock();
        if !inner.life.bind() {
            return Err(EALREADY);
        }
        pair.describe(&inner.life, argument);
        inner.pair = Some(pair);
        inner.port = port;
        self.publish(&inner);
        Ok(())
    }

    /// `IBGDA_IOC_REBIND`.
    pub(crate) fn rebind(&self, argument: &mut ibgda_bind) -> Result {
        let none = ibgda_bdf::default();
        if [argument.gpu, argument.nic].map(bdf_bytes) != [bdf_bytes(none); 2] {
            return Err(EINVAL);
        }
        let (gpu, nic) = {
            let inner = self.inner.lock();
            let pair = inner.pair.as_ref().ok_or(ENOTCONN)?;
            if !inner.life.is_lost() {
                return Err(EINVAL);
            }
            (pair.gpu.clone(), pair.nic.clone())
        };
        let registry = REGISTRY.lock();
        // With the lock held, as in `bind`.
        let new_gpu = Function::find(gpu.bdf)?;
        if !new_gpu.looks_like(&gpu) {
            return Err(ENODEV);
        }
        let known = registry
            .nics
            .iter()
            .find(|known| known.function.looks_like(&nic));
        let new_nic = match known {
            Some(known) if known.is_up() => known.function.clone(),
            // Whether it comes back is its driver's business; when that has given up, it does not.
            _ if nic.is_disconnected() => return Err(EHOSTDOWN),
            _ => return Err(EAGAIN),
        };
        let (pair, port) = Pair::resolve(&registry, new_gpu, new_nic)?;
        let mut inner = self.inner.lock();
        if !inner.life.rebind() {
            return Err(EINVAL);
        }
        pair.describe(&inner.life, argument);
        let old = inner.pair.replace(pair);
        inner.port = port;
        self.publish(&inner);
        drop(inner);
        drop(registry);
        drop(old);
        Ok(())
    }

    /// The NIC of a session that is ready.
    pub(crate) fn ready_nic(&self) -> Result<Function> {
        let inner = self.inner.lock();
        inner.life.ready()?;
        Ok(inner.pair.as_ref().ok_or(ENOTCONN)?.nic.clone())
    }

    /// Gives an object its handle and its place in the file, where user space may map it from now on.
    pub(crate) fn insert(
        &self,
        reservation: Reservation,
        page: u64,
        object: Object,
    ) -> Result<u32> {
        let mut inner = self.inner.lock();
        inner.life.ready()?;
        let inner = &mut *inner;
        let (count, limit) = match &object {
            Object::Doorbell(doorbell) => {
                // Invalidated since it was mapped, before there was anything to revoke.
                if doorbell.grant.is_revoked() {
                    return Err(ENOLINK);
                }
                (&mut inner.doorbells, MAX_DOORBELLS)
            }
            Object::Queue(_) => (&mut inner.queues, MAX_QUEUES),
        };
        if *count >= limit {
            return Err(EDQUOT);
        }
        let handle = inner.last_handle.checked_add(1).ok_or(EDQUOT)?;
        *count += 1;
        inner.last_handle = handle;
        inner
            .objects
            .insert(reservation.into_node(page, Named { handle, object }));
        Ok(handle)
    }

    /// `IBGDA_IOC_RELEASE`.
    pub(crate) fn release_object(&self, handle: u32) -> Result {
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        let (page, pages, count) = inner
            .objects
            .iter()
            .find(|(_, named)| named.handle == handle)
            .map(|(page, named)| match &named.object {
                Object::Doorbell(_) => (*page, 1, &mut inner.doorbells),
                Object::Queue(queue) => (*page, queue.pages() as u64, &mut inner.queues),
            })
            .ok_or(ENOENT)?;
        *count -= 1;
        let node = inner.objects.remove_node(&page);
        self.zap(inner, page, pages);
        drop(guard);
        // Frees queue memory; a doorbell's grant stays in the table.
        drop(node);
        Ok(())
    }

    /// `IBGDA_IOC_STATUS`.
    pub(crate) fn status_offset(&self) -> Result<u64> {
        if !self.inner.lock().life.is_bound() {
            return Err(ENOTCONN);
        }
        Ok(self.status_page << PAGE_SHIFT)
    }

    pub(crate) fn status_memory(&self) -> *mut bindings::page {
        self.status.page()
    }

    /// Takes page-table entries away, whoever's node the file was opened by.
    fn zap(&self, inner: &Inner, page: u64, pages: u64) {
        if inner.closed {
            return;
        }
        // SAFETY: The file is not released, and keeps its `f_mapping`.
        unsafe {
            bindings::unmap_mapping_range(
                self.mapping,
                (page << PAGE_SHIFT) as i64,
                (pages << PAGE_SHIFT) as i64,
                1,
            )
        };
    }

    fn publish(&self, inner: &Inner) {
        self.status.publish(&inner.life, inner.port);
    }

    /// In this order: the status page, which a GPU reads; the mappings; the record and the eventfd.
    fn lose(&self, inner: &mut Inner, reason: Reason) -> bool {
        let news = inner.life.lose(reason);
        self.publish(inner);
        if !news {
            return false;
        }
        observe::LOSSES.count();
        // Twice over the tree, because zapping looks at `inner`.
        for named in inner.objects.values_mut() {
            if let Object::Doorbell(doorbell) = &mut named.object {
                doorbell.revoked = true;
            }
        }
        for (page, named) in inner.objects.iter() {
            if let Object::Doorbell(_) = &named.object {
                self.zap(inner, *page, 1);
            }
        }
        let generation = inner.life.generation();
        inner
            .events
            .push(IBGDA_EVENT_LOST, Some(reason), generation, 0);
        true
    }

    /// Loses the session when its pair is one that `which` picks. Whether it was lost by this.
    pub(crate) fn lose_if(&self, reason: Reason, which: impl Fn(&Pair) -> bool) -> bool {
        let mut inner = self.inner.lock();
        inner.pair.as_ref().is_some_and(which) && self.lose(&mut inner, reason)
    }

    /// An ib_device came on this function.
    pub(crate) fn nic_returned(&self, nic: &Function, port: u64) {
        let mut inner = self.inner.lock();
        let mine = inner
            .pair
            .as_ref()
            .is_some_and(|pair| pair.nic.looks_like(nic));
        if mine && inner.life.recover() {
            observe::RETURNS.count();
            inner.port = port;
            self.publish(&inner);
            let generation = inner.life.generation();
            let reason = match inner.life.state() {
                State::Recovered(reason) => Some(reason),
                _ => None,
            };
            inner
                .events
                .push(IBGDA_EVENT_RECOVERED, reason, generation, 0);
        }
    }

    /// The NIC's port changed.
    pub(crate) fn port_changed(&self, which: impl Fn(&Pair) -> bool, port: u64) {
        let mut inner = self.inner.lock();
        if inner.pair.as_ref().is_some_and(which) {
            inner.port = port;
            self.publish(&inner);
        }
    }

    /// The dma-buf of the doorbell at this page is invalidated: under `dma_resv`. `lost`: because its NIC leaves.
    pub(crate) fn doorbell_invalidated(&self, page: u64, lost: Option<Reason>) {
        let mut inner = self.inner.lock();
        if let Some(reason) = lost {
            self.lose(&mut inner, reason);
        }
        let inner = &mut *inner;
        let generation = inner.life.generation();
        let Some(named) = inner.objects.get_mut(&page) else {
            return;
        };
        let handle = named.handle;
        let Object::Doorbell(doorbell) = &mut named.object else {
            return;
        };
        if core::mem::replace(&mut doorbell.revoked, true) {
            return;
        }
        self.zap(inner, page, 1);
        inner.events.push(
            IBGDA_EVENT_DOORBELL,
            Some(Reason::UarDestroyed),
            generation,
            handle,
        );
    }

    /// A line of debugfs.
    pub(crate) fn show_line(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = self.inner.lock();
        write!(
            f,
            "{}\t{}\t{}\t{}\t",
            self.number,
            self.owner.group.number(),
            state_name(&inner.life),
            inner.life.generation(),
        )?;
        match &inner.pair {
            Some(pair) => write!(f, "{}\t{}\t", pair.gpu.bdf, pair.nic.bdf)?,
            None => f.write_str("-\t-\t")?,
        }
        writeln!(
            f,
            "{}\t{}\t{}",
            inner.doorbells,
            inner.queues,
            self.grants.load(Relaxed)
        )
    }

    /// `/proc/<pid>/fdinfo/<fd>`.
    pub(crate) fn show(&self, seq: &kernel::seq_file::SeqFile) {
        let inner = self.inner.lock();
        kernel::seq_print!(seq, "owner:\t{}\n", self.owner.group.number());
        kernel::seq_print!(seq, "state:\t{}\n", state_name(&inner.life));
        if let State::Lost(reason) | State::Recovered(reason) = inner.life.state() {
            kernel::seq_print!(seq, "reason:\t{:?}\n", reason);
        }
        kernel::seq_print!(seq, "generation:\t{}\n", inner.life.generation());
        if let Some(pair) = &inner.pair {
            let path = match pair.path.class {
                IBGDA_PATH_SWITCH => "switch",
                IBGDA_PATH_HOST_BRIDGE => "host bridge",
                _ => "none",
            };
            kernel::seq_print!(seq, "gpu:\t{}\n", pair.gpu.bdf);
            kernel::seq_print!(seq, "nic:\t{}\n", pair.nic.bdf);
            kernel::seq_print!(seq, "path:\t{}\n", path);
        }
        let pages: usize = inner
            .objects
            .values()
            .map(|named| match &named.object {
                Object::Doorbell(_) => 0,
                Object::Queue(queue) => queue.pages(),
            })
            .sum();
        kernel::seq_print!(seq, "doorbells:\t{}\n", inner.doorbells);
        kernel::seq_print!(seq, "queues:\t{}\n", inner.queues);
        kernel::seq_print!(seq, "queue-bytes:\t{}\n", pages << PAGE_SHIFT);
        drop(inner);
        kernel::seq_print!(seq, "grants:\t{}\n", self.grants.load(Relaxed));
    }
}

fn state_name(life: &Life) -> &'static str {
    match life.state() {
        State::Unbound => "unbound",
        State::Ready => "ready",
        State::Lost(_) => "lost",
        State::Recovered(_) => "recovered",
    }
}

fn bdf_bytes(bdf: ibgda_bdf) -> (u32, [u8; 4]) {
    (
        bdf.domain,
        [bdf.bus, bdf.device, bdf.function, bdf.reserved],
    )
}
