// SPDX-License-Identifier: MIT OR Apache-2.0
//! Users and what they own directly: contexts, UAR pages, protection domains, XRC domains, UMEMs.

use super::{Reject, Reply, Request, admit, ok, ok_object};
use crate::ifc::be64_list;
use crate::ifc::command::{create_uctx_in, create_uctx_out, create_umem_in, destroy_uctx_in};
use crate::ifc::context::{qpc, umem};
use crate::objects::device::{Device, FIRST_UAR, UARS};
use crate::objects::memory::{Pages, Umem};
use crate::objects::table::{Table, Weigh};
use crate::objects::{Owned, Uctx};
use crate::polling::mapped;

/// In the place of a UAR page: none. No page that is given out has this number.
const NO_UAR: u32 = 0;

/// Most pages of a UMEM: 64 GiB in 4 KiB pages.
const MAX_UMEM_PAGES: u64 = 1 << 24;

pub(super) fn create_uctx(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let cap = create_uctx_in::cap.get32(request.input);
    let uid = device
        .uctxs
        .insert(Uctx { cap })
        .ok_or(Reject::full("uid", device.uctxs.len()))?;
    let mut out = ok(create_uctx_out::SIZE);
    create_uctx_out::uid.set(&mut out, u64::from(uid));
    Ok(out)
}

/// Whether a user has any object.
fn owns_something(device: &Device, uid: u16) -> bool {
    device.uars.iter().any(|(_, o)| o.uid == uid)
        || device.pds.iter().any(|(_, o)| o.uid == uid)
        || device.xrcds.iter().any(|(_, o)| o.uid == uid)
        || device.umems.iter().any(|(_, o)| o.uid == uid)
        || device.mkeys.iter().any(|(_, o)| o.uid == uid)
        || device.psvs.iter().any(|(_, o)| o.uid == uid)
        || device.cqs.iter().any(|(_, o)| o.uid == uid)
        || device.qps.iter().any(|(_, o)| o.uid == uid)
        || device.srqs.iter().any(|(_, o)| o.uid == uid)
        || device.rates.values().any(|o| o.uid == uid)
        || device.elements.iter().any(|(_, o)| o.uid == uid)
        || device.reserved_qpns.iter().any(|(_, o)| o.uid == uid)
        || device.av_mappings.iter().any(|(_, o)| o.uid == uid)
}

pub(super) fn destroy_uctx(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let uid = destroy_uctx_in::uid.get32(request.input);
    if device.uctxs.get(uid).is_none() {
        return Err(Reject::absent("uid", uid));
    }
    if owns_something(device, uid as u16) {
        return Err(Reject::busy("uid", uid));
    }
    device.uctxs.remove(uid);
    Ok(ok(16))
}

/// Makes an object that has only an owner.
fn alloc(
    table: &mut Table<Owned>,
    request: &Request<'_>,
    what: &'static str,
    limit: usize,
) -> Result<Reply, Reject> {
    table
        .insert(Owned::new(request.uid()))
        .map(ok_object)
        .ok_or(Reject::full(what, limit))
}

/// Frees such an object, if nothing refers to it.
fn dealloc(
    table: &mut Table<Owned>,
    request: &Request<'_>,
    what: &'static str,
) -> Result<Reply, Reject> {
    let number = request.object();
    let object = table.get(number).ok_or(Reject::absent(what, number))?;
    request.check_owner(what, number, object.uid)?;
    if object.refs > 0 {
        return Err(Reject::busy(what, number));
    }
    table.remove(number);
    Ok(ok(16))
}

pub(super) fn alloc_uar(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let Some(pages) = device.mapped.clone() else {
        return alloc(&mut device.uars, request, "uar", UARS);
    };
    // The driver keeps to pages that are trapped. A user who finds all the others taken gets one of those too.
    let everything = FIRST_UAR..FIRST_UAR + UARS as u32;
    let [first, second] = match request.uid() {
        0 => [
            everything.start..mapped::PAGES.start,
            mapped::PAGES.end..everything.end,
        ],
        _ => [mapped::PAGES, mapped::PAGES.end..everything.end],
    };
    let uar = Owned::new(request.uid());
    let page = device.uars.insert_within(uar, first);
    let page = page.or_else(|| device.uars.insert_within(uar, second));
    let page = page.ok_or(Reject::full("uar", UARS))?;
    device.counters.stale_doorbells += pages.allocated(page);
    Ok(ok_object(page))
}

