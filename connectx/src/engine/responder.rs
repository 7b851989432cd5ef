// SPDX-License-Identifier: MIT OR Apache-2.0
//! The receiving half of a queue pair: requests from the wire, and answers.

use std::collections::VecDeque;
use std::time::Instant;

use super::completion::{Completion, Failure, Scattered, vendor};
use super::lent::Data;
use super::memory::{self, Accessor, Denied, Purpose, Range};
use super::odp::Half;
use super::receive_queue::{Receive, deliver, fail_receive, scatter, take_receive};
use super::requester::{Budget, IDEAL_PACKET, accessor, is_ideal};
use super::{answers, atomic, completing, datagram, dc, keys, odp, pace, signature};
use crate::ifc::event::kind;
use crate::ifc::wqe::{cqe_opcode, syndrome};
use crate::objects::device::Device;
use crate::objects::qp::{Qp, Service};
use crate::wire::packet::{
    Atomic, Kind, Nak, Packet, Position, Reth, Rider, Transport, Verdict, psn,
};
use crate::wire::payload::{Lender, Payload};

/// Answers that may wait.
const MAX_JOBS: usize = 64;

/// A message that has begun.
#[derive(Debug)]
enum Incoming {
    Send {
        receive: Receive,
        received: u32,
    },
    Write {
        reth: Reth,
        received: u32,
        /// Taken for immediate data whose packet did not come through.
        receive: Option<Receive>,
    },
}

/// An answer that has to wait for those before it.
#[derive(Debug)]
enum Job {
    /// Response packets of a READ, of which `sent` are out.
    Read {
        psn: u32,
        reth: Reth,
        sent: u32,
        who: Accessor,
        /// It was asked for before.
        again: bool,
    },
    /// A single packet.
    Packet { psn: u32, kind: Kind },
}

/// State of the receiving half.
#[derive(Debug, Default)]
pub struct Responder {
    /// Sequence number of the next new request packet.
    pub expected_psn: u32,
    /// Receive WQEs taken from the queue pair's own queue.
    pub consumed: u32,
    incoming: Option<Incoming>,
    /// Of a message that was cut short: the next one gets it.
    pub(super) spare: Option<Receive>,
    /// Newest sequence number to be acknowledged. One acknowledgement stands for all that comes before the wire is empty.
    ack_due: Option<u32>,
    /// A sequence error has been reported and the missing packet not come yet.
    sequence_reported: bool,
    jobs: VecDeque<Job>,
    /// A refusal that is sent after the answers before it: until then nothing more is taken.
    refused: Option<Nak>,
    /// Results of the last atomics, for requests that come again.
    atomics: VecDeque<(u32, u64)>,
    /// Token of the page fault that it waits for.
    pub(super) page_fault: Option<u64>,
    /// Key and address of the page that the driver could not provide.
    pub(super) unresolved: Option<(u32, u64)>,
    /// Looks at the receive queue in error that found nothing, and the next one.
    pub(super) idle_polls: u32,
    pub(super) next_poll: Option<Instant>,
}

impl Responder {
    /// Gives up what has begun. Gives the receive WQE that was in use.
    pub(super) fn abandon(&mut self) -> Option<Receive> {
        self.jobs.clear();
        self.cut_short();
        self.spare.take()
    }

    /// Ends a message that has begun. Its receive WQE is the next one's: a new one is only taken where none is to spare.
    fn cut_short(&mut self) {
        let (Some(Incoming::Send { receive, .. })
        | Some(Incoming::Write {
            receive: Some(receive),
            ..
        })) = self.incoming.take()
        else {
            return;
        };
        self.spare = Some(receive);
    }

    /// Whether it is between two messages.
    pub(super) fn is_idle(&self) -> bool {
        self.incoming.is_none() && self.jobs.is_empty() && self.ack_due.is_none()
    }

