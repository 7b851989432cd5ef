// SPDX-License-Identifier: MIT OR Apache-2.0
//! Resets, errors and removal of a NIC at any time, under the stock driver and with traffic. Needs two NICs:
//! `./ci/vm --nics 2`.
//!
//! `IBGDA_AER_COUNT` says how many fatal PCI errors in a row there are (20), `IBGDA_RESET_COMMANDS` at how many commands
//! of a probe the model resets itself (`all`, or a number: that many, spread over the probe; 12).

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ibgda_vmtests::machine::{self, Bdf};
use ibgda_vmtests::tools::{ctl, model_counter};
use serde_json::Value;

/// For what must happen; much longer than it takes, and than the driver's own patience with a device (60 s).
const PATIENCE: Duration = Duration::from_secs(150);

/// One test at a time breaks the machine.
static TURN: Mutex<()> = Mutex::new(());

/// The NIC that is reset, and its peer.
struct Pair {
    nic: Bdf,
    peer: Bdf,
    _turn: MutexGuard<'static, ()>,
}

impl Pair {
    fn take() -> Result<Self> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let nics = machine::nics();
        ensure!(nics.len() >= 2, "run this in ./ci/vm --nics 2");
        let pair = Self {
            nic: nics[0],
            peer: nics[1],
            _turn: turn,
        };
        ctl(&["fault", "nic0", "clear"])?;
        if !bound(pair.nic) {
            driver("bind", pair.nic)?;
        }
        wait("both ports to be up", || up(pair.nic) && up(pair.peer))?;
        Ok(pair)
    }

    /// RDMA works between the two.
    fn works(&self) -> Result<()> {
        let mut traffic = Traffic::start(self, "200")?;
        let server = traffic.0[0].wait()?;
        let client = traffic.0[1].wait()?;
        ensure!(
            server.success() && client.success(),
            "server {server}, client {client}"
        );
        Ok(())
    }

    /// Traffic that goes on until it is stopped.
    fn busy(&self) -> Result<Traffic> {
        let traffic = Traffic::start(self, "100000000")?;
        let before = sent()?;
        wait("packets", || sent().is_ok_and(|now| now > before + 20))?;
        Ok(traffic)
    }

    /// The driver has lost the NIC and has it again.
    fn lost_and_back(&self) -> Result<()> {
        wait("the port to go", || !up(self.nic))?;
        wait("the port to come back", || up(self.nic))
    }
}

/// Two processes that send to each other, killed when dropped.
struct Traffic([Child; 2]);

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
}

impl Drop for Traffic {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // SAFETY: a signal to a child that has not been waited for; `timeout` hands it on.
            unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
            let _ = child.wait();
        }
    }
}

/// Whether something listens on ibv_rc_pingpong's TCP port, 18515.
fn listening() -> bool {
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
        let table = fs::read_to_string(table).unwrap_or_default();
        table
            .lines()
            .any(|line| line.contains(":4853 ") && line.contains(" 0A "))
    })
}

fn wait(what: &str, mut done: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        ensure!(Instant::now() < deadline, "waited in vain for {what}");
        sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// A counter of the model's first NIC.
fn count(counter: &str) -> Result<u64> {
    model_counter("nic0", counter)
}

fn sent() -> Result<u64> {
    count("packets_sent")
}

/// The entry of a NIC's folder in sysfs, while there is one.
fn entry(nic: Bdf, folder: &str) -> Option<String> {
    let mut entries = fs::read_dir(nic.sysfs().join(folder)).ok()?;
    entries.next()?.ok()?.file_name().into_string().ok()
}

fn rdma(nic: Bdf) -> Option<String> {
    entry(nic, "infiniband")
}

/// Whether the port is active and user space can reach it.
fn up(nic: Bdf) -> bool {
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

fn bound(nic: Bdf) -> bool {
    nic.sysfs().join("driver").exists()
}

/// Binds or unbinds mlx5_core.
fn driver(verb: &str, nic: Bdf) -> Result<()> {
    let path = format!("/sys/bus/pci/drivers/mlx5_core/{verb}");
    fs::write(&path, nic.to_string()).context(path)
}

/// The driver recovers however short the time since it last did; else it gives up on a NIC that fails twice a minute.
fn recover_always(nic: Bdf) -> Result<()> {
    let output = Command::new("devlink")
        .args([
            "health",
            "set",
            &format!("pci/{nic}"),
            "reporter",
            "fw_fatal",
        ])
        .args(["grace_period", "0"])
        .output()
        .context("devlink")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "devlink health set: {said}");
    Ok(())
}

/// The number in an environment variable.
fn setting(name: &str, default: u32) -> Result<u32> {
    match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name}={text}")),
        Err(_) => Ok(default),
    }
}

