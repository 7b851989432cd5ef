// SPDX-License-Identifier: MIT OR Apache-2.0
//! The vfio-user server against the protocol crate's own client, and against clients that break the protocol.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use connectx::bus::Bus;
use connectx::gpu::{self, Gpu};
use connectx::hca_config;
use connectx::log::Referee;
use connectx::pci::{ConfigSpace, reg};
use connectx::platform::{Dma, Function, Interrupts, ResetKind};
use connectx::vfio::{Departure, Endpoint};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use vfio_user::Client;

const CONFIG: u32 = 7;
const MSIX: u32 = 2;
const EXPRESS: u64 = 0x60;
const SET_EVENTFD: u32 = 0x24;
const SET_NONE: u32 = 0x21;
const PATIENCE: Duration = Duration::from_secs(20);

/// A function that does on demand what a device does: copies memory by DMA, raises a vector. It records its calls.
#[derive(Default)]
struct Probe {
    calls: Mutex<Vec<String>>,
    host: OnceLock<(Arc<dyn Dma>, Arc<dyn Interrupts>)>,
    fault: Mutex<Option<u64>>,
}

/// A write of two quadwords copies 16 bytes from one bus address to another.
const COPY: u64 = 0x100;
/// A write raises a vector.
const RAISE: u64 = 0x200;
/// Any access panics, as a bug of the model would.
const BUG: u64 = 0x300;

impl Probe {
    fn note(&self, call: String) {
        self.calls.lock().unwrap().push(call);
    }

    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }
}

impl Function for Probe {
    fn name(&self) -> &str {
        "nic0"
    }
    fn config_space(&self) -> ConfigSpace {
        hca_config::config_space(0x0011_2233_4455_6677, false)
    }
    fn bar_sizes(&self) -> [u64; 6] {
        [hca_config::BAR0_SIZE, 0, 0, 0, 0, 0]
    }
    fn msix_vectors(&self) -> u16 {
        hca_config::MSIX_VECTORS
    }
    fn connect(&self, dma: Arc<dyn Dma>, interrupts: Arc<dyn Interrupts>) {
        assert!(self.host.set((dma, interrupts)).is_ok(), "connected once");
    }
    fn bar_read(&self, _: usize, offset: u64, data: &mut [u8]) {
        for (i, byte) in data.iter_mut().enumerate() {
            *byte = (offset as usize + i) as u8;
        }
    }
    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) {
        let (dma, interrupts) = self.host.get().unwrap();
        let quadword = |i: usize| u64::from_le_bytes(data[i * 8..][..8].try_into().unwrap());
        match offset {
            COPY => {
                let mut buf = [0; 16];
                let copied = dma
                    .read(quadword(0), &mut buf)
                    .and_then(|()| dma.write(quadword(1), &buf));
                *self.fault.lock().unwrap() = copied.err().map(|fault| fault.addr);
            }
            RAISE => interrupts.raise(data[0].into()),
            BUG => panic!("a bug"),
            _ => self.note(format!("write bar{bar} {offset:#x} {data:x?}")),
        }
    }
    fn bus_master(&self, enabled: bool) {
        self.note(format!("bus master {enabled}"));
    }
    fn bar_placed(&self, bar: usize, address: Option<u64>) {
        self.note(format!("bar{bar} {address:x?}"));
    }
    fn reset(&self, kind: ResetKind) {
        self.note(format!("reset {kind:?}"));
    }
    fn counts(&self) -> Vec<(&'static str, u64)> {
        vec![]
    }
}

struct Rig {
    path: PathBuf,
    probe: Arc<Probe>,
    referee: Referee,
    departures: Receiver<Result<Departure, String>>,
    _dir: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let probe = Arc::new(Probe::default());
        let referee = Referee::in_memory();
        let (dir, path, departures) = start(Arc::clone(&probe) as _, &Bus::new(), &referee);
        Self {
            path,
            probe,
            referee,
            departures,
            _dir: dir,
        }
    }

    fn client(&self) -> Client {
        Client::new(&self.path).unwrap()
    }

    fn departure(&self) -> Result<Departure, String> {
        self.departures
            .recv_timeout(PATIENCE)
            .expect("the server noticed that the client went")
    }
}