    /// READs that have not been answered. One that comes again takes the place of the first (IBA 9.7.5.1.3), and the
    /// requester does not count it twice.
    fn reads_in(&self) -> usize {
        let is_new = |job: &&Job| matches!(job, Job::Read { again: false, .. });
        self.jobs.iter().filter(is_new).count()
    }

    /// Whether answers are waiting to be sent.
    pub fn has_jobs(&self) -> bool {
        !self.jobs.is_empty()
    }
}

/// Number of a queue pair on the wire: the special ones are 0 and 1.
pub fn wire_qpn(qp: &Qp) -> u32 {
    match qp.service {
        Service::Smi => 0,
        Service::Gsi => 1,
        _ => qp.number,
    }
}

/// A request has come.
pub fn request(device: &mut Device, qp: &mut Qp, packet: &Packet, data: Data<'_>) {
    match packet.transport {
        Transport::Ud => datagram::receive(device, qp, packet, data),
        Transport::Uc => unreliable(device, qp, packet, data),
        Transport::Rc | Transport::Xrc | Transport::Dc => reliable(device, qp, packet, data),
    }
}

/// What comes of a request that is in sequence.
enum Outcome {
    /// Done; acknowledge when asked to.
    Done,
    /// No answer but a READ's or an atomic's own.
    Answered,
    /// Refused: the answer, and what it does to the queue pair.
    Refused(Verdict),
    /// The sender lost its data on the way: the message goes no further.
    Broken,
}

fn reliable(device: &mut Device, qp: &mut Qp, packet: &Packet, data: Data<'_>) {
    if qp.responder.refused.is_some() {
        return;
    }
    let distance = psn::distance(packet.psn, qp.responder.expected_psn);
    if distance > 0 {
        // One report for a gap; packets behind it are dropped (IBA 9.7.5.1.1).
        if !std::mem::replace(&mut qp.responder.sequence_reported, true) {
            let expected = qp.responder.expected_psn;
            reply(
                device,
                qp,
                expected,
                Kind::Acknowledge(Verdict::Nak(Nak::Sequence)),
            );
        }
        return;
    }
    if distance < 0 {
        if distance + packet.span as i32 > 0 {
            // It was several packets when the link was not ideal, of which some have come. The others are asked for.
            let expected = qp.responder.expected_psn;
            let nak = Kind::Acknowledge(Verdict::Nak(Nak::Sequence));
            return reply(device, qp, expected, nak);
        }
        return duplicate(device, qp, packet);
    }
    qp.responder.sequence_reported = false;
    match in_sequence(device, qp, packet, data) {
        Outcome::Done => {
            qp.responder.expected_psn = packet.end_psn();
            if packet.ack_request {
                let newest = psn::add(packet.psn, packet.span - 1);
                if qp.responder.ack_due.replace(newest).is_none() {
                    device.acks.push(qp.number);
                }
            }
        }
        Outcome::Answered | Outcome::Broken => {}
        Outcome::Refused(verdict) => {
            let waits = qp.responder.has_jobs();
            reply(device, qp, packet.psn, Kind::Acknowledge(verdict));
            match verdict {
                // What comes behind it is dropped without a word until it comes again (IBA 9.7.5.2.8).
                Verdict::ReceiverNotReady(_) => qp.responder.sequence_reported = true,
                Verdict::Nak(nak) if waits => qp.responder.refused = Some(nak),
                Verdict::Nak(nak) => refuse(device, qp, nak),
                Verdict::Ack => {}
            }
        }
    }
}

