// SPDX-License-Identifier: MIT OR Apache-2.0
//! The measurements: requests from slot to slot, each round with data of its own, which is compared behind it.

use super::{
    target::{Slots, Target},
    tcp::{Client, Remote},
};
use crate::{
    ends::{DEPTH, End},
    pattern,
    poster::{Job, Poster, nanoseconds},
    stop::Stop,
};
use anyhow::{Result, bail, ensure};
use ibgda::Status;
use ibgda_device::kernels::requests::{
    ibgda_request, ibgda_request_kind::IBGDA_REQUEST_PUT, ibgda_stream,
};
use indicatif::ProgressBar;
use std::time::Duration;

/// Requests of a round of latency, of which the first are not counted: what a pause has cooled down is warm again then.
const ROUND: u64 = 1024;
const WARM: u64 = 8;
/// Requests of a round of rate, of all queues.
const BURST: u64 = 1 << 14;
/// Slots begin at lines of the cache.
const LINE: u64 = 64;

/// The far end, wherever it is.
pub enum Peer {
    Here(Target),
    There(Client),
}

impl Peer {
    fn remote(&self) -> Remote {
        match self {
            Self::Here(target) => Remote {
                address: target.end.region.address(),
                rkey: target.end.region.rkey(),
            },
            Self::There(client) => client.remote,
        }
    }

    fn prepare(&mut self, seed: u64, length: u64) -> Result<()> {
        match self {
            Self::Here(target) => target.prepare(seed, length),
            Self::There(client) => client.prepare(seed, length),
        }
    }

    fn verify(&mut self, slots: Slots) -> Result<()> {
        let wrong = match self {
            Self::Here(target) => target.verify(slots)?,
            Self::There(client) => client.verify(slots)?,
        };
        match wrong {
            Some(wrong) => bail!("wrong data arrived: {wrong}"),
            None => Ok(()),
        }
    }
}

/// A run under way.
pub struct Run<'a> {
    pub near: &'a mut End,
    pub peer: &'a mut Peer,
    pub poster: &'a Poster,
    pub timeout: Duration,
    pub stop: &'a Stop,
    pub bar: &'a ProgressBar,
    pub seed: u64,
    /// Bytes that were compared.
    pub verified: u64,
}

/// What `rate` comes to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rate {
    pub count: u64,
    pub ns: u64,
}

impl Run<'_> {
    /// Slots for up to `most` messages.
    fn slots(&self, bytes: u64, most: u64) -> Result<Slots> {
        let stride = bytes.next_multiple_of(LINE);
        let room = self.near.region.length() / stride;
        ensure!(room > 0, "{bytes} bytes do not fit into the memory");
        Ok(Slots {
            bytes,
            stride,
            count: most.min(room),
        })
    }

    /// New data here, and none of it there.
    fn prepare(&mut self, slots: Slots) -> Result<()> {
        self.seed = pattern::next_seed(self.seed);
        let data = pattern::bytes(self.seed, slots.length() as usize);
        self.near.region.write(0, &data)?;
        self.peer.prepare(self.seed, slots.length())
    }

    fn verify(&mut self, slots: Slots) -> Result<()> {
        self.peer.verify(slots)?;
        self.verified += slots.bytes * slots.count;
        Ok(())
    }

    /// The times of `count` WRITEs of `bytes` bytes, one after the other; fewer after Ctrl-C.
    pub fn latency(&mut self, bytes: u64, count: u64) -> Result<Vec<u64>> {
        let mut times = Vec::new();
        // One round at least, of what is asked for at all.
        while (times.len() as u64) < count && (times.is_empty() || !self.stop.asked()) {
            let slots = self.slots(bytes, (count - times.len() as u64).min(ROUND) + WARM)?;
            let warm = WARM.min(slots.count - 1);
            self.prepare(slots)?;
            let mut requests = self.requests(slots);
            let ended = self.poster.jobs(
                &mut [Job {
                    qp: &mut self.near.qps[0],
                    requests: &mut requests,
                }],
                self.timeout,
            )?[0];
            ensure!(
                ended.status == Status::OK,
                "request {} of {bytes} bytes failed: {}",
                ended.done,
                self.poster.explain(&self.near.qps[0], ended.status)
            );
            self.verify(slots)?;
            let timed = &requests[warm as usize..];
            times.extend(timed.iter().map(|r| r.ended_ns.saturating_sub(r.begun_ns)));
            self.bar.inc(timed.len() as u64);
        }
        times.sort_unstable();
        Ok(times)
    }

    fn requests(&self, slots: Slots) -> Vec<ibgda_request> {
        let (region, remote) = (self.near.region.region(), self.peer.remote());
        (0..slots.count)
            .map(|slot| ibgda_request {
                kind: IBGDA_REQUEST_PUT,
                local: region.address + slot * slots.stride,
                lkey: region.lkey,
                remote: remote.address + slot * slots.stride,
                rkey: remote.rkey,
                bytes: slots.bytes as u32,
                wait: 1,
                ..Default::default()
            })
            .collect()
    }

    /// `count` WRITEs or somewhat more, as fast as all queue pairs together post them with a doorbell for each `batch`.
    pub fn rate(&mut self, bytes: u64, count: u64, batch: u32) -> Result<Rate> {
        ensure!(
            (1..=DEPTH / 2).contains(&batch),
            "a doorbell for each {batch} requests: 1 to {} are possible",
            DEPTH / 2
        );
        let qps = self.near.qps.len() as u64;
        let mut rate = Rate::default();
        while rate.count < count && (rate.count == 0 || !self.stop.asked()) {
            let mut slots = self.slots(bytes, (count - rate.count).min(BURST).max(qps))?;
            // The same number for each.
            slots.count -= slots.count % qps;
            ensure!(
                slots.count > 0,
                "{qps} messages of {bytes} bytes, one for each queue pair, do not fit into the memory (--memory)"
            );
            self.prepare(slots)?;
            let each = slots.count / qps;
            let (region, remote) = (self.near.region.region(), self.peer.remote());
            let mut streams: Vec<_> = (0..qps)
                .map(|qp| ibgda_stream {
                    local: region.address + qp * each * slots.stride,
                    lkey: region.lkey,
                    remote: remote.address + qp * each * slots.stride,
                    rkey: remote.rkey,
                    stride: slots.stride,
                    bytes: bytes as u32,
                    count: each as u32,
                    batch,
                    timeout_ns: nanoseconds(self.timeout),
                    ..Default::default()
                })
                .collect();
            self.poster.streams(&mut self.near.qps, &mut streams)?;
            for (qp, stream) in self.near.qps.iter().zip(&streams) {
                let status = Status(stream.status);
                ensure!(
                    status == Status::OK,
                    "messages of {bytes} bytes failed: {}",
                    self.poster.explain(qp, status)
                );
            }
            self.verify(slots)?;
            let begun = streams.iter().map(|stream| stream.begun_ns).min();
            let ended = streams.iter().map(|stream| stream.ended_ns).max();
            let ns = ended
                .zip(begun)
                .map_or(0, |(end, begin)| end.saturating_sub(begin));
            rate.count += slots.count;
            // A clock that stands still has a resolution of more than that.
            rate.ns += ns.max(1);
            self.bar.inc(slots.count);
        }
        Ok(rate)
    }
}
