// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rings, completions and waits of the device header, against a NIC reduced to what these need: it looks at doorbell and
//! record, takes WQEs from the ring and writes CQEs, as slowly or as wrongly as a test asks.

use ibgda_device::{
    Status,
    abi::{
        IBGDA_CQE_INVALID, IBGDA_CQE_REQ, IBGDA_CQE_REQ_ERR, IBGDA_CQE_RESP_ERR, IBGDA_NO_DOORBELL,
        IBGDA_UNSIGNALED, ibgda_cq, ibgda_qp, ibgda_region, ibgda_status,
    },
};
use ibgda_test_kernels::{Poller, Poster};
use std::{
    marker::PhantomData,
    ptr,
    sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

const QPN: u32 = 0x51;
const CQ_CONSUMER: usize = 0;
const SEND_RECORD: usize = 1;

#[repr(C, align(64))]
struct Block([AtomicU8; 64]);

/// Memory that both sides share. Bytes are atomics only so that the test's own reads are sound.
struct Rig {
    depth: u32,
    send_ring: Vec<Block>,
    cq_ring: Vec<Block>,
    records: Box<[AtomicU32; 2]>,
    cq_records: Box<[AtomicU32; 2]>,
    doorbell: Box<AtomicU64>,
    status_page: Box<AtomicU64>,
    stop: AtomicBool,
}

fn block(byte: u8) -> Block {
    Block(std::array::from_fn(|_| AtomicU8::new(byte)))
}

impl Rig {
    fn new(depth: u32) -> Self {
        Self {
            depth,
            send_ring: (0..depth).map(|_| block(0)).collect(),
            cq_ring: (0..depth).map(|_| block(0xff)).collect(),
            records: Box::default(),
            cq_records: Box::default(),
            doorbell: Box::default(),
            status_page: Box::new(AtomicU64::new((1 << 32) | 1)),
            stop: AtomicBool::new(false),
        }
    }

    /// Handles whose queues start at index `first`, as if that many requests had gone before.
    fn side(&self, first: u64) -> Side<'_> {
        let mut cq = Box::new(ibgda_cq {
            ring: self.cq_ring.as_ptr().cast(),
            doorbell_record: self.cq_records.as_ptr().cast::<u32>().cast_mut(),
            status_page: ptr::from_ref(&*self.status_page).cast(),
            number: 9,
            depth: self.depth,
            generation: 1,
            consumer: first,
            completed: first,
            ..Default::default()
        });
        let mut qp = Box::new(ibgda_qp {
            limit: first + u64::from(self.depth),
            send_ring: self.send_ring.as_ptr().cast::<u8>().cast_mut(),
            doorbell_record: self.records.as_ptr().cast::<u32>().cast_mut(),
            doorbell: ptr::from_ref(&*self.doorbell).cast::<u64>().cast_mut(),
            send_cq: &mut *cq,
            number: QPN,
            send_depth: self.depth,
            producer: first,
            rung: first,
            ..Default::default()
        });
        cq.limit = &mut qp.limit;
        Side {
            cq,
            qp,
            _rig: PhantomData,
        }
    }

    fn write_cqe(&self, index: u64, kind: u32, counter: u16, syndrome: u8) {
        let cqe = &self.cq_ring[(index % u64::from(self.depth)) as usize].0;
        let owner = (index / u64::from(self.depth)) as u8 & 1;
        let mut bytes = [0_u8; 64];
        bytes[54] = 0x77;
        bytes[55] = syndrome;
        bytes[56..60].copy_from_slice(&(0x0800_0000 | QPN).to_be_bytes());
        bytes[60..62].copy_from_slice(&counter.to_be_bytes());
        for (to, from) in cqe.iter().zip(bytes).take(63) {
            to.store(from, Ordering::Relaxed);
        }
        cqe[63].store(((kind as u8) << 4) | owner, Ordering::Release);
    }

    fn slot(&self, index: u64) -> [u8; 64] {
        let slot = &self.send_ring[(index % u64::from(self.depth)) as usize].0;
        std::array::from_fn(|i| slot[i].load(Ordering::Relaxed))
    }

    /// A NIC: executes every WQE up to what the doorbell made it look for, until stopped. Returns the values written.
    fn nic(&self, first: u64) -> Vec<u64> {
        let (mut next, mut cqe, mut values) = (first, first, Vec::new());
        while !self.stop.load(Ordering::Relaxed) {
            let bell = self.doorbell.load(Ordering::Acquire).to_ne_bytes();
            let rung = u16::from_be_bytes([bell[1], bell[2]]);
            let record = u32::from_be(self.records[SEND_RECORD].load(Ordering::Acquire)) as u16;
            // Forward distance from the doorbell to the record: a record behind the doorbell shows as nearly 65536.
            if bell != [0; 8] {
                assert!(
                    record.wrapping_sub(rung) < 0x8000,
                    "doorbell {rung} ahead of its record {record}"
                );
            }
            while next as u16 != rung && bell != [0; 8] {
                let wqe = self.slot(next);
                assert_eq!(
                    u16::from_be_bytes([wqe[1], wqe[2]]),
                    next as u16,
                    "slot of request {next} holds another"
                );
                assert_eq!(wqe[4..7], QPN.to_be_bytes()[1..]);
                values.push(u64::from_ne_bytes(wqe[36..44].try_into().unwrap()));
                if wqe[11] & 0x0c == 0x08 {
                    let consumer =
                        u32::from_be(self.cq_records[CQ_CONSUMER].load(Ordering::Relaxed));
                    let unread = (cqe as u32).wrapping_sub(consumer) & 0xff_ffff;
                    assert!(
                        cqe == first || unread < self.depth || consumer == 0,
                        "CQ overrun: {unread} unread"
                    );
                    self.write_cqe(cqe, IBGDA_CQE_REQ, next as u16, 0);
                    cqe += 1;
                }
                next += 1;
            }
            thread::yield_now();
        }
        values
    }
}

