// SPDX-License-Identifier: MIT OR Apache-2.0
//! The sending half of a queue pair: from the doorbell to packets.
//!
//! WQEs are fetched in order into `flights`. A cursor walks over their packets; what an acknowledgement has not covered is
//! sent again when the cursor is moved back. A WQE completes when it is at the head and all its packets are answered.

use std::collections::VecDeque;
use std::time::Instant;

use super::answers::expect_answer;
use super::blueflame::Copied;
use super::completing::{complete, fatal};
use super::completion::{Failure, Scattered, vendor};
use super::memory::{self, Accessor, Denied, Purpose};
use super::pace::Half;
use super::window::Window;
use super::wqe::{self, Fetched, Operation, Sge, SgeList, Wqe, part};
use super::{answers, dc, keys, odp, pace, responder, signature};
use crate::cmd::caps::Capabilities;
use crate::ifc::event::kind;
use crate::ifc::wqe::{dbr, syndrome};
use crate::objects::device::Device;
use crate::objects::pacing::Limits;
use crate::objects::qp::{Decoded, Qp, Service, State};
use crate::wire::packet::{
    Deth, Grh, Kind, Packet, Position, Reth, Rider, Transport, Verdict, psn,
};
use crate::wire::payload::{Lender, Payload};

/// WQEs in flight.
const MAX_FLIGHTS: usize = 64;
/// Request packets without an answer.
const MAX_UNANSWERED: u32 = 128;
/// Sequence numbers without an answer that permit one more message: the longest takes as many, and together they must stay
/// below half of all, beyond which nobody can tell the older of two numbers.
const MAX_AHEAD: i32 = 1 << 22;
const _: () = assert!((1 << Capabilities::LOG_MAX_MSG) / 256 <= MAX_AHEAD);
/// In a long message an answer is asked for this often.
const ACK_EVERY: u32 = 32;
/// Bytes that one packet carries over an ideal link, where it stands for as many as it takes sequence numbers. As much as
/// a turn of a queue pair.
pub(super) const IDEAL_PACKET: usize = 256 << 10;

/// A WQE between its fetch and its completion.
#[derive(Debug)]
pub(super) struct Flight {
    /// Its number among those of the function, by which packets refer to it.
    pub(super) id: u64,
    pub(super) wqe: Wqe,
    pub(super) first_psn: u32,
    /// Sequence numbers that it takes: request packets, or response packets of a READ.
    pub(super) packets: u32,
    /// Response packets that have come.
    pub(super) received: u32,
    /// A local operation has been done: it is not repeated when packets are.
    pub(super) executed: bool,
    /// Why it fails once it is at the head.
    pub(super) failure: Option<Failure>,
    /// What it brought, for its completion.
    pub(super) scattered: Option<Scattered>,
    /// Something of it has been sent, or it is done.
    pub(super) started: bool,
}

impl Flight {
    /// Whether it needs response packets and not just an acknowledgement.
    pub(super) fn awaits_data(&self) -> bool {
        matches!(
            self.wqe.operation,
            Operation::Read { .. } | Operation::Atomic { .. }
        )
    }

    /// Whether everything up to, but not including, `unacked` completes it.
    pub(super) fn is_done(&self, unacked: u32) -> bool {
        if self.awaits_data() {
            return self.received == self.packets;
        }
        psn::distance(unacked, psn::add(self.first_psn, self.packets)) >= 0
    }
}

/// State of the sending half.
#[derive(Debug, Default)]
pub struct Requester {
    /// Producer index as last read from the doorbell record.
    pub producer: u16,
    /// Basic block of the next WQE to fetch.
    pub fetched: u16,
    /// Sequence number of the next new packet.
    pub next_psn: u32,
    /// Oldest sequence number without an answer.
    pub(super) unacked: u32,
    /// WQE that came with the doorbell.
    pub(super) copied: Option<Copied>,
    pub(super) flights: VecDeque<Flight>,
    pub(super) window: Window,
    /// Flight being sent, and how many of its packets have been.
    pub(super) cursor: usize,
    pub(super) sent: u32,
    pub(super) retries_left: u8,
    pub(super) rnr_retries_left: u8,
    /// Until when an answer must come.
    pub(super) deadline: Option<Instant>,
    /// Until when the receiver is not ready.
    pub(super) pause_until: Option<Instant>,
    /// When the doorbell record is to be looked at, because it said more than the copy that was taken.
    pub(super) record_at: Option<Instant>,
    /// Token of the page fault that it waits for.
    pub(super) page_fault: Option<u64>,
    /// Earliest look by the timer that has been asked for.
    pub(super) timer_at: Option<Instant>,
    /// Nothing new begins, and once all that has begun is done the send queue is drained.
    pub(super) draining: bool,
}

