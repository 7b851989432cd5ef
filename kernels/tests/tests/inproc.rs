// SPDX-License-Identifier: MIT OR Apache-2.0
//! The device header against the ConnectX model in this process: the same engine as in a VM, with queues in plain memory.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use connectx::inproc::{Access, Event, Fabric, Loss, Memory, Nic, Options, Qp, QpSpec};
use ibgda_device::{
    Status,
    abi::{IBGDA_NO_DOORBELL, ibgda_cq, ibgda_qp, ibgda_status},
};
use ibgda_test_kernels::{Poller, Poster};

/// Longer than anything here takes, on a busy machine too.
const PATIENCE: u64 = 20_000_000_000;

/// The handles of one QP as the header wants them, and what posts through them.
struct Side {
    qp: Qp,
    handle: Box<ibgda_qp>,
    _cqs: [Box<ibgda_cq>; 2],
}

impl Side {
    fn new(nic: &Nic, qp: Qp) -> Self {
        let cq = |ring: u64, record: u64, number, depth| {
            Box::new(ibgda_cq {
                ring: ring as *const u8,
                doorbell_record: record as *mut u32,
                status_page: nic.status_page() as *const u64,
                number,
                depth,
                generation: 1,
                ..Default::default()
            })
        };
        let (send, recv) = (qp.spec.send_depth, qp.spec.recv_depth);
        let mut cqs = [
            cq(qp.send_cq_ring, qp.send_cq_record, qp.send_cqn, send),
            cq(qp.recv_cq_ring, qp.recv_cq_record, qp.recv_cqn, recv.max(1)),
        ];
        let mut handle = Box::new(ibgda_qp {
            limit: send.into(),
            send_ring: qp.send_ring as *mut u8,
            recv_ring: qp.recv_ring as *mut u8,
            doorbell_record: qp.record as *mut u32,
            doorbell: qp.doorbell as *mut u64,
            send_cq: &mut *cqs[0],
            recv_cq: &mut *cqs[1],
            number: qp.qpn,
            send_depth: send,
            recv_depth: recv,
            post_timeout_ns: PATIENCE,
            ..Default::default()
        });
        cqs[0].limit = &mut handle.limit;
        Self {
            qp,
            handle,
            _cqs: cqs,
        }
    }

    fn poster(&mut self) -> Poster {
        // SAFETY: the handles and the fabric outlive the posters of these tests, one thread uses each.
        unsafe { Poster::new(&mut *self.handle) }
    }

    fn receiver(&mut self) -> Poller {
        // SAFETY: as in `poster`.
        unsafe { Poller::new(self.handle.recv_cq) }
    }
}

/// Two functions, a buffer with a key on each.
struct Rig {
    fabric: Fabric,
    pds: [u32; 2],
    buffers: [Memory; 2],
    keys: [u32; 2],
}

const LEN: usize = 1 << 16;

impl Rig {
    fn new() -> Self {
        let fabric = Fabric::new(&Options::default()).unwrap();
        let pds = [0, 1].map(|i| fabric.nics()[i].alloc_pd().unwrap());
        let buffers = [0, 1].map(|_| fabric.alloc(LEN).unwrap());
        let keys = [0, 1].map(|i| {
            let nic = &fabric.nics()[i];
            nic.create_mkey(pds[i], buffers[i].addr(), LEN as u64, Access::ALL)
                .unwrap()
        });
        Self {
            fabric,
            pds,
            buffers,
            keys,
        }
    }

    fn nic(&self, i: usize) -> &Nic {
        &self.fabric.nics()[i]
    }

    fn connect(&self, a: &Qp, b: &Qp) {
        let (from, to) = (self.nic(0), self.nic(1));
        from.connect(a.qpn, &b.peer(to.lid())).unwrap();
        to.connect(b.qpn, &a.peer(from.lid())).unwrap();
    }

    /// Connected QPs of the two functions.
    fn pair(&self, send_depth: u32, recv_depth: u32) -> [Side; 2] {
        let spec = QpSpec {
            send_depth,
            recv_depth,
            ..QpSpec::default()
        };
        let qps = [0, 1].map(|i| self.nic(i).open_qp(self.pds[i], &spec).unwrap());
        self.connect(&qps[0], &qps[1]);
        let [a, b] = qps;
        [Side::new(self.nic(0), a), Side::new(self.nic(1), b)]
    }

