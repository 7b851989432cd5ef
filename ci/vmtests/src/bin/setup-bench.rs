// SPDX-License-Identifier: MIT OR Apache-2.0
//! What libibgda's set-up costs against plain mlx5dv: 1,000 queue pairs, each with its completion queue and doorbell
//! page and connected, and 1,000 memory regions.
//!
//! `./ci/vm --nics 2 --gpus 1 -- setup-bench`. Both are made in turns, so that both see the same machine; the medians of
//! one run are compared, and only their ratios say something.

use anyhow::{Context as _, Result};
use ibgda::{Access, Context, OpenOptions, QueuePairOptions, Rounding};
use ibgda_vmtests::{
    machine::{Allowed, gpus, nics},
    plain::Plain,
    verbs::Verbs,
};
use memmap2::MmapMut;
use std::time::Instant;

/// A session grants 256 queues, so that each round has contexts of its own.
const ROUNDS: usize = 10;
const A_ROUND: usize = 100;
const DEPTH: usize = 128;
const REGION_BYTES: usize = 64 << 10;

/// Microseconds of each, ours and theirs.
#[derive(Default)]
struct Times {
    ours: Vec<f64>,
    theirs: Vec<f64>,
}

fn timed<T>(times: &mut Vec<f64>, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    let made = work()?;
    times.push(start.elapsed().as_secs_f64() * 1e6);
    Ok(made)
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

impl Times {
    fn print(&mut self, what: &str) {
        let (ours, theirs) = (median(&mut self.ours), median(&mut self.theirs));
        println!(
            "{what:28} {:5} each: libibgda {ours:8.1} us, mlx5dv {theirs:8.1} us, ratio {:.3} (wanted: 1.1 at most)",
            self.ours.len(),
            ours / theirs
        );
    }
}

/// Both, the one or the other first.
fn in_turns(
    index: usize,
    ours: impl FnOnce() -> Result<()>,
    theirs: impl FnOnce() -> Result<()>,
) -> Result<()> {
    if index % 2 == 0 {
        ours()?;
        theirs()
    } else {
        theirs()?;
        ours()
    }
}

fn main() -> Result<()> {
    let (gpu, nic) = (*gpus().first().context("a GPU")?, nics()[0]);
    let _allowed = Allowed::pair(gpu, nic);
    let (mut queues, mut regions) = (Times::default(), Times::default());
    let (mut qps_end, mut regions_end) = (Times::default(), Times::default());
    let mut memory = MmapMut::map_anon(A_ROUND * REGION_BYTES)?;
    // Both find pages.
    memory.fill(1);
    for _ in 0..ROUNDS {
        let context = Context::open(&OpenOptions::new(nic.to_string(), gpu.to_string().parse()?))?;
        let verbs = Verbs::open(nic);
        let plain = Plain::new(&verbs);
        let options = QueuePairOptions {
            send_depth: DEPTH as u32,
            ..Default::default()
        };
        let (mut made, mut plain_made) = (Vec::new(), Vec::new());
        for index in 0..A_ROUND {
            in_turns(
                index,
                || {
                    made.push(timed(&mut queues.ours, || {
                        let cq = context.create_cq(options.send_depth)?;
                        let qp = context.create_qp(&options, &cq, None)?;
                        qp.connect(&qp.address())?;
                        Ok(qp)
                    })?);
                    Ok(())
                },
                || {
                    plain_made.push(timed(&mut queues.theirs, || Ok(plain.connected(DEPTH)))?);
                    Ok(())
                },
            )?;
        }
        for (index, (qp, plain_qp)) in made.into_iter().zip(plain_made).enumerate() {
            let ours = || {
                timed(&mut qps_end.ours, || {
                    drop(qp);
                    Ok(())
                })
            };
            let theirs = || {
                timed(&mut qps_end.theirs, || {
                    plain_qp.destroy();
                    Ok(())
                })
            };
            in_turns(index, ours, theirs)?;
        }

        let (mut made, mut plain_made) = (Vec::new(), Vec::new());
        for (index, slice) in memory.chunks_exact_mut(REGION_BYTES).enumerate() {
            let (address, bytes) = (slice.as_mut_ptr(), slice.len());
            in_turns(
                index,
                || {
                    made.push(timed(&mut regions.ours, || {
                        // SAFETY: the memory lives longer than the regions, and nobody else uses it.
                        let region = unsafe {
                            context.map_device(address, bytes, Access::WRITE, Rounding::Exact)
                        };
                        Ok(region?)
                    })?);
                    Ok(())
                },
                || {
                    plain_made.push(timed(&mut regions.theirs, || {
                        Ok(verbs.register(address, bytes))
                    })?);
                    Ok(())
                },
            )?;
        }
        for (index, (region, plain_region)) in made.into_iter().zip(plain_made).enumerate() {
            let ours = || {
                timed(&mut regions_end.ours, || {
                    drop(region);
                    Ok(())
                })
            };
            let theirs = || {
                timed(&mut regions_end.theirs, || {
                    drop(plain_region);
                    Ok(())
                })
            };
            in_turns(index, ours, theirs)?;
        }
    }
    queues.print("QP, CQ, page, to RTS");
    qps_end.print("the end of these");
    regions.print("region of 64 KiB");
    regions_end.print("the end of these");
    Ok(())
}
