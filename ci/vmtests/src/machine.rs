// SPDX-License-Identifier: MIT OR Apache-2.0
//! The virtual machine: its functions, the broker's policy, the model's counters, and ways to break things.

use serde_json::Value;
use std::{
    collections::BTreeMap,
    env, fmt, fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// A PCI function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bdf {
    pub domain: u32,
    pub bus: u8,
    pub device: u8,
    pub function: u8,
}

impl Bdf {
    /// Reads `0000:03:00.0`.
    pub fn parse(text: &str) -> Self {
        let parts: Vec<u32> = text
            .split([':', '.'])
            .map(|part| {
                u32::from_str_radix(part, 16)
                    .unwrap_or_else(|_| panic!("{text:?} is no PCI address"))
            })
            .collect();
        let [domain, bus, device, function] = parts[..] else {
            panic!("{text:?} is no PCI address");
        };
        Self {
            domain,
            bus: bus as u8,
            device: device as u8,
            function: function as u8,
        }
    }

    /// Its folder in sysfs.
    pub fn sysfs(self) -> PathBuf {
        PathBuf::from(format!("/sys/bus/pci/devices/{self}"))
    }
}

impl fmt::Display for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            domain,
            bus,
            device,
            function,
        } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

fn functions(variable: &str) -> Vec<Bdf> {
    env::var(variable)
        .unwrap_or_else(|_| panic!("{variable} is not set: these tests run in ./ci/vm"))
        .split_whitespace()
        .map(Bdf::parse)
        .collect()
}

/// The NICs, in order.
pub fn nics() -> Vec<Bdf> {
    functions("IBGDA_NICS")
}

/// The stand-in GPUs, in order.
pub fn gpus() -> Vec<Bdf> {
    functions("IBGDA_GPUS")
}

/// An entry of the policy, removed when dropped.
#[derive(Debug)]
pub struct Allowed(PathBuf);

impl Allowed {
    pub fn pair(gpu: Bdf, nic: Bdf) -> Self {
        Self::entry(&format!("{gpu}@{nic}"))
    }

    pub fn entry(name: &str) -> Self {
        let path = entry_path(name);
        fs::create_dir(&path).unwrap_or_else(|error| panic!("mkdir {}: {error}", path.display()));
        Self(path)
    }

    pub fn set_any_path(&self, value: &str) -> std::io::Result<()> {
        fs::write(self.0.join("any_path"), value)
    }

    pub fn any_path(&self) -> String {
        fs::read_to_string(self.0.join("any_path")).expect("read any_path")
    }
}

/// Where an entry of the policy lies.
pub fn entry_path(name: &str) -> PathBuf {
    Path::new("/sys/kernel/config/ibgda/allow").join(name)
}

impl Drop for Allowed {
    fn drop(&mut self) {
        fs::remove_dir(&self.0)
            .unwrap_or_else(|error| panic!("rmdir {}: {error}", self.0.display()));
    }
}

/// How long anything may take that happens at all. The debug kernel is slow.
pub fn patience() -> Duration {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    Duration::from_secs(if release.contains("-debug") { 300 } else { 30 })
}

/// Waits until `condition` holds.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let patience = patience();
    let end = Instant::now() + patience;
    while !condition() {
        assert!(
            Instant::now() < end,
            "waited {} s in vain until {what}",
            patience.as_secs()
        );
        thread::sleep(Duration::from_millis(5));
    }
}

/// Asks or tells the model, at once: no program is started for it.
pub fn ask_model(command: &str, args: &[&str]) -> Value {
    ibgda_hil::machine::ask_model(command, args).unwrap_or_else(|error| panic!("{error:#}"))
}

/// The model's numbers of live objects of one NIC, by kind.
pub fn model_counts(nic: usize) -> BTreeMap<String, u64> {
    let answer = ask_model("counts", &[]);
    let name = format!("nic{nic}");
    let functions = answer["functions"]
        .as_array()
        .expect("counts has functions");
    let function = functions
        .iter()
        .find(|function| function["name"] == name.as_str())
        .unwrap_or_else(|| panic!("the model has no {name}: {answer}"));
    function
        .as_object()
        .expect("a function's counts are an object")
        .iter()
        .filter_map(|(kind, count)| Some((kind.clone(), count.as_u64()?)))
        .collect()
}

/// Those that a process's doings raise and its end must lower again. mlx5_ib keeps the keys of memory regions that are gone
/// for the next ones, after it has taken their rights away by UMR: they are free, and no process's.
pub fn live_objects(nic: usize) -> BTreeMap<String, u64> {
    let mut counts = model_counts(nic);
    let free = counts["mkey_free"];
    counts.entry("mkey".into()).and_modify(|keys| *keys -= free);
    counts.retain(|kind, _| {
        ["uar", "uctx", "pd", "mkey", "cq", "qp", "umem"].contains(&kind.as_str())
    });
    assert!(
        counts.contains_key("uar") && counts.contains_key("qp"),
        "the model counts {counts:?}"
    );
    counts
}

/// The same, once they no longer change.
pub fn settle(nic: usize) -> BTreeMap<String, u64> {
    let (mut last, mut same) = (live_objects(nic), 0);
    wait_until("the model's counts are steady", || {
        thread::sleep(Duration::from_millis(50));
        let now = live_objects(nic);
        same = if now == last { same + 1 } else { 0 };
        last = now;
        same == 10
    });
    last
}

