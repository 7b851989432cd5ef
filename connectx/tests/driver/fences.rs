// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fences: what follows a READ or an atomic waits for it or does not, as its WQE says.

use connectx::ifc::wqe::{cqe_opcode, send};
use connectx::platform::Function;

use crate::guest::{Pair, pointer, remote};

const SIGNALLED: u8 = 0x08;
/// `fm_ce_se` has the fence in its upper three bits: none, initiator small, fence, strong ordering, fence and small.
const MODES: [(u8, bool); 5] = [(0, false), (1, false), (2, true), (3, true), (4, true)];

/// A SEND of what a READ, or an atomic, before it brings. Over a slow link that is there long after the SEND has begun.
#[test]
pub fn a_fence_waits_for_what_comes_back() {
    for op in [send::RDMA_READ, send::ATOMIC_FA] {
        for (mode, waits) in MODES {
            let Pair { guests, mut sides } = Pair::with(|s| s.ack_timeout = 0);
            let [a, b] = &mut sides;
            guests[0].ram.set(a.at, &[0x11; 8]);
            guests[1].ram.set(b.at, &[0x22; 8]);
            b.qp.receive(&guests[1], b.key, b.at + 4096, 64);
            for guest in &guests {
                guest.hca.steer("link", &["delay", "20000"]).unwrap();
            }
            let local = pointer(8, a.key, a.at);
            let mut segments = vec![remote(b.at, b.key), local];
            if op == send::ATOMIC_FA {
                segments.insert(1, [0; 16]);
            }
            a.qp.put(&guests[0], op, SIGNALLED, 0, &segments);
            a.qp.put(&guests[0], send::SEND, SIGNALLED | (mode << 5), 0, &[local]);
            a.qp.ring(&guests[0], guests[0].uar);
            for index in 0..2 {
                let cqe = a.send.wait(&guests[0]);
                assert_eq!((cqe.opcode, cqe.counter), (cqe_opcode::REQ, index));
            }
            assert_eq!(b.receive.wait(&guests[1]).opcode, cqe_opcode::RESP_SEND);
            let sent = guests[1].ram.get(b.at + 4096, 8);
            let expected = if waits { 0x22 } else { 0x11 };
            assert_eq!(sent, [expected; 8], "fence {mode} behind {op:#x}");
        }
    }
}
