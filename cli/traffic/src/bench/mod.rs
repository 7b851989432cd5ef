// SPDX-License-Identifier: MIT OR Apache-2.0
//! `ibgda bench`: latency and message rate of RDMA WRITEs.

mod measure;
mod report;
mod target;
mod tcp;

use crate::{
    choice::{self, Choice},
    ends::{self, DEPTH, End},
    files, pattern, picture,
    poster::{On, Poster},
    progress,
    stop::Stop,
    units,
};
use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;
use ibgda::Route;
use ibgda_cli::{machine::Machine, output::print, root::Root};
use measure::{Peer, Run};
use report::{Document, LatencyRow, RateRow};
use std::{path::PathBuf, process::ExitCode, time::Duration};
use target::Target;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// The time from the post of one WRITE to its completion.
    Latency,
    /// WRITEs a second, many under way.
    Rate,
}

/// Measure RDMA WRITEs: how long one takes, and how many go through a second. Every byte that arrives is compared.
///
/// Between two NICs of this host, or one and itself; or between two hosts: one listens, the other connects and posts.
/// The kernel that posts runs on the GPU if CUDA shows it and NVIDIA's driver lets it have the doorbell, else on CPU
/// threads that stand in for it; the output says which.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// What to measure; without it both.
    #[arg(value_enum)]
    what: Option<What>,
    #[command(flatten)]
    choice: choice::Arguments,
    /// Where the kernel that posts is to run.
    #[arg(long, value_enum, default_value_t = On::Auto)]
    on: On,
    /// Message lengths, with commas between: 8, 64K, 1M. By default 8 bytes for latency, and for rate 8 bytes to 64
    /// KiB.
    #[arg(long, value_name = "BYTES", value_delimiter = ',', value_parser = units::bytes)]
    size: Vec<u64>,
    /// Messages of each length.
    #[arg(long, value_name = "N", default_value_t = 10_000,
        value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    count: u64,
    /// For rate: queue pairs that post at the same time.
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u64).range(1..=tcp::MOST_QPS as u64))]
    qps: u64,
    /// For rate: messages for each doorbell.
    #[arg(long, value_name = "N", default_value_t = 16,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(DEPTH / 2)))]
    batch: u32,
    /// Memory at each end that messages go from and to.
    #[arg(long, value_name = "BYTES", default_value = "16M", value_parser = units::bytes)]
    memory: u64,
    /// Where the random data begins; the output has it, so that a run can be repeated.
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// Be the end that is written to, for one peer that connects to this TCP port; 0 takes a free one and says which.
    /// There is no password: for networks that you trust.
    #[arg(long, value_name = "PORT", conflicts_with_all = ["connect", "peer_nic", "what"])]
    listen: Option<u16>,
    /// Write to the host that listens there.
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "peer_nic")]
    connect: Option<String>,
    /// How long to wait for the other host, at each step.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = units::time)]
    wait: Duration,
    /// How long a request may take.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = units::time)]
    timeout: Duration,
    /// Also draw it.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Lengths for rate if none are given.
const RATE_SIZES: [u64; 7] = [8, 64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10];
/// Longest message of one work request (`IBGDA_MAX_MESSAGE_BYTES`).
const MOST_BYTES: u64 = 1 << 30;
const MOST_MEMORY: u64 = 4 << 30;

impl Arguments {
    fn check(&self) -> Result<()> {
        ensure!(
            (4096..=MOST_MEMORY).contains(&self.memory),
            "--memory is {}; 4 KiB to 4 GiB are possible",
            units::show_bytes(self.memory)
        );
        for &size in &self.size {
            ensure!(
                (1..=MOST_BYTES).contains(&size),
                "--size {size}: 1 byte to 1 GiB are possible"
            );
            ensure!(
                size <= self.memory,
                "--size {}: more than --memory, which is {}",
                units::show_bytes(size),
                units::show_bytes(self.memory)
            );
        }
        if let Some(path) = &self.svg {
            files::check(path)?;
        }
        Ok(())
    }

    fn sizes(&self, default: &[u64]) -> Vec<u64> {
        if self.size.is_empty() {
            let fits = default.iter().filter(|&&size| size <= self.memory);
            fits.copied().collect()
        } else {
            self.size.clone()
        }
    }

    fn wants(&self, what: What) -> bool {
        self.what.is_none_or(|asked| asked == what)
    }
}

/// Runs it.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    arguments.check()?;
    let choice = arguments.choice.choose(&Machine::read(&Root::new("/")))?;
    let two_hosts = arguments.listen.is_some() || arguments.connect.is_some();
    ensure!(
        !two_hosts || choice.route != Route::Loopback,
        "the loopback route does not leave this process: --listen and --connect need a NIC (--nic)"
    );
    let stop = Stop::on_signals()?;
    match arguments.listen {
        Some(port) => listen(arguments, &choice, port, &stop),
        None => post(arguments, &choice, &stop),
    }
}

