// SPDX-License-Identifier: MIT OR Apache-2.0
//! The thread of a context that turns what happens into calls of the application's callback.
//!
//! It sleeps in poll(2) until the broker's eventfd or the verbs device's asynchronous file has something, and looks at
//! the CQs' latched errors, which are words in memory, every few milliseconds. What it has found waits in a queue, so
//! that nothing is lost when one callback follows another.

use crate::{
    broker::Session,
    devx::Device,
    error::{Error, Result, Source},
    event::AsyncEvent,
    worker::{Home, Worker, lock},
};
use ibgda_device::abi::{ibgda_cq, ibgda_error, ibgda_status};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};
use std::{
    collections::VecDeque,
    fmt,
    os::fd::AsFd,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

/// Between two looks at the CQs, ms: half of what an error may take to be told.
const LOOK_MS: u16 = 5;
/// Until an error that was seen is read for good, ms: its record is several words, of which a GPU's come one by one.
const SETTLE_MS: u16 = 1;
/// Between two looks when there are no CQs, ms: every change wakes the thread, so that this is for none.
const SLEEP_MS: u16 = 1000;

/// Events of queues that are kept until somebody listens. A QP that fails has one or two.
const MOST_UNTOLD: usize = 4096;

/// What the application wants called.
pub(crate) type Callback = Box<dyn FnMut(&AsyncEvent) + Send>;

/// A CQ whose first error is to be told.
#[derive(Debug)]
struct Queue {
    handle: *const ibgda_cq,
    number: u32,
    seen: bool,
    told: bool,
}

// SAFETY: the handle is read only, while it is listed, with the list locked: `Monitor::add`.
unsafe impl Send for Queue {}

impl Queue {
    /// Its first error, once. Not the loss of the NIC, which the broker tells.
    fn error(&mut self) -> Option<ibgda_error> {
        if self.told {
            return None;
        }
        // SAFETY: by the contract of `Monitor::add`; a poller may write the record meanwhile, once.
        let error = unsafe { ptr::read_volatile(&raw const (*self.handle).error) };
        self.told = self.seen;
        self.seen = error.status != 0;
        (self.told && error.status != ibgda_status::IBGDA_ERR_NIC_LOST).then_some(error)
    }
}

/// The thread, and how to end it.
#[derive(Debug)]
struct Running {
    worker: Worker,
    stop: Arc<AtomicBool>,
    wake: Arc<EventFd>,
}

impl Running {
    fn stop(self) {
        self.stop.store(true, Ordering::Release);
        ring(&self.wake);
        self.worker.join();
    }
}

/// Fails only for a counter that is full, which wakes as well.
pub(crate) fn ring(eventfd: &EventFd) {
    let _ = eventfd.write(1);
}

pub(crate) fn eventfd() -> Result<EventFd> {
    EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).map_err(|errno| {
        Error::errno_with(
            Source::Argument,
            "eventfd",
            errno as i32,
            "",
            "are there too many open files? see ulimit -n",
        )
    })
}

/// What a context can hear of, and the thread that listens while there is a callback.
#[derive(Default)]
pub(crate) struct Monitor {
    /// Whose context's it is: a forked child's copy may be locked for ever.
    home: Home,
    running: Mutex<Option<Running>>,
    told: Mutex<Option<Arc<EventFd>>>,
    device: Mutex<Option<Arc<Device>>>,
    queues: Mutex<Vec<Queue>>,
    /// Taken from where it came from, and not told yet.
    pending: Mutex<VecDeque<AsyncEvent>>,
}

impl fmt::Debug for Monitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Monitor")
            .field("running", &lock(&self.running).is_some())
            .finish_non_exhaustive()
    }
}

impl Monitor {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Listens to this verbs device from now on.
    pub(crate) fn watch(&self, device: Option<Arc<Device>>) {
        let former = std::mem::replace(&mut *lock(&self.device), device);
        self.wake();
        drop(former);
    }

