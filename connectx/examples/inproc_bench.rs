// SPDX-License-Identifier: MIT OR Apache-2.0
//! How fast the engine is without a VM: doorbell to CQE, messages a second for 1 to 64 QPs, and bandwidth against memcpy.
//!
//! `cargo run --release -p connectx --example inproc_bench [--quick]`. Absolute numbers are the machine's; the ratios are
//! what to compare. The poster is plain stores to the queues, with none of libibgda's code.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use connectx::inproc::{Access, Fabric, Memory, Nic, Options, Qp, QpSpec};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const DEPTH: u32 = 1024;

/// A QP and what posts to it.
struct Poster {
    qp: Qp,
    posted: u64,
    completed: u64,
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
    fn poll(&mut self, every: u64) -> Result<bool> {
        let taken = self.completed / every;
        let entry = self.qp.send_cq_ring + (taken & u64::from(DEPTH - 1)) * 64;
        // SAFETY: as in `ring`; the entry is one of the CQ's.
        let own = unsafe { &*((entry + 63) as *const AtomicU8) }.load(Ordering::Acquire);
        if own >> 4 == 0xf || u64::from(own & 1) != (taken / u64::from(DEPTH)) & 1 {
            return Ok(false);
        }
        if own >> 4 != 0 {
            return Err(format!("completion of kind {:#x}", own >> 4).into());
        }
        self.completed += every;
        let consumer = self.qp.send_cq_record;
        // SAFETY: as in `ring`.
        let consumer = unsafe { &*(consumer as *const AtomicU32) };
        consumer.store(
            (((taken + 1) as u32) & 0xff_ffff).to_be(),
            Ordering::Relaxed,
        );
        Ok(true)
    }

    fn wait(&mut self, every: u64) -> Result<()> {
        let start = Instant::now();
        let mut spins = 0u32;
        while !self.poll(every)? {
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

struct Bench {
    fabric: Fabric,
    pds: (u32, u32),
    source: Memory,
    target: Memory,
    keys: (u32, u32),
}

impl Bench {
    fn new() -> Result<Self> {
        let fabric = Fabric::new(&Options::default())?;
        let (a, b) = (&fabric.nics()[0], &fabric.nics()[1]);
        let pds = (a.alloc_pd()?, b.alloc_pd()?);
        let (source, target) = (fabric.alloc(1 << 20)?, fabric.alloc(1 << 20)?);
        source.write(0, &vec![0x5a; 1 << 20]);
        target.write(0, &vec![0; 1 << 20]);
        let keys = (
            a.create_mkey(pds.0, source.addr(), 1 << 20, Access::ALL)?,
            b.create_mkey(pds.1, target.addr(), 1 << 20, Access::ALL)?,
        );
        Ok(Self {
            fabric,
            pds,
            source,
            target,
            keys,
        })
    }

    fn poster(&self) -> Result<Poster> {
        Poster::pair(&self.fabric.nics()[0], &self.fabric.nics()[1], self.pds)
    }

    fn write(&self, len: u32) -> Write {
        Write {
            remote: self.target.addr(),
            rkey: self.keys.1,
            local: self.source.addr(),
            lkey: self.keys.0,
            len,
        }
    }

    /// Nanoseconds from the doorbell to the CQE, one WRITE of 8 bytes at a time.
    fn latency(&self, rounds: u32) -> Result<f64> {
        let mut poster = self.poster()?;
        let mut times = Vec::new();
        for _ in 0..rounds {
            poster.post(self.write(8), true);
            let start = Instant::now();
            poster.ring();
            poster.wait(1)?;
            times.push(start.elapsed().as_nanos() as f64);
        }
        Ok(median(times))
    }

    /// WRITEs of 8 bytes a second over `qps` QPs, a doorbell and a completion for every 32.
    fn rate(&self, qps: usize, total: u64) -> Result<f64> {
        const EVERY: u64 = 32;
        let mut posters = Vec::new();
        for _ in 0..qps {
            posters.push(self.poster()?);
        }
        let each = total / qps as u64 / EVERY * EVERY;
        let start = Instant::now();
        loop {
            let mut open = false;
            let mut moved = false;
            for poster in &mut posters {
                while poster.poll(EVERY)? {
                    moved = true;
                }
                if poster.posted < each
                    && poster.posted - poster.completed <= u64::from(DEPTH) - EVERY
                {
                    for i in 1..=EVERY {
                        poster.post(self.write(8), i == EVERY);
                    }
                    poster.ring();
                    moved = true;
                }
                open |= poster.completed < each;
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

    /// Bytes a second of WRITEs of `len`, 8 under way, and of memcpy between the same buffers.
    fn bandwidth(&self, len: u32, rounds: u32) -> Result<(f64, f64)> {
        let mut poster = self.poster()?;
        let (mut ours, mut copies) = (Vec::new(), Vec::new());
        // In turns, so that both meet the machine in the same mood.
        for _ in 0..5 {
            let start = Instant::now();
            for _ in 0..rounds {
                while poster.posted - poster.completed >= 8 {
                    poster.wait(1)?;
                }
                poster.post(self.write(len), true);
                poster.ring();
            }
            while poster.completed < poster.posted {
                poster.wait(1)?;
            }
            ours.push(f64::from(rounds) * f64::from(len) / start.elapsed().as_secs_f64());
            let start = Instant::now();
            for _ in 0..rounds {
                // SAFETY: both are at least `len` bytes, distinct, and nothing else touches them now.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        std::hint::black_box(self.source.as_ptr()),
                        self.target.as_ptr(),
                        len as usize,
                    );
                }
                fence(Ordering::SeqCst);
            }
            copies.push(f64::from(rounds) * f64::from(len) / start.elapsed().as_secs_f64());
        }
        let mut last = [0];
        self.target.read(len as usize - 1, &mut last);
        if last != [0x5a] {
            return Err("the data did not arrive".into());
        }
        Ok((median(ours), median(copies)))
    }
}

fn main() -> Result<()> {
    let quick = std::env::args().any(|arg| arg == "--quick");
    let scale = if quick { 1 } else { 10 };
    let bench = Bench::new()?;
    println!("| what | value | ratio |\n|---|---|---|");
    let latency = bench.latency(2_000 * scale)?;
    println!("| doorbell to CQE, 8-byte WRITE | {latency:.0} ns | 1 |");
    let mut one = None;
    for qps in [1, 2, 4, 8, 16, 32, 64] {
        let rate = bench.rate(qps, 200_000 * u64::from(scale))?;
        let one = *one.get_or_insert(rate);
        println!(
            "| 8-byte WRITEs, {qps} QPs | {:.2} M/s | {:.2} of one QP |",
            rate / 1e6,
            rate / one
        );
    }
    for len in [4096, 65536, 1 << 20] {
        let rounds = ((100 << 20) / len * scale).min(20_000);
        let (ours, copy) = bench.bandwidth(len, rounds)?;
        println!(
            "| WRITEs of {len} bytes | {:.2} GB/s | {:.2} of memcpy ({:.2} GB/s) |",
            ours / 1e9,
            ours / copy,
            copy / 1e9
        );
    }
    for nic in bench.fabric.nics() {
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
