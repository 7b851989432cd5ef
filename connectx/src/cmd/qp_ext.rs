// SPDX-License-Identifier: MIT OR Apache-2.0
//! The extension of a queue pair's context that some transitions bring.

use super::{Reject, Request, general};
use crate::engine;
use crate::ifc::command::modify_qp_in;
use crate::ifc::context::qpc_ext;
use crate::ifc::opcode;
use crate::objects::device::Device;
use crate::objects::pacing::{ElementKind, Limits};
use crate::objects::qp::Service;
use crate::objects::transition::extension::*;

/// Bits of `opt_param_mask_95_32` that a transition of a service knows.
fn known(command: u16, service: Service) -> u64 {
    let limits = match service {
        Service::Rc | Service::Uc | Service::Ud => QOS_QUEUE_GROUP_ID,
        _ => 0,
    };
    match (command, service) {
        (opcode::INIT2INIT_QP, Service::Rc) => INIT2INIT_MMO | limits,
        (opcode::RTS2RTS_QP, Service::Dci) => DCI_STREAM_CHANNEL_ID,
        (opcode::INIT2INIT_QP | opcode::RTS2RTS_QP, _) => limits,
        _ => 0,
    }
}

/// Does what the extension asks for, if there is one.
pub(super) fn extend(device: &mut Device, request: &Request<'_>, qpn: u32) -> Result<(), Reject> {
    let input = request.input;
    if !modify_qp_in::qpc_ext.is_set(input) {
        return Ok(());
    }
    let absent = Reject::absent("qpn", qpn);
    let qp = device.qps.get_mut(qpn).ok_or(absent)?;
    let mask = modify_qp_in::opt_param_mask_95_32.get(input);
    let unknown = mask & !known(request.opcode(), qp.service);
    if unknown != 0 {
        let rule = "an extended option of this transition of this service";
        return Err(Reject::param("opt_param_mask_95_32", unknown, rule));
    }
    let given = modify_qp_in::qpc_data_ext.bytes(input);
    if mask & DCI_STREAM_CHANNEL_ID != 0 {
        let stream = qpc_ext::dci_stream_channel_id.get(given) as u16;
        if !engine::dc::reset_stream(qp, stream) {
            let rule = "a stream that is reset is in error";
            return Err(Reject::param("dci_stream_channel_id", stream, rule));
        }
    }
    if mask & INIT2INIT_MMO != 0 {
        qp.mmo = qpc_ext::mmo.is_set(given);
    }
    if mask & QOS_QUEUE_GROUP_ID != 0 {
        let limits = Limits {
            requester_group: qpc_ext::qos_queue_group_id_requester.get32(given),
            responder_group: qpc_ext::qos_queue_group_id_responder.get32(given),
            ..qp.limits
        };
        limit(device, request, qpn, limits)?;
    }
    Ok(())
}

/// Gives a queue pair or send queue other limits.
pub(super) fn limit(
    device: &mut Device,
    request: &Request<'_>,
    number: u32,
    limits: Limits,
) -> Result<(), Reject> {
    join(device, request, limits)?;
    if let Some(qp) = device.qps.get_mut(number) {
        let before = std::mem::replace(&mut qp.limits, limits);
        leave(device, before);
    }
    Ok(())
}

/// Checks the queue groups of a queue pair, and counts it in them.
fn join(device: &mut Device, request: &Request<'_>, limits: Limits) -> Result<(), Reject> {
    let groups = [
        ("qos_queue_group_id_requester", limits.requester_group),
        ("qos_queue_group_id_responder", limits.responder_group),
    ];
    for (field, id) in groups.into_iter().filter(|(_, id)| *id != 0) {
        let element = general::element(device, request, field, id)?;
        if element.kind != ElementKind::QueueGroup {
            let rule = "queue pairs are in a queue group";
            return Err(Reject::param(field, id, rule));
        }
    }
    for (_, id) in groups {
        if let Some(element) = device.elements.get_mut(id) {
            element.refs = element.refs.saturating_add(1);
        }
    }
    Ok(())
}

/// A queue pair leaves its queue groups.
pub(super) fn leave(device: &mut Device, limits: Limits) {
    for id in [limits.requester_group, limits.responder_group] {
        if let Some(element) = device.elements.get_mut(id) {
            element.refs = element.refs.saturating_sub(1);
        }
    }
}
