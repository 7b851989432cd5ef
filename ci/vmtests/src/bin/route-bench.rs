// SPDX-License-Identifier: MIT OR Apache-2.0
//! The routes of libibgda side by side: how long a small write takes from its post to its completion, one at a time and
//! after a pause, and what each route costs the CPU when nothing happens and when much does.
//!
//! Last, the proxy route on soft RoCE, whose far side has a thread of its own.
//!
//! `./ci/vm --nics 2 -- route-bench`. Under software emulation only the ratios of one run say something.

use anyhow::{Context as _, Result, ensure};
use ibgda::{
    Access, Context, MemoryRegion, OpenOptions, QpAddress, QueuePair, QueuePairOptions, Route,
};
use ibgda_test_kernels::Poster;
use ibgda_vmtests::{
    machine::{Allowed, gpus, nics},
    rxe,
};
use std::{
    fs, thread,
    time::{Duration, Instant},
};

const PATIENCE: u64 = 60_000_000_000;
/// Writes one after the other.
const WRITES: usize = 2_000;
/// Writes after a pause each.
const PAUSED: usize = 50;
const PAUSE: Duration = Duration::from_millis(20);
/// Writes of the storm, of which each has a doorbell.
const STORM: u64 = 20_000;
const IDLE: Duration = Duration::from_secs(4);

struct Side {
    context: Context,
    region: MemoryRegion,
    qp: QueuePair,
}

fn side(nic: &str, route: Route) -> Result<Side> {
    let context = Context::open(&OpenOptions {
        route,
        ..OpenOptions::new(nic, gpus()[0].to_string().parse()?)
    })?;
    let region = context.alloc(4096, Access::all())?;
    let options = QueuePairOptions {
        post_timeout: Duration::from_secs(60),
        ..Default::default()
    };
    let cq = context.create_cq(options.send_depth)?;
    let qp = context.create_qp(&options, &cq, None)?;
    Ok(Side {
        context,
        region,
        qp,
    })
}

/// CPU time of the library's threads so far: the first number of schedstat, in ns.
fn library_cpu() -> Result<Duration> {
    let mut total = 0;
    for task in fs::read_dir("/proc/self/task")? {
        let task = task?.path();
        if fs::read_to_string(task.join("comm"))?.starts_with("ibgda-") {
            let stat = fs::read_to_string(task.join("schedstat"))?;
            let first = stat
                .split_whitespace()
                .next()
                .context("schedstat has numbers")?;
            total += first.parse::<u64>()?;
        }
    }
    Ok(Duration::from_nanos(total))
}

/// Percent of a core that the library's threads take while `work` runs.
fn share(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let (before, start) = (library_cpu()?, Instant::now());
    work()?;
    let used = library_cpu()? - before;
    Ok(100.0 * used.as_secs_f64() / start.elapsed().as_secs_f64())
}

fn micros(mut times: Vec<Duration>) -> [f64; 2] {
    times.sort();
    [times.len() / 2, times.len() * 99 / 100].map(|at| times[at].as_secs_f64() * 1e6)
}

fn measure(name: &str, route: Route, nics: [&str; 2], far: Route) -> Result<()> {
    let (near, far) = (side(nics[0], route)?, side(nics[1], far)?);
    ensure!(near.context.route() == route);
    let addresses = [near.qp.address(), far.qp.address()];
    near.qp
        .connect(&QpAddress::from_bytes(&addresses[1].to_bytes())?)?;
    far.qp
        .connect(&QpAddress::from_bytes(&addresses[0].to_bytes())?)?;
    let (remote, rkey) = (far.region.address(), far.region.rkey());
    let (local, lkey) = (near.region.address(), near.region.lkey());
    // SAFETY: the QP outlives the poster, and this thread alone uses it.
    let mut poster = unsafe { Poster::new(near.qp.device_handle()) };
    let mut write = |pause: Duration| -> Result<Duration> {
        thread::sleep(pause);
        let start = Instant::now();
        let request = poster.put(remote, rkey, local, lkey, 8, 0)?;
        poster.wait(request, PATIENCE)?;
        Ok(start.elapsed())
    };
    let times = (0..WRITES)
        .map(|_| write(Duration::ZERO))
        .collect::<Result<_>>()?;
    let [median, slow] = micros(times);
    let times = (0..PAUSED).map(|_| write(PAUSE)).collect::<Result<_>>()?;
    let [paused, paused_slow] = micros(times);
    let mut rate = 0.0;
    let busy = share(|| {
        let start = Instant::now();
        poster.storm(remote, rkey, 64, STORM, 8, 1, PATIENCE)?;
        rate = STORM as f64 / start.elapsed().as_secs_f64() / 1e3;
        Ok(())
    })?;
    // The first pauses are short.
    thread::sleep(Duration::from_millis(100));
    let idle = share(|| {
        thread::sleep(IDLE);
        Ok(())
    })?;
    println!(
        "{:<14}{median:>10.0}{slow:>10.0}{paused:>12.0}{paused_slow:>10.0}{rate:>12.1}{busy:>10.1}{idle:>10.2}",
        name
    );
    Ok(())
}

fn main() -> Result<()> {
    let _allowed = [0, 1].map(|nic| Allowed::pair(gpus()[0], nics()[nic]));
    println!(
        "{:<14}{:>10}{:>10}{:>12}{:>10}{:>12}{:>10}{:>10}",
        "", "write us", "p99", "paused us", "p99", "k writes/s", "busy %", "idle %"
    );
    let nics = [0, 1].map(|nic| nics()[nic].to_string());
    let nics = [&nics[0], &nics[1]].map(String::as_str);
    for route in [Route::Direct, Route::CpuDoorbell, Route::Proxy] {
        // The far side is on the direct route, so that one thread at most is measured.
        measure(route.name(), route, nics, Route::Direct)?;
    }
    rxe::set_up()?;
    let nics = rxe::NICS.map(|(name, _)| name);
    measure("proxy, rxe", Route::Proxy, nics, Route::Proxy)
}
