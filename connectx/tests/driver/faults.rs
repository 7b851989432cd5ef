// SPDX-License-Identifier: MIT OR Apache-2.0
//! Misbehaviour on demand.

use connectx::ifc::wqe::{cqe_opcode, send};
use connectx::platform::{Function, ResetKind};

use crate::guest::{Guest, Pair, Side, eventually, pointer, remote};

fn fault(guest: &Guest, words: &str) {
    let words: Vec<&str> = words.split(' ').collect();
    guest.hca.steer("fault", &words).unwrap();
}

/// Writes `value` to the peer and waits until it is there.
fn write(pair: &mut Pair, value: u8) {
    let Pair { guests, sides } = pair;
    let [one, other] = &mut sides[..] else {
        panic!("two sides")
    };
    guests[0].ram.set(one.at, &[value]);
    let segments = [remote(other.at, other.key), pointer(1, one.key, one.at)];
    one.qp.post(&guests[0], send::RDMA_WRITE, 0, &segments);
    eventually(|| (guests[1].ram.get(other.at, 1) == [value]).then_some(()));
}

fn counter(pair: &mut Pair) -> u16 {
    let cqe = pair.sides[0].send.wait(&pair.guests[0]);
    assert_eq!(cqe.opcode, cqe_opcode::REQ);
    cqe.counter
}

#[test]
pub fn a_delayed_completion_comes_late_and_in_order() {
    let mut pair = Pair::new();
    let qpn = pair.sides[0].qp.qpn;
    // An hour.
    fault(&pair.guests[0], &format!("delay {qpn} 3600000000"));
    write(&mut pair, 1);
    write(&mut pair, 2);
    assert!(pair.sides[0].send.poll(&pair.guests[0]).is_none());
    // A reset forgets it.
    pair.guests[0].hca.reset(ResetKind::Bus);

    let mut pair = Pair::new();
    let qpn = pair.sides[0].qp.qpn;
    fault(&pair.guests[0], &format!("delay {qpn} 20000"));
    for value in 1..4 {
        write(&mut pair, value);
    }
    assert_eq!([(); 3].map(|()| counter(&mut pair)), [0, 1, 2]);
}

#[test]
pub fn a_reordered_completion_is_overtaken_once_or_comes_alone() {
    let mut pair = Pair::new();
    let qpn = pair.sides[0].qp.qpn;
    fault(&pair.guests[0], &format!("reorder {qpn}"));
    for value in 1..4 {
        write(&mut pair, value);
    }
    assert_eq!([(); 3].map(|()| counter(&mut pair)), [1, 0, 2]);
    fault(&pair.guests[0], &format!("reorder {qpn}"));
    write(&mut pair, 9);
    assert_eq!(counter(&mut pair), 3);
}

#[test]
pub fn the_state_of_the_nic_tells_of_a_reset_and_the_next_driver_ends_it() {
    let state = |guest: &Guest| {
        let mut word = [0; 4];
        guest.hca.bar_read(0, 0x14, &mut word);
        word[2] & 7
    };
    let mut guest = crate::guest::guests(1).pop().unwrap();
    for kind in [ResetKind::FunctionLevel, ResetKind::Bus] {
        assert_eq!(state(&guest), 0, "full driver");
        guest.hca.reset(kind);
        assert_eq!(state(&guest), 1, "disabled");
        guest.bring_up();
    }
    assert_eq!(guest.count("resets"), 2);
}

#[test]
pub fn objects_that_the_driver_forgot_are_counted() {
    use connectx::ifc::opcode;
    let mut guest = crate::guest::guests(1).pop().unwrap();
    let before: u64 = ["uar", "eq"].iter().map(|kind| guest.count(kind)).sum();
    Side::new(&mut guest);
    assert_eq!(guest.on_object(opcode::TEARDOWN_HCA, 0), 0);
    // Two completion queues, a queue pair, a domain, a key.
    assert_eq!(guest.count("never_reclaimed"), before + 5);
    let last = guest.referee.recent(1).pop().unwrap().refusal;
    assert!(last.object.contains("TEARDOWN_HCA"), "{last}");
}
