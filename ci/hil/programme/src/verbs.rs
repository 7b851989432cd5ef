// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every kind of request from the kernel, with its data checked.

use crate::{
    list::{List, all_ok},
    machine::Machine,
    rig::{Link, PATIENCE, Where, contents, options, pattern},
};
use anyhow::{Result, ensure};
use ibgda::{QueuePairOptions, Route};

/// Bytes of the regions: many pages, which lie anywhere in the guest's memory.
const BYTES: usize = 1 << 20;
/// The last words of a region are for signals and atomics.
const WORDS: u64 = BYTES as u64 - 4096;

fn word(region: &ibgda::MemoryRegion, offset: u64) -> Result<u64> {
    let bytes = contents(region, offset as usize, 8)?;
    Ok(u64::from_ne_bytes(bytes.try_into().expect("eight bytes")))
}

/// put, put_inline, get, the atomics.
pub fn one_sided(machine: &Machine, at: &Where, route: Route) -> Result<String> {
    let link = Link::new(machine, route, BYTES, &options())?;
    let (qp, source, target) = (&link.qp, &link.source, &link.target);
    let data = WORDS as usize;
    let there = pattern(data, 0x5a);
    source.write(0, &there)?;

    let list = List::new(at).put(qp, (target, 0), (source, 0), data as u32)?;
    all_ok(&list.quiet(qp)?.run()?)?;
    ensure!(contents(target, 0, data)? == there, "put: the bytes differ");

    let list = List::new(at)
        .put_inline(qp, (target, WORDS), 0x0123_4567_89ab_cdef, 8)?
        .put_inline(qp, (target, WORDS + 8), 0x77, 1)?;
    all_ok(&list.quiet(qp)?.run()?)?;
    ensure!(
        word(target, WORDS)? == 0x0123_4567_89ab_cdef && word(target, WORDS + 8)? == 0x77,
        "put_inline: the words differ"
    );

    // What a get brings is there for the kernel itself, at once.
    let back = pattern(data, 0xc3);
    target.write(0, &back)?;
    let list = List::new(at)
        .get(qp, (source, 0), (target, 0), data as u32)?
        .quiet(qp)?
        .load((source, 4096))?;
    let steps = list.run()?;
    all_ok(&steps)?;
    let first = u64::from_ne_bytes(back[4096..4104].try_into().expect("eight bytes"));
    ensure!(
        steps[2].result == first,
        "get: the kernel finds {:#x}, not {first:#x}",
        steps[2].result
    );
    ensure!(contents(source, 0, data)? == back, "get: the bytes differ");

    target.write(WORDS as usize, &40u64.to_ne_bytes())?;
    let list = List::new(at)
        .fetch_add(qp, (target, WORDS), (source, WORDS), 2)?
        .compare_swap(qp, (target, WORDS), (source, WORDS + 8), [42, 7])?
        .compare_swap(qp, (target, WORDS), (source, WORDS + 16), [42, 8])?;
    all_ok(&list.quiet(qp)?.run()?)?;
    let old: Result<Vec<u64>> = (0..3).map(|i| word(source, WORDS + 8 * i)).collect();
    ensure!(
        old? == [40, 42, 7] && word(target, WORDS)? == 7,
        "the atomics found or left something else"
    );
    Ok(format!(
        "put and get of {data} bytes, put_inline, fetch_add, compare_swap: bytes equal"
    ))
}

/// send and recv: one block of the kernel posts a receive at NIC 1 and waits, another sends from NIC 0.
pub fn messages(machine: &Machine, at: &Where, route: Route) -> Result<String> {
    const MESSAGE: usize = 5000;
    let options = QueuePairOptions {
        recv_depth: 16,
        ..options()
    };
    let link = Link::new(machine, route, BYTES, &options)?;
    let mut received = 0;
    for round in 0..24u8 {
        let data = pattern(MESSAGE, round);
        link.source.write(0, &data)?;
        link.target.write(0, &vec![!round; MESSAGE])?;
        let bytes = MESSAGE as u32;
        // Before the message is sent: a receiver that is not ready is given a few ms only.
        let posted = List::new(at).recv(&link.peer, (&link.target, 0), bytes)?;
        all_ok(&posted.run()?)?;
        let receiver = List::new(at)
            .poll_recv(&link.peer, PATIENCE)?
            .load((&link.target, 0))?;
        let sender = List::new(at)
            .send(&link.qp, (&link.source, 0), bytes)?
            .quiet(&link.qp)?;
        let steps = List::run_all(&[receiver, sender])?;
        all_ok(&steps[0])?;
        all_ok(&steps[1])?;
        let first = word(&link.source, 0)?;
        ensure!(
            steps[0][0].result == MESSAGE as u64 && steps[0][1].result == first,
            "a message of {MESSAGE} bytes that begins with {first:#x} was received as {} bytes with {:#x}",
            steps[0][0].result,
            steps[0][1].result
        );
        ensure!(
            contents(&link.target, 0, MESSAGE)? == data,
            "the message differs"
        );
        received += 1;
    }
    Ok(format!(
        "{received} messages of {MESSAGE} bytes sent and received: bytes equal"
    ))
}

/// put_signal: a block at NIC 1's side waits for the word, and finds what was put before it.
pub fn signals(machine: &Machine, at: &Where, route: Route) -> Result<String> {
    const PUT: u64 = 64 << 10;
    const ROUNDS: u64 = 50;
    let link = Link::new(machine, route, BYTES, &options())?;
    for round in 1..=ROUNDS {
        let data = pattern(PUT as usize, round as u8);
        link.source.write(0, &data)?;
        let last = PUT - 8;
        let waiter = List::new(at)
            .wait_until(Some(&link.peer), (&link.target, WORDS), round, PATIENCE)?
            .load((&link.target, last))?;
        let putter = List::new(at)
            .put_signal(
                &link.qp,
                (&link.target, 0),
                (&link.source, 0),
                PUT as u32,
                (WORDS, round),
            )?
            .quiet(&link.qp)?;
        let steps = List::run_all(&[waiter, putter])?;
        all_ok(&steps[0])?;
        all_ok(&steps[1])?;
        let expected = word(&link.source, last)?;
        ensure!(
            steps[0][1].result == expected,
            "behind signal {round} the kernel finds {:#x}, not {expected:#x}",
            steps[0][1].result
        );
        ensure!(
            contents(&link.target, 0, PUT as usize)? == data,
            "the bytes behind signal {round} differ"
        );
    }
    Ok(format!(
        "{ROUNDS} signals behind {PUT} bytes each: the data was there"
    ))
}