type Served = (
    tempfile::TempDir,
    PathBuf,
    Receiver<Result<Departure, String>>,
);

/// Serves a function until a failure of its own.
fn start(function: Arc<dyn Function>, bus: &Arc<Bus>, referee: &Referee) -> Served {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f.sock");
    let mut endpoint = Endpoint::new(&path, 0, function, bus, referee.clone()).unwrap();
    let (tell, departures) = channel();
    std::thread::spawn(move || {
        loop {
            let departure = endpoint.serve().map_err(|error| format!("{error:#}"));
            let failed = departure.is_err();
            if tell.send(departure).is_err() || failed {
                return;
            }
        }
    });
    (dir, path, departures)
}

fn config(client: &mut Client, offset: u64) -> u32 {
    let mut bytes = [0; 4];
    client.region_read(CONFIG, offset, &mut bytes).unwrap();
    u32::from_le_bytes(bytes)
}

fn memfd(len: u64) -> File {
    let file = File::from(memfd_create("ram", MFdFlags::MFD_CLOEXEC).unwrap());
    file.set_len(len).unwrap();
    file
}

fn copy(client: &mut Client, from: u64, to: u64) {
    let words = [from.to_le_bytes(), to.to_le_bytes()].concat();
    client.region_write(0, COPY, &words).unwrap();
}

#[test]
fn config_space_and_bars() {
    let rig = Rig::new();
    let mut c = rig.client();
    assert_eq!(c.region(0).unwrap().size, hca_config::BAR0_SIZE);
    assert_eq!(c.region(CONFIG).unwrap().size, 4096);
    assert_eq!(c.region(2).unwrap().size, 0);
    assert_eq!(
        c.get_irq_info(MSIX).unwrap().count,
        u32::from(hca_config::MSIX_VECTORS)
    );
    assert_eq!(c.get_irq_info(0).unwrap().count, 0);
    assert_eq!(config(&mut c, 0), 0x101b_15b3);
    assert_eq!(config(&mut c, 0x1c4), 0x4455_6677);
    c.region_write(CONFIG, 0x10, &0xf600_0000u32.to_le_bytes())
        .unwrap();
    c.region_write(CONFIG, reg::COMMAND as u64, &[0x06, 0x04])
        .unwrap();
    assert_eq!(
        rig.probe.calls(),
        ["bus master true", "bar0 Some(f6000000)"]
    );
    let mut bytes = [0; 8];
    c.region_read(0, 0x1ff_fff8, &mut bytes).unwrap();
    assert_eq!(bytes, [0xf8, 0xf9, 0xfa, 0xfb, 0xfc, 0xfd, 0xfe, 0xff]);
    for len in [4, 8] {
        c.region_write(0, 0x10800, &[7; 8][..len]).unwrap();
    }
    assert_eq!(
        rig.probe.calls(),
        [
            "write bar0 0x10800 [7, 7, 7, 7]",
            "write bar0 0x10800 [7, 7, 7, 7, 7, 7, 7, 7]"
        ]
    );
}

#[test]
fn accesses_beyond_a_region_are_refused_not_served() {
    let rig = Rig::new();
    let mut c = rig.client();
    let mut bytes = [0; 8];
    for (region, offset) in [
        (0, hca_config::BAR0_SIZE - 4),
        (0, u64::MAX - 3),
        (1, 0),
        (6, 0),
    ] {
        c.region_read(region, offset, &mut bytes).unwrap();
        assert_eq!(bytes, [0xff; 8]);
        c.region_write(region, offset, &[1; 8]).unwrap();
    }
    assert_eq!(rig.probe.calls(), [""; 0]);
    assert_eq!(rig.referee.count("nic0"), 8);
    c.region_read(CONFIG, 0x1_0000, &mut bytes).unwrap();
    assert_eq!(bytes, [0xff; 8]);
}

