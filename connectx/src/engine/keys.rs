// SPDX-License-Identifier: MIT OR Apache-2.0
//! Work on memory keys themselves.

use super::memory::Denied;
use crate::objects::device::Device;
use crate::objects::qp::Qp;

/// Takes away a key that its owner permitted to be invalidated.
pub fn invalidate(device: &mut Device, qp: &Qp, key: u32) -> Result<(), Denied> {
    let denied = |device: &Device, reason, rule| {
        device.refuse(
            format!("qp {:#x} invalidate", qp.number),
            "rkey",
            key,
            rule,
            "IBA 10.6.7.2.4",
        );
        Err(reason)
    };
    match device.mkeys.get_mut(key >> 8) {
        Some(mkey) if mkey.variant == key as u8 && mkey.pd == qp.decoded.pd && !mkey.free => {
            mkey.free = true;
            Ok(())
        }
        Some(_) => denied(
            device,
            Denied::Domain,
            "a valid key of the queue pair's protection domain",
        ),
        None => denied(device, Denied::Key, "a key that exists"),
    }
}
