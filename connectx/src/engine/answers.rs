// SPDX-License-Identifier: MIT OR Apache-2.0
//! What comes back to the sending half, or does not come in time.

use std::time::Instant;

use super::completing::complete;
use super::completion::{Failure, Scattered, vendor};
use super::lent::Data;
use super::memory::Denied;
use super::requester::{Flight, accessor, local_failure, told};
use super::timer::{ack_timeout, rnr_delay};
use super::{atomic, odp, receive_queue};
use crate::ifc::wqe::{completion, syndrome};
use crate::objects::device::Device;
use crate::objects::qp::{Qp, State};
use crate::wire::packet::{Kind, Nak, Packet, Position, Verdict, psn};

/// `rnr_retry` that means forever.
const FOREVER: u8 = 7;

/// Starts the clock for an answer, if it is not running.
pub(super) fn expect_answer(device: &mut Device, qp: &mut Qp, now: Instant) {
    if qp.requester.deadline.is_none() {
        if let Some(timeout) = ack_timeout(qp.decoded.ack_timeout) {
            let deadline = now + timeout;
            qp.requester.deadline = Some(deadline);
            look_at(device, qp, deadline);
        }
    }
}

/// Asks the timer for a look at a time, unless it looks earlier anyway.
pub(super) fn look_at(device: &mut Device, qp: &mut Qp, when: Instant) {
    if qp.requester.timer_at.is_none_or(|at| at > when) {
        let instead = qp.requester.timer_at.replace(when);
        device.timers.add(when, qp.number, instead);
    }
}

/// The timer looks at a queue pair.
pub fn timer(device: &mut Device, qp: &mut Qp, now: Instant) {
    // A look for the other half is as good as the one that this half wanted.
    if let Some(wanted) = qp.requester.timer_at.take() {
        device.timers.remove(wanted, qp.number);
    }
    if qp.state == State::Error {
        receive_queue::poll_in_error(device, qp, now);
        return;
    }
    if let Some(until) = qp.requester.pause_until {
        if until <= now {
            qp.requester.pause_until = None;
            qp.requester.rewind();
        }
    }
    if qp
        .requester
        .deadline
        .is_some_and(|deadline| deadline <= now)
    {
        qp.requester.deadline = None;
        // Who waits for a page sends everything again when it is there.
        if qp.requester.page_fault.is_none() {
            retry(device, qp);
        }
    }
    let requester = &qp.requester;
    let wanted = [
        requester.pause_until,
        requester.deadline,
        requester.record_at,
    ];
    let next = wanted.into_iter().flatten().min();
    if let Some(next) = next {
        look_at(device, qp, next);
    }
}

/// Sends again from the oldest packet without an answer, or gives up.
fn retry(device: &mut Device, qp: &mut Qp) {
    if qp.requester.flights.is_empty() || qp.state != State::ReadyToSend {
        return;
    }
    if qp.requester.retries_left == 0 {
        let failure = Failure::new(syndrome::TRANSPORT_RETRY_EXC, vendor::RETRY);
        return fail_oldest(device, qp, failure);
    }
    qp.requester.retries_left -= 1;
    device.counters.retransmissions += 1;
    qp.requester.rewind();
}

/// The WQE with the oldest packet without an answer fails.
fn fail_oldest(device: &mut Device, qp: &mut Qp, failure: Failure) {
    qp.requester.rewind();
    let cursor = qp.requester.cursor;
    if let Some(flight) = qp.requester.flights.get_mut(cursor) {
        flight.failure.get_or_insert(failure);
    }
    complete(device, qp);
}

/// An answer has come.
pub fn answer(device: &mut Device, qp: &mut Qp, packet: &Packet, data: Data<'_>, now: Instant) {
    let requester = &mut qp.requester;
    // Only what is in flight can be answered.
    let ahead = psn::distance(packet.psn, requester.unacked);
    let behind_next = psn::distance(packet.psn, requester.next_psn) < 0;
    match packet.kind {
        Kind::Acknowledge(Verdict::Ack) if ahead >= 0 && behind_next => {
            acknowledge(qp, psn::add(packet.psn, 1))
        }
        Kind::Acknowledge(Verdict::ReceiverNotReady(code)) if ahead >= 0 && behind_next => {
            acknowledge(qp, packet.psn);
            receiver_not_ready(device, qp, code, now);
        }
        Kind::Acknowledge(Verdict::Nak(nak)) if ahead >= 0 && behind_next => {
            acknowledge(qp, packet.psn);
            refused(device, qp, nak);
        }
        Kind::ReadResponse { position } => read_response(device, qp, packet, position, data),
        Kind::AtomicResponse { original } => atomic_response(device, qp, packet.psn, original),
        _ => {}
    }
    complete(device, qp);
    let requester = &mut qp.requester;
    requester.deadline = None;
    let outstanding = requester.cursor > 0 || requester.sent > 0;
    if qp.state == State::ReadyToSend && outstanding && requester.pause_until.is_none() {
        expect_answer(device, qp, now);
    }
}

