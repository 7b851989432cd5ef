// SPDX-License-Identifier: MIT OR Apache-2.0
//! KCOV (Documentation/dev-tools/kcov.rst): which places of instrumented kernel code a thread's system calls reached. Of
//! the debug kernel only ibgda.ko is instrumented.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

/// `_IOR('c', 1, unsigned long)` and `_IO('c', 100)` of `<linux/kcov.h>`.
const INIT_TRACE: libc::c_ulong = 0x8008_6301;
const ENABLE: libc::c_ulong = 0x6364;
const TRACE_PC: libc::c_ulong = 0;
/// Words of the buffer, the first of which counts the others.
const WORDS: usize = 64 << 10;

/// One buffer, which a process and its children share; one thread at a time writes to it.
#[derive(Debug)]
pub struct Coverage {
    kcov: File,
    words: *mut AtomicU64,
}

impl Coverage {
    /// `None` where the kernel has no KCOV.
    pub fn open() -> Option<Self> {
        let path = "/sys/kernel/debug/kcov";
        let kcov = OpenOptions::new().read(true).write(true).open(path).ok()?;
        // SAFETY: a new mapping of the file, as long as was asked for.
        let words = unsafe {
            let status = libc::ioctl(kcov.as_raw_fd(), INIT_TRACE, WORDS as libc::c_ulong);
            assert_eq!(status, 0, "KCOV_INIT_TRACE");
            libc::mmap(
                ptr::null_mut(),
                WORDS * 8,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                kcov.as_raw_fd(),
                0,
            )
        };
        assert_ne!(words, libc::MAP_FAILED, "map KCOV's buffer");
        Some(Self {
            kcov,
            words: words.cast(),
        })
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < WORDS);
        // SAFETY: inside the mapping.
        unsafe { &*self.words.add(index) }
    }

    /// Traces this thread until it ends.
    pub fn enable(&self) {
        self.word(0).store(0, Ordering::Relaxed);
        // SAFETY: takes a number.
        let status = unsafe { libc::ioctl(self.kcov.as_raw_fd(), ENABLE, TRACE_PC) };
        assert_eq!(status, 0, "KCOV_ENABLE");
    }

    /// What the thread traced last has reached.
    pub fn places(&self) -> impl Iterator<Item = u64> + '_ {
        let count = self.word(0).load(Ordering::Relaxed) as usize;
        (1..=count.min(WORDS - 1)).map(|index| self.word(index).load(Ordering::Relaxed))
    }
}

impl Drop for Coverage {
    fn drop(&mut self) {
        // SAFETY: mapped by `open`.
        unsafe { libc::munmap(self.words.cast(), WORDS * 8) };
    }
}
