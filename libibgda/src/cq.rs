// SPDX-License-Identifier: MIT OR Apache-2.0
//! Completion queues.

use crate::{
    carrier::Carried,
    context::Context,
    doorbell::PooledPage,
    error::{Error, Result, Source},
    exported::{ExportedMemory, Place},
    hub::{Arrivals, Subscription},
    ifc::{self, Block, cqc, create_cq, opcode},
    monitor::Watched,
    nic::{Device, Object, Uar},
    queue::{Handle, depth},
    worker::Home,
};
use ibgda_device::abi::{IBGDA_CQE_BYTES, IBGDA_CQE_INVALID, ibgda_cq, ibgda_error};
use ibgda_verbs_sys::uverbs::UarType;
use std::{
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence},
    },
    time::{Duration, Instant},
};

/// Lines of 64 bytes behind the ring: the doorbell record, the counter of events, a doorbell that a thread carries.
const LINE: usize = 64;
/// Consumer indices of doorbell records have 24 bits.
const INDEX: u32 = 0xff_ffff;
/// Between two looks of a sleeping wait at the NIC's state and at the queue itself.
const LOOK: Duration = Duration::from_millis(10);
/// `IBGDA_STATE_READY` of the status page.
const READY: u64 = 1;

/// What a completion queue is to be like.
#[derive(Clone, Debug)]
pub struct CompletionQueueOptions {
    /// Completions it holds, a power of two, 1 to 32768.
    pub depth: u32,
    /// It can be waited for without polling, by [`CompletionQueue::wait_for_event`] and by kernels'
    /// `ibgda_wait_for_cq_event`. Costs a doorbell page, and the context a thread.
    pub events: bool,
    /// The NIC keeps one completion, the last (`IBGDA_COLLAPSED`): nothing is lost that a poller of a send queue needs but
    /// lengths and immediates, and it has less to look at. For send queues only, and without events.
    pub collapsed: bool,
    /// Where it lies; else in memory of the host that the broker gives. Without events then, since the host does not read
    /// it.
    pub memory: Option<Arc<ExportedMemory>>,
}

impl CompletionQueueOptions {
    /// Bytes that such a queue takes: the ring, and lines of 64 bytes behind it.
    pub fn memory_bytes(&self) -> usize {
        let lines = if self.events { 3 } else { 1 };
        self.depth as usize * IBGDA_CQE_BYTES as usize + lines * LINE
    }
}

impl Default for CompletionQueueOptions {
    fn default() -> Self {
        Self {
            depth: 128,
            events: false,
            collapsed: false,
            memory: None,
        }
    }
}

/// What a queue with events has.
#[derive(Debug)]
struct Armed {
    // Dropped in this order: what rings, then the page; the queue's memory lives longer.
    carried: Option<Carried>,
    page: PooledPage,
    arrivals: Arc<Arrivals>,
}

/// A ring of completions. It serves one work queue.
#[derive(Debug)]
pub struct CompletionQueue {
    // Dropped in this order: what looks at the handle or writes to the memory, the object, then what it is armed by, the
    // memory it lies in, and what that was made from.
    _watched: Watched,
    _subscription: Option<Subscription>,
    object: Object,
    armed: Option<Armed>,
    memory: Place,
    _uar: Arc<Uar>,
    device: Device,
    handle: Handle<ibgda_cq>,
    collapsed: bool,
    taken: AtomicBool,
    home: Home,
}

