// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pages that the driver lends the device. The model keeps nothing in them, but it asks for them as a device that does,
//! and the driver counts them.

use super::{Reject, Reply, Request, ok};
use crate::engine::event;
use crate::ifc::be64_list;
use crate::ifc::command::{manage_pages_in, manage_pages_out, query_pages_out};
use crate::objects::device::{Device, Pages, Phase};

/// Pages wanted before the capabilities are read, and before INIT_HCA.
const BOOT_PAGES: u64 = 16;
const INIT_PAGES: u64 = 64;
/// Most pages in one command: the driver's chunk is 512.
const MAX_AT_ONCE: u64 = 1 << 16;
/// Most pages altogether: 4 GiB. Each is only a number to us, but a guest can give one page for ever.
const MAX_PAGES: usize = 1 << 20;

/// Objects that the pages of the start are enough for.
const OBJECTS_AT_REST: u64 = 512;
/// Objects whose contexts fill one more page.
const OBJECTS_A_PAGE: u64 = 8;
/// Pages are asked for and given back by so many.
const CHUNK: usize = 16;

mod op {
    pub const BOOT: u16 = 1;
    pub const INIT: u16 = 2;
    pub const REGULAR: u16 = 3;
    pub const CANNOT_GIVE: u16 = 0;
    pub const GIVE: u16 = 1;
    pub const TAKE: u16 = 2;
}

pub(super) fn query_pages(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
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
    // The pages of a virtual function are lent by its physical function's driver (`MLX5_VF` of pagealloc.c).
    let wanted = if device.virtual_function { 0 } else { wanted };
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
        // It is not asked again: it has no more.
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
            if device.pages.lent.len() + given.len() > MAX_PAGES {
                return Err(Reject::full("input_num_entries", MAX_PAGES));
            }
            device.pages.lent.extend(given);
            device.pages.asked = false;
            Ok(ok(16))
        }
        op::TAKE => {
            let room = request.output_len.saturating_sub(manage_pages_out::SIZE) / 8;
            let lent = &mut device.pages.lent;
            let returned = (count as usize).min(room).min(lent.len());
            let pages = lent.split_off(lent.len() - returned);
            device.pages.asked = false;
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

/// Notes what the driver has lent by the time it starts the device, which is enough for a start.
pub(super) fn started(device: &mut Device) {
    device.pages.at_rest = device.pages.lent.len();
}

/// By how many pages the device has too few, or (negative) more than it will soon use.
fn imbalance(pages: &Pages, objects: u64) -> i32 {
    let more = objects
        .saturating_sub(OBJECTS_AT_REST)
        .div_ceil(OBJECTS_A_PAGE);
    let needed = pages.at_rest.saturating_add(more as usize);
    let lent = pages.lent.len();
    let chunks = if needed > lent {
        (needed - lent).div_ceil(CHUNK) as i32
    } else {
        // One chunk stays, or a program that makes and destroys one object would move it each time.
        -(((lent - needed) / CHUNK) as i32 - 1).max(0)
    };
    chunks.saturating_mul(CHUNK as i32)
}

/// Asks the driver for pages when the objects need more, and offers those back that they do not need any more.
pub(super) fn balance(device: &mut Device) {
    if device.phase != Phase::Initialised || device.pages.asked || device.virtual_function {
        return;
    }
    let objects = device.objects().iter().map(|(_, n)| n).sum();
    let pages = imbalance(&device.pages, objects);
    if pages != 0 {
        device.pages.asked = event::page_request(device, pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_follow_the_objects_by_chunks_and_not_each_one() {
        let mut pages = Pages {
            lent: vec![0; 80],
            at_rest: 80,
            asked: false,
        };
        for (objects, change) in [(0, 0), (512, 0), (513, 16), (640, 16), (641, 32)] {
            assert_eq!(imbalance(&pages, objects), change, "{objects}");
        }
        pages.lent = vec![0; 112];
        for (objects, change) in [(768, 0), (513, 0), (512, -16), (0, -16), (769, 16)] {
            assert_eq!(imbalance(&pages, objects), change, "{objects}");
        }
    }
}
