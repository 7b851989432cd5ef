// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two NICs of soft RoCE (`rdma_rxe`) on the two ends of a virtual cable: verbs devices that are not ours, and not mlx5's.

use std::{
    fs,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};

/// What they are called, and on which interface each is.
pub const NICS: [(&str, &str); 2] = [("rxe0", "cable0"), ("rxe1", "cable1")];

const PATIENCE: Duration = Duration::from_secs(60);

fn run(line: &str) -> Result<String> {
    let mut words = line.split(' ');
    let program = words.next().unwrap_or_default();
    let done = Command::new(program)
        .args(words)
        .output()
        .context(line.to_owned())?;
    ensure!(
        done.status.success(),
        "{line}: {}, {}",
        done.status,
        String::from_utf8_lossy(&done.stderr)
    );
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

fn wait(what: &str, mut done: impl FnMut() -> bool) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !done() {
        ensure!(Instant::now() < end, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Adds one of them, and waits until it can be used.
pub fn add(index: usize) -> Result<()> {
    let (name, interface) = NICS[index];
    run(&format!("rdma link add {name} type rxe netdev {interface}"))?;
    let device = Path::new("/sys/class/infiniband").join(name);
    wait("an active port", || {
        fs::read_to_string(device.join("ports/1/state")).is_ok_and(|state| state.contains("ACTIVE"))
    })?;
    wait("its uverbs node", || {
        let all = fs::read_dir("/sys/class/infiniband_verbs")
            .into_iter()
            .flatten()
            .flatten();
        all.into_iter().any(|node| {
            let its = fs::read_to_string(node.path().join("ibdev")).unwrap_or_default();
            its.trim() == name && Path::new("/dev/infiniband").join(node.file_name()).exists()
        })
    })
}

/// Takes one away.
pub fn delete(index: usize) -> Result<()> {
    run(&format!("rdma link delete {}", NICS[index].0)).map(drop)
}

/// Both, if they are not there yet. The interfaces have their link-local IPv6 addresses, by which packets of one go to the
/// other even though both are this machine's.
pub fn set_up() -> Result<()> {
    if Path::new("/sys/class/infiniband").join(NICS[0].0).exists() {
        return Ok(());
    }
    run("modprobe -a veth rdma_rxe ib_uverbs")?;
    let [(_, near), (_, far)] = NICS;
    run(&format!("ip link add {near} type veth peer name {far}"))?;
    for (_, interface) in NICS {
        // The address is good at once.
        fs::write(
            format!("/proc/sys/net/ipv6/conf/{interface}/accept_dad"),
            "0",
        )?;
        run(&format!("ip link set {interface} up"))?;
    }
    // An end has a carrier, and so an address, when the other is up too.
    for (index, (_, interface)) in NICS.iter().enumerate() {
        wait("an address", || {
            run(&format!("ip -6 addr show dev {interface} scope link"))
                .is_ok_and(|shown| shown.contains("fe80:") && !shown.contains("tentative"))
        })?;
        add(index)?;
    }
    Ok(())
}

/// What the kernel has of the two, in the words of `rdma resource`.
pub fn resources() -> Result<String> {
    let all = run("rdma resource show")?;
    let ours = |line: &&str| NICS.iter().any(|(name, _)| line.contains(name));
    Ok(all.lines().filter(ours).collect::<Vec<_>>().join("\n"))
}