/// A refused request stops the queue pair (IBA 9.9.3, class C).
pub(super) fn refuse(device: &mut Device, qp: &mut Qp, nak: Nak) {
    device.counters.access_naks += 1;
    // Codes of the AETH syndrome (IBA table 46).
    let (code, rule) = match nak {
        Nak::Sequence => (0x60u8, "packets come in sequence"),
        Nak::InvalidRequest => (
            0x61,
            "a request is in its place, as long as it says, and of a kind that can be done",
        ),
        Nak::RemoteAccess => (0x62, "a request touches what queue pair and key permit"),
        Nak::RemoteOperation => (0x63, "the receive queue and its memory work"),
    };
    let object = format!("qp {:#x} request", qp.number);
    device.refuse(object, "nak", code, rule, "IBA 9.7.5.2");
    let event_type = match nak {
        Nak::RemoteAccess => Some(kind::WQ_ACCESS_ERROR),
        Nak::InvalidRequest => Some(kind::WQ_INVAL_REQ_ERROR),
        // The receive WQE's completion says it.
        Nak::RemoteOperation | Nak::Sequence => None,
    };
    qp.responder.jobs.clear();
    qp.responder.refused = None;
    completing::enter_error(device, qp, event_type);
}

/// A packet that has been seen: acknowledged again; READs and atomics are answered again.
fn duplicate(device: &mut Device, qp: &mut Qp, packet: &Packet) {
    match &packet.kind {
        Kind::ReadRequest(reth) => {
            // A peer that asks again and again for what is on its way gets it once.
            if qp.responder.jobs.len() >= MAX_JOBS {
                return;
            }
            let who = requester_of(device, qp, packet);
            send_ack(device, qp);
            qp.responder.jobs.push_back(Job::Read {
                psn: packet.psn,
                reth: *reth,
                sent: 0,
                who,
                again: true,
            });
        }
        Kind::AtomicRequest { .. } => {
            let result = qp
                .responder
                .atomics
                .iter()
                .find(|(psn, _)| *psn == packet.psn)
                .map(|(_, original)| *original);
            if let Some(original) = result {
                reply(device, qp, packet.psn, Kind::AtomicResponse { original });
            }
        }
        _ => {
            let newest = psn::add(qp.responder.expected_psn, psn::MASK);
            reply(device, qp, newest, Kind::Acknowledge(Verdict::Ack));
        }
    }
}

const INVALID: Outcome = Outcome::Refused(Verdict::Nak(Nak::InvalidRequest));
const NO_ACCESS: Outcome = Outcome::Refused(Verdict::Nak(Nak::RemoteAccess));

fn in_sequence(device: &mut Device, qp: &mut Qp, packet: &Packet, data: Data<'_>) -> Outcome {
    match &packet.kind {
        Kind::Send { position, rider } => send(device, qp, packet, data, *position, *rider),
        Kind::Write {
            position,
            reth,
            rider,
        } => write(device, qp, packet, data, *position, *reth, *rider),
        Kind::ReadRequest(reth) => read(device, qp, packet, *reth),
        Kind::AtomicRequest {
            address,
            rkey,
            operation,
            len,
        } => {
            let target = Reth {
                address: *address,
                rkey: *rkey,
                len: *len,
            };
            atomic(device, qp, packet, target, *operation)
        }
        Kind::ReadResponse { .. } | Kind::AtomicResponse { .. } | Kind::Acknowledge(_) => {
            Outcome::Answered
        }
    }
}

/// Whether a packet can follow what has come: a middle needs a beginning, a beginning nothing open. A beginning whose data
/// did not come through has to come again.
fn fits(qp: &Qp, position: Position, is_send: bool) -> bool {
    match &qp.responder.incoming {
        None => position.first,
        Some(Incoming::Send { received, .. }) => position.first == (*received == 0) && is_send,
        Some(Incoming::Write { received, .. }) => position.first == (*received == 0) && !is_send,
    }
}

/// Whether a packet is full, unless it is the last (IBA 9.7.4.1.6). One that stands for several has all but its last full.
fn is_whole(qp: &Qp, packet: &Packet, data: Data<'_>, position: Position) -> bool {
    let (len, mtu, span) = (data.len(), qp.decoded.mtu, packet.span as usize);
    let others = mtu * span.saturating_sub(1);
    match position.last {
        true => len <= others + mtu && (len > others || span <= 1),
        false => len == others + mtu,
    }
}