fn fatal_errors(nic: Bdf) -> Result<u64> {
    let text = fs::read_to_string(nic.sysfs().join("aer_dev_fatal"))?;
    let total = text.split_whitespace().last().context("empty counter")?;
    Ok(total.parse()?)
}

#[test]
fn fatal_errors_in_a_row_with_traffic_are_recovered_and_cost_no_memory() -> Result<()> {
    let pair = Pair::take()?;
    let count = setting("IBGDA_AER_COUNT", 20)?;
    let warm = (count / 10).max(5);
    let mut settled = None;
    for round in 0..count {
        let traffic = pair.busy()?;
        let before = fatal_errors(pair.nic)?;
        machine::inject_error(pair.nic, machine::FATAL);
        pair.lost_and_back()
            .with_context(|| format!("error {round}"))?;
        ensure!(fatal_errors(pair.nic)? == before + 1);
        drop(traffic);
        let process = ctl(&["process"])?;
        if round == 0 || round == warm || (round + 1) % (count / 20).max(1) == 0 {
            println!("after {} errors: {process}", round + 1);
        }
        if round == warm {
            settled = Some(process);
        }
    }
    pair.works()?;
    let (settled, end) = (settled.context("too few errors")?, ctl(&["process"])?);
    let own = |of: &Value| of["own_kib"].as_u64().context("no own_kib");
    // Less than a record of 64 bytes for each error, or what an allocator keeps.
    let allowed = own(&settled)? + u64::from(count) / 16 + 1024;
    ensure!(own(&end)? <= allowed, "memory grew from {settled} to {end}");
    for kind in ["threads", "files"] {
        ensure!(settled[kind] == end[kind], "{kind}: {settled} became {end}");
    }
    Ok(())
}

#[test]
fn a_reset_under_the_driver_is_noticed_by_its_health_poll() -> Result<()> {
    let pair = Pair::take()?;
    for method in ["flr", "bus"] {
        let methods = pair.nic.sysfs().join("reset_method");
        fs::write(&methods, method).with_context(|| format!("reset method {method}"))?;
        recover_always(pair.nic)?;
        let traffic = pair.busy()?;
        fs::write(pair.nic.sysfs().join("reset"), "1")?;
        pair.lost_and_back().context(method)?;
        drop(traffic);
        pair.works().context(method)?;
    }
    Ok(())
}

#[test]
#[ignore = "the swallowed CREATE_CQ does not fail the programs since the keys' sizes are set by UMR; not yet understood"]
fn a_command_that_is_never_answered_times_out_and_the_driver_goes_on() -> Result<()> {
    let pair = Pair::take()?;
    ctl(&["fault", "nic0", "command-timeout", "1500"])?;
    driver("unbind", pair.nic)?;
    driver("bind", pair.nic)?;
    wait("the port", || up(pair.nic))?;
    ctl(&["fault", "nic0", "swallow", "CREATE_CQ"])?;
    ensure!(pair.works().is_err(), "its CREATE_CQ was not answered");
    pair.works()?;
    // Until the slot is handed back, the driver would wait for it when it is unbound (docs/mlx5-races.md).
    ctl(&["fault", "nic0", "clear"])?;
    driver("unbind", pair.nic)?;
    driver("bind", pair.nic)?;
    wait("the port", || up(pair.nic))?;
    pair.works()
}

#[test]
fn a_nic_that_resets_itself_at_any_command_of_a_probe_can_be_bound_again() -> Result<()> {
    let pair = Pair::take()?;
    let probe = |pair: &Pair| -> Result<u64> {
        let before = count("commands")?;
        driver("bind", pair.nic)?;
        wait("the port", || up(pair.nic))?;
        Ok(count("commands")? - before)
    };
    // Else the driver waits a minute for the command in which the NIC is lost.
    ctl(&["fault", "nic0", "command-timeout", "1500"])?;
    driver("unbind", pair.nic)?;
    let commands = probe(&pair)?;
    let wanted = match std::env::var("IBGDA_RESET_COMMANDS").as_deref() {
        Ok("all") => commands,
        _ => u64::from(setting("IBGDA_RESET_COMMANDS", 12)?).min(commands),
    };
    println!("a probe has {commands} commands, {wanted} of them are tried");
    for nth in 0..wanted {
        let command = nth * commands / wanted;
        driver("unbind", pair.nic)?;
        let resets = count("resets")?;
        ctl(&["fault", "nic0", "reset", "after", &command.to_string()])?;
        let began = Instant::now();
        let probed = driver("bind", pair.nic);
        let took = began.elapsed();
        println!(
            "command {command}: the probe ended after {:.1} s: {}",
            took.as_secs_f32(),
            probed.map_or_else(
                |error| format!("{:#}", error.root_cause()),
                |()| "bound".into()
            )
        );
        ensure!(took < PATIENCE, "the probe took {took:?}");
        ensure!(count("resets")? > resets, "there were fewer commands");
        ctl(&["fault", "nic0", "clear"])?;
        ctl(&["fault", "nic0", "command-timeout", "1500"])?;
        if bound(pair.nic) {
            driver("unbind", pair.nic)?;
        }
        probe(&pair).with_context(|| format!("after a reset at command {command}"))?;
    }
    pair.works()
}

