// SPDX-License-Identifier: MIT OR Apache-2.0
//! Completion queue entries.

use super::lent::Data;
use super::{compression, event, held};
use crate::ifc::event::cq_error;
use crate::ifc::wqe::{cqe, cqe_opcode, dbr, sig_err_cqe, syndrome};
use crate::objects::device::{Device, Host};
use crate::objects::queue::{Arm, Cq, CqStatus};
use crate::objects::signature::SignatureError;

/// Mask of producer and consumer indices.
const INDEX: u32 = 0xff_ffff;

/// Vendor syndromes as ConnectX is seen to report them (rdma-core, UCX and NCCL bug reports quote them).
#[allow(missing_docs)]
pub mod vendor {
    pub const RETRY: u8 = 0x81;
    pub const RNR_RETRY: u8 = 0x87;
    pub const REMOTE_ACCESS: u8 = 0x88;
    pub const REMOTE_OPERATION: u8 = 0x89;
    pub const REMOTE_INVALID: u8 = 0x8a;
    pub const LOCAL_KEY: u8 = 0x51;
    pub const LOCAL_BOUNDS: u8 = 0x52;
    pub const LOCAL_PERMISSION: u8 = 0x53;
    pub const SCATTER: u8 = 0x54;
    pub const WQE_FORMAT: u8 = 0x68;
    pub const SEND_LENGTH: u8 = 0x6e;
    pub const RECEIVE_LENGTH: u8 = 0x6f;
    pub const WQE_FETCH: u8 = 0x75;
    pub const KEY_UPDATE: u8 = 0x78;
    pub const RECEIVE_FLUSH: u8 = 0xf5;
    pub const SEND_FLUSH: u8 = 0xf9;
}

/// Why a WQE failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// Syndrome, `ifc::wqe::syndrome`.
    pub syndrome: u8,
    /// Vendor's syndrome: what hardware is known to report with it.
    pub vendor: u8,
}

impl Failure {
    /// A failure.
    pub const fn new(syndrome: u8, vendor: u8) -> Self {
        Self { syndrome, vendor }
    }
}

impl Failure {
    /// The rule that a failure's syndrome stands for, and where it is written. What made this request break it has a
    /// record of its own, of the side that refused.
    fn rule(self) -> (&'static str, &'static str) {
        match self.syndrome {
            syndrome::LOCAL_LENGTH => (
                "a message is no longer than its queue pair and its receive request permit",
                "IBA 11.6.2, Local Length Error",
            ),
            syndrome::LOCAL_QP_OP => (
                "a WQE can be fetched and is of the format of its opcode",
                "IBA 11.6.2, Local QP Operation Error",
            ),
            syndrome::LOCAL_PROT => (
                "local memory is reached by a key that covers and permits it",
                "IBA 11.6.2, Local Protection Error",
            ),
            syndrome::MW_BIND => (
                "a key is changed as it and its queue pair permit",
                "IBA 11.6.2, Memory Window Bind Error",
            ),
            syndrome::BAD_RESP => (
                "a response has the length and place that were asked for",
                "IBA 11.6.2, Bad Response Error",
            ),
            syndrome::LOCAL_ACCESS => (
                "data of a WRITE with immediate can be written",
                "IBA 11.6.2, Local Access Error",
            ),
            syndrome::REMOTE_INVAL_REQ => (
                "the responder can do what is asked",
                "IBA 11.6.2, Remote Invalid Request Error",
            ),
            syndrome::REMOTE_ACCESS => (
                "remote memory is reached by a key that covers and permits it",
                "IBA 11.6.2, Remote Access Error",
            ),
            syndrome::REMOTE_OP => (
                "the responder's own queues work",
                "IBA 11.6.2, Remote Operation Error",
            ),
            syndrome::TRANSPORT_RETRY_EXC => (
                "the responder answers one of retry_count tries",
                "IBA 11.6.2, Transport Retry Counter Exceeded",
            ),
            syndrome::RNR_RETRY_EXC => (
                "the responder has a receive request within rnr_retry tries",
                "IBA 11.6.2, RNR Retry Counter Exceeded",
            ),
            _ => ("a failure that was asked for", "connectx ctl fault"),
        }
    }

