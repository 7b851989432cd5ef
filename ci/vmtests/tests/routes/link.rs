// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two contexts on one route, with a region each and two QPs connected to each other, and what kernels do with them.

pub use crate::support::{contents, poster};
pub use ibgda_hil::rig::{connect, make_qp, open, pattern};

use crate::support::{Machine, model_count};
use anyhow::{Context as _, Result, ensure};
use ibgda::{
    Access, Context, MemoryRegion, QueuePair, QueuePairOptions, Route, Status,
    abi::{IBGDA_NO_DOORBELL, IBGDA_UNSIGNALED, ibgda_status},
};
use ibgda_test_kernels::{Poller, Poster, SharedPoster};
use std::{thread, time::Duration};

/// For what must happen; much longer than it takes.
pub const PATIENCE: u64 = 60_000_000_000;
/// What the same kernels run on.
pub const ROUTES: [Route; 3] = [Route::Direct, Route::CpuDoorbell, Route::Proxy];

pub struct Link {
    pub near: Context,
    pub far: Context,
    pub source: MemoryRegion,
    pub target: MemoryRegion,
    pub qp: QueuePair,
    pub peer: QueuePair,
}

impl Link {
    pub fn with(
        machine: &Machine,
        route: Route,
        bytes: usize,
        change: impl FnOnce(&mut QueuePairOptions),
    ) -> Result<Self> {
        let mut options = QueuePairOptions {
            post_timeout: Duration::from_secs(60),
            ..Default::default()
        };
        change(&mut options);
        let (near, far) = (open(machine, 0, route)?, open(machine, 1, route)?);
        Self::between(near, far, bytes, &options)
    }

    pub fn new(machine: &Machine, route: Route) -> Result<Self> {
        Self::with(machine, route, 4096, |_| {})
    }

    pub fn between(
        near: Context,
        far: Context,
        bytes: usize,
        options: &QueuePairOptions,
    ) -> Result<Self> {
        Self::made(near, far, bytes, |context| make_qp(context, options))
    }