#[test]
fn dma_follows_the_maps_and_bus_mastering() {
    let rig = Rig::new();
    let mut c = rig.client();
    let ram = memfd(0x4000);
    ram.write_all_at(b"sixteen bytes ok", 0x1ff8).unwrap();
    c.dma_map(0x1000, 0x8000_0000, 0x1000, ram.as_raw_fd())
        .unwrap();
    c.dma_map(0x2000, 0x8000_1000, 0x1000, ram.as_raw_fd())
        .unwrap();
    let fault = || *rig.probe.fault.lock().unwrap();
    copy(&mut c, 0x8000_0ff8, 0x8000_0000);
    assert_eq!(fault(), Some(0x8000_0ff8), "bus mastering is off");
    c.region_write(CONFIG, reg::COMMAND as u64, &[0x04])
        .unwrap();
    copy(&mut c, 0x8000_0ff8, 0x8000_0000);
    assert_eq!(fault(), None);
    let mut seen = [0; 16];
    ram.read_exact_at(&mut seen, 0x1000).unwrap();
    assert_eq!(&seen, b"sixteen bytes ok");
    c.dma_unmap(0x8000_1000, 0x1000).unwrap();
    copy(&mut c, 0x8000_0ff8, 0x8000_0000);
    assert_eq!(fault(), Some(0x8000_1000));
    c.region_write(CONFIG, reg::COMMAND as u64, &[0]).unwrap();
    copy(&mut c, 0x8000_0000, 0x8000_0000);
    assert_eq!(fault(), Some(0x8000_0000));
}

#[test]
fn vectors_are_connected_one_by_one() {
    let rig = Rig::new();
    let mut c = rig.client();
    let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap();
    let fd = event.as_fd().as_raw_fd();
    c.set_irqs(MSIX, SET_EVENTFD, 3, 1, &[fd]).unwrap();
    c.region_write(0, RAISE, &[3]).unwrap();
    assert_eq!(event.read().unwrap(), 1);
    c.region_write(0, RAISE, &[2]).unwrap();
    c.region_write(0, RAISE, &[200]).unwrap();
    assert!(event.read().is_err());
    // The host may ask for an interrupt itself.
    c.set_irqs(MSIX, SET_NONE, 3, 1, &[]).unwrap();
    assert_eq!(event.read().unwrap(), 1);
    c.set_irqs(MSIX, SET_EVENTFD, 3, 1, &[]).unwrap();
    c.region_write(0, RAISE, &[3]).unwrap();
    assert!(event.read().is_err());
    c.set_irqs(MSIX, SET_EVENTFD, 15, 1, &[fd]).unwrap();
    c.set_irqs(MSIX, SET_NONE, 0, 0, &[]).unwrap();
    c.region_write(0, RAISE, &[15]).unwrap();
    assert!(event.read().is_err());
    // Out of range: refused, and the server goes on.
    for (start, count) in [(16, 1), (15, 2), (u32::MAX, 1), (0, u32::MAX)] {
        c.set_irqs(MSIX, SET_EVENTFD, start, count, &[fd]).unwrap();
        c.set_irqs(MSIX, SET_NONE, start, count, &[]).unwrap();
    }
    assert_eq!(config(&mut c, 0), 0x101b_15b3);
}

