// SPDX-License-Identifier: MIT OR Apache-2.0
//! `ibgda stress`: random requests for hours, with every byte compared.

mod pair;
mod report;
mod round;

use crate::{
    choice::{self, Choice},
    files, pattern,
    poster::On,
    progress,
    stop::Stop,
    units,
};
use anyhow::{Result, anyhow, ensure};
use ibgda_cli::{machine::Machine, output::print, root::Root};
use indicatif::ProgressBar;
use pair::{Outcome, Pair, Settings};
use report::{Loss, Plan, Report, State};
use round::{Layout, Round};
use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

/// The line on a terminal.
pub const PROGRESS: &str = "[{bar:30}] {eta} left, {msg}";

/// Send random requests for seconds or hours: puts, inline puts, puts with a signal, gets, atomics and sends of random
/// lengths on several queue pairs at the same time. After each round every byte of the memory at both ends is compared
/// with what it should be.
///
/// A NIC that is reset or taken away is waited for: the loss is counted, with the time until traffic went on. The
/// report can be read at any time, and a run that was interrupted goes on from it. Exit status 1 at the first byte that
/// is wrong, and the first request that fails without the loss of a NIC.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    choice: choice::Arguments,
    /// Where the kernels that post are to run.
    #[arg(long, value_enum, default_value_t = On::Auto)]
    on: On,
    /// How long, as 30s, 5m or 2h; when resumed, all runs together.
    #[arg(long = "for", value_name = "TIME", default_value = "1m", value_parser = units::time)]
    time: Duration,
    /// Queue pairs.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=64))]
    qps: u64,
    /// Length of the longest message, 8 bytes to 16 MiB.
    #[arg(long, value_name = "BYTES", default_value = "16K", value_parser = units::bytes)]
    max_size: u64,
    /// Where the random requests begin; the report has it, so that a run can be repeated.
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// Keep a report in this file, as JSON.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// How often the report is written.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = units::time)]
    report_every: Duration,
    /// Go on with the run of this report: the same NICs, sizes and totals, the rest of its time, the next seed. The
    /// report is kept in the same file.
    #[arg(long, value_name = "FILE",
        conflicts_with_all = ["nic", "peer_nic", "gpu", "route", "time", "qps", "max_size", "seed", "report"])]
    resume: Option<PathBuf>,
    /// The loss of a NIC is a failure.
    #[arg(long)]
    fail_on_loss: bool,
    /// How long a lost NIC is waited for.
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = units::time)]
    recover: Duration,
    /// How long a request may take.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = units::time)]
    timeout: Duration,
    /// Print the report at the end.
    #[arg(long)]
    json: bool,
}

/// Runs it.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let (choice, mut report) = begin(arguments)?;
    let path = arguments.resume.as_ref().or(arguments.report.as_ref());
    if let Some(path) = path {
        files::check(path)?;
    }
    let stop = Stop::on_signals()?;
    let failed = Run {
        arguments,
        choice: &choice,
        path: path.map(PathBuf::as_path),
        report: &mut report,
        stop: &stop,
    }
    .go();
    if let Err(error) = &failed {
        report.state = State::Failed;
        report.error = Some(format!("{error:#}"));
    }
    let saved = path.map_or(Ok(()), |path| report.save(path));
    let printed = print(&if arguments.json {
        serde_json::to_string_pretty(&report)? + "\n"
    } else {
        report.words()
    });
    // What went wrong with the NIC first: neither a full disk nor a reader that is gone may hide it.
    failed?;
    saved?;
    printed?;
    Ok(ExitCode::SUCCESS)
}

/// What is to be done, from the options or from a report.
fn begin(arguments: &Arguments) -> Result<(Choice, Report)> {
    if let Some(path) = &arguments.resume {
        let report = Report::resume(path)?;
        check(report.plan.qps as u64, report.plan.max_bytes)?;
        return Ok((report.plan.choice()?, report));
    }
    check(arguments.qps, arguments.max_size)?;
    let choice = arguments.choice.choose(&Machine::read(&Root::new("/")))?;
    let plan = Plan::new(
        &choice,
        arguments.qps as usize,
        arguments.max_size,
        arguments.time.as_secs(),
    );
    let seed = arguments.seed.unwrap_or_else(pattern::random_seed);
    Ok((choice, Report::new(plan, seed)))
}

fn check(qps: u64, max_size: u64) -> Result<()> {
    ensure!(
        (8..=16 << 20).contains(&max_size),
        "--max-size is {}; 8 bytes to 16 MiB are possible",
        units::show_bytes(max_size)
    );
    ensure!(
        (1..=64).contains(&qps),
        "{qps} queue pairs; 1 to 64 are possible"
    );
    Ok(())
}

struct Run<'a> {
    arguments: &'a Arguments,
    choice: &'a Choice,
    path: Option<&'a Path>,
    report: &'a mut Report,
    stop: &'a Stop,
}

/// A loss that no good round has followed yet.
struct Pending {
    nics: Vec<pair::Lost>,
    at_s: f64,
    noticed: Instant,
}