impl CompletionQueue {
    pub(crate) fn create(context: &Context, options: &CompletionQueueOptions) -> Result<Self> {
        let entries = options.depth;
        let log = depth("CQ", entries, 1)?;
        if options.memory.is_some() && options.events {
            return Err(Error::argument(
                format!("CQ of {entries} entries in exported memory, and with events"),
                "who waits on the host looks at the queue, which may be a GPU's",
                "choose one of the two",
            ));
        }
        if options.collapsed && options.events {
            return Err(Error::argument(
                format!("CQ of {entries} entries, collapsed and with events"),
                "an event is of a completion that can be taken, and a collapsed CQ shows only the last",
                "choose one of the two",
            ));
        }
        let page = options
            .events
            .then(|| context.doorbells().take(UarType::NonCached))
            .transpose()?;
        let ring_bytes = entries as usize * IBGDA_CQE_BYTES as usize;
        let exported = options.memory.as_ref();
        let memory = Place::take(context, exported, options.memory_bytes(), ring_bytes)?;
        let ring = memory.address();
        let field = |field: ifc::Field| field.at(ifc::CREATE_CQ_CQC);
        let uar = Arc::clone(context.uar());
        let uar_page = page
            .as_ref()
            .map_or(uar.page_id(), |page| page.page().page_id());
        let command = Block::<{ ifc::CREATE_CQ_BYTES }>::command(opcode::CREATE_CQ)
            .set(create_cq::UMEM_ID, memory.umem_id().into())
            .set(create_cq::UMEM_OFFSET, memory.umem_offset())
            .set(create_cq::UMEM_VALID, 1)
            .set(field(cqc::CQE_SIZE), 0)
            .set(field(cqc::COLLAPSED), options.collapsed.into())
            .set(field(cqc::OVERRUN_IGNORE), options.collapsed.into())
            .set(field(cqc::LOG_SIZE), log.into())
            .set(field(cqc::UAR_PAGE), uar_page.into())
            .set(field(cqc::EQN), context.device().eqn()?.into())
            .set(field(cqc::LOG_PAGE_SIZE), 0)
            .set(field(cqc::DBR_UMEM_VALID), 1)
            .set(field(cqc::DBR_UMEM_ID), memory.umem_id().into())
            .set(
                field(cqc::DBR_ADDR),
                memory.umem_offset() + ring_bytes as u64,
            );
        let object = Object::create(
            context.device(),
            &format!("CREATE_CQ ({entries} entries)"),
            &command,
        )?;

        // SAFETY: the lines lie behind the ring in the same memory, zeroed and aligned.
        let line = |number: usize| unsafe { ring.add(ring_bytes + number * LINE) };
        let armed = page.map(|page| {
            let register = page.page().arm_register();
            let word = line(2).cast::<u64>();
            let carried = context.carrier().map(|carrier| {
                // SAFETY: only doorbells are stored in the word, which with the page outlives what carries it: the
                // fields' order here and in `Armed`.
                unsafe { carrier.add(word, register) }
            });
            Armed {
                carried,
                page,
                // SAFETY: the memory outlives the subscription (field order), and each call of this queue's.
                arrivals: unsafe { Arrivals::new(line(1).cast()) },
            }
        });
        let arm_doorbell = armed.as_ref().map_or(ptr::null_mut(), |armed| {
            if armed.carried.is_some() {
                line(2).cast()
            } else {
                armed.page.page().arm_register()
            }
        });
        let events: *const u32 = match &armed {
            Some(_) => line(1).cast(),
            None => ptr::null(),
        };
        let monitor = context.monitor();
        if let (Device::Proxy(device), Some(armed)) = (context.device(), &armed) {
            device.count(object.number(), Arc::clone(&armed.arrivals));
        }
        let hub = if options.events || monitor.listens() {
            context.hub()?
        } else {
            None
        };
        let subscription = hub
            .map(|hub| {
                let arrivals = armed.as_ref().map(|armed| Arc::clone(&armed.arrivals));
                hub.subscribe_cq(&object, arrivals, monitor)
            })
            .transpose()?;

        let handle = Handle::new(ibgda_cq {
            ring,
            doorbell_record: line(0).cast(),
            arm_doorbell,
            events,
            status_page: context.session().status_page(),
            number: object.number(),
            depth: entries,
            generation: context.generation(),
            ..Default::default()
        });
        // SAFETY: the handle is dropped after what watches it (field order).
        let watched = unsafe { context.monitor().add(handle.as_ptr(), object.number()) };
        Ok(Self {
            _watched: watched,
            _subscription: subscription,
            object,
            armed,
            memory,
            _uar: uar,
            device: context.device().clone(),
            handle,
            collapsed: options.collapsed,
            taken: AtomicBool::new(false),
            home: Home::here(),
        })
    }

