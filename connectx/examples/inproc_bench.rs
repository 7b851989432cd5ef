// SPDX-License-Identifier: MIT OR Apache-2.0
//! How fast the engine is without a VM: doorbell to CQE, messages a second for 1 to 64 QPs, and bandwidth against memcpy.
//!
//! `cargo run --release -p connectx --example inproc_bench [--quick]`. Absolute numbers are the machine's; the ratios are
//! what to compare. Everything is measured in turns in several windows, of which the best counts: what else runs on the
//! machine only ever makes one slower. The poster is plain stores to the queues, with none of libibgda's code.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use connectx::inproc::{Access, Fabric, Memory, Nic, Options, Qp, QpSpec};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const DEPTH: u32 = 1024;
/// WRITEs for each doorbell and completion where the rate is measured.
const EVERY: u64 = 32;

/// A QP and what posts to it.
struct Poster {
    qp: Qp,
    posted: u64,
    completed: u64,
    /// Completions taken from the queue.
    taken: u64,
    /// What `posted` is once the WQEs are done that have completions to come.
    signaled: VecDeque<u64>,
}

/// One RDMA WRITE.
#[derive(Clone, Copy)]
struct Write {
    remote: u64,
    rkey: u32,
    local: u64,
    lkey: u32,
    len: u32,
}

impl Poster {
    /// A QP of `from` connected to one of `to`.
    fn pair(from: &Nic, to: &Nic, pds: (u32, u32)) -> Result<Self> {
        let spec = QpSpec {
            send_depth: DEPTH,
            ..QpSpec::default()
        };
        let qp = from.open_qp(pds.0, &spec)?;
        let other = to.open_qp(pds.1, &spec)?;
        from.connect(qp.qpn, &other.peer(to.lid()))?;
        to.connect(other.qpn, &qp.peer(from.lid()))?;
        Ok(Self {
            qp,
            posted: 0,
            completed: 0,
            taken: 0,
            signaled: VecDeque::new(),
        })
    }

    /// Writes a WQE into its slot.
    fn post(&mut self, write: Write, signaled: bool) {
        let index = self.posted as u16;
        let slot = self.qp.send_ring + u64::from(index as u32 & (DEPTH - 1)) * 64;
        let ce = if signaled { 8 } else { 0 };
        let words = [
            be((u64::from(index) << 40) | (0x08 << 32) | (u64::from(self.qp.qpn) << 8) | 3),
            be(ce << 32),
            be(write.remote),
            be(u64::from(write.rkey) << 32),
            be((u64::from(write.len) << 32) | u64::from(write.lkey)),
            be(write.local),
        ];
        for (i, word) in words.into_iter().enumerate() {
            quad(slot + 8 * i as u64).store(word, Ordering::Relaxed);
        }
        self.posted += 1;
        if signaled {
            self.signaled.push_back(self.posted);
        }
    }

    /// Slots that are free.
    fn room(&self) -> u64 {
        u64::from(DEPTH) - (self.posted - self.completed)
    }

    /// Posts [`EVERY`] WQEs of which the last has a completion.
    fn fill(&mut self, write: Write) {
        for i in 1..=EVERY {
            self.post(write, i == EVERY);
        }
    }

    fn burst(&mut self, write: Write) {
        self.fill(write);
        self.ring();
    }

    fn ring(&self) {
        let record = self.qp.record + 4;
        // SAFETY: the record lies in the QP's own memory, which the fabric keeps.
        let record = unsafe { &*(record as *const AtomicU32) };
        record.store((self.posted as u32 & 0xffff).to_be(), Ordering::Release);
        fence(Ordering::SeqCst);
        let value = be(((self.posted & 0xffff) << 40) | (u64::from(self.qp.qpn) << 8));
        quad(self.qp.doorbell).store(value, Ordering::Release);
    }

    /// Takes a completion if there is one.
    fn poll(&mut self) -> Result<bool> {
        let taken = self.taken;
        let entry = self.qp.send_cq_ring + (taken & u64::from(DEPTH - 1)) * 64;
        // SAFETY: as in `ring`; the entry is one of the CQ's.
        let own = unsafe { &*((entry + 63) as *const AtomicU8) }.load(Ordering::Acquire);
        if own >> 4 == 0xf || u64::from(own & 1) != (taken / u64::from(DEPTH)) & 1 {
            return Ok(false);
        }
        if own >> 4 != 0 {
            return Err(format!("completion of kind {:#x}", own >> 4).into());
        }
        self.taken += 1;
        self.completed = self.signaled.pop_front().ok_or("one completion too many")?;
        let consumer = self.qp.send_cq_record;
        // SAFETY: as in `ring`.
        let consumer = unsafe { &*(consumer as *const AtomicU32) };
        consumer.store(
            (((taken + 1) as u32) & 0xff_ffff).to_be(),
            Ordering::Relaxed,
        );
        Ok(true)
    }