/// QEMU's monitor, of which both ends are QEMU's.
struct Monitor(fs::File);

impl Monitor {
    fn open() -> Result<Self> {
        let port = "/dev/virtio-ports/org.ibgda.monitor";
        let file = fs::File::options().read(true).write(true).open(port);
        let mut monitor = Self(file.context(port)?);
        // Refused from the second time on.
        let _ = monitor.run("qmp_capabilities", serde_json::json!({}));
        Ok(monitor)
    }

    fn run(&mut self, command: &str, arguments: Value) -> Result<Value> {
        use std::io::{BufRead, BufReader, Write};
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let id = format!("{}-{number}", std::process::id());
        let request = serde_json::json!({"execute": command, "arguments": arguments, "id": id});
        self.0.write_all(format!("{request}\n").as_bytes())?;
        for line in BufReader::new(&self.0).lines() {
            let answer: Value = serde_json::from_str(&line?)?;
            if answer["id"] == id.as_str() {
                ensure!(answer.get("error").is_none(), "{command}: {answer}");
                return Ok(answer["return"].clone());
            }
        }
        anyhow::bail!("the monitor has gone")
    }

    fn unplug(&mut self, device: &str) -> Result<()> {
        self.run("device_del", serde_json::json!({"id": device}))?;
        Ok(())
    }

    /// Plugs `nic0` in again, below the port of the switch where it was.
    fn plug(&mut self) -> Result<()> {
        // On the host: ci/vm's run directory.
        let socket = serde_json::json!({"type": "unix", "path": "/run/ibgda-vm/model/nic0.sock"});
        let device = serde_json::json!({
            "driver": "vfio-user-pci", "id": "nic0", "bus": "port-nic0", "rombar": 0, "socket": socket,
        });
        self.run("device_add", device)?;
        Ok(())
    }
}

#[test]
#[ignore = "QEMU goes away in the midst of it; not yet understood"]
fn a_nic_is_unplugged_and_plugged_in_under_traffic() -> Result<()> {
    let pair = Pair::take()?;
    let mut monitor = Monitor::open()?;
    let gone = || !pair.nic.sysfs().exists();
    for torn_out in [false, true] {
        let traffic = pair.busy()?;
        if torn_out {
            // Without a word to the guest: registers read as ones, and the driver finds out.
            ctl(&["vanish", "nic0"])?;
            wait("the port to go", || !up(pair.nic))?;
        }
        monitor.unplug("nic0")?;
        wait("the NIC to be removed", gone)?;
        drop(traffic);
        // QEMU frees the name when the guest has let go of the slot.
        wait("the slot to be free", || monitor.plug().is_ok())?;
        wait("the NIC to be back", || up(pair.nic))?;
        pair.works()?;
    }
    Ok(())
}

#[test]
fn the_driver_reloads_and_finds_no_firmware_to_activate() -> Result<()> {
    let pair = Pair::take()?;
    let device = format!("pci/{}", pair.nic);
    let reload = |more: &[&str]| -> Result<(bool, String)> {
        let output = Command::new("devlink")
            .args(["dev", "reload", &device])
            .args(more)
            .output()
            .context("devlink")?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok((output.status.success(), said))
    };
    let forgotten = count("never_reclaimed")?;
    let (done, said) = reload(&[])?;
    ensure!(done, "devlink dev reload: {said}");
    wait("the port", || up(pair.nic))?;
    ensure!(
        count("never_reclaimed")? == forgotten,
        "{}",
        ctl(&["refusals"])?
    );
    let (done, said) = reload(&["action", "fw_activate"])?;
    // The model has no management capability registers, and without them the driver refuses by itself.
    ensure!(
        !done && said.contains("FW activate is unsupported"),
        "{said}"
    );
    pair.works()
}
