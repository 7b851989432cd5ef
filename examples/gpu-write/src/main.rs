// SPDX-License-Identifier: MIT OR Apache-2.0
//! The whole way of a GPU-initiated RDMA WRITE: two NICs, one GPU, queues, doorbell, kernel, a refused request, a NIC that is
//! reset while a kernel waits, and the return.
//!
//! What is real: the module, the mlx5 driver, uverbs, DevX, the queues, the doorbell, AER. What is not, where there is no
//! GPU: the kernels run on CPU threads, from the source that nvcc compiles.

mod kernels;
mod machine;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use clap::Parser;
use ibgda::{
    Access, Bdf, Context, MemoryRegion, OpenOptions, QpAddress, QueuePair, QueuePairOptions, Route,
    Status,
};
use std::{
    str::FromStr,
    thread,
    time::{Duration, Instant},
};

const BYTES: usize = 64 << 10;
const BLOCK_BYTES: u32 = 4 << 10;
const PATIENCE: Duration = Duration::from_secs(30);

/// RDMA WRITEs posted by a kernel, from NIC 0's memory into NIC 1's.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// PCI addresses of two NICs.
    #[arg(long, env = "IBGDA_NICS")]
    nics: Functions<2>,
    /// PCI address of the GPU.
    #[arg(long, env = "IBGDA_GPUS")]
    gpus: Functions<1>,
    /// How doorbells reach the NIC: auto, direct or cpu-doorbell.
    #[arg(long, default_value_t = Route::Auto)]
    route: Route,
    /// Leave out the injected PCIe error and the return from it.
    #[arg(long)]
    no_aer: bool,
}

/// The first N of a list of PCI addresses.
#[derive(Clone)]
struct Functions<const N: usize>([Bdf; N]);

impl<const N: usize> FromStr for Functions<N> {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let functions = text
            .split_whitespace()
            .take(N)
            .map(str::parse)
            .collect::<Result<Vec<_>, _>>()?;
        functions
            .try_into()
            .map(Self)
            .map_err(|few: Vec<_>| anyhow!("{N} PCI addresses are needed, there are {}", few.len()))
    }
}

/// Numbers and times the lines.
struct Steps {
    start: Instant,
    count: u32,
}

impl Steps {
    fn say(&mut self, text: impl std::fmt::Display) {
        self.count += 1;
        println!(
            "{:2}  {:7.3} s  {text}",
            self.count,
            self.start.elapsed().as_secs_f64()
        );
    }
}

/// Two QPs, one on each NIC, connected to each other.
fn connected_pair(from: &Context, to: &Context) -> Result<(QueuePair, QueuePair)> {
    let qp = |context: &Context| -> Result<QueuePair> {
        let cq = context.create_cq(128)?;
        Ok(context.create_qp(&QueuePairOptions::default(), &cq, None)?)
    };
    let (near, far) = (qp(from)?, qp(to)?);
    // Between two machines these bytes travel by MPI, a socket, or whatever the application has.
    let (near_address, far_address) = (near.address().to_bytes(), far.address().to_bytes());
    near.connect(&QpAddress::from_bytes(&far_address)?)?;
    far.connect(&QpAddress::from_bytes(&near_address)?)?;
    Ok((near, far))
}

/// Fills the source with a pattern of `seed`, lets the kernel write it, compares every byte.
fn write_and_verify(
    qp: &mut QueuePair,
    to: &MemoryRegion,
    from: &MemoryRegion,
    seed: u8,
) -> Result<()> {
    let pattern: Vec<u8> = (0..BYTES)
        .map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed)
        .collect();
    from.write(0, &pattern)?;
    to.write(0, &vec![!seed; BYTES])?;
    let status = kernels::write(qp, to.region(), from.region(), BLOCK_BYTES, PATIENCE);
    ensure!(
        status == Status::OK,
        "the kernel returned: {status}; {}",
        first_error(qp)
    );
    let mut arrived = vec![0; BYTES];
    to.read(0, &mut arrived)?;
    if let Some(at) = (0..BYTES).find(|&i| arrived[i] != pattern[i]) {
        bail!(
            "byte {at} is {:#04x}, should be {:#04x}",
            arrived[at],
            pattern[at]
        );
    }
    Ok(())
}