    fn wait(&mut self) -> Result<()> {
        let start = Instant::now();
        let mut spins = 0u32;
        while !self.poll()? {
            spins += 1;
            if spins % 1024 == 0 {
                std::thread::yield_now();
                if start.elapsed() > Duration::from_secs(10) {
                    return Err("no completion within 10 s".into());
                }
            }
            std::hint::spin_loop();
        }
        Ok(())
    }
}

fn be(value: u64) -> u64 {
    value.to_be()
}

fn quad(addr: u64) -> &'static AtomicU64 {
    // SAFETY: only called for aligned places in queues and UAR pages, which the fabric keeps while it is used.
    unsafe { &*(addr as *const AtomicU64) }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

const QPS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const SIZES: [usize; 11] = [
    8,
    64,
    512,
    4096,
    16384,
    65536,
    262_144,
    1 << 20,
    2 << 20,
    4 << 20,
    8 << 20,
];
const BUFFER: usize = 8 << 20;

struct Bench {
    fabric: Fabric,
    source: Memory,
    target: Memory,
    keys: (u32, u32),
    /// A pair of QPs for each that is posted to.
    posters: Vec<Poster>,
}

impl Bench {
    fn new(qps: usize, spin: Duration) -> Result<Self> {
        let fabric = Fabric::new(&Options {
            spin,
            ..Options::default()
        })?;
        let (a, b) = (&fabric.nics()[0], &fabric.nics()[1]);
        let pds = (a.alloc_pd()?, b.alloc_pd()?);
        let (source, target) = (fabric.alloc(BUFFER)?, fabric.alloc(BUFFER)?);
        source.write(0, &vec![0x5a; BUFFER]);
        target.write(0, &vec![0; BUFFER]);
        let keys = (
            a.create_mkey(pds.0, source.addr(), BUFFER as u64, Access::ALL)?,
            b.create_mkey(pds.1, target.addr(), BUFFER as u64, Access::ALL)?,
        );
        let posters = (0..qps).map(|_| Poster::pair(a, b, pds));
        let posters = posters.collect::<Result<_>>()?;
        Ok(Self {
            fabric,
            source,
            target,
            keys,
            posters,
        })
    }

    fn write(&self, len: usize) -> Write {
        Write {
            remote: self.target.addr(),
            rkey: self.keys.1,
            local: self.source.addr(),
            lkey: self.keys.0,
            len: len as u32,
        }
    }

    /// Nanoseconds from the doorbell to the CQE, one WRITE of 8 bytes at a time.
    fn latency(&mut self, rounds: u32) -> Result<f64> {
        let write = self.write(8);
        let poster = &mut self.posters[0];
        let mut times = Vec::new();
        for _ in 0..rounds {
            poster.post(write, true);
            let start = Instant::now();
            poster.ring();
            poster.wait()?;
            times.push(start.elapsed().as_nanos() as f64);
        }
        Ok(median(times))
    }

    /// WRITEs of 8 bytes a second over `qps` QPs, a doorbell and a completion for every 32.
    fn rate(&mut self, qps: usize, total: u64) -> Result<f64> {
        let write = self.write(8);
        let posters = &mut self.posters[..qps];
        let each = total / qps as u64 / EVERY * EVERY;
        let ends: Vec<u64> = posters.iter().map(|poster| poster.posted + each).collect();
        let start = Instant::now();
        loop {
            let mut open = false;
            let mut moved = false;
            for (poster, end) in posters.iter_mut().zip(&ends) {
                while poster.poll()? {
                    moved = true;
                }
                if poster.posted < *end && poster.room() >= EVERY {
                    poster.burst(write);
                    moved = true;
                }
                open |= poster.completed < *end;
            }
            if !open {
                break;
            }
            if !moved {
                std::thread::yield_now();
            }
            if start.elapsed() > Duration::from_secs(60) {
                return Err("messages do not complete".into());
            }
        }
        Ok((each * qps as u64) as f64 / start.elapsed().as_secs_f64())
    }