    fn fill(&self, i: usize, f: impl Fn(usize) -> u8) {
        let bytes: Vec<u8> = (0..LEN).map(f).collect();
        self.buffers[i].write(0, &bytes);
    }

    fn bytes(&self, i: usize) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        self.buffers[i].read(0, &mut bytes);
        bytes
    }

    fn clean(&self) {
        for nic in self.fabric.nics() {
            for name in [
                "torn_wqes",
                "doorbells_ahead",
                "foreign_doorbells",
                "lost_doorbells",
                "dma_faults",
                "error_cqes",
                "refusals",
            ] {
                assert_eq!(nic.count(name), 0, "{} {name}", nic.name());
            }
        }
    }
}

fn value(result: Result<(), Status>) -> u32 {
    result.err().map_or(0, |status| status.0)
}

#[test]
fn writes_reads_and_atomics_move_the_right_bytes() {
    let rig = Rig::new();
    let [mut a, _b] = rig.pair(64, 0);
    let mut poster = a.poster();
    let (here, there) = (rig.buffers[0].addr(), rig.buffers[1].addr());
    for (round, len) in [0, 1, 3, 8, 28, 29, 64, 4095, 4096, 4097, 60_000]
        .into_iter()
        .enumerate()
    {
        rig.fill(0, |i| (i * 7 + round) as u8);
        rig.fill(1, |_| 0xee);
        poster
            .put(there + 5, rig.keys[1], here + 3, rig.keys[0], len as u32, 0)
            .unwrap();
        poster.quiet(PATIENCE).unwrap();
        let (from, to) = (rig.bytes(0), rig.bytes(1));
        assert_eq!(to[5..5 + len], from[3..3 + len], "{len} bytes");
        assert!(to[..5].iter().chain(&to[5 + len..]).all(|b| *b == 0xee));
        rig.fill(0, |_| 0xdd);
        poster
            .get(here + 9, rig.keys[0], there + 5, rig.keys[1], len as u32, 0)
            .unwrap();
        poster.quiet(PATIENCE).unwrap();
        let back = rig.bytes(0);
        assert_eq!(back[9..9 + len], to[5..5 + len], "{len} bytes back");
        assert!(back[..9].iter().chain(&back[9 + len..]).all(|b| *b == 0xdd));
    }
    let counter = rig.buffers[1].quad(8).unwrap();
    let old = rig.buffers[0].quad(16).unwrap();
    counter.store(40, Ordering::Relaxed);
    poster
        .fetch_add(there + 8, rig.keys[1], here + 16, rig.keys[0], 2)
        .unwrap();
    poster.quiet(PATIENCE).unwrap();
    let now = || (old.load(Ordering::Acquire), counter.load(Ordering::Acquire));
    assert_eq!(now(), (40, 42));
    for (compare, after) in [(41, 42), (42, 7)] {
        poster
            .compare_swap(there + 8, rig.keys[1], here + 16, rig.keys[0], compare, 7)
            .unwrap();
        poster.quiet(PATIENCE).unwrap();
        assert_eq!(now(), (42, after));
    }
    rig.clean();
}

#[test]
fn sends_take_receives_in_order() {
    let rig = Rig::new();
    let [mut a, mut b] = rig.pair(16, 16);
    let (mut poster, mut other) = (a.poster(), b.poster());
    let (here, there) = (rig.buffers[0].addr(), rig.buffers[1].addr());
    rig.fill(0, |i| i as u8);
    let mut receiver = b.receiver();
    for round in 0..40 {
        other.recv(there + round * 64, rig.keys[1], 64).unwrap();
        poster
            .send(here + round, rig.keys[0], 10 + round as u32, 0)
            .unwrap();
        let (status, cqe) = receiver.poll(PATIENCE);
        assert_eq!((status.0, cqe.byte_count), (0, 10 + round as u32));
    }
    poster.quiet(PATIENCE).unwrap();
    let bytes = rig.bytes(1);
    for round in 0..40 {
        assert_eq!(
            bytes[round * 64..][..3],
            [0, 1, 2].map(|i| (round + i) as u8)
        );
    }
    rig.clean();
}

