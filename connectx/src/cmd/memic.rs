// SPDX-License-Identifier: MIT OR Apache-2.0
//! Device memory.

use super::{Reject, Reply, Request, ok};
use crate::ifc::cap::device_mem_cap as cap;
use crate::ifc::command::{
    alloc_memic_in, alloc_memic_out, dealloc_memic_in, modify_memic_in, modify_memic_out,
};
use crate::ifc::opcode::Status;
use crate::objects::device::Device;
use crate::objects::memic::{Operation, SIZE, START};
use crate::objects::memory::Translation;

/// Log2 of the unit of lengths and alignments (`MLX5_MEMIC_BASE_ALIGN`).
const LOG_UNIT: u64 = 6;
/// The largest alignment is 4 KiB, in units.
const MAX_LOG_ALIGNMENT: u64 = 12 - LOG_UNIT;

/// The capabilities of device memory.
pub(super) fn capabilities() -> Vec<u8> {
    let mut caps = vec![0; cap::SIZE];
    for (field, value) in [
        (cap::memic, 1),
        (cap::log_min_memic_alloc_size, LOG_UNIT),
        (cap::log_max_memic_addr_alignment, MAX_LOG_ALIGNMENT),
        (cap::memic_bar_start_addr, START),
        (cap::memic_bar_size, SIZE),
        (cap::max_memic_size, SIZE),
        // A bit for each operation, and for the sizes that it has: 1, 2, 4 and 8 bytes.
        (cap::memic_operations, (1 << Operation::ALL.len()) - 1),
        (cap::memic_increment_size, 0xf),
        (cap::memic_test_and_set_size, 0xf),
    ] {
        field.set(&mut caps, value);
    }
    caps
}

pub(super) fn alloc(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let len = alloc_memic_in::memic_size.get(request.input);
    if len == 0 || len % (1 << LOG_UNIT) != 0 {
        let rule = "a multiple of 2^log_min_memic_alloc_size";
        return Err(Reject::param("memic_size", len, rule));
    }
    let log_alignment = alloc_memic_in::log_memic_addr_alignment.get(request.input);
    if log_alignment > MAX_LOG_ALIGNMENT {
        let field = "log_memic_addr_alignment";
        let rule = "at most log_max_memic_addr_alignment";
        return Err(Reject::param(field, log_alignment, rule));
    }
    let given = alloc_memic_in::range_start_addr.get(request.input);
    let start = given
        .checked_sub(START)
        .filter(|at| *at < SIZE)
        .ok_or(Reject::param(
            "range_start_addr",
            given,
            "the range begins in device memory",
        ))?;
    let end = start + alloc_memic_in::range_size.get(request.input);
    let at = device
        .memic
        .insert(start..end, len, 1 << (LOG_UNIT + log_alignment))
        .ok_or(Reject::new(
            Status::NoResources,
            "memic_size",
            len,
            "the range has room for it",
            super::IFC,
        ))?;
    let mut out = ok(alloc_memic_out::SIZE);
    alloc_memic_out::memic_start_addr.set(&mut out, START + at);
    Ok(out)
}

/// The block that a command names by where it begins in the BAR: its offset in device memory, and its length.
fn named(device: &Device, given: u64) -> Result<(u64, u64), Reject> {
    let start = given.wrapping_sub(START);
    let len = device.memic.get(start).ok_or(Reject::new(
        Status::BadResource,
        "memic_start_addr",
        given,
        "device memory is named by where it begins",
        super::IFC,
    ))?;
    Ok((start, len))
}

pub(super) fn dealloc(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let given = dealloc_memic_in::memic_start_addr.get(request.input);
    let (start, len) = named(device, given)?;
    let size = dealloc_memic_in::memic_size.get(request.input);
    if size != len {
        let rule = "all that was allocated is freed";
        return Err(Reject::param("memic_size", size, rule));
    }
    let key = device.mkeys.iter().find(|(_, key)| {
        matches!(key.translation, Translation::Device { start: at } if (start..start + len).contains(&at))
    });
    if let Some((index, _)) = key {
        return Err(Reject::busy("mkey_index", index));
    }
    device.memic.remove(start);
    Ok(ok(8))
}

/// Gives or takes the window of an operation. It is where the memory is, so there is nothing to keep.
pub(super) fn modify(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let (start, _) = named(device, modify_memic_in::memic_start_addr.get(request.input))?;
    let number = modify_memic_in::memic_operation_type.get(request.input);
    let operation = Operation::from_number(number).ok_or(Reject::param(
        "memic_operation_type",
        number,
        "an operation of memic_operations",
    ))?;
    let mut out = ok(modify_memic_out::SIZE);
    match request.op_mod() {
        0 => modify_memic_out::memic_operation_addr.set(&mut out, operation.window() + start),
        1 => {}
        other => return Err(Reject::param("op_mod", other, "0 allocate or 1 free")),
    }
    Ok(out)
}