#[test]
fn masked_vectors_are_pending_and_come_when_unmasked() {
    const MASK: u32 = 0x09;
    const UNMASK: u32 = 0x11;
    let control = 0x9c + reg::MSIX_CONTROL as u64;
    let rig = Rig::new();
    let mut c = rig.client();
    let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap();
    let fd = event.as_fd().as_raw_fd();
    c.set_irqs(MSIX, SET_EVENTFD, 3, 1, &[fd]).unwrap();
    let pending = |c: &mut Client| {
        let mut bits = [0xff; 8];
        c.region_read(0, hca_config::MSIX_PENDING.into(), &mut bits)
            .unwrap();
        u64::from_le_bytes(bits)
    };
    c.set_irqs(MSIX, MASK, 3, 1, &[]).unwrap();
    c.region_write(0, RAISE, &[3]).unwrap();
    assert_eq!((pending(&mut c), event.read().ok()), (1 << 3, None));
    c.set_irqs(MSIX, UNMASK, 0, 16, &[]).unwrap();
    assert_eq!((pending(&mut c), event.read().ok()), (0, Some(1)));
    // The function's mask holds all of them back.
    c.region_write(CONFIG, control, &0xc000u16.to_le_bytes())
        .unwrap();
    for _ in 0..2 {
        c.region_write(0, RAISE, &[3]).unwrap();
    }
    c.region_write(0, RAISE, &[15]).unwrap();
    assert_eq!((pending(&mut c), event.read().ok()), (0x8008, None));
    c.region_write(CONFIG, control, &0x8000u16.to_le_bytes())
        .unwrap();
    assert_eq!((pending(&mut c), event.read().ok()), (0, Some(1)));
    // The rest of the page is the function's, and a reset takes the mask with it.
    let mut beside = [0; 2];
    c.region_read(0, u64::from(hca_config::MSIX_PENDING) - 1, &mut beside)
        .unwrap();
    assert_eq!(beside, [0xff, 0]);
    c.region_write(CONFIG, control, &0xc000u16.to_le_bytes())
        .unwrap();
    c.region_write(0, RAISE, &[3]).unwrap();
    c.reset().unwrap();
    assert_eq!((pending(&mut c), event.read().ok()), (0, None));
    c.region_write(0, RAISE, &[3]).unwrap();
    assert_eq!(event.read().ok(), Some(1));
}

#[test]
fn a_pulled_card_is_out_of_reach_and_reaches_nothing() {
    let probe = Arc::new(Probe::default());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f.sock");
    let (function, referee) = (Arc::clone(&probe), Referee::in_memory());
    let mut endpoint = Endpoint::new(&path, 0, function, &Bus::new(), referee).unwrap();
    let card = endpoint.card();
    let server = std::thread::spawn(move || [endpoint.serve().unwrap(), endpoint.serve().unwrap()]);
    let mut c = Client::new(&path).unwrap();
    let ram = memfd(0x1000);
    c.dma_map(0, 0x8000_0000, 0x1000, ram.as_raw_fd()).unwrap();
    let on = [0x06];
    c.region_write(CONFIG, reg::COMMAND as u64, &on).unwrap();
    probe.calls();
    let (dma, _) = probe.host.get().unwrap();
    assert!(dma.write(0x8000_0000, &[1]).is_ok());

    assert!(card.pull());
    assert!(dma.write(0x8000_0000, &[1]).is_err());
    assert_eq!(probe.calls(), ["bus master false", "reset Bus"]);
    assert_eq!(config(&mut c, 0), u32::MAX);
    let mut bytes = [0; 4];
    c.region_read(0, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [0xff; 4]);
    c.region_write(CONFIG, reg::COMMAND as u64, &on).unwrap();
    c.region_write(0, 0x400, &[1; 4]).unwrap();
    c.reset().unwrap();
    assert_eq!(probe.calls(), [""; 0]);

    assert!(card.insert());
    assert_eq!(config(&mut c, 0), 0x101b_15b3);
    assert_eq!(config(&mut c, reg::COMMAND as u64) & 0xffff, 0);
    assert!(dma.write(0x8000_0000, &[1]).is_err());
    c.region_write(CONFIG, reg::COMMAND as u64, &on).unwrap();
    assert!(
        dma.write(0x8000_0000, &[1]).is_ok(),
        "the maps are the host's"
    );

    // A client that comes to an empty slot finds the card in it.
    assert!(card.pull());
    drop(c);
    let mut c = Client::new(&path).unwrap();
    assert_eq!(config(&mut c, 0), 0x101b_15b3);
    drop(c);
    assert_eq!(
        server.join().unwrap(),
        [Departure::Closed, Departure::Closed]
    );
}

