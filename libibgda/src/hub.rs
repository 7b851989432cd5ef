// SPDX-License-Identifier: MIT OR Apache-2.0
//! Events of queues: of CQs that were armed, and of QPs and CQs that fail.
//!
//! A thread takes them from the NIC: from the kernel's DevX event channel, of which each context that needs it has one,
//! or from the model, which has one queue of events for each of its NICs. The thread begins with the first queue that
//! wants events, and ends with the context and its queues.

#[cfg(feature = "loopback")]
use crate::loopback;
use crate::{
    devx::Channel,
    error::Result,
    event::AsyncEvent,
    monitor::{Monitor, eventfd, ring},
    nic::{Device, Object},
    worker::{Home, Worker, lock},
};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::EventFd,
};
#[cfg(feature = "loopback")]
use std::time::Duration;
use std::{
    collections::HashMap,
    os::fd::AsFd,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time,
};

/// Types of events, `MLX5_EVENT_TYPE_*` of the kernel's `include/linux/mlx5/device.h`.
pub(crate) mod kind {
    pub(crate) const COMPLETION: u8 = 0x00;
    pub(crate) const PATH_MIGRATED: u8 = 0x01;
    pub(crate) const CQ_ERROR: u8 = 0x04;
    pub(crate) const WQ_CATASTROPHIC: u8 = 0x05;
    pub(crate) const PATH_MIGRATION_FAILED: u8 = 0x07;
    pub(crate) const WQ_INVALID_REQUEST: u8 = 0x10;
    pub(crate) const WQ_ACCESS: u8 = 0x11;

    /// What libibverbs calls an event of a QP by. `None`: another event.
    pub(crate) fn of_verbs(event: ibgda_verbs_sys::ibv_event_type::Type) -> Option<u8> {
        use ibgda_verbs_sys::ibv_event_type as of;
        Some(match event {
            of::IBV_EVENT_PATH_MIG => PATH_MIGRATED,
            of::IBV_EVENT_PATH_MIG_ERR => PATH_MIGRATION_FAILED,
            of::IBV_EVENT_QP_FATAL => WQ_CATASTROPHIC,
            of::IBV_EVENT_QP_REQ_ERR => WQ_INVALID_REQUEST,
            of::IBV_EVENT_QP_ACCESS_ERR => WQ_ACCESS,
            _ => return None,
        })
    }
}

/// Of a QP.
const QP_KINDS: [u16; 5] = [
    kind::PATH_MIGRATED as u16,
    kind::PATH_MIGRATION_FAILED as u16,
    kind::WQ_CATASTROPHIC as u16,
    kind::WQ_INVALID_REQUEST as u16,
    kind::WQ_ACCESS as u16,
];

/// Between two looks whether the thread is to end, where nothing can wake it.
#[cfg(feature = "loopback")]
const LOOK: Duration = Duration::from_millis(20);

/// The counter of a CQ's events, which kernels look at, and the threads of the host that wait for it.
#[derive(Debug)]
pub(crate) struct Arrivals {
    word: *const AtomicU32,
    waiters: Mutex<()>,
    changed: Condvar,
    cancelled: AtomicBool,
}

// SAFETY: the word is an atomic, and valid as long as it is used: by the contract of `new`.
unsafe impl Send for Arrivals {}
// SAFETY: as above.
unsafe impl Sync for Arrivals {}

impl Arrivals {
    /// # Safety
    /// The word is aligned and valid until the subscription that has the result has ended, and whenever else `now` or
    /// `wait` are called.
    pub(crate) unsafe fn new(word: *mut u32) -> Arc<Self> {
        Arc::new(Self {
            word: word.cast::<AtomicU32>().cast_const(),
            waiters: Mutex::new(()),
            changed: Condvar::new(),
            cancelled: AtomicBool::new(false),
        })
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: by the contract of `new`.
        unsafe { &*self.word }
    }

    /// One more.
    pub(crate) fn count(&self) {
        let waiters = lock(&self.waiters);
        self.word().fetch_add(1, Ordering::Release);
        drop(waiters);
        self.changed.notify_all();
    }

    /// Events so far.
    pub(crate) fn now(&self) -> u32 {
        self.word().load(Ordering::Acquire)
    }

