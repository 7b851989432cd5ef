// SPDX-License-Identifier: MIT OR Apache-2.0
//! The referee's record: every refusal with its reason, for people (`connectx.log`) and for programs (`connectx.jsonl`).
//!
//! A refusal names the object, the field, the value, the rule that it broke and where that rule is written. A guest can
//! make refusals as fast as it can write to a register, so what is written out is bounded: each function has a budget
//! that refills with time ([`BURST`], [`PER_SECOND`]), and the first record after a pause says how many were left out.
//! The counters and the ring of recent records see every refusal.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::panic::Location;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// Records of one function that may be written out at once.
pub const BURST: u32 = 200;
/// Records of one function written out each second once the burst is spent.
pub const PER_SECOND: u32 = 20;
/// Bytes of a log file, after which it is closed with a last line that says so.
pub const FILE_LIMIT: u64 = 64 << 20;
/// Recent refusals kept in memory for `connectx ctl refusals`.
pub const KEPT: usize = 1024;

/// A log file that stops growing at [`FILE_LIMIT`]. Each write is taken whole or not at all.
#[derive(Debug)]
pub struct LogFile {
    file: File,
    left: u64,
}

impl LogFile {
    /// Creates the file, or empties it.
    pub fn create(path: &Path) -> io::Result<Self> {
        Ok(Self {
            file: File::create(path)?,
            left: FILE_LIMIT,
        })
    }
}

impl Write for LogFile {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.left == 0 {
            return Ok(data.len());
        }
        match self.left.checked_sub(data.len() as u64) {
            Some(left) => {
                self.left = left;
                self.file.write_all(data)?;
            }
            None => {
                self.left = 0;
                self.file
                    .write_all(b"{\"log\":\"full, nothing more is written\"}\n")?;
            }
        }
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Something a function would not do, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// Function that refused, such as `nic0`.
    pub function: String,
    /// What the rule is about, with its number: `qp 0x12`, `cmd CREATE_QP`, `uar 0x14`.
    pub object: String,
    /// Field of the object or of the request, by its name in the interface: `uar_page`.
    pub field: String,
    /// The offending value, as the reader wants to see it.
    pub value: String,
    /// The rule, as a sentence that says what would have been right.
    pub rule: String,
    /// Where the rule comes from: a section of a specification, or a place in the driver.
    pub source: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} refused {}: {} = {}: {} [{}]",
            self.function, self.object, self.field, self.value, self.rule, self.source
        )
    }
}

/// A refusal with its place in time.
#[derive(Debug, Clone, Serialize)]
pub struct Record {
    /// Number of this refusal since the start, from 1.
    pub seq: u64,
    /// Seconds since the Unix epoch.
    pub time: f64,
    /// Where the rule is in this program: file and line.
    pub code: String,
    /// What was refused.
    #[serde(flatten)]
    pub refusal: Refusal,
}

/// How much one function may still write out.
#[derive(Debug)]
struct Budget {
    tokens: f64,
    at: Instant,
    dropped: u64,
}

impl Budget {
    fn full(now: Instant) -> Self {
        Self {
            tokens: f64::from(BURST),
            at: now,
            dropped: 0,
        }
    }

    /// Takes one record from the budget: `Some(n)` to write it, n having been dropped since the last.
    fn take(&mut self, now: Instant) -> Option<u64> {
        let refill = now.saturating_duration_since(self.at).as_secs_f64() * f64::from(PER_SECOND);
        self.tokens = (self.tokens + refill).min(f64::from(BURST));
        self.at = now;
        if self.tokens < 1.0 {
            self.dropped += 1;
            return None;
        }
        self.tokens -= 1.0;
        Some(std::mem::take(&mut self.dropped))
    }
}

#[derive(Debug, Default)]
struct State {
    json: Option<LogFile>,
    seq: u64,
    recent: VecDeque<Record>,
    budgets: HashMap<String, Budget>,
    counts: HashMap<String, u64>,
}

/// Collects refusals. Cheap to clone; all clones share one record.
#[derive(Debug, Clone, Default)]
pub struct Referee {
    state: Arc<Mutex<State>>,
}

impl Referee {
    /// A referee that keeps its record in memory only, for tests and for use as a library.
    pub fn in_memory() -> Self {
        Self::default()
    }

