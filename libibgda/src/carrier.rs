// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cpu-doorbell route: a thread that carries doorbells from words in host memory to the NIC's registers.
//!
//! A kernel stores a doorbell, which is never 0 (it has the QP's number in it), to its QP's word. The thread takes it
//! out by an exchange with 0 and stores it to the register. So a doorbell that equals the one before is seen, as they
//! do every 65536 requests. Of two that come between two looks the later one is carried, which covers the earlier.
//!
//! Memory order: `docs/memory-order.md`, "Through a CPU".

use crate::{
    error::Result,
    idle::{Idle, Pause},
    worker::{Worker, lock},
};
use std::{
    hint,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

/// Between two looks at the NIC's state when there are no doorbells to carry.
const NOTHING_TO_CARRY: Duration = Duration::from_millis(100);

/// A word and the register that it stands for.
#[derive(Debug)]
struct Line {
    word: *const AtomicU64,
    register: *mut u64,
    carried: Arc<AtomicU64>,
}

// SAFETY: both stay valid as long as the line is listed (`Carrier::add`), and are used with the list locked.
unsafe impl Send for Line {}

/// What of the CPU stands between a record in memory, which the NIC reads, and the register that wakes it.
fn device_barrier() {
    // x86 does not pass a store to uncached memory before the exchange, which is locked.
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier.
    unsafe {
        std::arch::asm!("dmb osh", options(nostack, preserves_flags))
    };
}

impl Line {
    /// Carries the doorbell that is there, if one is.
    fn carry(&self) -> bool {
        // SAFETY: by the contract of `Carrier::add`.
        let word = unsafe { &*self.word };
        // Most looks find nothing, and leave the line of the cache shared.
        if word.load(Ordering::Relaxed) == 0 {
            return false;
        }
        // What the kernel made known before its doorbell is known here after this.
        let value = word.swap(0, Ordering::AcqRel);
        // Before the NIC can answer, so that no completion is seen whose doorbell has not been counted.
        self.carried.fetch_add(1, Ordering::Relaxed);
        device_barrier();
        // SAFETY: as above; a register is written whole.
        unsafe { self.register.write_volatile(value) };
        true
    }
}

#[derive(Debug, Default)]
struct Shared {
    lines: Mutex<Vec<Line>>,
    /// Threads that want to change the list. The carrying thread lets them: it takes the lock so often that they might
    /// not get it otherwise.
    changing: AtomicUsize,
    stop: AtomicBool,
}

impl Shared {
    fn change<R>(&self, change: impl FnOnce(&mut Vec<Line>) -> R) -> R {
        self.changing.fetch_add(1, Ordering::Relaxed);
        let mut lines = lock(&self.lines);
        self.changing.fetch_sub(1, Ordering::Relaxed);
        change(&mut lines)
    }

    /// A look at each word: were there lines, and was there a doorbell?
    fn look(&self) -> (bool, bool) {
        let lines = lock(&self.lines);
        let found = lines.iter().fold(false, |found, line| line.carry() | found);
        (!lines.is_empty(), found)
    }

    fn run(&self, lost: impl Fn() -> bool) {
        let mut idle = Idle::default();
        while !self.stop.load(Ordering::Acquire) && !lost() {
            if self.changing.load(Ordering::Relaxed) > 0 {
                thread::yield_now();
                continue;
            }
            match self.look() {
                (_, true) => idle = Idle::default(),
                (true, false) => match idle.next() {
                    Pause::Spin => hint::spin_loop(),
                    Pause::Yield => thread::yield_now(),
                    Pause::Sleep(pause) => thread::park_timeout(pause),
                },
                (false, false) => {
                    idle = Idle::default();
                    thread::park_timeout(NOTHING_TO_CARRY);
                }
            }
        }
    }
}

/// The thread of a context that carries doorbells. It ends when the NIC is lost, or with the last that needs it.
#[derive(Debug)]
pub(crate) struct Carrier {
    shared: Arc<Shared>,
    worker: Option<Worker>,
}

impl Carrier {
    /// Starts the thread. When `lost` says so it stops for good, without another look.
    pub(crate) fn start(lost: impl Fn() -> bool + Send + 'static) -> Result<Arc<Self>> {
        let shared = Arc::new(Shared::default());
        let worker = Worker::start("ibgda-doorbell", {
            let shared = Arc::clone(&shared);
            move || shared.run(lost)
        })?;
        Ok(Arc::new(Self {
            shared,
            worker: Some(worker),
        }))
    }

    /// Carries what is stored to `word` to `register` from now on, until the result is dropped.
    ///
    /// # Safety
    /// Both are aligned and valid, and the word is 0 or a doorbell, until the result is dropped.
    pub(crate) unsafe fn add(self: &Arc<Self>, word: *mut u64, register: *mut u64) -> Carried {
        let carried = Arc::new(AtomicU64::new(0));
        self.shared.change(|lines| {
            lines.push(Line {
                word: word.cast::<AtomicU64>().cast_const(),
                register,
                carried: Arc::clone(&carried),
            });
        });
        self.wake();
        Carried {
            carrier: Arc::clone(self),
            carried,
        }
    }

    fn wake(&self) {
        if let Some(worker) = &self.worker {
            worker.unpark();
        }
    }
}

impl Drop for Carrier {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.wake();
        if let Some(worker) = self.worker.take() {
            worker.join();
        }
    }
}