    /// Ends every wait, now and later.
    pub(crate) fn cancel(&self) {
        let waiters = lock(&self.waiters);
        self.cancelled.store(true, Ordering::Release);
        drop(waiters);
        self.changed.notify_all();
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Sleeps until there are not `seen` events any more, until waits are cancelled, or for `patience`.
    pub(crate) fn wait(&self, seen: u32, patience: time::Duration) {
        let waiters = lock(&self.waiters);
        let unchanged = |(): &mut ()| self.now() == seen && !self.is_cancelled();
        // Whatever ended it: who waits looks again.
        let _ = self
            .changed
            .wait_timeout_while(waiters, patience, unchanged);
    }
}

/// Who wants a queue's events.
#[derive(Debug)]
struct Sink {
    id: u64,
    number: u32,
    arrivals: Option<Arc<Arrivals>>,
    monitor: Arc<Monitor>,
}

#[derive(Debug, Default)]
struct Sinks {
    last: u64,
    by_key: HashMap<u64, Sink>,
}

#[derive(Debug)]
enum Source {
    Verbs(Channel),
    #[cfg(feature = "loopback")]
    Loopback(loopback::Listener),
}

#[derive(Debug)]
struct Shared {
    source: Source,
    sinks: Mutex<Sinks>,
    wake: EventFd,
    stop: AtomicBool,
}

impl Shared {
    fn run(&self) {
        match &self.source {
            Source::Verbs(channel) => self.run_verbs(channel),
            #[cfg(feature = "loopback")]
            Source::Loopback(listener) => {
                while !self.stop.load(Ordering::Acquire) {
                    if let Some((key, kind, syndrome)) = listener.next(LOOK) {
                        self.tell(key, kind, syndrome);
                    }
                }
            }
        }
    }

    fn run_verbs(&self, channel: &Channel) {
        let mut gone = false;
        while !self.stop.load(Ordering::Acquire) {
            let mut files = vec![PollFd::new(self.wake.as_fd(), PollFlags::POLLIN)];
            if !gone {
                files.push(PollFd::new(channel.as_fd(), PollFlags::POLLIN));
            }
            if poll(&mut files, PollTimeout::NONE).is_err() {
                // Interrupted, or no memory.
                std::thread::sleep(time::Duration::from_millis(1));
            }
            drop(files);
            while !gone {
                match channel.next() {
                    Ok(Some(event)) => self.tell(event.cookie, event.kind, event.syndrome),
                    Ok(None) => break,
                    Err(_) => gone = true,
                }
            }
        }
    }

    fn tell(&self, key: u64, kind: u8, syndrome: u8) {
        let sinks = lock(&self.sinks);
        // An event can be late: its queue may be gone.
        let Some(sink) = sinks.by_key.get(&key) else {
            return;
        };
        if kind == kind::COMPLETION {
            // Under the lock, since the word lives as long as the sink.
            if let Some(arrivals) = &sink.arrivals {
                arrivals.count();
            }
            return;
        }
        let (monitor, number) = (Arc::clone(&sink.monitor), sink.number);
        drop(sinks);
        if let Some(event) = AsyncEvent::of_object(number, kind, syndrome) {
            monitor.tell(event);
        }
    }
}

/// The thread that takes events.
#[derive(Debug)]
pub(crate) struct Hub {
    shared: Arc<Shared>,
    worker: Option<Worker>,
    home: Home,
}

impl Hub {
    /// The hub of a device, or a new one. There is none on the proxy route, whose thread hears of queues by itself.
    pub(crate) fn of(device: &Device) -> Result<Option<Arc<Self>>> {
        match device {
            Device::Verbs(device) => Self::start(Source::Verbs(Channel::open(device)?)).map(Some),
            Device::Proxy(_) => Ok(None),
            #[cfg(feature = "loopback")]
            Device::Loopback(device) => {
                let start = |listener| Self::start(Source::Loopback(listener));
                device.hub(start).map(Some)
            }
        }
    }

    fn start(source: Source) -> Result<Arc<Self>> {
        let shared = Arc::new(Shared {
            source,
            sinks: Mutex::default(),
            wake: eventfd()?,
            stop: AtomicBool::new(false),
        });
        let worker = Worker::start("ibgda-events", {
            let shared = Arc::clone(&shared);
            move || shared.run()
        })?;
        Ok(Arc::new(Self {
            shared,
            worker: Some(worker),
            home: Home::here(),
        }))
    }

