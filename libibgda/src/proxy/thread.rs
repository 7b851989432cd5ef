// SPDX-License-Identifier: MIT OR Apache-2.0
//! The thread of a context on the proxy route.
//!
//! It looks at the words and records of all QPs and at the CQs of the verbs again and again, and sleeps ever longer as
//! long as there is nothing ([`crate::idle`]). While it sleeps, the device's asynchronous events wake it; they are taken
//! by it alone, since one of them says that the device is lost: then the status page says so to kernels.
//!
//! Memory order: `docs/memory-order.md`, "Through a CPU".

use super::{queue::Sender, receive::Receiver, status::StatusPage, verbs::VerbsQp};
use crate::{
    devx,
    error::Result,
    event::{AsyncEvent, AsyncEventKind, now_ns},
    idle::{Idle, Pause},
    monitor::{Monitor, eventfd, ring},
    worker::{Worker, lock},
};
use ibgda_uapi::{
    IBGDA_EVENT_LOST, IBGDA_EVENT_RECOVERED, IBGDA_REASON_NIC_REMOVED, IBGDA_REASON_NIC_RESET,
    ibgda_event,
};
use ibgda_verbs_sys::ibv_event_type::IBV_EVENT_DEVICE_FATAL;
use nix::{
    poll::{PollFd, PollFlags, ppoll},
    sys::{eventfd::EventFd, time::TimeSpec},
};
use std::{
    hint,
    os::fd::AsFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Between two looks at the asynchronous events of a device whose QPs are busy.
const EVENTS: Duration = Duration::from_millis(1);
/// Looks between two at the clock, for that.
const LOOKS: u32 = 256;
/// How long it sleeps when there are no QPs: every change wakes it.
const NO_QUEUES: Duration = Duration::from_secs(1);
/// Between two looks for a device that is lost.
const RETURN: Duration = Duration::from_millis(100);

/// A QP of the thread's.
#[derive(Debug)]
pub(super) struct Queue {
    verbs: Arc<VerbsQp>,
    sender: Sender,
    receiver: Option<Receiver>,
}

impl Queue {
    pub(super) fn new(verbs: Arc<VerbsQp>, sender: Sender, receiver: Option<Receiver>) -> Self {
        Self {
            verbs,
            sender,
            receiver,
        }
    }

    fn look(&mut self) -> bool {
        let verbs = &*self.verbs;
        let received = self.receiver.as_mut().is_some_and(|it| it.look(verbs));
        self.sender.look(verbs) || received
    }
}

#[derive(Debug)]
struct Shared {
    queues: Mutex<Vec<Queue>>,
    /// Threads that want to change the list, which the looking one lets before it.
    changing: AtomicUsize,
    stop: AtomicBool,
    /// Whoever answers to the device's name is another.
    gone: AtomicBool,
    wake: EventFd,
}

impl Shared {
    fn change<R>(&self, change: impl FnOnce(&mut Vec<Queue>) -> R) -> R {
        self.changing.fetch_add(1, Ordering::Relaxed);
        let mut queues = lock(&self.queues);
        self.changing.fetch_sub(1, Ordering::Relaxed);
        change(&mut queues)
    }

    /// A look at each QP: were there some, and was there something?
    fn look(&self) -> (bool, bool) {
        let mut queues = lock(&self.queues);
        let found = queues
            .iter_mut()
            .fold(false, |found, queue| queue.look() | found);
        (!queues.is_empty(), found)
    }

    fn stops(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

/// What the thread works for.
pub(super) struct Purpose {
    pub(super) verbs: Arc<devx::Device>,
    pub(super) status: Arc<StatusPage>,
    pub(super) generation: u32,
    /// Whom asynchronous events are told.
    pub(super) monitor: Arc<Monitor>,
    /// Whether there is a device again to open.
    pub(super) is_back: Box<dyn Fn() -> bool + Send>,
}

/// The thread, as long as anything needs it.
#[derive(Debug)]
pub(super) struct Thread {
    shared: Arc<Shared>,
    worker: Option<Worker>,
}

impl Thread {
    pub(super) fn start(purpose: Purpose) -> Result<Self> {
        let shared = Arc::new(Shared {
            queues: Mutex::default(),
            changing: AtomicUsize::default(),
            stop: AtomicBool::default(),
            gone: AtomicBool::default(),
            wake: eventfd()?,
        });
        let worker = Worker::start("ibgda-proxy", {
            let shared = Arc::clone(&shared);
            move || run(&shared, &purpose)
        })?;
        Ok(Self {
            shared,
            worker: Some(worker),
        })
    }

    pub(super) fn add(&self, queue: Queue) {
        self.shared.change(|queues| queues.push(queue));
        ring(&self.shared.wake);
    }

    /// Takes a QP from it, by number: it is not at it, and does not come to it again.
    pub(super) fn remove(&self, number: u32) -> Option<Queue> {
        self.shared.change(|queues| {
            let ours = |queue: &Queue| queue.verbs.number() == number;
            let at = queues.iter().position(ours)?;
            Some(queues.swap_remove(at))
        })
    }

    /// Whether the device is lost for good, so that another may be there in its place.
    pub(super) fn is_gone(&self) -> bool {
        self.shared.gone.load(Ordering::Acquire)
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        let Some(worker) = self.worker.take() else {
            return;
        };
        if worker.is_here() {
            self.shared.stop.store(true, Ordering::Release);
            ring(&self.shared.wake);
        }
        worker.join();
    }
}

fn run(shared: &Shared, purpose: &Purpose) {
    let reason = work(shared, purpose);
    let Some(reason) = reason else { return };
    purpose.status.lose(purpose.generation, reason);
    tell(purpose, IBGDA_EVENT_LOST, purpose.generation, reason);
    wait_for_return(shared, purpose, reason);
}

/// Until it is to stop; or the device is lost, and why.
fn work(shared: &Shared, purpose: &Purpose) -> Option<u32> {
    let (mut idle, mut looks, mut asked) = (Idle::default(), 0_u32, Instant::now());
    while !shared.stops() {
        if shared.changing.load(Ordering::Relaxed) > 0 {
            thread::yield_now();
            continue;
        }
        let (some, found) = shared.look();
        let mut pause = None;
        if found {
            idle = Idle::default();
        } else {
            match idle.next() {
                _ if !some => (idle, pause) = (Idle::default(), Some(NO_QUEUES)),
                Pause::Spin => hint::spin_loop(),
                Pause::Yield => thread::yield_now(),
                Pause::Sleep(time) => pause = Some(time),
            }
        }
        looks = looks.wrapping_add(1);
        let woken = pause.is_some_and(|pause| sleep(shared, purpose, pause));
        if woken || looks % LOOKS == 0 && asked.elapsed() >= EVENTS {
            asked = Instant::now();
            if let Some(reason) = take_events(purpose) {
                return Some(reason);
            }
        }
    }
    None
}

/// Sleeps until the device has an event (true), the list has changed, or the time is over.
fn sleep(shared: &Shared, purpose: &Purpose, time: Duration) -> bool {
    let mut files = [
        PollFd::new(purpose.verbs.async_file(), PollFlags::POLLIN),
        PollFd::new(shared.wake.as_fd(), PollFlags::POLLIN),
    ];
    match ppoll(&mut files, Some(TimeSpec::from_duration(time)), None) {
        Ok(_) => {
            let has = |file: &PollFd<'_>| file.revents().is_some_and(|events| !events.is_empty());
            let (event, woken) = (has(&files[0]), has(&files[1]));
            if woken {
                let _ = shared.wake.read();
            }
            event
        }
        // A signal, which none is delivered of; or no memory for it: as after the time.
        Err(_) => {
            thread::sleep(time);
            false
        }
    }
}

/// Takes the events that there are. Of the one that says that the device is lost: why.
fn take_events(purpose: &Purpose) -> Option<u32> {
    let mut reason = None;
    while let Some(event) = purpose.verbs.async_event() {
        // A reset and a removal begin in the same way; the monitor's users hear of the loss.
        match event.kind() {
            AsyncEventKind::Verbs {
                event: IBV_EVENT_DEVICE_FATAL,
            } => reason = Some(IBGDA_REASON_NIC_RESET),
            _ => purpose.monitor.tell(event),
        }
    }
    reason.or_else(|| ends(purpose).then_some(IBGDA_REASON_NIC_REMOVED))
}

/// Whether the file of events says that it is at its end.
fn ends(purpose: &Purpose) -> bool {
    let mut files = [PollFd::new(purpose.verbs.async_file(), PollFlags::empty())];
    let polled = ppoll(
        &mut files,
        Some(TimeSpec::from_duration(Duration::ZERO)),
        None,
    );
    let ended = PollFlags::POLLERR | PollFlags::POLLHUP | PollFlags::POLLNVAL;
    polled.is_ok_and(|ready| ready > 0)
        && files[0]
            .revents()
            .is_some_and(|events| events.intersects(ended))
}

/// Whether the device that was lost does not answer any more: the kernel has taken it from its users, or it is broken.
/// One that does may be the one that is there under its name.
fn is_gone(purpose: &Purpose) -> bool {
    let answer = purpose.verbs.limits();
    answer.is_err_and(|error| matches!(error.errno(), libc::EIO | libc::ENODEV))
}

fn tell(purpose: &Purpose, type_: u32, generation: u32, reason: u32) {
    let record = ibgda_event {
        type_,
        reason,
        generation,
        handle: 0,
        time_ns: now_ns(),
    };
    purpose.monitor.tell(AsyncEvent::of_broker(&record));
}

/// The QPs are dead. Says when the device can be opened again.
fn wait_for_return(shared: &Shared, purpose: &Purpose, reason: u32) {
    let mut told = false;
    while !shared.stops() {
        // No more comes of it that is of interest, but the file is to be empty.
        let _ = take_events(purpose);
        if !told && is_gone(purpose) {
            shared.gone.store(true, Ordering::Release);
            // Whoever joins it may have seen by himself that it is back.
            told = !purpose.status.is_lost(purpose.generation);
            if !told && (purpose.is_back)() && purpose.status.recover(purpose.generation) {
                told = true;
                tell(
                    purpose,
                    IBGDA_EVENT_RECOVERED,
                    purpose.generation + 1,
                    reason,
                );
            }
        }
        let pause = if told { NO_QUEUES } else { RETURN };
        let mut files = [PollFd::new(shared.wake.as_fd(), PollFlags::POLLIN)];
        match ppoll(&mut files, Some(TimeSpec::from_duration(pause)), None) {
            Ok(_) => drop(shared.wake.read()),
            Err(_) => thread::sleep(pause),
        }
    }
}
