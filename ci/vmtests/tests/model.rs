// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ConnectX model and the stand-in GPU as strangers see them: the stock mlx5 driver, rdma-core's and perftest's
//! programs, PCI error recovery and resets. Needs two NICs and a GPU: `./ci/vm --nics 2`.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use ibgda_vmtests::tools::{ctl, model_counter};
use memmap2::{MmapOptions, MmapRaw};

/// For what must happen; much longer than it takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// The tests reset and cut what they share, so they take turns.
static TURN: Mutex<()> = Mutex::new(());

/// The machine under test.
struct Machine {
    nics: Vec<String>,
    gpu: String,
    _turn: MutexGuard<'static, ()>,
}

impl Machine {
    fn take() -> Result<Self> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let list = |name: &str| -> Result<Vec<String>> {
            let list = std::env::var(name);
            let list = list.with_context(|| format!("no {name}: run this in ./ci/vm --nics 2"))?;
            Ok(list.split_whitespace().map(String::from).collect())
        };
        let nics = list("IBGDA_NICS")?;
        ensure!(
            nics.len() >= 2,
            "{} NICs: run this in ./ci/vm --nics 2",
            nics.len()
        );
        let gpu = list("IBGDA_GPUS")?.into_iter().next().context("no GPU")?;
        let machine = Self {
            nics,
            gpu,
            _turn: turn,
        };
        machine.restore()?;
        machine.wait("both ports to be up", || {
            Ok(machine.up(0)? && machine.up(1)?)
        })?;
        Ok(machine)
    }

    /// Undoes what a test that failed may have left.
    fn restore(&self) -> Result<()> {
        for (nic, address) in self.nics.iter().enumerate() {
            ctl(&["fault", &format!("nic{nic}"), "clear"])?;
            for state in [&["up"][..], &["loss", "0"], &["delay", "0"], &["rate", "0"]] {
                ctl(&[&["link", &format!("nic{nic}")], state].concat())?;
            }
            if !Path::new(&self.nic(nic, "driver")).exists() {
                fs::write("/sys/bus/pci/drivers/mlx5_core/bind", address)?;
            }
        }
        Ok(())
    }

    /// A file of a NIC's in sysfs.
    fn nic(&self, nic: usize, name: &str) -> String {
        format!("/sys/bus/pci/devices/{}/{name}", self.nics[nic])
    }

    /// Name of a NIC's RDMA device, while there is one.
    fn rdma(&self, nic: usize) -> Option<String> {
        let entry = fs::read_dir(self.nic(nic, "infiniband"))
            .ok()?
            .next()?
            .ok()?;
        entry.file_name().into_string().ok()
    }

    fn state(&self, nic: usize) -> Option<String> {
        let name = self.rdma(nic)?;
        fs::read_to_string(format!("/sys/class/infiniband/{name}/ports/1/state")).ok()
    }

    /// Whether a port is active and user space can reach it: uverbs comes last.
    fn up(&self, nic: usize) -> Result<bool> {
        let verbs = fs::read_dir(self.nic(nic, "infiniband_verbs"));
        let reachable = verbs.is_ok_and(|mut devices| devices.next().is_some());
        Ok(reachable
            && self
                .state(nic)
                .is_some_and(|state| state.contains("ACTIVE")))
    }

    fn wait(&self, what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !done()? {
            ensure!(Instant::now() < deadline, "waiting for {what}");
            sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Runs a program's server on one NIC and its client on another, both with the same arguments.
    fn pair(&self, program: &str, args: &[&str], server: usize, client: usize) -> Result<()> {
        let name = |nic: usize| self.rdma(nic).context("no RDMA device");
        let start = |nic: usize, more: &[&str]| -> Result<Child> {
            let mut command = Command::new("timeout");
            command
                .args(["60", program, "-d", &name(nic)?])
                .args(args)
                .args(more);
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().with_context(|| program.to_string())
        };
        let server = start(server, &[])?;
        // The server listens on a TCP port that only trying shows to be ready.
        let deadline = Instant::now() + PATIENCE;
        let client = loop {
            let output = start(client, &["localhost"])?.wait_with_output()?;
            let refused = String::from_utf8_lossy(&output.stderr).contains("onnect");
            if output.status.success() || !refused || Instant::now() > deadline {
                break output;
            }
            sleep(Duration::from_millis(50));
        };
        passed(
            &format!("{program} {args:?}, server"),
            &server.wait_with_output()?,
        )?;
        passed(&format!("{program} {args:?}, client"), &client)
    }

    /// RDMA works in both directions between the two NICs.
    fn traffic(&self) -> Result<()> {
        self.pair("ibv_rc_pingpong", &["-n", "100", "-c"], 0, 1)
    }

    /// A counter of the model's.
    fn count(&self, function: &str, counter: &str) -> Result<u64> {
        model_counter(function, counter)
    }

    /// Objects of a NIC's, by kind. Keys that mlx5_ib keeps for later are free, and no one's.
    fn objects(&self, function: &str) -> Result<Vec<(String, u64)>> {
        const KINDS: [&str; 9] = [
            "uctx", "uar", "pd", "mkey", "umem", "cq", "qp", "srq", "xrcd",
        ];
        let answer = ctl(&["counts", function])?;
        let count = |kind: &str| -> Result<u64> {
            let value = answer["functions"][0][kind].as_u64();
            value.with_context(|| format!("no count of {kind} in {answer}"))
        };
        KINDS
            .iter()
            .map(|kind| {
                let kept = match *kind {
                    "mkey" => count("mkey_free")?,
                    _ => 0,
                };
                Ok((kind.to_string(), count(kind)? - kept))
            })
            .collect()
    }
}

fn passed(what: &str, output: &Output) -> Result<()> {
    ensure!(
        output.status.success(),
        "{what}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Makes the kernel believe that a device has reported an error (`struct aer_error_inj`, drivers/pci/pcie/aer_inject.c).
fn inject(bdf: &str, uncorrectable: u32, correctable: u32) -> Result<()> {
    let fields: Vec<&str> = bdf.split([':', '.']).collect();
    let [domain, bus, device, function] = fields[..] else {
        bail!("{bdf} is no PCI address")
    };
    let hex = |text: &str| u32::from_str_radix(text, 16).context("PCI address");
    let mut request = vec![hex(bus)? as u8, hex(device)? as u8, hex(function)? as u8, 0];
    for word in [uncorrectable, correctable, 0, 1, 2, 3] {
        request.extend(word.to_ne_bytes());
    }
    request.extend(hex(domain)?.to_ne_bytes());
    OpenOptions::new()
        .write(true)
        .open("/dev/aer_inject")?
        .write_all(&request)?;
    Ok(())
}

fn errors_recovered(nic: &Machine, uncorrectable: u32, counter: &str) -> Result<()> {
    let total = || -> Result<u64> {
        let text = fs::read_to_string(nic.nic(0, counter))?;
        let last = text.split_whitespace().last().context("empty counter")?;
        Ok(last.parse()?)
    };
    let before = total()?;
    inject(&nic.nics[0], uncorrectable, 0)?;
    nic.wait("the error to be counted", || Ok(total()? > before))?;
    nic.wait("the port to go", || Ok(!nic.up(0)?))?;
    nic.wait("the port to come back", || nic.up(0))?;
    nic.traffic()
}

#[test]
fn ports_are_active_with_the_gids_that_the_driver_reads() -> Result<()> {
    let machine = Machine::take()?;
    let output = Command::new("ibv_devinfo").arg("-v").output()?;
    passed("ibv_devinfo", &output)?;
    let text = String::from_utf8(output.stdout)?;
    ensure!(text.matches("PORT_ACTIVE").count() >= 2, "{text}");
    ensure!(
        text.matches("link_layer:\t\tInfiniBand").count() >= 2,
        "{text}"
    );
    let lspci = Command::new("lspci")
        .args(["-vvv", "-s", &machine.nics[0]])
        .output()?;
    let text = String::from_utf8(lspci.stdout)?;
    for part in [
        "MT28908",
        "FLReset+",
        "MSI-X: Enable+ Count=16",
        "Advanced Error Reporting",
        "Device Serial Number",
    ] {
        ensure!(text.contains(part), "no {part} in {text}");
    }
    Ok(())
}

#[test]
fn rdma_core_and_perftest_run_within_and_between_functions() -> Result<()> {
    let machine = Machine::take()?;
    for (server, client) in [(0, 0), (0, 1), (1, 0)] {
        machine.pair("ibv_rc_pingpong", &["-n", "100", "-c"], server, client)?;
    }
    machine.pair("ibv_rc_pingpong", &["-n", "100", "-e"], 0, 1)?;
    for program in ["ib_write_lat", "ib_read_lat", "ib_send_lat"] {
        machine.pair(program, &["-F", "-n", "100"], 0, 1)?;
    }
    Ok(())
}

#[test]
fn objects_go_with_their_processes() -> Result<()> {
    let machine = Machine::take()?;
    // The driver makes some once, when the first user comes.
    machine.traffic()?;
    let before = [machine.objects("nic0")?, machine.objects("nic1")?];
    let keys = machine.count("nic0", "mkey")?;
    for _ in 0..3 {
        machine.traffic()?;
        ensure!([machine.objects("nic0")?, machine.objects("nic1")?] == before);
    }
    // What the driver keeps of them is used again. (It gives up some after a minute.)
    ensure!(machine.count("nic0", "mkey")? <= keys);
    ensure!(machine.count("nic0", "mkey_free")? > 0);
    // Killed in the middle of its work, too.
    let device = machine.rdma(0).context("no RDMA device")?;
    let mut server = Command::new("ibv_rc_pingpong")
        .args(["-d", &device])
        .stdout(Stdio::null())
        .spawn()?;
    machine.wait("a queue pair", || Ok(machine.objects("nic0")? != before[0]))?;
    server.kill()?;
    server.wait()?;
    machine.wait("the objects to go", || {
        Ok(machine.objects("nic0")? == before[0])
    })
}

#[test]
fn a_link_goes_down_and_comes_back() -> Result<()> {
    let machine = Machine::take()?;
    ctl(&["link", "nic1", "down"])?;
    machine.wait("DOWN", || {
        Ok(machine.state(1).is_some_and(|s| s.contains("DOWN")))
    })?;
    ctl(&["link", "nic1", "up"])?;
    machine.wait("ACTIVE", || machine.up(1))?;
    machine.traffic()
}

#[test]
fn a_lossy_link_is_made_up_for_by_retransmission() -> Result<()> {
    let machine = Machine::take()?;
    let (lost, sent_again) = (
        machine.count("nic0", "packets_lost")?,
        machine.count("nic0", "retransmissions")?,
    );
    ctl(&["link", "nic0", "loss", "50000"])?;
    let result = machine.pair("ibv_rc_pingpong", &["-n", "200", "-c"], 0, 1);
    ctl(&["link", "nic0", "loss", "0"])?;
    result?;
    ensure!(machine.count("nic0", "packets_lost")? > lost);
    ensure!(machine.count("nic0", "retransmissions")? > sent_again);
    Ok(())
}

#[test]
fn errors_are_recovered_by_the_driver() -> Result<()> {
    const COMPLETION_TIMEOUT: u32 = 0x4000;
    const DATA_LINK_PROTOCOL: u32 = 0x10;
    let machine = Machine::take()?;
    errors_recovered(&machine, COMPLETION_TIMEOUT, "aer_dev_nonfatal")?;
    errors_recovered(&machine, DATA_LINK_PROTOCOL, "aer_dev_fatal")?;
    inject(&machine.nics[0], 0, 1)?;
    machine.traffic()
}

#[test]
fn a_firmware_fault_ends_in_the_driver_s_own_reset() -> Result<()> {
    let machine = Machine::take()?;
    ctl(&["fault", "nic0", "syndrome", "1"])?;
    machine.wait("the port to go", || Ok(!machine.up(0)?))?;
    machine.wait("the port to come back", || machine.up(0))?;
    machine.traffic()
}

#[test]
fn a_function_is_reset_unbound_and_found_again() -> Result<()> {
    let machine = Machine::take()?;
    let address = &machine.nics[0];
    fs::write("/sys/bus/pci/drivers/mlx5_core/unbind", address)?;
    ensure!(
        machine.objects("nic0")?.iter().all(|(_, n)| *n == 0),
        "{:?}",
        machine.objects("nic0")?
    );
    for _ in 0..3 {
        fs::write(machine.nic(0, "reset"), "1")?;
    }
    fs::write("/sys/bus/pci/drivers/mlx5_core/bind", address)?;
    machine.wait("the port", || machine.up(0))?;
    machine.traffic()?;
    fs::write(machine.nic(0, "remove"), "1")?;
    fs::write("/sys/bus/pci/rescan", "1")?;
    machine.wait("the port", || machine.up(0))?;
    machine.traffic()
}

#[test]
fn pages_come_and_go_at_run_time() -> Result<()> {
    let machine = Machine::take()?;
    let before = machine.count("nic0", "pages")?;
    ctl(&["fault", "nic0", "pages", "100"])?;
    machine.wait("more pages", || {
        Ok(machine.count("nic0", "pages")? == before + 100)
    })?;
    ctl(&["fault", "nic0", "pages", "-100"])?;
    machine.wait("fewer pages", || {
        Ok(machine.count("nic0", "pages")? == before)
    })
}

/// Registers of the stand-in GPU: docs/standin-gpu.md.
struct Gpu {
    registers: MmapRaw,
}

impl Gpu {
    const ENGINE: usize = 0x1000;

    /// Enables the function (no driver does) and maps its registers.
    fn open(machine: &Machine) -> Result<Self> {
        let folder = format!("/sys/bus/pci/devices/{}", machine.gpu);
        let config = OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("{folder}/config"))?;
        config.write_all_at(&[0x06], 4)?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("{folder}/resource0"))?;
        let registers = MmapOptions::new().len(16 << 20).map_raw(&file)?;
        Ok(Self { registers })
    }

    fn at(&self, offset: usize) -> *mut u32 {
        self.registers.as_mut_ptr().wrapping_add(offset).cast()
    }

    fn set(&self, offset: usize, value: u32) {
        // SAFETY: the offset is an aligned one within the 16 MiB of registers that are mapped for as long as `self` lives.
        unsafe { self.at(offset).write_volatile(value) }
    }

    fn get(&self, offset: usize) -> u32 {
        // SAFETY: as for `set`.
        unsafe { self.at(offset).read_volatile() }
    }

    /// Starts an endless stream of 8-byte stores, one each millisecond.
    fn store(&self, address: u64, data: u64) {
        for (register, value) in [
            (0x00, address as u32),
            (0x04, (address >> 32) as u32),
            (0x08, 8),
            (0x0c, 1000),
            (0x10, 0),
            (0x40, data as u32),
            (0x44, (data >> 32) as u32),
            (0x14, 1),
        ] {
            self.set(Self::ENGINE + register, value);
        }
    }

    fn done(&self) -> u32 {
        self.get(Self::ENGINE + 0x20)
    }

    fn failures(&self) -> u32 {
        self.get(Self::ENGINE + 0x28)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        const STOP_ALL: usize = 0xc;
        self.set(STOP_ALL, 1);
    }
}

#[test]
fn a_gpu_keeps_ringing_whatever_becomes_of_the_nic() -> Result<()> {
    let machine = Machine::take()?;
    let gpu = Gpu::open(&machine)?;
    ensure!(
        gpu.get(0) == u32::from_le_bytes(*b"GPU!"),
        "no stand-in GPU: {:#x}",
        gpu.get(0)
    );
    let bar = || -> Result<u64> {
        let text = fs::read_to_string(machine.nic(1, "resource"))?;
        let first = text.split_whitespace().next().context("no BAR")?;
        Ok(u64::from_str_radix(first.trim_start_matches("0x"), 16)?)
    };
    // The last page of the BAR, which no one was given: the model counts what rings there.
    let page = (32 << 20) - 4096;
    let stale = || machine.count("nic1", "stale_doorbells");
    let before = stale()?;
    gpu.store(bar()? + page + 0x800, 0);
    machine.wait("doorbells", || Ok(stale()? > before + 10))?;
    fs::write("/sys/bus/pci/drivers/mlx5_core/unbind", &machine.nics[1])?;
    // No driver is there to notice that registers are no longer decoded.
    let command = |value: u8| -> Result<()> {
        let config = OpenOptions::new()
            .write(true)
            .open(machine.nic(1, "config"))?;
        Ok(config.write_all_at(&[value, 0], 4)?)
    };
    command(0)?;
    let failures = gpu.failures();
    machine.wait("stores that reach nothing", || {
        Ok(gpu.failures() > failures + 10)
    })?;
    command(0x02)?;
    fs::write("/sys/bus/pci/drivers/mlx5_core/bind", &machine.nics[1])?;
    machine.wait("the port", || machine.up(1))?;
    let (before, done) = (stale()?, gpu.done());
    machine.wait("doorbells after the rebirth", || Ok(stale()? > before + 10))?;
    ensure!(gpu.done() > done);
    fs::write(format!("/sys/bus/pci/devices/{}/reset", machine.gpu), "1")?;
    let end = stale()?;
    sleep(Duration::from_millis(100));
    ensure!(stale()? == end, "a GPU that was reset stores no more");
    ensure!(ctl(&["counts", "gpu0"])?["functions"][0]["engines_running"] == 0);
    machine.traffic()
}