    /// Records a failed request. Flushes are not refusals: they follow from one.
    fn report(self, device: &Device, completion: &Completion) {
        if self.syndrome == syndrome::WR_FLUSH {
            return;
        }
        let half = if completion.opcode == cqe_opcode::REQ_ERR {
            "wqe"
        } else {
            "receive"
        };
        let (rule, source) = self.rule();
        device.refuse(
            format!(
                "qp {:#x} {half} {:#x}",
                completion.qpn, completion.wqe_counter
            ),
            "syndrome",
            (u16::from(self.vendor) << 8) | u16::from(self.syndrome),
            rule,
            source,
        );
    }
}

/// Every failure that a completion can report, and what earns it. Of the kernel's syndromes only 0x22, remote aborted, is
/// missing: it belongs to reliable datagrams, which no ConnectX has (IBA 9.9.2.4.2).
pub const FAILURES: &[(Failure, &str)] = {
    use crate::ifc::wqe::syndrome::*;
    use vendor::{
        KEY_UPDATE, LOCAL_BOUNDS, LOCAL_KEY, LOCAL_PERMISSION, RECEIVE_FLUSH, RECEIVE_LENGTH,
        REMOTE_INVALID, REMOTE_OPERATION, RETRY, RNR_RETRY, SCATTER, SEND_FLUSH, SEND_LENGTH,
        WQE_FETCH, WQE_FORMAT,
    };
    &[
        (
            Failure::new(LOCAL_LENGTH, SEND_LENGTH),
            "a message is longer than log_msg_max, or a datagram than the MTU",
        ),
        (
            Failure::new(LOCAL_LENGTH, RECEIVE_LENGTH),
            "a message is longer than its receive WQE",
        ),
        (
            Failure::new(LOCAL_QP_OP, WQE_FORMAT),
            "a WQE is not one of its queue pair's",
        ),
        (
            Failure::new(LOCAL_QP_OP, WQE_FETCH),
            "the send queue's memory cannot be read",
        ),
        (
            Failure::new(LOCAL_QP_OP, SCATTER),
            "a SEND with invalidate names a key that it may not take away",
        ),
        (
            Failure::new(LOCAL_PROT, LOCAL_KEY),
            "a send WQE names no key of its protection domain",
        ),
        (
            Failure::new(LOCAL_PROT, LOCAL_BOUNDS),
            "a send WQE leaves its key's range, or memory",
        ),
        (
            Failure::new(LOCAL_PROT, LOCAL_PERMISSION),
            "a send WQE needs a right that its key does not have",
        ),
        (
            Failure::new(LOCAL_PROT, SCATTER),
            "a receive WQE's keys do not take the message",
        ),
        (Failure::new(WR_FLUSH, SEND_FLUSH), "a send behind an error"),
        (
            Failure::new(WR_FLUSH, RECEIVE_FLUSH),
            "a receive behind an error",
        ),
        (
            Failure::new(MW_BIND, KEY_UPDATE),
            "a UMR that the key does not permit",
        ),
        (
            Failure::new(BAD_RESP, REMOTE_INVALID),
            "a response that does not fit its request",
        ),
        (
            Failure::new(LOCAL_ACCESS, SCATTER),
            "data of a WRITE with immediate cannot be written",
        ),
        (
            Failure::new(REMOTE_INVAL_REQ, REMOTE_INVALID),
            "the responder refused the request as none",
        ),
        (
            Failure::new(REMOTE_ACCESS, vendor::REMOTE_ACCESS),
            "the responder refused access to memory",
        ),
        (
            Failure::new(REMOTE_OP, REMOTE_OPERATION),
            "the responder could not do its part",
        ),
        (
            Failure::new(TRANSPORT_RETRY_EXC, RETRY),
            "no answer, however often asked",
        ),
        (
            Failure::new(RNR_RETRY_EXC, RNR_RETRY),
            "no receive WQE, however often asked",
        ),
    ]
};

/// Where a datagram came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Source {
    pub lid: u16,
    pub qpn: u32,
    pub sl: u8,
    pub grh: bool,
    pub pkey: u16,
}

/// Data of a message that lies in its completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scattered {
    bytes: [u8; 64],
    len: u8,
    /// It is the first half of an entry of 128 bytes, as the queue pair's 64-byte mode has it.
    wide: bool,
}