    /// With QPs that `make` makes.
    pub fn made(
        near: Context,
        far: Context,
        bytes: usize,
        make: impl Fn(&Context) -> Result<QueuePair>,
    ) -> Result<Self> {
        let source = near.alloc(bytes, Access::all())?;
        let target = far.alloc(bytes, Access::all())?;
        let (qp, peer) = (make(&near)?, make(&far)?);
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

    pub fn poster(&mut self) -> Poster {
        poster(&mut self.qp)
    }

    /// Eight bytes to `to`.
    pub fn put(&mut self, to: u64, flags: u32) -> Result<u64, Status> {
        let (remote, rkey) = (self.target.address() + to, self.target.rkey());
        let (local, lkey) = (self.source.address(), self.source.lkey());
        self.poster().put(remote, rkey, local, lkey, 8, flags)
    }

    /// Every kind of request, and that its data arrived where it should.
    pub fn moves_data(&mut self) -> Result<()> {
        let (local, lkey) = (self.source.address(), self.source.lkey());
        let (remote, rkey) = (self.target.address(), self.target.rkey());
        for (seed, bytes) in [1_usize, 8, 4097, 65_536].into_iter().enumerate() {
            let data = pattern(bytes, seed as u8);
            self.source.write(0, &data)?;
            self.target.write(0, &vec![0xee; bytes + 1])?;
            let request = self
                .poster()
                .put(remote, rkey, local, lkey, bytes as u32, 0)?;
            self.poster().wait(request, PATIENCE)?;
            let arrived = contents(&self.target, bytes + 1)?;
            ensure!(
                arrived[..bytes] == data && arrived[bytes] == 0xee,
                "put of {bytes}"
            );

            self.source.write(0, &vec![0xee; bytes + 1])?;
            let request = self
                .poster()
                .get(local, lkey, remote, rkey, bytes as u32, 0)?;
            self.poster().wait(request, PATIENCE)?;
            let arrived = contents(&self.source, bytes + 1)?;
            ensure!(
                arrived[..bytes] == data && arrived[bytes] == 0xee,
                "get of {bytes}"
            );
        }

        self.target.write(0, &100_u64.to_ne_bytes())?;
        let request = self.poster().fetch_add(remote, rkey, local, lkey, 5)?;
        self.poster().wait(request, PATIENCE)?;
        let request = self
            .poster()
            .compare_swap(remote, rkey, local, lkey, 105, 7)?;
        self.poster().wait(request, PATIENCE)?;
        ensure!(
            contents(&self.source, 8)? == 105_u64.to_ne_bytes(),
            "the old value"
        );
        ensure!(
            contents(&self.target, 8)? == 7_u64.to_ne_bytes(),
            "the new value"
        );

        // Several laps of the receive ring of 4.
        let (landing, landing_key) = (remote + 4096, self.target.lkey());
        for round in 0..9 {
            poster(&mut self.peer).recv(landing, landing_key, 256)?;
            let data = pattern(200, round);
            self.source.write(0, &data)?;
            let request = self.poster().send(local, lkey, 200, 0)?;
            self.poster().wait(request, PATIENCE)?;
            let cq = self
                .peer
                .recv_cq()
                .context("made with a receive queue")?
                .device_handle();
            // SAFETY: the CQ lives in `self.peer`, and this thread alone uses it.
            let (status, cqe) = unsafe { Poller::new(cq) }.poll(PATIENCE);
            ensure!(
                status == Status::OK && cqe.byte_count == 200,
                "receive {round}: {status}, {cqe:?}"
            );
            ensure!(
                contents(&self.target, 8192)?[4096..][..200] == data,
                "receive {round}"
            );
        }
        Ok(())
    }

    /// After a storm of `count` requests over `slots` words: each has the last index that belongs to it.
    pub fn holds_the_last_of(&self, count: u64, slots: u64) -> Result<()> {
        let words = contents(&self.target, slots as usize * 8)?;
        for (slot, word) in (0..slots).zip(words.chunks_exact(8)) {
            let value = u64::from_ne_bytes(word.try_into()?);
            let expected = (count - 1 - slot) / slots * slots + slot;
            ensure!(
                value == expected,
                "slot {slot} holds {value}, expected {expected}"
            );
        }
        Ok(())
    }

    /// A request with a wrong rkey between two good ones.
    pub fn fails_at_a_wrong_rkey(&mut self, shared: bool) -> Result<()> {
        let (remote, wrong) = (self.target.address() + 8, self.target.rkey() ^ 0xff00);
        let (local, lkey) = (self.source.address(), self.source.lkey());
        self.target.write(0, &[0xee; 64])?;
        self.source.write(0, &[0x11; 64])?;
        if shared {
            // SAFETY: the QP is shared, and outlives the call.
            let adds = unsafe { SharedPoster::new(self.qp.device_handle()) };
            let failed = adds.adds((remote, wrong), (local, lkey), 8, PATIENCE);
            ensure!(failed == Err(Status::REMOTE_ACCESS), "{failed:?}");
        } else {
            let good = self.put(0, IBGDA_UNSIGNALED | IBGDA_NO_DOORBELL)?;
            let bad = self
                .poster()
                .put(remote, wrong, local, lkey, 8, IBGDA_NO_DOORBELL)?;
            self.put(16, 0)?;
            ensure!(self.poster().wait(bad, PATIENCE) == Err(Status::REMOTE_ACCESS));
            ensure!(
                self.poster().wait(good, PATIENCE) == Ok(()),
                "the one before"
            );
            ensure!(
                self.put(0, 0) == Err(Status::REMOTE_ACCESS),
                "a broken QP takes no more"
            );
        }
        let error = self.qp.send_cq().error().context("latched for the host")?;
        ensure!(
            (error.qpn, error.syndrome) == (self.qp.number(), 0x13)
                && error.to_string().contains("rkey"),
            "{error:?}"
        );
        ensure!(
            contents(&self.target, 64)?[8..]
                .iter()
                .all(|&byte| byte == 0xee),
            "refused data has arrived"
        );
        ensure!(self.qp.counters().failed > 0, "{:?}", self.qp.counters());
        Ok(())
    }

    /// `threads` threads that each add 1 to one counter `count` times, of a QP that is shared.
    pub fn adds_by_threads(&self, threads: u64, count: u64) -> Result<()> {
        self.target.write(0, &[0; 8])?;
        // SAFETY: the QP is shared, and outlives the scope in which the threads are.
        let poster = unsafe { SharedPoster::new(self.qp.device_handle()) };
        let (poster, counter) = (&poster, (self.target.address(), self.target.rkey()));
        let statuses = thread::scope(|scope| {
            let threads: Vec<_> = (0..threads)
                .map(|me| {
                    let local = (self.source.address() + me * 8, self.source.lkey());
                    scope.spawn(move || poster.adds(counter, local, count, PATIENCE))
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("a poster"))
                .collect::<Vec<_>>()
        });
        ensure!(statuses.iter().all(Result::is_ok), "{statuses:?}");
        let sum = u64::from_ne_bytes(contents(&self.target, 8)?[..].try_into()?);
        ensure!(sum == threads * count, "{sum} additions arrived");
        let counters = self.qp.counters();
        ensure!(
            counters.posted == counters.told
                && counters.completed == counters.posted
                && counters.posted >= threads * count,
            "{counters:?}"
        );
        Ok(())
    }

    /// Writes until the ring is full, or something else is wrong: the peer is gone.
    pub fn runs_into_a_dead_peer(self) -> Result<()> {
        let Self {
            source,
            target,
            mut qp,
            peer,
            ..
        } = self;
        drop(peer);
        let (remote, rkey) = (target.address(), target.rkey());
        let mut poster = poster(&mut qp);
        let status = (0..1_000).find_map(|_| {
            let (local, lkey) = (source.address(), source.lkey());
            poster.put(remote, rkey, local, lkey, 8, 0).err()
        });
        let expected = Status(ibgda_status::IBGDA_ERR_TRANSPORT_RETRY_EXCEEDED);
        ensure!(status == Some(expected), "{status:?}");
        Ok(())
    }
}

/// `threads` threads that add to one counter through one shared QP.
pub fn shared_adds(
    machine: &Machine,
    route: Route,
    send_depth: u32,
    threads: u64,
    count: u64,
) -> Result<()> {
    let foreign = model_count("foreign_doorbells")?;
    let link = Link::with(machine, route, 4096, |options| {
        (options.send_depth, options.shared) = (send_depth, true);
    })?;
    link.adds_by_threads(threads, count)?;
    ensure!(
        model_count("foreign_doorbells")? == foreign,
        "a doorbell went to another's page"
    );
    Ok(())
}
