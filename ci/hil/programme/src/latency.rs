// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long a put takes, from the call to the known completion, by the clock of the kernel that makes it.

use crate::{
    list::{List, all_ok},
    machine::Machine,
    rig::{Link, Where, options},
};
use anyhow::{Context as _, Result};
use ibgda::Route;
use serde::Serialize;
use std::fmt;

/// Times of many puts on one route, in ns.
#[derive(Clone, Debug, Serialize)]
pub struct Latency {
    /// What posts, and what rings.
    pub route: String,
    /// Puts.
    pub rounds: u64,
    /// Of these.
    pub least: u64,
    /// The middle one.
    pub median: u64,
    /// All but one of a hundred are no longer.
    pub percentile99: u64,
}

impl fmt::Display for Latency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = |ns: u64| ns as f64 / 1e3;
        write!(
            f,
            "{:44} {:6} puts: least {:9.1} us, median {:9.1} us, 99% {:9.1} us",
            self.route,
            self.rounds,
            us(self.least),
            us(self.median),
            us(self.percentile99)
        )
    }
}

/// Measures puts of 64 bytes.
pub fn measure(
    machine: &Machine,
    at: &Where,
    route: Route,
    name: &str,
    rounds: u64,
) -> Result<Latency> {
    let link = Link::new(machine, route, 4096, &options())?;
    let times = at.processor.alloc(rounds as usize * 8)?;
    let pair = (&link.target, &link.source);
    // The first ones are for caches and for threads that sleep.
    let warm = rounds.min(100);
    all_ok(
        &List::new(at)
            .rounds(&link.qp, pair, 64, warm, &times)?
            .run()?,
    )?;
    all_ok(
        &List::new(at)
            .rounds(&link.qp, pair, 64, rounds, &times)?
            .run()?,
    )?;
    let mut bytes = vec![0; rounds as usize * 8];
    // SAFETY: the memory is of that length.
    unsafe { at.processor.read(times.address(), &mut bytes) }?;
    let mut times: Vec<u64> = bytes
        .chunks_exact(8)
        .map(|word| u64::from_ne_bytes(word.try_into().expect("eight bytes")))
        .collect();
    times.sort_unstable();
    let least = *times.first().context("no round")?;
    Ok(Latency {
        route: name.to_owned(),
        rounds,
        least,
        median: times[times.len() / 2],
        percentile99: times[times.len() * 99 / 100],
    })
}
