// SPDX-License-Identifier: MIT OR Apache-2.0
//! General objects: one group of commands for objects of many types.

use super::caps::Capabilities;
use super::{PRM, Reject, Reply, Request, ok};
use crate::ifc::command::{
    create_av_qp_mapping_in, create_sched_elem_in, general_obj_in_cmd_hdr, general_obj_out_cmd_hdr,
};
use crate::ifc::context::{av_qp_mapping, sched_context, sched_elem};
use crate::ifc::opcode::Status;
use crate::objects::Owned;
use crate::objects::device::Device;
use crate::objects::pacing::{Element, ElementKind};

/// Types of general objects that the device has, `MLX5_OBJ_TYPE_*` of rdma-core's mlx5_ifc.h.
mod kind {
    pub const SCHEDULING_ELEMENT: u16 = 0x26;
    pub const RESERVED_QPN: u16 = 0x2c;
    pub const AV_QP_MAPPING: u16 = 0x3a;
}

/// The capability `general_obj_types`: a bit for each type. Scheduling elements have their capabilities among those of QoS.
pub const TYPES: u64 = (1 << kind::RESERVED_QPN) | (1 << kind::AV_QP_MAPPING);

/// First of the numbers that can be reserved: they follow those of queue pairs.
pub const FIRST_RESERVED_QPN: u32 = 1 << Capabilities::LOG_MAX_QP;

/// `scheduling_hierarchy`: the NIC's (`MLX5_SCHED_HIERARCHY_NIC`).
const NIC: u64 = 3;
/// `tsar_type`: deficit weighted round robin (`MLX5_SCHED_TSAR_TYPE_DWRR`).
const DWRR: u64 = 0;
/// Bits of `modify_field_select`.
const BW_SHARE: u64 = 1;
const MAX_AVERAGE_BW: u64 = 2;

fn object_type(request: &Request<'_>) -> u16 {
    general_obj_in_cmd_hdr::obj_type.get(request.input) as u16
}

fn object_id(request: &Request<'_>) -> u32 {
    general_obj_in_cmd_hdr::obj_id.get32(request.input)
}

fn unknown(request: &Request<'_>) -> Reject {
    let rule = "a type of general object that the device has";
    Reject::param("obj_type", object_type(request), rule)
}

fn made(id: u32) -> Reply {
    let mut out = ok(general_obj_out_cmd_hdr::SIZE);
    general_obj_out_cmd_hdr::obj_id.set(&mut out, u64::from(id));
    out
}

pub(super) fn create(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    match object_type(request) {
        kind::SCHEDULING_ELEMENT => create_element(device, request),
        kind::RESERVED_QPN => reserve_qpns(device, request),
        kind::AV_QP_MAPPING => map_av(device, request),
        _ => Err(unknown(request)),
    }
}

pub(super) fn modify(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    match object_type(request) {
        kind::SCHEDULING_ELEMENT => modify_element(device, request),
        _ => Err(unknown(request)),
    }
}

pub(super) fn query(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    match object_type(request) {
        kind::SCHEDULING_ELEMENT => query_element(device, request),
        _ => Err(unknown(request)),
    }
}

pub(super) fn destroy(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let id = object_id(request);
    match object_type(request) {
        kind::SCHEDULING_ELEMENT => {
            let element = element(device, request, "obj_id", id)?;
            if element.refs > 0 {
                return Err(Reject::busy("obj_id", id));
            }
            let parent = element.parent;
            device.elements.remove(id);
            if let Some(parent) = device.elements.get_mut(parent) {
                parent.refs = parent.refs.saturating_sub(1);
            }
        }
        kind::RESERVED_QPN => {
            let block = id
                .checked_sub(FIRST_RESERVED_QPN)
                .ok_or(Reject::absent("obj_id", id))?;
            let (block, rest) = (
                block >> Capabilities::LOG_RESERVED_QPNS,
                block % (1 << Capabilities::LOG_RESERVED_QPNS),
            );
            let owner = device.reserved_qpns.get(block).filter(|_| rest == 0);
            request.check_owner("obj_id", id, owner.ok_or(Reject::absent("obj_id", id))?.uid)?;
            device.reserved_qpns.remove(block);
        }
        kind::AV_QP_MAPPING => {
            let owner = device
                .av_mappings
                .get(id)
                .ok_or(Reject::absent("obj_id", id))?;
            request.check_owner("obj_id", id, owner.uid)?;
            device.av_mappings.remove(id);
        }
        _ => return Err(unknown(request)),
    }
    Ok(ok(general_obj_out_cmd_hdr::SIZE))
}

/// The scheduling element with a number, if the command's user may.
pub(super) fn element<'a>(
    device: &'a mut Device,
    request: &Request<'_>,
    field: &'static str,
    id: u32,
) -> Result<&'a mut Element, Reject> {
    let element = device
        .elements
        .get_mut(id)
        .ok_or(Reject::absent(field, id))?;
    request.check_owner(field, id, element.uid)?;
    Ok(element)
}

