// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes to UAR pages.

use super::requester::{self, Posted};
use super::{blueflame, completion, event};
use crate::ifc::wqe::{cq_doorbell, dbr, eq_doorbell, sq_doorbell, uar};
use crate::objects::device::Device;

const SOURCE: &str = "PRM, UAR page format";

/// First halves of doorbells that come as two 4-byte writes.
#[derive(Debug, Default, Clone, Copy)]
pub struct Halves {
    offset: u64,
    word: [u8; 4],
}

/// A write of 4 or 8 bytes (or a longer BlueFlame copy) at `offset` of UAR page `page`.
pub fn write(device: &mut Device, halves: &mut Halves, page: u32, offset: u64, value: &[u8]) {
    if device.uars.get(page).is_none() {
        return stale(device, page, offset);
    }
    if blueflame::continues(device, page, offset, value) {
        return;
    }
    match offset {
        uar::EQ_ARM | uar::EQ => event_queue(device, page, offset == uar::EQ_ARM, value),
        _ => {
            let register = offset & !7;
            let Some(doorbell) = join(halves, u64::from(page) * uar::PAGE + offset, value) else {
                return;
            };
            match register {
                uar::CQ => completion_queue(device, page, &doorbell),
                uar::SQ_DBR_LESS => send_queue(device, page, &doorbell, Register::WithoutRecord),
                // Only the first quadword of a buffer is a doorbell; behind it is what BlueFlame did not take.
                uar::SQ..uar::SQ_END if register % uar::SQ_STRIDE == 0 => {
                    blueflame::rung(device, page, register, &doorbell, value)
                }
                uar::SQ..uar::SQ_END => {}
                _ => device.refuse(
                    format!("uar {page:#x}"),
                    "offset",
                    offset,
                    "a register of the page",
                    SOURCE,
                ),
            }
        }
    }
}

/// A write to a UAR page that has no owner.
pub fn stale(device: &mut Device, page: u32, offset: u64) {
    device.counters.stale_doorbells += 1;
    device.refuse(
        format!("uar {page:#x}"),
        "offset",
        offset,
        "a doorbell is on an allocated UAR page",
        SOURCE,
    );
}

/// Looks at the doorbell records of queue pairs whose doorbells may have been overwritten by another's in memory: where
/// nothing traps a store, two to one register can merge.
pub fn merged(device: &mut Device, qpns: impl Iterator<Item = u32>) {
    for qpn in qpns {
        requester::look_at_record(device, qpn);
    }
}

/// A whole doorbell that was found in the memory of a page. If several queues are rung there, those that were rung before it
/// may have been overwritten; their records are looked at.
pub fn found(device: &mut Device, page: u32, offset: u64, value: &[u8; 8]) {
    write(device, &mut Halves::default(), page, offset, value);
    if device.uars.get(page).is_none_or(|uar| uar.refs < 2) {
        return;
    }
    let here = device
        .qps
        .iter()
        .filter(|(_, qp)| qp.decoded.uar_page == page);
    let qpns: Vec<u32> = here.map(|(qpn, _)| qpn).collect();
    merged(device, qpns.into_iter());
    if offset == uar::CQ {
        let here = device.cqs.iter().filter(|(_, cq)| cq.uar_page == page);
        let cqns: Vec<u32> = here.map(|(cqn, _)| cqn).collect();
        cqns.into_iter()
            .for_each(|cqn| look_at_arm(device, page, cqn));
    }
}

/// Arms a CQ if its record has another word than the last that armed it. The first word of all may be 0, as in a record that
/// was never written: one event too many does no harm.
fn look_at_arm(device: &mut Device, page: u32, cqn: u32) {
    let Some(cq) = device.cqs.get(cqn) else {
        return;
    };
    let known = cq.arm_word;
    match device.host.read_be32(cq.dbr + dbr::CQ_ARM) {
        Ok(word) if Some(word) != known => {
            let doorbell = (u64::from(word) << 32) | u64::from(cqn);
            completion_queue(device, page, &doorbell.to_be_bytes());
        }
        _ => {}
    }
}

/// Makes eight bytes of a doorbell from one write or from two.
fn join(halves: &mut Halves, at: u64, value: &[u8]) -> Option<[u8; 8]> {
    if let Some(whole) = value.first_chunk::<8>() {
        return Some(*whole);
    }
    let word = *value.first_chunk::<4>()?;
    if at % 8 == 0 {
        *halves = Halves { offset: at, word };
        return None;
    }
    let first = if halves.offset == at - 4 {
        std::mem::take(halves).word
    } else {
        [0; 4]
    };
    let mut whole = [0; 8];
    whole[..4].copy_from_slice(&first);
    whole[4..].copy_from_slice(&word);
    Some(whole)
}

