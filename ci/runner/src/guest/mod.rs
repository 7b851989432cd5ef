// SPDX-License-Identifier: MIT OR Apache-2.0
//! The guest's side.

mod command;
mod kernel_log;
mod leaks;
mod mounts;
mod network;
mod pci;
mod ports;
mod ready;

use std::fs::{self, File};
use std::io::BufReader;
use std::sync::Arc;
use std::thread;

use anyhow::{Context, Result, bail};

use crate::protocol::{Report, Request, Start, port, receive, send};
use kernel_log::KernelLog;

/// Runs as the guest's first process. It never returns: the host ends the guest, and if it does not, the kernel panics
/// when this process ends, which the host sees too.
pub fn run() -> ! {
    if let Err(error) = serve() {
        // There may be no port to say it on; the console always is.
        eprintln!("ibgda-vm-agent: {error:#}");
        let _ = fs::write("/dev/kmsg", format!("ibgda-vm-agent: {error:#}\n"));
        std::process::exit(1);
    }
    loop {
        thread::park();
    }
}

fn serve() -> Result<()> {
    mounts::base()?;
    ports::link_all(&[port::CONTROL, port::STDOUT, port::STDERR, port::KERNEL])?;
    let mut control = ports::open(port::CONTROL)?;
    let mut requests = BufReader::new(control.try_clone()?);
    send(&mut control, &Report::Booted)?;
    let kernel_log = KernelLog::stream(ports::open(port::KERNEL)?)?;

    let start = match receive(&mut requests)? {
        Some(Request::Start(start)) => start,
        other => bail!("the host's first request is {other:?}, not the command to run"),
    };
    let devices = match ready::prepare(&start) {
        Ok(devices) => devices,
        Err(error) => {
            kernel_log.flush();
            send(&mut control, &Report::Failed(format!("{error:#}")))?;
            return Ok(());
        }
    };
    send(&mut control, &Report::Ready)?;
    match receive(&mut requests)? {
        Some(Request::Run) => {}
        other => bail!("the host's second request is {other:?}, not to run the command"),
    }
    thread::spawn(move || obey(requests));
    if start.peer.is_some() {
        tell_when_listening(control.try_clone()?);
    }
    ready::note("the command starts");
    let report = run_command(&start, &devices, &kernel_log)?;
    send(&mut control, &report)?;
    Ok(())
}

fn run_command(
    start: &Start,
    devices: &pci::Devices,
    kernel_log: &Arc<KernelLog>,
) -> Result<Report> {
    let stdout = ports::open(port::STDOUT)?;
    let stderr = ports::open(port::STDERR)?;
    let ended = match command::run(start, devices, stdout, stderr) {
        Ok(ended) => ended,
        Err(error) => return Ok(Report::CannotRun(format!("{error:#}"))),
    };
    leaks::report()?;
    if start.share {
        mounts::unmount_share().context("writing back the shared directory")?;
    }
    Ok(Report::Exited {
        status: ended.status,
        stdout: ended.stdout,
        stderr: ended.stderr,
        kernel: kernel_log.flush(),
    })
}

/// Reports when a process of the guest listens on a TCP port; never, if none does.
fn tell_when_listening(mut control: File) {
    thread::spawn(move || {
        while !network::someone_listens() {
            thread::sleep(network::LOOK);
        }
        // Shorter than a page, so that it does not mix with another report.
        if let Err(error) = send(&mut control, &Report::Listening) {
            eprintln!("ibgda-vm-agent: {error}");
        }
    });
}

/// Requests after the command has started.
fn obey(mut requests: impl std::io::BufRead) {
    while let Ok(Some(request)) = receive(&mut requests) {
        match request {
            Request::ShowBlocked => {
                // All tasks that wait uninterruptibly, then what each CPU does.
                let _ = fs::write("/proc/sysrq-trigger", "w");
                let _ = fs::write("/proc/sysrq-trigger", "l");
            }
            Request::Start(_) | Request::Run => {
                eprintln!("ibgda-vm-agent: asked to start a second command; ignored")
            }
        }
    }
}
