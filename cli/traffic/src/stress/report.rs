// SPDX-License-Identifier: MIT OR Apache-2.0
//! The report of a run: what a reader gets, and from what a later run goes on.

use crate::{choice::Choice, files, pattern, units};
use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt::Write as _, fs, path::Path};

const VERSION: u32 = 1;
const COMMAND: &str = "stress";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Under way, or ended by what leaves no time to say so.
    Running,
    Done,
    Interrupted,
    Failed,
}

/// What is run, on what.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    pub nic: String,
    pub peer_nic: String,
    pub gpu: String,
    pub route: String,
    pub qps: usize,
    pub max_bytes: u64,
    /// How long all runs together are to take, s.
    pub for_s: u64,
}

impl Plan {
    /// As a choice is written down.
    pub fn new(choice: &Choice, qps: usize, max_bytes: u64, for_s: u64) -> Self {
        Self {
            nic: choice.nic.clone(),
            peer_nic: choice.peer_nic.clone(),
            gpu: choice.gpu.to_string(),
            route: choice.route.name().to_owned(),
            qps,
            max_bytes,
            for_s,
        }
    }

    /// And as it is read again.
    pub fn choice(&self) -> Result<Choice> {
        Ok(Choice {
            nic: self.nic.clone(),
            peer_nic: self.peer_nic.clone(),
            gpu: self.gpu.parse()?,
            route: self.route.parse()?,
            note: None,
        })
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    pub rounds: u64,
    pub requests: u64,
    /// Payload, of which every byte was compared.
    pub bytes: u64,
    pub by_kind: BTreeMap<String, u64>,
}

/// A NIC that was lost, and came back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Loss {
    pub nic: String,
    pub reason: String,
    /// Of all runs' time.
    pub at_s: f64,
    /// From when it was noticed until the first round after it was good.
    pub recovered_after_s: f64,
}

/// The first byte that was not what it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mismatch {
    pub qp: u32,
    /// `None`: no request of the round touched it.
    pub wqe_index: Option<u64>,
    pub request: Option<String>,
    /// Which memory, and where in it.
    pub memory: String,
    pub offset: u64,
    pub address: u64,
    /// From there on, up to 16 bytes, hexadecimal.
    pub expected: String,
    pub seen: String,
}

impl Mismatch {
    /// As a sentence.
    pub fn words(&self) -> String {
        let who = match (&self.request, self.wqe_index) {
            (Some(request), Some(index)) => format!("WQE {index} ({request})"),
            _ => "no request of the round".to_owned(),
        };
        format!(
            "QP {:#x}: {who}: {} memory, offset {} (address {:#x}): expected {}, seen {}",
            self.qp, self.memory, self.offset, self.address, self.expected, self.seen
        )
    }
}

/// Where a run's memory is, for whoever debugs the process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Places {
    pub pid: u32,
    pub near: u64,
    pub near_bytes: u64,
    pub far: u64,
    pub far_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub version: u32,
    pub command: String,
    pub state: State,
    #[serde(flatten)]
    pub plan: Plan,
    pub posted_by: String,
    pub poster: String,
    /// Of each run; the last is this one's.
    pub seeds: Vec<u64>,
    pub elapsed_s: f64,
    pub remaining_s: f64,
    pub totals: Totals,
    pub losses: Vec<Loss>,
    pub error: Option<String>,
    pub mismatch: Option<Mismatch>,
    pub places: Places,
}

impl Report {
    /// Of a first run.
    pub fn new(plan: Plan, seed: u64) -> Self {
        Self {
            version: VERSION,
            command: COMMAND.into(),
            state: State::Running,
            posted_by: String::new(),
            poster: String::new(),
            seeds: vec![seed],
            elapsed_s: 0.0,
            remaining_s: plan.for_s as f64,
            plan,
            totals: Totals::default(),
            losses: Vec::new(),
            error: None,
            mismatch: None,
            places: Places::default(),
        }
    }

