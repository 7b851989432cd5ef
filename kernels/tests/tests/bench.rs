// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the bench does with what it measured, without a GPU: its check of rings must accept what the device header posts
//! and nothing else, and its table and targets must say what the numbers say.

use ibgda_device::abi::{ibgda_cq, ibgda_qp};
use ibgda_test_kernels::Poster;
use std::{
    ffi::{CStr, c_char},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

const DEPTH: u32 = 16;
const QPN: u32 = 0x4a5b6c;
/// Beyond 16 bits, and not a multiple of the depth.
const FIRST: u64 = 0x1_fff9;

/// `bench::Plan`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Plan {
    remote: u64,
    local: u64,
    rkey: u32,
    lkey: u32,
    bytes: u32,
    posters: u32,
    each: u32,
    inlined: bool,
}

/// `bench::Queue`.
#[repr(C)]
struct Queue {
    ring: *mut u8,
    record: *mut u32,
    doorbell: *mut u64,
    cq: *mut u8,
    cq_record: *mut u32,
    qpn: u32,
    cqn: u32,
    on_gpu: bool,
    depth: u32,
    cq_depth: u32,
    producer: u64,
    completed: u64,
}

unsafe extern "C" {
    fn bench_check_ring(
        ring: *const u8,
        depth: u32,
        first: u64,
        qpn: u32,
        plan: *const Plan,
        out: *mut c_char,
        room: usize,
    ) -> bool;
    fn bench_check_record(record: *const u32, end: u64, out: *mut c_char, room: usize) -> bool;
    fn bench_check_doorbell(
        doorbell: u64,
        end: u64,
        qpn: u32,
        out: *mut c_char,
        room: usize,
    ) -> bool;
    fn bench_request(
        plan: *const Plan,
        poster: u32,
        sequence: u32,
        remote: *mut u64,
        local: *mut u64,
    );
    fn bench_be_nic(
        queue: *const Queue,
        plan: *const Plan,
        stop: *const AtomicBool,
        out: *mut c_char,
        room: usize,
    ) -> bool;
    fn bench_summary(values: *const f64, count: usize, out: *mut f64);
    fn bench_target_line(value: f64, ratio: f64, what: i32, out: *mut c_char, room: usize);
    fn bench_table(out: *mut c_char, room: usize);
    fn bench_json(out: *mut c_char, room: usize);
    fn bench_target_lines(out: *mut c_char, room: usize);
}

/// What `call` writes into the buffer it is given.
fn text(call: impl FnOnce(*mut c_char, usize)) -> String {
    let mut room = [0u8; 8192];
    call(room.as_mut_ptr().cast(), room.len());
    CStr::from_bytes_until_nul(&room)
        .expect("snprintf ends its text")
        .to_str()
        .expect("UTF-8")
        .to_owned()
}

fn plan(posters: u32, each: u32, inlined: bool) -> Plan {
    Plan {
        remote: 0x1122_3344_5566_7700,
        local: 0x0102_0304_0506_0700,
        rkey: 0xa1b2_c3d4,
        lkey: 0x99aa_bbcc,
        bytes: 0x1234,
        posters,
        each,
        inlined,
    }
}

/// Queues of one QP in this process, with what the header keeps of them.
struct Rig {
    ring: Vec<u8>,
    record: [u32; 2],
    doorbell: u64,
    cq_ring: Vec<u8>,
    cq_record: [u32; 2],
}

impl Rig {
    fn new() -> Self {
        Self {
            ring: vec![0xee; DEPTH as usize * 64],
            record: [0; 2],
            doorbell: 0,
            cq_ring: vec![0xff; DEPTH as usize * 64],
            cq_record: [0; 2],
        }
    }

    fn handles(&mut self) -> (Box<ibgda_qp>, Box<ibgda_cq>) {
        let mut cq = Box::new(ibgda_cq {
            ring: self.cq_ring.as_ptr(),
            doorbell_record: self.cq_record.as_mut_ptr(),
            depth: DEPTH,
            completed: FIRST,
            ..ibgda_cq::default()
        });
        let qp = Box::new(ibgda_qp {
            send_ring: self.ring.as_mut_ptr(),
            doorbell_record: self.record.as_mut_ptr(),
            doorbell: &raw mut self.doorbell,
            send_cq: &raw mut *cq,
            number: QPN,
            send_depth: DEPTH,
            producer: FIRST,
            rung: FIRST,
            ..ibgda_qp::default()
        });
        (qp, cq)
    }

