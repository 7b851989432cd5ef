// SPDX-License-Identifier: MIT OR Apache-2.0
//! The `connectx` program: serves modelled functions to a virtual machine, and talks to a running model.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::{Parser, Subcommand, ValueEnum};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{SigSet, Signal};
use tracing_subscriber::EnvFilter;

use connectx::bus::Bus;
use connectx::cmd::caps::Capabilities;
use connectx::ctl::{self, Model};
use connectx::explain::{self, ServiceName};
use connectx::gpu::Gpu;
use connectx::hca::{Hca, HcaConfig};
use connectx::log::{LogFile, Referee};
use connectx::objects::qp::Service;
use connectx::objects::table::Reuse;
use connectx::platform::Function;
use connectx::polling::mapped::{Poller, Threads};
use connectx::vfio::{Departure, Endpoint};
use connectx::wire::Fabric;

/// A model of ConnectX functions, and of GPUs beside them, for QEMU's vfio-user-pci.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve functions until SIGTERM comes or every client has gone.
    ///
    /// Makes DIR/nic0.sock…, DIR/gpu0.sock…, DIR/ctl.sock, DIR/connectx.log and DIR/connectx.jsonl, and prints `ready`
    /// when every socket listens. CONNECTX_LOG sets what is logged, as in `debug` or `connectx::cmd=trace`.
    Serve {
        /// ConnectX functions.
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(0..=32))]
        nics: u16,
        /// Stand-in GPUs.
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(0..=32))]
        gpus: u16,
        /// Hosts, each with so many functions and a PCI bus of its own; all ports are on one switch. Numbers go on from
        /// one host to the next: of two hosts with two NICs each the second has nic2 and nic3.
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=8))]
        hosts: u16,
        /// Give the ConnectX functions an Access Control Services capability.
        #[arg(long)]
        acs: bool,
        /// The ConnectX functions are SR-IOV virtual functions, as a guest has them that was given some.
        #[arg(long)]
        vf: bool,
        /// Folder for sockets and logs; made if it is missing.
        #[arg(long)]
        dir: PathBuf,
        /// A control socket besides DIR/ctl.sock.
        #[arg(long)]
        ctl: Option<PathBuf>,
        /// Take a general capability away, by its name in the kernel's mlx5_ifc.h: --cap bf=0. May be repeated.
        #[arg(long = "cap", value_name = "NAME=VALUE")]
        caps: Vec<String>,
        /// How the guest's stores to the UAR pages of users reach the model: each trapped, or to memory, which a thread looks
        /// at. Then processes outside the guest can store there too (connectx ctl memory).
        #[arg(long, value_enum, default_value = "trapped")]
        doorbells: Doorbells,
        /// Which freed UAR page is given out next: the newest, so that a stale use shows, or the oldest.
        #[arg(long, value_enum, default_value = "newest-first")]
        uar_reuse: ReuseName,
    },
    /// Print a dump of a device structure field by field, with what is wrong in it.
    ///
    /// The dump is hexadecimal, as the kernel's log, hexdump -C, xxd or rdma-core's messages have it. Exit status 3 if
    /// something is wrong in it.
    Explain {
        /// The structure; `list` prints those that are known.
        kind: String,
        /// Service of the queue pair that a WQE belongs to.
        #[arg(long, value_enum, default_value = "rc")]
        service: ServiceName,
        /// Print the explanation as JSON.
        #[arg(long)]
        json: bool,
        /// The dump; standard input if none is given.
        hex: Vec<String>,
    },
    /// Send a command to a running model; `connectx ctl help` lists them.
    Ctl {
        /// The model's control socket or virtio-serial port. Inside a guest the port is found by itself.
        #[arg(long)]
        socket: Option<PathBuf>,
        /// Print the answer as JSON.
        #[arg(long)]
        json: bool,
        /// Seconds to wait for the answer.
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86400))]
        timeout: u64,
        /// The command.
        command: String,
        /// Its arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Doorbells {
    Trapped,
    Mapped,
}

