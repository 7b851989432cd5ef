// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pages that the driver lends the device. The model has no use for them but the driver counts them.

use super::{Reject, Reply, Request, ok};
use crate::ifc::be64_list;
use crate::ifc::command::{manage_pages_in, manage_pages_out, query_pages_out};
use crate::objects::device::Device;

/// Pages wanted before the capabilities are read, and before INIT_HCA.
const BOOT_PAGES: u64 = 16;
const INIT_PAGES: u64 = 64;
/// Most pages in one command: the driver's chunk is 512.
const MAX_AT_ONCE: u64 = 1 << 16;
/// Most pages altogether: 4 GiB. Each is only a number to us, but a guest can give one page for ever.
const MAX_PAGES: usize = 1 << 20;

mod op {
    pub const BOOT: u16 = 1;
    pub const INIT: u16 = 2;
    pub const REGULAR: u16 = 3;
    pub const CANNOT_GIVE: u16 = 0;
    pub const GIVE: u16 = 1;
    pub const TAKE: u16 = 2;
}

pub(super) fn query_pages(_: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let wanted = match request.op_mod() {
        op::BOOT => BOOT_PAGES,
        op::INIT => INIT_PAGES,
        op::REGULAR => 0,
        other => {
            return Err(Reject::param(
                "op_mod",
                other,
                "1 boot, 2 init or 3 regular",
            ));
        }
    };
    let mut out = ok(query_pages_out::SIZE);
    query_pages_out::num_pages.set(&mut out, wanted);
    Ok(out)
}

pub(super) fn manage_pages(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let count = manage_pages_in::input_num_entries.get(request.input);
    if count > MAX_AT_ONCE {
        return Err(Reject::param(
            "input_num_entries",
            count,
            "at most 65536 pages at once",
        ));
    }
    match request.op_mod() {
        op::CANNOT_GIVE => Ok(ok(16)),
        op::GIVE => {
            let given: Vec<u64> = be64_list(manage_pages_in::pas.tail(request.input))
                .take(count as usize)
                .collect();
            if (given.len() as u64) < count {
                return Err(Reject::param(
                    "input_num_entries",
                    count,
                    "the list has as many pages as it says",
                ));
            }
            if device.pages.len() + given.len() > MAX_PAGES {
                return Err(Reject::full("input_num_entries", MAX_PAGES));
            }
            device.pages.extend(given);
            Ok(ok(16))
        }
        op::TAKE => {
            let room = request.output_len.saturating_sub(manage_pages_out::SIZE) / 8;
            let returned = (count as usize).min(room).min(device.pages.len());
            let pages = device.pages.split_off(device.pages.len() - returned);
            let mut out = ok(manage_pages_out::SIZE);
            manage_pages_out::output_num_entries.set(&mut out, returned as u64);
            out.extend(pages.iter().flat_map(|page| page.to_be_bytes()));
            Ok(out)
        }
        other => Err(Reject::param(
            "op_mod",
            other,
            "0 cannot give, 1 give or 2 take",
        )),
    }
}