    /// Tells of the CQ's first error, until the result is dropped.
    ///
    /// # Safety
    /// The handle is valid until the result is dropped.
    pub(crate) unsafe fn add(self: &Arc<Self>, handle: *const ibgda_cq, number: u32) -> Watched {
        lock(&self.queues).push(Queue {
            handle,
            number,
            seen: false,
            told: false,
        });
        self.wake();
        Watched {
            monitor: Arc::clone(self),
            handle,
        }
    }

    /// Whether there is a callback.
    pub(crate) fn listens(&self) -> bool {
        lock(&self.running).is_some()
    }

    fn wake(&self) {
        if let Some(running) = &*lock(&self.running) {
            ring(&running.wake);
        }
    }

    /// Something to tell that another thread of the library has found. What nobody listens for is kept, up to the latest
    /// `MOST_UNTOLD`.
    pub(crate) fn tell(&self, event: AsyncEvent) {
        let mut pending = lock(&self.pending);
        if pending.len() >= MOST_UNTOLD {
            pending.pop_front();
        }
        pending.push_back(event);
        drop(pending);
        self.wake();
    }

    /// Calls this callback from now on. When it returns the former is not running and will not be called again; on the
    /// callback's own thread, will not be called again.
    pub(crate) fn set(
        self: &Arc<Self>,
        session: Option<&Arc<Session>>,
        callback: Callback,
    ) -> Result<()> {
        self.home.check(|| "set a callback".to_owned())?;
        let told = self.told(session)?;
        let former = {
            let mut running = lock(&self.running);
            running.replace(self.start(session, told, callback)?)
        };
        // Without the lock, which the callback may need to return.
        if let Some(former) = former {
            former.stop();
        }
        Ok(())
    }

    /// Calls none, as `set` does.
    pub(crate) fn end(&self) {
        if !self.home.is_here() {
            return;
        }
        let former = lock(&self.running).take();
        if let Some(former) = former {
            former.stop();
        }
    }

    /// What the broker counts its records in.
    fn told(&self, session: Option<&Arc<Session>>) -> Result<Arc<EventFd>> {
        let mut told = lock(&self.told);
        if let Some(told) = &*told {
            return Ok(Arc::clone(told));
        }
        let fresh = Arc::new(eventfd()?);
        if let Some(session) = session {
            session.set_eventfd(fresh.as_fd())?;
        }
        *told = Some(Arc::clone(&fresh));
        Ok(fresh)
    }

    fn start(
        self: &Arc<Self>,
        session: Option<&Arc<Session>>,
        told: Arc<EventFd>,
        callback: Callback,
    ) -> Result<Running> {
        let wake = Arc::new(eventfd()?);
        let stop = Arc::new(AtomicBool::new(false));
        // What the broker has records of already is taken too.
        ring(&told);
        let thread = Thread {
            monitor: Arc::clone(self),
            session: session.cloned(),
            told,
            wake: Arc::clone(&wake),
            stop: Arc::clone(&stop),
            deaf: None,
            failed: None,
        };
        let worker = Worker::start("ibgda-monitor", move || thread.run(callback))?;
        Ok(Running { worker, stop, wake })
    }
}

/// A CQ that the monitor knows. It does not look at it any more when this is dropped.
#[derive(Debug)]
pub(crate) struct Watched {
    monitor: Arc<Monitor>,
    handle: *const ibgda_cq,
}

// SAFETY: the handle is only compared.
unsafe impl Send for Watched {}
// SAFETY: as above.
unsafe impl Sync for Watched {}

impl Drop for Watched {
    fn drop(&mut self) {
        if self.monitor.home.is_here() {
            lock(&self.monitor.queues).retain(|queue| !ptr::eq(queue.handle, self.handle));
        }
    }
}

/// What the thread has.
struct Thread {
    monitor: Arc<Monitor>,
    session: Option<Arc<Session>>,
    told: Arc<EventFd>,
    wake: Arc<EventFd>,
    stop: Arc<AtomicBool>,
    /// The device whose asynchronous file has said that nothing will come of it any more.
    deaf: Option<Arc<Device>>,
    /// The device whose failure has been told: the driver says it, and the removal of its file says it again.
    failed: Option<Arc<Device>>,
}

