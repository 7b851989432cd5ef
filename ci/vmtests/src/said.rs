// SPDX-License-Identifier: MIT OR Apache-2.0
//! A program that runs, and what it said; the `ibgda` command above all.

use std::{
    io::{BufRead as _, BufReader, Read},
    process::{Child, Command, Output, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::Instant,
};

use crate::machine::patience;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

/// The command, where ci/vm has it.
pub const PROGRAM: &str = "/opt/ibgda/bin/ibgda";

/// What a run said, and how it ended.
#[derive(Debug)]
pub struct Said {
    pub status: i32,
    pub output: String,
    pub errors: String,
}

fn has(said: &Said, text: &str, words: &str) -> Result<()> {
    ensure!(text.contains(words), "{words:?} is missing: {said:#?}");
    Ok(())
}

impl Said {
    pub fn new(output: Output) -> Result<Self> {
        Ok(Self {
            status: output.status.code().context("a signal ended it")?,
            output: String::from_utf8(output.stdout)?,
            errors: String::from_utf8(output.stderr)?,
        })
    }

    /// Runs a program to its end.
    pub fn by(command: &mut Command) -> Result<Self> {
        let output = command.output();
        Self::new(output.with_context(|| format!("start {command:?}"))?)
    }

    pub fn ended_with(self, status: i32) -> Result<Self> {
        ensure!(
            self.status == status,
            "status {} instead of {status}: {self:#?}",
            self.status
        );
        Ok(self)
    }

    pub fn output_has(&self, words: &str) -> Result<&Self> {
        has(self, &self.output, words).map(|()| self)
    }

    pub fn output_has_all(&self, all: &[&str]) -> Result<&Self> {
        all.iter()
            .try_for_each(|words| has(self, &self.output, words))?;
        Ok(self)
    }

    pub fn errors_have(&self, words: &str) -> Result<&Self> {
        has(self, &self.errors, words).map(|()| self)
    }

    pub fn errors_have_all(&self, all: &[&str]) -> Result<&Self> {
        all.iter()
            .try_for_each(|words| has(self, &self.errors, words))?;
        Ok(self)
    }

    pub fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.output).with_context(|| format!("no JSON: {self:#?}"))
    }
}

/// Runs the command to its end.
pub fn ibgda(arguments: &[&str]) -> Result<Said> {
    Said::by(Command::new(PROGRAM).args(arguments))
}

/// Lines that a thread takes as they come, so that a program is never held up by a full pipe.
struct Lines {
    lines: Receiver<String>,
    said: String,
}

impl Lines {
    fn of(stream: impl Read + Send + 'static) -> Self {
        let (sender, lines) = channel();
        thread::spawn(move || {
            let mut stream = BufReader::new(stream);
            let mut line = Vec::new();
            while stream
                .read_until(b'\n', &mut line)
                .is_ok_and(|bytes| bytes > 0)
            {
                if sender
                    .send(String::from_utf8_lossy(&line).into_owned())
                    .is_err()
                {
                    return;
                }
                line.clear();
            }
        });
        Self {
            lines,
            said: String::new(),
        }
    }

    /// Waits for a line with these words; `None`: the stream has ended without them, or they have not come in time.
    fn until(&mut self, words: &str) -> Option<String> {
        let end = Instant::now() + 4 * patience();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).ok()?;
            self.said += &line;
            if line.contains(words) {
                return Some(line);
            }
        }
    }

    /// What was said until now.
    fn so_far(&mut self) -> &str {
        self.said.extend(self.lines.try_iter());
        &self.said
    }

    /// All that was said, when the stream has ended.
    fn all(&mut self) -> String {
        self.said.extend(self.lines.iter());
        std::mem::take(&mut self.said)
    }
}

/// A program that is still at it; killed when dropped.
pub struct Running {
    pub child: Child,
    output: Lines,
    errors: Lines,
}

impl Running {
    pub fn start(command: &mut Command) -> Result<Self> {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {command:?}"))?;
        Ok(Self {
            output: Lines::of(child.stdout.take().context("it is piped")?),
            errors: Lines::of(child.stderr.take().context("it is piped")?),
            child,
        })
    }

    /// Waits for a line of its output with these words.
    pub fn says(&mut self, words: &str) -> Result<String> {
        let found = self.output.until(words);
        self.found(found, words)
    }

    /// Waits for a line of its errors with these words.
    pub fn hears(&mut self, words: &str) -> Result<String> {
        let found = self.errors.until(words);
        self.found(found, words)
    }

    fn found(&mut self, line: Option<String>, words: &str) -> Result<String> {
        line.with_context(|| {
            let (output, errors) = (self.output.so_far(), self.errors.so_far());
            format!("it did not say {words:?}, but:\n{output}\n{errors}")
        })
    }

    /// Waits for its end; what it said.
    pub fn end(&mut self) -> Result<Said> {
        let (output, errors) = (self.output.all(), self.errors.all());
        Ok(Said {
            status: self.child.wait()?.code().context("a signal ended it")?,
            output,
            errors,
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