impl Doorbells {
    /// How many threads look at mapped ones, and how long they go on without a pause after the last. Where they would take
    /// processors from a guest of two and the model's other threads, one, and not for long.
    fn threads() -> (Threads, Duration) {
        match std::thread::available_parallelism() {
            Ok(processors) if processors.get() > 6 => (Threads::Two, Duration::from_secs(1)),
            _ => (Threads::One, Duration::from_millis(2)),
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum ReuseName {
    NewestFirst,
    OldestFirst,
}

impl From<ReuseName> for Reuse {
    fn from(name: ReuseName) -> Self {
        match name {
            ReuseName::NewestFirst => Self::NewestFirst,
            ReuseName::OldestFirst => Self::OldestFirst,
        }
    }
}

/// Exit status of `explain` when the dump breaks a rule.
const WRONG: u8 = 3;

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Serve {
            nics,
            gpus,
            hosts,
            acs,
            vf,
            dir,
            ctl,
            caps,
            doorbells,
            uar_reuse,
        } => template([acs, vf], &caps, uar_reuse.into())
            .and_then(|nic| serve([nics, gpus], hosts, &nic, doorbells, &dir, ctl))
            .map(|()| ExitCode::SUCCESS),
        Command::Explain {
            kind,
            service,
            json,
            hex,
        } => explain_dump(&kind, service.into(), json, &hex),
        Command::Ctl {
            socket,
            json,
            timeout,
            command,
            args,
        } => control(socket, json, Duration::from_secs(timeout), &command, &args),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            tracing::error!("{error:#}");
            eprintln!("connectx: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn explain_dump(
    kind: &str,
    service: Service,
    json: bool,
    words: &[String],
) -> anyhow::Result<ExitCode> {
    if kind == "list" {
        for (name, what) in explain::kinds() {
            print(&format!("{name:18} {what}\n"))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut text = words.join(" ");
    if words.is_empty() {
        std::io::stdin()
            .read_to_string(&mut text)
            .context("standard input")?;
    }
    let bytes = explain::hex::parse(&text).map_err(anyhow::Error::msg)?;
    let explanation = explain::explain(kind, service, &bytes).map_err(anyhow::Error::msg)?;
    print(&if json {
        format!("{}\n", serde_json::to_string(&explanation)?)
    } else {
        explanation.to_string()
    })?;
    Ok(if explanation.problems.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(WRONG)
    })
}

fn print(text: &str) -> anyhow::Result<()> {
    std::io::stdout()
        .write_all(text.as_bytes())
        .context("standard output")
}

fn control(
    socket: Option<PathBuf>,
    json: bool,
    timeout: Duration,
    command: &str,
    args: &[String],
) -> anyhow::Result<ExitCode> {
    let port = || Some(PathBuf::from(ctl::client::PORT)).filter(|port| port.exists());
    let path = socket
        .or_else(port)
        .context("no --socket given, and this is no guest of ci/vm")?;
    let answer = ctl::client::request(&path, command, args, timeout)?;
    let text = if json {
        format!("{answer}\n")
    } else {
        ctl::table::render(command, &answer)
    };
    print(&text).map(|()| ExitCode::SUCCESS)
}

/// What ends the model.
enum End {
    Signal(Signal),
    AllGone,
    Failed(anyhow::Error),
}

/// What all NICs have in common.
fn template([acs, vf]: [bool; 2], caps: &[String], uar_reuse: Reuse) -> anyhow::Result<HcaConfig> {
    let mut capabilities = Capabilities::new();
    for setting in caps {
        capabilities.set(setting).map_err(anyhow::Error::msg)?;
    }
    Ok(HcaConfig {
        acs,
        virtual_function: vf,
        capabilities,
        uar_reuse,
        ..HcaConfig::numbered(0)
    })
}

fn serve(
    [nics, gpus]: [u16; 2],
    hosts: u16,
    nic: &HcaConfig,
    doorbells: Doorbells,
    dir: &Path,
    ctl: Option<PathBuf>,
) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    let _lock = lock(dir)?;
    let referee = start_logs(dir)?;
    exit_on_panics_of_the_model();
    let (tell, end) = mpsc::channel();
    catch_signals(tell.clone())?;

    let fabric = Fabric::new(referee.clone());
    let poller = match doorbells {
        Doorbells::Trapped => None,
        Doorbells::Mapped => {
            let (threads, spin) = Doorbells::threads();
            Some(Poller::new(&fabric, spin, threads)?)
        }
    };
    let mut functions: Vec<Arc<dyn Function>> = Vec::new();
    let mut buses: Vec<Arc<Bus>> = Vec::new();
    for host in 0..hosts {
        for index in host * nics..(host + 1) * nics {
            let HcaConfig {
                name, lid, guid, ..
            } = HcaConfig::numbered(index.into());
            let config = HcaConfig {
                name,
                lid,
                guid,
                ..nic.clone()
            };
            let hca = Hca::new(&fabric, config);
            if let Some(poller) = &poller {
                hca.map_doorbells(poller)?;
            }
            functions.push(Arc::new(hca));
        }
        for index in host * gpus..(host + 1) * gpus {
            functions.push(Arc::new(Gpu::new(index, referee.clone())?));
        }
        // Bus addresses of one host mean nothing to another's functions.
        buses.resize_with(functions.len(), {
            let bus = Bus::new();
            move || Arc::clone(&bus)
        });
    }
    let sockets: Vec<PathBuf> = functions
        .iter()
        .map(|f| dir.join(format!("{}.sock", f.name())))
        .collect();
    let mut endpoints = Vec::new();
    for (id, (function, path)) in functions.iter().zip(&sockets).enumerate() {
        endpoints.push(Endpoint::new(
            path,
            id,
            Arc::clone(function),
            &buses[id],
            referee.clone(),
        )?);
    }
    let model = Arc::new(Model {
        devices: endpoints.iter().map(Endpoint::card).collect(),
        referee,
    });
    let control: Vec<PathBuf> = [dir.join("ctl.sock")].into_iter().chain(ctl).collect();
    for path in &control {
        connectx::vfio::remove_stale_socket(path)?;
        let listener = UnixListener::bind(path).with_context(|| path.display().to_string())?;
        let (model, failed) = (Arc::clone(&model), tell.clone());
        thread("ctl", move || {
            if let Err(error) = model.serve(&listener) {
                let _ = failed.send(End::Failed(anyhow!(error).context("control socket")));
            }
        })?;
    }
    let clients: Arc<[Arc<AtomicBool>]> = endpoints.iter().map(Endpoint::client).collect();
    for (endpoint, function) in endpoints.into_iter().zip(&functions) {
        let (name, clients, tell) = (
            function.name().to_owned(),
            Arc::clone(&clients),
            tell.clone(),
        );
        thread(&format!("vfio-{name}"), move || {
            serve_function(endpoint, &name, &clients, &tell)
        })?;
    }
    tracing::info!(
        "serving {nics} NICs and {gpus} GPUs to each of {hosts} hosts in {}",
        dir.display()
    );
    writeln!(std::io::stdout(), "ready").context("standard output")?;

    let end = end.recv().context("no thread is left")?;
    for path in sockets.iter().chain(&control) {
        let _ = std::fs::remove_file(path);
    }
    match end {
        End::Signal(signal) => tracing::info!("{signal}: ending"),
        End::AllGone => tracing::info!("every client has gone: ending"),
        End::Failed(error) => return Err(error),
    }
    Ok(())
}

/// Keeps two models from taking each other's sockets for stale ones.
fn lock(dir: &Path) -> anyhow::Result<Flock<File>> {
    let folder = File::open(dir).with_context(|| dir.display().to_string())?;
    Flock::lock(folder, FlockArg::LockExclusiveNonblock)
        .map_err(|(_, error)| anyhow!(error))
        .with_context(|| format!("another model serves in {}", dir.display()))
}

/// Serves one function to one client after another, until none of the process's functions has a client.
fn serve_function(
    mut endpoint: Endpoint,
    name: &str,
    clients: &[Arc<AtomicBool>],
    tell: &Sender<End>,
) {
    loop {
        let end = match endpoint.serve() {
            Ok(departure) => {
                match departure {
                    Departure::Closed => tracing::info!("{name}: the client has gone"),
                    Departure::Broken(why) => tracing::warn!("{name}: the client was lost: {why}"),
                }
                let all_gone = clients.iter().all(|client| !client.load(Ordering::Acquire));
                all_gone.then_some(End::AllGone)
            }
            Err(error) => Some(End::Failed(error.context(name.to_owned()))),
        };
        if let Some(end) = end {
            let _ = tell.send(end);
            return;
        }
    }
}

fn thread(name: &str, work: impl FnOnce() + Send + 'static) -> anyhow::Result<()> {
    let builder = std::thread::Builder::new().name(name.into());
    builder
        .spawn(work)
        .with_context(|| format!("thread {name}"))?;
    Ok(())
}

/// SIGTERM and SIGINT end the model; both are blocked in every thread and taken by one.
fn catch_signals(tell: Sender<End>) -> anyhow::Result<()> {
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    signals.thread_block().context("signal mask")?;
    thread("signals", move || {
        let end = match signals.wait() {
            Ok(signal) => End::Signal(signal),
            Err(error) => End::Failed(anyhow!(error).context("waiting for signals")),
        };
        let _ = tell.send(end);
    })
}

fn start_logs(dir: &Path) -> anyhow::Result<Referee> {
    let path = dir.join("connectx.log");
    let file = LogFile::create(&path).with_context(|| path.display().to_string())?;
    let filter = EnvFilter::builder()
        .with_env_var("CONNECTX_LOG")
        .with_default_directive(tracing::Level::INFO.into())
        .from_env()
        .context("CONNECTX_LOG")?;
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_writer(Mutex::new(file));
    logs.try_init().map_err(|error| anyhow!("{error}"))?;
    let path = dir.join("connectx.jsonl");
    Referee::to_file(&path).with_context(|| path.display().to_string())
}

/// A panic is a bug of the model; going on with half of it would only hide where. The threads that serve functions
/// report their own, since there a panic may also be the protocol crate's answer to a malformed message.
fn exit_on_panics_of_the_model() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tracing::error!("{panic}");
        let serving = std::thread::current()
            .name()
            .is_some_and(|name| name.starts_with("vfio-"));
        if !serving {
            report(panic);
            std::process::exit(101);
        }
    }));
}
