// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dynamic connections: an initiator connects to the target that its next WQE names, once what it has sent to the one
//! before is answered. The target makes a responder of its own for it.
//!
//! An initiator with streams goes on when one of them fails: what is posted to that stream is flushed until the stream is
//! reset, the others are not touched. All streams share one connection, so they wait for each other.

use std::mem;

use super::completion::{Failure, vendor};
use super::requester::Flight;
use super::wqe::Wqe;
use super::{event, receive_queue};
use crate::cmd;
use crate::engine::responder::Responder;
use crate::ifc::event::kind;
use crate::ifc::wqe::syndrome;
use crate::objects::dc::{Dc, Destination, Peer, TargetState};
use crate::objects::device::Device;
use crate::objects::qp::{Qp, Service, State, WorkQueues};
use crate::wire::packet::{Dceth, Kind, Nak, Packet, Transport, Verdict, psn};
use crate::wire::payload::Payload;

/// Most responders of a target. The one that was connected first makes room when it is between two messages.
const MAX_RESPONDERS: usize = 1024;

/// Whether the flight at the cursor can begin: the queue pair is connected to its destination, or can be now.
pub(super) fn reaches(device: &mut Device, qp: &mut Qp) -> bool {
    let Dc::Initiator(initiator) = &mut qp.dc else {
        return true;
    };
    let requester = &qp.requester;
    let flight = requester.flights.get(requester.cursor);
    let Some(av) = flight.and_then(|flight| flight.wqe.destination) else {
        return true;
    };
    let to = Destination {
        lid: av.lid,
        dctn: av.qpn,
        access_key: av.access_key,
    };
    if initiator.connection.is_some_and(|(now, _)| now == to) {
        return true;
    }
    // Everything before it has ended if it is the first.
    if requester.cursor > 0 {
        return false;
    }
    device.dc_sessions += 1;
    initiator.connection = Some((to, device.dc_sessions));
    true
}

/// Header of an initiator's packets.
pub(super) fn header(qp: &Qp) -> Option<Dceth> {
    match &qp.dc {
        Dc::Initiator(initiator) => initiator.connection.map(|(to, session)| Dceth {
            initiator: qp.number,
            session,
            access_key: to.access_key,
        }),
        _ => None,
    }
}

/// Header of a responder's packets.
pub(super) fn answer_header(qp: &Qp) -> Option<Dceth> {
    match &qp.dc {
        Dc::Responder(peer) => Some(Dceth {
            initiator: peer.qpn,
            session: peer.session,
            access_key: 0,
        }),
        _ => None,
    }
}

/// Whether a packet is of the connection that a queue pair has now.
pub(super) fn is_peer(qp: &Qp, packet: &Packet) -> bool {
    let session = packet.dceth.map(|dceth| dceth.session);
    match &qp.dc {
        Dc::Initiator(initiator) => initiator
            .connection
            .is_some_and(|(to, now)| packet.source_lid == to.lid && session == Some(now)),
        Dc::Responder(peer) => packet.source_lid == peer.lid && session == Some(peer.session),
        _ => false,
    }
}

/// Why a WQE of a stream in error is not executed.
pub(super) fn flushes(qp: &Qp, wqe: &Wqe) -> Option<Failure> {
    match &qp.dc {
        Dc::Initiator(initiator) if initiator.errored.contains(&wqe.stream) => {
            Some(Failure::new(syndrome::WR_FLUSH, vendor::SEND_FLUSH))
        }
        _ => None,
    }
}

