// SPDX-License-Identifier: MIT OR Apache-2.0
//! The host's side: starts the model and QEMU, talks to the guest's agent, and says how it all ended.

mod child;
mod guest;
mod model;
mod outcome;
mod outside;
mod problems;
mod qemu;
mod session;
mod streams;
mod vm;

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};

pub use outcome::Outcome;
pub use outside::Outside;

/// What to boot and what to run. All paths are those inside the root file system.
#[derive(Debug, clap::Parser)]
pub struct Options {
    /// NIC functions.
    #[arg(long)]
    pub nics: usize,
    /// Stand-in GPU functions.
    #[arg(long)]
    pub gpus: usize,
    /// Put each GPU below a root port of its own, not below the NICs' switch.
    #[arg(long)]
    pub split: bool,
    /// Give the guest an IOMMU that all devices are behind.
    #[arg(long)]
    pub iommu: bool,
    /// Take a capability away from the NICs: NAME=VALUE.
    #[arg(long = "cap")]
    pub caps: Vec<String>,
    /// The NICs are functions of one device, below a root port of its own.
    #[arg(long)]
    pub card: bool,
    /// The NICs have no Access Control Services, IOMMU or not.
    #[arg(long)]
    pub no_acs: bool,
    /// Doorbell pages of users are mapped into the guest, and not trapped.
    #[arg(long)]
    pub mapped_doorbells: bool,
    /// The guest has a port to the agent of a GPU outside it. Doorbell pages are mapped.
    #[arg(long, value_enum)]
    pub outside_gpu: Option<Outside>,
    /// The NICs are SR-IOV virtual functions.
    #[arg(long)]
    pub vf: bool,
    /// Load ibgda.ko in the guest.
    #[arg(long)]
    pub module: bool,
    /// The guest's kernel.
    #[arg(long)]
    pub kernel: PathBuf,
    /// Its initial root, which mounts the real one.
    #[arg(long)]
    pub initramfs: PathBuf,
    /// More for its command line.
    #[arg(long, default_value = "")]
    pub append: String,
    /// The model's program.
    #[arg(long)]
    pub model: PathBuf,
    /// A directory for the guest to read and write.
    #[arg(long)]
    pub share: Option<PathBuf>,
    /// How long the command may run.
    #[arg(long, value_parser = seconds)]
    pub timeout: Duration,
    /// Where logs are written.
    #[arg(long)]
    pub log: PathBuf,
    /// What the user knows the log directory as; nothing if it goes away.
    #[arg(long)]
    pub log_name: Option<String>,
    /// For sockets; must be empty.
    #[arg(long)]
    pub run_dir: PathBuf,
    /// Boot a second guest and run this there, by the shell.
    #[arg(long)]
    pub peer: Option<OsString>,
    /// How long the command waits for the second guest's to listen on a TCP port.
    #[arg(long, value_parser = seconds, default_value = "10")]
    pub peer_wait: Duration,
    /// The command and its arguments.
    #[arg(last = true, required = true)]
    pub command: Vec<OsString>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    text.parse()
        .map(Duration::from_secs)
        .map_err(|error| error.to_string())
}

/// A new log file.
fn log_file(dir: &Path, name: &str) -> Result<File> {
    let path = dir.join(name);
    File::create(&path).with_context(|| format!("making {}", path.display()))
}

/// Runs it all, says on standard error what went wrong if anything did, and returns the exit status.
pub fn run(options: &Options) -> ExitCode {
    let vms = vm::Vm::all(options);
    let (vm, outcome) =
        session::run(&vms).unwrap_or_else(|error| (0, Outcome::Harness(format!("{error:#}"))));
    outcome.explain(&vms[vm]);
    problems::report(&vms);
    ExitCode::from(outcome.status())
}
