// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shapes of completion queues: 128-byte entries, collapsed, heedless of overruns, and changes between sizes.

use connectx::ifc::command::{self, header, reply};
use connectx::ifc::context::cqc;
use connectx::ifc::opcode;
use connectx::ifc::wqe::{cqe_opcode, send};

use crate::guest::{Cq, Guest, Qp, Settings, Side, input, status};

/// A completion queue as memory.
struct Raw {
    cqn: u32,
    at: u64,
    dbr: u64,
    entry: u64,
    log: u32,
}

fn memory(guest: &Guest, len: u64) -> u64 {
    let at = guest.ram.alloc(len);
    guest.ram.set(at, &vec![0xff; len as usize]);
    at
}

impl Raw {
    fn new(guest: &mut Guest, log: u32, f: impl FnOnce(&mut [u8])) -> Self {
        let mut create = input(opcode::CREATE_CQ, 0x110);
        let dbr = guest.ram.alloc(8);
        let context = command::create_cq_in::cqc.bytes_mut(&mut create);
        cqc::log_cq_size.set(context, u64::from(log));
        cqc::uar_page.set(context, u64::from(guest.uar));
        cqc::c_eqn.set(context, u64::from(guest.completions.eqn));
        cqc::dbr_addr.set(context, dbr);
        f(context);
        let entry = 64 << cqc::cqe_sz.get(context);
        let len = entry << log;
        let at = memory(guest, len);
        create.extend((0..len.div_ceil(4096)).flat_map(|p| (at + p * 4096).to_be_bytes()));
        let cqn = reply::object.get32(&guest.ok(create, 16));
        Self {
            cqn,
            at,
            dbr,
            entry,
            log,
        }
    }

    /// A slot's completion (of 128 bytes the second half): opcode, owner and counter.
    fn slot(&self, guest: &Guest, slot: u64) -> (u8, u8, u16) {
        let e = guest
            .ram
            .get(self.at + slot * self.entry + self.entry - 64, 64);
        (e[63] >> 4, e[63] & 1, u16::from_be_bytes([e[60], e[61]]))
    }

    fn resize(&self, guest: &mut Guest, log: u32, cqe_sz: u64) -> Option<Self> {
        let entry = 64 << cqe_sz;
        let at = memory(guest, entry << log);
        let resized = Self {
            at,
            entry,
            log,
            ..*self
        };
        (resize(guest, self.cqn, at, log, cqe_sz) == 0).then_some(resized)
    }
}

/// Moves a queue; gives the status.
fn resize(guest: &mut Guest, cqn: u32, at: u64, log: u32, cqe_sz: u64) -> u8 {
    let len = 64u64 << cqe_sz << log;
    let mut modify = input(opcode::MODIFY_CQ, 0x110);
    header::op_mod.set(&mut modify, 1);
    header::object.set(&mut modify, u64::from(cqn));
    let context = command::modify_cq_in::cqc.bytes_mut(&mut modify);
    cqc::log_cq_size.set(context, u64::from(log));
    cqc::cqe_sz.set(context, cqe_sz);
    modify.extend((0..len.div_ceil(4096)).flat_map(|p| (at + p * 4096).to_be_bytes()));
    status(&guest.command(modify, 16))
}

/// Moves a queue to fresh memory for entries of a size; gives the status.
pub fn resized_entries(guest: &mut Guest, cqn: u32, cqe_sz: u64) -> u8 {
    let at = memory(guest, 4096);
    resize(guest, cqn, at, 3, cqe_sz)
}

/// A queue pair whose sends complete there, connected to itself.
fn sender(guest: &mut Guest, cqn: u32) -> Qp {
    let side = Side::new(guest);
    let mut cq = Cq::new(guest, 4);
    cq.cqn = cqn;
    let qp = Qp::new(guest, side.pd, &cq, &cq);
    let own = Settings::to(1, qp.qpn);
    qp.connect(guest, own);
    qp
}

const NONE: (u8, u8, u16) = (15, 1, 0xffff);

#[test]
pub fn a_completion_is_the_second_half_of_128_bytes() {
    let mut guest = crate::guest::guests(1).pop().unwrap();
    let cq = Raw::new(&mut guest, 2, |c| cqc::cqe_sz.set(c, 1));
    let mut qp = sender(&mut guest, cq.cqn);
    // Twice around the ring: the owner bit changes with each lap.
    for index in 0..8u16 {
        qp.post(&guest, send::NOP, 0, &[]);
        let (slot, lap) = (u64::from(index) & 3, (index >> 2) as u8);
        assert_eq!(cq.slot(&guest, slot), (cqe_opcode::REQ, lap, index));
        let first_half = guest.ram.get(cq.at + slot * 128, 64);
        assert_eq!(first_half, [0xff; 64], "which nothing was written to");
        guest.ram.set(cq.dbr, &u32::from(index + 1).to_be_bytes());
    }
}

#[test]
pub fn a_collapsed_queue_keeps_the_last_completion_and_never_overruns() {
    let mut guest = crate::guest::guests(1).pop().unwrap();
    let cq = Raw::new(&mut guest, 2, |c| cqc::cc.set(c, 1));
    let mut qp = sender(&mut guest, cq.cqn);
    for index in 0..40u16 {
        qp.post(&guest, send::NOP, 0, &[]);
        assert_eq!(cq.slot(&guest, 0), (cqe_opcode::REQ, 0, index));
        assert_eq!(cq.slot(&guest, 1), NONE);
    }
    assert_eq!(guest.count("cq_overruns"), 0);
}

#[test]
pub fn a_queue_that_ignores_overruns_goes_round_over_what_nobody_read() {
    let mut guest = crate::guest::guests(1).pop().unwrap();
    let cq = Raw::new(&mut guest, 2, |c| cqc::oi.set(c, 1));
    let mut qp = sender(&mut guest, cq.cqn);
    for index in 0..11u16 {
        qp.post(&guest, send::NOP, 0, &[]);
        let (slot, lap) = (u64::from(index) & 3, (index >> 2) as u8 & 1);
        assert_eq!(cq.slot(&guest, slot), (cqe_opcode::REQ, lap, index));
    }
    assert_eq!(guest.count("cq_overruns"), 0);
    assert_eq!(guest.event(), None);
}

#[test]
pub fn a_queue_changes_the_size_of_its_entries_too() {
    let mut guest = crate::guest::guests(1).pop().unwrap();
    let mut cq = Raw::new(&mut guest, 3, |_| {});
    let mut qp = sender(&mut guest, cq.cqn);
    // Entries written, and WQEs posted.
    let (mut written, mut posted) = (0u32, 0u16);
    for (log, cqe_sz) in [(2u32, 1u64), (4, 0), (4, 1), (3, 1), (5, 0)] {
        for _ in 0..3 {
            qp.post(&guest, send::NOP, 0, &[]);
            let (slot, lap) = (written & ((1 << cq.log) - 1), (written >> cq.log) as u8 & 1);
            let expected = (cqe_opcode::REQ, lap, posted);
            assert_eq!(cq.slot(&guest, u64::from(slot)), expected);
            (written, posted) = (written + 1, posted + 1);
            guest.ram.set(cq.dbr, &written.to_be_bytes());
        }
        // The last entry in the old memory says that there is new; the count goes on.
        let next = cq.resize(&mut guest, log, cqe_sz).expect("there is room");
        let slot = u64::from(written & ((1 << cq.log) - 1));
        assert_eq!(cq.slot(&guest, slot).0, cqe_opcode::RESIZE_CQ);
        written += 1;
        guest.ram.set(cq.dbr, &written.to_be_bytes());
        cq = next;
    }
}