#[test]
fn a_ring_of_16_goes_past_the_16_bit_counter() {
    let rig = Rig::new();
    let [mut a, _b] = rig.pair(16, 0);
    let count = 70_000;
    a.poster()
        .storm(
            rig.buffers[1].addr(),
            rig.keys[1],
            64,
            count,
            4,
            4,
            PATIENCE,
        )
        .unwrap();
    for slot in 0..64 {
        let last = (count - 1 - slot) / 64 * 64 + slot;
        let word = rig.buffers[1].quad(slot as usize * 8).unwrap();
        assert_eq!(word.load(Ordering::Acquire), last);
    }
    rig.clean();
}

#[test]
fn sixty_four_queue_pairs_with_a_page_each() {
    let rig = Rig::new();
    let mut sides: Vec<_> = (0..64).map(|_| rig.pair(16, 0)).collect();
    let mut posters: Vec<Poster> = sides.iter_mut().map(|[a, _]| a.poster()).collect();
    std::thread::scope(|scope| {
        for (half, chunk) in posters.chunks_mut(32).enumerate() {
            let (there, key) = (rig.buffers[1].addr(), rig.keys[1]);
            scope.spawn(move || {
                for (i, poster) in chunk.iter_mut().enumerate() {
                    let at = there + (half * 32 + i) as u64 * 128;
                    poster.storm(at, key, 16, 200, 3, 2, PATIENCE).unwrap();
                }
            });
        }
    });
    for qp in 0..64 {
        let word = rig.buffers[1].quad(qp * 128 + 7 * 8).unwrap();
        assert_eq!(word.load(Ordering::Acquire), 199, "slot 7 of QP {qp}");
    }
    rig.clean();
}

#[test]
fn a_wrong_rkey_is_a_remote_access_error_and_an_event() {
    let rig = Rig::new();
    let [mut a, b] = rig.pair(16, 0);
    let mut poster = a.poster();
    let (here, there) = (rig.buffers[0].addr(), rig.buffers[1].addr());
    let request = poster
        .put(there, rig.keys[1] ^ 1, here, rig.keys[0], 8, 0)
        .unwrap();
    let status = value(poster.wait(request, PATIENCE));
    assert_eq!(status, ibgda_status::IBGDA_ERR_REMOTE_ACCESS);
    assert!(
        poster
            .put(there, rig.keys[1], here, rig.keys[0], 8, 0)
            .is_err()
    );
    assert_eq!(rig.nic(1).count("access_naks"), 1);
    let event = rig.nic(1).next_event(Duration::from_secs(10));
    let number = b.qp.qpn;
    assert!(
        matches!(event, Some(Event::Queue { number: n, .. }) if n == number),
        "{event:?}"
    );
}

#[test]
fn memory_that_was_not_registered_is_out_of_reach() {
    let rig = Rig::new();
    let [mut a, _b] = rig.pair(16, 0);
    let mut poster = a.poster();
    let victim = Box::new([0x77_u8; 64]);
    let at = victim.as_ptr() as u64;
    // The key is good, but the process has not given the memory to the engine.
    let key = rig
        .nic(1)
        .create_mkey(rig.pds[1], at, 64, Access::ALL)
        .unwrap();
    let request = poster
        .put(at, key, rig.buffers[0].addr(), rig.keys[0], 64, 0)
        .unwrap();
    assert_ne!(value(poster.wait(request, PATIENCE)), 0);
    assert_eq!(*victim, [0x77; 64]);
    assert_eq!(rig.nic(1).count("dma_faults"), 1);
}

