// SPDX-License-Identifier: MIT OR Apache-2.0
//! Many requests, and many QPs at once.

use crate::{
    list::{List, all_ok},
    machine::Machine,
    rig::{Link, Where, connect, contents, make_qp, open, options, pattern},
};
use anyhow::{Result, ensure};
use ibgda::{Access, QueuePairOptions, Route};

/// The ring wraps again and again, and the NIC's 16-bit counter too.
pub fn ring_wraps(machine: &Machine, at: &Where, route: Route, count: u64) -> Result<String> {
    const SLOTS: u64 = 512;
    let options = QueuePairOptions {
        send_depth: 64,
        ..options()
    };
    let link = Link::new(machine, route, SLOTS as usize * 8, &options)?;
    let steps = List::new(at)
        .storm(&link.qp, &link.target, count, SLOTS)?
        .run()?;
    all_ok(&steps)?;
    let bytes = contents(&link.target, 0, SLOTS as usize * 8)?;
    for (slot, bytes) in (0..SLOTS).zip(bytes.chunks_exact(8)) {
        let found = u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
        let last = count - 1 - (count - 1 - slot) % SLOTS;
        ensure!(found == last, "slot {slot} holds {found}, not {last}");
    }
    let took = (steps[0].ended_ns - steps[0].began_ns) as f64 / 1e9;
    Ok(format!(
        "{count} WQEs through a ring of {}: every slot holds the last; {took:.2} s, {:.0} a second",
        options.send_depth,
        count as f64 / took
    ))
}

/// A QP for each block of one kernel, each with a doorbell page of its own.
pub fn blocks(machine: &Machine, at: &Where, route: Route, count: usize) -> Result<String> {
    const SHARE: usize = 16 << 10;
    const PUTS: usize = 16;
    let (near, far) = (open(machine, 0, route)?, open(machine, 1, route)?);
    let source = near.alloc(count * SHARE, Access::all())?;
    let target = far.alloc(count * SHARE, Access::all())?;
    let options = QueuePairOptions {
        send_depth: 8,
        ..options()
    };
    let mut pairs = Vec::new();
    for _ in 0..count {
        let pair = (make_qp(&near, &options)?, make_qp(&far, &options)?);
        connect(&pair.0, &pair.1)?;
        pairs.push(pair);
    }
    let mut pages: Vec<u64> = pairs.iter().map(|(qp, _)| qp.doorbell_page().1).collect();
    pages.sort_unstable();
    pages.dedup();
    ensure!(
        pages.len() == count,
        "{count} QPs have {} pages",
        pages.len()
    );
    let data = pattern(count * SHARE, 0x2b);
    source.write(0, &data)?;
    let lists: Result<Vec<List>> = pairs
        .iter()
        .enumerate()
        .map(|(block, (qp, _))| {
            let mut list = List::new(at);
            for put in 0..PUTS {
                let piece = SHARE / PUTS;
                let offset = (block * SHARE + put * piece) as u64;
                list = list.put(qp, (&target, offset), (&source, offset), piece as u32)?;
            }
            list.quiet(qp)
        })
        .collect();
    for (block, steps) in List::run_all(&lists?)?.iter().enumerate() {
        all_ok(steps).map_err(|error| error.context(format!("block {block}")))?;
    }
    ensure!(
        contents(&target, 0, data.len())? == data,
        "the bytes differ"
    );
    Ok(format!(
        "{count} QPs from {count} blocks, {PUTS} puts each by a doorbell page of its own: {} bytes equal",
        data.len()
    ))
}
