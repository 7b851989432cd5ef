// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs with one wrong request: it fails with the status of the specification (IBA 10.10 and 11.6.2), what came
//! before it has been done, what comes after it is flushed in order. It has no effect either, unless the mistake shows only
//! when an answer comes: what follows a READ may have been sent by then (IBA 10.8.2.1).

use proptest::prelude::*;

use connectx::ifc::wqe::{cqe_opcode, send, syndrome};
use connectx::objects::qp::State;
use connectx_guest::{pointer, remote};

use crate::program::{self, Program, QUEUES, Request, SOURCE, TARGET};
use crate::reference::Queue;
use crate::world::World;

#[derive(Debug, Clone, Copy)]
enum Mistake {
    LocalKey,
    LocalBounds,
    LocalRight,
    LocalDomain,
    RemoteKey,
    RemoteBounds,
    RemoteRight,
    RemoteDomain,
    Opcode,
    Unaligned,
    TooLong,
}

const MISTAKES: &[Mistake] = &[
    Mistake::LocalKey,
    Mistake::LocalBounds,
    Mistake::LocalRight,
    Mistake::LocalDomain,
    Mistake::RemoteKey,
    Mistake::RemoteBounds,
    Mistake::RemoteRight,
    Mistake::RemoteDomain,
    Mistake::Opcode,
    Mistake::Unaligned,
    Mistake::TooLong,
];

/// Rights of a key: remote atomic, write, read, then local write, read.
const LOCAL_READ: u64 = 0x01;
const NO_REMOTE_WRITE: u64 = 0x17;
const ALL: u64 = 0x1f;

impl Mistake {
    /// Status of the requester's completion.
    fn status(self) -> u8 {
        match self {
            Self::LocalKey | Self::LocalBounds | Self::LocalRight | Self::LocalDomain => {
                syndrome::LOCAL_PROT
            }
            Self::RemoteKey | Self::RemoteBounds | Self::RemoteRight | Self::RemoteDomain => {
                syndrome::REMOTE_ACCESS
            }
            Self::Opcode => syndrome::LOCAL_QP_OP,
            Self::Unaligned | Self::TooLong => syndrome::REMOTE_INVAL_REQ,
        }
    }

    /// Whether the responder sees it, which then stops too.
    fn reaches_responder(self) -> bool {
        matches!(
            self.status(),
            syndrome::REMOTE_ACCESS | syndrome::REMOTE_INVAL_REQ
        )
    }

    /// The wrong WQE: opcode and segments.
    fn wqe(self, world: &mut World) -> (u8, Vec<[u8; 16]>) {
        let (lkey, local) = (world.ends[0][0].key, world.ends[0][0].at);
        let (rkey, there) = (world.ends[1][0].key, world.ends[1][0].target());
        let good = (remote(there, rkey), pointer(8, lkey, local));
        let foreign = |world: &mut World, side: usize, at| {
            let pd = world.guests[side].alloc(connectx::ifc::opcode::ALLOC_PD);
            world.guests[side].key(pd, at, 4096, ALL)
        };
        let write = |remote, local| (send::RDMA_WRITE, vec![remote, local]);
        match self {
            Self::LocalKey => write(good.0, pointer(8, lkey ^ 1, local)),
            Self::LocalBounds => write(good.0, pointer(8, lkey, local - 4)),
            Self::LocalRight => {
                let pd = world.pd[0];
                let key = world.guests[0].key(pd, local, 4096, LOCAL_READ);
                (send::RDMA_READ, vec![good.0, pointer(8, key, local)])
            }
            Self::LocalDomain => {
                let key = foreign(world, 0, local);
                write(good.0, pointer(8, key, local))
            }
            Self::RemoteKey => write(remote(there, rkey ^ 1), good.1),
            Self::RemoteBounds => write(remote(there - u64::from(SOURCE) - 4, rkey), good.1),
            Self::RemoteRight => {
                let pd = world.pd[1];
                let key = world.guests[1].key(pd, there, 4096, NO_REMOTE_WRITE);
                write(remote(there, key), good.1)
            }
            Self::RemoteDomain => {
                let key = foreign(world, 1, there);
                write(remote(there, key), good.1)
            }
            Self::Opcode => (0x7e, vec![good.0, good.1]),
            Self::Unaligned => (
                send::ATOMIC_FA,
                vec![remote(there + 4, rkey), [1; 16], good.1],
            ),
            Self::TooLong => (send::SEND, vec![pointer(100, lkey, local)]),
        }
    }
}

