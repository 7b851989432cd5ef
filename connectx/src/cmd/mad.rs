// SPDX-License-Identifier: MIT OR Apache-2.0
//! Management datagrams that the driver hands to the device instead of the wire.

use super::{Reject, Reply, Request, ok};
use crate::ifc::command::mad_ifc_out;
use crate::objects::device::Device;

/// The port has no agents behind MAD_IFC; an empty answer is what the driver takes as "nothing to say" (with `ib_virt` it
/// asks for the port by QUERY_HCA_VPORT_CONTEXT instead).
pub(super) fn mad_ifc(_: &mut Device, _: &Request<'_>) -> Result<Reply, Reject> {
    Ok(ok(mad_ifc_out::SIZE))
}