    /// CQ number.
    pub fn number(&self) -> u32 {
        self.object.number()
    }

    /// Completions it holds.
    pub fn depth(&self) -> u32 {
        // SAFETY: set at creation and constant.
        unsafe { (*self.handle.as_ptr()).depth }
    }

    /// What a kernel polls. Valid as long as the queue lives; one thread at a time may use it.
    pub fn device_handle(&self) -> *mut ibgda_cq {
        self.handle.as_ptr()
    }

    /// The first error that a poller latched, if any yet. Its sentence is its `Display`.
    pub fn error(&self) -> Option<ibgda_error> {
        // SAFETY: the handle lives as long as `self`; a poller may write the record meanwhile, so that it is read once, and
        // its status, written with the rest, decides.
        let error = unsafe { ptr::read_volatile(&raw const (*self.handle.as_ptr()).error) };
        (error.status != 0).then_some(error)
    }

    /// Sleeps until there may be something to poll for: a completion, or an error that a kernel has latched. At most
    /// `timeout`, after which the result is false. Arms the queue, made with
    /// [`events`](CompletionQueueOptions::events), for the completions behind those that its poller has taken; who that is,
    /// a kernel on a GPU too, and how many wait, does not matter.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: made without events; `ENOLINK`: the NIC was lost; `ECANCELED`: [`CompletionQueue::cancel_waits`];
    /// `EPERM`: in a forked child.
    pub fn wait_for_event(&self, timeout: Duration) -> Result<bool> {
        let what = || format!("wait for an event of CQ {:#x}", self.number());
        self.home.check(what)?;
        let failed = |errno, why: &str, advice: &str| {
            Err(Error::new(Source::Argument, errno, what(), why, advice))
        };
        let Some(Armed { arrivals, .. }) = &self.armed else {
            return failed(
                libc::EOPNOTSUPP,
                "it was made without events",
                "make it with CompletionQueueOptions::events (IBGDA_CQ_EVENTS)",
            );
        };
        // A time that no clock reaches is for ever, and so is bounded by the other reasons.
        let end = Instant::now().checked_add(timeout);
        let seen = arrivals.now();
        let mut armed = false;
        loop {
            if self.has_something() || (armed && arrivals.now() != seen) {
                return Ok(true);
            }
            if arrivals.is_cancelled() {
                return failed(libc::ECANCELED, "its waits were ended", "");
            }
            if self.is_lost() {
                return failed(
                    libc::ENOLINK,
                    "the NIC was reset or taken away",
                    "rebind the context, and make new queues",
                );
            }
            if !armed {
                self.arm(seen);
                armed = true;
                continue;
            }
            let left = end.map_or(LOOK, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Ok(false);
            }
            // An event may be late, or have been of an arming before this one: the queue is looked at all the same.
            arrivals.wait(seen, left.min(LOOK));
        }
    }

    /// Ends every [`CompletionQueue::wait_for_event`], now and later, with `ECANCELED`.
    pub fn cancel_waits(&self) {
        // A forked child's copy may be locked for ever.
        if let Some(armed) = self.armed.as_ref().filter(|_| self.home.is_here()) {
            armed.arrivals.cancel();
        }
    }

    /// The consumer index in the doorbell record, which whoever polls writes.
    fn consumer(&self) -> u32 {
        // SAFETY: the record lives as long as the memory; it is written whole.
        let record = unsafe { AtomicU32::from_ptr((*self.handle.as_ptr()).doorbell_record) };
        u32::from_be(record.load(Ordering::Acquire)) & INDEX
    }