impl Scattered {
    /// Data for a completion of a queue, if a queue pair that permits `most` bytes leaves it there.
    pub fn new(device: &Device, cqn: u32, most: usize, data: Data<'_>) -> Option<Self> {
        if most == 0 || data.is_empty() || data.len() > most {
            return None;
        }
        // An entry that has been made smaller since has room for the 32 bytes that every entry has.
        let wide = most == 64 && device.cqs.get(cqn).is_some_and(|cq| cq.entry == 128);
        if !wide && data.len() > 32 {
            return None;
        }
        let mut bytes = [0; 64];
        bytes.get_mut(..data.len())?.copy_from_slice(data.bytes()?);
        Some(Self {
            bytes,
            len: data.len() as u8,
            wide,
        })
    }

    fn bytes(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or_default()
    }
}

/// What a completion queue entry says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Completion {
    /// `ifc::wqe::cqe_opcode`.
    pub opcode: u8,
    /// Opcode of the send WQE, of a requester's completion.
    pub send_opcode: u8,
    pub qpn: u32,
    pub user_index: u32,
    pub wqe_counter: u16,
    pub byte_count: u32,
    /// Immediate data or invalidated key.
    pub immediate: u32,
    /// The sender asked for an event.
    pub solicited: bool,
    pub source: Option<Source>,
    pub failure: Option<Failure>,
    pub scattered: Option<Scattered>,
    pub signature: Option<SignatureError>,
}

impl Completion {
    /// A completion with nothing but its place.
    pub fn new(opcode: u8, qpn: u32, user_index: u32, wqe_counter: u16) -> Self {
        Self {
            opcode,
            send_opcode: 0,
            qpn,
            user_index,
            wqe_counter,
            byte_count: 0,
            immediate: 0,
            solicited: false,
            source: None,
            failure: None,
            scattered: None,
            signature: None,
        }
    }

    /// The entry in memory, without its owner bit. `clock` is the device's time.
    pub fn encode(&self, clock: u64) -> [u8; cqe::SIZE] {
        let mut entry = [0; cqe::SIZE];
        cqe::user_index.set(&mut entry, u64::from(self.user_index));
        cqe::qpn.set(&mut entry, u64::from(self.qpn));
        cqe::send_opcode.set(&mut entry, u64::from(self.send_opcode));
        cqe::wqe_counter.set(&mut entry, u64::from(self.wqe_counter));
        cqe::opcode.set(&mut entry, u64::from(self.opcode));
        if let Some(error) = &self.signature {
            // Type 0 is a block's, and domain 0 the wire.
            for (field, value) in [
                (sig_err_cqe::expected_trans_sig, error.expected >> 32),
                (sig_err_cqe::actual_trans_sig, error.actual >> 32),
                (sig_err_cqe::expected_reftag, error.expected),
                (sig_err_cqe::actual_reftag, error.actual),
                (sig_err_cqe::syndrome, error.syndrome.into()),
                (sig_err_cqe::domain, error.in_memory.into()),
                (sig_err_cqe::mkey, error.key.into()),
                (sig_err_cqe::err_offset, error.offset),
            ] {
                field.set(&mut entry, value);
            }
            return entry;
        }
        if let Some(failure) = self.failure {
            cqe::syndrome.set(&mut entry, u64::from(failure.syndrome));
            cqe::vendor_syndrome.set(&mut entry, u64::from(failure.vendor));
            return entry;
        }
        cqe::imm.set(&mut entry, u64::from(self.immediate));
        cqe::byte_cnt.set(&mut entry, u64::from(self.byte_count));
        cqe::timestamp.set(&mut entry, clock);
        cqe::solicited.set(&mut entry, u64::from(self.solicited));
        if let Some(source) = self.source {
            cqe::slid.set(&mut entry, u64::from(source.lid));
            cqe::rqpn.set(&mut entry, u64::from(source.qpn));
            cqe::sl.set(&mut entry, u64::from(source.sl));
            cqe::grh.set(&mut entry, u64::from(source.grh));
            // The field is imm_inval_pkey: without the first two it holds the third, from which ib_cm has its partition.
            if self.opcode == cqe_opcode::RESP_SEND {
                cqe::imm.set(&mut entry, u64::from(source.pkey));
            }
        }
        if let Some(data) = &self.scattered {
            cqe::format.set(&mut entry, if data.wide { 2 } else { 1 });
            if !data.wide {
                entry[..data.bytes().len()].copy_from_slice(data.bytes());
            }
        }
        entry
    }
}

