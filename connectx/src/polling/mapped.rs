// SPDX-License-Identifier: MIT OR Apache-2.0
//! UAR pages of users that a guest, and whoever has the file behind the BAR, stores to without a trap.
//!
//! The driver's own pages stay trapped: its event queues share a page, and of two arms that come between two looks only
//! the last would be seen. Of queues the truth is in their doorbell records, which are never lost: after a doorbell on a
//! page of several queues the records of all of them are read ([`doorbell::found`]). A page that was freed is still
//! looked at now and then, so that a store by somebody who has lost it is counted, as a trapped one is.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};
use std::vec::Drain;

use super::{Page, Pause, Ring, Rings, Rung, Watched};
use crate::engine::doorbell;
use crate::hca_config::BAR0_SIZE;
use crate::ifc::wqe::uar;
use crate::mem::SharedMemory;
use crate::objects::device::FIRST_UAR;
use crate::wire::Fabric;
use crate::wire::fabric::Next;

/// UAR pages that are mapped: behind those that the driver has for itself. Who finds all of them taken gets a trapped one.
pub const PAGES: Range<u32> = FIRST_UAR + 0x100..FIRST_UAR + 0x900;

/// How long after the look before at its page a doorbell may be found without counting as late.
pub const IN_TIME: Duration = Duration::from_micros(5);

/// Doorbells that were found and not told yet, at most: then who looks waits.
const MOST: usize = 1 << 16;

/// Pages that are looked at.
#[derive(Default)]
struct Pages {
    live: Vec<Page>,
    freed: Vec<Page>,
}

struct Shared {
    fabric: Arc<Fabric>,
    pages: Watched<Pages>,
    stop: AtomicBool,
    start: Instant,
}

impl Shared {
    /// Nanoseconds since the start.
    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
}

/// The mapped pages of one function.
pub struct Mapped {
    nic: usize,
    memory: Arc<SharedMemory>,
    shared: Arc<Shared>,
}

impl Mapped {
    /// The memory of the BAR, of which only the mapped pages are used, and where these lie in it.
    pub fn window(&self) -> (Arc<SharedMemory>, Range<u64>) {
        let bytes = |page: u32| u64::from(page) * uar::PAGE;
        (self.memory.clone(), bytes(PAGES.start)..bytes(PAGES.end))
    }

    /// A page has an owner from now on. Returns how many doorbells lay there that nobody had looked at: of no owner.
    pub(crate) fn allocated(&self, number: u32) -> u64 {
        if !PAGES.contains(&number) {
            return 0;
        }
        let mut pages = self.shared.pages.change();
        let ours = |page: &Page| (page.nic, page.number) == (self.nic, number);
        let page = match pages.freed.iter().position(ours) {
            Some(at) => pages.freed.swap_remove(at),
            None => {
                let offset = number as usize * uar::PAGE as usize;
                // SAFETY: inside the memory, by `PAGES`, aligned, and kept mapped by the page itself.
                let mut page =
                    unsafe { Page::new(self.nic, number, self.memory.as_ptr().add(offset)) };
                page.memory = Some(self.memory.clone());
                page
            }
        };
        let mut left = 0;
        page.take(|_| left += 1);
        page.looked.set(self.shared.now());
        pages.live.push(page);
        left
    }

    /// Pages that have no owner any more: one, or all.
    pub(crate) fn freed(&self, number: Option<u32>) {
        let mut pages = self.shared.pages.change();
        let pages = &mut *pages;
        let gone =
            |page: &Page| page.nic == self.nic && number.is_none_or(|number| page.number == number);
        let (gone, live) = std::mem::take(&mut pages.live).into_iter().partition(gone);
        pages.live = live;
        pages.freed.extend::<Vec<Page>>(gone);
    }
}

/// Who looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// One thread, which does what the doorbells that it has found start before it looks again.
    One,
    /// One that looks, and one that does what the doorbells start: where there are processors enough, nothing that one
    /// doorbell starts delays the sight of another.
    Two,
}