/// The values that `modify_field_select` names.
fn limits(context: &[u8], select: u64, element: &mut Element) -> Result<(), Reject> {
    let unknown = select & !(BW_SHARE | MAX_AVERAGE_BW);
    if unknown != 0 {
        let rule = "bw_share and max_average_bw can be chosen";
        return Err(Reject::param("modify_field_select", unknown, rule));
    }
    let share = sched_context::bw_share.get32(context);
    if select & BW_SHARE != 0 && share > Capabilities::MAX_BW_SHARE {
        let rule = "at most the capability max_tsar_bw_share";
        return Err(Reject::param("bw_share", share, rule));
    }
    if select & BW_SHARE != 0 {
        element.bw_share = share;
    }
    if select & MAX_AVERAGE_BW != 0 {
        element.max_average_bw = sched_context::max_average_bw.get32(context);
    }
    Ok(())
}

fn create_element(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let given = create_sched_elem_in::sched_elem.tail(request.input);
    let context = sched_elem::sched_context.tail(given);
    let hierarchy = sched_elem::scheduling_hierarchy.get(given);
    if hierarchy != NIC {
        let rule = "the NIC's hierarchy, the only one of an InfiniBand function";
        return Err(Reject::param("scheduling_hierarchy", hierarchy, rule));
    }
    let number = sched_context::element_type.get(context);
    let kind = ElementKind::from_number(number).ok_or(Reject::param(
        "element_type",
        number,
        "one of the capability nic_element_type: TSAR or QUEUE_GROUP",
    ))?;
    let tsar = sched_context::tsar_type.get(context);
    if kind == ElementKind::Tsar && tsar != DWRR {
        let rule = "one of the capability nic_tsar_type: DWRR";
        return Err(Reject::param("tsar_type", tsar, rule));
    }
    let parent = sched_context::parent_element_id.get32(context);
    if parent != 0 {
        let above = element(device, request, "parent_element_id", parent)?;
        if above.kind != ElementKind::Tsar {
            let rule = "a queue group is a leaf";
            return Err(Reject::param("parent_element_id", parent, rule));
        }
        if above.depth + 1 >= Capabilities::MAX_SCHED_DEPTH {
            let rule = "a scheduling tree has at most 16 levels";
            return Err(Reject::param("parent_element_id", parent, rule));
        }
    } else if kind == ElementKind::QueueGroup {
        return Err(Reject::absent("parent_element_id", parent));
    }
    let depth = device
        .elements
        .get(parent)
        .map_or(0, |above| above.depth + 1);
    let mut new = Element::new(request.uid(), kind, parent, depth);
    limits(
        context,
        sched_elem::modify_field_select.get(given),
        &mut new,
    )?;
    let id = device.elements.insert(new);
    let id = id.ok_or(Reject::full("obj_id", device.elements.len()))?;
    if let Some(above) = device.elements.get_mut(parent) {
        above.refs = above.refs.saturating_add(1);
    }
    Ok(made(id))
}

fn modify_element(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let given = create_sched_elem_in::sched_elem.tail(request.input);
    let context = sched_elem::sched_context.tail(given);
    let element = element(device, request, "obj_id", object_id(request))?;
    limits(context, sched_elem::modify_field_select.get(given), element)?;
    Ok(ok(general_obj_out_cmd_hdr::SIZE))
}

fn query_element(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let element = element(device, request, "obj_id", object_id(request))?;
    let mut out = ok(create_sched_elem_in::SIZE);
    let given = create_sched_elem_in::sched_elem.bytes_mut(&mut out);
    sched_elem::scheduling_hierarchy.set(given, NIC);
    let context = sched_elem::sched_context.bytes_mut(given);
    for (field, value) in [
        (sched_context::element_type, element.kind as u32),
        (sched_context::parent_element_id, element.parent),
        (sched_context::bw_share, element.bw_share),
        (sched_context::max_average_bw, element.max_average_bw),
    ] {
        field.set(context, u64::from(value));
    }
    Ok(out)
}

/// Numbers that no queue pair will have, for who needs a number on the wire and brings no queue pair.
fn reserve_qpns(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let log_range = general_obj_in_cmd_hdr::log_obj_range.get32(request.input);
    if log_range != Capabilities::LOG_RESERVED_QPNS {
        let rule = "as many as the capability log_reserved_qpn_granularity says";
        return Err(Reject::param("log_obj_range", log_range, rule));
    }
    let block = device.reserved_qpns.insert(Owned::new(request.uid()));
    let block = block.ok_or(Reject::full("obj_id", device.reserved_qpns.len()))?;
    Ok(made(
        FIRST_RESERVED_QPN + (block << Capabilities::LOG_RESERVED_QPNS),
    ))
}

/// Whose path a destination is on, which congestion control is told by: the model's links have none to control.
fn map_av(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let given = create_av_qp_mapping_in::mapping.tail(request.input);
    let qpn = av_qp_mapping::qpn.get32(given);
    if device.qps.get(qpn).is_none() {
        let rule = "a destination is mapped to a queue pair that exists";
        return Err(Reject::new(Status::BadResource, "qpn", qpn, rule, PRM));
    }
    let id = device.av_mappings.insert(Owned::new(request.uid()));
    let id = id.ok_or(Reject::full("obj_id", device.av_mappings.len()))?;
    Ok(made(id))
}