/// Everything before `unacked` has reached the other side.
fn acknowledge(qp: &mut Qp, unacked: u32) {
    let requester = &mut qp.requester;
    let mut limit = unacked;
    for flight in requester.flights.iter().filter(|f| f.awaits_data()) {
        let reached = psn::add(flight.first_psn, flight.received);
        if flight.received < flight.packets {
            // An acknowledgement cannot stand for the data of a READ before it.
            if psn::distance(limit, reached) > 0 {
                limit = reached;
            }
            break;
        }
        // Its data came before that of a READ ahead of it, and nobody will say so again.
        if psn::distance(limit, flight.first_psn) >= 0 && psn::distance(reached, limit) > 0 {
            limit = reached;
        }
    }
    if psn::distance(limit, requester.unacked) > 0 {
        requester.unacked = limit;
        requester.retries_left = qp.decoded.retry_count;
        requester.rnr_retries_left = qp.decoded.rnr_retry;
    }
}

fn receiver_not_ready(device: &mut Device, qp: &mut Qp, code: u8, now: Instant) {
    device.counters.rnr_naks += 1;
    if qp.decoded.rnr_retry != FOREVER {
        if qp.requester.rnr_retries_left == 0 {
            return fail_oldest(
                device,
                qp,
                Failure::new(syndrome::RNR_RETRY_EXC, vendor::RNR_RETRY),
            );
        }
        qp.requester.rnr_retries_left -= 1;
    }
    let until = now + rnr_delay(code);
    qp.requester.pause_until = Some(until);
    look_at(device, qp, until);
}

fn refused(device: &mut Device, qp: &mut Qp, nak: Nak) {
    let failure = match nak {
        Nak::Sequence => return retry(device, qp),
        Nak::InvalidRequest => Failure::new(syndrome::REMOTE_INVAL_REQ, vendor::REMOTE_INVALID),
        Nak::RemoteAccess => Failure::new(syndrome::REMOTE_ACCESS, vendor::REMOTE_ACCESS),
        Nak::RemoteOperation => Failure::new(syndrome::REMOTE_OP, vendor::REMOTE_OPERATION),
    };
    fail_oldest(device, qp, failure);
}

/// The flight whose next response packet has a sequence number.
fn awaiting(qp: &Qp, psn_: u32) -> Option<usize> {
    qp.requester.flights.iter().position(|f| {
        f.awaits_data() && f.received < f.packets && psn::add(f.first_psn, f.received) == psn_
    })
}

fn read_response(
    device: &mut Device,
    qp: &mut Qp,
    packet: &Packet,
    position: Position,
    data: Data<'_>,
) {
    let Some(index) = awaiting(qp, packet.psn) else {
        return;
    };
    // A response also says that everything before it has arrived.
    acknowledge(qp, packet.psn);
    let Some(flight) = qp.requester.flights.get(index) else {
        return;
    };
    let offset = flight.received as usize * qp.decoded.mtu;
    let expected = (flight.wqe.len as usize)
        .saturating_sub(offset)
        .min(qp.decoded.mtu * packet.span as usize);
    let ends = flight.received + packet.span == flight.packets;
    let result = if data.len() != expected || position.last != ends {
        Err(Failure::new(syndrome::BAD_RESP, vendor::REMOTE_INVALID))
    } else {
        let half = odp::Half::Requester { flight: flight.id };
        match scatter(device, qp, flight, offset, data) {
            // As if it had not come: a NAK comes in its place.
            Err(Denied::Sender) => return,
            Err(denied) if odp::wait(device, qp, half, denied, 0) => return,
            result => result.map_err(local_failure),
        }
    };
    told(device, qp);
    let Some(flight) = qp.requester.flights.get_mut(index) else {
        return;
    };
    match result {
        Ok(scattered) => {
            flight.scattered = scattered;
            flight.received += packet.span;
            acknowledge(qp, packet.end_psn());
        }
        Err(failure) => flight.failure = Some(failure),
    }
}

fn atomic_response(device: &mut Device, qp: &mut Qp, psn_: u32, original: u64) {
    let Some(index) = awaiting(qp, psn_) else {
        return;
    };
    acknowledge(qp, psn_);
    let Some(flight) = qp.requester.flights.get(index) else {
        return;
    };
    let len = flight.wqe.len;
    let bytes = atomic::to_bytes(original, len, device.caps.atomic_host_order);
    let bytes = bytes.get(..len as usize).unwrap_or(&bytes);
    let half = odp::Half::Requester { flight: flight.id };
    let result = match scatter(device, qp, flight, 0, bytes.into()) {
        Err(denied) if odp::wait(device, qp, half, denied, 0) => return,
        result => result.map_err(local_failure),
    };
    told(device, qp);
    let Some(flight) = qp.requester.flights.get_mut(index) else {
        return;
    };
    match result {
        Ok(scattered) => {
            flight.scattered = scattered;
            flight.received = 1;
            acknowledge(qp, psn::add(psn_, 1));
        }
        Err(failure) => flight.failure = Some(failure),
    }
}

/// Writes what a READ or atomic brought into the WQE's local memory, or gives what its completion is to carry: without one
/// of its own a WQE has only memory.
fn scatter(
    device: &Device,
    qp: &Qp,
    flight: &Flight,
    offset: usize,
    data: Data<'_>,
) -> Result<Option<Scattered>, Denied> {
    if flight.wqe.completion >= completion::ALWAYS && flight.packets == 1 {
        let (cqn, most) = (qp.decoded.cqn_send, qp.decoded.scatter_request);
        if let Some(scattered) = Scattered::new(device, cqn, most, data) {
            return Ok(Some(scattered));
        }
    }
    receive_queue::scatter(device, accessor(qp), &flight.wqe.gather, offset, data).map(|()| None)
}
