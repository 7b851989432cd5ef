// SPDX-License-Identifier: MIT OR Apache-2.0
//! Doorbell pages of users that nothing traps: the test stores to the BAR's memory as a guest or a GPU does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use connectx::hca::{Hca, HcaConfig};
use connectx::ifc::command::create_uctx_out;
use connectx::ifc::opcode as op;
use connectx::ifc::wqe::send;
use connectx::log::Referee;
use connectx::mem::SharedMemory;
use connectx::platform::Function;
use connectx::polling::mapped::{PAGES, Poller, Threads};
use connectx::wire::Fabric;
use memmap2::{MmapOptions, MmapRaw};

use crate::guest::{Cq, Guest, Qp, REGION, Settings, eventually, input, pointer, remote};

const SIGNALLED: u8 = 0x08;
const BOTH: [Threads; 2] = [Threads::One, Threads::Two];

/// A function whose user has a mapped page.
struct Rig {
    guest: Guest,
    poller: Poller,
    bar: MmapRaw,
    page: u32,
}

impl Rig {
    fn new(threads: Threads) -> Self {
        let fabric = Fabric::new(Referee::in_memory());
        let poller = Poller::new(&fabric, Duration::from_millis(2), threads).unwrap();
        let hca = Hca::new(&fabric, HcaConfig::numbered(0));
        hca.map_doorbells(&poller).unwrap();
        let (memory, window): (Arc<SharedMemory>, _) = hca.bar_window(0).unwrap();
        assert_eq!(window.start, u64::from(PAGES.start) * 4096);
        // Another mapping of the file, as everybody else has.
        let bar = MmapOptions::new()
            .len(memory.len())
            .map_raw(memory.file())
            .unwrap();
        let mut guest = Guest::cold(hca, fabric.referee());
        guest.bring_up();
        assert!(!PAGES.contains(&guest.uar), "the driver's page is trapped");
        let user = guest.ok(input(op::CREATE_UCTX, 0x30), 16);
        guest.uid = create_uctx_out::uid.get(&user) as u16;
        let page = guest.alloc(op::ALLOC_UAR);
        assert_eq!(page, PAGES.start);
        guest.uar = page;
        Self {
            guest,
            poller,
            bar,
            page,
        }
    }

    fn register(&self, page: u32, offset: u64) -> &AtomicU64 {
        let at = u64::from(page) * 4096 + offset;
        assert!(at % 8 == 0 && at < self.bar.len() as u64);
        // SAFETY: aligned and inside the mapping; atomics bear any sharing.
        unsafe { &*self.bar.as_mut_ptr().add(at as usize).cast::<AtomicU64>() }
    }

    fn ring(&self, page: u32, offset: u64, words: [u32; 2]) {
        let bytes = [words[0].to_be_bytes(), words[1].to_be_bytes()].concat();
        let value = u64::from_ne_bytes(bytes.try_into().unwrap());
        self.register(page, offset).store(value, Ordering::Release);
    }

    fn ring_for(&self, qp: &Qp) {
        let last = u32::from(qp.producer.wrapping_sub(1));
        self.ring(self.page, 0x800, [last << 8, qp.qpn << 8]);
    }

    /// A pair of queue pairs in loopback, with a CQ each and a region.
    fn pair(&mut self) -> ([(Cq, Qp); 2], u32, u64) {
        let guest = &mut self.guest;
        let pd = guest.alloc(op::ALLOC_PD);
        let mut side = || {
            let cq = Cq::new(guest, 6);
            let qp = Qp::new(guest, pd, &cq, &cq);
            (cq, qp)
        };
        let sides = [side(), side()];
        for i in 0..2 {
            let settings = Settings::to(1, sides[1 - i].1.qpn);
            sides[i].1.connect(guest, settings);
        }
        let (key, at) = guest.region(pd, REGION);
        (sides, key, at)
    }
}

/// A WRITE of 8 bytes.
fn write(guest: &Guest, qp: &mut Qp, key: u32, from: u64, to: u64) {
    let segments = [remote(to, key), pointer(8, key, from)];
    qp.put(guest, send::RDMA_WRITE, SIGNALLED, 0, &segments);
}

#[test]
fn a_store_is_seen_again_and_again() {
    BOTH.map(a_store_is_seen_again_and_again_by);
}

fn a_store_is_seen_again_and_again_by(threads: Threads) {
    let mut rig = Rig::new(threads);
    let ([(mut cq, mut qp), _], key, at) = rig.pair();
    for round in 0..2_000u64 {
        rig.guest.ram.set(at, &round.to_le_bytes());
        write(&rig.guest, &mut qp, key, at, at + 4096);
        rig.ring_for(&qp);
        cq.wait(&rig.guest);
        assert_eq!(rig.guest.ram.get(at + 4096, 8), round.to_le_bytes());
    }
    assert_eq!(rig.guest.count("found_doorbells"), 2_000);
    for wrong in [
        "foreign_doorbells",
        "stale_doorbells",
        "lost_doorbells",
        "torn_wqes",
    ] {
        assert_eq!(rig.guest.count(wrong), 0, "{wrong}");
    }
}