    /// Posts the plan's requests in the given order of posters, with the device header.
    fn post(&mut self, plan: &Plan, order: &[u32]) {
        let (mut qp, mut cq) = self.handles();
        let mut next = vec![0; plan.posters as usize];
        for &poster in order {
            let (remote, local) = request(plan, poster, next[poster as usize]);
            next[poster as usize] += 1;
            // SAFETY: nobody else has the handles while this poster lives.
            let mut thread = unsafe { Poster::new(&raw mut *qp) };
            if plan.inlined {
                thread.put_inline(remote, plan.rkey, &local.to_le_bytes(), 0)
            } else {
                thread.put(remote, plan.rkey, local, plan.lkey, plan.bytes, 0)
            }
            .expect("a slot is free");
            cq.completed += 1;
        }
    }

    fn check(&self, plan: &Plan) -> String {
        // SAFETY: the ring has DEPTH slots, and the call writes no more than `room`.
        text(|out, room| unsafe {
            bench_check_ring(self.ring.as_ptr(), DEPTH, FIRST, QPN, plan, out, room);
        })
    }
}

fn request(plan: &Plan, poster: u32, sequence: u32) -> (u64, u64) {
    let (mut remote, mut local) = (0, 0);
    // SAFETY: pointers to locals.
    unsafe { bench_request(plan, poster, sequence, &raw mut remote, &raw mut local) };
    (remote, local)
}

#[test]
fn what_the_header_posts_is_accepted_and_no_byte_may_differ() {
    for inlined in [false, true] {
        // More than the ring holds, so that old slots must have been written over.
        let plan = plan(1, 40, inlined);
        let mut rig = Rig::new();
        rig.post(&plan, &[0; 40]);
        assert_eq!(rig.check(&plan), "");
        for slot in 0..DEPTH as usize {
            for byte in slot * 64..slot * 64 + 48 {
                for bit in 0..8 {
                    rig.ring[byte] ^= 1 << bit;
                    assert_ne!(rig.check(&plan), "", "slot {slot}, byte {byte}, bit {bit}");
                    rig.ring[byte] ^= 1 << bit;
                }
            }
        }
    }
}

#[test]
fn a_ring_shared_by_posters_may_be_in_any_order_but_each_posters_own() {
    let plan = plan(3, 8, false);
    let order: Vec<u32> = [2, 0, 0, 1, 1, 2].repeat(4);
    let mut rig = Rig::new();
    rig.post(&plan, &order);
    assert_eq!(rig.check(&plan), "");

    // One too few: the last request of the last poster is not there.
    let mut rig = Rig::new();
    rig.post(&plan, &order[..23]);
    assert!(
        rig.check(&plan).contains("WQE 131088"),
        "{}",
        rig.check(&plan)
    );

    // Two requests of one poster have changed places: every WQE is right for some request.
    let mut rig = Rig::new();
    rig.post(&plan, &order);
    let (a, b) = (slot_of(23), slot_of(18));
    for byte in (16..24).chain(40..48) {
        rig.ring.swap(a + byte, b + byte);
    }
    assert!(
        rig.check(&plan).contains("should be next"),
        "{}",
        rig.check(&plan)
    );

    // One request twice, another not at all.
    let mut rig = Rig::new();
    rig.post(&plan, &order);
    for byte in (16..24).chain(40..48) {
        rig.ring[slot_of(23) + byte] = rig.ring[slot_of(18) + byte];
    }
    assert_ne!(rig.check(&plan), "");

    // In order and without a gap, but one request behind.
    let plan = self::plan(1, 40, false);
    let mut rig = Rig::new();
    rig.post(&plan, &[0; 40]);
    for n in 24..40 {
        let (remote, local) = request(&plan, 0, n - 1);
        let slot = slot_of(n.into());
        rig.ring[slot + 16..slot + 24].copy_from_slice(&remote.to_be_bytes());
        rig.ring[slot + 40..slot + 48].copy_from_slice(&local.to_be_bytes());
    }
    assert_eq!(rig.check(&plan), "the ring lacks request 39 of poster 0");
}