/// Longer than anything here takes on a loaded machine.
const PATIENCE: u64 = 40_000_000_000;

/// Handles into a rig, and who uses them.
struct Side<'a> {
    cq: Box<ibgda_cq>,
    qp: Box<ibgda_qp>,
    _rig: PhantomData<&'a Rig>,
}

impl Side<'_> {
    fn poster(&mut self) -> Poster {
        // SAFETY: the handles name memory of the rig, which lives longer; each test's main thread alone uses them.
        unsafe { Poster::new(&mut *self.qp) }
    }

    fn poller(&mut self) -> Poller {
        // SAFETY: as above.
        unsafe { Poller::new(&mut *self.cq) }
    }
}

fn post(side: &mut Side<'_>, flags: u32) -> Result<u64, Status> {
    side.poster().put(0, 0, 0, 0, 8, flags)
}

/// Posts `count` requests with the given intervals of completions and doorbells to a NIC thread.
fn storm(depth: u32, first: u64, count: u64, signal_every: u64, doorbell_every: u64) {
    let rig = Rig::new(depth);
    // The CQ's ownership bits of the lap before `first`.
    for index in first.saturating_sub(u64::from(depth))..first {
        let owner = (index / u64::from(depth)) as u8 & 1;
        rig.cq_ring[(index % u64::from(depth)) as usize].0[63]
            .store(0xf0 | owner, Ordering::Relaxed);
    }
    let mut side = rig.side(first);
    side.qp.post_timeout_ns = PATIENCE;
    let values = thread::scope(|scope| {
        let nic = scope.spawn(|| rig.nic(first));
        let status = side
            .poster()
            .storm(0, 0, 1, count, signal_every, doorbell_every, PATIENCE);
        rig.stop.store(true, Ordering::Relaxed);
        let values = nic.join().expect("the NIC found a fault");
        assert_eq!(status, Ok(()));
        values
    });
    assert_eq!(side.qp.producer, first + count);
    assert_eq!(side.cq.completed, first + count);
    assert!(
        values.into_iter().eq(first..first + count),
        "every request once and in order"
    );
}

#[test]
fn a_ring_of_16_is_never_overrun_in_100000_requests() {
    storm(16, 0, 100_000, 1, 1);
}

#[test]
fn neither_with_few_completions_and_few_doorbells() {
    storm(16, 0, 20_000, 1_000, 1_000);
    storm(64, 0, 20_000, 7, 3);
    storm(2, 0, 5_000, 5_000, 5_000);
    storm(1, 0, 1_000, 9, 9);
}

#[test]
fn indices_pass_the_wrap_of_the_counters() {
    storm(16, 0xfff0, 0x2_0000, 1, 1);
    storm(128, 0xff_fff0, 1_000, 4, 2);
    storm(32, 0xffff_fff0, 1_000, 1, 1);
}

#[test]
fn a_full_ring_with_a_dead_peer_is_an_error_within_the_timeout() {
    let rig = Rig::new(16);
    let mut side = rig.side(0);
    side.qp.post_timeout_ns = 50_000_000;
    for index in 0..16 {
        assert_eq!(post(&mut side, 0), Ok(index));
    }
    let start = Instant::now();
    assert_eq!(post(&mut side, 0), Err(Status::QUEUE_FULL));
    assert!(
        start.elapsed() >= Duration::from_millis(50),
        "gave up before the timeout"
    );
    assert_eq!(side.qp.producer, 16, "a refused request takes no slot");
    side.qp.post_timeout_ns = 0;
    assert_eq!(post(&mut side, 0), Err(Status::QUEUE_FULL));
    for index in 0..16 {
        assert_eq!(
            rig.slot(index)[2],
            index as u8,
            "the ring's first lap is untouched"
        );
    }
}

