// SPDX-License-Identifier: MIT OR Apache-2.0
//! The receiving half of a queue pair: requests from the wire, receive WQEs, answers.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::completion::{self, Completion, Failure, Source, error_opcode};
use super::event;
use super::memory::{self, Accessor, Denied, Purpose, Range};
use super::requester::{self, Budget, accessor};
use super::wqe::{Sge, scatter_list};
use crate::ifc::event::kind;
use crate::ifc::wqe::{SEGMENT, cqe_opcode, dbr, srq_next, syndrome};
use crate::objects::device::Device;
use crate::objects::qp::{Qp, ReceiveFrom, Service};
use crate::objects::queue::SrqKind;
use crate::wire::packet::{
    Atomic, Kind, Nak, Packet, Position, Reth, Rider, Transport, Verdict, psn,
};

/// Longest receive WQE.
const MAX_RECEIVE_WQE: usize = 512;
/// Bytes that a global route header, or its place, takes before a datagram's data.
const GRH_LEN: usize = 40;
/// How often a queue pair in error is looked at for newly posted receive WQEs, which ring no doorbell.
const ERROR_POLL: Duration = Duration::from_millis(2);
/// How often after [`ERROR_POLLS`] looks that found nothing.
const ERROR_POLL_SLOW: Duration = Duration::from_millis(50);
const ERROR_POLLS: u32 = 500;

/// Vendor syndromes as ConnectX is seen to report them.
mod vendor {
    pub const SCATTER: u8 = 0x54;
    pub const LENGTH: u8 = 0x6f;
    pub const FLUSH: u8 = 0xf5;
}

/// A receive WQE that has been taken.
#[derive(Debug, Clone)]
struct Receive {
    /// As in its CQE: counter of the receive queue, or place in the shared one.
    index: u16,
    scatter: Vec<Sge>,
    /// Who owns the memory: protection domain of the queue.
    pd: u32,
    /// Of an XRC SRQ: where to complete to, and the user index.
    complete_to: Option<(u32, u32)>,
}

/// A message that has begun.
#[derive(Debug)]
enum Incoming {
    Send { receive: Receive, received: u32 },
    Write { reth: Reth, received: u32 },
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
    /// A sequence error has been reported and the missing packet not come yet.
    sequence_reported: bool,
    jobs: VecDeque<Job>,
    /// Results of the last atomics, for requests that come again.
    atomics: VecDeque<(u32, u64)>,
    /// Looks at the receive queue in error that found nothing, and the next one.
    idle_polls: u32,
    next_poll: Option<Instant>,
}

