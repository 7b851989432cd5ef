// SPDX-License-Identifier: MIT OR Apache-2.0
//! One guest: QEMU, its ports, and how far it has come.

use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::child::{Guarded, describe};
use super::session::Event;
use super::streams::Streams;
use super::vm::Vm;
use super::{Outcome, log_file, qemu};
use crate::protocol::{Report, Request, Start};

/// From QEMU's start to the agent's first report; 5 s on an idle machine without KVM, but two may boot on a busy one.
const BOOT: Duration = Duration::from_secs(600);
/// From there to the guest's being ready; longer than the guest's own patience with its NICs.
const SET_UP: Duration = Duration::from_secs(150);
/// From the command's end to its last byte of output.
const DRAIN: Duration = Duration::from_secs(30);
/// For QEMU to end when asked.
const END: Duration = Duration::from_secs(10);

/// What the guest is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The agent has not reported yet.
    Boot,
    /// NICs come up.
    SetUp,
    /// Ready for the command.
    Ready,
    /// The command runs.
    Command {
        /// A process listens on a TCP port.
        listening: bool,
    },
    /// The command has ended, not all of its output is here.
    Drain {
        /// Exit status.
        status: u8,
        /// Length of each stream.
        bytes: [u64; 3],
    },
    /// All is here.
    Done {
        /// Exit status.
        status: u8,
    },
}

/// A running guest. Dropping it ends it.
pub struct Guest<'a> {
    vm: &'a Vm<'a>,
    streams: Streams,
    qemu: Guarded,
    phase: Phase,
    began: Instant,
}

impl<'a> Guest<'a> {
    /// Starts QEMU. Events come with the guest's number.
    pub fn start(vm: &'a Vm<'a>, index: usize, events: &Sender<(usize, Event)>) -> Result<Self> {
        for dir in [&vm.log, &vm.run_dir] {
            fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
        }
        let streams = Streams::listen(vm, index, events)?;
        let log = log_file(&vm.log, "qemu.log")?;
        let qemu = Guarded::spawn(
            Command::new("qemu-system-x86_64")
                .args(qemu::arguments(vm))
                .stdin(Stdio::null())
                .stdout(log.try_clone().context("sharing QEMU's log")?)
                .stderr(log),
        )?;
        Ok(Self {
            vm,
            streams,
            qemu,
            phase: Phase::Boot,
            began: Instant::now(),
        })
    }

    /// What it is at, and for how long.
    pub fn phase(&self) -> (Phase, Duration) {
        (self.phase, self.began.elapsed())
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.began = Instant::now();
    }

    /// Runs the command in the guest, which is ready.
    pub fn run_command(&mut self) -> Result<()> {
        self.streams.request(&Request::Run)?;
        self.enter(Phase::Command { listening: false });
        Ok(())
    }

    /// Minds a report; it may be the end of the run.
    pub fn report(&mut self, report: Report) -> Result<Option<Outcome>> {
        match report {
            Report::Booted => {
                let options = self.vm.options;
                let words = self.vm.command.iter().cloned();
                self.streams.request(&Request::Start(Start {
                    argv: words.map(OsStringExt::into_vec).collect(),
                    nics: options.nics,
                    gpus: options.gpus,
                    module: options.module,
                    share: options.share.is_some(),
                    peer: self.vm.peer,
                }))?;
                self.enter(Phase::SetUp);
            }
            Report::Ready => self.enter(Phase::Ready),
            Report::Listening => {
                if let Phase::Command { listening } = &mut self.phase {
                    *listening = true;
                }
            }
            Report::Failed(why) => {
                let why = format!("the guest could not be made ready: {why}");
                return Ok(Some(Outcome::Harness(why)));
            }
            Report::CannotRun(why) => return Ok(Some(Outcome::CannotRun(why))),
            Report::Exited {
                status,
                stdout,
                stderr,
                kernel,
            } => self.enter(Phase::Drain {
                status: u8::try_from(status).context("an exit status beyond 255")?,
                bytes: [stdout, stderr, kernel],
            }),
        }
        Ok(None)
    }

    /// Notices that all output has arrived.
    pub fn drain(&mut self) {
        if let Phase::Drain { status, bytes } = self.phase {
            let copied = |stream: usize| self.streams.copied[stream].load(Ordering::Acquire);
            if (0..3).all(|stream| copied(stream) >= bytes[stream]) {
                self.enter(Phase::Done { status });
            }
        }
    }

    /// How the guest went down, if it has. The model may be the reason.
    pub fn ended(&mut self, model: Option<&mut Guarded>) -> Result<Option<Outcome>> {
        let Some(status) = self.qemu.ended()? else {
            return Ok(None);
        };
        let console = fs::read(self.vm.log.join("console.log")).unwrap_or_default();
        let console = String::from_utf8_lossy(&console);
        if let Some(line) = console.lines().find(|line| line.contains("Kernel panic")) {
            let how = format!("the guest's kernel panicked: {}", line.trim());
            return Ok(Some(Outcome::GuestDied(how)));
        }
        if status.success() {
            let how = "the guest went down before the command had ended";
            return Ok(Some(Outcome::GuestDied(how.into())));
        }
        // It lost the model if that ended in this instant.
        let model = match model {
            Some(model) => model.wait(Duration::from_millis(500))?,
            None => None,
        };
        Ok(Some(match model {
            Some(status) => Outcome::ModelDied(describe(status)),
            None => {
                let log = fs::read(self.vm.log.join("qemu.log")).unwrap_or_default();
                let log = String::from_utf8_lossy(&log);
                let words = log.lines().rfind(|line| !line.trim().is_empty());
                let words = words.unwrap_or("without a word");
                Outcome::Harness(format!("QEMU ended: {}: {words}", describe(status)))
            }
        }))
    }

    /// The outcome if the guest has taken too long.
    pub fn out_of_patience(&self) -> Option<Outcome> {
        let timeout = self.vm.options.timeout;
        let (limit, outcome) = match self.phase {
            Phase::Boot => {
                let how = format!("the guest did not boot within {BOOT:?}");
                (BOOT, Outcome::GuestDied(how))
            }
            Phase::SetUp => {
                let how = format!("the guest's set-up hung: not ready within {SET_UP:?}");
                (SET_UP, Outcome::GuestDied(how))
            }
            // The second guest's command may run for as long as the first's.
            Phase::Command { .. } if self.vm.peer != Some(1) => {
                (timeout, Outcome::TimedOut(timeout))
            }
            Phase::Drain { .. } => {
                let how = format!("the command's last output did not arrive within {DRAIN:?}");
                (DRAIN, Outcome::Harness(how))
            }
            Phase::Ready | Phase::Command { .. } | Phase::Done { .. } => return None,
        };
        (self.began.elapsed() > limit).then_some(outcome)
    }

    /// Has the guest write to its kernel's log what hangs there. Whether it could be asked.
    pub fn show_blocked(&self) -> bool {
        matches!(self.phase, Phase::Command { .. })
            && self.streams.request(&Request::ShowBlocked).is_ok()
    }

    /// Switches it off.
    pub fn end(mut self) -> Result<()> {
        self.qemu.terminate(END)?;
        Ok(())
    }
}