/// Makes the kernel see a PCIe error of a function, by the aer_inject module.
pub fn inject_error(function: Bdf, uncorrectable: u32) {
    let mut record = [0; 32];
    record[..3].copy_from_slice(&[function.bus, function.device, function.function]);
    record[4..8].copy_from_slice(&uncorrectable.to_ne_bytes());
    record[28..].copy_from_slice(&function.domain.to_ne_bytes());
    fs::write("/dev/aer_inject", record).expect("write /dev/aer_inject");
}

/// Data Link Protocol Error: fatal.
pub const FATAL: u32 = 0x10;
/// Completion Timeout: not fatal.
pub const NON_FATAL: u32 = 0x4000;

/// The auxiliary device by which mlx5_ib is bound to a NIC.
fn rdma_device(nic: Bdf) -> String {
    fs::read_dir(nic.sysfs())
        .expect("the NIC's folder in sysfs")
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .find(|name| name.starts_with("mlx5_core.rdma."))
        .expect("the NIC has an RDMA device")
}

/// Unbinds mlx5_ib from a NIC; the result binds it again.
pub fn unbind_mlx5_ib(nic: Bdf) -> impl FnOnce() {
    const DRIVER: &str = "/sys/bus/auxiliary/drivers/mlx5_ib.rdma";
    let device = rdma_device(nic);
    fs::write(format!("{DRIVER}/unbind"), &device).expect("unbind mlx5_ib");
    move || {
        fs::write(format!("{DRIVER}/bind"), &device).expect("bind mlx5_ib");
        wait_for_rdma(nic);
    }
}

/// Waits until a NIC's port is active and its uverbs node there.
pub fn wait_for_rdma(nic: Bdf) {
    wait_until("the NIC's port is active", || {
        let devices = fs::read_dir(nic.sysfs().join("infiniband"));
        let device = devices.into_iter().flatten().flatten().next();
        let state =
            device.and_then(|device| fs::read_to_string(device.path().join("ports/1/state")).ok());
        state.is_some_and(|state| state.contains("ACTIVE"))
    });
    wait_until("the NIC's uverbs node exists", || {
        let nodes = fs::read_dir(nic.sysfs().join("infiniband_verbs"));
        let node = nodes.into_iter().flatten().flatten().next();
        node.is_some_and(|node| Path::new("/dev/infiniband").join(node.file_name()).exists())
    });
}

/// The registers of a stand-in GPU, which stores to a bus address on its own until told to stop (connectx::gpu).
#[derive(Debug)]
pub struct StandInGpu(crate::broker::Mapping);

impl StandInGpu {
    const ENGINE: usize = 0x1000;
    const STOP_ALL: usize = 0xc;

    pub fn new(gpu: Bdf) -> Self {
        use std::os::unix::fs::FileExt;
        fs::write(gpu.sysfs().join("enable"), "1").expect("enable the GPU's memory");
        // Bus mastering, which no driver has switched on: bit 2 of the command register.
        let config = fs::File::options()
            .read(true)
            .write(true)
            .open(gpu.sysfs().join("config"));
        let config = config.expect("open the GPU's configuration space");
        let mut command = [0; 2];
        config
            .read_exact_at(&mut command, 4)
            .expect("read the command register");
        command[0] |= 4;
        config
            .write_all_at(&command, 4)
            .expect("write the command register");
        let bar = fs::File::options()
            .read(true)
            .write(true)
            .open(gpu.sysfs().join("resource0"));
        let bar = bar.expect("open the GPU's registers");
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        Self(
            crate::broker::Mapping::new(&bar, 8192, prot, libc::MAP_SHARED, 0)
                .expect("map the GPU's registers"),
        )
    }

    fn write(&self, register: usize, value: u32) {
        // SAFETY: inside the mapping, aligned.
        unsafe {
            self.0
                .address
                .add(register)
                .cast::<u32>()
                .write_volatile(value)
        };
    }

    fn read(&self, register: usize) -> u32 {
        // SAFETY: inside the mapping, aligned.
        unsafe { self.0.address.add(register).cast::<u32>().read_volatile() }
    }

    /// Stores `word` to a bus address again and again.
    pub fn keep_storing(&self, address: u64, word: u64, period_us: u32) {
        let engine = |register| Self::ENGINE + register;
        self.write(engine(0x00), address as u32);
        self.write(engine(0x04), (address >> 32) as u32);
        self.write(engine(0x08), 8);
        self.write(engine(0x0c), period_us);
        self.write(engine(0x10), 0);
        self.write(engine(0x40), word as u32);
        self.write(engine(0x44), (word >> 32) as u32);
        self.write(engine(0x14), 1);
        assert_eq!(self.read(engine(0x18)) & 1, 1, "the GPU's engine runs");
    }

    /// Stores that reached something.
    pub fn stores(&self) -> u32 {
        self.read(Self::ENGINE + 0x20)
    }
}

impl Drop for StandInGpu {
    fn drop(&mut self) {
        self.write(Self::STOP_ALL, 1);
    }
}

/// First address of BAR0, as the bus has it.
pub fn bar0(function: Bdf) -> u64 {
    let resource = fs::read_to_string(function.sysfs().join("resource")).expect("read resource");
    let start = resource
        .split(' ')
        .next()
        .expect("BAR0")
        .trim_start_matches("0x");
    u64::from_str_radix(start, 16).expect("an address")
}
