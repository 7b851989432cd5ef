// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads of the library's own: how they start and end.

use crate::error::{Error, Result, Source};
use nix::sys::signal::{SigSet, SigmaskHow};
use std::{
    mem, process,
    sync::{Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
};

/// Locks; what a panicking thread left is whole, since no lock of the library is held across code that may panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The process that made something: a forked child has a copy of the value, and nothing of what it stands for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Home(u32);

impl Default for Home {
    fn default() -> Self {
        Self::here()
    }
}

impl Home {
    /// This process.
    pub(crate) fn here() -> Self {
        Self(process::id())
    }

    /// Whether this is that process.
    pub(crate) fn is_here(self) -> bool {
        self.0 == process::id()
    }

    /// `EPERM` in a forked child; `what` is what was to be done.
    pub(crate) fn check(self, what: impl FnOnce() -> String) -> Result<()> {
        if self.is_here() {
            return Ok(());
        }
        Err(of_the_parent(what()))
    }
}

/// What a forked child is told that uses something of its parent's.
pub(crate) fn of_the_parent(what: impl Into<String>) -> Error {
    Error::new(
        Source::Argument,
        libc::EPERM,
        what,
        "it is of another process, whose child this is",
        "open a context of your own after fork",
    )
}

/// A thread of the library's.
#[derive(Debug)]
pub(crate) struct Worker {
    thread: JoinHandle<()>,
    /// Where it runs.
    home: Home,
}

impl Worker {
    /// Starts a thread; `name` has at most 15 bytes (`prctl(PR_SET_NAME)`). No signal is delivered to it: an
    /// application's handlers run on the application's threads.
    pub(crate) fn start(name: &str, body: impl FnOnce() + Send + 'static) -> Result<Self> {
        let failed = |errno: i32| {
            Error::errno_with(
                Source::Argument,
                format!("start the library's thread {name}"),
                errno,
                "",
                "are there too many threads? see ulimit -u, and pids.max of the cgroup",
            )
        };
        // A new thread begins with the mask of the one that starts it.
        let mask = SigSet::all()
            .thread_swap_mask(SigmaskHow::SIG_SETMASK)
            .map_err(|errno| failed(errno as i32))?;
        let started = thread::Builder::new().name(name.to_owned()).spawn(body);
        mask.thread_set_mask()
            .map_err(|errno| failed(errno as i32))?;
        let thread =
            started.map_err(|error| failed(error.raw_os_error().unwrap_or(libc::EAGAIN)))?;
        Ok(Self {
            thread,
            home: Home::here(),
        })
    }

    /// Whether this is the process in which it runs.
    pub(crate) fn is_here(&self) -> bool {
        self.home.is_here()
    }

    /// Ends a `park` of the thread, the present or the next one.
    pub(crate) fn unpark(&self) {
        self.thread.thread().unpark();
    }

    /// Waits until the thread, which was told to, has ended; on that very thread, and in a forked child, only lets it
    /// go.
    pub(crate) fn join(self) {
        if !self.is_here() {
            mem::forget(self.thread);
        } else if self.thread.thread().id() != thread::current().id() {
            // It has ended either way; its panic has been printed.
            let _ = self.thread.join();
        }
    }
}
