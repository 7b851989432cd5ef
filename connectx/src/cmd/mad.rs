// SPDX-License-Identifier: MIT OR Apache-2.0
//! Management datagrams that the driver received, or that are for its own port.

use super::{Reject, Reply, Request, ok};
use crate::ifc::command::{mad_ifc_in, mad_ifc_out};
use crate::ifc::opcode::Status;
use crate::mad;
use crate::objects::device::Device;

/// Hands a datagram to the port's agents. What they refuse, they refuse in the answer's own status.
pub(super) fn mad_ifc(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let port = mad_ifc_in::port.get(request.input);
    if port > 1 {
        let rule = "the function has one port";
        return Err(Reject::new(
            Status::BadParam,
            "port",
            port,
            rule,
            super::IFC,
        ));
    }
    let mut out = ok(mad_ifc_out::SIZE);
    if let Some(answer) = mad::agent(device, mad_ifc_in::mad.bytes(request.input)) {
        mad_ifc_out::response_mad_packet
            .bytes_mut(&mut out)
            .copy_from_slice(&answer);
    }
    Ok(out)
}
