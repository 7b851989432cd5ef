// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rings, completions and waits of the device header, against a NIC reduced to what these need: it looks at doorbell and
//! record, takes WQEs from the ring and writes CQEs, as slowly or as wrongly as a test asks.

use ibgda_device::{
    Status,
    abi::{
        IBGDA_CQE_INVALID, IBGDA_CQE_REQ, IBGDA_CQE_REQ_ERR, IBGDA_NO_DOORBELL, IBGDA_UNSIGNALED,
        ibgda_cq, ibgda_cqe, ibgda_qp, ibgda_status,
    },
};
use ibgda_test_kernels::*;
use std::{
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
            status_page: Box::new(AtomicU64::new(1 << 32 | 1)),
            stop: AtomicBool::new(false),
        }
    }

    /// Handles whose queues start at index `first`, as if that many requests had gone before.
    fn handles(&self, first: u64) -> (Box<ibgda_cq>, ibgda_qp) {
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
        let qp = ibgda_qp {
            send_ring: self.send_ring.as_ptr().cast::<u8>().cast_mut(),
            doorbell_record: self.records.as_ptr().cast::<u32>().cast_mut(),
            doorbell: ptr::from_ref(&*self.doorbell).cast::<u64>().cast_mut(),
            send_cq: &mut *cq,
            number: QPN,
            send_depth: self.depth,
            producer: first,
            rung: first,
            ..Default::default()
        };
        (cq, qp)
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
        cqe[63].store((kind as u8) << 4 | owner, Ordering::Release);
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

fn soon() -> u64 {
    test_clock_ns() + 120_000_000_000
}

/// Posts `count` requests with the given intervals of completions and doorbells to a NIC thread.
fn storm(depth: u32, first: u64, count: u64, signal_every: u64, doorbell_every: u64) {
    let rig = Rig::new(depth);
    // The CQ's ownership bits of the lap that `first` is in.
    for index in first.saturating_sub(u64::from(depth))..first {
        rig.cq_ring[(index % u64::from(depth)) as usize].0[63].store(
            0xf0 | (index / u64::from(depth)) as u8 & 1,
            Ordering::Relaxed,
        );
    }
    let (cq, mut qp) = rig.handles(first);
    qp.post_timeout_ns = 120_000_000_000;
    let values = thread::scope(|scope| {
        let nic = scope.spawn(|| rig.nic(first));
        // SAFETY: the handles point into `rig`; the remote address is only a number to this NIC.
        let status = unsafe {
            test_put_storm(
                &mut qp,
                0,
                0,
                1,
                count,
                signal_every,
                doorbell_every,
                soon(),
            )
        };
        rig.stop.store(true, Ordering::Relaxed);
        let values = nic.join().expect("the NIC found a fault");
        assert_eq!(Status(status), Status::OK);
        values
    });
    assert_eq!(qp.producer, first + count);
    assert_eq!(cq.completed, first + count);
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
    let (_cq, mut qp) = rig.handles(0);
    qp.post_timeout_ns = 50_000_000;
    // SAFETY: the handles point into `rig`; nothing reads the addresses.
    let mut put = || Status(unsafe { test_put(&mut qp, 0, 0, 0, 0, 8, 0, ptr::null_mut()) });
    for _ in 0..16 {
        assert_eq!(put(), Status::OK);
    }
    let start = Instant::now();
    assert_eq!(put(), Status::QUEUE_FULL);
    assert!(
        start.elapsed() >= Duration::from_millis(50),
        "gave up before the timeout"
    );
    assert_eq!(qp.producer, 16, "a refused request takes no slot");
    qp.post_timeout_ns = 0;
    // SAFETY: as above.
    assert_eq!(
        Status(unsafe { test_put(&mut qp, 0, 0, 0, 0, 8, 0, ptr::null_mut()) }),
        Status::QUEUE_FULL
    );
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
    let (mut cq, mut qp) = rig.handles(0);
    // SAFETY: the handles point into `rig`, here and in what follows.
    let mut put =
        |flags| Status(unsafe { test_put(&mut qp, 0, 0, 0, 0, 8, flags, ptr::null_mut()) });
    for flags in [0, IBGDA_UNSIGNALED, 0, 0] {
        assert_eq!(put(flags), Status::OK);
    }
    rig.write_cqe(0, IBGDA_CQE_REQ, 0, 0);
    rig.write_cqe(1, IBGDA_CQE_REQ_ERR, 2, 0x13);
    rig.write_cqe(2, IBGDA_CQE_REQ_ERR, 3, 0x05);

    let deadline = soon();
    // SAFETY: as above.
    unsafe {
        assert_eq!(Status(test_wait(&mut qp, 0, deadline)), Status::OK);
        assert_eq!(
            Status(test_wait(&mut qp, 2, deadline)),
            Status::REMOTE_ACCESS
        );
        assert_eq!(
            Status(test_wait(&mut qp, 1, deadline)),
            Status::OK,
            "before the failure, without a CQE of its own"
        );
        assert_eq!(
            Status(test_wait(&mut qp, 3, deadline)),
            Status::REMOTE_ACCESS
        );
        assert_eq!(Status(test_quiet(&mut qp, deadline)), Status::REMOTE_ACCESS);
        assert_eq!(
            Status(test_put(&mut qp, 0, 0, 0, 0, 8, 0, ptr::null_mut())),
            Status::REMOTE_ACCESS
        );
        let mut cqe = ibgda_cqe::default();
        assert_eq!(
            Status(test_poll_cq(&mut *cq, &mut cqe, 0)),
            Status::REMOTE_ACCESS,
            "the flush was taken, the error stays"
        );
    }
    assert_eq!(qp.producer, 4);
    let error = cq.error;
    assert_eq!(
        (
            error.wqe_index,
            error.qpn,
            error.opcode,
            error.syndrome,
            error.vendor_syndrome
        ),
        (2, QPN, 8, 0x13, 0x77)
    );
}

#[test]
fn poll_gives_flushes_one_by_one() {
    let rig = Rig::new(4);
    let (mut cq, mut qp) = rig.handles(0);
    for _ in 0..3 {
        // SAFETY: the handles point into `rig`.
        assert_eq!(
            Status(unsafe { test_put(&mut qp, 0, 0, 0, 0, 8, 0, ptr::null_mut()) }),
            Status::OK
        );
    }
    for (index, syndrome) in [(0, 0x15), (1, 5), (2, 5)] {
        rig.write_cqe(index, IBGDA_CQE_REQ_ERR, index as u16, syndrome);
    }
    let mut seen = Vec::new();
    for _ in 0..4 {
        let mut cqe = ibgda_cqe::default();
        // SAFETY: as above.
        let status = unsafe { test_poll_cq(&mut *cq, &mut cqe, 0) };
        seen.push((status, u32::from(cqe.kind), cqe.wqe_index));
    }
    let retry = ibgda_status::IBGDA_ERR_TRANSPORT_RETRY_EXCEEDED;
    let flushed = ibgda_status::IBGDA_ERR_WR_FLUSHED;
    assert_eq!(
        seen[..3],
        [(retry, 13, 0), (flushed, 13, 1), (flushed, 13, 2)]
    );
    assert_eq!((seen[3].0, seen[3].1), (retry, IBGDA_CQE_INVALID));
}

#[test]
fn a_wait_is_bounded_and_0_polls_once() {
    let rig = Rig::new(4);
    let (mut cq, mut qp) = rig.handles(0);
    // SAFETY: the handles point into `rig`, here and below.
    assert_eq!(
        Status(unsafe { test_put(&mut qp, 0, 0, 0, 0, 8, 0, ptr::null_mut()) }),
        Status::OK
    );
    let mut cqe = ibgda_cqe::default();
    // SAFETY: as above.
    unsafe {
        assert_eq!(Status(test_poll_cq(&mut *cq, &mut cqe, 0)), Status::TIMEOUT);
        let start = Instant::now();
        assert_eq!(
            Status(test_wait(&mut qp, 0, test_clock_ns() + 30_000_000)),
            Status::TIMEOUT
        );
        assert!(start.elapsed() >= Duration::from_millis(30));
        rig.write_cqe(0, IBGDA_CQE_REQ, 0, 0);
        assert_eq!(Status(test_poll_cq(&mut *cq, &mut cqe, 0)), Status::OK);
        assert_eq!(
            Status(test_poll_cq(&mut *cq, &mut cqe, 0)),
            Status::TIMEOUT,
            "the same CQE must not count twice"
        );
    }
    assert_eq!(
        u32::from_be(rig.cq_records[CQ_CONSUMER].load(Ordering::Relaxed)),
        1
    );
}

#[test]
fn loss_of_the_nic_ends_a_wait_long_before_its_deadline() {
    for lost in [1_u64 << 32 | 2, 2 << 32 | 3, 2 << 32 | 1] {
        let rig = Rig::new(4);
        let (cq, mut qp) = rig.handles(0);
        // SAFETY: the handles point into `rig`, here and below.
        assert_eq!(
            Status(unsafe { test_put(&mut qp, 0, 0, 0, 0, 8, 0, ptr::null_mut()) }),
            Status::OK
        );
        let start = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                rig.status_page.store(lost, Ordering::Relaxed);
            });
            // SAFETY: as above.
            assert_eq!(
                Status(unsafe { test_wait(&mut qp, 0, test_clock_ns() + 60_000_000_000) }),
                Status::NIC_LOST
            );
        });
        assert!(start.elapsed() < Duration::from_secs(30));
        // SAFETY: as above.
        assert_eq!(
            Status(unsafe { test_put(&mut qp, 0, 0, 0, 0, 8, 0, ptr::null_mut()) }),
            Status::NIC_LOST
        );
        assert_eq!(cq.error.status, ibgda_status::IBGDA_ERR_NIC_LOST);
    }
}

