// SPDX-License-Identifier: MIT OR Apache-2.0
//! A child process that does not outlive its owner.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A running child. Dropping it kills it.
pub struct Guarded(Child);

impl Guarded {
    /// Starts the command.
    pub fn spawn(command: &mut Command) -> Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        Ok(Self(
            command
                .spawn()
                .with_context(|| format!("starting {name}"))?,
        ))
    }

    /// The child, for its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.0
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.0.try_wait().context("waiting for a child process")
    }

    /// Waits for its end for so long.
    pub fn wait(&mut self, patience: Duration) -> Result<Option<ExitStatus>> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(status) = self.ended()? {
                return Ok(Some(status));
            }
            if Instant::now() > deadline {
                return Ok(None);
            }
            sleep(Duration::from_millis(5));
        }
    }

    /// Asks it to end, and kills it if it has not for so long. Returns how it ended if it did as asked.
    pub fn terminate(&mut self, patience: Duration) -> Result<Option<ExitStatus>> {
        if self.ended()?.is_none() {
            // It is not reaped yet, so the pid is still its own.
            let _ = kill(Pid::from_raw(self.0.id() as i32), Signal::SIGTERM);
        }
        let status = self.wait(patience)?;
        if status.is_none() {
            self.kill();
        }
        Ok(status)
    }

    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.kill();
    }
}

/// How a process ended, in words.
pub fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => format!("{status}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    #[test]
    fn a_child_that_obeys_is_not_killed() {
        let mut child = Guarded::spawn(
            Command::new("sh")
                .args([
                    "-c",
                    "trap 'exit 3' TERM; echo ready; while :; do sleep 0.01; done",
                ])
                .stdout(std::process::Stdio::piped()),
        )
        .unwrap();
        let mut line = [0; 6];
        std::io::Read::read_exact(child.child().stdout.as_mut().unwrap(), &mut line).unwrap();
        assert_eq!(
            child
                .terminate(SOON)
                .unwrap()
                .and_then(|status| status.code()),
            Some(3)
        );
    }

    #[test]
    fn a_child_that_does_not_obey_is_killed() {
        let mut child = Guarded::spawn(
            Command::new("sh")
                .args([
                    "-c",
                    "trap '' TERM; echo ready; while :; do sleep 0.01; done",
                ])
                .stdout(std::process::Stdio::piped()),
        )
        .unwrap();
        let mut line = [0; 6];
        std::io::Read::read_exact(child.child().stdout.as_mut().unwrap(), &mut line).unwrap();
        assert_eq!(child.terminate(Duration::from_millis(100)).unwrap(), None);
        assert!(child.ended().unwrap().is_some());
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let error = Guarded::spawn(&mut Command::new("/no/such/program"))
            .err()
            .unwrap();
        assert!(format!("{error:#}").contains("/no/such/program"));
    }
}
