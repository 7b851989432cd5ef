// SPDX-License-Identifier: MIT OR Apache-2.0
use super::*;
use crate::bus::{Bus, Port};
use crate::irq::Vectors;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::os::unix::fs::FileExt;

const RAM: u64 = 0x10_0000;
const NIC_BAR: u64 = 0xfe00_0000;
const PATIENCE: Duration = Duration::from_secs(20);

/// A function whose only register remembers the last write and counts them.
struct Target {
    name: String,
    writes: Mutex<Vec<(u64, Vec<u8>)>>,
}

impl Function for Target {
    fn name(&self) -> &str {
        &self.name
    }
    fn config_space(&self) -> ConfigSpace {
        crate::hca_config::config_space(1, false)
    }
    fn bar_sizes(&self) -> [u64; 6] {
        [0x10000, 0, 0, 0, 0, 0]
    }
    fn msix_vectors(&self) -> u16 {
        0
    }
    fn connect(&self, _: Arc<dyn Dma>, _: Arc<dyn Interrupts>) {}
    fn bar_read(&self, _: usize, _: u64, _: &mut [u8]) {}
    fn bar_write(&self, _: usize, offset: u64, data: &[u8]) {
        self.writes.lock().unwrap().push((offset, data.to_vec()));
    }
    fn bus_master(&self, _: bool) {}
    fn bar_placed(&self, _: usize, _: Option<u64>) {}
    fn reset(&self, _: ResetKind) {}
    fn counts(&self) -> Vec<(&'static str, u64)> {
        vec![]
    }
}

struct Rig {
    bus: Arc<Bus>,
    gpu: Arc<Gpu>,
    port: Arc<Port>,
    nic: Arc<Target>,
    nic_port: Arc<Port>,
    ram: File,
}

impl Rig {
    fn new() -> Self {
        let bus = Bus::new();
        let gpu = Arc::new(Gpu::new(0, Referee::in_memory()).unwrap());
        let port = Port::new(&bus, 0);
        gpu.connect(Arc::clone(&port) as _, Arc::new(Vectors::new(0)));
        let ram = File::from(memfd_create("ram", MFdFlags::MFD_CLOEXEC).unwrap());
        ram.set_len(0x1000).unwrap();
        port.system()
            .map(RAM, 0x1000, ram.try_clone().unwrap(), 0, true)
            .unwrap();
        port.system().enable(true);
        let nic = Arc::new(Target {
            name: "nic0".into(),
            writes: Mutex::default(),
        });
        let nic_port = Port::new(&bus, 1);
        let rig = Self {
            bus,
            gpu,
            port,
            nic,
            nic_port,
            ram,
        };
        rig.place_nic(Some(NIC_BAR));
        rig
    }

    fn place_nic(&self, address: Option<u64>) {
        let nic: Arc<dyn Function> = Arc::clone(&self.nic) as _;
        self.nic_port.place(&nic, 0, address);
    }

    fn set(&self, engine: usize, register: u64, value: u32) {
        let at = regs::ENGINE_BASE + engine as u64 * regs::ENGINE_STRIDE + register;
        self.gpu.bar_write(REGISTERS_BAR, at, &value.to_le_bytes());
    }

