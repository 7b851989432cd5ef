// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sizes of queues, their ends, and completion queues of each kind.

use super::*;
use crate::inproc::Event;

/// WRITEs, as many under way as the queue holds, completions in order.
fn run(rig: &Rig, q: &mut Queue, count: u64) {
    let depth = u64::from(q.qp.spec.send_depth);
    while q.taken < count {
        if q.posted < count && q.posted - q.taken < depth {
            while q.posted < count && q.posted - q.taken < depth {
                rig.write(q);
            }
            q.ring();
        }
        let index = q.taken;
        q.done(index);
    }
}

#[test]
fn rings_of_every_size_go_round() {
    let rig = Rig::new();
    for log in 0..=15 {
        let mut q = rig.queue(1 << log);
        run(&rig, &mut q, (2 << log) + 3);
        assert_eq!(rig.wrong(), [], "depth {}", 1 << log);
        rig.nic(0).close_qp(&q.qp).unwrap();
    }
}

#[test]
fn the_16_bit_counter_wraps() {
    let rig = Rig::new();
    // A depth that is not a divisor of the distance to the end shows a counter that is masked with the wrong size.
    let mut q = rig.queue(512);
    run(&rig, &mut q, 0x1_0000 + 700);
    assert_eq!(rig.wrong(), []);
}

#[test]
fn the_24_bit_index_of_a_completion_queue_wraps() {
    const START: u64 = 0xff_fff0;
    let rig = Rig::new();
    let mut q = rig.queue(16);
    let cqn = q.qp.send_cqn;
    // As after so many completions, all of them taken.
    rig.nic(0).hca.with_device(|device| {
        let cq = device.cqs.get_mut(cqn).unwrap();
        (cq.producer, cq.consumer) = (START as u32, START as u32);
    });
    word(q.qp.send_cq_record).store((START as u32).to_be(), Ordering::SeqCst);
    q.taken = START;
    for index in 0..200 {
        rig.write(&mut q);
        q.ring();
        q.done(index);
    }
    assert_eq!(rig.wrong(), []);
    rig.nic(0).hca.with_device(|device| {
        assert_eq!(device.cqs.get(cqn).unwrap().producer, 200 - 16);
    });
}

#[test]
fn a_collapsed_queue_has_one_entry() {
    let rig = Rig::new();
    let spec = QpSpec {
        send_depth: 4,
        collapsed: true,
        ..QpSpec::default()
    };
    let [mut q, _] = rig.pair(spec);
    for index in 0..100u16 {
        rig.write(&mut q);
        q.ring();
        until(|| read(q.qp.send_cq_ring, 0).filter(|cqe| cqe.counter == index));
    }
    for entry in 1..4 {
        assert_eq!(read(q.qp.send_cq_ring + entry * 64, 0), None);
    }
    assert_eq!(rig.wrong(), []);
}

/// Arms a queue's completion queue for what lies beyond what has been taken.
fn arm(q: &Queue, solicited: bool) {
    let command = (u64::from(solicited) << 24) | (q.taken & 0xff_ffff);
    let value = (command << 32) | u64::from(q.qp.send_cqn);
    quad(q.qp.arm).store(value.to_be(), Ordering::SeqCst);
}

#[test]
fn an_armed_queue_tells_once() {
    let rig = Rig::new();
    let mut q = rig.queue(16);
    let event = Event::Completion { cqn: q.qp.send_cqn };
    let next = |patience| rig.nic(0).next_event(patience);
    let none = Duration::from_millis(20);
    rig.write(&mut q);
    q.ring();
    q.done(0);
    assert_eq!(next(none), None, "not armed");
    arm(&q, false);
    assert_eq!(next(none), None, "nothing beyond what was taken");
    for _ in 0..2 {
        rig.write(&mut q);
        q.ring();
    }
    assert_eq!(next(PATIENCE), Some(event));
    q.done(1);
    q.done(2);
    assert_eq!(next(none), None, "one event for an arming");
    rig.write(&mut q);
    q.ring();
    until(|| read(q.qp.send_cq_ring + 3 * 64, 0));
    arm(&q, false);
    assert_eq!(next(PATIENCE), Some(event), "it is there already");
    q.done(3);
    arm(&q, true);
    rig.write(&mut q);
    q.ring();
    q.done(4);
    assert_eq!(next(none), None, "not solicited");
    // An error counts as solicited.
    q.post(WRITE, Some((0, 0)), &[(0, 0, 8)]);
    q.ring();
    assert_eq!(q.failed(), LOCAL_PROT);
    assert_eq!(next(PATIENCE), Some(event));
}