impl Requester {
    /// Starts sending with a sequence number.
    pub fn start(&mut self, next_psn: u32, decoded: &Decoded) {
        self.next_psn = next_psn;
        self.unacked = next_psn;
        self.retries_left = decoded.retry_count;
        self.rnr_retries_left = decoded.rnr_retry;
    }

    /// Forgets a WQE that came with a doorbell: memory has the truth.
    pub fn forget_copy(&mut self) {
        self.copied = None;
    }

    /// Begins nothing new. A WQE that waits for those before it is as if it had not been fetched.
    pub(super) fn drain(&mut self) {
        self.draining = true;
        let waits = |f: &Flight| !f.started && !f.executed && f.failure.is_none();
        while self.flights.back().is_some_and(waits) {
            if let Some(last) = self.flights.pop_back() {
                self.fetched = last.wqe.index;
                self.next_psn = last.first_psn;
            }
        }
        self.window.clear();
        self.forget_copy();
    }

    /// The newest sequence number that has been answered.
    pub fn acked_psn(&self) -> u32 {
        psn::add(self.unacked, psn::MASK)
    }

    /// Place of a flight. Its number is usually as far from the first one's, unless other queue pairs were at work between.
    fn place(&self, id: u64) -> Option<usize> {
        let ahead = id.checked_sub(self.flights.front()?.id)? as usize;
        match self.flights.get(ahead) {
            Some(flight) if flight.id == id => Some(ahead),
            _ => self.flights.binary_search_by_key(&id, |f| f.id).ok(),
        }
    }

    /// The WQE of a flight that has not ended.
    pub(super) fn in_flight(&self, id: u64) -> Option<&Wqe> {
        Some(&self.flights.get(self.place(id)?)?.wqe)
    }

    /// A flight cannot go on.
    pub(super) fn fail(&mut self, id: u64, failure: Failure) {
        let place = self.place(id);
        if let Some(flight) = place.and_then(|place| self.flights.get_mut(place)) {
            flight.failure.get_or_insert(failure);
        }
    }

    /// READs and atomics that have been sent and not answered.
    fn reads_out(&self) -> usize {
        self.flights
            .iter()
            .take(self.cursor)
            .filter(|f| f.awaits_data() && f.received < f.packets)
            .count()
    }

    /// Request packets that have been sent and not answered.
    fn unanswered(&self) -> u32 {
        // With READs, which take more numbers than packets, this is too much.
        let at_most = match self.flights.get(self.cursor) {
            Some(flight) => psn::distance(psn::add(flight.first_psn, self.sent), self.unacked),
            None => psn::distance(self.next_psn, self.unacked),
        };
        if (0..MAX_UNANSWERED as i32).contains(&at_most) {
            return at_most as u32;
        }
        let started = self
            .flights
            .iter()
            .take(self.cursor)
            .map(|f| if f.awaits_data() { 1 } else { f.packets });
        let covered = match self.flights.front() {
            Some(front) if !front.awaits_data() => {
                psn::distance(self.unacked, front.first_psn).max(0) as u32
            }
            _ => 0,
        };
        (started.sum::<u32>() + self.sent).saturating_sub(covered)
    }

    /// Moves the cursor back to the oldest packet without an answer.
    pub(super) fn rewind(&mut self) {
        self.cursor = 0;
        self.sent = 0;
        for (i, flight) in self.flights.iter().enumerate() {
            self.cursor = i;
            self.sent = if flight.awaits_data() {
                flight.received
            } else {
                (psn::distance(self.unacked, flight.first_psn).max(0) as u32).min(flight.packets)
            };
            if !flight.is_done(self.unacked) {
                return;
            }
        }
        self.cursor = self.flights.len();
        self.sent = 0;
    }
}