    fn get(&self, engine: usize, register: u64) -> u32 {
        let at = regs::ENGINE_BASE + engine as u64 * regs::ENGINE_STRIDE + register;
        let mut bytes = [0; 4];
        self.gpu.bar_read(REGISTERS_BAR, at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn start(&self, engine: usize, address: u64, data: &[u8], period_us: u32, count: u32) {
        let at = regs::ENGINE_BASE + engine as u64 * regs::ENGINE_STRIDE;
        self.gpu
            .bar_write(REGISTERS_BAR, at + regs::ADDRESS, &address.to_le_bytes());
        self.gpu.bar_write(REGISTERS_BAR, at + regs::DATA, data);
        self.set(engine, regs::LENGTH, data.len() as u32);
        self.set(engine, regs::PERIOD_US, period_us);
        self.set(engine, regs::COUNT, count);
        self.set(engine, regs::COMMAND, regs::COMMAND_START);
    }

    fn wait(&self, what: &str, mut done: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done() {
            assert!(Instant::now() < deadline, "waiting for {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn wait_idle(&self, engine: usize) {
        self.wait("the engine to end", || {
            self.get(engine, regs::STATUS) & regs::STATUS_RUNNING == 0
        });
    }

    fn writes(&self) -> usize {
        self.nic.writes.lock().unwrap().len()
    }
}

#[test]
fn counted_stores_reach_memory_and_registers() {
    let rig = Rig::new();
    let data: Vec<u8> = (1..=64).collect();
    rig.start(0, RAM + 0x40, &data, 0, 1);
    rig.wait_idle(0);
    let mut seen = [0; 64];
    rig.ram.read_exact_at(&mut seen, 0x40).unwrap();
    assert_eq!(seen[..], data[..]);
    rig.start(63, NIC_BAR + 0x800, &data[..8], 0, 1000);
    rig.wait_idle(63);
    assert_eq!(
        (rig.get(63, regs::DONE), rig.get(63, regs::FAILURES)),
        (1000, 0)
    );
    let writes = rig.nic.writes.lock().unwrap();
    assert_eq!(writes.len(), 1000);
    assert!(
        writes
            .iter()
            .all(|(at, bytes)| *at == 0x800 && bytes[..] == data[..8])
    );
}

#[test]
fn a_stream_outlives_its_target_and_ends_by_command() {
    let rig = Rig::new();
    rig.start(3, NIC_BAR, &[7; 4], 50, 0);
    rig.wait("stores", || rig.writes() > 5);
    rig.place_nic(None);
    rig.wait("failures", || rig.get(3, regs::FAILURES) > 5);
    assert_ne!(rig.get(3, regs::STATUS) & regs::STATUS_FAILED, 0);
    let before = rig.writes();
    rig.place_nic(Some(NIC_BAR));
    rig.wait("stores again", || rig.writes() > before);
    let mut running = [0; 8];
    rig.gpu.bar_read(REGISTERS_BAR, regs::RUNNING, &mut running);
    assert_eq!(u64::from_le_bytes(running), 1 << 3);
    rig.set(3, regs::COMMAND, regs::COMMAND_STOP);
    rig.wait_idle(3);
    let after = rig.writes();
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(rig.writes(), after);
}

#[test]
fn own_reset_ends_everything() {
    let rig = Rig::new();
    rig.gpu.bar_write(MEMORY_BAR, MEMORY_SIZE - 4, b"keep");
    for engine in 0..regs::ENGINES {
        rig.start(engine, NIC_BAR, &[1; 8], 10, 0);
    }
    rig.wait("stores", || rig.writes() > 100);
    rig.gpu.reset(ResetKind::FunctionLevel);
    let after = rig.writes();
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(rig.writes(), after);
    assert_eq!(rig.gpu.counts()[0], ("engines_running", 0));
    assert_eq!(rig.get(5, regs::LENGTH), 0);
    let mut memory = [1; 4];
    rig.gpu.bar_read(MEMORY_BAR, MEMORY_SIZE - 4, &mut memory);
    assert_eq!(memory, [0; 4]);
    rig.start(0, RAM, &[9; 8], 0, 1);
    rig.wait_idle(0);
    assert_eq!(rig.get(0, regs::DONE), 1);
}

#[test]
fn nothing_leaves_without_bus_mastering() {
    let rig = Rig::new();
    rig.port.system().enable(false);
    rig.start(0, NIC_BAR, &[1; 4], 0, 3);
    rig.start(1, RAM, &[1; 4], 0, 3);
    rig.wait_idle(0);
    rig.wait_idle(1);
    assert_eq!((rig.get(0, regs::DONE), rig.get(0, regs::FAILURES)), (0, 3));
    assert_eq!((rig.get(1, regs::DONE), rig.get(1, regs::FAILURES)), (0, 3));
    assert_eq!(rig.writes(), 0);
}

#[test]
fn bad_settings_are_refused() {
    let rig = Rig::new();
    for (address, len, period, count) in [
        (RAM, 12, 1, 1),
        (RAM, 0, 1, 1),
        (RAM + 4, 8, 1, 1),
        (RAM + 32, 64, 1, 1),
        (RAM, 4, 0, 0),
    ] {
        rig.start(2, address, &vec![0; len], period, count);
        assert_eq!(
            rig.get(2, regs::STATUS),
            regs::STATUS_REFUSED,
            "{len} bytes at {address:#x}"
        );
    }
    rig.set(2, regs::COMMAND, 9);
    rig.gpu
        .bar_write(REGISTERS_BAR, regs::ENGINE_BASE + 1, &[1]);
    assert_eq!(rig.gpu.referee.count("gpu0"), 7);
    rig.start(2, RAM, &[0; 4], 0, 1);
    rig.wait_idle(2);
    assert_eq!(rig.get(2, regs::STATUS), 0);
}

#[test]
fn every_register_offset_can_be_read_and_written() {
    let rig = Rig::new();
    for at in (0..regs::ENGINE_BASE + 66 * regs::ENGINE_STRIDE).step_by(4) {
        rig.gpu.bar_write(REGISTERS_BAR, at, &[0xff; 4]);
        rig.gpu.bar_read(REGISTERS_BAR, at + 1, &mut [0; 8]);
    }
    rig.gpu
        .bar_write(REGISTERS_BAR, REGISTERS_SIZE - 4, &[0xff; 4]);
    let mut id = [0; 4];
    rig.gpu.bar_read(REGISTERS_BAR, regs::ID, &mut id);
    assert_eq!(&id, b"GPU!");
}

#[test]
fn two_gpus_that_store_into_each_other_do_not_wait_for_ever() {
    let rig = Rig::new();
    let other = Arc::new(Gpu::new(1, Referee::in_memory()).unwrap());
    let other_port = Port::new(&rig.bus, 2);
    other_port.system().enable(true);
    other.connect(Arc::clone(&other_port) as _, Arc::new(Vectors::new(0)));
    let (a, b): (Arc<dyn Function>, Arc<dyn Function>) = (Arc::clone(&rig.gpu) as _, other.clone());
    rig.port.place(&a, REGISTERS_BAR, Some(0xc000_0000));
    other_port.place(&b, REGISTERS_BAR, Some(0xd000_0000));
    rig.start(
        0,
        0xd000_0000 + regs::ENGINE_BASE + regs::DATA,
        &[5; 4],
        0,
        20_000,
    );
    let back = Rig {
        gpu: other,
        port: other_port,
        ..Rig::new()
    };
    back.start(
        1,
        0xc000_0000 + regs::ENGINE_BASE + 0x200 + regs::DATA,
        &[6; 4],
        0,
        20_000,
    );
    rig.wait_idle(0);
    back.wait_idle(1);
    assert_eq!(rig.get(0, regs::DONE), 20_000);
    assert_eq!(back.get(1, regs::DONE), 20_000);
    assert_eq!(back.get(0, regs::DATA), 0x0505_0505);
    assert_eq!(rig.get(2, regs::DATA), 0x0606_0606);
}

#[test]
fn a_nic_reaches_the_gpus_memory_by_dma_but_not_its_registers() {
    let rig = Rig::new();
    let gpu: Arc<dyn Function> = Arc::clone(&rig.gpu) as _;
    rig.port.place(&gpu, MEMORY_BAR, Some(0x38_0000_0000));
    rig.port.place(&gpu, REGISTERS_BAR, Some(0xc000_0000));
    let nic = &rig.nic_port;
    assert!(
        nic.write(0x38_0000_0010, b"payload!").is_err(),
        "bus mastering is off"
    );
    nic.system().enable(true);
    nic.write(0x38_0000_0010, b"payload!").unwrap();
    let mut seen = [0; 8];
    rig.gpu.bar_read(MEMORY_BAR, 0x10, &mut seen);
    assert_eq!(&seen, b"payload!");
    assert_eq!(
        nic.atomic64(0x38_0000_0020, &mut |old| Some(old + 3)),
        Ok(0)
    );
    nic.read(0x38_0000_0020, &mut seen).unwrap();
    assert_eq!(u64::from_ne_bytes(seen), 3);
    assert!(nic.publish(0x38_0000_0020, &[1; 8]).is_ok());
    assert!(
        nic.write(0x38_0000_0000 + MEMORY_SIZE - 4, &[0; 8])
            .is_err()
    );
    assert!(nic.write(0xc000_0000, &[0; 8]).is_err());
}