impl Thread {
    fn run(mut self, mut callback: Callback) {
        while !self.stop.load(Ordering::Acquire) {
            self.take();
            while let Some(event) = self.next() {
                // A callback that panics has had its event; its message has been printed.
                let _ = catch_unwind(AssertUnwindSafe(|| callback(&event)));
            }
        }
    }

    /// The next event to tell, unless this thread is to tell no more.
    fn next(&self) -> Option<AsyncEvent> {
        if self.stop.load(Ordering::Acquire) {
            return None;
        }
        lock(&self.monitor.pending).pop_front()
    }

    /// Waits until something happens, at most until CQs are to be looked at again, and puts down what has.
    fn take(&mut self) {
        let device = lock(&self.monitor.device).clone();
        let device =
            device.filter(|device| !matches!(&self.deaf, Some(deaf) if Arc::ptr_eq(deaf, device)));
        let timeout = PollTimeout::from(self.patience_ms());
        let mut files = vec![
            PollFd::new(self.wake.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.told.as_fd(), PollFlags::POLLIN),
        ];
        files.extend(
            device
                .as_ref()
                .map(|device| PollFd::new(device.async_file(), PollFlags::POLLIN)),
        );
        match poll(&mut files, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            // Without memory for it: as after the time.
            Err(_) => std::thread::sleep(std::time::Duration::from_millis(LOOK_MS.into())),
        }
        let asynchronous = files.get(2).and_then(PollFd::revents);
        drop(files);
        // Both fail only when nothing is there.
        let _ = self.wake.read();
        if self.told.read().is_ok() {
            self.take_records();
        }
        if let (Some(device), Some(ready)) = (device, asynchronous) {
            self.take_verbs(device, ready);
        }
        self.take_errors();
    }

    /// How long it may sleep.
    fn patience_ms(&self) -> u16 {
        let queues = lock(&self.monitor.queues);
        let untold = || queues.iter().filter(|queue| !queue.told);
        if untold().any(|queue| queue.seen) {
            SETTLE_MS
        } else if untold().next().is_some() {
            LOOK_MS
        } else {
            SLEEP_MS
        }
    }

    fn put(&self, event: AsyncEvent) {
        lock(&self.monitor.pending).push_back(event);
    }

    fn take_records(&self) {
        for record in self
            .session
            .iter()
            .flat_map(|session| session.take_events())
        {
            self.put(AsyncEvent::of_broker(&record));
        }
    }

    fn take_verbs(&mut self, device: Arc<Device>, ready: PollFlags) {
        if ready.is_empty() {
            return;
        }
        while let Some(event) = device.async_event() {
            if event.is_device_failure() {
                if matches!(&self.failed, Some(failed) if Arc::ptr_eq(failed, &device)) {
                    continue;
                }
                self.failed = Some(Arc::clone(&device));
            }
            self.put(event);
        }
        if ready.intersects(PollFlags::POLLERR | PollFlags::POLLHUP | PollFlags::POLLNVAL) {
            self.deaf = Some(device);
        }
    }