/// Whether a queue pair goes on after a WQE has failed: then only the WQE's stream is in error. What has been sent behind
/// it is sent again, in a new connection, since the target has taken nothing that came after what it refused.
pub(super) fn survives(
    device: &mut Device,
    qp: &mut Qp,
    failed: &Flight,
    failure: Failure,
) -> bool {
    let Dc::Initiator(initiator) = &mut qp.dc else {
        return false;
    };
    let Some(log_errored) = initiator.log_errored else {
        return false;
    };
    let stream = failed.wqe.stream;
    if failure.syndrome == syndrome::WR_FLUSH && initiator.errored.contains(&stream) {
        device.counters.flush_cqes += 1;
    } else {
        if !initiator.errored.contains(&stream) {
            initiator.errored.push(stream);
        }
        if initiator.errored.len() >= 1 << log_errored {
            return false;
        }
    }
    initiator.connection = None;
    let requester = &mut qp.requester;
    (requester.cursor, requester.sent) = (0, 0);
    requester.deadline = None;
    requester.pause_until = None;
    requester.retries_left = qp.decoded.retry_count;
    requester.rnr_retries_left = qp.decoded.rnr_retry;
    requester.next_psn = requester.unacked;
    for flight in &mut requester.flights {
        flight.failure = flight.failure.or_else(|| {
            let flushed = initiator.errored.contains(&flight.wqe.stream);
            flushed.then(|| Failure::new(syndrome::WR_FLUSH, vendor::SEND_FLUSH))
        });
        if flight.failure.is_some() {
            flight.packets = 0;
        }
        flight.received = 0;
        flight.first_psn = requester.next_psn;
        requester.next_psn = psn::add(requester.next_psn, flight.packets);
    }
    true
}

/// A stream in error works again. `false` if it is not in error.
pub fn reset_stream(qp: &mut Qp, stream: u16) -> bool {
    let Dc::Initiator(initiator) = &mut qp.dc else {
        return false;
    };
    let before = initiator.errored.len();
    initiator.errored.retain(|errored| *errored != stream);
    initiator.errored.len() < before
}

/// The responder that a request is for: the one of its connection, or a new one if it begins a connection.
pub(super) fn responder(device: &mut Device, packet: &Packet) -> Option<u32> {
    let dceth = packet.dceth?;
    let dct = device.qps.get(packet.qpn)?;
    let Dc::Target(target) = &dct.dc else {
        return None;
    };
    let pkey = device.port.pkey(usize::from(dct.decoded.pkey_index));
    if target.state != TargetState::Active || packet.pkey & 0x7fff != pkey & 0x7fff {
        return None;
    }
    let access_key = target.access_key;
    let known = target.responders.iter().find_map(|number| {
        let qp = device.qps.get(*number)?;
        match &qp.dc {
            Dc::Responder(peer) if (peer.lid, peer.qpn) == (packet.source_lid, dceth.initiator) => {
                Some((*number, peer.session))
            }
            _ => None,
        }
    });
    if let Some((number, session)) = known {
        if session == dceth.session {
            return Some(number);
        }
        // What is left of a connection that has ended.
        if dceth.session < session {
            return None;
        }
    }
    if !packet.begins() {
        return None;
    }
    if dceth.access_key != access_key {
        violated(device, packet, dceth);
        return None;
    }
    let peer = Peer {
        dctn: packet.qpn,
        lid: packet.source_lid,
        qpn: dceth.initiator,
        session: dceth.session,
    };
    match known {
        Some((number, _)) => {
            close(device, number);
            open(device, number, peer, packet);
            let target = target_of(device, packet.qpn)?;
            target.retain(|n| *n != number);
            target.push(number);
            Some(number)
        }
        None => accept(device, peer, packet),
    }
}

/// Responders of a target.
fn target_of(device: &mut Device, dctn: u32) -> Option<&mut Vec<u32>> {
    match &mut device.qps.get_mut(dctn)?.dc {
        Dc::Target(target) => Some(&mut target.responders),
        _ => None,
    }
}

