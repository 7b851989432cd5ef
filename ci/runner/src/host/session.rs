// SPDX-License-Identifier: MIT OR Apache-2.0
//! One run: the model, QEMU and the guest's agent, from the start to the end, whichever ends it.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::child::Guarded;
use super::qemu::{self, MODEL_DIR};
use super::streams::Streams;
use super::{Options, Outcome};
use crate::protocol::{Report, Request, Start};

/// The model makes its sockets at once.
const MODEL_READY: Duration = Duration::from_secs(20);
/// From QEMU's start to the agent's first report; 5 s on an idle machine without KVM.
const BOOT: Duration = Duration::from_secs(120);
/// From there to the command's start; longer than the guest's own patience with its NICs.
const SET_UP: Duration = Duration::from_secs(150);
/// From the command's end to its last byte of output.
const DRAIN: Duration = Duration::from_secs(30);
/// For QEMU and the model to end when asked.
const END: Duration = Duration::from_secs(10);
/// For the guest to write the stacks of what hangs.
const SHOW_BLOCKED: Duration = Duration::from_secs(2);
/// For the last lines of the kernel's log, when the guest could not say how many there are.
const LAST_WORDS: Duration = Duration::from_millis(300);
/// How often the children are looked at.
const LOOK: Duration = Duration::from_millis(20);

/// What the threads that read the guest's ports tell the session.
pub enum Event {
    /// The agent reported.
    Report(Report),
    /// The agent sent what is no report.
    Garbled(io::Error),
    /// Some bytes of a stream were written out.
    Copied,
    /// They could not be.
    NotWritten(io::Error),
}

/// What the session waits for.
enum Phase {
    Boot,
    SetUp,
    Command,
    Drain { status: u8, bytes: [u64; 3] },
}

impl Phase {
    fn patience(&self, options: &Options) -> Duration {
        match self {
            Self::Boot => BOOT,
            Self::SetUp => SET_UP,
            Self::Command => options.timeout,
            Self::Drain { .. } => DRAIN,
        }
    }
}

/// Runs everything; an error is the harness's.
pub fn run(options: &Options) -> Result<Outcome> {
    let mut model = match start_model(options)? {
        Ok(model) => model,
        Err(died) => return Ok(died),
    };
    let (sender, events) = channel();
    let streams = Streams::listen(options, &sender)?;
    let mut qemu = start_qemu(options)?;
    let outcome = Session {
        options,
        events,
        streams,
        model: model.as_mut(),
        qemu: &mut qemu,
    }
    .watch()?;
    if !matches!(outcome, Outcome::Command(_) | Outcome::NoReader) {
        // What the guest's kernel said of it may still be on its way to the log.
        thread::sleep(LAST_WORDS);
    }
    qemu.terminate(END)?;
    Ok(match model {
        Some(model) => end_model(model, outcome)?,
        None => outcome,
    })
}

struct Session<'a> {
    options: &'a Options,
    events: Receiver<Event>,
    streams: Streams,
    model: Option<&'a mut Guarded>,
    qemu: &'a mut Guarded,
}