/// Completes a receive WQE; a completion queue that has failed is an error that the sender sees.
fn completed(device: &mut Device, qp: &mut Qp, receive: &Receive, entry: Completion) -> Outcome {
    if deliver(device, qp, receive, entry) {
        Outcome::Done
    } else {
        Outcome::Refused(Verdict::Nak(Nak::RemoteOperation))
    }
}

fn not_ready(qp: &Qp) -> Outcome {
    Outcome::Refused(Verdict::ReceiverNotReady(qp.decoded.min_rnr_nak))
}

fn send(
    device: &mut Device,
    qp: &mut Qp,
    packet: &Packet,
    data: Data<'_>,
    position: Position,
    rider: Rider,
) -> Outcome {
    if !fits(qp, position, true) || !is_whole(qp, packet, data, position) {
        return INVALID;
    }
    let (receive, received) = match qp.responder.incoming.take() {
        Some(Incoming::Send { receive, received }) => (receive, received),
        _ => match take_receive(device, qp, packet.xrc_srqn) {
            Ok(Some(receive)) => (receive, 0),
            Ok(None) => return not_ready(qp),
            Err(()) => return Outcome::Refused(Verdict::Nak(Nak::RemoteOperation)),
        },
    };
    let who = Accessor {
        pd: receive.pd,
        qpn: qp.number,
    };
    let room: u64 = receive.scatter.iter().map(|sge| u64::from(sge.len)).sum();
    if u64::from(received) + data.len() as u64 > room {
        let rule = "a message fits into the receive WQE";
        device.refuse(
            format!("qp {:#x} receive {:#x}", qp.number, receive.index),
            "byte_count",
            room,
            rule,
            "IBA 9.9.3",
        );
        fail_receive(
            device,
            qp,
            &receive,
            Failure::new(syndrome::LOCAL_LENGTH, vendor::RECEIVE_LENGTH),
        );
        return INVALID;
    }
    let cqn = receive.complete_to(qp);
    let most = qp.decoded.scatter_response;
    let scattered = match position.first && position.last {
        true => Scattered::new(device, cqn, most, data),
        false => None,
    };
    let written = match scattered {
        Some(_) => Ok(()),
        None => scatter(device, who, &receive.scatter, received as usize, data),
    };
    signature::report(device, cqn, qp.shown_number());
    if written == Err(Denied::Sender) {
        qp.responder.incoming = Some(Incoming::Send { receive, received });
        return Outcome::Broken;
    }
    if let Err(denied) = written {
        if odp::wait(device, qp, Half::Responder, denied, 0) {
            qp.responder.incoming = Some(Incoming::Send { receive, received });
            return not_ready(qp);
        }
        fail_receive(
            device,
            qp,
            &receive,
            Failure::new(syndrome::LOCAL_PROT, vendor::SCATTER),
        );
        return Outcome::Refused(Verdict::Nak(Nak::RemoteOperation));
    }
    let received = received + data.len() as u32;
    if !position.last {
        qp.responder.incoming = Some(Incoming::Send { receive, received });
        return Outcome::Done;
    }
    let (opcode, immediate) = match rider {
        Rider::None => (cqe_opcode::RESP_SEND, 0),
        Rider::Immediate(immediate) => (cqe_opcode::RESP_SEND_IMM, immediate),
        Rider::Invalidate(key) => {
            if keys::invalidate(device, qp, key, keys::By::Peer).is_err() {
                fail_receive(
                    device,
                    qp,
                    &receive,
                    Failure::new(syndrome::LOCAL_QP_OP, vendor::SCATTER),
                );
                return NO_ACCESS;
            }
            (cqe_opcode::RESP_SEND_INV, key)
        }
    };
    let mut entry = Completion::new(
        opcode,
        qp.shown_number(),
        qp.decoded.user_index,
        receive.index,
    );
    entry.immediate = immediate;
    entry.byte_count = received;
    entry.solicited = packet.solicited;
    entry.scattered = scattered;
    completed(device, qp, &receive, entry)
}