#[test]
fn repeated_single_polls_see_the_loss_too() {
    let rig = Rig::new(4);
    let (mut cq, _qp) = rig.handles(0);
    rig.status_page.store(1 << 32 | 2, Ordering::Relaxed);
    let mut cqe = ibgda_cqe::default();
    // SAFETY: the handles point into `rig`.
    let polls = (1..=1_000)
        .find(|_| Status(unsafe { test_poll_cq(&mut *cq, &mut cqe, 0) }) == Status::NIC_LOST);
    assert!(
        polls.is_some(),
        "1000 polls without a look at the status page"
    );
}

#[test]
fn doorbells_only_go_forward_and_only_over_reserved_slots() {
    let rig = Rig::new(8);
    let (_cq, mut qp) = rig.handles(0);
    let record = || u32::from_be(rig.records[SEND_RECORD].load(Ordering::Relaxed));
    // SAFETY: the handles point into `rig`.
    unsafe {
        assert_eq!(
            test_write_doorbell(&mut qp, 1),
            ibgda_status::IBGDA_ERR_INVALID_INDEX
        );
        for _ in 0..3 {
            assert_eq!(
                Status(test_put(
                    &mut qp,
                    0,
                    0,
                    0,
                    0,
                    8,
                    IBGDA_NO_DOORBELL,
                    ptr::null_mut()
                )),
                Status::OK
            );
        }
        assert_eq!(
            (record(), rig.doorbell.load(Ordering::Relaxed)),
            (0, 0),
            "told not to ring"
        );
        assert_eq!(Status(test_write_doorbell(&mut qp, 2)), Status::OK);
        assert_eq!(record(), 2);
        assert_eq!(Status(test_write_doorbell(&mut qp, 1)), Status::OK);
        assert_eq!(record(), 2, "the record went back");
        assert_eq!(
            test_write_doorbell(&mut qp, 4),
            ibgda_status::IBGDA_ERR_INVALID_INDEX
        );
        assert_eq!(
            test_wait(&mut qp, 3, 0),
            ibgda_status::IBGDA_ERR_INVALID_INDEX
        );
    }
}