fn first_error(qp: &QueuePair) -> String {
    qp.send_cq().error().map_or_else(
        || "no error completion".to_owned(),
        |error| error.to_string(),
    )
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let (Functions(nics), Functions([gpu])) = (arguments.nics, arguments.gpus);
    let mut steps = Steps {
        start: Instant::now(),
        count: 0,
    };

    let _allowed = [
        machine::Allowed::new(gpu, nics[0])?,
        machine::Allowed::new(gpu, nics[1])?,
    ];
    steps.say(format!(
        "policy: GPU {gpu} may drive NICs {} and {} (configfs of ibgda.ko)",
        nics[0], nics[1]
    ));

    let open = |nic: Bdf| {
        Context::open(&OpenOptions {
            route: arguments.route,
            ..OpenOptions::new(nic.to_string(), gpu)
        })
    };
    let (mut near, far) = (open(nics[0])?, open(nics[1])?);
    for context in [&near, &far] {
        let pair = context.pair();
        steps.say(format!(
            "bound: NIC {} is {} of the mlx5 driver, path from the GPU: {:?}, generation {}",
            pair.nic, pair.ibdev_name, pair.path, pair.generation
        ));
        let report = context.route_report().to_string();
        steps.say(format!("route {}", report.replace('\n', "; ")));
    }

    let source = near.alloc(BYTES, Access::empty())?;
    let target = far.alloc(BYTES, Access::WRITE)?;
    steps.say(format!(
        "memory: {BYTES} bytes registered with each NIC, lkey {:#x} here, rkey {:#x} there",
        source.lkey(),
        target.rkey()
    ));

    let (mut qp, peer) = connected_pair(&near, &far)?;
    let (page, offset) = qp.doorbell_page();
    steps.say(format!(
        "queues: QP {:#x} connected to QP {:#x}; made by DevX in memory of the broker",
        qp.number(),
        peer.number()
    ));
    steps.say(format!("doorbell: UAR {page:#x}, BAR0 + {offset:#x}, imported from uverbs and granted by the broker, uncached"));

    write_and_verify(&mut qp, &target, &source, 0x5a)?;
    steps.say(format!(
        "kernel: {} RDMA WRITEs posted and completed by the kernel itself (on a CPU thread), {BYTES} bytes equal",
        BYTES / BLOCK_BYTES as usize
    ));

    let mut wrong = target.region();
    wrong.rkey ^= 0xff00;
    let status = kernels::write(&mut qp, wrong, source.region(), BLOCK_BYTES, PATIENCE);
    ensure!(
        status == Status::REMOTE_ACCESS,
        "a wrong rkey ended in: {status}"
    );
    steps.say(format!(
        "wrong rkey {:#x}: {}",
        wrong.rkey,
        first_error(&qp)
    ));
    drop((qp, peer));

    if arguments.no_aer {
        println!("all steps passed");
        return Ok(());
    }

    let (mut qp, peer) = connected_pair(&near, &far)?;
    write_and_verify(&mut qp, &target, &source, 0xa5)?;
    steps.say("a new pair of QPs works again");

    let (status, waited) = thread::scope(|scope| -> Result<_> {
        let injector = scope.spawn(|| {
            thread::sleep(Duration::from_millis(200));
            machine::inject_fatal_error(nics[0]).map(|()| Instant::now())
        });
        let status = kernels::wait(&mut qp, PATIENCE);
        let returned = Instant::now();
        let injected = injector
            .join()
            .expect("the injecting thread does not panic")?;
        Ok((status, returned.saturating_duration_since(injected)))
    })?;
    let state = near.state();
    ensure!(
        status == Status::NIC_LOST,
        "the waiting kernel returned: {status}"
    );
    steps.say(format!(
        "fatal PCIe error injected into NIC {} (AER): the waiting kernel returned {:.1} ms later: {status}; reason: {}",
        nics[0],
        waited.as_secs_f64() * 1e3,
        state.reason_text()
    ));

    // Queues and memory of before the reset are dead; they are dropped, and made again.
    drop((qp, peer, source));
    near.rebind(PATIENCE).context("come back after the reset")?;
    steps.say(format!(
        "the driver has reset the NIC; bound again, generation {}",
        near.pair().generation
    ));
    let source = near.alloc(BYTES, Access::empty())?;
    let (mut qp, _peer) = connected_pair(&near, &far)?;
    write_and_verify(&mut qp, &target, &source, 0x3c)?;
    steps.say(format!(
        "kernel: {BYTES} bytes written and equal after the reset"
    ));

    println!("all steps passed");
    Ok(())
}
