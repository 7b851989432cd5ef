// SPDX-License-Identifier: MIT OR Apache-2.0
//! Event queues.

use super::caps::Capabilities;
use super::{Placement, Reject, Reply, Request, SHARED_UID, admit, ok, place};
use crate::ifc::be64_list;
use crate::ifc::command::{create_eq_in, create_eq_out, destroy_eq_in, query_eq_out};
use crate::ifc::context::eqc;
use crate::ifc::event::eqe;
use crate::objects::device::Device;
use crate::objects::queue::Eq;

/// Vectors in the MSI-X table.
const VECTORS: u16 = crate::hca::MSIX_VECTORS;

/// Event queues are the driver's; when there are users it makes those for completions as shared objects.
fn driver_only(request: &Request<'_>) -> Result<(), Reject> {
    match request.uid() {
        0 | SHARED_UID => Ok(()),
        uid => Err(Reject::param("uid", uid, "event queues are the driver's")),
    }
}

pub(super) fn create_eq(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    driver_only(request)?;
    let context = create_eq_in::eqc.bytes(request.input);
    let log_size = eqc::log_eq_size.get32(context);
    if log_size > Capabilities::LOG_MAX_EQ_SIZE {
        return Err(Reject::param(
            "log_eq_size",
            log_size,
            "at most log_max_eq_sz",
        ));
    }
    let vector = eqc::intr.get(context) as u16;
    if vector >= VECTORS {
        return Err(Reject::param("intr", vector, "a vector of the MSI-X table"));
    }
    let uar_page = eqc::uar_page.get32(context);
    if device.uars.get(uar_page).is_none() {
        return Err(Reject::absent("uar_page", uar_page));
    }
    let placement = Placement {
        list: create_eq_in::pas.tail(request.input),
        log_page_size: eqc::log_page_size.get32(context),
        page_offset: eqc::page_offset.get(context),
        umem: None,
    };
    let buffer = place(device, request, &placement, (eqe::SIZE as u64) << log_size)?;
    let mut mask = [0; 4];
    // event_bitmask[0] covers the events 0 to 63, event_bitmask[3] 192 to 255.
    for (word, bits) in mask
        .iter_mut()
        .zip(be64_list(create_eq_in::event_bitmask.bytes(request.input)))
    {
        *word = bits;
    }
    let eq = Eq {
        refs: 0,
        buffer,
        log_size,
        uar_page,
        vector,
        mask,
        producer: 0,
        consumer: 0,
        armed: false,
        overrun: false,
        write_failed: false,
        context: context.to_vec(),
    };
    admit(device, &eq)?;
    let eqn = device
        .eqs
        .insert(eq)
        .ok_or(Reject::full("eq_number", device.eqs.len()))?;
    add_uar_ref(device, uar_page);
    let mut out = ok(create_eq_out::SIZE);
    create_eq_out::eq_number.set(&mut out, u64::from(eqn));
    Ok(out)
}

fn add_uar_ref(device: &mut Device, uar_page: u32) {
    if let Some(uar) = device.uars.get_mut(uar_page) {
        uar.refs += 1;
    }
}

pub(super) fn destroy_eq(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    driver_only(request)?;
    let eqn = destroy_eq_in::eq_number.get32(request.input);
    let eq = device
        .eqs
        .get(eqn)
        .ok_or(Reject::absent("eq_number", eqn))?;
    if eq.refs > 0 {
        return Err(Reject::busy("eq_number", eqn));
    }
    if let Some(eq) = device.eqs.remove(eqn) {
        if let Some(uar) = device.uars.get_mut(eq.uar_page) {
            uar.refs = uar.refs.saturating_sub(1);
        }
    }
    Ok(ok(16))
}

pub(super) fn query_eq(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let eqn = destroy_eq_in::eq_number.get32(request.input);
    let eq = device
        .eqs
        .get(eqn)
        .ok_or(Reject::absent("eq_number", eqn))?;
    let mut out = ok(query_eq_out::SIZE);
    let context = query_eq_out::eqc.bytes_mut(&mut out);
    context.copy_from_slice(&eq.context);
    // Status 9 is overflow, 0xa a failed write; state 9 armed, 0xa fired.
    let status = match (eq.write_failed, eq.overrun) {
        (true, _) => 0xa,
        (false, true) => 0x9,
        (false, false) => 0,
    };
    eqc::status.set(context, status);
    eqc::st.set(context, if eq.armed { 0x9 } else { 0xa });
    eqc::producer_counter.set(context, u64::from(eq.producer));
    eqc::consumer_counter.set(context, u64::from(eq.consumer));
    Ok(out)
}