/// Two queue pairs of one page ring, and only the second doorbell is there when the model looks.
#[test]
fn a_doorbell_that_another_overwrote_is_not_lost() {
    BOTH.map(a_doorbell_that_another_overwrote_is_not_lost_by);
}

fn a_doorbell_that_another_overwrote_is_not_lost_by(threads: Threads) {
    let mut rig = Rig::new(threads);
    let ([(mut cq0, mut qp0), (mut cq1, mut qp1)], key, at) = rig.pair();
    for _ in 0..500 {
        write(&rig.guest, &mut qp0, key, at, at + 4096);
        write(&rig.guest, &mut qp1, key, at, at + 8192);
        // The first one's doorbell is as if it had never been.
        rig.ring_for(&qp1);
        cq0.wait(&rig.guest);
        cq1.wait(&rig.guest);
    }
}

/// Two CQs of one page are armed, and only the second arm is there when the model looks; the first word of all is 0.
#[test]
fn an_arm_that_another_overwrote_is_not_lost() {
    BOTH.map(an_arm_that_another_overwrote_is_not_lost_by);
}

fn an_arm_that_another_overwrote_is_not_lost_by(threads: Threads) {
    let mut rig = Rig::new(threads);
    let ([(mut cq0, mut qp0), (mut cq1, mut qp1)], key, at) = rig.pair();
    for round in 0..100u32 {
        for cq in [&cq0, &cq1] {
            rig.guest
                .ram
                .set(cq.dbr + 4, &(round | (round << 28)).to_be_bytes());
        }
        rig.ring(rig.page, 0x20, [round | (round << 28), cq1.cqn]);
        eventually(|| (rig.register(rig.page, 0x20).load(Ordering::Acquire) == 0).then_some(()));
        for qp in [&mut qp0, &mut qp1] {
            write(&rig.guest, qp, key, at, at + 4096);
            rig.ring_for(qp);
            // Nothing else is to be in the register meanwhile.
            eventually(|| {
                (rig.register(rig.page, 0x800).load(Ordering::Acquire) == 0).then_some(())
            });
        }
        let mut events = [0; 2].map(|_| eventually(|| rig.guest.completion_event()));
        events.sort_unstable();
        assert_eq!(events, [cq0.cqn, cq1.cqn], "round {round}");
        cq0.wait(&rig.guest);
        cq1.wait(&rig.guest);
    }
}

#[test]
fn wrong_doorbells_are_counted_as_trapped_ones_are() {
    BOTH.map(wrong_doorbells_are_counted_as_trapped_ones_are_by);
}

fn wrong_doorbells_are_counted_as_trapped_ones_are_by(threads: Threads) {
    let mut rig = Rig::new(threads);
    let ([(_, mut qp), _], key, at) = rig.pair();
    let other = rig.guest.alloc(op::ALLOC_UAR);
    assert_eq!(other, rig.page + 1);
    write(&rig.guest, &mut qp, key, at, at + 4096);
    rig.ring(other, 0x800, [0, qp.qpn << 8]);
    let counted = |rig: &Rig, name: &str| (rig.guest.count(name) == 1).then_some(());
    eventually(|| counted(&rig, "foreign_doorbells"));
    rig.ring(other, 0x800, [0, 0xabcd << 8]);
    eventually(|| counted(&rig, "lost_doorbells"));
    assert_eq!(rig.guest.on_object(op::DEALLOC_UAR, other), 0);
    rig.ring(other, 0x800, [0, qp.qpn << 8]);
    eventually(|| counted(&rig, "stale_doorbells"));
    // One that comes just before the page's next owner is nobody's either.
    rig.ring(other, 0x900, [0, qp.qpn << 8]);
    assert_eq!(rig.guest.alloc(op::ALLOC_UAR), other);
    eventually(|| (rig.guest.count("stale_doorbells") == 2).then_some(()));
    assert_eq!(rig.guest.count("foreign_doorbells"), 1);
}

/// Who finds all mapped pages taken gets a trapped one, and a reset gives all back.
#[test]
fn pages_run_out_and_come_back() {
    BOTH.map(pages_run_out_and_come_back_by);
}

fn pages_run_out_and_come_back_by(threads: Threads) {
    let mut rig = Rig::new(threads);
    for page in PAGES.skip(1) {
        assert_eq!(rig.guest.alloc(op::ALLOC_UAR), page);
    }
    assert!(!PAGES.contains(&rig.guest.alloc(op::ALLOC_UAR)));
    rig.guest.uid = 0;
    let driver = rig.guest.alloc(op::ALLOC_UAR);
    assert!(driver < PAGES.start);
    rig.guest.hca.reset(connectx::platform::ResetKind::Bus);
    rig.ring(rig.page, 0x800, [0, 0x40 << 8]);
    eventually(|| (rig.guest.count("stale_doorbells") == 1).then_some(()));
    drop(rig.poller);
}