fn listen(arguments: &Arguments, choice: &Choice, port: u16, stop: &Stop) -> Result<ExitCode> {
    let served = tcp::serve(
        port,
        arguments.wait,
        stop,
        |port| {
            eprintln!(
                "listening on TCP port {port} for {} s",
                arguments.wait.as_secs()
            );
            Ok(())
        },
        |memory, qps, timeout| tcp::open_target(choice, memory, qps, timeout),
    )?;
    print(&if arguments.json {
        let document =
            serde_json::json!({ "version": 1, "command": "bench --listen", "served": served });
        serde_json::to_string_pretty(&document)? + "\n"
    } else {
        format!(
            "{} has written {} in {} rounds, every byte as it should be\n",
            served.peer,
            units::show_bytes(served.bytes),
            served.checks
        )
    })?;
    Ok(ExitCode::SUCCESS)
}

fn post(arguments: &Arguments, choice: &Choice, stop: &Stop) -> Result<ExitCode> {
    let options = ends::options(0, arguments.timeout);
    let qps = if arguments.wants(What::Rate) {
        arguments.qps as usize
    } else {
        1
    };
    let open = |nic| End::open(choice, nic, arguments.memory, qps, &options);
    let mut near = open(&choice.nic).with_context(|| format!("NIC {}", choice.nic))?;
    let mut peer = match &arguments.connect {
        None => {
            let far = open(&choice.peer_nic).with_context(|| format!("NIC {}", choice.peer_nic))?;
            ends::join(&near, &far)?;
            Peer::Here(Target::new(far))
        }
        Some(to) => Peer::There(tcp::Client::connect(
            to,
            &near,
            arguments.wait,
            arguments.timeout,
            stop,
        )?),
    };
    let gpu = (choice.route != Route::Loopback).then_some(choice.gpu);
    let poster = Poster::choose(arguments.on, gpu, &near.qps[0])?;
    let mut document = Document {
        version: 1,
        command: "bench",
        nic: near.context.device_name().to_owned(),
        peer_nic: match &peer {
            Peer::Here(target) => target.end.context.device_name().to_owned(),
            Peer::There(client) => client.nic.clone(),
        },
        route: near.context.route().name(),
        posted_by: poster.name(),
        poster: poster.to_string(),
        note: choice.note,
        seed: arguments.seed.unwrap_or_else(pattern::random_seed),
        verified_bytes: 0,
        interrupted: false,
        latency: Vec::new(),
        rate: Vec::new(),
    };
    if !arguments.json {
        print(&document.heading())?;
    }
    let measured = measure(
        arguments,
        &mut document,
        &mut near,
        &mut peer,
        &poster,
        stop,
    );
    if let Peer::There(client) = peer {
        client.bye(&measured);
    }
    measured?;
    document.interrupted = stop.asked();
    if document.interrupted && document.latency.is_empty() && document.rate.is_empty() {
        bail!("interrupted before anything was measured");
    }
    print(&if arguments.json {
        serde_json::to_string_pretty(&document)? + "\n"
    } else {
        document.words()
    })?;
    if let Some(path) = &arguments.svg {
        files::replace(path, &picture::svg(&document.panels())?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(
    arguments: &Arguments,
    document: &mut Document,
    near: &mut End,
    peer: &mut Peer,
    poster: &Poster,
    stop: &Stop,
) -> Result<()> {
    let bar = progress::line(0, progress::REQUESTS);
    let mut run = Run {
        near,
        peer,
        poster,
        timeout: arguments.timeout,
        stop,
        bar: &bar,
        seed: document.seed,
        verified: 0,
    };
    let begin = |what: &str, bytes: u64| {
        bar.reset();
        bar.set_length(arguments.count);
        bar.set_message(format!("{what}, {}", units::show_bytes(bytes)));
    };
    let mut begun = false;
    // What was begun is told; nothing more is begun after Ctrl-C.
    let mut goes_on = || !std::mem::replace(&mut begun, true) || !stop.asked();
    if arguments.wants(What::Latency) {
        for bytes in arguments.sizes(&[8]) {
            if !goes_on() {
                break;
            }
            begin("latency", bytes);
            let times = run.latency(bytes, arguments.count)?;
            document.latency.extend(LatencyRow::of(bytes, &times));
        }
    }
    if arguments.wants(What::Rate) {
        for bytes in arguments.sizes(&RATE_SIZES) {
            if !goes_on() {
                break;
            }
            begin("rate", bytes);
            let rate = run.rate(bytes, arguments.count, arguments.batch)?;
            document.rate.extend(RateRow::of(
                bytes,
                run.near.qps.len() as u64,
                arguments.batch,
                rate,
            ));
        }
    }
    document.verified_bytes = run.verified;
    bar.finish_and_clear();
    Ok(())
}
