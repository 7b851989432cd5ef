// SPDX-License-Identifier: MIT OR Apache-2.0
//! A fatal PCIe error resets the NIC while kernels wait for it.

use crate::{
    list::{List, all_ok, ended_in},
    machine::{Machine, inject_fatal_error},
    rig::{Link, PATIENCE, Where, connect, contents, make_qp, options, pattern},
};
use anyhow::{Context as _, Result, ensure};
use ibgda::{Access, MemoryRegion, QueuePairOptions, Route, Status};
use std::time::Duration;

const BYTES: usize = 4096;
/// By then every wait is over: it is what a kernel is told, and far longer than it takes the NIC's loss to be known.
const DEADLINE: Duration = Duration::from_secs(20);

/// How long it took from the injection to a kernel's return, in ns by the kernel's clock.
#[derive(Clone, Copy, Debug)]
pub struct Loss {
    /// To the return of the slowest kernel.
    pub returned: u64,
}

/// Kernels that wait: for a completion of the send queue, for a message, and for a word that the peer would signal.
/// Another block notes when the error is injected. All come back with "NIC lost".
fn lose(
    machine: &Machine,
    at: &Where,
    kernel: &str,
    link: &Link,
    flag: &MemoryRegion,
) -> Result<Loss> {
    flag.write(0, &0u64.to_ne_bytes())?;
    let note = List::new(at).wait_until(None, (flag, 0), 1, DEADLINE + PATIENCE)?;
    let waits = [
        List::new(at).poll_send(&link.qp, DEADLINE)?,
        List::new(at).poll_recv(&link.qp, DEADLINE)?,
        List::new(at).wait_until(Some(&link.qp), (&link.source, 0), u64::MAX, DEADLINE)?,
    ];
    // A QP is one block's; so a kernel each.
    let noting = List::start(&[note], kernel)?;
    let waiting: Result<Vec<_>> = waits
        .into_iter()
        .map(|list| List::start(&[list], kernel))
        .collect();
    let waiting = waiting?;
    // What says when, for the block that notes it; then the injection itself.
    flag.write(0, &1u64.to_ne_bytes())?;
    inject_fatal_error(machine.nics[0])?;
    let mut ends = Vec::new();
    let mut wrong = None;
    for running in waiting {
        let steps = running.end()?.remove(0);
        // All have ended before the first complaint.
        wrong = wrong.or(ended_in(&steps[0], Status::NIC_LOST).err());
        ends.push(steps[0].ended_ns);
    }
    let noted = noting.end()?.remove(0);
    if let Some(wrong) = wrong {
        return Err(wrong);
    }
    all_ok(&noted)?;
    let latest = ends.into_iter().max().context("a kernel waited")?;
    Ok(Loss {
        returned: latest.saturating_sub(noted[0].ended_ns),
    })
}

/// Loses the NIC so often; after each loss the process rebinds, and the next kernel's puts succeed.
pub fn again_and_again(
    machine: &Machine,
    at: &Where,
    route: Route,
    kernel: &str,
    times: usize,
) -> Result<Vec<Loss>> {
    let options = QueuePairOptions {
        recv_depth: 16,
        ..options()
    };
    let mut link = Link::new(machine, route, BYTES, &options)?;
    // Of the NIC that stays, so that its page does too.
    let flag = link.far.alloc(4096, Access::empty())?;
    let mut losses = Vec::new();
    for time in 0..times {
        let generation = link.near.pair().generation;
        let lost = lose(machine, at, kernel, &link, &flag);
        // Recovered in either case, so that the machine is whole again.
        let rebound = rebind(&mut link, &options);
        losses.push(lost.with_context(|| format!("loss {time}"))?);
        rebound.with_context(|| format!("after loss {time}"))?;
        ensure!(
            link.near.pair().generation == generation + 1,
            "generation {} after {generation}",
            link.near.pair().generation
        );
        let data = pattern(BYTES, time as u8);
        link.source.write(0, &data)?;
        let list =
            List::new(at).put(&link.qp, (&link.target, 0), (&link.source, 0), BYTES as u32)?;
        all_ok(&list.quiet(&link.qp)?.run()?).context("the first kernel after the loss")?;
        ensure!(
            contents(&link.target, 0, BYTES)? == data,
            "the first put after the loss brought other bytes"
        );
        link.source.write(0, &[0; 8])?;
    }
    Ok(losses)
}

/// Joins NIC 0 again, with new queues at both ends.
fn rebind(link: &mut Link, options: &QueuePairOptions) -> Result<()> {
    link.near.rebind(PATIENCE)?;
    let source = link.near.alloc(BYTES, Access::all())?;
    let (qp, peer) = (make_qp(&link.near, options)?, make_qp(&link.far, options)?);
    connect(&qp, &peer)?;
    (link.source, link.qp, link.peer) = (source, qp, peer);
    Ok(())
}

/// The middle one, and the slowest, in ns.
pub fn median_and_most(losses: &[Loss]) -> Result<(u64, u64)> {
    let mut times: Vec<u64> = losses.iter().map(|loss| loss.returned).collect();
    times.sort_unstable();
    let most = *times.last().context("no NIC was lost")?;
    Ok((times[times.len() / 2], most))
}