#[test]
fn resets_reach_the_function_with_its_config_space_clean() {
    let rig = Rig::new();
    let mut c = rig.client();
    let set_up = |c: &mut Client| {
        c.region_write(CONFIG, 0x10, &0xf600_0000u32.to_le_bytes())
            .unwrap();
        c.region_write(CONFIG, reg::COMMAND as u64, &[0x06])
            .unwrap();
        assert_eq!(
            rig.probe.calls(),
            ["bus master true", "bar0 Some(f6000000)"]
        );
    };
    set_up(&mut c);
    c.reset().unwrap();
    assert_eq!(
        rig.probe.calls(),
        ["bus master false", "bar0 None", "reset Bus"]
    );
    assert_eq!(config(&mut c, 0x10), 0xc);
    assert_eq!(config(&mut c, 4) & 0xffff, 0);
    set_up(&mut c);
    let control = EXPRESS + reg::EXPRESS_DEVICE_CONTROL as u64;
    c.region_write(CONFIG, control, &0xa810u16.to_le_bytes())
        .unwrap();
    assert_eq!(
        rig.probe.calls(),
        ["bus master false", "bar0 None", "reset FunctionLevel"]
    );
}

#[test]
fn a_client_that_goes_leaves_nothing_behind() {
    let rig = Rig::new();
    let ram = memfd(0x1000);
    let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap();
    for _ in 0..3 {
        let mut c = rig.client();
        c.region_write(CONFIG, reg::COMMAND as u64, &[0x04])
            .unwrap();
        c.dma_map(0, 0x1000, 0x1000, ram.as_raw_fd()).unwrap();
        c.set_irqs(MSIX, SET_EVENTFD, 0, 1, &[event.as_fd().as_raw_fd()])
            .unwrap();
        copy(&mut c, 0x1000, 0x1800);
        assert_eq!(*rig.probe.fault.lock().unwrap(), None);
        c.shutdown().unwrap();
        assert_eq!(rig.departure(), Ok(Departure::Closed));
        let calls = rig.probe.calls();
        assert_eq!(calls, ["bus master true", "bus master false", "reset Bus"]);
        let (dma, interrupts) = rig.probe.host.get().unwrap();
        assert!(dma.read(0x1000, &mut [0]).is_err());
        interrupts.raise(0);
        assert!(event.read().is_err());
    }
}

#[test]
fn maps_come_and_go_by_the_thousand_without_a_trace() {
    let rig = Rig::new();
    let mut c = rig.client();
    c.region_write(CONFIG, reg::COMMAND as u64, &[0x04])
        .unwrap();
    let ram = memfd(0x10_0000);
    let mapped = || {
        std::fs::read_to_string("/proc/self/maps")
            .unwrap()
            .matches("memfd:ram")
            .count()
    };
    for round in 0..2000u64 {
        let at = 0x10_0000 * (round % 7);
        c.dma_map(0, at, 0x8000, ram.as_raw_fd()).unwrap();
        c.dma_map(0x8000, at + 0x8000, 0x8000, ram.as_raw_fd())
            .unwrap();
        copy(&mut c, at + 0x7ff8, at);
        assert_eq!(*rig.probe.fault.lock().unwrap(), None);
        c.dma_unmap(at, 0x1_0000).unwrap();
    }
    copy(&mut c, 0, 8);
    assert_eq!(*rig.probe.fault.lock().unwrap(), Some(0));
    let host = rig.probe.host.get().unwrap();
    assert!(host.0.read(0x10_0000, &mut [0]).is_err());
    // Other tests of this process map memory of the same name, a handful of pieces at most.
    assert!(mapped() < 100, "{} mappings are left", mapped());
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count();
    assert!(open < 500, "{open} files are open");
}