/// Requests of one reliable queue pair.
fn few() -> impl Strategy<Value = Vec<Request>> {
    program::valid().prop_map(|mut program: Program| {
        program.requests.retain(|request| request.queue == 0);
        program.requests.truncate(3);
        program.requests
    })
}

proptest! {
    #![proptest_config(crate::config())]

    #[test]
    fn a_wrong_request_fails_and_flushes_what_follows(
        before in few(),
        mistake in proptest::sample::select(MISTAKES),
        after in proptest::collection::vec(any::<bool>(), 0..4),
        spare in 1..3usize,
    ) {
        let mut queues: Vec<Queue> = (0..QUEUES.len()).map(Queue::new).collect();
        let mut world = World::new([3; 4], &queues);
        for request in &before {
            if request.op.receives() {
                world.post_receive(request);
            }
            let segments = world.segments(request);
            world.put(request, &segments);
            queues[0].execute(request);
        }
        let (op, segments) = mistake.wqe(&mut world);
        let wrong = world.ends[0][0].qp.producer;
        let end = &mut world.ends[1][0];
        for _ in 0..spare {
            end.qp.receive(&world.guests[1], end.key, end.at, 50);
        }
        let (lkey, local) = (world.ends[0][0].key, world.ends[0][0].at);
        let (rkey, there) = (world.ends[1][0].key, world.ends[1][0].target());
        let end = &mut world.ends[0][0];
        end.qp.put(&world.guests[0], op, 0, 0, &segments);
        for signalled in &after {
            let flags = if *signalled { 0x08 } else { 0 };
            let at = there + u64::from(TARGET) - 16;
            end.qp.put(&world.guests[0], send::RDMA_WRITE, flags, 0, &[remote(at, rkey), pointer(16, lkey, local)]);
        }
        world.ring(0);
        world.settle();

        let cqes = world.take(0, 0, false);
        let good = queues[0].sent.len();
        prop_assert_eq!(cqes.len(), good + 1 + after.len(), "{:?}", cqes);
        for (cqe, expected) in cqes.iter().zip(&queues[0].sent) {
            prop_assert_eq!((cqe.opcode, cqe.counter), (cqe_opcode::REQ, world.counter(0, expected.request)));
        }
        let failed = cqes[good];
        prop_assert_eq!((failed.opcode, failed.syndrome, failed.counter), (cqe_opcode::REQ_ERR, mistake.status(), wrong));
        for pair in cqes[good..].windows(2) {
            prop_assert_eq!((pair[1].opcode, pair[1].syndrome), (cqe_opcode::REQ_ERR, syndrome::WR_FLUSH));
            prop_assert!(pair[1].counter.wrapping_sub(pair[0].counter) as i16 > 0, "order: {:?}", pair);
        }

        let receives = world.take(1, 0, true);
        let mut expected = vec![];
        if mistake.reaches_responder() {
            expected = vec![syndrome::WR_FLUSH; spare];
        }
        if matches!(mistake, Mistake::TooLong) {
            expected[0] = syndrome::LOCAL_LENGTH;
        }
        let errors: Vec<u8> = receives[queues[0].received.len()..].iter().map(|c| c.syndrome).collect();
        prop_assert_eq!(errors, expected);
        for (n, message) in queues[0].received.clone().iter().enumerate() {
            prop_assert_eq!(&world.received(0, n, &receives[n]), message);
        }

        let [a, b] = [0, 1].map(|side: usize| world.ends[side][0].qp.state(&mut world.guests[side]));
        prop_assert_eq!(a, State::Error as u64);
        let stopped = if mistake.reaches_responder() { State::Error } else { State::ReadyToSend };
        prop_assert_eq!(b, stopped as u64);
        let untouched = match mistake {
            Mistake::LocalRight => TARGET as usize - 16,
            _ => TARGET as usize,
        };
        prop_assert!(
            world.target(0)[..untouched] == queues[0].target[..untouched],
            "the wrong request or a later one had an effect"
        );
        prop_assert_eq!(world.fetched(0), queues[0].fetched.clone());
    }
}