#[test]
fn a_doorbell_on_another_s_page_is_counted_and_does_nothing() {
    let rig = Rig::new();
    let [mut a, _] = rig.pair(16, 0);
    let [b, _] = rig.pair(16, 0);
    let mut poster = a.poster();
    let flags = IBGDA_NO_DOORBELL;
    let request = poster
        .put(
            rig.buffers[1].addr(),
            rig.keys[1],
            rig.buffers[0].addr(),
            rig.keys[0],
            8,
            flags,
        )
        .unwrap();
    let (right, wrong) = (a.handle.doorbell, b.qp.doorbell as *mut u64);
    a.handle.doorbell = wrong;
    let mut poster = a.poster();
    poster.write_doorbell(1).unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    while rig.nic(0).count("foreign_doorbells") == 0 {
        assert!(Instant::now() < deadline, "the doorbell was not seen");
        std::thread::yield_now();
    }
    assert_eq!(
        value(poster.wait(request, 1_000_000)),
        ibgda_status::IBGDA_TIMEOUT
    );
    a.handle.doorbell = right;
    // As if it had never been rung.
    a.handle.rung = 0;
    a.handle.unrung = a.handle.producer;
    let mut poster = a.poster();
    poster.write_doorbell(1).unwrap();
    poster.wait(request, PATIENCE).unwrap();
    assert_eq!(rig.nic(0).count("foreign_doorbells"), 1);
}

#[test]
fn a_frozen_engine_is_a_timeout_and_goes_on_when_thawed() {
    let rig = Rig::new();
    let [mut a, _b] = rig.pair(16, 0);
    let mut poster = a.poster();
    let (here, there) = (rig.buffers[0].addr(), rig.buffers[1].addr());
    rig.fabric.freeze(true);
    let request = poster
        .put(there, rig.keys[1], here, rig.keys[0], 8, 0)
        .unwrap();
    assert_eq!(
        value(poster.wait(request, 5_000_000)),
        ibgda_status::IBGDA_TIMEOUT
    );
    rig.fabric.freeze(false);
    poster.wait(request, PATIENCE).unwrap();
    rig.clean();
}

#[test]
fn a_lost_function_shows_on_the_status_page_and_comes_back() {
    let rig = Rig::new();
    let [mut a, _b] = rig.pair(16, 0);
    let mut poster = a.poster();
    let (here, there) = (rig.buffers[0].addr(), rig.buffers[1].addr());
    rig.fabric.freeze(true);
    let request = poster
        .put(there, rig.keys[1], here, rig.keys[0], 8, 0)
        .unwrap();
    rig.nic(0).lose(Loss::Reset);
    rig.fabric.freeze(false);
    let status = value(poster.wait(request, PATIENCE));
    assert_eq!(status, ibgda_status::IBGDA_ERR_NIC_LOST);
    assert_eq!((rig.nic(0).count("qp"), rig.nic(0).count("uar")), (0, 0));
    rig.nic(0).recover().unwrap();
    assert!(rig.nic(0).recover().is_err(), "it is not lost any more");
    assert_eq!(rig.nic(0).count("eq"), 1);
    rig.nic(0).alloc_pd().unwrap();
}

#[test]
fn a_queue_pair_in_error_flushes() {
    let rig = Rig::new();
    let [mut a, _b] = rig.pair(16, 0);
    rig.nic(0).to_error(a.qp.qpn).unwrap();
    let mut poster = a.poster();
    let (here, there) = (rig.buffers[0].addr(), rig.buffers[1].addr());
    let request = poster
        .put(there, rig.keys[1], here, rig.keys[0], 8, 0)
        .unwrap();
    let status = value(poster.wait(request, PATIENCE));
    assert_eq!(status, ibgda_status::IBGDA_ERR_WR_FLUSHED);
}

#[test]
fn everything_can_be_closed_again() {
    let rig = Rig::new();
    let before: Vec<u64> = ["qp", "cq", "uar", "pd", "mkey"]
        .map(|n| rig.nic(0).count(n))
        .into();
    for _ in 0..3 {
        let qp = rig.nic(0).open_qp(rig.pds[0], &QpSpec::default()).unwrap();
        rig.nic(0).close_qp(&qp).unwrap();
        assert!(rig.nic(0).close_qp(&qp).is_err(), "once");
    }
    let bad = QpSpec {
        send_depth: 48,
        ..QpSpec::default()
    };
    assert!(rig.nic(0).open_qp(rig.pds[0], &bad).is_err());
    assert!(
        rig.nic(0).open_qp(0xffff, &QpSpec::default()).is_err(),
        "no such PD"
    );
    let after: Vec<u64> = ["qp", "cq", "uar", "pd", "mkey"]
        .map(|n| rig.nic(0).count(n))
        .into();
    assert_eq!(before, after);
}