    /// A referee that also appends to the JSON-lines file at `path`. The human record goes through `tracing`.
    pub fn to_file(path: &Path) -> io::Result<Self> {
        let referee = Self::default();
        referee.lock().json = Some(LogFile::create(path)?);
        Ok(referee)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a refusal by the caller.
    #[track_caller]
    pub fn refuse(&self, refusal: Refusal) {
        self.refuse_by(refusal, Location::caller());
    }

    /// Records a refusal by a rule that is elsewhere than the call.
    pub fn refuse_by(&self, refusal: Refusal, rule: &Location<'_>) {
        self.refuse_at(refusal, rule, Instant::now());
    }

    fn refuse_at(&self, refusal: Refusal, rule: &Location<'_>, now: Instant) {
        let mut state = self.lock();
        state.seq += 1;
        let time = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0.0, |d| d.as_secs_f64());
        let record = Record {
            seq: state.seq,
            time,
            code: format!("{}:{}", rule.file(), rule.line()),
            refusal,
        };
        *state
            .counts
            .entry(record.refusal.function.clone())
            .or_default() += 1;
        let budget = state
            .budgets
            .entry(record.refusal.function.clone())
            .or_insert_with(|| Budget::full(now));
        if let Some(dropped) = budget.take(now) {
            if dropped > 0 {
                tracing::warn!("{}: {dropped} refusals not logged", record.refusal.function);
            }
            tracing::warn!("{} ({})", record.refusal, record.code);
            write_json(&mut state, &record, dropped);
        }
        if state.recent.len() == KEPT {
            state.recent.pop_front();
        }
        state.recent.push_back(record);
    }

    /// Refusals of one function since the start.
    pub fn count(&self, function: &str) -> u64 {
        self.lock().counts.get(function).copied().unwrap_or(0)
    }

    /// The last `n` refusals (at most [`KEPT`]), oldest first.
    pub fn recent(&self, n: usize) -> Vec<Record> {
        let state = self.lock();
        let skip = state.recent.len().saturating_sub(n);
        state.recent.iter().skip(skip).cloned().collect()
    }
}

/// Writes one line; a full disk must not stop the device, so after an error the file is given up with a message.
fn write_json(state: &mut State, record: &Record, dropped: u64) {
    #[derive(Serialize)]
    struct Line<'a> {
        #[serde(flatten)]
        record: &'a Record,
        /// Refusals of this function that were left out before this one.
        dropped: u64,
    }
    let Some(file) = state.json.as_mut() else {
        return;
    };
    let result = serde_json::to_vec(&Line { record, dropped })
        .map_err(io::Error::from)
        .and_then(|mut line| {
            line.push(b'\n');
            file.write_all(&line)
        });
    if let Err(error) = result {
        tracing::error!("no more refusals are written to the JSON log: {error}");
        state.json = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn refusal(function: &str, value: u64) -> Refusal {
        Refusal {
            function: function.into(),
            object: "qp 0x12".into(),
            field: "uar_page".into(),
            value: format!("{value:#x}"),
            rule: "a QP is rung through its own UAR page".into(),
            source: "test".into(),
        }
    }

    #[test]
    fn flood_is_bounded_on_disk_and_counted_in_memory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.jsonl");
        let referee = Referee::to_file(&path).unwrap();
        let start = Instant::now();
        for i in 0..100_000 {
            referee.refuse_at(refusal("nic0", i), Location::caller(), start);
        }
        referee.refuse_at(refusal("nic1", 7), Location::caller(), start);
        let later = start + Duration::from_secs(1);
        referee.refuse_at(refusal("nic0", 8), Location::caller(), later);
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<serde_json::Value> = text
            .lines()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect();
        assert_eq!(lines.len(), BURST as usize + 2);
        assert_eq!(lines[0]["object"], "qp 0x12");
        let code = lines[0]["code"].as_str().unwrap();
        assert!(code.starts_with(&format!("{}:", file!())), "{code}");
        assert_eq!(lines[BURST as usize]["function"], "nic1");
        assert_eq!(
            lines[BURST as usize + 1]["dropped"],
            100_000 - u64::from(BURST)
        );
        assert_eq!(referee.count("nic0"), 100_001);
        assert_eq!(referee.count("nic1"), 1);
        assert_eq!(referee.count("gpu0"), 0);
    }

    #[test]
    fn a_log_file_stops_growing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut log = LogFile::create(&path).unwrap();
        log.left = 10;
        for line in ["12345\n", "7\n", "123\n", "x\n"] {
            log.write_all(line.as_bytes()).unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(
            text,
            "12345\n7\n{\"log\":\"full, nothing more is written\"}\n"
        );
    }

    #[test]
    fn recent_is_the_newest_in_order() {
        let referee = Referee::in_memory();
        for i in 0..(KEPT as u64 + 10) {
            referee.refuse(refusal("nic0", i));
        }
        let last: Vec<u64> = referee.recent(3).iter().map(|r| r.seq).collect();
        let end = KEPT as u64 + 10;
        assert_eq!(last, [end - 2, end - 1, end]);
        assert_eq!(referee.recent(usize::MAX).len(), KEPT);
    }
}