    fn take_errors(&self) {
        let found: Vec<AsyncEvent> = lock(&self.monitor.queues)
            .iter_mut()
            .filter_map(|queue| Some((queue.number, queue.error()?)))
            .map(|(number, error)| AsyncEvent::of_queue(number, error))
            .collect();
        lock(&self.monitor.pending).extend(found);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::AsyncEventKind;
    use std::{
        sync::{
            atomic::AtomicU32,
            mpsc::{Receiver, channel},
        },
        thread,
        time::Duration,
    };

    const PATIENCE: Duration = Duration::from_secs(60);

    /// A CQ whose error the test latches, and the monitor's knowledge of it.
    struct Cq {
        _watched: Watched,
        handle: Box<ibgda_cq>,
    }

    impl Cq {
        fn new(monitor: &Arc<Monitor>, number: u32) -> Self {
            let handle = Box::new(ibgda_cq::default());
            // SAFETY: what watches it is dropped first (field order).
            let watched = unsafe { monitor.add(&*handle, number) };
            Self {
                _watched: watched,
                handle,
            }
        }

        fn fail(&mut self, status: ibgda_status::Type) {
            // SAFETY: the handle is ours; the monitor's thread only reads it.
            unsafe { (&raw mut self.handle.error.status).write_volatile(status) };
        }
    }

    fn listen(monitor: &Arc<Monitor>) -> Receiver<AsyncEvent> {
        let (told, heard) = channel();
        let callback: Callback = Box::new(move |event| {
            let _ = told.send(event.clone());
        });
        monitor.set(None, callback).expect("a thread");
        heard
    }

    fn cqn(event: &AsyncEvent) -> u32 {
        match event.kind() {
            AsyncEventKind::QueueError { cqn, .. } => cqn,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_first_error_of_each_cq_is_told_once_and_the_loss_of_the_nic_not() {
        let monitor = Monitor::new();
        let mut early = Cq::new(&monitor, 1);
        let heard = listen(&monitor);
        let (mut late, mut lost) = (Cq::new(&monitor, 2), Cq::new(&monitor, 3));
        lost.fail(ibgda_status::IBGDA_ERR_NIC_LOST);
        early.fail(0x113);
        assert_eq!(cqn(&heard.recv_timeout(PATIENCE).expect("told")), 1);
        late.fail(0x105);
        assert_eq!(cqn(&heard.recv_timeout(PATIENCE).expect("told")), 2);
        drop(early);
        assert!(
            heard.recv_timeout(Duration::from_millis(50)).is_err(),
            "told twice, or of a loss"
        );
        monitor.end();
    }

    #[test]
    fn ending_it_waits_for_a_call_under_way_and_what_was_not_told_waits_for_the_next() {
        let monitor = Monitor::new();
        let mut cqs = [1, 2, 3].map(|number| Cq::new(&monitor, number));
        let (entered, seen) = channel();
        let (begun, ended) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let callback: Callback = Box::new({
            let (begun, ended) = (Arc::clone(&begun), Arc::clone(&ended));
            move |_| {
                begun.fetch_add(1, Ordering::SeqCst);
                let _ = entered.send(());
                thread::sleep(Duration::from_millis(30));
                ended.fetch_add(1, Ordering::SeqCst);
            }
        });
        monitor.set(None, callback).expect("a thread");
        cqs[0].fail(0x113);
        cqs[1].fail(0x113);
        seen.recv_timeout(PATIENCE).expect("called");
        monitor.end();
        let told = begun.load(Ordering::SeqCst);
        assert_eq!(ended.load(Ordering::SeqCst), told, "each call has returned");
        cqs[2].fail(0x113);
        thread::sleep(Duration::from_millis(30));
        assert_eq!(begun.load(Ordering::SeqCst), told, "called after its end");

        let heard = listen(&monitor);
        for number in told + 1..=3 {
            assert_eq!(cqn(&heard.recv_timeout(PATIENCE).expect("told")), number);
        }
        monitor.end();
    }

    #[test]
    fn a_callback_may_end_itself_or_set_another_and_may_panic() {
        let monitor = Monitor::new();
        let mut cqs = [1, 2, 3].map(|number| Cq::new(&monitor, number));
        let (told, heard) = channel();
        let first: Callback = Box::new({
            let monitor = Arc::clone(&monitor);
            move |event| {
                let told = told.clone();
                let mine = cqn(event);
                told.send(("first", mine)).expect("the test waits");
                let second: Callback = Box::new(move |event| {
                    told.send(("second", cqn(event))).expect("the test waits");
                    assert_ne!(cqn(event), 2, "this panic belongs to the test");
                });
                monitor.set(None, second).expect("a thread");
                assert_eq!(mine, 1, "called after it was replaced");
            }
        });
        monitor.set(None, first).expect("a thread");
        for (cq, by) in cqs.iter_mut().zip(["first", "second", "second"]) {
            cq.fail(0x113);
            let (caller, _) = heard.recv_timeout(PATIENCE).expect("told");
            assert_eq!(caller, by);
        }
        monitor.end();
        assert!(heard.recv().is_err(), "both callbacks are gone");
    }
}