/// Where the WQE of the plan's n-th request lies in the ring.
fn slot_of(n: u64) -> usize {
    ((FIRST + n) % u64::from(DEPTH)) as usize * 64
}

#[test]
fn record_and_doorbell() {
    let mut rig = Rig::new();
    rig.post(&plan(1, 8, false), &[0; 8]);
    let end = FIRST + 8;
    let record = |r: [u32; 2], end| {
        // SAFETY: as in `check`.
        text(|out, room| unsafe {
            bench_check_record(r.as_ptr(), end, out, room);
        })
    };
    let doorbell = |value, end, qpn| {
        // SAFETY: as in `check`.
        text(|out, room| unsafe {
            bench_check_doorbell(value, end, qpn, out, room);
        })
    };
    assert_eq!(record(rig.record, end), "");
    assert_eq!(
        record(rig.record, end + 1),
        "doorbell record: is 00000001, should be 00000002"
    );
    assert_ne!(record([rig.record[1], 0], end), "");
    assert_eq!(doorbell(rig.doorbell, end, QPN), "");
    assert_eq!(
        doorbell(rig.doorbell, end - 1, QPN),
        "doorbell: is 000001004a5b6c00, should be 000000004a5b6c00"
    );
    assert_ne!(doorbell(rig.doorbell, end, QPN + 1), "");
}