#[track_caller]
fn foreign(device: &mut Device, object: String, page: u32, rule: &str) {
    device.counters.foreign_doorbells += 1;
    *device.strays.entry(page).or_default() += 1;
    device.refuse(object, "uar_page", page, rule, SOURCE);
}

#[track_caller]
fn lost(device: &mut Device, page: u32, field: &str, number: u32) {
    device.counters.lost_doorbells += 1;
    *device.strays.entry(page).or_default() += 1;
    device.refuse(
        "doorbell",
        field,
        number,
        "a doorbell names an object that exists",
        SOURCE,
    );
}

fn event_queue(device: &mut Device, page: u32, arm: bool, value: &[u8]) {
    let eqn = eq_doorbell::eqn.get32(value);
    match device.eqs.get(eqn) {
        None => lost(device, page, "eqn", eqn),
        Some(eq) if eq.uar_page != page => foreign(
            device,
            format!("eq {eqn:#x}"),
            page,
            "an EQ is rung through its own UAR page",
        ),
        Some(_) => event::consumed(device, eqn, eq_doorbell::consumer_index.get32(value), arm),
    }
}

fn completion_queue(device: &mut Device, page: u32, doorbell: &[u8; 8]) {
    let cqn = cq_doorbell::cqn.get32(doorbell);
    match device.cqs.get(cqn) {
        None => lost(device, page, "cqn", cqn),
        Some(cq) if cq.uar_page != page => foreign(
            device,
            format!("cq {cqn:#x}"),
            page,
            "a CQ is armed through its own UAR page",
        ),
        Some(_) => {
            let consumer = cq_doorbell::consumer_index.get32(doorbell);
            let solicited_only = cq_doorbell::solicited_only.is_set(doorbell);
            if let Some(cq) = device.cqs.get_mut(cqn) {
                cq.arm_word = doorbell.first_chunk().map(|word| u32::from_be_bytes(*word));
            }
            completion::arm(device, cqn, consumer, solicited_only);
        }
    }
}

/// Which register a send queue was rung by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Register {
    WithRecord,
    WithoutRecord,
    /// With the record, and the whole WQE.
    Copy,
}

/// The head of a WQE, which is a send queue's doorbell.
pub(super) fn send_queue(device: &mut Device, page: u32, doorbell: &[u8; 8], by: Register) {
    let qpn = sq_doorbell::qpn.get32(doorbell);
    match device.qps.get(qpn) {
        None => lost(device, page, "qpn", qpn),
        Some(qp) if qp.decoded.uar_page != page => {
            foreign(
                device,
                format!("qp {qpn:#x}"),
                page,
                "a QP is rung through its own UAR page",
            );
        }
        Some(qp) if qp.decoded.send_record != (by != Register::WithoutRecord) => {
            device.counters.lost_doorbells += 1;
            device.refuse(
                format!("qp {qpn:#x}"),
                "send_dbr_mode",
                u8::from(!qp.decoded.send_record),
                "a send queue is rung by the register of its mode",
                SOURCE,
            );
        }
        Some(_) => {
            let index = sq_doorbell::wqe_index.get(doorbell) as u16;
            let blocks = sq_doorbell::ds.get(doorbell).div_ceil(4).max(1) as u16;
            let end = index.wrapping_add(blocks);
            let posted = match by {
                Register::WithRecord => Posted::Record,
                Register::WithoutRecord => Posted::To(end),
                Register::Copy => Posted::Copy(end),
            };
            requester::rung(device, qpn, index, posted);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_halves_make_a_doorbell() {
        let mut halves = Halves::default();
        assert_eq!(join(&mut halves, 0x800, &[1, 2, 3, 4]), None);
        assert_eq!(
            join(&mut halves, 0x804, &[5, 6, 7, 8]),
            Some([1, 2, 3, 4, 5, 6, 7, 8])
        );
        assert_eq!(
            join(&mut halves, 0x804, &[5, 6, 7, 8]),
            Some([0, 0, 0, 0, 5, 6, 7, 8]),
            "the first half is used once"
        );
        assert_eq!(join(&mut halves, 0x800, &[1, 2, 3, 4]), None);
        assert_eq!(
            join(&mut halves, 0x904, &[5, 6, 7, 8]),
            Some([0, 0, 0, 0, 5, 6, 7, 8]),
            "halves of one register"
        );
        assert_eq!(
            join(&mut halves, 0x800, &[9; 64]),
            Some([9; 8]),
            "the head of a BlueFlame copy"
        );
        assert_eq!(join(&mut halves, 0x800, &[9; 2]), None);
    }
}
