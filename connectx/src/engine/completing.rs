// SPDX-License-Identifier: MIT OR Apache-2.0
//! How send WQEs end: in order and well, or with an error that flushes all that is posted.

use std::time::Instant;

use super::completion::{self, Completion, Failure, Scattered, error_opcode, vendor};
use super::requester::placeholder;
use super::wqe::{self, Fetched, Operation, Wqe};
use super::{compression, dc, event, receive_queue};
use crate::ifc::event::kind;
use crate::ifc::wqe::{cqe_opcode, dbr, syndrome};
use crate::objects::device::Device;
use crate::objects::qp::{Qp, ReceiveFrom, Service, State};

/// Puts a queue pair in error because of something that no WQE can report.
pub fn fatal(device: &mut Device, qpn: u32, event_type: u8) {
    to_error(device, qpn);
    event::queue_pair(device, event_type, qpn);
}

/// Completes WQEs at the head, in order. One that fails puts the queue pair in error.
pub(super) fn complete(device: &mut Device, qp: &mut Qp) {
    while let Some(front) = qp.requester.flights.front() {
        if let Some(failure) = front.failure {
            let Some(flight) = qp.requester.flights.pop_front() else {
                return;
            };
            report(device, qp, &flight.wqe, Some(failure), None);
            if dc::survives(device, qp, &flight, failure) {
                continue;
            }
            return if qp.service == Service::Uc || qp.service.is_datagram() {
                stop_sending(device, qp);
            } else {
                enter_error(device, qp, None);
            };
        }
        if qp.requester.cursor == 0 || !front.is_done(qp.requester.unacked) {
            return;
        }
        let Some(flight) = qp.requester.flights.pop_front() else {
            return;
        };
        qp.requester.cursor -= 1;
        if !report(device, qp, &flight.wqe, None, flight.scattered) {
            // Its completion queue is broken: nothing can be told any more.
            return enter_error(device, qp, Some(kind::WQ_CATAS_ERROR));
        }
    }
    if qp.requester.draining && qp.state == State::ReadyToSend {
        qp.requester.draining = false;
        qp.state = State::SendQueueDrained;
        qp.requester.deadline = None;
        event::queue_pair(device, kind::SQ_DRAINED, qp.number);
    }
}

/// Writes the completion of a send WQE, if it is to have one. `false` if its completion queue has failed.
fn report(
    device: &mut Device,
    qp: &Qp,
    wqe: &Wqe,
    failure: Option<Failure>,
    scattered: Option<Scattered>,
) -> bool {
    if failure.is_none() && wqe.completion < 2 {
        return true;
    }
    let opcode = if failure.is_some() {
        error_opcode(true)
    } else {
        cqe_opcode::REQ
    };
    let mut entry = Completion::new(opcode, qp.number, qp.decoded.user_index, wqe.index);
    entry.send_opcode = wqe.opcode;
    entry.failure = failure;
    entry.scattered = scattered;
    entry.solicited = wqe.completion == 3;
    if matches!(
        wqe.operation,
        Operation::Read { .. } | Operation::Atomic { .. }
    ) {
        entry.byte_count = wqe.len;
    }
    completion::post(device, qp.decoded.cqn_send, &entry)
}

/// What cannot be sent by a service without acknowledgements is nothing to the receive queue (IBA 10.3.1.5, SQE).
fn stop_sending(device: &mut Device, qp: &mut Qp) {
    qp.state = State::SendQueueError;
    device.page_faults.forget(qp);
    flush_send(device, qp);
}

/// Puts a queue pair in error, by command or because of itself.
pub fn to_error(device: &mut Device, qpn: u32) {
    let Some(mut qp) = device.qps.borrow_out(qpn) else {
        return;
    };
    enter_error(device, &mut qp, None);
    device.qps.put_back(qpn, qp);
}

/// Enters the error state: everything posted is flushed, and what will be posted too.
pub fn enter_error(device: &mut Device, qp: &mut Qp, event_type: Option<u8>) {
    let was = std::mem::replace(&mut qp.state, State::Error);
    if was == State::Error || was == State::Reset {
        return;
    }
    qp.requester.deadline = None;
    qp.requester.pause_until = None;
    device.page_faults.forget(qp);
    // What has arrived is there before an event that says that nothing more will.
    compression::close_all(device);
    flush_send(device, qp);
    receive_queue::flush(device, qp);
    if qp.service == Service::Dcr {
        // Only the connection has ended; its target goes on.
        return;
    }
    if let Some(event_type) = event_type {
        event::queue_pair(device, event_type, qp.number);
    }
    let receives = !matches!(qp.service, Service::Xrc | Service::Dci);
    if matches!(qp.decoded.receive, ReceiveFrom::Shared(_)) && receives {
        event::queue_pair(device, kind::SRQ_LAST_WQE, qp.number);
    }
    receive_queue::watch_in_error(device, qp, Instant::now());
}

/// Completes every posted send WQE with a flush.
pub fn flush_send(device: &mut Device, qp: &mut Qp) {
    let failure = Some(Failure::new(syndrome::WR_FLUSH, vendor::SEND_FLUSH));
    while let Some(flight) = qp.requester.flights.pop_front() {
        device.counters.flush_cqes += 1;
        report(device, qp, &flight.wqe, failure, None);
    }
    qp.requester.cursor = 0;
    qp.requester.sent = 0;
    qp.requester.draining = false;
    qp.requester.window.clear();
    if qp.queues.log_send.is_some() && qp.decoded.send_record {
        if let Ok(word) = device.host.read_be32(qp.decoded.dbr + dbr::SEND) {
            qp.requester.producer = word as u16;
        }
    }
    let most = qp.queues.log_send.map_or(0, |log| 1u32 << log);
    for _ in 0..most {
        let available = qp.requester.producer.wrapping_sub(qp.requester.fetched);
        if available == 0 || u32::from(available) > most {
            return;
        }
        let fetched = qp.requester.fetched;
        let wqe = match wqe::fetch(&device.host, qp, fetched, available) {
            Fetched::Wqe(wqe) => wqe,
            Fetched::Malformed(wrong) => placeholder(wrong.index, wrong.blocks, wrong.opcode),
            Fetched::Unreachable => return,
        };
        qp.requester.fetched = qp.requester.fetched.wrapping_add(wqe.blocks);
        device.counters.flush_cqes += 1;
        report(device, qp, &wqe, failure, None);
    }
}
