// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shared receive queues: XRC SRQs, and receive memory pools, which the driver uses for plain SRQs.

use super::caps::Capabilities;
use super::{Placement, Reject, Reply, Request, admit, ok, ok_object, place, place_dbr, when};
use crate::ifc::command::{
    arm_xrc_srq_in, create_rmp_in, create_xrc_srq_in, modify_rmp_in, query_rmp_out,
    query_xrc_srq_out,
};
use crate::ifc::context::{rmpc, wq, xrc_srqc};
use crate::objects::device::Device;
use crate::objects::queue::{Srq, SrqKind};

/// States of a receive memory pool, `MLX5_RMPC_STATE_*`; 0xf says that MODIFY_RMP leaves it.
mod rmp_state {
    pub const READY: u64 = 1;
    pub const ERROR: u64 = 3;
}

/// Geometry common to both kinds.
struct Geometry {
    log_size: u32,
    log_stride: u32,
}

impl Geometry {
    fn check(self) -> Result<Self, Reject> {
        if self.log_size > Capabilities::LOG_MAX_SRQ_SIZE {
            return Err(Reject::param(
                "log_srq_size",
                self.log_size,
                "at most log_max_srq_sz",
            ));
        }
        // The first segment of an entry links it to the next.
        if !(5..=9).contains(&self.log_stride) {
            return Err(Reject::param(
                "log_rq_stride",
                self.log_stride,
                "entries of 32 to 512 bytes",
            ));
        }
        Ok(self)
    }

    fn len(&self) -> u64 {
        1 << (self.log_size + self.log_stride)
    }
}

fn check_pd(device: &Device, request: &Request<'_>, pd: u32) -> Result<(), Reject> {
    let owner = device.pds.get(pd).ok_or(Reject::absent("pd", pd))?;
    request.check_owner("pd", pd, owner.uid)
}

fn insert(device: &mut Device, srq: Srq) -> Result<Reply, Reject> {
    admit(device, &srq)?;
    let (pd, cqn, xrcd, umems) = (srq.pd, srq.cqn, srq.xrcd, srq.umems.clone());
    let number = device
        .srqs
        .insert(srq)
        .ok_or(Reject::full("srqn", device.srqs.len()))?;
    count(device, pd, cqn, xrcd, &umems, |refs| refs.saturating_add(1));
    Ok(ok_object(number))
}

/// Changes the reference counts of everything that a shared receive queue refers to.
fn count(
    device: &mut Device,
    pd: u32,
    cqn: Option<u32>,
    xrcd: Option<u32>,
    umems: &[u32],
    change: fn(u32) -> u32,
) {
    if let Some(pd) = device.pds.get_mut(pd) {
        pd.refs = change(pd.refs);
    }
    if let Some(cq) = cqn.and_then(|n| device.cqs.get_mut(n)) {
        cq.refs = change(cq.refs);
    }
    if let Some(xrcd) = xrcd.and_then(|n| device.xrcds.get_mut(n)) {
        xrcd.refs = change(xrcd.refs);
    }
    for id in umems {
        if let Some(umem) = device.umems.get_mut(*id) {
            umem.refs = change(umem.refs);
        }
    }
}

pub(super) fn create_xrc_srq(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let input = request.input;
    let context = create_xrc_srq_in::srqc.bytes(input);
    let geometry = Geometry {
        log_size: xrc_srqc::log_xrc_srq_size.get32(context),
        log_stride: xrc_srqc::log_rq_stride.get32(context) + 4,
    }
    .check()?;
    let pd = xrc_srqc::pd.get32(context);
    check_pd(device, request, pd)?;
    let cqn = xrc_srqc::cqn.get32(context);
    let cq = device.cqs.get(cqn).ok_or(Reject::absent("cqn", cqn))?;
    request.check_owner("cqn", cqn, cq.uid)?;
    // XRC domains are the driver's also when users use them: it makes them with uid 0.
    let xrcd = xrc_srqc::xrcd.get32(context);
    let domain = device.xrcds.get(xrcd).ok_or(Reject::absent("xrcd", xrcd))?;
    if domain.uid != 0 {
        request.check_owner("xrcd", xrcd, domain.uid)?;
    }
    let umem = when(
        create_xrc_srq_in::xrc_srq_umem_valid,
        input,
        create_xrc_srq_in::xrc_srq_umem_id,
    );
    let placement = Placement {
        list: create_xrc_srq_in::pas.tail(input),
        log_page_size: xrc_srqc::log_page_size.get32(context),
        page_offset: xrc_srqc::page_offset.get(context),
        umem: umem.map(|id| (id, create_xrc_srq_in::xrc_srq_umem_offset.get(input))),
    };
    let buffer = place(device, request, &placement, geometry.len())?;
    let low = xrc_srqc::db_record_addr_l.get(context) << 2;
    let address = (xrc_srqc::db_record_addr_h.get(context) << 32) | low;
    let dbr_umem = umem.filter(|_| xrc_srqc::dbr_umem_valid.is_set(context));
    let dbr = place_dbr(device, request, address, dbr_umem)?;
    let srq = Srq {
        uid: request.uid(),
        refs: 0,
        kind: SrqKind::Xrc,
        buffer,
        dbr,
        log_size: geometry.log_size,
        log_stride: geometry.log_stride,
        pd,
        cqn: Some(cqn),
        xrcd: Some(xrcd),
        user_index: xrc_srqc::user_index.get32(context),
        head: 0,
        consumed: 0,
        limit: xrc_srqc::lwm.get(context) as u16,
        error: false,
        context: context.to_vec(),
        umems: umem.into_iter().chain(dbr_umem).collect(),
    };
    insert(device, srq)
}