fn write(
    device: &mut Device,
    qp: &mut Qp,
    packet: &Packet,
    data: Data<'_>,
    position: Position,
    reth: Option<Reth>,
    rider: Rider,
) -> Outcome {
    if !fits(qp, position, false) || !is_whole(qp, packet, data, position) {
        return INVALID;
    }
    let who = requester_of(device, qp, packet);
    let (reth, received, taken) = match (qp.responder.incoming.take(), reth) {
        (
            Some(Incoming::Write {
                reth,
                received,
                receive,
            }),
            _,
        ) => (reth, received, receive),
        (_, Some(reth)) => {
            if !permitted(device, qp, who, reth, Purpose::RemoteWrite) {
                return NO_ACCESS;
            }
            (reth, 0, None)
        }
        _ => return INVALID,
    };
    // Where one has been taken, it is the first to be used, or to be flushed.
    if taken.is_some() {
        qp.responder.spare = taken;
    }
    let total = u64::from(received) + data.len() as u64;
    if total > u64::from(reth.len) || position.last && total != u64::from(reth.len) {
        return INVALID;
    }
    // With immediate data a receive WQE is used up; without one the last packet has to come again.
    let receive = match rider {
        Rider::Immediate(_) => match take_receive(device, qp, packet.xrc_srqn) {
            Ok(Some(receive)) => Some(receive),
            Ok(None) => {
                if !position.first {
                    qp.responder.incoming = Some(Incoming::Write {
                        reth,
                        received,
                        receive: None,
                    });
                }
                return not_ready(qp);
            }
            Err(()) => return Outcome::Refused(Verdict::Nak(Nak::RemoteOperation)),
        },
        _ => None,
    };
    if !data.is_empty() {
        let address = reth.address.wrapping_add(u64::from(received));
        let purpose = Purpose::RemoteWrite;
        let written = memory::write(device, who, reth.rkey, address, purpose, data);
        signature::report(device, qp.decoded.cqn_receive, qp.shown_number());
        match written {
            Ok(()) => {}
            Err(Denied::Sender) => {
                qp.responder.incoming = Some(Incoming::Write {
                    reth,
                    received,
                    receive,
                });
                return Outcome::Broken;
            }
            Err(denied)
                if odp::wait(
                    device,
                    qp,
                    Half::Responder,
                    denied,
                    u64::from(reth.len) - total,
                ) =>
            {
                qp.responder.incoming = Some(Incoming::Write {
                    reth,
                    received,
                    receive,
                });
                return not_ready(qp);
            }
            Err(_) => {
                if let Some(receive) = &receive {
                    let failure = Failure::new(syndrome::LOCAL_ACCESS, vendor::SCATTER);
                    fail_receive(device, qp, receive, failure);
                }
                return NO_ACCESS;
            }
        }
    }
    if !position.last {
        qp.responder.incoming = Some(Incoming::Write {
            reth,
            received: total as u32,
            receive: None,
        });
        return Outcome::Done;
    }
    let (Some(receive), Rider::Immediate(immediate)) = (receive, rider) else {
        return Outcome::Done;
    };
    let mut entry = Completion::new(
        cqe_opcode::RESP_WR_IMM,
        qp.shown_number(),
        qp.decoded.user_index,
        receive.index,
    );
    entry.immediate = immediate;
    entry.byte_count = reth.len;
    entry.solicited = packet.solicited;
    completed(device, qp, &receive, entry)
}

/// Whose rights a request has: the protection domain of the queue pair, or of the SRQ that an XRC packet names (IBA annex
/// A14: an XRC target queue pair has none of its own).
fn requester_of(device: &Device, qp: &Qp, packet: &Packet) -> Accessor {
    let mut who = accessor(qp);
    let srq = packet.xrc_srqn.and_then(|srqn| device.srqs.get(srqn));
    if let Some(srq) = srq.filter(|srq| srq.xrcd == Some(qp.decoded.xrcd)) {
        who.pd = srq.pd;
    }
    who
}

