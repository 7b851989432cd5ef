// SPDX-License-Identifier: MIT OR Apache-2.0
//! The library's public calls without a NIC, module or root: the NIC is the ConnectX model in this process. Kernels run on a
//! GPU where CUDA shows one, else on CPU threads, from the same source. Each step is checked; the first that fails ends it.

mod capi;
mod gpu;
mod processor;

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use ibgda::{
    Access, Context, MemoryRegion, OpenOptions, QpAddress, QueuePair, QueuePairOptions, Route,
    Status, loopback,
};
use processor::Processor;
use std::{
    fmt, thread,
    time::{Duration, Instant},
};

const BYTES: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);
/// The loopback route does not look at it.
const ANY_GPU: &str = "0000:00:00.0";

/// RDMA WRITEs posted by a kernel, from one NIC of the model to another, in one process.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Where kernels run.
    #[arg(long, value_enum, default_value_t = Where::Auto)]
    on: Where,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Where {
    /// A GPU if CUDA shows one, else CPU threads.
    Auto,
    /// CPU threads.
    Cpu,
    /// A GPU, or fail.
    Gpu,
}

/// Numbers and times the lines.
struct Steps {
    start: Instant,
    count: u32,
}

impl Steps {
    fn say(&mut self, text: impl fmt::Display) {
        self.count += 1;
        println!(
            "{:2}  {:7.3} s  {text}",
            self.count,
            self.start.elapsed().as_secs_f64()
        );
    }
}

fn open(nic: &str) -> Result<Context> {
    Ok(Context::open(&OpenOptions {
        nic: nic.to_owned(),
        gpu: ANY_GPU.parse()?,
        port: 1,
        route: Route::Loopback,
    })?)
}

/// Two QPs, one on each NIC, connected to each other.
fn connected_pair(
    from: &Context,
    to: &Context,
    options: &QueuePairOptions,
) -> Result<(QueuePair, QueuePair)> {
    let qp = |context: &Context| -> Result<QueuePair> {
        let cq = context.create_cq(options.send_depth)?;
        Ok(context.create_qp(options, &cq, None)?)
    };
    let (near, far) = (qp(from)?, qp(to)?);
    near.connect(&QpAddress::from_bytes(&far.address().to_bytes())?)?;
    far.connect(&QpAddress::from_bytes(&near.address().to_bytes())?)?;
    Ok((near, far))
}

fn pattern(seed: u8) -> Vec<u8> {
    (0..BYTES)
        .map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ (i >> 16) as u8 ^ seed)
        .collect()
}

/// Fills the source with a pattern of `seed`, lets the kernel write it in blocks, compares every byte.
fn write_and_verify(
    processor: &Processor,
    qp: &QueuePair,
    (to, from): (&MemoryRegion, &MemoryRegion),
    block_bytes: u32,
    seed: u8,
) -> Result<Duration> {
    let pattern = pattern(seed);
    from.write(0, &pattern)?;
    to.write(0, &vec![!seed; BYTES])?;
    let start = Instant::now();
    let status = processor.put_blocks(qp, to.region(), from.region(), block_bytes, PATIENCE)?;
    let took = start.elapsed();
    ensure!(
        status == Status::OK,
        "the kernel returned: {status}; {}",
        processor.first_error(qp)?
    );
    let mut arrived = vec![0; BYTES];
    to.read(0, &mut arrived)?;
    if let Some(at) = (0..BYTES).find(|&i| arrived[i] != pattern[i]) {
        bail!(
            "blocks of {block_bytes}: byte {at} is {:#04x}, should be {:#04x}",
            arrived[at],
            pattern[at]
        );
    }
    Ok(took)
}

