// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bounds on what one input may cost: work in executed basic blocks, which says the same on every machine and under
//! every load, and memory in bytes.

use std::alloc::{GlobalAlloc, Layout, System};
use std::arch::asm;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Most basic blocks between two calls of [`begin`]: one access by the guest, and the work that it causes at once.
pub const WORK: u64 = 60_000_000;
/// Most bytes that the model may hold more than before the input.
pub const HELD: usize = 192 << 20;
/// Largest single allocation.
pub const SINGLE: usize = 80 << 20;

/// Basic blocks that instrumented code has executed.
static mut BLOCKS: u64 = 0;
static mut LIMIT: u64 = u64::MAX;

/// Called by the instrumentation (`-sanitizer-coverage-trace-pc`) at every edge. The pass leaves functions of this
/// prefix alone; what this one calls it does not, hence no call on the usual way.
#[unsafe(no_mangle)]
pub extern "C" fn __sanitizer_cov_trace_pc() {
    // SAFETY: the fuzzer has one thread that runs instrumented code, so nobody else touches the two words.
    unsafe {
        let count: u64;
        let limit: u64;
        asm!(
            "inc qword ptr [rip + {blocks}]",
            "mov {count}, qword ptr [rip + {blocks}]",
            "mov {limit}, qword ptr [rip + {most}]",
            blocks = sym BLOCKS, most = sym LIMIT, count = out(reg) count, limit = out(reg) limit,
            options(nostack)
        );
        if count > limit {
            too_much();
        }
    }
}

#[cold]
#[inline(never)]
fn too_much() {
    end();
    eprintln!("finding: more than {WORK} basic blocks for one access: a walk without a bound");
    std::process::abort();
}

/// A step begins: it may do so much work.
pub fn begin() {
    // SAFETY: as above.
    unsafe { LIMIT = BLOCKS.saturating_add(WORK) };
}

/// What follows is not the model's.
pub fn end() {
    // SAFETY: as above.
    unsafe { LIMIT = u64::MAX };
}

/// Basic blocks executed so far.
pub fn blocks() -> u64 {
    // SAFETY: as above.
    unsafe { BLOCKS }
}

/// The system's allocator, counting.
pub struct Counting;

static HELD_NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static WATCHING: AtomicBool = AtomicBool::new(false);

fn taken(size: usize) {
    let now = HELD_NOW.fetch_add(size, Ordering::Relaxed) + size;
    PEAK.fetch_max(now, Ordering::Relaxed);
    if size > SINGLE && WATCHING.swap(false, Ordering::Relaxed) {
        eprintln!("finding: {size} bytes at once for an input of a few");
        std::process::abort();
    }
}

// SAFETY: every call goes to the system's allocator with the caller's own arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        taken(layout.size());
        // SAFETY: as the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD_NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller's.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        taken(layout.size());
        // SAFETY: as the caller's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        taken(size);
        HELD_NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller's.
        unsafe { System.realloc(at, layout, size) }
    }
}

/// Watches the memory that is held from here on.
pub struct Held {
    before: usize,
}

impl Held {
    /// Starts.
    pub fn watch() -> Self {
        let before = HELD_NOW.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        WATCHING.store(true, Ordering::Relaxed);
        Self { before }
    }

    /// The most that was held at one time since the start.
    pub fn most(&self) -> usize {
        PEAK.load(Ordering::Relaxed).saturating_sub(self.before)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        WATCHING.store(false, Ordering::Relaxed);
    }
}
