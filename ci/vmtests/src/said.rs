// SPDX-License-Identifier: MIT OR Apache-2.0
//! The `ibgda` command, and what it said.

use std::process::{Command, Output};

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

impl Said {
    pub fn new(output: Output) -> Result<Self> {
        Ok(Self {
            status: output.status.code().context("a signal ended it")?,
            output: String::from_utf8(output.stdout)?,
            errors: String::from_utf8(output.stderr)?,
        })
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
        ensure!(
            self.output.contains(words),
            "{words:?} is missing: {self:#?}"
        );
        Ok(self)
    }

    pub fn errors_have(&self, words: &str) -> Result<&Self> {
        ensure!(
            self.errors.contains(words),
            "{words:?} is missing: {self:#?}"
        );
        Ok(self)
    }

    pub fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.output).with_context(|| format!("no JSON: {self:#?}"))
    }
}

/// Runs it to its end.
pub fn ibgda(arguments: &[&str]) -> Result<Said> {
    Said::new(
        Command::new(PROGRAM)
            .args(arguments)
            .output()
            .context(PROGRAM)?,
    )
}
