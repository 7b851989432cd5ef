// SPDX-License-Identifier: MIT OR Apache-2.0
//! How fast the model is in a virtual machine, through rdma-core: doorbell to CQE with and without BlueFlame, messages a
//! second for 1 to 64 QPs, and bandwidth against memcpy.
//!
//! `./ci/vm --nics 2 --no-ibgda -- vm-bench [WINDOWS]`. As of `inproc_bench`, only the ratios of one run say something, what
//! is measured is measured in turns, and of several windows the best counts.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ibgda_verbs_sys::ibv_send_flags as flags;
use ibgda_vmtests::machine::nics;
use ibgda_vmtests::rdma::{Cq, Memory, Nic, Qp, Sizes, Work};
use ibgda_vmtests::tools::model_counter;

const QPS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const SIZES: [usize; 7] = [8, 64, 512, 4 << 10, 64 << 10, 256 << 10, 1 << 20];
/// WRITEs for each doorbell and completion where the rate is measured.
const EVERY: usize = 32;
/// Doorbells in a window.
const ROUNDS: usize = 300;

/// QPs of one NIC connected to as many of another.
struct Bench {
    qps: Vec<Qp>,
    _others: Vec<Qp>,
    cqs: Vec<Cq>,
    _other_cq: Cq,
    from: Memory,
    to: Memory,
    _nics: [Nic; 2],
}

impl Bench {
    fn new(count: usize) -> Result<Self> {
        let nics = [Nic::open(nics()[0])?, Nic::open(nics()[1])?];
        let sizes = Sizes {
            send: 2 * EVERY as u32,
            receive: 1,
        };
        let cqs = (0..count)
            .map(|_| Cq::new(&nics[0], 64))
            .collect::<Result<Vec<_>>>()?;
        let other_cq = Cq::new(&nics[1], 64)?;
        let open = |nic: &Nic, cq: &Cq| Qp::with_inline(nic, cq, cq, None, sizes, 64);
        let qps = cqs
            .iter()
            .map(|cq| open(&nics[0], cq))
            .collect::<Result<Vec<_>>>()?;
        let others = qps
            .iter()
            .map(|_| open(&nics[1], &other_cq))
            .collect::<Result<Vec<_>>>()?;
        for (qp, other) in qps.iter().zip(&others) {
            qp.connect(nics[1].lid, other.number)?;
            other.connect(nics[0].lid, qp.number)?;
        }
        let longest = SIZES[SIZES.len() - 1];
        Ok(Self {
            qps,
            _others: others,
            cqs,
            _other_cq: other_cq,
            from: Memory::new(&nics[0], longest)?,
            to: Memory::new(&nics[1], longest)?,
            _nics: nics,
        })
    }

    fn work(&self, len: usize) -> Work {
        Work::write(0, self.from.sge(0, len), self.to.remote(0))
    }

    /// Time of one WRITE after the other, each waited for, the QPs in turns: what the fastest twentieth stays below. The
    /// guest, QEMU and the model are processes that others run beside.
    fn latency(&self, work: Work) -> Result<Duration> {
        let mut times = Vec::with_capacity(ROUNDS);
        for round in 0..ROUNDS {
            let index = round % self.qps.len();
            let start = Instant::now();
            self.qps[index].post(&[work])?;
            self.cqs[index].next()?;
            times.push(start.elapsed());
        }
        times.sort();
        Ok(times[ROUNDS / 20])
    }

    /// Whether the model takes WQEs from UAR pages: of copies that ask for no completion it can only be told so.
    fn copies(&self) -> Result<bool> {
        let taken = || model_counter("nic0", "blueflame_wqes");
        let before = taken()?;
        let work = self.work(8).and(flags::IBV_SEND_INLINE);
        for index in 1..=16 {
            let work = if index == 16 { work } else { work.silent() };
            self.qps[0].post(&[work])?;
        }
        self.cqs[0].next()?;
        Ok(taken()? > before)
    }

    /// Time of each of many WRITEs, `burst` to a doorbell, two doorbells of each of the first `count` QPs in flight.
    fn rate(&self, count: usize, burst: usize, work: Work) -> Result<Duration> {
        let mut list = vec![work.silent(); burst];
        list[burst - 1] = work;
        let turns = ROUNDS.div_ceil(count);
        let start = Instant::now();
        for turn in 0..turns + 2 {
            for index in 0..count {
                if turn >= 2 {
                    self.cqs[index].next()?;
                }
                if turn < turns {
                    self.qps[index].post(&list)?;
                }
            }
        }
        Ok(start.elapsed() / (turns * count * burst) as u32)
    }

