// SPDX-License-Identifier: MIT OR Apache-2.0
//! Packet pacing: a table of rates that queue pairs are held to.

use super::caps::Capabilities;
use super::{Reject, Reply, Request, ok};
use crate::ifc::command::set_pp_rate_limit_in;
use crate::ifc::context::set_pp_rate_limit_context as context;
use crate::objects::device::Device;
use crate::objects::pacing::{Limiter, Rate};

/// Sets a rate, or with 0 takes it away. A queue pair whose rate is taken away has no limit.
pub(super) fn set_rate_limit(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let index = set_pp_rate_limit_in::rate_limit_index.get(request.input) as u16;
    let given = set_pp_rate_limit_in::ctx.bytes(request.input);
    // The first entry stands for no limit.
    if !(1..Capabilities::RATE_TABLE_SIZE).contains(&index) {
        let rule = "from 1, less than the capability packet_pacing_rate_table_size";
        return Err(Reject::param("rate_limit_index", index, rule));
    }
    if let Some(rate) = device.rates.get(&index) {
        request.check_owner("rate_limit_index", u32::from(index), rate.uid)?;
    }
    let limit = context::rate_limit.get32(given);
    if limit == 0 {
        device.rates.remove(&index);
        return Ok(ok(16));
    }
    if !(Capabilities::MIN_RATE_KBPS..=Capabilities::MAX_RATE_KBPS).contains(&limit) {
        let rule = "within packet_pacing_min_rate and packet_pacing_max_rate";
        return Err(Reject::param("rate_limit", limit, rule));
    }
    for (name, field) in [
        ("burst_upper_bound", context::burst_upper_bound),
        ("typical_packet_size", context::typical_packet_size),
    ] {
        if field.is_set(given) {
            let rule =
                "0 without the capability packet_pacing_burst_bound or packet_pacing_typical_size";
            return Err(Reject::param(name, field.get(given), rule));
        }
    }
    let rate = Rate {
        uid: request.uid(),
        limit,
        limiter: Limiter::default(),
    };
    device.rates.insert(index, rate);
    Ok(ok(16))
}