/// A message of the protocol: header of id, command, size, flags, error; then the body.
fn message(command: u16, size: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let mut m = vec![1, 0];
    m.extend(command.to_le_bytes());
    m.extend(size.to_le_bytes());
    m.extend(flags.to_le_bytes());
    m.extend([0; 4]);
    m.extend(body);
    m
}

#[test]
fn malformed_messages_end_at_most_their_connection() {
    let rig = Rig::new();
    let access = |offset: u64, region: u32, count: u32| {
        let mut body = offset.to_le_bytes().to_vec();
        body.extend(region.to_le_bytes());
        body.extend(count.to_le_bytes());
        body
    };
    let long = message(9, 32, 0, &access(0, 0, u32::MAX));
    let cases: Vec<Vec<u8>> = vec![
        vec![],
        vec![0],
        vec![0xff; 16],
        vec![0xff; 4096],
        message(1, 0, 0, &[0; 4]),
        message(1, 24, 0, b"\0\0\0\0{\0}\0"),
        message(1, 23, 0, b"\0\0\0\0abc"),
        message(1, u32::MAX, 0, &[0; 4]),
        message(4, 16, 0, &[]),
        message(9, 32, 0, &access(0, 1 << 30, 4)),
        message(10, 32, 0, &access(0, 0, 64)),
        message(7, 32, 0, &[0xff; 16]),
        message(8, 36, 0, &[0xff; 20]),
        message(2, 48, 0, &[0xff; 32]),
        message(3, 40, 0, &[0xff; 24]),
        message(0, 16, 0, &[]),
        message(14, 16, 0, &[]),
        message(13, 16, 0x10, &[]),
        long,
    ];
    for (i, case) in cases.iter().enumerate() {
        let mut stream = UnixStream::connect(&rig.path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(case).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        // Whatever is answered, the connection ends.
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(rig.departure().is_ok(), "case {i}");
    }
    let mut c = rig.client();
    assert_eq!(config(&mut c, 0), 0x101b_15b3);
}

#[test]
fn a_bug_of_the_function_is_a_failure_not_a_departure() {
    let rig = Rig::new();
    let mut c = rig.client();
    assert!(c.region_write(0, BUG, &[0; 4]).is_err());
    assert!(rig.departure().unwrap_err().contains("nic0 panicked"));
}

#[test]
fn a_gpus_memory_can_be_mapped_by_the_client() {
    let gpu = Arc::new(Gpu::new(0, Referee::in_memory()).unwrap());
    let (_dir, path, _departures) = start(gpu, &Bus::new(), &Referee::in_memory());
    let mut c = Client::new(&path).unwrap();
    let bar = u32::try_from(gpu::MEMORY_BAR).unwrap();
    c.region_write(bar, 0x1234, b"by message").unwrap();
    let region = c.region(bar).unwrap();
    assert_eq!(region.size, gpu::MEMORY_SIZE);
    assert_eq!(region.sparse_areas.len(), 1);
    let file = region.file_offset.as_ref().unwrap();
    let mut seen = [0; 10];
    file.file()
        .read_exact_at(&mut seen, file.start() + 0x1234)
        .unwrap();
    assert_eq!(&seen, b"by message");
    let mut id = [0; 4];
    c.region_read(u32::try_from(gpu::REGISTERS_BAR).unwrap(), 0, &mut id)
        .unwrap();
    assert_eq!(&id, b"GPU!");
}

#[test]
fn only_stale_sockets_are_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f.sock");
    let endpoint =
        |probe: Arc<Probe>| Endpoint::new(&path, 0, probe, &Bus::new(), Referee::in_memory());
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(endpoint(Arc::default()).is_ok());
    std::fs::write(&path, "data").unwrap();
    let error = endpoint(Arc::default()).err().unwrap();
    assert!(error.to_string().contains("no socket"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"data");
}
