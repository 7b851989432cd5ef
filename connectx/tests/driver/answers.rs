// SPDX-License-Identifier: MIT OR Apache-2.0
//! Answers that wait for one another, or come in another order than their requests: READs beside other work over links
//! that are slow or lose packets.

use connectx::ifc::wqe::{cqe_opcode, send};
use connectx::platform::Function;

use crate::guest::{Pair, pointer, remote};

const SIGNALLED: u8 = 0x08;

/// The responder takes four READs at a time. Acknowledgements that wait behind them are none.
#[test]
pub fn acknowledgements_that_wait_are_no_reads() {
    let Pair { guests, mut sides } = Pair::with(|s| s.ack_timeout = 0);
    let [a, b] = &mut sides;
    for _ in 0..4 {
        b.qp.receive(&guests[1], b.key, b.at + 65536, 64);
    }
    // Of its answers 4 KiB a 33 ms.
    guests[1].hca.steer("link", &["rate", "1"]).unwrap();
    let data = [pointer(8, a.key, a.at)];
    for _ in 0..4 {
        let segments = [remote(b.at, b.key), pointer(4096, a.key, a.at + 65536)];
        a.qp.put(&guests[0], send::RDMA_READ, SIGNALLED, 0, &segments);
        a.qp.put(&guests[0], send::SEND, SIGNALLED, 0, &data);
    }
    a.qp.ring(&guests[0], guests[0].uar);
    for index in 0..8 {
        let cqe = a.send.wait(&guests[0]);
        assert_eq!((cqe.opcode, cqe.counter), (cqe_opcode::REQ, index));
    }
}

/// A READ whose data was there before that of the one ahead of it, and behind it nothing that is acknowledged.
#[test]
pub fn what_waits_for_reads_ends_when_they_have_their_data() {
    let Pair { guests, mut sides } = Pair::with(|s| {
        // 65 µs.
        s.ack_timeout = 4;
        s.retries = 7;
    });
    let [a, b] = &mut sides;
    for guest in &guests {
        guest.hca.steer("link", &["loss", "150000"]).unwrap();
    }
    for round in 0..100 {
        for _ in 0..2 {
            let segments = [remote(b.at, b.key), pointer(8, a.key, a.at)];
            a.qp.put(&guests[0], send::RDMA_READ, 0, 0, &segments);
        }
        a.qp.put(&guests[0], send::NOP, SIGNALLED, 0, &[]);
        a.qp.ring(&guests[0], guests[0].uar);
        let cqe = a.send.wait(&guests[0]);
        let expected = (cqe_opcode::REQ, round * 3 + 2);
        assert_eq!((cqe.opcode, cqe.counter), expected);
    }
    assert!(guests[0].count("retransmissions") > 0);
}