/// Completes something. `false` if the queue has failed: then its queue pair must stop.
pub fn post(device: &mut Device, cqn: u32, completion: &Completion) -> bool {
    if device.held.is_empty() && !device.faults.holds_completions() {
        return write(device, cqn, completion);
    }
    held::post(device, cqn, completion)
}

/// Writes an entry to a completion queue, or adds it to the queue's compressed session. `false` if the queue has failed.
pub(super) fn write(device: &mut Device, cqn: u32, completion: &Completion) -> bool {
    compression::take(device, cqn, completion) || write_entry(device, cqn, completion)
}

/// Whether a queue has room for one more than the `taken` completions that it is to take besides.
pub(super) fn has_room(host: &Host, cq: &mut Cq, taken: usize) -> bool {
    if cq.overrun_ignore || cq.collapsed {
        return true;
    }
    let free = |cq: &Cq| {
        let used = cq.producer.wrapping_sub(cq.consumer) & INDEX;
        used as usize + taken < 1 << cq.log_size
    };
    if free(cq) {
        return true;
    }
    // The consumer may have moved since we last looked.
    if let Ok(word) = host.read_be32(cq.dbr + dbr::CQ_CONSUMER) {
        cq.consumer = word & INDEX;
    }
    free(cq)
}

/// Writes an entry's 64 bytes, and the half before them if need be. `ahead` is its distance from the producer.
///
/// The last quadword makes the entry valid, so it must be seen last; it is seen whole, so that in a collapsed queue the
/// counter of one completion is never there with the opcode of another.
pub(super) fn put(host: &Host, cq: &Cq, ahead: u32, first_half: &[u8], entry: &[u8]) -> bool {
    let slot = match cq.collapsed {
        true => 0,
        false => cq.producer.wrapping_add(ahead) & ((1 << cq.log_size) - 1),
    };
    // In an entry of 128 bytes the completion is the second half.
    let offset = u64::from(slot) * cq.entry + (cq.entry - cqe::SIZE as u64);
    let first_half = match first_half {
        [] if cq.padded => &[0; cqe::SIZE],
        given => given,
    };
    let written = first_half.is_empty()
        || cq
            .buffer
            .locate(offset - cqe::SIZE as u64)
            .is_some_and(|(addr, _)| host.write(addr, first_half).is_ok());
    written
        && cq
            .buffer
            .locate(offset)
            .is_some_and(|(addr, _)| host.write_entry(addr, entry).is_ok())
}

/// An entry could not be written: nothing more is.
pub(super) fn write_failed(device: &mut Device, cqn: u32) {
    if let Some(cq) = device.cqs.get_mut(cqn) {
        cq.status = CqStatus::WriteFail;
        event::cq_error(device, cqn, cq_error::ACCESS_VIOLATION);
    }
}

/// Counts entries that have been written, and sends the event that somebody may wait for.
pub(super) fn written(device: &mut Device, cqn: u32, count: u32, wanted: bool) {
    let Some(cq) = device.cqs.get_mut(cqn) else {
        return;
    };
    cq.producer = cq.producer.wrapping_add(count) & INDEX;
    if wanted {
        cq.last_solicited = cq.producer;
    }
    if cq.arm == Arm::Any || cq.arm == Arm::Solicited && wanted {
        fire(device, cqn);
    }
}