#[test]
fn arguments_no_nic_would_take_are_refused_before_a_slot_is_taken() {
    let rig = Rig::new(8);
    let (_cq, mut qp) = rig.handles(0);
    let invalid = ibgda_status::IBGDA_ERR_INVALID_ARGUMENT;
    let data = [0_u8; 32];
    let region = |length| ibgda_device::abi::ibgda_region {
        address: 0x1000,
        length,
        lkey: 1,
        rkey: 2,
    };
    // SAFETY: the handles point into `rig`; `data` is longer than what any call reads.
    unsafe {
        assert_eq!(
            test_put(&mut qp, 0, 0, 0, 0, (1 << 30) + 1, 0, ptr::null_mut()),
            invalid
        );
        assert_eq!(
            test_get(&mut qp, 0, 0, 0, 0, u32::MAX, 0, ptr::null_mut()),
            invalid
        );
        assert_eq!(
            test_put_inline(&mut qp, 0, 0, data.as_ptr().cast(), 0, 0, ptr::null_mut()),
            invalid
        );
        assert_eq!(
            test_put_inline(&mut qp, 0, 0, data.as_ptr().cast(), 29, 0, ptr::null_mut()),
            invalid
        );
        assert_eq!(
            test_fetch_add(&mut qp, 4, 0, 0, 0, 1, 0, ptr::null_mut()),
            invalid
        );
        assert_eq!(
            test_compare_swap(&mut qp, 1, 0, 0, 0, 1, 1, 0, ptr::null_mut()),
            invalid
        );
        assert_eq!(
            test_put_region(&mut qp, &region(64), 60, &region(64), 0, 8),
            invalid
        );
        assert_eq!(
            test_put_region(&mut qp, &region(64), 0, &region(64), u64::MAX, 8),
            invalid
        );
        assert_eq!(
            test_recv(&mut qp, 0, 0, 8),
            ibgda_status::IBGDA_ERR_NO_QUEUE
        );
        assert_eq!(qp.producer, 0);
        assert_eq!(
            test_put_region(&mut qp, &region(64), 56, &region(64), 56, 8),
            0
        );
    }
    assert_eq!(rig.slot(0)[16..24], 0x1038_u64.to_be_bytes());
}
