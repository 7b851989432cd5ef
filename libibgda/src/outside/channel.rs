// SPDX-License-Identifier: MIT OR Apache-2.0
//! The port that leads to the agent.

use super::protocol::{Answer, Envelope, MOST_LINE, Request};
use crate::error::{Error, Result, Source};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::{
    fs::File,
    io::{ErrorKind, Read, Write},
    os::{fd::AsFd, unix::fs::OpenOptionsExt},
    path::Path,
    process, thread,
    time::{Duration, Instant},
};

/// Between two looks at a port that nobody is at.
const LOOK: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct Channel {
    port: File,
    /// Of the last request.
    number: u64,
    /// What has come and is not read yet.
    came: Vec<u8>,
}

fn failed(what: &str, errno: i32, why: impl Into<String>) -> Error {
    Error::new(
        Source::Agent,
        errno,
        format!("{what} (agent of a GPU outside)"),
        why,
        "is an ibgda-gpu-agent running for this VM? see docs/hil.md",
    )
}

impl Channel {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let port = File::options()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(path);
        let port = port.map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT) | None => failed(
                &format!("open {}", path.display()),
                libc::ENODEV,
                "this machine has no such port",
            ),
            Some(errno) => failed(
                &format!("open {}", path.display()),
                errno,
                error.to_string(),
            ),
        })?;
        Ok(Self {
            port,
            // Another than those of the client before, whose answers may still come.
            number: u64::from(process::id()) << 32,
            came: Vec::new(),
        })
    }

    /// Asks, and hears the answer.
    pub(super) fn ask(&mut self, message: Request, patience: Duration) -> Result<Answer> {
        let end = Instant::now() + patience;
        self.number += 1;
        let number = self.number;
        let what = format!("{message:.60?}");
        let envelope = Envelope { number, message };
        let text = serde_json::to_string(&envelope).expect("it has a form in JSON");
        // The newline before ends whatever an earlier client left unfinished.
        self.send(format!("\n{text}\n").as_bytes(), &what, end)?;
        loop {
            let line = self.line(&what, end)?;
            match serde_json::from_slice::<Envelope<Answer>>(&line) {
                Ok(answer) if answer.number == number => {
                    return match answer.message {
                        Answer::Failed { errno, why } => Err(failed(&what, errno, why)),
                        answer => Ok(answer),
                    };
                }
                // Another client's.
                _ => {}
            }
        }
    }

    fn send(&mut self, mut rest: &[u8], what: &str, end: Instant) -> Result<()> {
        while !rest.is_empty() {
            match self.port.write(rest) {
                Ok(0) => {}
                Ok(sent) => {
                    rest = &rest[sent..];
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    let errno = error.raw_os_error().unwrap_or(libc::EIO);
                    return Err(failed(what, errno, error.to_string()));
                }
            }
            self.pause(PollFlags::POLLOUT, what, end)?;
        }
        Ok(())
    }

    fn line(&mut self, what: &str, end: Instant) -> Result<Vec<u8>> {
        let mut looked = 0;
        loop {
            if let Some(at) = self.came[looked..].iter().position(|&byte| byte == b'\n') {
                let rest = self.came.split_off(looked + at + 1);
                return Ok(std::mem::replace(&mut self.came, rest));
            }
            looked = self.came.len();
            if looked > MOST_LINE {
                self.came.clear();
                return Err(failed(what, libc::EPROTO, "its answer has no end"));
            }
            let mut buffer = [0; 4096];
            match self.port.read(&mut buffer) {
                // Nobody is there, or not yet.
                Ok(0) => thread::sleep(LOOK),
                Ok(read) => {
                    self.came.extend_from_slice(&buffer[..read]);
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    let errno = error.raw_os_error().unwrap_or(libc::EIO);
                    return Err(failed(what, errno, error.to_string()));
                }
            }
            self.pause(PollFlags::POLLIN, what, end)?;
        }
    }

    /// Waits until the port is ready, or for a while if nobody is there.
    fn pause(&self, flags: PollFlags, what: &str, end: Instant) -> Result<()> {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(failed(what, libc::ETIMEDOUT, "no answer in time"));
        }
        let mut ports = [PollFd::new(self.port.as_fd(), flags)];
        let timeout = left
            .min(Duration::from_secs(1))
            .max(Duration::from_millis(1));
        let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
        let _ = poll(&mut ports, timeout);
        if ports[0]
            .revents()
            .is_some_and(|r| r.contains(PollFlags::POLLHUP))
        {
            thread::sleep(LOOK);
        }
        Ok(())
    }
}