    /// Bytes a second of WRITEs of `len`, up to 8 under way, and of memcpy between the same buffers.
    fn bandwidth(&mut self, len: usize, rounds: u32) -> Result<(f64, f64)> {
        let write = self.write(len);
        let poster = &mut self.posters[0];
        let rate = |start: Instant| f64::from(rounds) * len as f64 / start.elapsed().as_secs_f64();
        let start = Instant::now();
        for _ in 0..rounds {
            while poster.posted - poster.completed >= 8 {
                poster.wait()?;
            }
            poster.post(write, true);
            poster.ring();
        }
        while poster.completed < poster.posted {
            poster.wait()?;
        }
        let ours = rate(start);
        let start = Instant::now();
        for _ in 0..rounds {
            // SAFETY: both are at least `len` bytes, distinct, and nothing else touches them now.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    std::hint::black_box(self.source.as_ptr()),
                    self.target.as_ptr(),
                    len,
                );
            }
            fence(Ordering::SeqCst);
        }
        let copy = rate(start);
        let mut last = [0];
        self.target.read(len - 1, &mut last);
        if last != [0x5a] {
            return Err("the data did not arrive".into());
        }
        Ok((ours, copy))
    }

    /// Nanoseconds of processor time that the engine takes for a WRITE of 8 bytes, when it sleeps as soon as it can.
    fn engine_time(&mut self, rounds: u64) -> Result<f64> {
        let write = self.write(8);
        let poster = &mut self.posters[0];
        let before = engine_nanoseconds()?;
        for _ in 0..rounds {
            while poster.room() >= EVERY {
                poster.fill(write);
            }
            poster.ring();
            while poster.completed < poster.posted {
                if !poster.poll()? {
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
        }
        let after = engine_nanoseconds()?;
        Ok((after - before) as f64 / (rounds * u64::from(DEPTH)) as f64)
    }

    fn check(&self) -> Result<()> {
        for nic in self.fabric.nics() {
            for name in [
                "torn_wqes",
                "doorbells_ahead",
                "foreign_doorbells",
                "error_cqes",
            ] {
                if nic.count(name) != 0 {
                    return Err(format!("{}: {} {name}", nic.name(), nic.count(name)).into());
                }
            }
        }
        Ok(())
    }
}

/// Processor time of the engine thread, of which there must be one.
fn engine_nanoseconds() -> Result<u64> {
    for task in std::fs::read_dir("/proc/self/task")? {
        let path = task?.path();
        if std::fs::read_to_string(path.join("comm"))?.trim() == "engine" {
            let stat = std::fs::read_to_string(path.join("schedstat"))?;
            let time = stat.split_whitespace().next().ok_or("no schedstat")?;
            return Ok(time.parse()?);
        }
    }
    Err("no engine thread".into())
}

fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().unwrap_or("?").to_string()
}

fn main() -> Result<()> {
    let quick = std::env::args().any(|arg| arg == "--quick");
    let (windows, scale) = if quick { (3, 1) } else { (7, 3) };
    let load_before = load();
    let mut idle = 0.0;
    let mut per_message = f64::MAX;
    {
        let mut bench = Bench::new(1, Duration::ZERO)?;
        for _ in 0..windows {
            per_message = per_message.min(bench.engine_time(20 * scale)?);
        }
        std::thread::sleep(Duration::from_millis(500));
        let before = engine_nanoseconds()?;
        std::thread::sleep(Duration::from_secs(1));
        idle += (engine_nanoseconds()? - before) as f64 / 1e9;
        bench.check()?;
    }
    let mut bench = Bench::new(64, Options::default().spin)?;
    let (mut latency, mut among) = (f64::MAX, f64::MAX);
    let mut rates = [0f64; QPS.len()];
    let mut bands = [(0f64, 0f64); SIZES.len()];
    for _ in 0..windows {
        // Its engine ends with it: it would take a processor from the other one.
        let mut alone = Bench::new(1, Options::default().spin)?;
        latency = latency.min(alone.latency(1000 * scale as u32)?);
        alone.check()?;
        drop(alone);
        among = among.min(bench.latency(1000 * scale as u32)?);
        for (best, qps) in rates.iter_mut().zip(QPS) {
            *best = best.max(bench.rate(qps, 100_000 * scale)?);
        }
        for (best, len) in bands.iter_mut().zip(SIZES) {
            let rounds = ((64 << 20) / len * scale as usize).clamp(8, 20_000);
            let (ours, copy) = bench.bandwidth(len, rounds as u32)?;
            *best = (best.0.max(ours), best.1.max(copy));
        }
    }
    bench.check()?;
    println!("| what | value | ratio |\n|---|---|---|");
    println!("| doorbell to CQE, 8-byte WRITE | {latency:.0} ns | 1 |");
    println!(
        "| the same with the doorbell pages of 64 QPs | {among:.0} ns | {:.2} |",
        among / latency
    );
    let between = 1e9 / rates[0];
    println!(
        "| time for each of many 8-byte WRITEs, 1 QP | {between:.0} ns | {:.2} of doorbell to CQE |",
        between / latency
    );
    println!(
        "| processor time of the engine for each | {per_message:.0} ns | {:.2} of that |",
        per_message / between
    );
    println!(
        "| processor time of the engine with nothing to do | {:.1} ms a second | {idle:.4} of a processor |",
        idle * 1e3
    );
    for (rate, qps) in rates.iter().zip(QPS) {
        println!(
            "| 8-byte WRITEs, {qps} QPs | {:.2} M/s | {:.2} of one QP |",
            rate / 1e6,
            rate / rates[0]
        );
    }
    for ((ours, copy), len) in bands.iter().zip(SIZES) {
        println!(
            "| WRITEs of {len} bytes | {:.2} GB/s | {:.2} of memcpy ({:.2} GB/s) |",
            ours / 1e9,
            ours / copy,
            copy / 1e9
        );
    }
    println!(
        "\nBest of {windows} windows; load average {load_before} before and {} after.",
        load()
    );
    Ok(())
}
