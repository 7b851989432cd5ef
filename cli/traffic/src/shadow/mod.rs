// SPDX-License-Identifier: MIT OR Apache-2.0
//! `ibgda shadow`: the same requests by the CPU's path and by the GPU's, side by side.

mod compare;
mod verbs;

use crate::{
    choice, files, pattern,
    picture::{self, Panel, Series},
    poster::{On, Poster},
    progress,
    stats::{self, Bucket, Summary},
    stop::Stop,
    units,
};
use anyhow::{Context as _, Result, bail, ensure};
use compare::{Kind, Lanes};
use ibgda::Route;
use ibgda_cli::{machine::Machine, output::print, root::Root};
use serde::Serialize;
use std::{
    collections::BTreeMap, fmt::Write as _, path::PathBuf, process::ExitCode, time::Duration,
};

/// Send each request twice between the same two NICs: by the CPU's path, an ordinary queue pair of libibverbs, and by
/// the GPU's, a queue pair of libibgda and the device header. Compare the data byte for byte, and the two distributions
/// of latencies.
///
/// The requests are random: writes, inline writes, reads and 64-bit atomics. They take turns in one run, now the one
/// path first and now the other, so that what slows the machine slows both. Exit status 1 if a byte differs or a
/// request fails.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    choice: choice::Arguments,
    /// Where the kernel of the GPU's path is to run.
    #[arg(long, value_enum, default_value_t = On::Auto)]
    on: On,
    /// Requests by each path.
    #[arg(long, value_name = "N", default_value_t = 1000,
        value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    count: u64,
    /// Length of the longest message, 8 bytes to 16 MiB.
    #[arg(long, value_name = "BYTES", default_value = "4K", value_parser = units::bytes)]
    max_size: u64,
    /// Where the random requests begin; the output has it, so that a run can be repeated.
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// How long a request may take.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = units::time)]
    timeout: Duration,
    /// Also draw both distributions.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Lane {
    #[serde(flatten)]
    summary: Summary,
    histogram: Vec<Bucket>,
}

/// The GPU's path over the CPU's.
#[derive(Serialize)]
struct Ratio {
    min: f64,
    median: f64,
    p90: f64,
    p99: f64,
    p999: f64,
    max: f64,
}

impl Ratio {
    fn of(gpu: &Summary, cpu: &Summary) -> Self {
        let [gpu, cpu] = [gpu.values(), cpu.values()];
        let of = |at: usize| gpu[at] as f64 / cpu[at].max(1) as f64;
        Self {
            min: of(0),
            median: of(1),
            p90: of(2),
            p99: of(3),
            p999: of(4),
            max: of(5),
        }
    }

    fn values(&self) -> [f64; 6] {
        [
            self.min,
            self.median,
            self.p90,
            self.p99,
            self.p999,
            self.max,
        ]
    }
}

#[derive(Serialize)]
struct Document {
    version: u32,
    command: &'static str,
    nic: String,
    peer_nic: String,
    route: &'static str,
    posted_by: &'static str,
    poster: String,
    seed: u64,
    interrupted: bool,
    requests: BTreeMap<&'static str, u64>,
    compared_bytes: u64,
    cpu: Lane,
    gpu: Lane,
    ratio: Ratio,
}

