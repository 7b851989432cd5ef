// SPDX-License-Identifier: MIT OR Apache-2.0
//! A program that runs, and what it said.

use anyhow::{Context as _, Result, ensure};
use ibgda_vmtests::machine::{Allowed, gpus, nics};
use std::{
    io::{BufRead as _, BufReader, Read as _},
    process::{Child, ChildStdout, Command, Output, Stdio},
    thread::{self, JoinHandle},
};

/// The policy's entries for the GPU with each NIC, as long as this lasts.
pub fn allow_all() -> Vec<Allowed> {
    let gpu = gpus()[0];
    nics()
        .into_iter()
        .map(|nic| Allowed::pair(gpu, nic))
        .collect()
}

/// How a program ended, and what it said.
#[derive(Debug)]
pub struct Said {
    status: Option<i32>,
    output: String,
    errors: String,
}

impl Said {
    pub fn by(command: &mut Command) -> Result<Self> {
        let Output {
            status,
            stdout,
            stderr,
        } = command
            .output()
            .with_context(|| format!("start {command:?}"))?;
        Ok(Self {
            status: status.code(),
            output: String::from_utf8_lossy(&stdout).into_owned(),
            errors: String::from_utf8_lossy(&stderr).into_owned(),
        })
    }

    pub fn ended_with(&self, status: i32) -> Result<&Self> {
        ensure!(
            self.status == Some(status),
            "status {status} was expected: {self:#?}"
        );
        Ok(self)
    }

    /// All of these, in its output.
    pub fn output_has(&self, all: &[&str]) -> Result<&Self> {
        for words in all {
            ensure!(
                self.output.contains(words),
                "{words:?} is missing: {self:#?}"
            );
        }
        Ok(self)
    }

    /// All of these, among its errors.
    pub fn errors_have(&self, all: &[&str]) -> Result<&Self> {
        for words in all {
            ensure!(
                self.errors.contains(words),
                "{words:?} is missing: {self:#?}"
            );
        }
        Ok(self)
    }
}

/// A program that is still at it; killed when dropped.
pub struct Running {
    child: Child,
    output: BufReader<ChildStdout>,
    said: String,
    errors: Option<JoinHandle<String>>,
}

impl Running {
    pub fn start(command: &mut Command) -> Result<Self> {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {command:?}"))?;
        let output = BufReader::new(child.stdout.take().context("it is piped")?);
        let mut errors = child.stderr.take().context("it is piped")?;
        let errors = thread::spawn(move || {
            let mut text = Vec::new();
            // What came until then is what there is.
            let _ = errors.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        });
        Ok(Self {
            child,
            output,
            said: String::new(),
            errors: Some(errors),
        })
    }

    /// Waits for a line with these words.
    pub fn says(&mut self, words: &str) -> Result<String> {
        loop {
            let before = self.said.len();
            ensure!(
                self.output.read_line(&mut self.said)? > 0,
                "it ended without saying {words:?}: {:?}",
                self.end()
            );
            if self.said[before..].contains(words) {
                return Ok(self.said[before..].to_owned());
            }
        }
    }

    /// Waits for its end.
    pub fn end(&mut self) -> Result<Said> {
        self.output.read_to_string(&mut self.said)?;
        let status = self.child.wait()?.code();
        let errors = self.errors.take().map(JoinHandle::join);
        Ok(Said {
            status,
            output: self.said.clone(),
            errors: errors.and_then(Result::ok).unwrap_or_default(),
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
