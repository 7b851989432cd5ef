// SPDX-License-Identifier: MIT OR Apache-2.0
//! Multicast groups.

use super::caps::Capabilities;
use super::{Reject, Reply, Request, ok};
use crate::ifc::command::attach_to_mcg_in;
use crate::objects::device::Device;

/// Most memberships of a function: the capability `log_max_mcg` groups of `max_qp_mcg` queue pairs.
const MAX_MEMBERSHIPS: usize = 256 * 8;
const _: () = assert!(Capabilities::LOG_MAX_QP > 8);

fn membership(device: &Device, request: &Request<'_>) -> Result<([u8; 16], u32), Reject> {
    let qpn = request.object();
    let qp = device.qps.get(qpn).ok_or(Reject::absent("qpn", qpn))?;
    request.check_owner("qpn", qpn, qp.uid)?;
    let mut gid = [0; 16];
    gid.copy_from_slice(attach_to_mcg_in::multicast_gid.bytes(request.input));
    Ok((gid, qpn))
}

pub(super) fn attach(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let member = membership(device, request)?;
    if device.multicast.len() >= MAX_MEMBERSHIPS {
        return Err(Reject::full("multicast_gid", MAX_MEMBERSHIPS));
    }
    if !device.multicast.contains(&member) {
        device.multicast.push(member);
    }
    Ok(ok(16))
}

pub(super) fn detach(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let member = membership(device, request)?;
    let place = device.multicast.iter().position(|m| *m == member);
    let place = place.ok_or(Reject::param(
        "qpn",
        member.1,
        "the queue pair is in the group",
    ))?;
    device.multicast.swap_remove(place);
    Ok(ok(16))
}