/// How much may be done before others get their turn.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    /// Packets.
    pub packets: u32,
    /// Bytes.
    pub bytes: usize,
}

impl Budget {
    /// Takes a packet with so many bytes from it.
    pub fn spend(&mut self, bytes: usize) {
        self.packets = self.packets.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    /// Whether nothing is left.
    pub fn is_spent(&self) -> bool {
        self.packets == 0 || self.bytes == 0
    }
}

/// What a ring of the send doorbell says of the producer index.
#[derive(Debug, Clone, Copy)]
pub(super) enum Posted {
    /// The doorbell record has it.
    Record,
    /// There is no record; the WQE that was rung for ends here.
    To(u16),
    /// The record has it, and the WQE that ends here was copied.
    Copy(u16),
}

/// The send doorbell was rung with a WQE index.
pub(super) fn rung(device: &mut Device, qpn: u32, index: u16, posted: Posted) {
    let Some(qp) = device.qps.get(qpn) else {
        return;
    };
    let (state, record) = (qp.state, qp.decoded.dbr);
    if !matches!(
        state,
        State::ReadyToSend | State::SendQueueError | State::SendQueueDrained | State::Error
    ) {
        let rule = "a send queue is rung in RTS, SQD, SQER or ERR";
        device.refuse(
            format!("qp {qpn:#x}"),
            "state",
            state as u8,
            rule,
            "IBA 10.3.1",
        );
        return;
    }
    let moved = match posted {
        Posted::To(end) => set_producer(device, qpn, end),
        Posted::Record => read_producer(device, qpn),
        Posted::Copy(end) => follow_copy(device, qpn, end),
    };
    if !moved {
        return;
    }
    let Some(qp) = device.qps.get(qpn) else {
        return;
    };
    // Drivers ring with the index of the last WQE or with the next free one; both are at most the record's.
    if (qp.requester.producer.wrapping_sub(index) as i16) < 0 {
        device.counters.doorbells_ahead += 1;
        let rule = "the doorbell record is written before the doorbell";
        device.refuse(
            format!("qp {qpn:#x} doorbell record {record:#x}"),
            "wqe_index",
            index,
            rule,
            "PRM, doorbell record",
        );
    }
    device.schedule(qpn);
}

/// Looks whether the doorbell record says more than is known.
pub fn look_at_record(device: &mut Device, qpn: u32) {
    let Some(qp) = device.qps.get(qpn) else {
        return;
    };
    let known = qp.requester.producer;
    if qp.state != State::ReadyToSend || qp.queues.log_send.is_none() || !qp.decoded.send_record {
        return;
    }
    let record = device.host.read_be32(qp.decoded.dbr + dbr::SEND);
    if record.is_ok_and(|word| word as u16 == known) {
        return;
    }
    if read_producer(device, qpn) {
        device.schedule(qpn);
    }
}

/// Reads the send producer index. `false` if the record cannot be used; the queue pair is then in error.
fn read_producer(device: &mut Device, qpn: u32) -> bool {
    let Some(qp) = device.qps.get_mut(qpn) else {
        return false;
    };
    if qp.queues.log_send.is_none() {
        return false;
    }
    let Ok(word) = device.host.read_be32(qp.decoded.dbr + dbr::SEND) else {
        fatal(device, qpn, kind::WQ_CATAS_ERROR);
        return false;
    };
    set_producer(device, qpn, word as u16)
}

/// Takes the send producer index that a copy of the WQE before `end` says. What the record has beyond it is about to be
/// copied too, and a copy that comes after its WQE has been read from memory is for nothing: with a slow host that went on
/// for as long as the driver posted. So the rest waits for its own ring, for a while.
fn follow_copy(device: &mut Device, qpn: u32, end: u16) -> bool {
    let Some(qp) = device.qps.get(qpn) else {
        return false;
    };
    let is_ahead = |of: u16, index: u16| (index.wrapping_sub(of) as i16) > 0;
    let known = qp.requester.producer;
    let record = device.host.read_be32(qp.decoded.dbr + dbr::SEND);
    // A copy of what has been executed already says nothing, but where there is one more will come.
    let producer = if is_ahead(known, end) { end } else { known };
    if !record.is_ok_and(|word| is_ahead(producer, word as u16)) {
        return read_producer(device, qpn);
    }
    if !set_producer(device, qpn, producer) {
        return false;
    }
    if let Some(mut qp) = device.qps.borrow_out(qpn) {
        let until = Instant::now() + device.copies.patience;
        qp.requester.record_at = Some(until);
        super::answers::look_at(device, &mut qp, until);
        device.qps.put_back(qpn, qp);
    }
    true
}

/// Takes a send producer index. `false` if there cannot be as much in the queue; the queue pair is then in error.
fn set_producer(device: &mut Device, qpn: u32, producer: u16) -> bool {
    let Some(qp) = device.qps.get_mut(qpn) else {
        return false;
    };
    let Some(log_size) = qp.queues.log_send else {
        return false;
    };
    // Of the WQEs in flight, those still count that have not completed.
    let posted = u32::from(producer.wrapping_sub(qp.requester.fetched));
    if posted > 1 << log_size {
        let rule = "at most as many blocks are posted as the queue has";
        device.refuse(
            format!("qp {qpn:#x}"),
            "send producer",
            producer,
            rule,
            "PRM, doorbell record",
        );
        fatal(device, qpn, kind::WQ_CATAS_ERROR);
        return false;
    }
    qp.requester.producer = producer;
    true
}

/// Runs the sending half for a while. Returns whether there is more to do at once.
pub fn run(device: &mut Device, qp: &mut Qp, budget: &mut Budget, now: Instant) -> bool {
    if qp.state != State::ReadyToSend {
        return false;
    }
    qp.requester.window.clear();
    loop {
        complete(device, qp);
        let requester = &qp.requester;
        let waits = requester.pause_until.is_some() || requester.page_fault.is_some();
        if qp.state != State::ReadyToSend || waits {
            return false;
        }
        if budget.is_spent() {
            return true;
        }
        if qp.limits != Limits::default() {
            if let Some(until) = pace::busy_until(device, qp.limits, Half::Requester, now) {
                answers::look_at(device, qp, until);
                return false;
            }
        }
        let none_left = qp.requester.cursor == qp.requester.flights.len();
        if none_left && (qp.requester.draining || !take_next(device, qp)) {
            return false;
        }
        match step(device, qp, now) {
            Step::Sent(bytes) => {
                budget.spend(bytes);
                if qp.limits != Limits::default() {
                    pace::spend(device, qp.limits, Half::Requester, bytes, now);
                }
            }
            Step::Local => budget.spend(0),
            Step::Wait => {
                complete(device, qp);
                return false;
            }
        }
    }
}

/// Fetches the next WQE into the flights. `false` if there is none or no room.
fn take_next(device: &mut Device, qp: &mut Qp) -> bool {
    let requester = &qp.requester;
    let available = requester.producer.wrapping_sub(requester.fetched);
    if available == 0
        || requester.flights.len() >= MAX_FLIGHTS
        || psn::distance(requester.next_psn, requester.unacked) >= MAX_AHEAD
        || requester
            .flights
            .back()
            .is_some_and(|f| f.failure.is_some())
    {
        return false;
    }
    let index = requester.fetched;
    // A copy is for the WQE that is next when it comes; of one that is not, memory has the truth.
    match &requester.copied {
        Some(copy) if copy.index == index => device.counters.blueflame_wqes += 1,
        _ => qp.requester.copied = None,
    }
    let (wqe, failure) = match wqe::fetch(&device.host, qp, index, available) {
        Fetched::Wqe(wqe) => {
            let too_long = wqe.len > 1 << qp.decoded.log_msg_max
                || qp.service.is_datagram() && wqe.len as usize > device.port.mtu();
            let failure = too_long.then(|| {
                device.refuse(
                    format!("qp {:#x} wqe {:#x}", qp.number, wqe.index),
                    "byte_count",
                    wqe.len,
                    "a message has at most 2^log_msg_max bytes, a datagram one MTU",
                    "IBA 9.7.8",
                );
                Failure::new(syndrome::LOCAL_LENGTH, vendor::SEND_LENGTH)
            });
            (wqe, failure)
        }
        Fetched::Malformed(wrong) => {
            if wrong.torn {
                device.counters.torn_wqes += 1;
            }
            device.refuse(
                format!("qp {:#x} wqe {:#x}", qp.number, wrong.index),
                wrong.field,
                wrong.value,
                wrong.rule,
                "PRM, WQE format",
            );
            let failure = Failure::new(syndrome::LOCAL_QP_OP, vendor::WQE_FORMAT);
            (
                placeholder(wrong.index, wrong.blocks, wrong.opcode),
                Some(failure),
            )
        }
        Fetched::Unreachable => {
            let failure = Failure::new(syndrome::LOCAL_QP_OP, vendor::WQE_FETCH);
            (placeholder(index, 1, 0), Some(failure))
        }
    };
    let failure = failure
        .or_else(|| dc::flushes(qp, &wqe))
        .or_else(|| device.faults.failure(qp.number));
    let id = device.fetched;
    device.fetched += 1;
    let requester = &mut qp.requester;
    requester.fetched = requester.fetched.wrapping_add(wqe.blocks);
    let packets = match wqe.operation {
        operation if operation.is_local() => 0,
        Operation::Atomic { .. } => 1,
        _ if qp.service.is_datagram() => 1,
        _ => (wqe.len as usize).div_ceil(qp.decoded.mtu).max(1) as u32,
    };
    // What fails is never sent, so it takes no sequence numbers.
    let packets = if failure.is_some() { 0 } else { packets };
    requester.flights.push_back(Flight {
        id,
        wqe,
        first_psn: requester.next_psn,
        packets,
        received: 0,
        executed: false,
        failure,
        scattered: None,
        started: false,
    });
    requester.next_psn = psn::add(requester.next_psn, packets);
    true
}

/// Stands for a WQE that could not be read.
pub(super) fn placeholder(index: u16, blocks: u16, opcode: u8) -> Wqe {
    Wqe {
        index,
        blocks,
        opcode,
        completion: 0,
        fence: 0,
        solicited: false,
        operation: Operation::Nop,
        destination: None,
        xrc_srqn: None,
        stream: 0,
        gather: SgeList::new(),
        inline: Vec::new(),
        len: 0,
        update: None,
    }
}

enum Step {
    Sent(usize),
    Local,
    Wait,
}

/// Does the cursor's next packet, or its local operation.
fn step(device: &mut Device, qp: &mut Qp, now: Instant) -> Step {
    let requester = &qp.requester;
    let Some(flight) = requester.flights.get(requester.cursor) else {
        return Step::Wait;
    };
    if flight.failure.is_some() {
        return Step::Wait;
    }
    let first = requester.sent == 0;
    if first && !dc::reaches(device, qp) {
        return Step::Wait;
    }
    let requester = &qp.requester;
    let Some(flight) = requester.flights.get(requester.cursor) else {
        return Step::Wait;
    };
    // A fence waits for the READs and atomics before it (IBA 10.8.3.3). Local operations are over when they are done.
    if first && flight.wqe.fence >= 2 && requester.reads_out() > 0 {
        return Step::Wait;
    }
    match flight.wqe.operation {
        Operation::Nop => {
            advance(qp, 0);
            Step::Local
        }
        operation if operation.is_local() && flight.executed => {
            advance(qp, 0);
            Step::Local
        }
        Operation::Dump
        | Operation::Copy
        | Operation::Invalidate { .. }
        | Operation::Update { .. }
        | Operation::SetPsv { .. } => {
            if let Some(denied) = absent(device, qp, &flight.wqe) {
                let half = odp::Half::Requester { flight: flight.id };
                if odp::wait(device, qp, half, denied, 0) {
                    return Step::Wait;
                }
            }
            let Some(flight) = qp.requester.flights.get(qp.requester.cursor) else {
                return Step::Wait;
            };
            let failure = match flight.wqe.operation {
                Operation::Dump => dump(device, qp, &flight.wqe).err(),
                Operation::Copy => copy(device, qp, &flight.wqe).err(),
                _ => keys::execute(device, qp, &flight.wqe).err(),
            };
            let cursor = qp.requester.cursor;
            if let Some(flight) = qp.requester.flights.get_mut(cursor) {
                flight.executed = true;
                flight.failure = failure;
            }
            told(device, qp);
            Step::Local
        }
        Operation::Read { .. } | Operation::Atomic { .. }
            if requester.reads_out() >= qp.decoded.max_reads_out =>
        {
            Step::Wait
        }
        _ if qp.service.is_reliable() && requester.unanswered() >= MAX_UNANSWERED => Step::Wait,
        _ => send(device, qp, now),
    }
}

/// Moves the cursor over `packets` packets, and to the next WQE at the end of this one.
fn advance(qp: &mut Qp, packets: u32) {
    let requester = &mut qp.requester;
    if let Some(flight) = requester.flights.get_mut(requester.cursor) {
        flight.started = true;
    }
    requester.sent += packets;
    if requester
        .flights
        .get(requester.cursor)
        .is_none_or(|f| requester.sent >= f.packets)
    {
        requester.cursor += 1;
        requester.sent = 0;
    }
}

pub(super) fn local_failure(denied: Denied) -> Failure {
    let vendor = match denied {
        Denied::Key | Denied::Domain => vendor::LOCAL_KEY,
        Denied::Bounds
        | Denied::Translation
        | Denied::Signature
        | Denied::Dma
        | Denied::Absent { .. }
        | Denied::Sender => vendor::LOCAL_BOUNDS,
        Denied::Permission => vendor::LOCAL_PERMISSION,
    };
    Failure::new(syndrome::LOCAL_PROT, vendor)
}

/// Who a queue pair is to memory keys.
pub fn accessor(qp: &Qp) -> Accessor {
    Accessor {
        pd: qp.decoded.pd,
        qpn: qp.number,
    }
}

/// What a packet of a WQE carries: `len` bytes from `offset` on.
fn gather(
    device: &Device,
    qp: &Qp,
    flight: &Flight,
    offset: usize,
    len: usize,
    lend: bool,
) -> Result<Payload, Denied> {
    let wqe = &flight.wqe;
    if len == 0 {
        return Ok(Payload::NONE);
    }
    if !wqe.inline.is_empty() {
        let bytes = wqe.inline.get(offset..offset + len).unwrap_or_default();
        return Ok(Payload::Bytes(bytes.to_vec()));
    }
    let who = accessor(qp);
    let signed = |sge: Sge| memory::is_signed(device, sge.key);
    if lend && !part(&wqe.gather, offset, len).any(signed) {
        for sge in part(&wqe.gather, offset, len) {
            memory::check_present(device, who, sge.into(), Purpose::LocalRead)?;
        }
        let lender = Lender::Request {
            qpn: qp.number,
            flight: flight.id,
            offset,
        };
        return Ok(Payload::Lent { lender, len });
    }
    let mut data = vec![0; len];
    let mut rest = data.as_mut_slice();
    for sge in part(&wqe.gather, offset, len) {
        let (into, tail) = rest.split_at_mut(sge.len as usize);
        memory::read(device, who, sge.key, sge.address, Purpose::LocalRead, into)?;
        rest = tail;
    }
    Ok(Payload::Bytes(data))
}

/// The page that a DUMP or a copy waits for. Of what a DUMP names only the start is read.
fn absent(device: &Device, qp: &Qp, wqe: &Wqe) -> Option<Denied> {
    let copies = wqe.operation == Operation::Copy;
    if !copies && wqe.operation != Operation::Dump {
        return None;
    }
    wqe.gather.iter().enumerate().find_map(|(i, sge)| {
        let mut range = memory::Range::from(*sge);
        if !copies {
            range.len = range.len.min(DUMPED);
        }
        let purpose = match copies && i == 1 {
            true => Purpose::LocalWrite,
            false => Purpose::LocalRead,
        };
        memory::absent(device, accessor(qp), range, purpose)
    })
}

/// Bytes that are read of a DUMP.
const DUMPED: u64 = 64;

/// Reads what a DUMP names. Of long ranges the start stands for the rest, whose key and bounds are checked.
fn dump(device: &Device, qp: &Qp, wqe: &Wqe) -> Result<(), Failure> {
    let mut head = [0; DUMPED as usize];
    for sge in &wqe.gather {
        let range = memory::Range {
            key: sge.key,
            address: sge.address,
            len: u64::from(sge.len),
        };
        let head = &mut head[..(sge.len as usize).min(DUMPED as usize)];
        memory::check(device, accessor(qp), range, Purpose::LocalRead)
            .and_then(|()| {
                let who = accessor(qp);
                memory::read(device, who, sge.key, sge.address, Purpose::LocalRead, head)
            })
            .map_err(local_failure)?;
    }
    Ok(())
}

/// Copies within local memory.
fn copy(device: &Device, qp: &Qp, wqe: &Wqe) -> Result<(), Failure> {
    if !qp.mmo {
        let object = format!("qp {:#x} wqe {:#x}", qp.number, wqe.index);
        let rule = "INIT2INIT_QP has enabled such operations";
        device.refuse(object, "mmo", 0u8, rule, "PRM QPC extension");
        return Err(Failure::new(syndrome::LOCAL_QP_OP, vendor::WQE_FORMAT));
    }
    let [from, to] = wqe.gather[..] else {
        return Ok(());
    };
    let who = accessor(qp);
    memory::check(device, who, to.into(), Purpose::LocalWrite).map_err(local_failure)?;
    let mut data = vec![0; from.len as usize];
    memory::read(
        device,
        who,
        from.key,
        from.address,
        Purpose::LocalRead,
        &mut data,
    )
    .and_then(|()| {
        let purpose = Purpose::LocalWrite;
        memory::write(device, who, to.key, to.address, purpose, data[..].into())
    })
    .map_err(local_failure)
}

/// Sends the cursor's next packet.
fn send(device: &mut Device, qp: &mut Qp, now: Instant) -> Step {
    let requester = &qp.requester;
    let (cursor, sent) = (requester.cursor, requester.sent);
    let Some(flight) = requester.flights.get(cursor) else {
        return Step::Wait;
    };
    let wqe = &flight.wqe;
    let mtu = qp.decoded.mtu;
    let offset = sent as usize * mtu;
    let rest = (wqe.len as usize).saturating_sub(offset);
    let ideal = is_ideal(device, qp);
    let span = match ideal {
        true => (flight.packets - sent).min((IDEAL_PACKET / mtu) as u32),
        false => 1,
    };
    let last = sent + span == flight.packets;
    let position = Position {
        first: sent == 0,
        last,
    };
    let rider = |rider| if last { rider } else { Rider::None };
    let (kind, carried, answered) = match wqe.operation {
        Operation::Send { rider: r } => (
            Kind::Send {
                position,
                rider: rider(r),
            },
            rest.min(packet_len(device, qp) * span as usize),
            span,
        ),
        Operation::Write {
            address,
            rkey,
            rider: r,
        } => {
            let reth = position.first.then_some(Reth {
                address,
                rkey,
                len: wqe.len,
            });
            (
                Kind::Write {
                    position,
                    reth,
                    rider: rider(r),
                },
                rest.min(mtu * span as usize),
                span,
            )
        }
        // One request asks for all that is missing.
        Operation::Read { address, rkey } => {
            let reth = Reth {
                address: address.wrapping_add(offset as u64),
                rkey,
                len: rest as u32,
            };
            (Kind::ReadRequest(reth), 0, flight.packets - sent)
        }
        Operation::Atomic {
            address,
            rkey,
            operation,
            len,
        } => (
            Kind::AtomicRequest {
                address,
                rkey,
                operation,
                len,
            },
            0,
            1,
        ),
        Operation::Nop
        | Operation::Dump
        | Operation::Copy
        | Operation::Invalidate { .. }
        | Operation::Update { .. }
        | Operation::SetPsv { .. } => {
            return Step::Wait;
        }
    };
    let payload = match gather(device, qp, flight, offset, carried, ideal) {
        Ok(payload) => payload,
        Err(denied) => {
            let half = odp::Half::Requester { flight: flight.id };
            if odp::wait(device, qp, half, denied, 0) {
                return Step::Wait;
            }
            // What was sent before stands; the WQE fails when it is its turn to complete.
            if let Some(flight) = qp.requester.flights.get_mut(cursor) {
                flight.failure = Some(local_failure(denied));
                if sent == 0 {
                    qp.requester.next_psn = flight.first_psn;
                    flight.packets = 0;
                }
            }
            return Step::Local;
        }
    };
    let ack_request = qp.service.is_reliable()
        && (last || flight.awaits_data() || sent % ACK_EVERY + span >= ACK_EVERY);
    let mut packet = address(device, qp, wqe);
    packet.psn = psn::add(flight.first_psn, sent);
    // A request for data is one packet, whatever number of responses it has.
    packet.span = if flight.awaits_data() { 1 } else { span };
    packet.ack_request = ack_request;
    packet.solicited = last && wqe.solicited;
    packet.kind = kind;
    packet.payload = payload;
    let bytes = packet.payload.len();
    device.counters.packets_sent += u64::from(packet.span);
    device.counters.bytes_sent += bytes as u64;
    device.outbox.push_back(packet);
    advance(qp, answered);
    told(device, qp);
    if qp.service.is_reliable() {
        expect_answer(device, qp, now);
    } else {
        // Nobody answers: what is sent is done.
        qp.requester.unacked = psn::add(qp.requester.unacked, 1);
    }
    Step::Sent(bytes)
}

/// Tells of the wrong signatures that have been met on the sending half's behalf. A queue pair may want to stop then, before
/// what depends on the data is sent.
pub(super) fn told(device: &mut Device, qp: &mut Qp) {
    let told = signature::report(device, qp.decoded.cqn_send, qp.number);
    if told && qp.decoded.drain_sigerr && qp.state == State::ReadyToSend {
        qp.requester.drain();
    }
}

/// Whether what a queue pair sends is there at once, and its memory the receiver's to read until it says that it has.
pub(super) fn is_ideal(device: &Device, qp: &Qp) -> bool {
    qp.service.is_reliable() && device.port.link.is_ideal()
}

/// Bytes that a SEND's packet holds: a datagram is one packet whatever the queue pair's MTU field says.
fn packet_len(device: &Device, qp: &Qp) -> usize {
    if qp.service.is_datagram() {
        device.port.mtu()
    } else {
        qp.decoded.mtu
    }
}

/// A packet with its addresses filled in.
fn address(device: &Device, qp: &Qp, wqe: &Wqe) -> Packet {
    let d = &qp.decoded;
    let transport = match qp.service {
        Service::Uc => Transport::Uc,
        Service::Xrc => Transport::Xrc,
        Service::Dci | Service::Dct | Service::Dcr => Transport::Dc,
        Service::Ud | Service::Smi | Service::Gsi => Transport::Ud,
        Service::Rc | Service::RegUmr | Service::Sq => Transport::Rc,
    };
    let grh = |gid: [u8; 16], traffic_class, flow_label, hop_limit| Grh {
        source: device.port.gid(0),
        destination: gid,
        traffic_class,
        flow_label,
        hop_limit,
    };
    let mut packet = Packet {
        source_lid: device.port.lid,
        destination_lid: d.remote_lid,
        sl: d.sl,
        grh: d.remote_gid.map(|gid| grh(gid, 0, 0, 64)),
        transport,
        pkey: device.port.pkey(usize::from(d.pkey_index)),
        qpn: d.remote_qpn,
        psn: 0,
        span: 1,
        ack_request: false,
        solicited: false,
        deth: None,
        dceth: None,
        xrc_srqn: wqe.xrc_srqn,
        kind: Kind::Acknowledge(Verdict::Ack),
        payload: Payload::NONE,
    };
    if let Some(av) = wqe.destination {
        packet.destination_lid = av.lid;
        packet.sl = av.sl;
        packet.grh = av
            .gid
            .map(|gid| grh(gid, av.traffic_class, av.flow_label, av.hop_limit));
        packet.qpn = av.qpn;
        if qp.service == Service::Dci {
            packet.dceth = dc::header(qp);
            return packet;
        }
        // A Q_Key with the top bit set stands for the queue pair's own (IBA 10.2.5).
        let qkey = if av.qkey >> 31 == 1 { d.qkey } else { av.qkey };
        packet.deth = Some(Deth {
            qkey,
            source_qpn: responder::wire_qpn(qp),
        });
    }
    packet
}
