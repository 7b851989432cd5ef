// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `ibgda bench` prints.

use super::measure::Rate;
use crate::{
    picture::{Panel, Series},
    stats::{self, Bucket, Summary},
    units::{show_bytes, show_count},
};
use serde::Serialize;
use std::fmt::Write as _;

/// Latency of one message length.
#[derive(Serialize)]
pub struct LatencyRow {
    pub bytes: u64,
    #[serde(flatten)]
    pub summary: Summary,
    pub histogram: Vec<Bucket>,
}

impl LatencyRow {
    /// `None`: nothing was measured before Ctrl-C.
    pub fn of(bytes: u64, sorted: &[u64]) -> Option<Self> {
        Some(Self {
            bytes,
            summary: Summary::of(sorted)?,
            histogram: stats::buckets(sorted),
        })
    }
}

/// Rate of one message length.
#[derive(Serialize)]
pub struct RateRow {
    pub bytes: u64,
    pub qps: u64,
    pub batch: u32,
    pub count: u64,
    pub ns: u64,
    pub messages_per_s: f64,
    pub bytes_per_s: f64,
}

impl RateRow {
    /// `None`: as of [`LatencyRow::of`].
    pub fn of(bytes: u64, qps: u64, batch: u32, rate: Rate) -> Option<Self> {
        let messages_per_s = rate.count as f64 / (rate.ns as f64 / 1e9);
        (rate.count > 0).then_some(Self {
            bytes,
            qps,
            batch,
            count: rate.count,
            ns: rate.ns,
            messages_per_s,
            bytes_per_s: messages_per_s * bytes as f64,
        })
    }
}

/// The JSON.
#[derive(Serialize)]
pub struct Document {
    pub version: u32,
    pub command: &'static str,
    pub nic: String,
    pub peer_nic: String,
    pub route: &'static str,
    pub posted_by: &'static str,
    pub poster: String,
    pub note: Option<&'static str>,
    pub seed: u64,
    pub verified_bytes: u64,
    pub interrupted: bool,
    pub latency: Vec<LatencyRow>,
    pub rate: Vec<RateRow>,
}

impl Document {
    /// What is known before it begins.
    pub fn heading(&self) -> String {
        let mut text = String::new();
        if let Some(note) = self.note {
            let _ = writeln!(text, "note: {note}");
        }
        let _ = writeln!(
            text,
            "RDMA WRITE from {} to {}, route {}, seed {}\nposted by {}",
            self.nic, self.peer_nic, self.route, self.seed, self.poster
        );
        text
    }

    /// The results.
    pub fn words(&self) -> String {
        let mut text = String::new();
        if !self.latency.is_empty() {
            let _ = writeln!(
                text,
                "\nlatency, from the post to the completion\n   message{}",
                stats::HEADER
            );
            for row in &self.latency {
                let _ = writeln!(
                    text,
                    "{:>10}{}",
                    show_bytes(row.bytes),
                    row.summary.columns()
                );
            }
            for row in &self.latency {
                let _ = write!(
                    text,
                    "\n{}:\n{}",
                    show_bytes(row.bytes),
                    stats::bars(&row.histogram)
                );
            }
        }
        if let Some(first) = self.rate.first() {
            let _ = writeln!(
                text,
                "\nrate, {} queue pairs, a doorbell for each {} messages\n   message  messages  messages/s     bytes/s",
                first.qps, first.batch
            );
            for row in &self.rate {
                let _ = writeln!(
                    text,
                    "{:>10}{:>10}{:>12}{:>12}",
                    show_bytes(row.bytes),
                    row.count,
                    show_count(row.messages_per_s),
                    show_count(row.bytes_per_s)
                );
            }
        }
        let _ = writeln!(
            text,
            "\n{}{} compared, every byte as it should be",
            if self.interrupted {
                "interrupted; "
            } else {
                ""
            },
            show_bytes(self.verified_bytes)
        );
        text
    }

    /// The same as pictures.
    pub fn panels(&self) -> Vec<Panel<'_>> {
        let from = format!(
            "{} to {}, route {}, posted by the {}",
            self.nic,
            self.peer_nic,
            self.route,
            self.posted_by.to_uppercase()
        );
        let mut panels: Vec<_> = self
            .latency
            .iter()
            .map(|row| Panel::Latencies {
                title: format!("RDMA WRITE, {from}"),
                series: vec![Series {
                    name: show_bytes(row.bytes),
                    buckets: &row.histogram,
                }],
            })
            .collect();
        if !self.rate.is_empty() {
            panels.push(Panel::Rates {
                title: format!("RDMA WRITE, {from}"),
                points: self
                    .rate
                    .iter()
                    .map(|row| (row.bytes, row.messages_per_s))
                    .collect(),
            });
        }
        panels
    }
}