#[test]
fn the_first_error_stays_and_what_came_before_it_succeeded() {
    let rig = Rig::new(16);
    let mut side = rig.side(0);
    for (index, flags) in [0, IBGDA_UNSIGNALED, 0, 0].into_iter().enumerate() {
        assert_eq!(post(&mut side, flags), Ok(index as u64));
    }
    rig.write_cqe(0, IBGDA_CQE_REQ, 0, 0);
    rig.write_cqe(1, IBGDA_CQE_REQ_ERR, 2, 0x13);
    rig.write_cqe(2, IBGDA_CQE_REQ_ERR, 3, 0x05);

    let refused = Err(Status::REMOTE_ACCESS);
    let mut poster = side.poster();
    assert_eq!(poster.wait(0, PATIENCE), Ok(()));
    assert_eq!(poster.wait(2, PATIENCE), refused);
    assert_eq!(
        poster.wait(1, PATIENCE),
        Ok(()),
        "before the failure, without a CQE of its own"
    );
    assert_eq!(poster.wait(3, PATIENCE), refused);
    assert_eq!(poster.quiet(PATIENCE), refused);
    assert_eq!(poster.put(0, 0, 0, 0, 8, 0), Err(Status::REMOTE_ACCESS));
    let (status, cqe) = side.poller().poll(0);
    assert_eq!(
        (status, cqe.kind.into()),
        (Status::REMOTE_ACCESS, IBGDA_CQE_INVALID),
        "the flush was taken, the error stays"
    );
    assert_eq!(side.qp.producer, 4);
    let error = side.cq.error;
    let fields = (
        error.wqe_index,
        error.qpn,
        error.opcode,
        error.syndrome,
        error.vendor_syndrome,
    );
    assert_eq!(fields, (2, QPN, 8, 0x13, 0x77));
}

#[test]
fn poll_gives_flushes_one_by_one() {
    let rig = Rig::new(4);
    let mut side = rig.side(0);
    for index in 0..3 {
        assert_eq!(post(&mut side, 0), Ok(index));
    }
    for (index, syndrome) in [(0, 0x15), (1, 5), (2, 5)] {
        rig.write_cqe(index, IBGDA_CQE_REQ_ERR, index as u16, syndrome);
    }
    let mut poller = side.poller();
    let seen: [_; 4] = std::array::from_fn(|_| {
        let (status, cqe) = poller.poll(0);
        (status, u32::from(cqe.kind), cqe.wqe_index)
    });
    let retry = Status(ibgda_status::IBGDA_ERR_TRANSPORT_RETRY_EXCEEDED);
    assert_eq!(seen[0], (retry, IBGDA_CQE_REQ_ERR, 0));
    assert_eq!(seen[1], (Status::WR_FLUSHED, IBGDA_CQE_REQ_ERR, 1));
    assert_eq!(seen[2], (Status::WR_FLUSHED, IBGDA_CQE_REQ_ERR, 2));
    assert_eq!((seen[3].0, seen[3].1), (retry, IBGDA_CQE_INVALID));
}

#[test]
fn responder_errors_and_unknown_kinds_are_no_success() {
    let remote_operation = Status(ibgda_status::IBGDA_ERR_REMOTE_OPERATION);
    let unknown = Status(ibgda_status::IBGDA_ERR_UNKNOWN_CQE);
    for (kind, expected) in [
        (IBGDA_CQE_RESP_ERR, remote_operation),
        (5, unknown),
        (12, unknown),
    ] {
        let rig = Rig::new(4);
        let mut side = rig.side(0);
        assert_eq!(post(&mut side, 0), Ok(0));
        rig.write_cqe(0, kind, 0, 0x14);
        assert_eq!(
            side.poster().wait(0, PATIENCE),
            Err(expected),
            "kind {kind}"
        );
        assert_eq!(Status(side.cq.error.status), expected, "kind {kind}");
    }
}