/// The bench's NIC serves the header, and tells of a request that is not in memory when its doorbell is.
#[test]
fn the_cpu_nic_completes_requests_and_finds_stale_ones() {
    for stale in [false, true] {
        let plan = plan(1, 100, false);
        let mut rig = Rig::new();
        let (mut qp, _cq) = rig.handles();
        let queue = Queue {
            ring: qp.send_ring,
            record: qp.doorbell_record,
            doorbell: qp.doorbell,
            cq: rig.cq_ring.as_mut_ptr(),
            cq_record: rig.cq_record.as_mut_ptr(),
            qpn: QPN,
            cqn: 1,
            on_gpu: false,
            depth: DEPTH,
            cq_depth: DEPTH,
            producer: FIRST,
            completed: FIRST,
        };
        // Another rkey than the NIC is told to expect.
        let rkey = if stale { plan.rkey ^ 1 } else { plan.rkey };
        let stop = AtomicBool::new(false);
        let queue = Shared(&queue);
        let wrong = thread::scope(|scope| {
            let nic = scope.spawn(|| {
                let queue = &queue;
                // SAFETY: the queues outlive the scope.
                text(|out, room| unsafe {
                    bench_be_nic(queue.0, &plan, &stop, out, room);
                })
            });
            // However this ends, the NIC must not be waited for in vain.
            let stops = StopOnDrop(&stop);
            // SAFETY: nobody else posts or polls.
            let mut poster = unsafe { Poster::new(&raw mut *qp) };
            for i in 0..100 {
                let (remote, local) = request(&plan, 0, i);
                let index = poster
                    .put(remote, rkey, local, plan.lkey, plan.bytes, 0)
                    .expect("posted");
                poster.wait(index, 10_000_000_000).expect("completed");
            }
            drop(stops);
            nic.join().expect("the NIC's thread")
        });
        if stale {
            assert!(
                wrong.starts_with("100 requests were not in memory"),
                "{wrong}"
            );
        } else {
            assert_eq!(wrong, "");
        }
    }
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A pointer for the NIC's thread.
struct Shared(*const Queue);
// SAFETY: the description is only read, and what it names is shared as with a NIC.
unsafe impl Sync for Shared {}

#[test]
fn a_nic_that_sees_no_doorbell_stops_when_told_and_says_so() {
    let mut rig = Rig::new();
    let queue = Queue {
        ring: rig.ring.as_mut_ptr(),
        record: rig.record.as_mut_ptr(),
        doorbell: &raw mut rig.doorbell,
        cq: rig.cq_ring.as_mut_ptr(),
        cq_record: rig.cq_record.as_mut_ptr(),
        qpn: QPN,
        cqn: 1,
        on_gpu: false,
        depth: DEPTH,
        cq_depth: DEPTH,
        producer: FIRST,
        completed: FIRST,
    };
    let stop = AtomicBool::new(true);
    // SAFETY: the queues live as long as the call.
    let wrong = text(|out, room| unsafe {
        bench_be_nic(&queue, &plan(1, 5, false), &stop, out, room);
    });
    assert_eq!(wrong, "the NIC saw 0 doorbells");
}

#[test]
fn medians() {
    let summary = |values: &[f64]| {
        let mut out = [0.0; 3];
        // SAFETY: a slice and an array of three.
        unsafe { bench_summary(values.as_ptr(), values.len(), out.as_mut_ptr()) };
        out
    };
    assert_eq!(summary(&[3.0, 1.0, 10.0]), [3.0, 1.0, 10.0]);
    assert_eq!(summary(&[4.0, 1.0, 2.0, 10.0]), [3.0, 1.0, 10.0]);
    assert_eq!(summary(&[]), [0.0; 3]);
}

#[test]
fn targets_are_met_or_missed_as_the_ratio_says() {
    let line = |value, ratio, what| {
        // SAFETY: as in `check`.
        text(|out, room| unsafe { bench_target_line(value, ratio, what, out, room) })
    };
    assert_eq!(
        line(115.0, 1.15, 0),
        "M9: 115 ns, floor 100, ratio 1.150, wanted ≤ 1.15: met"
    );
    assert!(line(115.1, 1.15, 0).ends_with("MISSED"));
    assert_eq!(
        line(85.0, 0.85, 1),
        "M9: 85 M/s, floor 100, ratio 0.850, wanted ≥ 0.85: met"
    );
    assert!(line(84.9, 0.85, 1).ends_with("MISSED"));
    assert_eq!(
        line(100.0, 1.0, 2),
        "M9: 100 M/s, peer (facts/device-cost.md) 100, ratio 1.000, wanted > 1: MISSED"
    );
    assert!(line(100.1, 1.0, 2).ends_with("met"));
    // A clock that did not move is no record.
    assert!(line(0.0, 1.15, 0).ends_with("MISSED"));
}

#[test]
fn the_table_has_a_row_for_each_shape_and_a_column_for_each_implementation() {
    // SAFETY: as in `check`.
    let table = text(|out, room| unsafe { bench_table(out, room) });
    assert_eq!(
        table,
        "| metric | unit | floor | ours |\n\
         |---|---|---|---|\n\
         | A M1 x | ns | 2 | 1.235e+04 |\n\
         | A M1 x, link busy | ns | - | 0.5 |\n"
    );
}

#[test]
fn json() {
    // SAFETY: as in `check`.
    let json = text(|out, room| unsafe { bench_json(out, room) });
    assert_eq!(
        json,
        r#"{"gpu": "a \\ b", 
"results": [
{"where": "A", "metric": "M1", "shape": "x", "link_busy": false, "implementation": "floor", "unit": "ns", "median": 2, "min": 1, "max": 3, "repeats": 3},
{"where": "A", "metric": "M1", "shape": "x", "link_busy": false, "implementation": "ours", "unit": "ns", "median": 3, "min": 3, "max": 3, "repeats": 1}
],
"targets": [
{"name": "M1", "value": 3, "floor": 2, "ratio": 1.5, "wanted": 1.5, "outcome": "met"}
],
"failures": [
"WQE \"7\"\u000a"
]}
"#
    );
}

#[test]
fn what_was_not_measured_is_called_so() {
    // SAFETY: as in `check`.
    let lines = text(|out, room| unsafe { bench_target_lines(out, room) });
    assert!(lines.lines().count() > 20, "{lines}");
    for line in lines.lines() {
        assert!(line.ends_with(": not measured"), "{line}");
    }
}
