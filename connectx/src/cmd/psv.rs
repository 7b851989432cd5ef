// SPDX-License-Identifier: MIT OR Apache-2.0
//! Prediction signature values, which keys with signatures have.

use super::{Reject, Reply, Request, ok};
use crate::ifc::command::{create_psv_in, create_psv_out};
use crate::objects::device::Device;
use crate::objects::signature::Psv;

pub(super) fn create(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let count = create_psv_in::num_psv.get(request.input);
    // The driver ends no more than one of those that a user makes at once (devx.c).
    let most = if request.uid() == 0 { 4 } else { 1 };
    if !(1..=most).contains(&count) {
        let rule = "1 to 4, of a user 1";
        return Err(Reject::param("num_psv", count, rule));
    }
    let pd = create_psv_in::pd.get32(request.input);
    let owner = device.pds.get(pd).ok_or(Reject::absent("pd", pd))?;
    request.check_owner("pd", pd, owner.uid)?;
    let mut out = ok(create_psv_out::SIZE);
    let mut made = Vec::new();
    for field in [
        create_psv_out::psv0_index,
        create_psv_out::psv1_index,
        create_psv_out::psv2_index,
        create_psv_out::psv3_index,
    ]
    .into_iter()
    .take(count as usize)
    {
        let psv = Psv {
            uid: request.uid(),
            pd,
            transient: 0,
        };
        let Some(index) = device.psvs.insert(psv) else {
            for index in made {
                remove(device, index);
            }
            return Err(Reject::full("psv_index", device.psvs.len()));
        };
        if let Some(pd) = device.pds.get_mut(pd) {
            pd.refs = pd.refs.saturating_add(1);
        }
        made.push(index);
        field.set(&mut out, u64::from(index));
    }
    Ok(out)
}

fn remove(device: &mut Device, index: u32) {
    let Some(psv) = device.psvs.remove(index) else {
        return;
    };
    if let Some(pd) = device.pds.get_mut(psv.pd) {
        pd.refs = pd.refs.saturating_sub(1);
    }
}

/// Ends one, also under keys that name it (rdma-core ends a key's before the key): they are of no use then.
pub(super) fn destroy(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let index = request.object();
    let psv = device
        .psvs
        .get(index)
        .ok_or(Reject::absent("psvn", index))?;
    request.check_owner("psvn", index, psv.uid)?;
    remove(device, index);
    Ok(ok(16))
}
