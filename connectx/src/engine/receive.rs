// SPDX-License-Identifier: MIT OR Apache-2.0
//! Packets from the wire: which queue pair they are for, and to which half of it they go.

use std::time::Instant;

use super::lent::Data;
use super::requester::{self, Budget};
use super::responder;
use super::{answers, blueflame, completing, dc, pace};
use crate::ifc::context::qpc;
use crate::objects::device::Device;
use crate::objects::qp::{Qp, Service, State};
use crate::wire::packet::{Kind, Packet, Transport};
use crate::wire::port::PortState;

/// Queue pair number of multicast packets.
const MULTICAST_QPN: u32 = 0xff_ffff;

/// Queue pairs that a packet to one of the special numbers is for.
fn targets(device: &Device, packet: &Packet) -> Vec<u32> {
    let special = |service| {
        device
            .qps
            .iter()
            .find(|(_, qp)| qp.service == service)
            .map(|(n, _)| n)
            .into_iter()
            .collect()
    };
    match packet.qpn {
        0 => special(Service::Smi),
        1 => special(Service::Gsi),
        MULTICAST_QPN => {
            let Some(grh) = &packet.grh else {
                return Vec::new();
            };
            device
                .multicast
                .iter()
                .filter(|(gid, _)| *gid == grh.destination)
                .map(|(_, qpn)| *qpn)
                .collect()
        }
        _ => Vec::new(),
    }
}

/// Whether a queue pair takes a packet. What it does not take vanishes, as on a wire.
fn takes(device: &Device, qp: &Qp, packet: &Packet) -> bool {
    let transport = match qp.service {
        Service::Rc => Transport::Rc,
        Service::Uc => Transport::Uc,
        Service::Xrc => Transport::Xrc,
        Service::Ud | Service::Smi | Service::Gsi => Transport::Ud,
        Service::Dci | Service::Dcr => Transport::Dc,
        Service::RegUmr | Service::Sq | Service::Dct => return false,
    };
    // A datagram's sender may refuse what comes back to it from a multicast group.
    let own = packet.qpn == MULTICAST_QPN
        && packet.source_lid == device.port.lid
        && packet.deth.is_some_and(|deth| deth.source_qpn == qp.number);
    if own && qpc::block_lb_mc.is_set(&qp.context) {
        return false;
    }
    // A connection takes packets from its own peer only (IBA 9.6.1.5).
    let from_peer = match transport {
        Transport::Ud => true,
        Transport::Dc => dc::is_peer(qp, packet),
        _ => packet.source_lid == qp.decoded.remote_lid,
    };
    let pkey = device.port.pkey(usize::from(qp.decoded.pkey_index));
    transport == packet.transport
        && from_peer
        && qp.state.answers()
        && packet.pkey & 0x7fff == pkey & 0x7fff
}

/// A packet has arrived at the port.
pub fn packet(device: &mut Device, packet: &Packet, data: Data<'_>, now: Instant) {
    if device.port.state != PortState::Active {
        device.counters.packets_dropped += 1;
        return;
    }
    if packet.transport == Transport::Dc && !packet.is_answer() {
        match dc::responder(device, packet) {
            Some(number) => arrive(device, number, packet, data, now),
            None => device.counters.packets_dropped += u64::from(packet.span),
        }
        return;
    }
    if packet.qpn > 1 && packet.qpn != MULTICAST_QPN {
        return arrive(device, packet.qpn, packet, data, now);
    }
    for qpn in targets(device, packet) {
        arrive(device, qpn, packet, data, now);
    }
}

/// A packet has arrived for a queue pair.
fn arrive(device: &mut Device, qpn: u32, packet: &Packet, data: Data<'_>, now: Instant) {
    let Some(mut qp) = device.qps.borrow_out(qpn) else {
        device.counters.packets_dropped += 1;
        return;
    };
    if takes(device, &qp, packet) {
        device.counters.packets_received += u64::from(packet.span);
        device.counters.bytes_received += packet.payload.len() as u64;
        match packet.kind {
            Kind::ReadResponse { .. } | Kind::AtomicResponse { .. } | Kind::Acknowledge(_) => {
                answers::answer(device, &mut qp, packet, data, now);
            }
            _ => responder::request(device, &mut qp, packet, data),
        }
    } else {
        device.counters.packets_dropped += 1;
    }
    device.qps.put_back(qpn, qp);
    device.schedule(qpn);
}

/// Runs both halves of a queue pair for a while. Returns whether there is more to do at once.
pub fn run(device: &mut Device, qpn: u32, budget: &mut Budget, now: Instant) -> bool {
    let Some(mut qp) = device.qps.borrow_out(qpn) else {
        return false;
    };
    qp.scheduled = false;
    if qp.limits.requester_group != 0 {
        pace::share(device, qp.limits, budget);
    }
    let more = responder::run(device, &mut qp, budget, now);
    if matches!(qp.state, State::Error | State::SendQueueError) {
        completing::flush_send(device, &mut qp);
    }
    let more = requester::run(device, &mut qp, budget, now) || more;
    device.qps.put_back(qpn, qp);
    more
}

/// The deadline of a queue pair may have come.
pub fn timer(device: &mut Device, qpn: u32, now: Instant) {
    blueflame::expire(device, now);
    let Some(mut qp) = device.qps.borrow_out(qpn) else {
        return;
    };
    let record = qp.requester.record_at.take_if(|at| *at <= now);
    answers::timer(device, &mut qp, now);
    device.qps.put_back(qpn, qp);
    device.schedule(qpn);
    if record.is_some() {
        requester::look_at_record(device, qpn);
    }
}