/// Whether the queue pair and the key permit a remote access. An access of no bytes needs no key (IBA 9.7.4.1.3).
fn permitted(device: &Device, qp: &Qp, who: Accessor, reth: Reth, purpose: Purpose) -> bool {
    let d = &qp.decoded;
    let (enabled, field) = match purpose {
        Purpose::RemoteWrite => (d.remote_write, "rwe"),
        Purpose::RemoteRead => (d.remote_read, "rre"),
        _ => (d.remote_atomic, "rae"),
    };
    if !enabled {
        let rule = "the queue pair permits this kind of remote access";
        device.refuse(
            format!("qp {:#x} {purpose:?}", qp.number),
            field,
            0u8,
            rule,
            "IBA 9.7.4.1.5",
        );
        return false;
    }
    let range = Range {
        key: reth.rkey,
        address: reth.address,
        len: u64::from(reth.len),
    };
    reth.len == 0 || memory::check(device, who, range, purpose).is_ok()
}

fn read(device: &mut Device, qp: &mut Qp, packet: &Packet, reth: Reth) -> Outcome {
    if qp.responder.incoming.is_some() || qp.responder.reads_in() >= qp.decoded.max_reads_in {
        return INVALID;
    }
    let who = requester_of(device, qp, packet);
    if !permitted(device, qp, who, reth, Purpose::RemoteRead) {
        return NO_ACCESS;
    }
    // What is missing now makes the requester come again. What goes while it is answered has it wait, but not for ever.
    let first = Range {
        key: reth.rkey,
        address: reth.address,
        len: u64::from(reth.len).min(IDEAL_PACKET as u64),
    };
    if let Some(denied) = memory::absent(device, who, first, Purpose::RemoteRead) {
        let ahead = u64::from(reth.len) - first.len;
        return match odp::wait(device, qp, Half::Responder, denied, ahead) {
            true => not_ready(qp),
            false => NO_ACCESS,
        };
    }
    let packets = (reth.len as usize).div_ceil(qp.decoded.mtu).max(1) as u32;
    qp.responder.expected_psn = psn::add(packet.psn, packets);
    send_ack(device, qp);
    qp.responder.jobs.push_back(Job::Read {
        psn: packet.psn,
        reth,
        sent: 0,
        who,
        again: false,
    });
    Outcome::Answered
}

fn atomic(
    device: &mut Device,
    qp: &mut Qp,
    packet: &Packet,
    target: Reth,
    operation: Atomic,
) -> Outcome {
    if !matches!(target.len, 4 | 8) || target.address % u64::from(target.len) != 0 {
        let rule = "an atomic's address is aligned to its size, 4 or 8";
        device.refuse(
            format!("qp {:#x} atomic", qp.number),
            "raddr",
            target.address,
            rule,
            "IBA 9.4.5",
        );
        return INVALID;
    }
    if qp.responder.incoming.is_some() {
        return INVALID;
    }
    let who = requester_of(device, qp, packet);
    if !permitted(device, qp, who, target, Purpose::RemoteAtomic) {
        return NO_ACCESS;
    }
    if !qp.decoded.atomic_mode.permits(target.len, operation) {
        let rule = "the queue pair's mode is for atomics of this kind and size";
        let (object, mode) = (
            format!("qp {:#x} atomic", qp.number),
            qp.decoded.atomic_mode,
        );
        device.refuse(object, "atomic_mode", mode.0, rule, "PRM QPC");
        return INVALID;
    }
    let host_order = device.caps.atomic_host_order;
    let mut change = |old: u64| {
        let old = atomic::in_order(old, target.len, host_order);
        atomic::apply(operation, old).map(|new| atomic::in_order(new, target.len, host_order))
    };
    let old = match memory::atomic(device, who, target, &mut change) {
        Ok(old) => old,
        Err(denied) if odp::wait(device, qp, Half::Responder, denied, 0) => return not_ready(qp),
        Err(_) => return NO_ACCESS,
    };
    let original = atomic::in_order(old, target.len, host_order);
    if qp.responder.atomics.len() >= qp.decoded.max_reads_in {
        qp.responder.atomics.pop_front();
    }
    qp.responder.atomics.push_back((packet.psn, original));
    qp.responder.expected_psn = psn::add(packet.psn, 1);
    reply(device, qp, packet.psn, Kind::AtomicResponse { original });
    Outcome::Answered
}

