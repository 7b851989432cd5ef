// SPDX-License-Identifier: MIT OR Apache-2.0
//! The port, as virtualised functions ask for it.

use super::{Reject, Reply, Request, ok};
use crate::ifc::command::{
    modify_hca_vport_context_in, query_hca_vport_context_out, query_hca_vport_gid_in,
    query_hca_vport_gid_out, query_hca_vport_pkey_in, query_hca_vport_pkey_out,
};
use crate::ifc::context::hca_vport_context as port;
use crate::objects::device::Device;
use crate::wire::port::{CHANGEABLE_CAPS, GIDS, PKEYS, SM_LID};

/// All entries of a table.
const ALL: u64 = 0xffff;

pub(super) fn query_context(device: &mut Device, _: &Request<'_>) -> Result<Reply, Reject> {
    let mut out = ok(query_hca_vport_context_out::SIZE);
    let context = query_hca_vport_context_out::hca_vport_context.bytes_mut(&mut out);
    let values = [
        // A virtual port has no subnet management interface of its own.
        (port::has_smi, u64::from(!device.virtual_function)),
        (port::port_physical_state, device.port.physical_state()),
        (port::port_state, device.port.state as u64),
        (port::vport_state, device.port.state as u64),
        (port::system_image_guid, device.port.guid),
        (port::port_guid, device.port.guid),
        (port::node_guid, device.port.guid),
        (port::cap_mask1, device.port.cap_mask.into()),
        (port::cap_mask1_field_select, CHANGEABLE_CAPS.into()),
        (port::lid, u64::from(device.port.lid)),
        (port::subnet_timeout, 18),
        (port::sm_lid, u64::from(SM_LID)),
    ];
    for (field, value) in values {
        field.set(context, value);
    }
    Ok(out)
}

pub(super) fn modify_context(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    use modify_hca_vport_context_in::{hca_vport_context, other_vport, vport_number};
    for (field, name) in [(other_vport, "other_vport"), (vport_number, "vport_number")] {
        let value = field.get(request.input);
        if value != 0 {
            return Err(Reject::param(name, value, "0, a function's own port"));
        }
    }
    let context = hca_vport_context.bytes(request.input);
    let what = port::field_select.get(context);
    if what != 0 {
        return Err(Reject::param(
            "field_select",
            what,
            "0: GUIDs and state are for other functions' ports",
        ));
    }
    let select = port::cap_mask1_field_select.get(context) as u32;
    if select & !CHANGEABLE_CAPS != 0 {
        return Err(Reject::param(
            "cap_mask1_field_select",
            select,
            "bits of what QUERY_HCA_VPORT_CONTEXT says there",
        ));
    }
    let caps = port::cap_mask1.get(context) as u32;
    device.port.cap_mask = (device.port.cap_mask & !select) | (caps & select);
    Ok(ok(8))
}

pub(super) fn query_gid(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let index = query_hca_vport_gid_in::gid_index.get(request.input);
    let indices = table_range(index, GIDS, "gid_index")?;
    let mut out = ok(query_hca_vport_gid_out::SIZE);
    query_hca_vport_gid_out::gids_num.set(&mut out, indices.len() as u64);
    out.truncate(query_hca_vport_gid_out::gid.offset());
    for index in indices {
        out.extend(device.port.gid(index));
    }
    Ok(out)
}

pub(super) fn query_pkey(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let index = query_hca_vport_pkey_in::pkey_index.get(request.input);
    let indices = table_range(index, PKEYS, "pkey_index")?;
    let mut out = ok(query_hca_vport_pkey_out::SIZE);
    out.truncate(query_hca_vport_pkey_out::pkey.offset());
    for index in indices {
        out.extend(u32::from(device.port.pkey(index)).to_be_bytes());
    }
    Ok(out)
}

/// One entry of a table, or all.
fn table_range(
    index: u64,
    len: usize,
    field: &'static str,
) -> Result<std::ops::Range<usize>, Reject> {
    match usize::try_from(index) {
        Ok(index) if index < len => Ok(index..index + 1),
        _ if index == ALL => Ok(0..len),
        _ => Err(Reject::param(
            field,
            index,
            "an index within the table, or 0xffff for all",
        )),
    }
}