/// Numbers of the objects of which something holds.
fn numbers<T: Weigh>(table: &Table<T>, which: impl Fn(&T) -> bool) -> Vec<u32> {
    let found = table.iter().filter(|(_, object)| which(object));
    found.map(|(number, _)| number).collect()
}

/// Frees a UAR page, also under queues that are rung through it, and those have none from then on: a process that closes its
/// context before its queues (Python's garbage collector does) frees its pages first, and the driver forgets a page whatever
/// the answer is (`mlx5_ib_mmap_free`). A refusal would leak the page and with it the user's uid.
pub(super) fn dealloc_uar(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let page = request.object();
    let uar = device.uars.get(page).ok_or(Reject::absent("uar", page))?;
    request.check_owner("uar", page, uar.uid)?;
    if device.eqs.iter().any(|(_, eq)| eq.uar_page == page) {
        return Err(Reject::busy("uar", page));
    }
    let qps: Vec<u32> = numbers(&device.qps, |qp| qp.decoded.uar_page == page);
    for number in qps {
        if let Some(qp) = device.qps.get_mut(number) {
            qp.decoded.uar_page = NO_UAR;
            qpc::uar_page.set(&mut qp.context, u64::from(NO_UAR));
        }
    }
    let cqs: Vec<u32> = numbers(&device.cqs, |cq| cq.uar_page == page);
    for number in cqs {
        if let Some(cq) = device.cqs.get_mut(number) {
            cq.uar_page = NO_UAR;
        }
    }
    device.uars.remove(page);
    if let Some(pages) = &device.mapped {
        pages.freed(Some(page));
    }
    device.strays.remove(&page);
    device.copies.forget(page);
    Ok(ok(16))
}

pub(super) fn alloc_pd(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    alloc(
        &mut device.pds,
        request,
        "pd",
        1 << super::caps::Capabilities::LOG_MAX_PD,
    )
}

pub(super) fn dealloc_pd(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    dealloc(&mut device.pds, request, "pd")
}

pub(super) fn alloc_xrcd(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    alloc(
        &mut device.xrcds,
        request,
        "xrcd",
        1 << super::caps::Capabilities::LOG_MAX_XRCD,
    )
}

pub(super) fn dealloc_xrcd(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    dealloc(&mut device.xrcds, request, "xrcd")
}

pub(super) fn create_umem(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let context = create_umem_in::umem.tail(request.input);
    let log_size = umem::log_page_size.get32(context) + 12;
    if log_size > 31 {
        let rule = "a page is at most 2 GiB";
        return Err(Reject::param("log_page_size", log_size, rule));
    }
    let count = umem::num_of_mtt.get(context);
    let page_offset = umem::page_offset.get(context);
    if count == 0 || count > MAX_UMEM_PAGES {
        return Err(Reject::param(
            "num_of_mtt",
            count,
            "a UMEM has 1 to 2^24 pages",
        ));
    }
    // The low bits of an entry say what may be done with the page.
    let addresses: Vec<u64> = be64_list(umem::mtt.tail(context))
        .take(count as usize)
        .map(|entry| entry & !((1 << log_size) - 1))
        .collect();
    if (addresses.len() as u64) < count {
        return Err(Reject::param(
            "num_of_mtt",
            count,
            "the list has as many entries as it says",
        ));
    }
    let pages = Pages {
        addresses: addresses.into(),
        log_size,
    };
    if page_offset >= 1 << log_size {
        return Err(Reject::param(
            "page_offset",
            page_offset,
            "the offset is within the first page",
        ));
    }
    let len = pages.len() - page_offset;
    let object = Umem {
        uid: request.uid(),
        refs: 0,
        pages,
        page_offset,
        len,
    };
    admit(device, &object)?;
    device
        .umems
        .insert(object)
        .map(ok_object)
        .ok_or(Reject::full("umem_id", device.umems.len()))
}

pub(super) fn destroy_umem(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let id = request.object();
    let object = device.umems.get(id).ok_or(Reject::absent("umem_id", id))?;
    request.check_owner("umem_id", id, object.uid)?;
    if object.refs > 0 {
        return Err(Reject::busy("umem_id", id));
    }
    device.umems.remove(id);
    Ok(ok(16))
}