impl Run<'_> {
    /// Until the time is over, Ctrl-C, or an error.
    fn go(&mut self) -> Result<()> {
        let settings = Settings {
            on: self.arguments.on,
            qps: self.report.plan.qps,
            layout: Layout::new(self.report.plan.max_bytes),
            timeout: self.arguments.timeout,
        };
        let mut pair = Pair::open(self.choice, settings)?;
        let mut rounds: Vec<Round> = (0..settings.qps)
            .map(|index| Round::new(settings.layout, index))
            .collect();
        self.report.posted_by = pair.poster.name().to_owned();
        self.report.poster = pair.poster.to_string();
        self.heading(&pair);
        let (start, before) = (Instant::now(), self.report.elapsed_s);
        let bar = progress::line(self.report.plan.for_s, PROGRESS);
        let mut random = fastrand::Rng::with_seed(self.report.seed());
        let mut pending: Option<Pending> = None;
        let mut saved: Option<Instant> = None;
        loop {
            self.report.elapsed_s = before + start.elapsed().as_secs_f64();
            let for_s = self.report.plan.for_s as f64;
            self.report.remaining_s = (for_s - self.report.elapsed_s).max(0.0);
            self.report.places = pair.places();
            self.show(&bar);
            let over = self.report.remaining_s <= 0.0;
            if over || self.stop.asked() {
                self.report.state = if over {
                    State::Done
                } else {
                    State::Interrupted
                };
                bar.finish_and_clear();
                return match pending {
                    None => Ok(()),
                    Some(pending) => Err(pair::loss_as_error(
                        &pending.nics,
                        "and the time was over before traffic went on",
                    )),
                };
            }
            if saved.is_none_or(|saved| saved.elapsed() >= self.arguments.report_every) {
                self.save();
                saved = Some(Instant::now());
            }
            match pair.round(&mut random, &mut rounds) {
                Ok(Outcome::Good) => {
                    self.count(&rounds);
                    if let Some(pending) = pending.take() {
                        self.note(&pending);
                        saved = None;
                    }
                }
                Ok(Outcome::Wrong(wrong)) => {
                    let error = anyhow!("wrong data: {}", wrong.words());
                    self.report.mismatch = Some(*wrong);
                    return Err(error.context(format!("seed {}", self.report.seed())));
                }
                Ok(Outcome::Failed(why)) => {
                    (pair, pending) = self.survive(pair, pending, &why)?;
                }
                // Of posting, as on a NIC that goes away meanwhile.
                Err(error) => {
                    (pair, pending) = self.survive(pair, pending, &format!("{error:#}"))?;
                }
            }
        }
    }

    /// A request failed: if a NIC was lost, that is why, and it is waited for.
    fn survive(
        &mut self,
        pair: Pair,
        pending: Option<Pending>,
        why: &str,
    ) -> Result<(Pair, Option<Pending>)> {
        let noticed = Instant::now();
        let nics = pair.lost();
        ensure!(!nics.is_empty(), "seed {}: {why}", self.report.seed());
        if self.arguments.fail_on_loss {
            return Err(pair::loss_as_error(&nics, "--fail-on-loss was given"));
        }
        let pair = pair.recover(self.choice, self.arguments.recover, self.stop)?;
        // One that follows another before traffic went on is the same.
        let pending = pending.unwrap_or(Pending {
            nics,
            at_s: self.report.elapsed_s,
            noticed,
        });
        Ok((pair, Some(pending)))
    }

    fn note(&mut self, pending: &Pending) {
        for lost in &pending.nics {
            self.report.losses.push(Loss {
                nic: lost.nic.clone(),
                reason: lost.reason.to_owned(),
                at_s: pending.at_s,
                recovered_after_s: pending.noticed.elapsed().as_secs_f64(),
            });
        }
    }

    fn count(&mut self, rounds: &[Round]) {
        let totals = &mut self.report.totals;
        totals.rounds += 1;
        for round in rounds {
            totals.requests += round.requests.len() as u64;
            totals.bytes += round.bytes;
            for kind in round.kinds() {
                *totals.by_kind.entry(kind.to_owned()).or_default() += 1;
            }
        }
    }

    fn heading(&self, pair: &Pair) {
        let (near, far, route) = pair.names();
        let places = pair.places();
        eprintln!(
            "stress: {near} to {far}, route {route}, {} queue pairs, {} s left, seed {}; posted by {}\n\
             memory: {} bytes at {:#x} near, {} bytes at {:#x} far",
            self.report.plan.qps,
            self.report.remaining_s.round(),
            self.report.seed(),
            pair.poster,
            places.near_bytes,
            places.near,
            places.far_bytes,
            places.far
        );
    }

    fn show(&self, bar: &ProgressBar) {
        let totals = &self.report.totals;
        bar.set_position(self.report.elapsed_s as u64);
        bar.set_message(format!(
            "{} requests, {}, {} losses, 0 errors",
            units::show_count(totals.requests as f64),
            units::show_bytes(totals.bytes),
            self.report.losses.len()
        ));
    }

    /// A report that cannot be written now is no reason to end: the last one is, in `run`.
    fn save(&self) {
        if let Some(Err(error)) = self.path.map(|path| self.report.save(path)) {
            eprintln!("ibgda: the report: {error:#}");
        }
    }
}