/// The threads that look. Dropping it ends them.
pub struct Poller {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Poller {
    /// Starts to look at the pages of a fabric's functions. How long it goes on without a pause after there was something
    /// is `spin`; see [`inproc::Options::spin`](crate::inproc::Options::spin).
    pub fn new(fabric: &Arc<Fabric>, spin: Duration, threads: Threads) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            fabric: fabric.clone(),
            pages: Watched::default(),
            stop: AtomicBool::new(false),
            start: Instant::now(),
        });
        let mut poller = Self {
            shared,
            threads: Vec::new(),
        };
        match threads {
            Threads::One => {
                poller.start("doorbells", move |shared| {
                    Look::new(shared).run(spin, |found| {
                        found.for_each(|found| found.tell(&shared.fabric));
                        true
                    });
                })?;
            }
            Threads::Two => {
                let (sender, receiver) = sync_channel(MOST);
                let teller = poller.start("doorbells-told", move |shared| {
                    tell_what_comes(shared, spin, &receiver);
                })?;
                poller.start("doorbells", move |shared| {
                    Look::new(shared).run(spin, |mut found| {
                        let sent = found.all(|found| sender.send(found).is_ok());
                        teller.unpark();
                        sent
                    });
                })?;
            }
        }
        Ok(poller)
    }

    fn start(
        &mut self,
        name: &str,
        run: impl FnOnce(&Shared) + Send + 'static,
    ) -> std::io::Result<Thread> {
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || run(&shared))?;
        let started = thread.thread().clone();
        self.threads.push(thread);
        Ok(started)
    }

    /// What function number `nic` of the fabric lets its users map.
    pub fn map(&self, nic: usize) -> std::io::Result<Arc<Mapped>> {
        Ok(Arc::new(Mapped {
            nic,
            memory: Arc::new(SharedMemory::new(
                &format!("nic{nic}-bar0"),
                BAR0_SIZE as usize,
            )?),
            shared: self.shared.clone(),
        }))
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("a thread that looks at doorbells has panicked");
            }
        }
    }
}

/// How many of the freed pages a look takes in: few, so that looks at the others follow each other closely, or after a
/// sleep all.
#[derive(Clone, Copy)]
enum Freed {
    One,
    All,
}

impl Freed {
    fn after(slept: bool) -> Self {
        if slept { Self::All } else { Self::One }
    }
}

/// A doorbell that its function has not been told of yet.
struct Found {
    nic: usize,
    page: u32,
    ring: Ring,
    late: bool,
    /// The page had an owner.
    owned: bool,
}

impl Found {
    /// Tells the function, and does what comes of it, if it is not too much.
    fn tell(self, fabric: &Fabric) {
        let Ring { offset, value } = self.ring;
        fabric.drive(self.nic, |device| {
            device.counters.found_doorbells += 1;
            device.counters.late_doorbells += u64::from(self.late);
            // What the page was when the doorbell was seen counts. Who has given it back since has no queues there any more.
            match (self.owned, device.uars.get(self.page)) {
                (true, Some(_)) => doorbell::found(device, self.page, offset, &value),
                (true, None) => {}
                (false, _) => doorbell::stale(device, self.page, offset),
            }
        });
    }
}

/// Tells the functions what another thread has found.
fn tell_what_comes(shared: &Shared, spin: Duration, found: &Receiver<Found>) {
    let mut pause = Pause::new(spin);
    while !shared.stop.load(Ordering::Relaxed) {
        match found.try_recv() {
            Ok(found) => {
                pause.worked();
                found.tell(&shared.fabric);
            }
            Err(TryRecvError::Empty) => drop(pause.wait(&Next::At(None))),
            Err(TryRecvError::Disconnected) => return,
        }
    }
}

/// What the thread that looks remembers.
struct Look<'a> {
    shared: &'a Shared,
    live: Rings,
    freed: Rings,
    /// What is to be told to the functions, copied out so that no lock is held meanwhile.
    found: Vec<Found>,
}

impl<'a> Look<'a> {
    fn new(shared: &'a Shared) -> Self {
        Self {
            shared,
            live: Rings::default(),
            freed: Rings::default(),
            found: Vec::new(),
        }
    }

    /// Looks, and hands over what it has found, until that returns false.
    fn run(mut self, spin: Duration, mut hand_over: impl FnMut(Drain<'_, Found>) -> bool) {
        let mut pause = Pause::new(spin);
        let mut freed = Freed::All;
        while !self.shared.stop.load(Ordering::Relaxed) {
            self.look(freed);
            if self.found.is_empty() {
                freed = Freed::after(pause.wait(&Next::At(None)));
                continue;
            }
            pause.worked();
            freed = Freed::One;
            if !hand_over(self.found.drain(..)) {
                return;
            }
        }
    }

    /// Takes what was stored since the last look.
    fn look(&mut self, freed: Freed) {
        let now = self.shared.now();
        let pages = self.shared.pages.look();
        self.live.take(&pages.live, now);
        match freed {
            Freed::One => self.freed.take_next(&pages.freed, now),
            Freed::All => self.freed.take(&pages.freed, now),
        }
        for (owned, list, rings) in [
            (true, &pages.live, &self.live),
            (false, &pages.freed, &self.freed),
        ] {
            if rings.found.is_empty() {
                continue;
            }
            // It may have come at any time between the look before at its page and now.
            let now = self.shared.now();
            for &Rung { at, ring, since } in &rings.found {
                self.found.push(Found {
                    nic: list[at].nic,
                    page: list[at].number,
                    ring,
                    late: Duration::from_nanos(now.saturating_sub(since)) > IN_TIME,
                    owned,
                });
            }
        }
    }
}
