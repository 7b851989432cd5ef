// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where kernels run, and two QPs that are connected.

use crate::machine::Machine;
use anyhow::Result;
use ibgda::{
    Access, Context, MemoryRegion, OpenOptions, Processor, QpAddress, QueuePair, QueuePairOptions,
    Route, outside::Outside, processor::Threads,
};
use ibgda_device::kernels::cpu;
use std::{fmt, sync::Arc, time::Duration};

/// For what must happen; much longer than it takes.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Where kernels run.
#[derive(Clone, Debug)]
pub struct Where {
    /// The processor.
    pub processor: Arc<dyn Processor>,
}

impl Where {
    /// On a GPU outside the virtual machine, or what stands in for one there.
    pub fn outside() -> Result<Self> {
        let processor = Arc::new(Outside::open(ibgda::outside::PORT)?);
        Ok(Self { processor })
    }

    /// On CPUs of the virtual machine.
    pub fn inside() -> Self {
        let processor = Arc::new(Threads::new(cpu::STEPS));
        Self { processor }
    }
}

impl fmt::Display for Where {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.processor.name())
    }
}

/// Two contexts, each with a region and a QP; the QPs are connected to each other.
#[derive(Debug)]
pub struct Link {
    /// NIC 0.
    pub near: Context,
    /// NIC 1.
    pub far: Context,
    /// Of `near`.
    pub source: MemoryRegion,
    /// Of `far`.
    pub target: MemoryRegion,
    /// Of `near`.
    pub qp: QueuePair,
    /// Of `far`.
    pub peer: QueuePair,
}

/// A context on one of the NICs.
pub fn open(machine: &Machine, nic: usize, route: Route) -> Result<Context> {
    Ok(Context::open(&OpenOptions {
        route,
        ..OpenOptions::new(machine.nics[nic].to_string(), machine.gpu)
    })?)
}

/// A QP with CQs of its own.
pub fn make_qp(context: &Context, options: &QueuePairOptions) -> Result<QueuePair> {
    let send_cq = context.create_cq(options.send_depth)?;
    let recv_cq = (options.recv_depth != 0)
        .then(|| context.create_cq(options.recv_depth))
        .transpose()?;
    Ok(context.create_qp(options, &send_cq, recv_cq.as_ref())?)
}

/// Connects two QPs by the addresses that peers exchange.
pub fn connect(one: &QueuePair, other: &QueuePair) -> Result<()> {
    let (from_one, from_other) = (one.address().to_bytes(), other.address().to_bytes());
    one.connect(&QpAddress::from_bytes(&from_other)?)?;
    other.connect(&QpAddress::from_bytes(&from_one)?)?;
    Ok(())
}

/// Options for a machine in which everything is emulated.
pub fn options() -> QueuePairOptions {
    QueuePairOptions {
        post_timeout: PATIENCE,
        // 4 s: the model may have to wait for a processor.
        ack_timeout: 20,
        ..QueuePairOptions::default()
    }
}

impl Link {
    /// A link with regions of so many bytes.
    pub fn new(
        machine: &Machine,
        route: Route,
        bytes: usize,
        options: &QueuePairOptions,
    ) -> Result<Self> {
        let (near, far) = (open(machine, 0, route)?, open(machine, 1, route)?);
        let source = near.alloc(bytes, Access::all())?;
        let target = far.alloc(bytes, Access::all())?;
        let (qp, peer) = (make_qp(&near, options)?, make_qp(&far, options)?);
        connect(&qp, &peer)?;
        Ok(Self {
            near,
            far,
            source,
            target,
            qp,
            peer,
        })
    }
}

/// Bytes that differ from place to place.
pub fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes)
        .map(|i| (i as u8).wrapping_mul(37) ^ (i >> 8) as u8 ^ (i >> 16) as u8 ^ seed)
        .collect()
}

/// What a region holds.
pub fn contents(region: &MemoryRegion, offset: usize, bytes: usize) -> Result<Vec<u8>> {
    let mut data = vec![0; bytes];
    region.read(offset, &mut data)?;
    Ok(data)
}
