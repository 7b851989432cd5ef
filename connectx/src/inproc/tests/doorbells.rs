// SPDX-License-Identifier: MIT OR Apache-2.0
//! Doorbells that are not as they should be, and WQEs that are not there yet.

use super::*;
use crate::ifc::wqe::uar;
use crate::inproc::{CqSpec, PAGE, WqSpec};
use crate::objects::qp::Service;

#[test]
fn two_doorbells_of_one_queue_before_the_engine_looks_are_one() {
    let rig = Rig::new();
    let mut q = rig.queue(16);
    rig.fabric.freeze(true);
    for _ in 0..2 {
        rig.write(&mut q);
        q.ring();
    }
    settle();
    assert_eq!(q.poll(), None, "frozen");
    rig.fabric.freeze(false);
    q.done(0);
    q.done(1);
    assert_eq!(rig.wrong(), []);
}

#[test]
fn a_doorbell_that_another_queue_overwrote_is_not_lost() {
    let rig = Rig::new();
    let nic = rig.nic(0);
    // Two queue pairs of one UAR page: their doorbells are one register.
    let memory = rig.fabric.alloc(16 * PAGE).unwrap();
    // SAFETY: the memory is dropped after the fabric, with which the page ends.
    let uar = unsafe { nic.alloc_uar(memory.as_ptr()) }.unwrap();
    let at = |page: usize| memory.addr() + (page * PAGE) as u64;
    let mut queues: Vec<Queue> = (0..2)
        .map(|i| {
            let base = 1 + i * 4;
            memory.write((base + 1) * PAGE, &[0xff; PAGE]);
            let cqn = nic
                .create_cq(&CqSpec {
                    uar,
                    ring: at(base + 1),
                    record: at(base + 2) + 64,
                    log_size: 4,
                    collapsed: false,
                    overrun_ignore: false,
                })
                .unwrap();
            let qpn = nic
                .create_qp(&WqSpec {
                    service: Service::Rc,
                    pd: rig.pds[0],
                    uar,
                    send_cq: cqn,
                    recv_cq: cqn,
                    ring: at(base),
                    record: at(base + 2),
                    log_send: Some(4),
                    log_recv: None,
                    user_index: 0,
                })
                .unwrap();
            // The handle of another queue pair, with what differs put right.
            let mut q = rig.queue(16);
            let peer = rig.nic(1).open_qp(rig.pds[1], &QpSpec::default()).unwrap();
            rig.connect(qpn, peer.qpn);
            q.qp.qpn = qpn;
            q.qp.send_ring = at(base);
            q.qp.record = at(base + 2);
            q.qp.send_cq_ring = at(base + 1);
            q.qp.send_cq_record = at(base + 2) + 64;
            q.qp.doorbell = at(0) + uar::SQ;
            q
        })
        .collect();
    rig.fabric.freeze(true);
    for q in &mut queues {
        rig.write(q);
        q.ring();
    }
    rig.fabric.freeze(false);
    for q in &mut queues {
        q.done(0);
    }
    assert_eq!(rig.wrong(), []);
    drop(rig);
    drop(memory);
}

#[test]
fn a_wqe_of_an_earlier_round_is_torn() {
    let rig = Rig::new();
    let mut q = rig.queue(4);
    for index in 0..4 {
        rig.write(&mut q);
        q.ring();
        q.done(index);
    }
    // The next slot still holds the WQE with index 0.
    q.posted += 1;
    q.ring();
    assert_eq!(q.failed(), LOCAL_QP_OP);
    assert_eq!(rig.nic(0).count("torn_wqes"), 1);
}

#[test]
fn a_wqe_that_goes_beyond_what_is_posted_is_torn() {
    let rig = Rig::new();
    let mut q = rig.queue(4);
    rig.write(&mut q);
    let first = quad(q.slot(0));
    // Five segments take two basic blocks, and one is posted.
    first.store(
        (u64::from_be(first.load(Ordering::Relaxed)) & !0x3f | 5).to_be(),
        Ordering::Relaxed,
    );
    q.ring();
    assert_eq!(q.failed(), LOCAL_QP_OP);
    assert_eq!(rig.nic(0).count("torn_wqes"), 1);
}

#[test]
fn a_doorbell_ahead_of_its_record_is_counted_and_does_what_the_record_says() {
    let rig = Rig::new();
    let mut q = rig.queue(16);
    rig.write(&mut q);
    rig.write(&mut q);
    q.record(1);
    quad(q.qp.doorbell).store(q.doorbell(2), Ordering::SeqCst);
    q.done(0);
    settle();
    assert_eq!(q.poll(), None, "the record does not know of it");
    assert_eq!(rig.wrong(), [("doorbells_ahead", 1)]);
    q.ring();
    q.done(1);
}

#[test]
fn a_doorbell_on_another_page_is_foreign() {
    let rig = Rig::new();
    let (mut q, other) = (rig.queue(16), rig.queue(16));
    rig.write(&mut q);
    q.record(1);
    quad(other.qp.doorbell).store(q.doorbell(1), Ordering::SeqCst);
    until(|| (rig.nic(0).count("foreign_doorbells") > 0).then_some(()));
    settle();
    assert_eq!(q.poll(), None);
    assert_eq!(rig.wrong(), [("foreign_doorbells", 1)]);
    q.ring();
    q.done(0);
}

#[test]
fn a_doorbell_for_no_queue_is_lost() {
    let rig = Rig::new();
    let mut q = rig.queue(16);
    quad(q.qp.doorbell).store((0xffff_u64 << 8).to_be(), Ordering::SeqCst);
    until(|| (rig.nic(0).count("lost_doorbells") > 0).then_some(()));
    rig.write(&mut q);
    q.ring();
    q.done(0);
    assert_eq!(rig.wrong(), [("lost_doorbells", 1)]);
}
