// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a run can end, and what is said about it.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::vm::Vm;

/// How the run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The command ended with this status (128 plus the signal if one ended it).
    Command(u8),
    /// The model ended, or ended badly.
    ModelDied(String),
    /// The command took longer than it may.
    TimedOut(Duration),
    /// QEMU, the build or the guest's set-up failed.
    Harness(String),
    /// The guest's kernel panicked, or the guest went down or never came up.
    GuestDied(String),
    /// The command could not be started.
    CannotRun(String),
    /// Whoever read our output stopped reading.
    NoReader,
}

const LINES_SHOWN: usize = 25;

impl Outcome {
    /// The exit status of `ci/vm`.
    pub fn status(&self) -> u8 {
        match self {
            Self::Command(status) => *status,
            Self::ModelDied(_) => 123,
            Self::TimedOut(_) => 124,
            Self::Harness(_) => 125,
            Self::GuestDied(_) => 126,
            Self::CannotRun(_) => 127,
            // As the shell reports a program that SIGPIPE ended.
            Self::NoReader => 128 + 13,
        }
    }

    /// One line about what went wrong, where the logs are, and the end of those that may tell why.
    pub fn explain(&self, vm: &Vm<'_>) {
        let (text, logs): (String, &[&str]) = match self {
            Self::Command(_) | Self::NoReader => return,
            Self::ModelDied(how) => (
                format!("the ConnectX model died: {how}"),
                &["connectx.stderr", "connectx.log"],
            ),
            Self::TimedOut(limit) => {
                let command: Vec<_> = vm
                    .command
                    .iter()
                    .map(|word| word.to_string_lossy())
                    .collect();
                (
                    format!(
                        "timed out: the command was still running after {} s: {}",
                        limit.as_secs(),
                        command.join(" ")
                    ),
                    &[],
                )
            }
            Self::Harness(why) => (why.clone(), &["qemu.log", "kernel.log", "connectx.log"]),
            Self::GuestDied(how) => (how.clone(), &["console.log", "qemu.log"]),
            Self::CannotRun(why) => (format!("cannot run the command in the guest: {why}"), &[]),
        };
        let place = match &vm.options.log_name {
            Some(name) => format!("logs: {name}"),
            None => "--log DIR keeps the logs".into(),
        };
        let label = match self {
            Self::ModelDied(_) => String::new(),
            _ => vm.label(),
        };
        eprintln!("ci/vm: {label}{text} (status {}; {place})", self.status());
        for log in logs {
            // The model's logs are the same for all.
            let dir = match log.starts_with("connectx") {
                true => &vm.options.log,
                false => &vm.log,
            };
            show_end(dir, log);
        }
    }
}

fn show_end(dir: &Path, name: &str) {
    let Ok(text) = fs::read(dir.join(name)) else {
        return;
    };
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    if lines.is_empty() {
        return;
    }
    eprintln!("  the end of {name}:");
    for line in &lines[lines.len().saturating_sub(LINES_SHOWN)..] {
        eprintln!("  | {line}");
    }
}
