// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs the command, with its output streamed.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, wait};
use nix::unistd::Pid;

use super::pci::Devices;
use crate::protocol::{PEERS, STAGE, Start};

/// The project's own programs come first.
pub const PATH: &str =
    "/opt/ibgda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How the command ended.
pub struct Ended {
    /// Its exit status, or 128 plus the signal.
    pub status: i32,
    /// Bytes it wrote to standard output.
    pub stdout: u64,
    /// Bytes it wrote to standard error.
    pub stderr: u64,
}

/// Runs the command to its end, and then ends every process it left behind.
pub fn run(start: &Start, devices: &Devices, stdout: File, stderr: File) -> Result<Ended> {
    let argv = start.argv.split_first();
    let (program, arguments) = argv.context("there is no command to run")?;
    let other = start.peer.map(|index| PEERS[1 - index.min(1)].name);
    let mut child = Command::new(OsStr::from_bytes(program))
        .args(arguments.iter().map(|argument| OsStr::from_bytes(argument)))
        .env_clear()
        .envs([
            ("PATH", PATH),
            ("HOME", "/root"),
            ("USER", "root"),
            ("LANG", "C.UTF-8"),
            ("TERM", "dumb"),
        ])
        .env("LD_LIBRARY_PATH", format!("{STAGE}/lib"))
        .env("IBGDA_NICS", devices.nics.join(" "))
        .env("IBGDA_GPUS", devices.gpus.join(" "))
        .envs(other.map(|name| ("IBGDA_PEER", name)))
        .current_dir("/root")
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("{}", String::from_utf8_lossy(program)))?;
    let stdout = copy(child.stdout.take().expect("stdout is piped"), stdout);
    let stderr = copy(child.stderr.take().expect("stderr is piped"), stderr);
    let status = wait_for(Pid::from_raw(child.id() as i32))?;
    // The streams end when the last process that holds them does.
    let _ = kill(Pid::from_raw(-1), Signal::SIGKILL);
    Ok(Ended {
        status,
        stdout: join(stdout),
        stderr: join(stderr),
    })
}

/// Waits for one child, and reaps the orphans that the first process inherits meanwhile.
fn wait_for(command: Pid) -> Result<i32> {
    loop {
        match wait() {
            Ok(WaitStatus::Exited(pid, status)) if pid == command => return Ok(status),
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == command => {
                return Ok(128 + signal as i32);
            }
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error).context("waiting for the command"),
        }
    }
}

fn copy(mut from: impl Read + Send + 'static, mut to: File) -> JoinHandle<u64> {
    thread::spawn(move || {
        let mut buffer = vec![0; 64 * 1024];
        let mut copied = 0;
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            if to.write_all(&buffer[..length]).is_err() {
                break;
            }
            copied += length as u64;
        }
        copied
    })
}

fn join(copier: JoinHandle<u64>) -> u64 {
    copier.join().unwrap_or(0)
}