    /// Whether a completion is there that was not taken, or an error that was.
    fn has_something(&self) -> bool {
        let consumer = self.consumer();
        let at = (consumer & (self.depth() - 1)) as usize * IBGDA_CQE_BYTES as usize + 63;
        // SAFETY: inside the ring, which the NIC writes in whole bytes.
        let owner = unsafe { AtomicU8::from_ptr((*self.handle.as_ptr()).ring.add(at).cast_mut()) };
        let owner = owner.load(Ordering::Acquire);
        let lap = consumer & self.depth() != 0;
        let waits = u32::from(owner >> 4) != IBGDA_CQE_INVALID && (owner & 1 == 1) == lap;
        waits || self.error().is_some()
    }

    /// Asks for an event when there is a completion behind those taken; `events` came so far.
    fn arm(&self, events: u32) {
        let handle = self.handle.as_ptr();
        let command = (((events & 3) << 28) | self.consumer()).to_be();
        // SAFETY: constant after creation; the record and the doorbell live as long as the queue.
        unsafe {
            AtomicU32::from_ptr((*handle).doorbell_record.add(1)).store(command, Ordering::Release);
            fence(Ordering::SeqCst);
            let doorbell = (u64::from((*handle).number.to_be()) << 32) | u64::from(command);
            AtomicU64::from_ptr((*handle).arm_doorbell).store(doorbell, Ordering::Release);
        }
    }

    fn is_lost(&self) -> bool {
        let handle = self.handle.as_ptr();
        // SAFETY: constant after creation; the page lives as long as the memory, and is written in whole words.
        unsafe {
            let word = AtomicU64::from_ptr((*handle).status_page.cast_mut());
            word.load(Ordering::Acquire) != (u64::from((*handle).generation) << 32) | READY
        }
    }

    /// The page that it is armed by, where no thread carries the doorbells there.
    pub(crate) fn arm_page(&self) -> Option<&crate::doorbell::DoorbellPage> {
        let armed = self.armed.as_ref()?;
        armed.carried.is_none().then(|| armed.page.page())
    }

    /// Gives the queue to a work queue of the same device, which must be the first, of a QP that is used in `mode`.
    pub(crate) fn take(
        &self,
        device: &Device,
        what: &str,
        work_depth: u32,
        mode: u32,
    ) -> Result<()> {
        if !self.device.is(device) {
            return Err(Error::argument(
                format!(
                    "{what} with CQ {:#x} of {}",
                    self.number(),
                    self.device.name()
                ),
                "this CQ was made from another context, or before the NIC was lost",
                "create the CQ from the context that the QP is made from",
            ));
        }
        if self.depth() < work_depth {
            return Err(Error::argument(
                format!(
                    "{what} of depth {work_depth} with a CQ of {} entries",
                    self.depth()
                ),
                "completions of a full queue would overrun the CQ",
                format!("create the CQ with at least {work_depth} entries"),
            ));
        }
        if self.taken.swap(true, Ordering::Relaxed) {
            return Err(Error::new(
                crate::error::Source::Argument,
                libc::EBUSY,
                format!("{what} with CQ {:#x}", self.number()),
                "this CQ serves a work queue, or has served one",
                "create one CQ for each send queue and each receive queue",
            ));
        }
        // SAFETY: no kernel uses the handle: the work queue that took this CQ is being made.
        unsafe { (*self.handle.as_ptr()).mode = mode };
        Ok(())
    }

    /// Whether it keeps only the last completion.
    pub(crate) fn is_collapsed(&self) -> bool {
        self.collapsed
    }

    /// The word of the send queue that an error of this queue is to clear.
    pub(crate) fn stop_at_errors(&self, limit: *mut u64) {
        // SAFETY: no kernel uses the handle: the work queue that took this CQ is being made, or is gone.
        unsafe { (*self.handle.as_ptr()).limit = limit };
    }

    pub(crate) fn give_back(&self) {
        self.stop_at_errors(ptr::null_mut());
        self.taken.store(false, Ordering::Relaxed);
    }

    /// Its memory, for a GPU to reach.
    pub(crate) fn memory(&self) -> &Place {
        &self.memory
    }

    pub(crate) fn handle_ptr(&self) -> *mut ibgda_cq {
        self.handle.as_ptr()
    }
}