impl Session<'_> {
    fn watch(&mut self) -> Result<Outcome> {
        let mut phase = Phase::Boot;
        let mut began = Instant::now();
        let mut looked = began;
        loop {
            if let Phase::Drain { status, bytes } = phase {
                if (0..3).all(|stream| {
                    self.streams.copied[stream].load(Ordering::Acquire) >= bytes[stream]
                }) {
                    return Ok(Outcome::Command(status));
                }
            }
            match self.events.recv_timeout(LOOK) {
                Ok(Event::Report(report)) => match self.next(report)? {
                    Ok(next) => {
                        phase = next;
                        began = Instant::now();
                    }
                    Err(outcome) => return Ok(outcome),
                },
                Ok(Event::Garbled(error)) => {
                    bail!("the guest's agent sent what is no report: {error}")
                }
                Ok(Event::NotWritten(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
                    return Ok(Outcome::NoReader);
                }
                Ok(Event::NotWritten(error)) => {
                    bail!("writing the command's output or the kernel's log: {error}")
                }
                Ok(Event::Copied) => {}
                Err(RecvTimeoutError::Timeout) => {}
                // QEMU's end closes all of them; the look below says how it ended.
                Err(RecvTimeoutError::Disconnected) => thread::sleep(LOOK),
            }
            if looked.elapsed() >= LOOK {
                looked = Instant::now();
                if let Some(outcome) = self.look()? {
                    return Ok(outcome);
                }
            }
            if began.elapsed() > phase.patience(self.options) {
                return Ok(self.out_of_patience(&phase));
            }
        }
    }

    /// The phase after a report, or the end.
    fn next(&mut self, report: Report) -> Result<Result<Phase, Outcome>> {
        let options = self.options;
        Ok(match report {
            Report::Booted => {
                self.streams.request(&Request::Start(Start {
                    argv: options
                        .command
                        .iter()
                        .cloned()
                        .map(OsStringExt::into_vec)
                        .collect(),
                    nics: options.nics,
                    gpus: options.gpus,
                    module: options.module,
                    share: options.share.is_some(),
                }))?;
                Ok(Phase::SetUp)
            }
            Report::Ready => Ok(Phase::Command),
            Report::Failed(why) => Err(Outcome::Harness(format!(
                "the guest could not be made ready: {why}"
            ))),
            Report::CannotRun(why) => Err(Outcome::CannotRun(why)),
            Report::Exited {
                status,
                stdout,
                stderr,
                kernel,
            } => Ok(Phase::Drain {
                status: u8::try_from(status).context("an exit status beyond 255")?,
                bytes: [stdout, stderr, kernel],
            }),
        })
    }

    /// Whether a child has ended though the command has not.
    fn look(&mut self) -> Result<Option<Outcome>> {
        if let Some(model) = &mut self.model {
            if let Some(status) = model.ended()? {
                return Ok(Some(Outcome::ModelDied(describe(status))));
            }
        }
        let Some(status) = self.qemu.ended()? else {
            return Ok(None);
        };
        let console = fs::read(self.options.log.join("console.log")).unwrap_or_default();
        let console = String::from_utf8_lossy(&console);
        Ok(Some(
            match console.lines().find(|line| line.contains("Kernel panic")) {
                Some(line) => {
                    Outcome::GuestDied(format!("the guest's kernel panicked: {}", line.trim()))
                }
                None if status.success() => {
                    Outcome::GuestDied("the guest went down before the command had ended".into())
                }
                // It lost the model if that ended in this instant.
                None => match self
                    .model
                    .as_mut()
                    .map(|model| model.wait(Duration::from_millis(500)))
                    .transpose()?
                    .flatten()
                {
                    Some(status) => Outcome::ModelDied(describe(status)),
                    None => Outcome::Harness(format!("QEMU ended: {}", describe(status))),
                },
            },
        ))
    }

    fn out_of_patience(&self, phase: &Phase) -> Outcome {
        let limit = phase.patience(self.options);
        match phase {
            Phase::Boot => Outcome::GuestDied(format!("the guest did not boot within {limit:?}")),
            Phase::SetUp => Outcome::GuestDied(format!(
                "the guest's set-up hung: not ready within {limit:?}"
            )),
            Phase::Command => {
                if self.streams.request(&Request::ShowBlocked).is_ok() {
                    thread::sleep(SHOW_BLOCKED);
                }
                Outcome::TimedOut(limit)
            }
            Phase::Drain { .. } => Outcome::Harness(format!(
                "the command's last output did not arrive within {limit:?}"
            )),
        }
    }
}

/// Starts the model and waits until its sockets are there. `None` where no device is asked for.
fn start_model(options: &Options) -> Result<Result<Option<Guarded>, Outcome>> {
    if options.nics + options.gpus == 0 {
        return Ok(Ok(None));
    }
    let dir = options.run_dir.join(MODEL_DIR);
    fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
    // Sockets go where paths are short, logs where the user wants them.
    for log in ["connectx.log", "connectx.jsonl"] {
        let target = options.log.join(log);
        File::create(&target).with_context(|| format!("making {}", target.display()))?;
        symlink(&target, dir.join(log))
            .with_context(|| format!("making a link to {}", target.display()))?;
    }
    let mut model = Guarded::spawn(
        Command::new(&options.model)
            .arg("serve")
            .args([
                "--nics",
                &options.nics.to_string(),
                "--gpus",
                &options.gpus.to_string(),
            ])
            .arg("--dir")
            .arg(&dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log_file(options, "connectx.stderr")?),
    )?;
    let stdout = model
        .child()
        .stdout
        .take()
        .context("the model's output is not piped")?;
    let (sender, lines) = channel();
    // Goes on reading for as long as the model writes, so that it never waits for us.
    thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    let deadline = Instant::now() + MODEL_READY;
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) if line == "ready" => return Ok(Ok(Some(model))),
            Ok(_) => {}
            Err(RecvTimeoutError::Timeout) => {
                bail!("the model was not ready within {MODEL_READY:?}")
            }
            Err(RecvTimeoutError::Disconnected) => {
                let how = model
                    .wait(END)?
                    .map_or("it closed its output".into(), describe);
                return Ok(Err(Outcome::ModelDied(format!(
                    "before it was ready, {how}"
                ))));
            }
        }
    }
}

fn start_qemu(options: &Options) -> Result<Guarded> {
    let log = log_file(options, "qemu.log")?;
    Guarded::spawn(
        Command::new("qemu-system-x86_64")
            .args(qemu::arguments(options))
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("sharing QEMU's log")?)
            .stderr(log),
    )
}

/// The model ends by itself when QEMU is gone. If it ends badly, a command that ended well did not tell the whole truth.
fn end_model(mut model: Guarded, outcome: Outcome) -> Result<Outcome> {
    let bad = match model.wait(END)? {
        Some(status) if status.success() => return Ok(outcome),
        Some(status) => describe(status),
        None => {
            model.terminate(END)?;
            format!("still running {END:?} after QEMU had ended")
        }
    };
    Ok(match outcome {
        Outcome::Command(0) => Outcome::ModelDied(format!(
            "at the end, after the command had succeeded: {bad}"
        )),
        other => other,
    })
}

fn log_file(options: &Options, name: &str) -> Result<File> {
    let path = options.log.join(name);
    File::create(&path).with_context(|| format!("making {}", path.display()))
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => format!("{status}"),
    }
}