/// Makes a responder.
fn accept(device: &mut Device, peer: Peer, packet: &Packet) -> Option<u32> {
    let responders = target_of(device, peer.dctn)?;
    if responders.len() >= MAX_RESPONDERS {
        let all = responders.clone();
        let idle = |n: &u32| device.qps.get(*n).is_none_or(|qp| qp.responder.is_idle());
        let oldest = all.into_iter().find(idle)?;
        target_of(device, peer.dctn)?.retain(|n| *n != oldest);
        end(device, oldest);
    }
    let dct = device.qps.get(peer.dctn)?;
    let (context, decoded) = (dct.context.clone(), dct.decoded.clone());
    let queues = WorkQueues::geometry(&context).0;
    let dcr = Qp {
        dc: Dc::Responder(peer),
        limits: dct.limits,
        ..Qp::new(dct.uid, Service::Dcr, context, decoded, queues)
    };
    let number = cmd::insert_qp(device, dcr)?;
    open(device, number, peer, packet);
    target_of(device, peer.dctn)?.push(number);
    Some(number)
}

/// Begins a connection with its first packet.
fn open(device: &mut Device, number: u32, peer: Peer, packet: &Packet) {
    if let Some(qp) = device.qps.get_mut(number) {
        qp.dc = Dc::Responder(peer);
        qp.state = State::ReadyToReceive;
        qp.responder = Responder::default();
        qp.responder.expected_psn = packet.psn;
        qp.decoded.remote_lid = peer.lid;
        qp.decoded.remote_qpn = peer.qpn;
        qp.decoded.sl = packet.sl;
    }
}

/// Ends a connection: the receive WQE of a message that has only begun is given back with a flush.
fn close(device: &mut Device, number: u32) {
    if let Some(mut qp) = device.qps.borrow_out(number) {
        receive_queue::flush(device, &mut qp);
        device.page_faults.forget(&mut qp);
        qp.state = State::Reset;
        device.qps.put_back(number, qp);
    }
}

/// Ends a responder.
fn end(device: &mut Device, number: u32) {
    close(device, number);
    cmd::remove_qp(device, number);
}

/// A target takes no more: its connections end. It is drained at once, since none of them is waited for.
pub fn drain(device: &mut Device, dctn: u32) {
    let Some(Dc::Target(target)) = device.qps.get_mut(dctn).map(|qp| &mut qp.dc) else {
        return;
    };
    target.state = TargetState::Drained;
    for number in mem::take(&mut target.responders) {
        end(device, number);
    }
    event::target(device, kind::DCT_DRAINED, dctn);
}

/// An initiator has another key than the target's.
fn violated(device: &mut Device, packet: &Packet, dceth: Dceth) {
    let dctn = packet.qpn;
    let rule = "an initiator has the target's DC access key";
    let object = format!("dct {dctn:#x} initiator {:#x}", dceth.initiator);
    device.refuse(object, "dc_access_key", dceth.access_key, rule, "PRM DCTC");
    device.counters.access_naks += 1;
    let Some(dct) = device.qps.get_mut(dctn) else {
        return;
    };
    let (sl, pkey_index) = (packet.sl, dct.decoded.pkey_index);
    let Dc::Target(target) = &mut dct.dc else {
        return;
    };
    target.violations = target.violations.saturating_add(1);
    let armed = mem::take(&mut target.armed);
    let answer = Packet {
        source_lid: device.port.lid,
        destination_lid: packet.source_lid,
        sl,
        grh: None,
        transport: Transport::Dc,
        pkey: device.port.pkey(usize::from(pkey_index)),
        qpn: dceth.initiator,
        psn: packet.psn,
        span: 1,
        ack_request: false,
        solicited: false,
        deth: None,
        dceth: Some(Dceth {
            access_key: 0,
            ..dceth
        }),
        xrc_srqn: None,
        kind: Kind::Acknowledge(Verdict::Nak(Nak::RemoteAccess)),
        payload: Payload::NONE,
    };
    device.outbox.push_back(answer);
    device.counters.packets_sent += 1;
    if armed {
        event::target(device, kind::DCT_KEY_VIOLATION, dctn);
    }
}