/// Writes an entry to a completion queue. `false` if the queue has failed.
pub(super) fn write_entry(device: &mut Device, cqn: u32, completion: &Completion) -> bool {
    let clock = crate::hca::clock::ticks();
    let Some(cq) = device.cqs.get_mut(cqn) else {
        return false;
    };
    if cq.status != CqStatus::Ok {
        return false;
    }
    if !has_room(&device.host, cq, 0) {
        cq.status = CqStatus::Overflow;
        device.counters.cq_overruns += 1;
        let rule = "a queue has room for all completions that can arrive before they are consumed";
        device.refuse(
            format!("cq {cqn:#x}"),
            "producer",
            completion.qpn,
            rule,
            "PRM CQC",
        );
        event::cq_error(device, cqn, cq_error::OVERRUN);
        return false;
    }
    let mut entry = completion.encode(clock);
    cqe::owner.set(&mut entry, u64::from(owner(cq)));
    let first_half = match &completion.scattered {
        Some(data) if data.wide && cq.entry == 128 => data.bytes(),
        _ => &[],
    };
    if !put(&device.host, cq, 0, first_half, &entry) {
        write_failed(device, cqn);
        return false;
    }
    let failed = completion.failure.is_some() || completion.signature.is_some();
    written(device, cqn, 1, completion.solicited || failed);
    if let Some(failure) = completion.failure {
        device.counters.error_cqes += 1;
        failure.report(device, completion);
    }
    true
}

/// Owner bit of the next entry: the lap around the ring.
pub(super) fn owner(cq: &Cq) -> u32 {
    if cq.collapsed {
        0
    } else {
        (cq.producer >> cq.log_size) & 1
    }
}

fn fire(device: &mut Device, cqn: u32) {
    let Some(cq) = device.cqs.get_mut(cqn) else {
        return;
    };
    cq.arm = Arm::Off;
    cq.last_notified = cq.producer;
    let eqn = cq.eqn;
    event::completion(device, eqn, cqn);
}

/// The arm doorbell of a completion queue: asks for an event for what lies beyond `consumer` and has had none.
///
/// A consumer that arms before it polls (as perftest does) gets no second event for the same entry.
pub fn arm(device: &mut Device, cqn: u32, consumer: u32, solicited_only: bool) {
    let Some(cq) = device.cqs.get_mut(cqn) else {
        return;
    };
    cq.consumer = consumer;
    let newest = if solicited_only {
        cq.last_solicited
    } else {
        cq.producer
    };
    let kind = if solicited_only {
        Arm::Solicited
    } else {
        Arm::Any
    };
    cq.arm = kind;
    if is_after(newest, consumer) && is_after(newest, cq.last_notified) {
        fire(device, cqn);
    }
}

/// Whether an index lies after another, within half of the index space.
fn is_after(index: u32, other: u32) -> bool {
    let ahead = index.wrapping_sub(other) & INDEX;
    ahead != 0 && ahead <= INDEX / 2
}

/// Error opcode for a completion of a send or of a receive.
pub fn error_opcode(send: bool) -> u8 {
    if send {
        cqe_opcode::REQ_ERR
    } else {
        cqe_opcode::RESP_ERR
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_the_layout_of_the_driver_s_header() {
        let mut c = Completion::new(cqe_opcode::RESP_SEND_IMM, 0x12_3456, 0xab_cdef, 0x1234);
        c.byte_count = 0x1000;
        c.immediate = 0xdead_beef;
        c.solicited = true;
        let e = c.encode(0x0102_0304_0506_0708);
        assert_eq!(
            &e[0x20..0x28],
            &[0x00, 0xab, 0xcd, 0xef, 0xde, 0xad, 0xbe, 0xef]
        );
        assert_eq!(
            &e[0x2c..0x40],
            &[
                0, 0, 0x10, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0x12, 0x34, 0x56, 0x12, 0x34, 0, 0x32
            ]
        );
    }

    #[test]
    fn indices_wrap() {
        assert!(is_after(1, 0) && !is_after(0, 0) && !is_after(0, 1));
        assert!(is_after(0, INDEX) && !is_after(INDEX, 0));
    }

    #[test]
    fn error_entries_carry_both_syndromes() {
        let mut c = Completion::new(cqe_opcode::REQ_ERR, 7, 0, 9);
        c.send_opcode = 0x08;
        c.failure = Some(Failure::new(syndrome::REMOTE_ACCESS, 0x88));
        let e = c.encode(1);
        assert_eq!(
            (e[0x36], e[0x37], e[0x38], e[0x3b], e[0x3d], e[0x3f]),
            (0x88, 0x13, 0x08, 7, 9, 0xd0)
        );
        assert_eq!(&e[0x2c..0x36], &[0; 10], "no length, no time");
    }
}