impl Responder {
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
pub fn request(device: &mut Device, qp: &mut Qp, packet: &Packet) {
    match packet.transport {
        Transport::Ud => datagram(device, qp, packet),
        Transport::Uc => unreliable(device, qp, packet),
        Transport::Rc | Transport::Xrc => reliable(device, qp, packet),
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
}

fn reliable(device: &mut Device, qp: &mut Qp, packet: &Packet) {
    let distance = psn::distance(packet.psn, qp.responder.expected_psn);
    if distance > 0 {
        // One report for a gap; packets behind it are dropped (IBA 9.7.5.1.1).
        if !std::mem::replace(&mut qp.responder.sequence_reported, true) {
            let expected = qp.responder.expected_psn;
            reply(
                device,
                qp,
                packet,
                expected,
                Kind::Acknowledge(Verdict::Nak(Nak::Sequence)),
            );
        }
        return;
    }
    if distance < 0 {
        return duplicate(device, qp, packet);
    }
    qp.responder.sequence_reported = false;
    match in_sequence(device, qp, packet) {
        Outcome::Done => {
            qp.responder.expected_psn = psn::add(packet.psn, 1);
            if packet.ack_request {
                reply(
                    device,
                    qp,
                    packet,
                    packet.psn,
                    Kind::Acknowledge(Verdict::Ack),
                );
            }
        }
        Outcome::Answered => {}
        Outcome::Refused(verdict) => {
            reply(device, qp, packet, packet.psn, Kind::Acknowledge(verdict));
            if let Verdict::Nak(nak) = verdict {
                refuse(device, qp, nak);
            }
        }
    }
}

/// A refused request stops the queue pair (IBA 9.9.3, class C).
fn refuse(device: &mut Device, qp: &mut Qp, nak: Nak) {
    device.counters.access_naks += 1;
    let event_type = match nak {
        Nak::RemoteAccess => Some(kind::WQ_ACCESS_ERROR),
        Nak::InvalidRequest => Some(kind::WQ_INVAL_REQ_ERROR),
        // The receive WQE's completion says it.
        Nak::RemoteOperation | Nak::Sequence => None,
    };
    qp.responder.jobs.clear();
    requester::enter_error(device, qp, event_type);
}

/// A packet that has been seen: acknowledged again; READs and atomics are answered again.
fn duplicate(device: &mut Device, qp: &mut Qp, packet: &Packet) {
    match &packet.kind {
        Kind::ReadRequest(reth) => {
            let who = requester_of(device, qp, packet);
            qp.responder.jobs.push_back(Job::Read {
                psn: packet.psn,
                reth: *reth,
                sent: 0,
                who,
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
                reply(
                    device,
                    qp,
                    packet,
                    packet.psn,
                    Kind::AtomicResponse { original },
                );
            }
        }
        _ => {
            let newest = psn::add(qp.responder.expected_psn, psn::MASK);
            reply(device, qp, packet, newest, Kind::Acknowledge(Verdict::Ack));
        }
    }
}

const INVALID: Outcome = Outcome::Refused(Verdict::Nak(Nak::InvalidRequest));
const NO_ACCESS: Outcome = Outcome::Refused(Verdict::Nak(Nak::RemoteAccess));

fn in_sequence(device: &mut Device, qp: &mut Qp, packet: &Packet) -> Outcome {
    match &packet.kind {
        Kind::Send { position, rider } => send(device, qp, packet, *position, *rider),
        Kind::Write {
            position,
            reth,
            rider,
        } => write(device, qp, packet, *position, *reth, *rider),
        Kind::ReadRequest(reth) => read(device, qp, packet, *reth),
        Kind::AtomicRequest {
            address,
            rkey,
            operation,
        } => atomic(device, qp, packet, *address, *rkey, *operation),
        Kind::ReadResponse { .. } | Kind::AtomicResponse { .. } | Kind::Acknowledge(_) => {
            Outcome::Answered
        }
    }
}

/// Whether a packet can follow what has come: a middle needs a beginning, a beginning nothing open.
fn fits(qp: &Qp, position: Position, is_send: bool) -> bool {
    match &qp.responder.incoming {
        None => position.first,
        Some(Incoming::Send { .. }) => !position.first && is_send,
        Some(Incoming::Write { .. }) => !position.first && !is_send,
    }
}

fn not_ready(qp: &Qp) -> Outcome {
    Outcome::Refused(Verdict::ReceiverNotReady(qp.decoded.min_rnr_nak))
}

fn send(
    device: &mut Device,
    qp: &mut Qp,
    packet: &Packet,
    position: Position,
    rider: Rider,
) -> Outcome {
    if !fits(qp, position, true) || !position.last && packet.payload.len() != qp.decoded.mtu {
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
    if u64::from(received) + packet.payload.len() as u64 > room {
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
            Failure::new(syndrome::LOCAL_LENGTH, vendor::LENGTH),
        );
        return INVALID;
    }
    if scatter(
        device,
        who,
        &receive.scatter,
        received as usize,
        &packet.payload,
    )
    .is_err()
    {
        fail_receive(
            device,
            qp,
            &receive,
            Failure::new(syndrome::LOCAL_PROT, vendor::SCATTER),
        );
        return Outcome::Refused(Verdict::Nak(Nak::RemoteOperation));
    }
    let received = received + packet.payload.len() as u32;
    if !position.last {
        qp.responder.incoming = Some(Incoming::Send { receive, received });
        return Outcome::Done;
    }
    let (opcode, immediate) = match rider {
        Rider::None => (cqe_opcode::RESP_SEND, 0),
        Rider::Immediate(immediate) => (cqe_opcode::RESP_SEND_IMM, immediate),
        Rider::Invalidate(key) => {
            if invalidate(device, qp, key).is_err() {
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
    let mut entry = Completion::new(opcode, qp.number, qp.decoded.user_index, receive.index);
    entry.immediate = immediate;
    entry.byte_count = received;
    entry.solicited = packet.solicited;
    deliver(device, qp, &receive, entry)
}

/// Completes a receive WQE.
fn deliver(device: &mut Device, qp: &mut Qp, receive: &Receive, mut entry: Completion) -> Outcome {
    let cqn = match receive.complete_to {
        Some((cqn, user_index)) => {
            entry.user_index = user_index;
            cqn
        }
        None => qp.decoded.cqn_receive,
    };
    if completion::post(device, cqn, &entry) {
        Outcome::Done
    } else {
        Outcome::Refused(Verdict::Nak(Nak::RemoteOperation))
    }
}

fn fail_receive(device: &mut Device, qp: &mut Qp, receive: &Receive, failure: Failure) {
    let mut entry = Completion::new(
        error_opcode(false),
        qp.number,
        qp.decoded.user_index,
        receive.index,
    );
    entry.failure = Some(failure);
    deliver(device, qp, receive, entry);
}

fn write(
    device: &mut Device,
    qp: &mut Qp,
    packet: &Packet,
    position: Position,
    reth: Option<Reth>,
    rider: Rider,
) -> Outcome {
    if !fits(qp, position, false) || !position.last && packet.payload.len() != qp.decoded.mtu {
        return INVALID;
    }
    let who = requester_of(device, qp, packet);
    let (reth, received) = match (qp.responder.incoming.take(), reth) {
        (Some(Incoming::Write { reth, received }), _) => (reth, received),
        (_, Some(reth)) => {
            if !permitted(device, qp, who, reth, Purpose::RemoteWrite) {
                return NO_ACCESS;
            }
            (reth, 0)
        }
        _ => return INVALID,
    };
    let total = u64::from(received) + packet.payload.len() as u64;
    if total > u64::from(reth.len) || position.last && total != u64::from(reth.len) {
        return INVALID;
    }
    // With immediate data a receive WQE is used up; without one the last packet has to come again.
    let receive = match rider {
        Rider::Immediate(_) => match take_receive(device, qp, packet.xrc_srqn) {
            Ok(Some(receive)) => Some(receive),
            Ok(None) => {
                if !position.first {
                    qp.responder.incoming = Some(Incoming::Write { reth, received });
                }
                return not_ready(qp);
            }
            Err(()) => return Outcome::Refused(Verdict::Nak(Nak::RemoteOperation)),
        },
        _ => None,
    };
    if !packet.payload.is_empty() {
        let address = reth.address.wrapping_add(u64::from(received));
        if memory::write(
            device,
            who,
            reth.rkey,
            address,
            Purpose::RemoteWrite,
            &packet.payload,
        )
        .is_err()
        {
            return NO_ACCESS;
        }
    }
    if !position.last {
        qp.responder.incoming = Some(Incoming::Write {
            reth,
            received: total as u32,
        });
        return Outcome::Done;
    }
    let (Some(receive), Rider::Immediate(immediate)) = (receive, rider) else {
        return Outcome::Done;
    };
    let mut entry = Completion::new(
        cqe_opcode::RESP_WR_IMM,
        qp.number,
        qp.decoded.user_index,
        receive.index,
    );
    entry.immediate = immediate;
    entry.byte_count = reth.len;
    entry.solicited = packet.solicited;
    deliver(device, qp, &receive, entry)
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
    if qp.responder.incoming.is_some() || qp.responder.jobs.len() >= qp.decoded.max_reads_in {
        return INVALID;
    }
    let who = requester_of(device, qp, packet);
    if !permitted(device, qp, who, reth, Purpose::RemoteRead) {
        return NO_ACCESS;
    }
    let packets = (reth.len as usize).div_ceil(qp.decoded.mtu).max(1) as u32;
    qp.responder.expected_psn = psn::add(packet.psn, packets);
    qp.responder.jobs.push_back(Job::Read {
        psn: packet.psn,
        reth,
        sent: 0,
        who,
    });
    Outcome::Answered
}

fn atomic(
    device: &mut Device,
    qp: &mut Qp,
    packet: &Packet,
    address: u64,
    rkey: u32,
    operation: Atomic,
) -> Outcome {
    if address % 8 != 0 {
        let rule = "an atomic's address is aligned to 8 bytes";
        device.refuse(
            format!("qp {:#x} atomic", qp.number),
            "raddr",
            address,
            rule,
            "IBA 9.4.5",
        );
        return INVALID;
    }
    if qp.responder.incoming.is_some() {
        return INVALID;
    }
    let who = requester_of(device, qp, packet);
    if !permitted(
        device,
        qp,
        who,
        Reth {
            address,
            rkey,
            len: 8,
        },
        Purpose::RemoteAtomic,
    ) {
        return NO_ACCESS;
    }
    let host_order = device.caps.atomic_host_order;
    let swap = |value: u64| if host_order { value } else { value.to_be() };
    let mut change = |old: u64| apply(operation, swap(old)).map(swap);
    let Ok(old) = memory::atomic(device, who, rkey, address, &mut change) else {
        return NO_ACCESS;
    };
    let original = swap(old);
    if qp.responder.atomics.len() >= qp.decoded.max_reads_in {
        qp.responder.atomics.pop_front();
    }
    qp.responder.atomics.push_back((packet.psn, original));
    qp.responder.expected_psn = psn::add(packet.psn, 1);
    reply(
        device,
        qp,
        packet,
        packet.psn,
        Kind::AtomicResponse { original },
    );
    Outcome::Answered
}

/// The new value, or `None` if the comparison fails.
fn apply(operation: Atomic, old: u64) -> Option<u64> {
    match operation {
        Atomic::CompareSwap {
            compare,
            compare_mask,
            swap,
            swap_mask,
        } => ((old ^ compare) & compare_mask == 0).then_some(old & !swap_mask | swap & swap_mask),
        Atomic::FetchAdd { add, boundary: 0 } => Some(old.wrapping_add(add)),
        Atomic::FetchAdd { add, boundary } => {
            // Add without the boundary bits, so that no carry leaves a field, and set these by themselves.
            let low = (old & !boundary).wrapping_add(add & !boundary);
            Some(low ^ ((old ^ add) & boundary))
        }
    }
}

/// Takes away a key that its owner permitted to be invalidated.
pub fn invalidate(device: &mut Device, qp: &Qp, key: u32) -> Result<(), Denied> {
    let denied = |device: &Device, reason, rule| {
        device.refuse(
            format!("qp {:#x} invalidate", qp.number),
            "rkey",
            key,
            rule,
            "IBA 10.6.7.2.4",
        );
        Err(reason)
    };
    match device.mkeys.get_mut(key >> 8) {
        Some(mkey) if mkey.variant == key as u8 && mkey.pd == qp.decoded.pd && !mkey.free => {
            mkey.free = true;
            Ok(())
        }
        Some(_) => denied(
            device,
            Denied::Domain,
            "a valid key of the queue pair's protection domain",
        ),
        None => denied(device, Denied::Key, "a key that exists"),
    }
}

/// Without acknowledgements a gap only loses the message that it is in (IBA 9.8.2.2).
fn unreliable(device: &mut Device, qp: &mut Qp, packet: &Packet) {
    let (Kind::Send { position, .. } | Kind::Write { position, .. }) = &packet.kind else {
        return;
    };
    if packet.psn != qp.responder.expected_psn {
        qp.responder.incoming = None;
    }
    qp.responder.expected_psn = psn::add(packet.psn, 1);
    if position.first {
        // A message cut short leaves its receive WQE for the next one only if nothing was written; hardware drops it.
        qp.responder.incoming = None;
    } else if qp.responder.incoming.is_none() {
        device.counters.packets_dropped += 1;
        return;
    }
    if let Outcome::Refused(Verdict::Nak(nak)) = in_sequence(device, qp, packet) {
        refuse(device, qp, nak);
    }
}

fn datagram(device: &mut Device, qp: &mut Qp, packet: &Packet) {
    let (Kind::Send { rider, .. }, Some(deth)) = (&packet.kind, packet.deth) else {
        return;
    };
    // QP0 has no key check; QP1 has the well-known one, which the driver sets in its context.
    if qp.service == Service::Ud && deth.qkey != qp.decoded.qkey {
        device.counters.packets_dropped += 1;
        let rule = "a datagram has the queue pair's Q_Key";
        return device.refuse(
            format!("qp {:#x} datagram", qp.number),
            "qkey",
            deth.qkey,
            rule,
            "IBA 9.8.3.1",
        );
    }
    let receive = match take_receive(device, qp, None) {
        Ok(Some(receive)) => receive,
        Ok(None) => {
            device.counters.packets_dropped += 1;
            return;
        }
        Err(()) => return requester::enter_error(device, qp, None),
    };
    let who = Accessor {
        pd: receive.pd,
        qpn: qp.number,
    };
    let mut head = [0; GRH_LEN];
    if let Some(grh) = &packet.grh {
        head[0..4].copy_from_slice(
            &((6 << 28) | (u32::from(grh.traffic_class) << 20) | grh.flow_label & 0xf_ffff)
                .to_be_bytes(),
        );
        head[4..6].copy_from_slice(&(packet.payload.len() as u16).to_be_bytes());
        // Next header 0x1b is the base transport header.
        head[6] = 0x1b;
        head[7] = grh.hop_limit;
        head[8..24].copy_from_slice(&grh.source);
        head[24..40].copy_from_slice(&grh.destination);
    }
    let room: u64 = receive.scatter.iter().map(|sge| u64::from(sge.len)).sum();
    let len = GRH_LEN + packet.payload.len();
    let fits = len as u64 <= room;
    let written = fits
        && (packet.grh.is_none() || scatter(device, who, &receive.scatter, 0, &head).is_ok())
        && scatter(device, who, &receive.scatter, GRH_LEN, &packet.payload).is_ok();
    if !written {
        let failure = if fits {
            Failure::new(syndrome::LOCAL_PROT, vendor::SCATTER)
        } else {
            Failure::new(syndrome::LOCAL_LENGTH, vendor::LENGTH)
        };
        fail_receive(device, qp, &receive, failure);
        return requester::enter_error(device, qp, None);
    }
    let (opcode, immediate) = match rider {
        Rider::Immediate(immediate) => (cqe_opcode::RESP_SEND_IMM, *immediate),
        _ => (cqe_opcode::RESP_SEND, 0),
    };
    let mut entry = Completion::new(opcode, qp.number, qp.decoded.user_index, receive.index);
    entry.immediate = immediate;
    entry.byte_count = len as u32;
    entry.solicited = packet.solicited;
    entry.source = Some(Source {
        lid: packet.source_lid,
        qpn: deth.source_qpn,
        sl: packet.sl,
        grh: packet.grh.is_some(),
        pkey_index: 0,
    });
    if let Outcome::Refused(_) = deliver(device, qp, &receive, entry) {
        requester::enter_error(device, qp, Some(kind::WQ_CATAS_ERROR));
    }
}

/// Takes the next receive WQE: `None` if there is none, an error if its memory or queue is broken.
fn take_receive(
    device: &mut Device,
    qp: &mut Qp,
    xrc_srqn: Option<u32>,
) -> Result<Option<Receive>, ()> {
    if let Some(srqn) = xrc_srqn {
        let in_domain = device
            .srqs
            .get(srqn)
            .is_some_and(|s| s.kind == SrqKind::Xrc && s.xrcd == Some(qp.decoded.xrcd));
        if !in_domain {
            let rule = "an XRC packet names an SRQ of the queue pair's XRC domain";
            device.refuse(
                format!("qp {:#x}", qp.number),
                "xrc_srqn",
                srqn,
                rule,
                "IBA annex A14",
            );
            return Err(());
        }
        return take_shared(device, srqn);
    }
    match qp.decoded.receive {
        ReceiveFrom::Own => take_own(device, qp),
        ReceiveFrom::Shared(srqn) => take_shared(device, srqn),
        ReceiveFrom::Nothing => Ok(None),
    }
}

/// Receive WQEs that are posted to a queue pair's own queue and not taken.
fn posted(device: &Device, qp: &Qp) -> Result<u16, ()> {
    let Some(log_size) = qp.queues.log_receive else {
        return Ok(0);
    };
    let word = device
        .host
        .read_be32(qp.decoded.dbr + dbr::RECEIVE)
        .map_err(|_| ())?;
    let posted = (word as u16).wrapping_sub(qp.responder.consumed as u16);
    if u32::from(posted) > 1 << log_size {
        let rule = "at most as many receive WQEs are posted as the queue has";
        device.refuse(
            format!("qp {:#x}", qp.number),
            "receive producer",
            word,
            rule,
            "PRM, doorbell record",
        );
        return Err(());
    }
    Ok(posted)
}

fn take_own(device: &mut Device, qp: &mut Qp) -> Result<Option<Receive>, ()> {
    let Some(log_size) = qp.queues.log_receive else {
        return Ok(None);
    };
    if posted(device, qp)? == 0 {
        return Ok(None);
    }
    let stride = 1usize << qp.queues.log_stride;
    let slot = u64::from(qp.responder.consumed & ((1 << log_size) - 1));
    let mut raw = [0; MAX_RECEIVE_WQE];
    let raw = raw.get_mut(..stride).ok_or(())?;
    read_queue(device, &qp.queues.buffer, slot << qp.queues.log_stride, raw)?;
    let receive = Receive {
        index: qp.responder.consumed as u16,
        scatter: scatter_list(raw),
        pd: qp.decoded.pd,
        complete_to: None,
    };
    qp.responder.consumed = qp.responder.consumed.wrapping_add(1);
    Ok(Some(receive))
}

/// Reads queue memory, across pages if need be.
fn read_queue(
    device: &Device,
    buffer: &crate::objects::memory::Buffer,
    offset: u64,
    into: &mut [u8],
) -> Result<(), ()> {
    let mut done = 0;
    while done < into.len() {
        let (addr, left) = buffer.locate(offset + done as u64).ok_or(())?;
        let piece = (into.len() - done).min(left as usize);
        device
            .host
            .read(addr, &mut into[done..done + piece])
            .map_err(|_| ())?;
        done += piece;
    }
    Ok(())
}

fn take_shared(device: &mut Device, srqn: u32) -> Result<Option<Receive>, ()> {
    let Some(srq) = device.srqs.get(srqn).filter(|srq| !srq.error) else {
        return Err(());
    };
    let word = device
        .host
        .read_be32(srq.dbr + dbr::RECEIVE)
        .map_err(|_| ())?;
    let posted = (word as u16).wrapping_sub(srq.consumed);
    if posted == 0 {
        return Ok(None);
    }
    let index = srq.head;
    let mut raw = [0; MAX_RECEIVE_WQE];
    let raw = raw.get_mut(..1 << srq.log_stride).ok_or(())?;
    let slot = u64::from(index) & ((1 << srq.log_size) - 1);
    read_queue(device, &srq.buffer, slot << srq.log_stride, raw)?;
    let (pd, complete_to) = (srq.pd, srq.cqn.map(|cqn| (cqn, srq.user_index)));
    let receive = Receive {
        index,
        scatter: scatter_list(raw.get(SEGMENT..).unwrap_or_default()),
        pd,
        complete_to,
    };
    let next = srq_next::next_wqe_index.get(raw) as u16;
    let Some(srq) = device.srqs.get_mut(srqn) else {
        return Err(());
    };
    srq.head = next;
    srq.consumed = srq.consumed.wrapping_add(1);
    let left = posted - 1;
    if srq.limit > 0 && left < srq.limit {
        srq.limit = 0;
        event::shared_receive_queue(device, kind::SRQ_RQ_LIMIT, srqn);
    }
    Ok(Some(receive))
}

/// Writes `data` at byte `offset` of a scatter list.
pub fn scatter(
    device: &Device,
    who: Accessor,
    list: &[Sge],
    offset: usize,
    data: &[u8],
) -> Result<(), Denied> {
    let mut skip = offset;
    let mut rest = data;
    for sge in list {
        if rest.is_empty() {
            break;
        }
        let size = sge.len as usize;
        if skip >= size {
            skip -= size;
            continue;
        }
        let (piece, tail) = rest.split_at(rest.len().min(size - skip));
        memory::write(
            device,
            who,
            sge.key,
            sge.address.wrapping_add(skip as u64),
            Purpose::LocalWrite,
            piece,
        )?;
        rest = tail;
        skip = 0;
    }
    if rest.is_empty() {
        Ok(())
    } else {
        Err(Denied::Bounds)
    }
}

/// Sends an answer, after those that are waiting.
fn reply(device: &mut Device, qp: &mut Qp, request: &Packet, psn: u32, kind: Kind) {
    if qp.responder.jobs.is_empty() {
        let packet = response(device, qp, request.transport, psn, kind, Vec::new());
        device.outbox.push_back(packet);
        device.counters.packets_sent += 1;
    } else {
        qp.responder.jobs.push_back(Job::Packet { psn, kind });
    }
}

fn response(
    device: &Device,
    qp: &Qp,
    transport: Transport,
    psn: u32,
    kind: Kind,
    payload: Vec<u8>,
) -> Packet {
    Packet {
        source_lid: device.port.lid,
        destination_lid: qp.decoded.remote_lid,
        sl: qp.decoded.sl,
        grh: None,
        transport,
        pkey: device.port.pkey(usize::from(qp.decoded.pkey_index)),
        qpn: qp.decoded.remote_qpn,
        psn,
        ack_request: false,
        solicited: false,
        deth: None,
        xrc_srqn: None,
        kind,
        payload,
    }
}

/// Sends waiting answers for a while. Returns whether there are more.
pub fn run(device: &mut Device, qp: &mut Qp, budget: &mut Budget) -> bool {
    let transport = if qp.service == Service::Xrc {
        Transport::Xrc
    } else {
        Transport::Rc
    };
    while let Some(job) = qp.responder.jobs.front_mut() {
        if !qp.state.answers() {
            qp.responder.jobs.clear();
            return false;
        }
        if budget.is_spent() {
            return true;
        }
        let (psn, kind, payload) = match job {
            Job::Packet { psn, kind } => {
                let out = (*psn, kind.clone(), Vec::new());
                qp.responder.jobs.pop_front();
                out
            }
            Job::Read {
                psn,
                reth,
                sent,
                who,
            } => {
                let (first_psn, reth, index, who) = (*psn, *reth, *sent, *who);
                *sent += 1;
                match read_piece(device, qp.decoded.mtu, who, reth, index) {
                    Ok((position, payload)) => {
                        if position.last {
                            qp.responder.jobs.pop_front();
                        }
                        (
                            psn::add(first_psn, index),
                            Kind::ReadResponse { position },
                            payload,
                        )
                    }
                    Err(_) => {
                        let nak = Kind::Acknowledge(Verdict::Nak(Nak::RemoteAccess));
                        let packet = response(
                            device,
                            qp,
                            transport,
                            psn::add(first_psn, index),
                            nak,
                            Vec::new(),
                        );
                        device.outbox.push_back(packet);
                        refuse(device, qp, Nak::RemoteAccess);
                        return false;
                    }
                }
            }
        };
        budget.spend(payload.len());
        device.counters.packets_sent += 1;
        device.counters.bytes_sent += payload.len() as u64;
        let packet = response(device, qp, transport, psn, kind, payload);
        device.outbox.push_back(packet);
    }
    false
}

/// Data of a READ's response packet.
fn read_piece(
    device: &Device,
    mtu: usize,
    who: Accessor,
    reth: Reth,
    index: u32,
) -> Result<(Position, Vec<u8>), Denied> {
    let offset = index as usize * mtu;
    let rest = (reth.len as usize).saturating_sub(offset);
    let mut payload = vec![0; rest.min(mtu)];
    if !payload.is_empty() {
        let address = reth.address.wrapping_add(offset as u64);
        memory::read(
            device,
            who,
            reth.rkey,
            address,
            Purpose::RemoteRead,
            &mut payload,
        )?;
    }
    Ok((
        Position {
            first: index == 0,
            last: rest <= mtu,
        },
        payload,
    ))
}

/// Completes the begun message and every posted receive WQE with a flush. Returns how many.
pub fn flush(device: &mut Device, qp: &mut Qp) -> u32 {
    qp.responder.jobs.clear();
    let failure = Failure::new(syndrome::WR_FLUSH, vendor::FLUSH);
    let mut flushed = 0;
    if let Some(Incoming::Send { receive, .. }) = qp.responder.incoming.take() {
        fail_receive(device, qp, &receive, failure);
        flushed += 1;
    }
    if qp.decoded.receive == ReceiveFrom::Own {
        let most = qp.queues.log_receive.map_or(0, |log| 1u32 << log);
        for _ in 0..most.min(u32::from(posted(device, qp).unwrap_or(0))) {
            let index = qp.responder.consumed as u16;
            qp.responder.consumed = qp.responder.consumed.wrapping_add(1);
            let receive = Receive {
                index,
                scatter: Vec::new(),
                pd: qp.decoded.pd,
                complete_to: None,
            };
            fail_receive(device, qp, &receive, failure);
            flushed += 1;
        }
    }
    device.counters.flush_cqes += u64::from(flushed);
    flushed
}

/// Has the timer look for receive WQEs that are posted to a queue pair in error.
pub fn watch_in_error(device: &mut Device, qp: &mut Qp, now: Instant) {
    if qp.decoded.receive == ReceiveFrom::Own && qp.queues.log_receive.is_some() {
        let period = if qp.responder.idle_polls < ERROR_POLLS {
            ERROR_POLL
        } else {
            ERROR_POLL_SLOW
        };
        qp.responder.next_poll = Some(now + period);
        device.timers.add(now + period, qp.number);
    }
}

/// The timer's look.
pub fn poll_in_error(device: &mut Device, qp: &mut Qp, now: Instant) {
    if qp.responder.next_poll.is_none_or(|due| due > now) {
        return;
    }
    if flush(device, qp) > 0 {
        qp.responder.idle_polls = 0;
    } else {
        qp.responder.idle_polls = qp.responder.idle_polls.saturating_add(1);
    }
    watch_in_error(device, qp, now);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn atomics() {
        let cas = |compare, swap| Atomic::CompareSwap {
            compare,
            compare_mask: u64::MAX,
            swap,
            swap_mask: u64::MAX,
        };
        assert_eq!(apply(cas(5, 9), 5), Some(9));
        assert_eq!(apply(cas(5, 9), 6), None);
        let masked = Atomic::CompareSwap {
            compare: 0x05,
            compare_mask: 0xff,
            swap: 0x0900,
            swap_mask: 0xff00,
        };
        assert_eq!(apply(masked, 0xaabb_1205), Some(0xaabb_0905));
        assert_eq!(
            apply(
                Atomic::FetchAdd {
                    add: 2,
                    boundary: 0
                },
                u64::MAX
            ),
            Some(1)
        );
        // Two 32-bit fields: no carry from the low into the high one.
        let two = Atomic::FetchAdd {
            add: 0x0000_0001_0000_0001,
            boundary: 0x8000_0000_8000_0000,
        };
        assert_eq!(
            apply(two, 0x0000_0005_ffff_ffff),
            Some(0x0000_0006_0000_0000)
        );
    }
}