/// Without acknowledgements a gap only loses the message that it is in (IBA 9.8.2.2).
fn unreliable(device: &mut Device, qp: &mut Qp, packet: &Packet, data: Data<'_>) {
    let (Kind::Send { position, .. } | Kind::Write { position, .. }) = &packet.kind else {
        return;
    };
    if packet.psn != qp.responder.expected_psn {
        qp.responder.cut_short();
    }
    qp.responder.expected_psn = psn::add(packet.psn, 1);
    if position.first {
        // The receive WQE of a message cut short is as it was before (IBA 9.9.3, class D1).
        qp.responder.cut_short();
    } else if qp.responder.incoming.is_none() {
        device.counters.packets_dropped += 1;
        return;
    }
    match in_sequence(device, qp, packet, data) {
        Outcome::Refused(Verdict::Nak(nak)) => refuse(device, qp, nak),
        // It does not come again.
        Outcome::Refused(Verdict::ReceiverNotReady(_)) => {
            device.counters.packets_dropped += 1;
            qp.responder.cut_short();
        }
        _ => {}
    }
}

/// Sends the acknowledgements that are due. They are never due while nobody works: a receiver may go once it has a message.
pub fn send_acks(device: &mut Device) {
    let mut due = std::mem::take(&mut device.acks);
    for qpn in due.drain(..) {
        if let Some(mut qp) = device.qps.borrow_out(qpn) {
            send_ack(device, &mut qp);
            device.qps.put_back(qpn, qp);
        }
    }
    device.acks = due;
}

fn send_ack(device: &mut Device, qp: &mut Qp) {
    if let Some(psn) = qp.responder.ack_due.take() {
        answer(device, qp, psn, Kind::Acknowledge(Verdict::Ack));
    }
}

/// Sends an answer, after those that are waiting.
fn reply(device: &mut Device, qp: &mut Qp, psn: u32, kind: Kind) {
    send_ack(device, qp);
    answer(device, qp, psn, kind);
}

fn answer(device: &mut Device, qp: &mut Qp, psn: u32, kind: Kind) {
    if qp.responder.jobs.is_empty() {
        let packet = response(device, qp, psn, kind, Payload::NONE);
        device.outbox.push_back(packet);
        device.counters.packets_sent += 1;
    } else {
        qp.responder.jobs.push_back(Job::Packet { psn, kind });
    }
}

fn response(device: &Device, qp: &Qp, psn: u32, kind: Kind, payload: Payload) -> Packet {
    let transport = match qp.service {
        Service::Xrc => Transport::Xrc,
        Service::Dcr => Transport::Dc,
        _ => Transport::Rc,
    };
    Packet {
        source_lid: device.port.lid,
        destination_lid: qp.decoded.remote_lid,
        sl: qp.decoded.sl,
        grh: None,
        transport,
        pkey: device.port.pkey(usize::from(qp.decoded.pkey_index)),
        qpn: qp.decoded.remote_qpn,
        psn,
        span: 1,
        ack_request: false,
        solicited: false,
        deth: None,
        dceth: dc::answer_header(qp),
        xrc_srqn: None,
        kind,
        payload,
    }
}