    /// Of one that goes on from what a file says, with the next seed.
    pub fn resume(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path);
        let text = text.with_context(|| format!("read {}", path.display()))?;
        Self::go_on(&text).with_context(|| format!("resume from {}", path.display()))
    }

    fn go_on(text: &str) -> Result<Self> {
        let value: serde_json::Value = serde_json::from_str(text).context("that is no JSON")?;
        ensure!(
            value["command"] == COMMAND,
            "that is no report of ibgda stress"
        );
        ensure!(
            value["version"] == VERSION,
            "it is of version {}, this ibgda reads version {VERSION}",
            value["version"]
        );
        let mut report: Self =
            serde_json::from_value(value).context("that is no whole report of ibgda stress")?;
        match report.state {
            State::Running | State::Interrupted => {}
            State::Done => bail!("it has run its whole time; nothing is left"),
            State::Failed => bail!(
                "it has failed ({}); begin anew",
                report.error.as_deref().unwrap_or("no reason given")
            ),
        }
        let last = report.seeds.last().copied().context("it has no seed")?;
        // What is read is a file that anyone may have changed.
        ensure!(
            report.elapsed_s.is_finite() && report.elapsed_s >= 0.0,
            "elapsed_s is {}",
            report.elapsed_s
        );
        report.seeds.push(pattern::next_seed(last));
        report.state = State::Running;
        report.remaining_s = (report.plan.for_s as f64 - report.elapsed_s).max(0.0);
        Ok(report)
    }

    /// This run's seed.
    pub fn seed(&self) -> u64 {
        *self.seeds.last().expect("made with one")
    }

    /// Writes it, whole.
    pub fn save(&self, path: &Path) -> Result<()> {
        files::replace(path, &(serde_json::to_string_pretty(self)? + "\n"))
    }

    /// What is printed at the end.
    pub fn words(&self) -> String {
        let mut text = String::new();
        let totals = &self.totals;
        let _ = writeln!(
            text,
            "{} requests, {} in {} rounds, {:.1} s of {} s, {} runs; every byte compared",
            totals.requests,
            units::show_bytes(totals.bytes),
            totals.rounds,
            self.elapsed_s,
            self.plan.for_s,
            self.seeds.len()
        );
        let kinds: Vec<String> = totals
            .by_kind
            .iter()
            .map(|(kind, count)| format!("{count} {kind}"))
            .collect();
        let _ = writeln!(text, "{}", kinds.join(", "));
        for loss in &self.losses {
            let _ = writeln!(
                text,
                "at {:.1} s {} was lost ({}), and back after {:.1} s",
                loss.at_s, loss.nic, loss.reason, loss.recovered_after_s
            );
        }
        let end = match self.state {
            State::Running => "under way",
            State::Done => "done, no error",
            State::Interrupted => "interrupted, no error so far",
            State::Failed => "failed",
        };
        let _ = writeln!(text, "{end}; seed of this run {}", self.seed());
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let plan = Plan {
            nic: "mlx5_0".into(),
            peer_nic: "mlx5_1".into(),
            gpu: "0000:04:00.0".into(),
            route: "direct".into(),
            qps: 4,
            max_bytes: 65536,
            for_s: 100,
        };
        Report {
            state: State::Interrupted,
            elapsed_s: 30.5,
            totals: Totals {
                rounds: 3,
                requests: 300,
                bytes: 4000,
                by_kind: BTreeMap::from([("put".to_owned(), 300)]),
            },
            losses: vec![Loss {
                nic: "mlx5_1".into(),
                reason: "NIC reset".into(),
                at_s: 1.5,
                recovered_after_s: 0.75,
            }],
            ..Report::new(plan, 11)
        }
    }

    fn text(report: &Report) -> String {
        serde_json::to_string(report).expect("text")
    }

    #[test]
    fn a_run_goes_on_with_its_totals_the_rest_of_its_time_and_the_next_seed() {
        for state in [State::Interrupted, State::Running] {
            let first = Report { state, ..report() };
            let next = Report::go_on(&text(&first)).expect("it goes on");
            assert_eq!((&next.plan, &next.totals), (&first.plan, &first.totals));
            assert_eq!(next.losses, first.losses);
            assert!((next.remaining_s - 69.5).abs() < 1e-9, "{next:?}");
            assert_eq!(next.seeds, [11, pattern::next_seed(11)]);
            assert_eq!(next.state, State::Running);
            let choice = next.plan.choice().expect("as it was");
            assert_eq!(Plan::new(&choice, 4, 65536, 100), first.plan);
        }
    }

    #[test]
    fn what_cannot_go_on_says_why() {
        let with = |change: fn(&mut serde_json::Value)| {
            let mut value = serde_json::to_value(report()).expect("JSON");
            change(&mut value);
            value.to_string()
        };
        let cases = [
            ("{".to_owned(), "no JSON"),
            ("[]".to_owned(), "no report of ibgda stress"),
            (with(|v| v["command"] = "bench".into()), "no report"),
            (with(|v| v["version"] = 2.into()), "of version 2"),
            (with(|v| v["seeds"] = Vec::<u64>::new().into()), "no seed"),
            (with(|v| v["elapsed_s"] = (-1).into()), "elapsed_s is -1"),
            (with(|v| v["totals"] = 3.into()), "no whole report"),
            (with(|v| v["state"] = "done".into()), "its whole time"),
            (
                with(|v| {
                    v["state"] = "failed".into();
                    v["error"] = "a byte".into();
                }),
                "it has failed (a byte)",
            ),
        ];
        for (text, words) in cases {
            let error = Report::go_on(&text).expect_err(words);
            assert!(format!("{error:#}").contains(words), "{words}: {error:#}");
        }
        let error = Report::resume(Path::new("/nonexistent/report")).expect_err("no file");
        assert!(format!("{error:#}").contains("read /nonexistent/report"));
    }

    #[test]
    fn a_saved_report_is_the_same_when_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("report.json");
        report().save(&path).expect("saved");
        let read: Report =
            serde_json::from_str(&fs::read_to_string(&path).expect("read")).expect("whole");
        assert_eq!(read, report());
        let words = read.words();
        for part in ["300 requests", "mlx5_1 was lost (NIC reset)", "interrupted"] {
            assert!(words.contains(part), "{part}: {words}");
        }
    }
}
