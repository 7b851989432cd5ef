// SPDX-License-Identifier: MIT OR Apache-2.0
//! Datagrams that arrive.

use super::completion::{Completion, Failure, Source, vendor};
use super::lent::Data;
use super::memory::Accessor;
use super::receive_queue::{deliver, fail_receive, scatter, take_receive};
use super::{completing, signature};
use crate::ifc::event::kind;
use crate::ifc::wqe::{cqe_opcode, syndrome};
use crate::objects::device::Device;
use crate::objects::qp::{Qp, Service};
use crate::wire::packet::{Kind, Packet, Rider};

/// Bytes that a global route header, or its place, takes before a datagram's data.
const GRH_LEN: usize = 40;

/// A datagram for a queue pair.
pub(super) fn receive(device: &mut Device, qp: &mut Qp, packet: &Packet, data: Data<'_>) {
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
        Err(()) => return completing::enter_error(device, qp, None),
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
        head[4..6].copy_from_slice(&(data.len() as u16).to_be_bytes());
        // Next header 0x1b is the base transport header.
        head[6] = 0x1b;
        head[7] = grh.hop_limit;
        head[8..24].copy_from_slice(&grh.source);
        head[24..40].copy_from_slice(&grh.destination);
    }
    let room: u64 = receive.scatter.iter().map(|sge| u64::from(sge.len)).sum();
    let len = GRH_LEN + data.len();
    let fits = len as u64 <= room;
    let written = fits
        && (packet.grh.is_none()
            || scatter(device, who, &receive.scatter, 0, head[..].into()).is_ok())
        && scatter(device, who, &receive.scatter, GRH_LEN, data).is_ok();
    signature::report(device, receive.complete_to(qp), qp.number);
    if !written {
        let failure = if fits {
            Failure::new(syndrome::LOCAL_PROT, vendor::SCATTER)
        } else {
            Failure::new(syndrome::LOCAL_LENGTH, vendor::RECEIVE_LENGTH)
        };
        fail_receive(device, qp, &receive, failure);
        return completing::enter_error(device, qp, None);
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
        pkey: packet.pkey,
    });
    if !deliver(device, qp, &receive, entry) {
        completing::enter_error(device, qp, Some(kind::WQ_CATAS_ERROR));
    }
}