    /// Time of one copy by this processor.
    fn memcpy(&self, len: usize) -> Duration {
        let (from, mut to) = (vec![1u8; len], vec![0u8; len]);
        let copies = (4 << 20) / len.max(1024);
        let start = Instant::now();
        for _ in 0..copies {
            to.copy_from_slice(std::hint::black_box(&from));
            std::hint::black_box(&to);
        }
        start.elapsed() / copies as u32
    }
}

/// The best of several times for each of several things, measured in turns.
fn best(windows: usize, things: &mut [&mut dyn FnMut() -> Result<Duration>]) -> Result<Vec<f64>> {
    let mut best = vec![f64::INFINITY; things.len()];
    for _ in 0..windows {
        for (thing, best) in things.iter_mut().zip(&mut best) {
            *best = best.min(thing()?.as_secs_f64());
        }
    }
    Ok(best)
}

fn cells(values: impl Iterator<Item = f64>) -> String {
    let cells: Vec<String> = values.map(|value| format!("{value:.2}")).collect();
    cells.join(" | ")
}

fn main() -> Result<()> {
    let windows = std::env::args().nth(1).map_or(Ok(5), |n| n.parse())?;
    ensure!(windows > 0, "no windows");
    let bench = Bench::new(64)?;
    let one = Bench::new(1)?;
    // SAFETY: this program has one thread.
    unsafe { std::env::set_var("MLX5_SHUT_UP_BF", "1") };
    let plain = Bench::new(1)?;
    let short = |bench: &Bench| bench.work(8).and(flags::IBV_SEND_INLINE);

    let found = best(
        windows,
        &mut [
            &mut || plain.latency(short(&plain)),
            &mut || one.latency(short(&one)),
            &mut || bench.latency(bench.work(8)),
            &mut || one.latency(one.work(8)),
            &mut || one.rate(1, 1, one.work(8)),
            &mut || one.rate(1, EVERY, one.work(8)),
        ],
    )?;
    let unit = found[0];
    println!("| what | ratio |\n|---|---|");
    for (what, value) in [
        "doorbell to CQE of an 8-byte WRITE, inline, without BlueFlame",
        "the same with BlueFlame",
        "the same, not inline, among the doorbell pages of 64 QPs",
        "the same, not inline, alone",
        "time for each of many 8-byte WRITEs on one QP, a copy for each",
        "the same, 32 for each doorbell",
    ]
    .iter()
    .zip(&found)
    {
        println!("| {what} | {:.3} |", value / unit);
    }
    let bench_ref = &bench;
    let mut rates: Vec<_> = QPS
        .iter()
        .map(|&count| move || bench_ref.rate(count, EVERY, bench_ref.work(8)))
        .collect();
    let mut things: Vec<&mut dyn FnMut() -> Result<Duration>> = Vec::new();
    for rate in &mut rates {
        things.push(rate);
    }
    let rates = best(windows, &mut things)?;
    println!("\n| 8-byte WRITEs a second, of one QP's | 1 | 2 | 4 | 8 | 16 | 32 | 64 QPs |");
    println!("|---|---|---|---|---|---|---|---|");
    println!("| | {} |", cells(rates.iter().map(|time| rates[0] / time)));
    let mut widths = Vec::new();
    for len in SIZES {
        let mut wire = f64::INFINITY;
        let mut copy = f64::INFINITY;
        for _ in 0..windows {
            let burst = ((256 << 10) / len).clamp(1, EVERY);
            wire = wire.min(one.rate(1, burst, one.work(len))?.as_secs_f64());
            copy = copy.min(bench.memcpy(len).as_secs_f64());
        }
        widths.push(copy / wire);
    }
    println!(
        "\n| bandwidth of WRITEs, of memcpy's in the guest | 8 B | 64 B | 512 B | 4 KiB | 64 KiB | 256 KiB | 1 MiB |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    println!("| | {} |", cells(widths.into_iter()));
    println!(
        "\nBlueFlame {}used",
        if one.copies()? { "" } else { "not " }
    );
    println!(
        "unit {:.1} us; one QP {:.0} k/s",
        unit * 1e6,
        1e-3 / rates[0]
    );
    Ok(())
}
