// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ctrl-C: what is under way ends, and what was measured is told.

use anyhow::{Context as _, Result};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// Whether the user, or whoever sends SIGTERM, has had enough.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// From now on the first signal is only noted; a second one ends the process.
    pub fn on_signals() -> Result<Self> {
        let stop = Self::default();
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first signal finds the flag unset.
            flag::register_conditional_default(signal, Arc::clone(&stop.0))
                .and_then(|_| flag::register(signal, Arc::clone(&stop.0)))
                .context("handle Ctrl-C")?;
        }
        Ok(stop)
    }

    /// One that has come.
    #[cfg(test)]
    pub fn of_a_user() -> Self {
        Self(Arc::new(AtomicBool::new(true)))
    }

    /// Whether one has come.
    pub fn asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