#[test]
fn a_wait_is_bounded_and_0_polls_once() {
    let rig = Rig::new(4);
    let mut side = rig.side(0);
    assert_eq!(post(&mut side, 0), Ok(0));
    assert_eq!(side.poller().poll(0).0, Status::TIMEOUT);
    let start = Instant::now();
    assert_eq!(side.poster().wait(0, 30_000_000), Err(Status::TIMEOUT));
    assert!(start.elapsed() >= Duration::from_millis(30));
    rig.write_cqe(0, IBGDA_CQE_REQ, 0, 0);
    assert_eq!(side.poller().poll(0).0, Status::OK);
    assert_eq!(
        side.poller().poll(0).0,
        Status::TIMEOUT,
        "the same CQE must not count twice"
    );
    assert_eq!(
        u32::from_be(rig.cq_records[CQ_CONSUMER].load(Ordering::Relaxed)),
        1
    );
}

#[test]
fn loss_of_the_nic_ends_a_wait_long_before_its_deadline() {
    for lost in [(1_u64 << 32) | 2, (2 << 32) | 3, (2 << 32) | 1] {
        let rig = Rig::new(4);
        let mut side = rig.side(0);
        assert_eq!(post(&mut side, 0), Ok(0));
        let start = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                rig.status_page.store(lost, Ordering::Relaxed);
            });
            assert_eq!(side.poster().wait(0, PATIENCE), Err(Status::NIC_LOST));
        });
        assert!(start.elapsed() < Duration::from_nanos(PATIENCE / 2));
        assert_eq!(post(&mut side, 0), Err(Status::NIC_LOST));
        assert_eq!(side.cq.error.status, ibgda_status::IBGDA_ERR_NIC_LOST);
    }
}

#[test]
fn repeated_single_polls_see_the_loss_too() {
    let rig = Rig::new(4);
    let mut side = rig.side(0);
    rig.status_page.store((1 << 32) | 2, Ordering::Relaxed);
    let mut poller = side.poller();
    assert!(
        (0..1_000).any(|_| poller.poll(0).0 == Status::NIC_LOST),
        "1000 polls without a look at the status page"
    );
}

#[test]
fn doorbells_only_go_forward_and_only_over_reserved_slots() {
    let rig = Rig::new(8);
    let mut side = rig.side(0);
    let record = || u32::from_be(rig.records[SEND_RECORD].load(Ordering::Relaxed));
    let invalid = Err(Status(ibgda_status::IBGDA_ERR_INVALID_INDEX));
    assert_eq!(side.poster().write_doorbell(1), invalid);
    for index in 0..3 {
        assert_eq!(post(&mut side, IBGDA_NO_DOORBELL), Ok(index));
    }
    assert_eq!(
        (record(), rig.doorbell.load(Ordering::Relaxed)),
        (0, 0),
        "told not to ring"
    );
    let mut poster = side.poster();
    assert_eq!(poster.write_doorbell(2), Ok(()));
    assert_eq!(record(), 2);
    assert_eq!(poster.write_doorbell(1), Ok(()));
    assert_eq!(record(), 2, "the record went back");
    assert_eq!(poster.write_doorbell(4), invalid);
    assert_eq!(poster.wait(3, 0), invalid);
    assert_eq!(poster.reserve(), Ok(3));
}

#[test]
fn arguments_no_nic_would_take_are_refused_before_a_slot_is_taken() {
    let rig = Rig::new(8);
    let mut side = rig.side(0);
    let invalid = Status(ibgda_status::IBGDA_ERR_INVALID_ARGUMENT);
    let region = ibgda_region {
        address: 0x1000,
        length: 64,
        lkey: 1,
        rkey: 2,
    };
    let mut poster = side.poster();
    assert_eq!(poster.put(0, 0, 0, 0, (1 << 30) + 1, 0), Err(invalid));
    assert_eq!(poster.get(0, 0, 0, 0, u32::MAX, 0), Err(invalid));
    assert_eq!(poster.send(0, 0, u32::MAX, 0), Err(invalid));
    assert_eq!(poster.put_inline(0, 0, &[], 0), Err(invalid));
    assert_eq!(poster.put_inline(0, 0, &[0; 29], 0), Err(invalid));
    assert_eq!(poster.fetch_add(4, 0, 0, 0, 1), Err(invalid));
    assert_eq!(poster.compare_swap(1, 0, 0, 0, 1, 1), Err(invalid));
    assert_eq!(poster.put_region(&region, 60, &region, 0, 8), Err(invalid));
    assert_eq!(
        poster.put_region(&region, 0, &region, u64::MAX, 8),
        Err(invalid)
    );
    assert_eq!(
        poster.recv(0, 0, 8),
        Err(Status(ibgda_status::IBGDA_ERR_NO_QUEUE))
    );
    assert_eq!(side.qp.producer, 0);
    assert_eq!(
        side.poster().put_region(&region, 56, &region, 56, 8),
        Ok(())
    );
    assert_eq!(rig.slot(0)[16..24], 0x1038_u64.to_be_bytes());
}
