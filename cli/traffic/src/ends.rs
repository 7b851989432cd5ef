// SPDX-License-Identifier: MIT OR Apache-2.0
//! One end of the traffic: a NIC, a region, and queue pairs.

use crate::choice::Choice;
use anyhow::Result;
use ibgda::{Access, Context, MemoryRegion, QpAddress, QueuePair, QueuePairOptions};
use std::time::Duration;

/// One end. What it is dropped in: queues, memory, the NIC.
#[derive(Debug)]
pub struct End {
    pub qps: Vec<QueuePair>,
    pub region: MemoryRegion,
    pub context: Context,
}

/// Send slots of each queue.
pub const DEPTH: u32 = 128;

/// What the queues are like.
pub fn options(recv_depth: u32, timeout: Duration) -> QueuePairOptions {
    QueuePairOptions {
        send_depth: DEPTH,
        recv_depth,
        post_timeout: timeout,
        ..Default::default()
    }
}

/// One queue pair with CQs of its own.
pub fn queue_pair(context: &Context, options: &QueuePairOptions) -> Result<QueuePair> {
    let send_cq = context.create_cq(options.send_depth)?;
    let recv_cq = match options.recv_depth {
        0 => None,
        depth => Some(context.create_cq(depth)?),
    };
    Ok(context.create_qp(options, &send_cq, recv_cq.as_ref())?)
}

impl End {
    /// Opens a NIC, with zeroed memory that peers may read and write.
    pub fn open(
        choice: &Choice,
        nic: &str,
        memory: u64,
        qps: usize,
        options: &QueuePairOptions,
    ) -> Result<Self> {
        let context = choice.open(nic)?;
        Self::of(context, memory, qps, options)
    }

    /// The same of a NIC that is open.
    pub fn of(
        context: Context,
        memory: u64,
        qps: usize,
        options: &QueuePairOptions,
    ) -> Result<Self> {
        let region = context.alloc(usize::try_from(memory)?, Access::all())?;
        let qps = (0..qps).map(|_| queue_pair(&context, options));
        Ok(Self {
            qps: qps.collect::<Result<_>>()?,
            region,
            context,
        })
    }

    /// What the peer needs of each queue pair.
    pub fn addresses(&self) -> Vec<Vec<u8>> {
        let address = |qp: &QueuePair| qp.address().to_bytes().to_vec();
        self.qps.iter().map(address).collect()
    }

    /// Joins each queue pair to the peer's of the same place.
    pub fn connect(&self, peer: &[Vec<u8>]) -> Result<()> {
        anyhow::ensure!(
            peer.len() == self.qps.len(),
            "the peer has {} queue pairs, not {}",
            peer.len(),
            self.qps.len()
        );
        for (qp, address) in self.qps.iter().zip(peer) {
            qp.connect(&QpAddress::from_bytes(address)?)?;
        }
        Ok(())
    }
}

/// Joins two ends of this process.
pub fn join(one: &End, other: &End) -> Result<()> {
    one.connect(&other.addresses())?;
    other.connect(&one.addresses())
}
