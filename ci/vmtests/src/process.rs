// SPDX-License-Identifier: MIT OR Apache-2.0
//! Child processes that run a closure, and step with their parent.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    panic::{AssertUnwindSafe, catch_unwind, set_hook},
};

use crate::machine::patience;

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Exit(i32),
    Signal(i32),
}

/// A child process and a line to it.
#[derive(Debug)]
pub struct Child {
    pub pid: i32,
    line: Line,
    waited: bool,
}

/// One end of a line between parent and child.
#[derive(Debug)]
pub struct Line(UnixStream);

impl Line {
    /// Tells the other side to go on.
    pub fn go(&mut self) {
        self.0.write_all(b".").expect("the other process is there");
    }

    /// A line that leads nowhere.
    pub fn dead() -> Self {
        Self(UnixStream::pair().expect("a socket pair").0)
    }

    /// Waits for the other side.
    pub fn wait(&mut self) {
        self.0
            .read_exact(&mut [0])
            .expect("the other process got so far");
    }
}

/// Forks; the child runs `body` and exits with its result, 101 when it panics. Descriptors are inherited, mappings of the
/// broker are not.
pub fn fork(body: impl FnOnce(&mut Line) -> i32) -> Child {
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    for end in [&ours, &theirs] {
        end.set_read_timeout(Some(2 * patience()))
            .expect("a socket has a timeout");
    }
    // SAFETY: the child only runs `body`, whose code takes no lock that another thread of the test harness could hold.
    match unsafe { libc::fork() } {
        -1 => panic!("fork: {}", std::io::Error::last_os_error()),
        0 => {
            drop(ours);
            // Past the harness, which would keep it to itself.
            set_hook(Box::new(|info| {
                let text = format!("in a child process: {info}\n");
                // SAFETY: the text is as long as it says.
                unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
            }));
            let mut line = Line(theirs);
            let code = catch_unwind(AssertUnwindSafe(|| body(&mut line))).unwrap_or(101);
            // SAFETY: nothing of the parent's is to be run at exit.
            unsafe { libc::_exit(code) }
        }
        pid => Child {
            pid,
            line: Line(ours),
            waited: false,
        },
    }
}

impl Child {
    /// Lets the child go on.
    pub fn go(&mut self) {
        self.line.go();
    }

    /// Waits for the child's signal.
    pub fn wait(&mut self) {
        self.line.wait();
    }

    /// Kills the child, without waiting.
    pub fn kill(&self) {
        // SAFETY: our child, not waited for yet.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
    }

    /// Whether it has ended; its status is still to be waited for.
    pub fn has_ended(&self) -> bool {
        // SAFETY: our child, not waited for yet; the information is ours to write.
        unsafe {
            let mut information: libc::siginfo_t = std::mem::zeroed();
            let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            let status = libc::waitid(libc::P_PID, self.pid as u32, &mut information, flags);
            assert_eq!(status, 0, "waitid: {}", std::io::Error::last_os_error());
            information.si_pid() != 0
        }
    }

    /// Waits until the child has ended.
    pub fn end(mut self) -> End {
        self.reap()
    }

    fn reap(&mut self) -> End {
        let mut status = 0;
        // SAFETY: our child, waited for once.
        let pid = unsafe { libc::waitpid(self.pid, &mut status, 0) };
        assert_eq!(
            pid,
            self.pid,
            "waitpid: {}",
            std::io::Error::last_os_error()
        );
        self.waited = true;
        if libc::WIFSIGNALED(status) {
            End::Signal(libc::WTERMSIG(status))
        } else {
            End::Exit(libc::WEXITSTATUS(status))
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !self.waited {
            self.kill();
            self.reap();
        }
    }
}

/// Runs `body` in a child; how it ended.
pub fn in_child(body: impl FnOnce() -> i32) -> End {
    fork(|_| body()).end()
}