/// Runs it.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    ensure!(
        (8..=16 << 20).contains(&arguments.max_size),
        "--max-size is {}; 8 bytes to 16 MiB are possible",
        units::show_bytes(arguments.max_size)
    );
    if let Some(path) = &arguments.svg {
        files::check(path)?;
    }
    let choice = arguments.choice.choose(&Machine::read(&Root::new("/")))?;
    if choice.route == Route::Loopback {
        bail!(
            "shadow compares with libibverbs, which needs a NIC{}; the loopback route has none",
            choice
                .note
                .map_or_else(String::new, |note| format!(" ({note})"))
        );
    }
    let stop = Stop::on_signals()?;
    let mut lanes = Lanes::open(&choice, arguments.max_size, arguments.timeout)?;
    let poster = Poster::choose(arguments.on, Some(choice.gpu), lanes.qp())?;
    let seed = arguments.seed.unwrap_or_else(pattern::random_seed);
    eprintln!(
        "shadow: {} to {}, route {}, seed {seed}; the GPU's path is posted by {poster}\n{}",
        lanes.names()[0],
        lanes.names()[1],
        lanes.route().name(),
        lanes.places()
    );
    let bar = progress::line(arguments.count, progress::REQUESTS);
    bar.set_message("requests by each path");
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut times, mut requests) = ([Vec::new(), Vec::new()], BTreeMap::new());
    for number in 0..arguments.count {
        if stop.asked() {
            break;
        }
        let request = lanes.plan(&mut random);
        let [cpu, gpu] = lanes
            .send_both(&poster, &request, number % 2 == 0)
            .and_then(|times| {
                lanes.check(&request)?;
                Ok(times)
            })
            .with_context(|| format!("request {number} ({request}), seed {seed}"))?;
        times[0].push(cpu);
        times[1].push(gpu);
        *requests.entry(request.kind.name()).or_insert(0) += 1;
        bar.inc(1);
    }
    lanes
        .check_all()
        .with_context(|| format!("at the end, seed {seed}"))?;
    bar.finish_and_clear();
    for lane in &mut times {
        lane.sort_unstable();
    }
    let (Some(cpu), Some(gpu)) = (Summary::of(&times[0]), Summary::of(&times[1])) else {
        bail!("interrupted before anything was measured");
    };
    let [cpu_buckets, gpu_buckets] = stats::common_buckets([&times[0], &times[1]]);
    let [nic, peer_nic] = lanes.names().map(str::to_owned);
    let document = Document {
        version: 1,
        command: "shadow",
        nic,
        peer_nic,
        route: lanes.route().name(),
        posted_by: poster.name(),
        poster: poster.to_string(),
        seed,
        interrupted: stop.asked(),
        requests,
        compared_bytes: lanes.compared(),
        ratio: Ratio::of(&gpu, &cpu),
        cpu: Lane {
            summary: cpu,
            histogram: cpu_buckets,
        },
        gpu: Lane {
            summary: gpu,
            histogram: gpu_buckets,
        },
    };
    print(&if arguments.json {
        serde_json::to_string_pretty(&document)? + "\n"
    } else {
        words(&document)
    })?;
    if let Some(path) = &arguments.svg {
        files::replace(path, &picture::svg(&[panel(&document)])?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn words(document: &Document) -> String {
    let mut text = format!("path  {}\n", stats::HEADER);
    for (name, lane) in [("CPU", &document.cpu), ("GPU", &document.gpu)] {
        let _ = writeln!(text, "{name:<6}{}", lane.summary.columns());
    }
    let _ = write!(text, "GPU over CPU    ");
    for ratio in document.ratio.values() {
        let _ = write!(text, "{ratio:>10.2}");
    }
    text.push('\n');
    for (name, lane) in [("CPU", &document.cpu), ("GPU", &document.gpu)] {
        let _ = write!(text, "\n{name}'s path:\n{}", stats::bars(&lane.histogram));
    }
    let requests: Vec<String> = document
        .requests
        .iter()
        .map(|(kind, count)| format!("{count} {kind}"))
        .collect();
    let _ = writeln!(
        text,
        "\n{}by each path {}; {} compared, all equal",
        if document.interrupted {
            "interrupted; "
        } else {
            ""
        },
        requests.join(", "),
        units::show_bytes(document.compared_bytes)
    );
    text
}

fn panel(document: &Document) -> Panel<'_> {
    let name = |path: &str, lane: &Lane| {
        format!("{path}, median {}", units::show_ns(lane.summary.median_ns))
    };
    Panel::Latencies {
        title: format!(
            "{} to {}: the CPU's path, and route {} by the {}",
            document.nic,
            document.peer_nic,
            document.route,
            document.posted_by.to_uppercase()
        ),
        series: vec![
            Series {
                name: name("CPU's path", &document.cpu),
                buckets: &document.cpu.histogram,
            },
            Series {
                name: name("GPU's path", &document.gpu),
                buckets: &document.gpu.histogram,
            },
        ],
    }
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Write => "writes",
            Self::WriteInline => "inline writes",
            Self::Read => "reads",
            Self::FetchAdd => "fetch-and-adds",
            Self::CompareSwap => "compare-and-swaps",
        }
    }
}
