// SPDX-License-Identifier: MIT OR Apache-2.0
//! Doorbells that nothing traps: UAR pages that are memory, and a thread that looks at them.
//!
//! [`inproc`](crate::inproc) has no others. [`vfio`](crate::vfio) traps every store unless it is told to map the pages of
//! users into the guest ([`mapped`]), so that a process outside the VM, a GPU for one, can store there too.

pub mod mapped;
mod page;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::wire::fabric::Next;

pub(crate) use page::{Page, Ring};

/// Pages that a thread looks at all the time, and others change. The lock is not fair: without a word from who waits, the
/// one who looks would take it again and again.
#[derive(Default)]
pub(crate) struct Watched<T> {
    pages: Mutex<T>,
    waiting: AtomicU32,
}

impl<T> Watched<T> {
    /// For who looks: after those that wait to change something.
    pub(crate) fn look(&self) -> MutexGuard<'_, T> {
        while self.waiting.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        self.lock()
    }

    /// For who changes something.
    pub(crate) fn change(&self) -> MutexGuard<'_, T> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let pages = self.lock();
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        pages
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A doorbell that was found.
#[derive(Clone, Copy)]
pub(crate) struct Rung {
    /// Which page.
    pub(crate) at: usize,
    pub(crate) ring: Ring,
    /// When the page was last looked at before.
    pub(crate) since: u64,
}

/// Doorbells that were found, and where the next are looked for.
#[derive(Default)]
pub(crate) struct Rings {
    pub(crate) found: Vec<Rung>,
    /// The page that is looked at next.
    next: usize,
    /// The page that rang last: it is the most likely to ring again.
    last: usize,
}

impl Rings {
    /// Pages looked at between two looks at the one that rang last.
    const STEP: usize = 8;

    /// Looks at pages until something is found, at each once; it is `now`. However often one rings, the others have their
    /// turns.
    pub(crate) fn take(&mut self, pages: &[Page], now: u64) {
        self.found.clear();
        for done in 1..=pages.len() {
            self.next = (self.next + 1) % pages.len();
            self.look_at(pages, self.next, now);
            if done % Self::STEP == 0 {
                self.look_at(pages, self.last, now);
                if !self.found.is_empty() {
                    return;
                }
            }
        }
    }

    /// Looks at the next page alone.
    pub(crate) fn take_next(&mut self, pages: &[Page], now: u64) {
        self.found.clear();
        if !pages.is_empty() {
            self.next = (self.next + 1) % pages.len();
            self.look_at(pages, self.next, now);
        }
    }

    fn look_at(&mut self, pages: &[Page], at: usize, now: u64) {
        let found = &mut self.found;
        if let Some(page) = pages.get(at) {
            let since = page.looked.replace(now);
            if page.take(|ring| found.push(Rung { at, ring, since })) {
                self.last = at;
            }
        }
    }
}

/// How the thread waits.
pub(crate) struct Pause {
    spin: Duration,
    /// When it last had work.
    busy: Instant,
    rounds: u32,
}

impl Pause {
    /// Looks between two looks at the clock.
    const ROUNDS: u32 = 64;
    /// Who has had nothing to do for so long sleeps longer.
    const LONG: Duration = Duration::from_secs(1);

    pub(crate) fn new(spin: Duration) -> Self {
        Self {
            spin,
            busy: Instant::now(),
            rounds: 0,
        }
    }

    pub(crate) fn worked(&mut self) {
        self.rounds = 0;
    }

    /// Whether that was a sleep.
    pub(crate) fn wait(&mut self, next: &Next) -> bool {
        self.rounds += 1;
        if self.rounds == 1 {
            self.busy = Instant::now();
        }
        if self.rounds % Self::ROUNDS != 0 {
            std::hint::spin_loop();
            return false;
        }
        let idle = self.busy.elapsed();
        if idle < self.spin {
            // With fewer processors than threads the one that would ring must run.
            std::thread::yield_now();
            return false;
        }
        let longest = match idle < Self::LONG {
            true => Duration::from_millis(1),
            false => Duration::from_millis(5),
        };
        let mut sleep = ((idle - self.spin) / 8).clamp(Duration::from_micros(20), longest);
        if let Next::At(Some(deadline)) = next {
            sleep = sleep.min(deadline.saturating_duration_since(Instant::now()));
        }
        std::thread::park_timeout(sleep);
        // Each later look is followed by a sleep of its own.
        self.rounds = Self::ROUNDS - 1;
        true
    }
}
