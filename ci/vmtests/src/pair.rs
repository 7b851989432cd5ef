// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two NICs of one machine that send to each other, of which the first is broken, reset or lost.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::machine::{self, Bdf};
use crate::tools::{ctl, model_counter};

/// For what must happen; much longer than it takes, and than the driver's own patience with a device (60 s).
pub const PATIENCE: Duration = Duration::from_secs(150);

/// One test at a time breaks the machine.
static TURN: Mutex<()> = Mutex::new(());

/// The NIC that is reset, and its peer.
pub struct Pair {
    pub nic: Bdf,
    pub peer: Bdf,
    _turn: MutexGuard<'static, ()>,
}

impl Pair {
    pub fn take() -> Result<Self> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let nics = machine::nics();
        ensure!(nics.len() >= 2, "run this in ./ci/vm --nics 2");
        let pair = Self {
            nic: nics[0],
            peer: nics[1],
            _turn: turn,
        };
        ctl(&["fault", "nic0", "clear"])?;
        if ctl(&["insert", "nic0"]).is_ok() {
            // A test that failed left the slot empty.
            fs::write("/sys/bus/pci/rescan", "1")?;
        }
        if !bound(pair.nic) {
            driver("bind", pair.nic)?;
        }
        wait("both ports to be up", || up(pair.nic) && up(pair.peer))?;
        Ok(pair)
    }

    /// RDMA works between the two.
    pub fn works(&self) -> Result<()> {
        self.traffic("200")?.ends_well()
    }

    /// Traffic of so many messages each way.
    pub fn traffic(&self, iterations: &str) -> Result<Traffic> {
        Traffic::start(self, iterations)
    }

    /// Traffic that goes on until it is stopped.
    pub fn busy(&self) -> Result<Traffic> {
        let traffic = self.traffic("100000000")?;
        let before = sent()?;
        wait("packets", || sent().is_ok_and(|now| now > before + 20))?;
        Ok(traffic)
    }

    /// The driver has lost the NIC and has it again.
    pub fn lost_and_back(&self) -> Result<()> {
        // A port's state is a command to the NIC, and one that starts as the NIC is lost may be the driver's end
        // (docs/mlx5-races.md). The device goes with the loss.
        wait("the RDMA device to go", || rdma(self.nic).is_none())?;
        wait("the port to come back", || up(self.nic))
    }
}

/// Two processes that send to each other, killed when dropped.
pub struct Traffic(pub [Child; 2]);

impl Traffic {
    fn start(pair: &Pair, iterations: &str) -> Result<Self> {
        let start = |nic: Bdf, peer: &[&str]| -> Result<Child> {
            let device = rdma(nic).context("no RDMA device")?;
            let mut command = Command::new("timeout");
            // By events: polling would keep from the driver's recovery the processors that it needs.
            command.args(["120", "ibv_rc_pingpong", "-e", "-n", iterations]);
            command.args(["-d", &device]);
            command
                .args(peer)
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            command.spawn().context("ibv_rc_pingpong")
        };
        let mut server = start(pair.nic, &[])?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut ended = None;
            wait("the server", || {
                ended = server.try_wait().ok().flatten();
                ended.is_some() || listening()
            })?;
            ensure!(ended.is_none(), "the server ended with {ended:?}");
            let mut client = start(pair.peer, &["localhost"])?;
            sleep(Duration::from_millis(30));
            match client.try_wait()? {
                Some(status) if !status.success() && Instant::now() < deadline => continue,
                _ => return Ok(Self([server, client])),
            }
        }
    }

    /// Waits for the end of both, which must be a good one.
    pub fn ends_well(&mut self) -> Result<()> {
        let server = self.0[0].wait()?;
        let client = self.0[1].wait()?;
        ensure!(
            server.success() && client.success(),
            "server {server}, client {client}"
        );
        Ok(())
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        for child in &mut self.0 {
            if matches!(child.try_wait(), Ok(None)) {
                // SAFETY: a signal to a child that has not been waited for; `timeout` hands it on.
                unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
            }
            let _ = child.wait();
        }
    }
}

/// Whether something listens on ibv_rc_pingpong's TCP port, 18515.
pub fn listening() -> bool {
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
        let table = fs::read_to_string(table).unwrap_or_default();
        table
            .lines()
            .any(|line| line.contains(":4853 ") && line.contains(" 0A "))
    })
}

pub fn wait(what: &str, mut done: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        ensure!(Instant::now() < deadline, "waited in vain for {what}");
        sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// A counter of the model's first NIC.
pub fn count(counter: &str) -> Result<u64> {
    model_counter("nic0", counter)
}

pub fn sent() -> Result<u64> {
    count("packets_sent")
}

/// The entry of a NIC's folder in sysfs, while there is one.
pub fn entry(nic: Bdf, folder: &str) -> Option<String> {
    let mut entries = fs::read_dir(nic.sysfs().join(folder)).ok()?;
    entries.next()?.ok()?.file_name().into_string().ok()
}

pub fn rdma(nic: Bdf) -> Option<String> {
    entry(nic, "infiniband")
}

/// Whether the port is active and user space can reach it.
pub fn up(nic: Bdf) -> bool {
    let Some(device) = rdma(nic) else {
        return false;
    };
    let state = nic
        .sysfs()
        .join(format!("infiniband/{device}/ports/1/state"));
    let active = fs::read_to_string(state).is_ok_and(|state| state.contains("ACTIVE"));
    let node = entry(nic, "infiniband_verbs");
    active && node.is_some_and(|node| Path::new("/dev/infiniband").join(node).exists())
}

pub fn bound(nic: Bdf) -> bool {
    nic.sysfs().join("driver").exists()
}

/// Binds or unbinds mlx5_core.
pub fn driver(verb: &str, nic: Bdf) -> Result<()> {
    let path = format!("/sys/bus/pci/drivers/mlx5_core/{verb}");
    fs::write(&path, nic.to_string()).context(path)
}
