// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes the guest ready for the command: modules, network, NICs.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use std::{fs, io};

use anyhow::{Context, Result, bail};

use super::pci::Devices;
use super::{mounts, network, ports};
use crate::protocol::{PEERS, STAGE, Start, port};

/// Longer than the driver's own patience with a device that does not answer.
const NIC_UP: Duration = Duration::from_secs(90);

/// Does all that is to be done before the command runs.
pub fn prepare(start: &Start) -> Result<Devices> {
    note("making the guest ready");
    let name = start
        .peer
        .and_then(|index| PEERS.get(index))
        .map_or("ibgda", |peer| peer.name);
    nix::unistd::sethostname(name).context("setting the host name")?;
    run("ip", &["link", "set", "lo", "up"])?;
    if let Some(index) = start.peer {
        network::set_up(index)?;
    }
    let devices = Devices::find(start.nics, start.gpus)?;
    note("loading modules");
    let mut modules = vec!["configfs", "aer_inject"];
    // Without a NIC ibgda.ko still needs what they bring: ib_core.
    if start.nics > 0 || start.module {
        modules.extend(["mlx5_ib", "ib_uverbs", "ib_umad", "rdma_ucm"]);
    }
    modprobe(&modules)?;
    note("modules are loaded");
    mounts::configfs()?;
    if start.share {
        mounts::share()?;
    }
    if start.nics + start.gpus > 0 {
        ports::link_all(&[port::MODEL, port::MONITOR])?;
    }
    for nic in &devices.nics {
        wait_for_nic(nic)?;
    }
    note("NICs are up");
    if start.module {
        run("insmod", &[&format!("{STAGE}/ibgda.ko")])?;
    }
    Ok(devices)
}

/// Marks in the kernel's log how far the guest has come, for whoever reads it after a hang.
pub fn note(text: &str) {
    let _ = fs::write("/dev/kmsg", format!("ibgda-vm: {text}\n"));
}

/// Loads modules and what they need.
pub fn modprobe(modules: &[&str]) -> Result<()> {
    run("modprobe", &[&["-a"], modules].concat())
}

/// Runs a program to its end, which must be a good one.
pub fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program)
        .args(arguments)
        .env("PATH", super::command::PATH)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("running {program}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!(
            "{program} {}: {}, {}",
            arguments.join(" "),
            output.status,
            said.trim()
        );
    }
    Ok(())
}

fn wait_for_nic(bdf: &str) -> Result<()> {
    let deadline = Instant::now() + NIC_UP;
    loop {
        let state = port_state(bdf)?;
        if state
            .as_deref()
            .is_some_and(|state| state.contains("ACTIVE"))
        {
            return Ok(());
        }
        if Instant::now() > deadline {
            let seen = match state {
                Some(state) => format!("its port's state is {state:?}"),
                None => "it has no InfiniBand device".into(),
            };
            bail!("NIC {bdf} did not come up within {NIC_UP:?}: {seen}");
        }
        sleep(Duration::from_millis(20));
    }
}

/// The state of the function's first port, once it has an InfiniBand device that user space can open.
fn port_state(bdf: &str) -> Result<Option<String>> {
    let device = Path::new("/sys/bus/pci/devices").join(bdf);
    let Some(ib) = only_entry(&device.join("infiniband"))? else {
        return Ok(None);
    };
    let Some(verbs) = only_entry(&device.join("infiniband_verbs"))? else {
        return Ok(None);
    };
    let node = Path::new("/dev/infiniband").join(
        verbs
            .file_name()
            .expect("an entry of a directory has a name"),
    );
    if !node.exists() {
        return Ok(None);
    }
    match fs::read_to_string(ib.join("ports/1/state")) {
        Ok(state) => Ok(Some(state.trim().to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("reading the port state of {bdf}")),
    }
}

fn only_entry(dir: &Path) -> Result<Option<PathBuf>> {
    match fs::read_dir(dir) {
        Ok(mut entries) => Ok(entries.next().transpose()?.map(|entry| entry.path())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("listing {}", dir.display())),
    }
}