    /// Counts the events of an armed CQ, if `arrivals` are given, and tells the monitor of its failure.
    pub(crate) fn subscribe_cq(
        self: &Arc<Self>,
        object: &Object,
        arrivals: Option<Arc<Arrivals>>,
        monitor: &Arc<Monitor>,
    ) -> Result<Subscription> {
        let mut kinds = vec![u16::from(kind::CQ_ERROR)];
        kinds.extend(arrivals.as_ref().map(|_| u16::from(kind::COMPLETION)));
        self.subscribe(object, true, &kinds, arrivals, monitor)
    }

    /// Tells the monitor what happens to a QP.
    pub(crate) fn subscribe_qp(
        self: &Arc<Self>,
        object: &Object,
        monitor: &Arc<Monitor>,
    ) -> Result<Subscription> {
        self.subscribe(object, false, &QP_KINDS, None, monitor)
    }

    fn subscribe(
        self: &Arc<Self>,
        object: &Object,
        #[cfg_attr(
            not(feature = "loopback"),
            expect(unused_variables, reason = "of the model")
        )]
        is_cq: bool,
        kinds: &[u16],
        arrivals: Option<Arc<Arrivals>>,
        monitor: &Arc<Monitor>,
    ) -> Result<Subscription> {
        let number = object.number();
        let subscription = {
            let mut sinks = lock(&self.shared.sinks);
            sinks.last += 1;
            let id = sinks.last;
            let key = match &self.shared.source {
                Source::Verbs(_) => id,
                // Its events name the queue; a number that was used before is this one's now.
                #[cfg(feature = "loopback")]
                Source::Loopback(_) => loopback::event_key(is_cq, number),
            };
            let sink = Sink {
                id,
                number,
                arrivals,
                monitor: Arc::clone(monitor),
            };
            sinks.by_key.insert(key, sink);
            Subscription {
                hub: Arc::clone(self),
                key,
                id,
            }
        };
        // An event may come before this returns.
        match (&self.shared.source, object) {
            (Source::Verbs(channel), Object::Verbs(object)) => {
                channel.subscribe(object, kinds, subscription.key)?;
            }
            // The model tells all, and the table has who wants it; on the proxy route there is no hub.
            _ => {}
        }
        Ok(subscription)
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        if self.home.is_here() {
            self.shared.stop.store(true, Ordering::Release);
            ring(&self.shared.wake);
        }
        if let Some(worker) = self.worker.take() {
            worker.join();
        }
    }
}

/// Events of one queue. None is told any more when this is dropped.
#[derive(Debug)]
pub(crate) struct Subscription {
    hub: Arc<Hub>,
    key: u64,
    id: u64,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        // A forked child's copy may be locked for ever.
        if !self.hub.home.is_here() {
            return;
        }
        let mut sinks = lock(&self.hub.shared.sinks);
        if sinks
            .by_key
            .get(&self.key)
            .is_some_and(|sink| sink.id == self.id)
        {
            sinks.by_key.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        thread,
        time::{Duration, Instant},
    };

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn a_wait_ends_when_counted_when_cancelled_and_in_time() {
        let word = AtomicU32::new(u32::MAX);
        // SAFETY: the word outlives it.
        let arrivals = unsafe { Arrivals::new(word.as_ptr()) };
        let seen = arrivals.now();
        arrivals.wait(seen, Duration::from_millis(20));
        assert_eq!(arrivals.now(), seen);
        for end in [Arrivals::count, Arrivals::cancel] {
            let seen = arrivals.now();
            let start = Instant::now();
            thread::scope(|scope| {
                scope.spawn(|| {
                    thread::sleep(Duration::from_millis(20));
                    end(&arrivals);
                });
                arrivals.wait(seen, PATIENCE);
            });
            assert!(start.elapsed() < PATIENCE / 2);
        }
        assert_eq!(arrivals.now(), 0, "counted once, past the end of the word");
        let start = Instant::now();
        arrivals.wait(0, PATIENCE);
        assert!(start.elapsed() < PATIENCE / 2, "cancelled for good");
    }
}
