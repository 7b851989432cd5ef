// SPDX-License-Identifier: MIT OR Apache-2.0
//! UAR pages of users that a guest, and whoever has the file behind the BAR, stores to without a trap.
//!
//! The driver's own pages stay trapped: its event queues share a page, and of two arms that come between two looks only
//! the last would be seen. Of queues the truth is in their doorbell records, which are never lost: after a doorbell on a
//! page of several queues the records of all of them are read ([`doorbell::found`]). A page that was freed is still
//! looked at now and then, so that a store by somebody who has lost it is counted, as a trapped one is.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{Page, Pause, Ring, Rings};
use crate::engine::doorbell;
use crate::hca_config::BAR0_SIZE;
use crate::ifc::wqe::uar;
use crate::mem::SharedMemory;
use crate::objects::device::FIRST_UAR;
use crate::wire::Fabric;
use crate::wire::fabric::Next;

/// UAR pages that are mapped: behind those that the driver has for itself. Who finds all of them taken gets a trapped one.
pub const PAGES: Range<u32> = FIRST_UAR + 0x100..FIRST_UAR + 0x900;

/// How long after a look at a page a doorbell there may be found without counting as late.
pub const IN_TIME: Duration = Duration::from_micros(5);

/// Looks between two at freed pages, while there is no pause.
const LOOKS_PER_FREED: u32 = 4096;

/// Pages that are looked at.
#[derive(Default)]
struct Pages {
    live: Vec<Page>,
    freed: Vec<Page>,
}

struct Shared {
    fabric: Arc<Fabric>,
    pages: Mutex<Pages>,
    stop: AtomicBool,
}

impl Shared {
    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
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
        let mut pages = self.shared.pages();
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
        pages.live.push(page);
        left
    }

    /// Pages that have no owner any more: one, or all.
    pub(crate) fn freed(&self, number: Option<u32>) {
        let mut pages = self.shared.pages();
        let pages = &mut *pages;
        let gone =
            |page: &Page| page.nic == self.nic && number.is_none_or(|number| page.number == number);
        let (gone, live) = std::mem::take(&mut pages.live).into_iter().partition(gone);
        pages.live = live;
        pages.freed.extend::<Vec<Page>>(gone);
    }
}

/// The thread that looks. Dropping it ends the thread.
pub struct Poller {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Poller {
    /// Starts to look at the pages of a fabric's functions. How long it goes on without a pause after there was something
    /// is `spin`; see [`inproc::Options::spin`](crate::inproc::Options::spin).
    pub fn new(fabric: &Arc<Fabric>, spin: Duration) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            fabric: fabric.clone(),
            pages: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        let thread = {
            let shared = shared.clone();
            std::thread::Builder::new()
                .name("doorbells".into())
                .spawn(move || Look::new(&shared).run(spin))?
        };
        Ok(Self {
            shared,
            thread: Some(thread),
        })
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
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("the thread that looks at doorbells has panicked");
            }
        }
    }
}

/// What the thread remembers.
struct Look<'a> {
    shared: &'a Shared,
    live: Rings,
    freed: Rings,
    /// What is to be told to the functions, copied out so that no lock is held meanwhile.
    found: Vec<(usize, u32, Ring)>,
    /// When the last look began.
    last: Instant,
}

impl<'a> Look<'a> {
    fn new(shared: &'a Shared) -> Self {
        Self {
            shared,
            live: Rings::default(),
            freed: Rings::default(),
            found: Vec::new(),
            last: Instant::now(),
        }
    }

    fn run(mut self, spin: Duration) {
        let mut pause = Pause::new(spin);
        let mut looks = 0u32;
        while !self.shared.stop.load(Ordering::Relaxed) {
            looks = looks.wrapping_add(1);
            let freed_too = looks % LOOKS_PER_FREED == 0;
            if self.look(freed_too) {
                pause.worked();
            } else {
                pause.wait(&Next::At(None));
            }
        }
    }

    /// Whether there was anything.
    fn look(&mut self, freed_too: bool) -> bool {
        let begun = Instant::now();
        {
            let pages = self.shared.pages();
            let place = |list: &[Page], rings: &Rings, to: &mut Vec<(usize, u32, Ring)>| {
                let place = |(at, ring): &(usize, Ring)| {
                    let page = list.get(*at)?;
                    Some((page.nic, page.number, *ring))
                };
                to.extend(rings.found.iter().filter_map(place));
            };
            self.live.take(&pages.live);
            place(&pages.live, &self.live, &mut self.found);
            if freed_too || begun - self.last > IN_TIME {
                self.freed.take(&pages.freed);
                place(&pages.freed, &self.freed, &mut self.found);
            }
        }
        let late = begun - self.last > IN_TIME;
        self.last = begun;
        if self.found.is_empty() {
            return false;
        }
        for (nic, page, ring) in self.found.drain(..) {
            self.shared.fabric.drive(nic, |device| {
                device.counters.found_doorbells += 1;
                device.counters.late_doorbells += u64::from(late);
                doorbell::found(device, page, ring.offset, &ring.value);
            });
        }
        true
    }
}