/// A word whose doorbells are carried. When it is dropped, what is in the word has been, and the register is not
/// written again.
#[derive(Debug)]
pub(crate) struct Carried {
    carrier: Arc<Carrier>,
    carried: Arc<AtomicU64>,
}

impl Carried {
    /// Doorbells carried so far.
    pub(crate) fn count(&self) -> u64 {
        self.carried.load(Ordering::Relaxed)
    }
}

impl Drop for Carried {
    fn drop(&mut self) {
        // In a forked child the list may be locked for ever by a thread that is not there, and there is nothing to
        // carry to.
        if !self.carrier.worker.as_ref().is_some_and(Worker::is_here) {
            return;
        }
        self.carrier.shared.change(|lines| {
            let ours = |line: &Line| Arc::ptr_eq(&line.carried, &self.carried);
            if let Some(at) = lines.iter().position(ours) {
                lines.swap_remove(at).carry();
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn wait_until(what: &str, condition: impl Fn() -> bool) {
        let end = Instant::now() + PATIENCE;
        while !condition() {
            assert!(Instant::now() < end, "waited in vain until {what}");
            thread::yield_now();
        }
    }

    /// A word and a register in memory.
    #[derive(Default)]
    struct Pair {
        word: AtomicU64,
        register: AtomicU64,
    }

    impl Pair {
        fn add(&self, carrier: &Arc<Carrier>) -> Carried {
            // SAFETY: the tests drop the result before the pair.
            unsafe { carrier.add(self.word.as_ptr(), self.register.as_ptr()) }
        }
    }

    /// Stores bursts of doorbells, and waits for the last of each to arrive.
    fn post(pair: &Pair, rounds: u64) {
        for round in 0..rounds {
            pair.register.store(0, Ordering::Relaxed);
            // In every other round the doorbell equals the one before.
            if round % 2 == 0 {
                pair.word.store(1, Ordering::Release);
                // The next comes before, while, or after the carrier takes this one.
                for step in 0..round / 2 % 128 {
                    hint::black_box(step);
                }
            }
            pair.word.store(0x4a, Ordering::Release);
            let arrived = || pair.register.load(Ordering::Acquire) == 0x4a;
            if !(0..2_000).any(|_| arrived()) {
                wait_until("the last doorbell arrives", arrived);
            }
        }
    }

    #[test]
    fn the_last_doorbell_of_every_burst_arrives() {
        let carrier = Carrier::start(|| false).expect("a thread");
        let pair = Pair::default();
        let carried = pair.add(&carrier);
        // Alone, so that poster and carrier meet at the word.
        post(&pair, 100_000);
        assert!(carried.count() >= 99_999, "{}", carried.count());
        let others: [Pair; 3] = Default::default();
        thread::scope(|scope| {
            for other in &others {
                let carried = other.add(&carrier);
                scope.spawn(move || {
                    for _ in 0..10 {
                        // The carrier may sleep.
                        thread::sleep(Duration::from_millis(3));
                        post(other, 500);
                    }
                    drop(carried);
                });
            }
        });
        drop(carried);
    }

    #[test]
    fn what_is_in_the_word_is_carried_before_it_is_let_go_and_nothing_after() {
        let carrier = Carrier::start(|| false).expect("a thread");
        let pair = Pair::default();
        for round in 1..=2_000 {
            let carried = pair.add(&carrier);
            pair.word.store(round, Ordering::Release);
            drop(carried);
            assert_eq!(pair.register.load(Ordering::Acquire), round);
            pair.register.store(0, Ordering::Relaxed);
            pair.word.store(u64::MAX, Ordering::Release);
            thread::yield_now();
            assert_eq!(pair.register.load(Ordering::Acquire), 0, "rang for nobody");
            pair.word.store(0, Ordering::Release);
        }
    }

    /// A forked child has no carrying thread, and often a list that this thread had locked.
    #[test]
    fn a_forked_child_lets_go_without_the_thread() {
        let carrier = Carrier::start(|| false).expect("a thread");
        // So many that a look at them takes time.
        let pairs: Vec<Pair> = (0..2_000).map(|_| Pair::default()).collect();
        let carried: Vec<Carried> = pairs.iter().map(|pair| pair.add(&carrier)).collect();
        let mut held = Some((carried, carrier));
        for round in 0..20 {
            // The thread has woken, and looks again and again.
            pairs[0].word.store(1, Ordering::Release);
            wait_until("it is carried", || {
                pairs[0].word.load(Ordering::Acquire) == 0
            });
            // SAFETY: the child only frees memory, which libc keeps possible after a fork, and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                drop(held.take());
                // SAFETY: nothing of the parent's is to be run at exit.
                unsafe { libc::_exit(0) };
            }
            assert!(child > 0, "fork");
            let end = Instant::now() + PATIENCE;
            let mut status = -1;
            // SAFETY: our child, which is waited for until it has ended.
            while unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == 0 {
                if Instant::now() > end {
                    // SAFETY: as above.
                    unsafe { libc::kill(child, libc::SIGKILL) };
                }
                thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(status, 0, "child {round} has not let go");
        }
        drop(held);
    }

    /// Lines come and go, in any order, while others are busy; the carrier itself is let go first.
    #[test]
    fn lines_come_and_go_while_others_are_carried() {
        let carrier = Carrier::start(|| false).expect("a thread");
        let steady = Pair::default();
        let kept = steady.add(&carrier);
        let pairs: Vec<Pair> = (0..8).map(|_| Pair::default()).collect();
        let mut lines: Vec<Option<Carried>> =
            pairs.iter().map(|pair| Some(pair.add(&carrier))).collect();
        drop(carrier);
        for round in 0..500_usize {
            let at = round * 5 % pairs.len();
            match lines[at].take() {
                Some(line) => drop(line),
                None => lines[at] = Some(pairs[at].add(&kept.carrier)),
            }
            steady.word.store(1, Ordering::Release);
            wait_until("the steady one is carried", || {
                kept.count() == round as u64 + 1
            });
        }
        drop(kept);
        let stop = lines
            .iter()
            .flatten()
            .next()
            .map(|line| Arc::downgrade(&line.carrier.shared));
        drop(lines);
        let stop = stop.expect("a line was left");
        assert!(
            stop.upgrade().is_none(),
            "the thread has ended with the last line"
        );
    }

    #[test]
    fn a_lost_nic_ends_the_thread() {
        let lost = Arc::new(AtomicBool::new(false));
        let carrier = Carrier::start({
            let lost = Arc::clone(&lost);
            move || lost.load(Ordering::Acquire)
        })
        .expect("a thread");
        let pair = Pair::default();
        let carried = pair.add(&carrier);
        lost.store(true, Ordering::Release);
        wait_until("the thread has ended", || Arc::strong_count(&lost) == 1);
        pair.word.store(7, Ordering::Release);
        thread::sleep(Duration::from_millis(5));
        assert_eq!(pair.register.load(Ordering::Acquire), 0);
        drop((carried, carrier));
    }
}