/// Sends waiting answers for a while. Returns whether there are more.
pub fn run(device: &mut Device, qp: &mut Qp, budget: &mut Budget, now: Instant) -> bool {
    let ideal = is_ideal(device, qp);
    while qp.responder.has_jobs() {
        if !qp.state.answers() {
            qp.responder.jobs.clear();
            return false;
        }
        if qp.responder.page_fault.is_some() {
            return false;
        }
        if budget.is_spent() {
            return true;
        }
        let limited = qp.limits.responder_group != 0;
        if limited {
            if let Some(until) = pace::busy_until(device, qp.limits, pace::Half::Responder, now) {
                answers::look_at(device, qp, until);
                return false;
            }
        }
        let Some(job) = qp.responder.jobs.front_mut() else {
            return false;
        };
        let (psn, span, kind, payload) = match job {
            Job::Packet { psn, kind } => {
                let out = (*psn, 1, kind.clone(), Payload::NONE);
                qp.responder.jobs.pop_front();
                out
            }
            Job::Read {
                psn,
                reth,
                sent,
                who,
                ..
            } => {
                let (first_psn, reth, index, who) = (*psn, *reth, *sent, *who);
                let mtu = qp.decoded.mtu;
                let packets = (reth.len as usize).div_ceil(mtu).max(1) as u32;
                let span = match ideal {
                    true => (packets - index).min((IDEAL_PACKET / mtu) as u32),
                    false => 1,
                };
                let position = Position {
                    first: index == 0,
                    last: index + span == packets,
                };
                let offset = index as usize * mtu;
                let len = (reth.len as usize - offset).min(span as usize * mtu);
                let ahead = u64::from(reth.len) - (offset + len) as u64;
                let piece = read_piece(device, who, reth, offset, len, ideal);
                let cqn = qp.decoded.cqn_receive;
                signature::report(device, cqn, wire_qpn(qp));
                match piece {
                    Ok(payload) => {
                        if position.last {
                            qp.responder.jobs.pop_front();
                        } else if let Some(Job::Read { sent, .. }) = qp.responder.jobs.front_mut() {
                            *sent += span;
                        }
                        (
                            psn::add(first_psn, index),
                            span,
                            Kind::ReadResponse { position },
                            payload,
                        )
                    }
                    // It goes on here when the page is there.
                    Err(denied) if odp::wait(device, qp, Half::Responder, denied, ahead) => {
                        return false;
                    }
                    Err(_) => {
                        let nak = Kind::Acknowledge(Verdict::Nak(Nak::RemoteAccess));
                        let packet =
                            response(device, qp, psn::add(first_psn, index), nak, Payload::NONE);
                        device.outbox.push_back(packet);
                        refuse(device, qp, Nak::RemoteAccess);
                        return false;
                    }
                }
            }
        };
        budget.spend(payload.len());
        if limited {
            pace::spend(device, qp.limits, pace::Half::Responder, payload.len(), now);
        }
        device.counters.packets_sent += u64::from(span);
        device.counters.bytes_sent += payload.len() as u64;
        let mut packet = response(device, qp, psn, kind, payload);
        packet.span = span;
        device.outbox.push_back(packet);
        if qp.responder.jobs.is_empty() {
            if let Some(nak) = qp.responder.refused.take() {
                refuse(device, qp, nak);
                return false;
            }
        }
    }
    false
}

/// Data of a READ's response packet: `len` bytes from `offset` on.
fn read_piece(
    device: &Device,
    who: Accessor,
    reth: Reth,
    offset: usize,
    len: usize,
    lend: bool,
) -> Result<Payload, Denied> {
    if len == 0 {
        return Ok(Payload::NONE);
    }
    let address = reth.address.wrapping_add(offset as u64);
    let purpose = Purpose::RemoteRead;
    if lend && !memory::is_signed(device, reth.rkey) {
        let range = Range {
            key: reth.rkey,
            address,
            len: len as u64,
        };
        memory::check_present(device, who, range, purpose)?;
        let lender = Lender::Response {
            qpn: who.qpn,
            pd: who.pd,
            rkey: reth.rkey,
            address,
        };
        return Ok(Payload::Lent { lender, len });
    }
    let mut data = vec![0; len];
    memory::read(device, who, reth.rkey, address, purpose, &mut data)?;
    Ok(Payload::Bytes(data))
}
