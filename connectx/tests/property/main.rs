// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random programs of work requests against a reference that was written from the specification: every byte of memory,
//! every completion and what the counters say.
//!
//! `PROPTEST_CASES` says how many programs each test runs.

mod invalid;
mod program;
mod reference;
mod world;

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

use connectx::ifc::wqe::cqe_opcode;
use program::{Program, QUEUES, Request};
use reference::{Queue, traffic};
use world::World;

/// Programs in a test, unless the environment says otherwise.
const CASES: u32 = 48;

/// Failing programs are printed, not kept in a file.
pub fn config() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok();
    ProptestConfig {
        cases: cases.and_then(|n| n.parse().ok()).unwrap_or(CASES),
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..ProptestConfig::default()
    }
}

/// Requests that are in the queues at one time, of all queue pairs: their rings are small, so that they wrap.
const BATCH: usize = 6;

/// Runs a program; every batch's last request of each queue pair is signalled.
fn run(program: &Program) -> (World, Vec<Queue>) {
    let mut queues: Vec<Queue> = (0..QUEUES.len()).map(Queue::new).collect();
    let mut world = World::new(program.mtu, &queues);
    let mut sent = [0; QUEUES.len()];
    let mut received = [0; QUEUES.len()];
    for batch in program.requests.chunks(BATCH) {
        world.lose(program.loss);
        let mut batch = batch.to_vec();
        for queue in 0..QUEUES.len() {
            if let Some(last) = batch.iter_mut().rfind(|request| request.queue == queue) {
                last.signalled = true;
            }
        }
        // The unreliable lose what comes too early.
        let is_late = |request: &Request| program.late && request.queue < 2;
        for request in batch.iter().filter(|r| r.op.receives() && !is_late(r)) {
            world.post_receive(request);
        }
        for request in &batch {
            let segments = world.segments(request);
            world.put(request, &segments);
            if program.ring_each {
                world.ring(request.queue);
            }
            queues[request.queue].execute(request);
        }
        for request in batch.iter().filter(|_| !program.ring_each) {
            world.ring(request.queue);
        }
        world.settle();
        if program.heals {
            world.lose(0);
        }
        for request in batch.iter().filter(|r| r.op.receives() && is_late(r)) {
            world.post_receive(request);
        }
        let mut cqes: [(Vec<_>, Vec<_>); QUEUES.len()] = Default::default();
        let complete = world.run_until(|world| {
            (0..QUEUES.len()).all(|queue| {
                cqes[queue].0.extend(world.take(0, queue, false));
                cqes[queue].1.extend(world.take(1, queue, true));
                sent[queue] + cqes[queue].0.len() >= queues[queue].sent.len()
                    && received[queue] + cqes[queue].1.len() >= queues[queue].received.len()
            })
        });
        let log = world.guests[0].referee.recent(3);
        assert!(complete, "completions are missing: {cqes:?} {log:?}");
        for (queue, (requests, receives)) in cqes.into_iter().enumerate() {
            for cqe in requests {
                let expected = queues[queue]
                    .sent
                    .get(sent[queue])
                    .expect("a completion too many");
                assert_eq!(cqe.opcode, cqe_opcode::REQ, "{cqe:?} {log:?}");
                assert_eq!(cqe.counter, world.counter(queue, expected.request), "order");
                assert_eq!(cqe.bytes, expected.bytes, "byte count of {cqe:?}");
                assert_eq!(cqe.qpn, world.ends[0][queue].qp.qpn);
                sent[queue] += 1;
            }
            for cqe in receives {
                let n = received[queue];
                let expected = queues[queue].received.get(n).expect("a message too many");
                assert_eq!(
                    &world.received(queue, n, &cqe),
                    expected,
                    "queue pair {queue}"
                );
                received[queue] += 1;
            }
        }
    }
    (world, queues)
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn programs_do_what_the_specification_says(program in program::valid()) {
        let (world, queues) = run(&program);
        for (number, queue) in queues.iter().enumerate() {
            prop_assert_eq!(world.fetched(number), queue.fetched.clone(), "READs of queue pair {}", number);
            prop_assert!(world.target(number) == queue.target, "target of queue pair {}", number);
            prop_assert!(world.source(number) == queue.source, "source of queue pair {}", number);
        }
        let count = |side: usize, name| world.guests[side].count(name);
        for side in 0..2 {
            for name in ["error_cqes", "flush_cqes", "access_naks", "torn_wqes", "dma_faults",
                         "foreign_doorbells", "lost_doorbells", "stale_doorbells", "cq_overruns"] {
                prop_assert_eq!(count(side, name), 0, "{} of side {}", name, side);
            }
        }
        if program.loss == 0 {
            prop_assert_eq!(count(0, "packets_dropped") + count(1, "packets_dropped"), 0);
            prop_assert_eq!(count(0, "packets_sent"), count(1, "packets_received"));
            prop_assert_eq!(count(1, "packets_sent"), count(0, "packets_received"));
        }
        if program.loss == 0 && !program.late {
            prop_assert_eq!(count(0, "retransmissions"), 0);
            let wire = traffic(&program);
            prop_assert_eq!(count(0, "bytes_sent"), wire.requests);
            prop_assert_eq!(count(1, "bytes_sent"), wire.responses);
        }
        let late = program.late && program.requests.iter().any(|r| r.queue < 2 && r.op.receives());
        prop_assert!(late || program.loss > 0 || count(0, "rnr_naks") == 0);
    }
}
