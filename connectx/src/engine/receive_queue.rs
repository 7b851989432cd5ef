// SPDX-License-Identifier: MIT OR Apache-2.0
//! Receive WQEs: taking them from a queue pair's own or a shared receive queue, filling their memory, completing them.

use std::time::{Duration, Instant};

use super::completion::{self, Completion, Failure, Source, error_opcode, vendor};
use super::event;
use super::lent::Data;
use super::memory::{self, Accessor, Denied, Purpose};
use super::wqe::{Sge, SgeList, part, scatter_list};
use crate::ifc::event::kind;
use crate::ifc::wqe::{SEGMENT, dbr, srq_next, syndrome};
use crate::objects::dc::Dc;
use crate::objects::device::Device;
use crate::objects::memory::Buffer;
use crate::objects::qp::{Qp, ReceiveFrom};
use crate::objects::queue::SrqKind;

/// Longest receive WQE.
const MAX_RECEIVE_WQE: usize = 512;
/// How often a queue pair in error is looked at for newly posted receive WQEs, which ring no doorbell.
const ERROR_POLL: Duration = Duration::from_millis(2);
/// How often after [`ERROR_POLLS`] looks that found nothing.
const ERROR_POLL_SLOW: Duration = Duration::from_millis(50);
const ERROR_POLLS: u32 = 500;

/// A receive WQE that has been taken.
#[derive(Debug, Clone)]
pub(super) struct Receive {
    /// As in its CQE: counter of the receive queue, or place in the shared one.
    pub(super) index: u16,
    pub(super) scatter: SgeList,
    /// Who owns the memory: protection domain of the queue.
    pub(super) pd: u32,
    /// Of an XRC SRQ: where to complete to, and the user index.
    pub(super) complete_to: Option<(u32, u32)>,
}

impl Receive {
    /// The completion queue that it completes to.
    pub(super) fn complete_to(&self, qp: &Qp) -> u32 {
        self.complete_to
            .map_or(qp.decoded.cqn_receive, |(cqn, _)| cqn)
    }
}

/// Takes the next receive WQE: `None` if there is none, an error if its memory or queue is broken.
pub(super) fn take_receive(
    device: &mut Device,
    qp: &mut Qp,
    xrc_srqn: Option<u32>,
) -> Result<Option<Receive>, ()> {
    if let Some(spare) = qp.responder.spare.take() {
        return Ok(Some(spare));
    }
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
fn read_queue(device: &Device, buffer: &Buffer, offset: u64, into: &mut [u8]) -> Result<(), ()> {
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
    if u32::from(posted) > 1 << srq.log_size {
        let rule = "at most as many receive WQEs are posted as the shared queue has";
        device.refuse(
            format!("srq {srqn:#x}"),
            "receive producer",
            word,
            rule,
            "PRM, doorbell record",
        );
        if let Some(srq) = device.srqs.get_mut(srqn) {
            srq.error = true;
        }
        event::shared_receive_queue(device, kind::SRQ_CATAS_ERROR, srqn);
        return Err(());
    }
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
    data: Data<'_>,
) -> Result<(), Denied> {
    let mut done = 0;
    for sge in part(list, offset, data.len()) {
        let end = done + sge.len as usize;
        memory::write(
            device,
            who,
            sge.key,
            sge.address,
            Purpose::LocalWrite,
            data.part(done..end),
        )?;
        done = end;
    }
    if done == data.len() {
        Ok(())
    } else {
        Err(Denied::Bounds)
    }
}

/// Completes a receive WQE. `false` if the completion queue has failed.
pub(super) fn deliver(
    device: &mut Device,
    qp: &mut Qp,
    receive: &Receive,
    mut entry: Completion,
) -> bool {
    if let Dc::Responder(peer) = &qp.dc {
        entry.source = Some(Source {
            lid: peer.lid,
            qpn: peer.qpn,
            sl: qp.decoded.sl,
            grh: false,
            pkey: device.port.pkey(usize::from(qp.decoded.pkey_index)),
        });
    }
    if let Some((_, user_index)) = receive.complete_to {
        entry.user_index = user_index;
    }
    completion::post(device, receive.complete_to(qp), &entry)
}

/// Completes a receive WQE with an error.
pub(super) fn fail_receive(device: &mut Device, qp: &mut Qp, receive: &Receive, failure: Failure) {
    let mut entry = Completion::new(
        error_opcode(false),
        qp.shown_number(),
        qp.decoded.user_index,
        receive.index,
    );
    entry.failure = Some(failure);
    deliver(device, qp, receive, entry);
}

/// Completes the begun message and every posted receive WQE with a flush. Returns how many.
pub fn flush(device: &mut Device, qp: &mut Qp) -> u32 {
    let failure = Failure::new(syndrome::WR_FLUSH, vendor::RECEIVE_FLUSH);
    let mut flushed = 0;
    if let Some(receive) = qp.responder.abandon() {
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
                scatter: SgeList::new(),
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
        let instead = qp.responder.next_poll.replace(now + period);
        device.timers.add(now + period, qp.number, instead);
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