/// Everything that is the same on a GPU and on CPU threads.
fn transfers(steps: &mut Steps, processor: &Processor) -> Result<()> {
    let (mut near, far) = (open("loopback0")?, open("loopback1")?);
    let source = near.alloc(BYTES, Access::empty())?;
    let target = far.alloc(BYTES, Access::WRITE)?;
    let regions = (&target, &source);
    let exclusive = QueuePairOptions::default();
    let (qp, peer) = connected_pair(&near, &far, &exclusive)?;
    steps.say(format!(
        "{} and {}: {BYTES} bytes each (lkey {:#x}, rkey {:#x}), QP {:#x} connected to QP {:#x}",
        near.device_name(),
        far.device_name(),
        source.lkey(),
        target.rkey(),
        qp.number(),
        peer.number()
    ));

    // More requests than the ring has slots, a last block that is shorter, one block of all.
    for (block_bytes, seed) in [(4096, 0x5a), (5000, 0xc3), (BYTES as u32, 0x11)] {
        let took = write_and_verify(processor, &qp, regions, block_bytes, seed)?;
        steps.say(format!(
            "{} WRITEs of {block_bytes} bytes posted and polled {processor}: {BYTES} bytes equal, {:.1} ms",
            BYTES.div_ceil(block_bytes as usize),
            took.as_secs_f64() * 1e3
        ));
    }
    let shared = QueuePairOptions {
        send_depth: 16,
        shared: true,
        ..exclusive.clone()
    };
    let (shared_qp, _peer) = connected_pair(&near, &far, &shared)?;
    let status = processor.wait(&shared_qp, Duration::from_millis(1))?;
    ensure!(
        status == Status::TIMEOUT,
        "nothing was posted, and: {status}"
    );
    steps.say(format!("a wait of 1 ms for nothing ended in: {status}"));

    let mut wrong = target.region();
    wrong.rkey ^= 0xff00;
    let status = processor.put_blocks(&qp, wrong, source.region(), 4096, PATIENCE)?;
    ensure!(
        status == Status::REMOTE_ACCESS,
        "a wrong rkey ended in: {status}"
    );
    let text = processor.first_error(&qp)?;
    ensure!(
        text.contains("REMOTE_ACCESS") && text.contains(&format!("{:#x}", qp.number())),
        "the error says: {text}"
    );
    steps.say(format!("wrong rkey {:#x}: {text}", wrong.rkey));
    drop((qp, peer));

    let (qp, peer) = connected_pair(&near, &far, &exclusive)?;
    write_and_verify(processor, &qp, regions, 4096, 0xa5)?;
    let (status, waited) = thread::scope(|scope| -> Result<_> {
        let breaker = scope.spawn(|| {
            thread::sleep(Duration::from_millis(200));
            loopback::lose("loopback0").map(|()| Instant::now())
        });
        let status = processor.wait(&qp, PATIENCE)?;
        let returned = Instant::now();
        let lost = breaker.join().expect("it does not panic")?;
        Ok((status, returned.saturating_duration_since(lost)))
    })?;
    ensure!(
        status == Status::NIC_LOST,
        "the waiting kernel returned: {status}"
    );
    steps.say(format!(
        "loopback0 lost: the waiting kernel returned {:.2} ms later: {status}; reason: {}",
        waited.as_secs_f64() * 1e3,
        near.state().reason_text()
    ));
    drop((qp, peer, shared_qp, source));
    let error = near
        .rebind(Duration::ZERO)
        .err()
        .context("not back, and rebound")?;
    loopback::recover("loopback0")?;
    near.rebind(PATIENCE)?;
    let source = near.alloc(BYTES, Access::empty())?;
    let (qp, _peer) = connected_pair(&near, &far, &exclusive)?;
    write_and_verify(processor, &qp, (&target, &source), 4096, 0x3c)?;
    steps.say(format!(
        "first \"{error}\"; then recovered, generation {}, {BYTES} bytes equal",
        near.pair().generation
    ));
    capi::run(steps, processor)
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let mut steps = Steps {
        start: Instant::now(),
        count: 0,
    };
    let found = match arguments.on {
        Where::Cpu => None,
        Where::Gpu => Some(ibgda::cuda::Gpu::first()?),
        Where::Auto => match ibgda::cuda::Gpu::first() {
            Ok(gpu) => Some(gpu),
            Err(error) => {
                steps.say(format!("no GPU: {error}"));
                None
            }
        },
    };
    match found {
        None => transfers(&mut steps, &Processor::Cpu)?,
        Some(gpu) => gpu::run(&mut steps, &gpu)?,
    }
    println!("all steps passed");
    Ok(())
}