pub(super) fn create_rmp(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let pool = create_rmp_in::rmpc.tail(request.input);
    let context = rmpc::wq.tail(pool);
    let geometry = Geometry {
        log_size: wq::log_wq_sz.get32(context),
        log_stride: wq::log_wq_stride.get32(context),
    }
    .check()?;
    let pd = wq::pd.get32(context);
    check_pd(device, request, pd)?;
    let umem = when(wq::wq_umem_valid, context, wq::wq_umem_id);
    let dbr_umem = when(wq::dbr_umem_valid, context, wq::dbr_umem_id);
    let placement = Placement {
        list: rmpc::wq.tail(pool).get(wq::SIZE..).unwrap_or_default(),
        log_page_size: wq::log_wq_pg_sz.get32(context),
        page_offset: wq::page_offset.get(context),
        umem: umem.map(|id| (id, wq::wq_umem_offset.get(context))),
    };
    let buffer = place(device, request, &placement, geometry.len())?;
    let dbr = place_dbr(device, request, wq::dbr_addr.get(context), dbr_umem)?;
    let srq = Srq {
        uid: request.uid(),
        refs: 0,
        kind: SrqKind::Rmp,
        buffer,
        dbr,
        log_size: geometry.log_size,
        log_stride: geometry.log_stride,
        pd,
        cqn: None,
        xrcd: None,
        user_index: 0,
        head: 0,
        consumed: 0,
        limit: wq::lwm.get(context) as u16,
        error: false,
        context: create_rmp_in::rmpc.bytes(request.input).to_vec(),
        umems: umem.into_iter().chain(dbr_umem).collect(),
    };
    insert(device, srq)
}

/// The queue that a command names, if it is of the command's kind and its user may.
fn named<'a>(
    device: &'a mut Device,
    request: &Request<'_>,
    kind: SrqKind,
) -> Result<(u32, &'a mut Srq), Reject> {
    let number = request.object();
    let srq = device
        .srqs
        .get_mut(number)
        .filter(|srq| srq.kind == kind)
        .ok_or(Reject::absent("srqn", number))?;
    request.check_owner("srqn", number, srq.uid)?;
    Ok((number, srq))
}

fn destroy(device: &mut Device, request: &Request<'_>, kind: SrqKind) -> Result<Reply, Reject> {
    let (number, srq) = named(device, request, kind)?;
    if srq.refs > 0 {
        return Err(Reject::busy("srqn", number));
    }
    if let Some(srq) = device.srqs.remove(number) {
        count(device, srq.pd, srq.cqn, srq.xrcd, &srq.umems, |refs| {
            refs.saturating_sub(1)
        });
    }
    Ok(ok(16))
}

pub(super) fn destroy_xrc_srq(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    destroy(device, request, SrqKind::Xrc)
}

pub(super) fn destroy_rmp(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    destroy(device, request, SrqKind::Rmp)
}

pub(super) fn query_xrc_srq(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let (_, srq) = named(device, request, SrqKind::Xrc)?;
    let mut out = ok(query_xrc_srq_out::SIZE);
    let context = query_xrc_srq_out::srqc.bytes_mut(&mut out);
    context.copy_from_slice(&srq.context);
    // State 0 good, 1 error.
    xrc_srqc::state.set(context, u64::from(srq.error));
    xrc_srqc::lwm.set(context, u64::from(srq.limit));
    Ok(out)
}

pub(super) fn query_rmp(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let (_, srq) = named(device, request, SrqKind::Rmp)?;
    let mut out = ok(query_rmp_out::SIZE);
    let context = query_rmp_out::rmpc.bytes_mut(&mut out);
    let len = context.len().min(srq.context.len());
    context[..len].copy_from_slice(&srq.context[..len]);
    rmpc::state.set(
        context,
        if srq.error {
            rmp_state::ERROR
        } else {
            rmp_state::READY
        },
    );
    wq::lwm.set(rmpc::wq.bytes_mut(context), u64::from(srq.limit));
    wq::hw_counter.set(rmpc::wq.bytes_mut(context), u64::from(srq.consumed));
    Ok(out)
}

/// Arms the limit event.
pub(super) fn arm_xrc_srq(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let limit = arm_xrc_srq_in::lwm.get(request.input) as u16;
    let (_, srq) = named(device, request, SrqKind::Xrc)?;
    srq.limit = limit;
    Ok(ok(16))
}

/// Arms the limit event of a pool.
pub(super) fn modify_rmp(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let context = rmpc::wq.tail(modify_rmp_in::rmpc.tail(request.input));
    let limit = wq::lwm.get(context) as u16;
    let (_, srq) = named(device, request, SrqKind::Rmp)?;
    srq.limit = limit;
    Ok(ok(16))
}
