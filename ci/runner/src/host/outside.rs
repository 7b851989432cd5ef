// SPDX-License-Identifier: MIT OR Apache-2.0
//! A GPU outside the guest (docs/hil.md): a port of the guest that leads to its agent, and the agent, if it is ours to start.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Result, ensure};

use super::child::{Guarded, describe};
use super::{Options, log_file, model};

/// For the agent to end once the guest's port has closed: it may have to wait for a kernel first, for two minutes.
const END: Duration = Duration::from_secs(130);
/// To end when it is told to.
const TERMINATE: Duration = Duration::from_secs(10);

/// Where the agent is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Outside {
    /// It is started here, and runs kernels on CPU threads.
    Cpu,
    /// Somebody starts one that finds `gpu.sock` and `ctl.sock` in the log directory.
    Wait,
}

/// The socket that QEMU joins the port to.
pub fn socket(options: &Options) -> Option<PathBuf> {
    options.outside_gpu.map(|outside| {
        let dir = match outside {
            Outside::Cpu => &options.run_dir,
            Outside::Wait => &options.log,
        };
        dir.join("gpu.sock")
    })
}

/// Starts the agent, which waits for the socket.
pub fn start(options: &Options) -> Result<Option<Guarded>> {
    let (Some(Outside::Cpu), Some(socket)) = (options.outside_gpu, socket(options)) else {
        return Ok(None);
    };
    let mut command = Command::new(options.model.with_file_name("ibgda-gpu-agent"));
    command
        .args(["--on", "cpu"])
        .arg("--guest")
        .arg(socket)
        .arg("--model")
        .arg(model::control(options))
        .stdin(Stdio::null())
        .stdout(log_file(&options.log, "gpu-agent.log")?)
        .stderr(log_file(&options.log, "gpu-agent.stderr")?);
    Guarded::spawn(&mut command).map(Some)
}

/// The end of the agent, which QEMU's end has told to end: an error if it ends otherwise, as one does that a kernel has
/// kept.
pub fn end(mut agent: Guarded) -> Result<()> {
    let status = agent.wait(END)?;
    if status.is_none() {
        agent.terminate(TERMINATE)?;
    }
    ensure!(
        status.is_some_and(|status| status.success()),
        "ibgda-gpu-agent: {}; see gpu-agent.stderr",
        status.map_or_else(
            || format!("still there {} s after the VM", END.as_secs()),
            describe
        )
    );
    Ok(())
}
