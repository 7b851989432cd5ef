// SPDX-License-Identifier: MIT OR Apache-2.0
//! Completion queues.

use super::caps::Capabilities;
use super::{IFC, Placement, Reject, Reply, Request, admit, ok, ok_object, place, place_dbr, when};
use crate::engine::completion::{self, Completion};
use crate::ifc::Field;
use crate::ifc::cap::cmd_hca_cap as cap;
use crate::ifc::command::{create_cq_in, modify_cq_in, query_cq_out};
use crate::ifc::context::cqc;
use crate::ifc::opcode::Status;
use crate::ifc::wqe::{cqe_opcode, dbr};
use crate::objects::device::Device;
use crate::objects::queue::{Arm, Cq, CqStatus, MiniFormat};

/// `cqc.cqe_sz` of entries of 128 bytes that are written as a whole.
const PADDED: u64 = 2;

/// Values of `cqc.cqe_sz`: 64 and 128 bytes.
fn entry_size(context: &[u8]) -> Result<u64, Reject> {
    match cqc::cqe_sz.get(context) {
        0 => Ok(64),
        1 | PADDED => Ok(128),
        other => Err(Reject::param(
            "cqe_sz",
            other,
            "0 for 64-byte, 1 for 128-byte, 2 for padded 128-byte entries",
        )),
    }
}

/// How a queue of a context compresses, if it does.
fn compression(device: &Device, context: &[u8]) -> Result<Option<MiniFormat>, Reject> {
    if !cqc::cqe_comp_en.is_set(context) {
        return Ok(None);
    }
    let has = |capability: Field| capability.is_set(&device.caps.current);
    let size = cqc::cqe_sz.get(context);
    if size == 0 && !has(cap::cqe_compression) || size != 0 && !has(cap::cqe_compression_128) {
        return Err(Reject::param(
            "cqe_sz",
            size,
            "compressed: 0 with cqe_compression, 1 or 2 with cqe_compression_128",
        ));
    }
    if cqc::cqe_compression_layout.get(context) != 0 {
        return Err(Reject::param(
            "cqe_compression_layout",
            cqc::cqe_compression_layout.get(context),
            "0 basic, without enhanced_cqe_compression",
        ));
    }
    match cqc::mini_cqe_res_format.get(context) {
        0 => Ok(Some(MiniFormat::Hash)),
        1 => Ok(Some(MiniFormat::Checksum)),
        3 if has(cap::mini_cqe_resp_stride_index) => Ok(Some(MiniFormat::ChecksumStride)),
        other => Err(Reject::param(
            "mini_cqe_res_format",
            other,
            "0 hash, 1 checksum, with mini_cqe_resp_stride_index also 3 checksum and stride index",
        )),
    }
}

pub(super) fn create_cq(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let input = request.input;
    let context = create_cq_in::cqc.bytes(input);
    let log_size = cqc::log_cq_size.get32(context);
    if log_size > Capabilities::LOG_MAX_CQ_SIZE {
        return Err(Reject::param(
            "log_cq_size",
            log_size,
            "at most log_max_cq_sz",
        ));
    }
    let eqn = cqc::c_eqn.get32(context);
    if device.eqs.get(eqn).is_none() {
        return Err(Reject::absent("c_eqn", eqn));
    }
    let uar_page = cqc::uar_page.get32(context);
    let uar = device
        .uars
        .get(uar_page)
        .ok_or(Reject::absent("uar_page", uar_page))?;
    request.check_owner("uar_page", uar_page, uar.uid)?;
    let entry = entry_size(context)?;
    let compression = compression(device, context)?;
    let umem = when(create_cq_in::cq_umem_valid, input, create_cq_in::cq_umem_id);
    let dbr_umem = when(cqc::dbr_umem_valid, context, cqc::dbr_umem_id);
    let placement = Placement {
        list: create_cq_in::pas.tail(input),
        log_page_size: cqc::log_page_size.get32(context),
        page_offset: cqc::page_offset.get(context),
        umem: umem.map(|id| (id, create_cq_in::cq_umem_offset.get(input))),
    };
    let buffer = place(device, request, &placement, entry << log_size)?;
    let dbr = place_dbr(device, request, cqc::dbr_addr.get(context), dbr_umem)?;
    let umems: Vec<u32> = umem.into_iter().chain(dbr_umem).collect();
    let cq = Cq {
        uid: request.uid(),
        refs: 0,
        buffer,
        dbr,
        log_size,
        entry,
        padded: cqc::cqe_sz.get(context) == PADDED,
        collapsed: cqc::cc.is_set(context),
        compression,
        session: Vec::new(),
        overrun_ignore: cqc::oi.is_set(context),
        eqn,
        uar_page,
        producer: 0,
        consumer: 0,
        arm: Arm::Off,
        arm_word: None,
        last_solicited: 0,
        last_notified: 0,
        status: CqStatus::Ok,
        context: context.to_vec(),
        umems: umems.clone(),
    };
    admit(device, &cq)?;
    let cqn = device
        .cqs
        .insert(cq)
        .ok_or(Reject::full("cqn", device.cqs.len()))?;
    add_refs(device, eqn, uar_page, &umems);
    Ok(ok_object(cqn))
}

fn add_refs(device: &mut Device, eqn: u32, uar_page: u32, umems: &[u32]) {
    if let Some(eq) = device.eqs.get_mut(eqn) {
        eq.refs += 1;
    }
    if let Some(uar) = device.uars.get_mut(uar_page) {
        uar.refs += 1;
    }
    for id in umems {
        if let Some(umem) = device.umems.get_mut(*id) {
            umem.refs += 1;
        }
    }
}

/// The CQ that a command names, if its user may.
fn named<'a>(device: &'a mut Device, request: &Request<'_>) -> Result<(u32, &'a mut Cq), Reject> {
    let cqn = request.object();
    let cq = device.cqs.get_mut(cqn).ok_or(Reject::absent("cqn", cqn))?;
    request.check_owner("cqn", cqn, cq.uid)?;
    Ok((cqn, cq))
}

pub(super) fn destroy_cq(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let (cqn, cq) = named(device, request)?;
    if cq.refs > 0 {
        return Err(Reject::busy("cqn", cqn));
    }
    if let Some(cq) = device.cqs.remove(cqn) {
        if let Some(eq) = device.eqs.get_mut(cq.eqn) {
            eq.refs = eq.refs.saturating_sub(1);
        }
        if let Some(uar) = device.uars.get_mut(cq.uar_page) {
            uar.refs = uar.refs.saturating_sub(1);
        }
        for id in cq.umems {
            if let Some(umem) = device.umems.get_mut(id) {
                umem.refs = umem.refs.saturating_sub(1);
            }
        }
    }
    Ok(ok(16))
}

pub(super) fn query_cq(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let (_, cq) = named(device, request)?;
    let mut out = ok(query_cq_out::SIZE);
    let context = query_cq_out::cqc.bytes_mut(&mut out);
    context.copy_from_slice(&cq.context);
    cqc::status.set(context, cq.status as u64);
    // MLX5_CQC_ST_*: 6 solicited armed, 9 armed, 0xa fired.
    let state = match cq.arm {
        Arm::Solicited => 0x6,
        Arm::Any => 0x9,
        Arm::Off => 0xa,
    };
    cqc::st.set(context, state);
    cqc::producer_counter.set(context, u64::from(cq.producer));
    cqc::consumer_counter.set(context, u64::from(cq.consumer));
    cqc::last_notified_index.set(context, u64::from(cq.last_notified));
    cqc::last_solicit_index.set(context, u64::from(cq.last_solicited));
    Ok(out)
}

/// Changes moderation or the queue's memory.
pub(super) fn modify_cq(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    /// `MLX5_CQ_OPMOD_RESIZE`, `include/linux/mlx5/cq.h`.
    const RESIZE: u16 = 1;
    match request.op_mod() {
        0 => moderate(device, request),
        RESIZE => resize(device, request),
        other => Err(Reject::param("op_mod", other, "0 modify or 1 resize")),
    }
}

/// Takes note of moderation; the model sends each event at once, which every moderation permits.
fn moderate(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    /// `MLX5_CQ_MODIFY_PERIOD | MLX5_CQ_MODIFY_COUNT | MLX5_CQ_MODIFY_PERIOD_MODE`, `include/linux/mlx5/cq.h`.
    const MODERATION: u64 = (1 << 0) | (1 << 1) | (1 << 4);
    let select = modify_cq_in::field_select.get(request.input);
    if select & !MODERATION != 0 {
        let rule = "only moderation can be modified";
        return Err(Reject::param("field_select", select, rule));
    }
    let given = modify_cq_in::cqc.bytes(request.input).to_vec();
    let (_, cq) = named(device, request)?;
    for field in [cqc::cq_period, cqc::cq_max_count, cqc::cq_period_mode] {
        field.set(&mut cq.context, field.get(&given));
    }
    Ok(ok(16))
}

/// Moves the queue to other memory. The last entry in the old one says so; the count of entries goes on.
fn resize(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let input = request.input;
    let context = modify_cq_in::cqc.bytes(input).to_vec();
    let log_size = cqc::log_cq_size.get32(&context);
    if log_size > Capabilities::LOG_MAX_CQ_SIZE {
        let rule = "at most log_max_cq_sz";
        return Err(Reject::param("log_cq_size", log_size, rule));
    }
    let entry = entry_size(&context)?;
    let (cqn, cq) = named(device, request)?;
    // It compresses as before, its entries permitting.
    let mut resized = cq.context.clone();
    cqc::cqe_sz.set(&mut resized, cqc::cqe_sz.get(&context));
    compression(device, &resized)?;
    let (_, cq) = named(device, request)?;
    // The consumer may have moved since the record was last looked at.
    let record = cq.dbr + dbr::CQ_CONSUMER;
    let consumer = device.host.read_be32(record).map(|word| word & 0xff_ffff);
    let (_, cq) = named(device, request)?;
    cq.consumer = consumer.unwrap_or(cq.consumer);
    let outstanding = cq.producer.wrapping_sub(cq.consumer) & 0xff_ffff;
    if outstanding >= 1 << log_size {
        let rule = "the new queue holds what has not been consumed";
        let status = Status::OutstandingCqes;
        return Err(Reject::new(status, "log_cq_size", log_size, rule, IFC));
    }
    // A UMEM is named in the same places as at creation.
    let umem = when(modify_cq_in::cq_umem_valid, input, create_cq_in::cq_umem_id);
    let placement = Placement {
        list: modify_cq_in::pas.tail(input),
        log_page_size: cqc::log_page_size.get32(&context),
        page_offset: cqc::page_offset.get(&context),
        umem: umem.map(|id| (id, create_cq_in::cq_umem_offset.get(input))),
    };
    let buffer = place(device, request, &placement, entry << log_size)?;
    admit(device, &buffer)?;
    completion::post(
        device,
        cqn,
        &Completion::new(cqe_opcode::RESIZE_CQ, 0, 0, 0),
    );
    let Some(cq) = device.cqs.get_mut(cqn) else {
        return Err(Reject::absent("cqn", cqn));
    };
    cq.buffer = buffer;
    cq.log_size = log_size;
    cq.entry = entry;
    cq.padded = cqc::cqe_sz.get(&context) == PADDED;
    for field in [
        cqc::cqe_sz,
        cqc::log_cq_size,
        cqc::log_page_size,
        cqc::page_offset,
    ] {
        field.set(&mut cq.context, field.get(&context));
    }
    if let Some(id) = umem {
        cq.umems.push(id);
        if let Some(umem) = device.umems.get_mut(id) {
            umem.refs += 1;
        }
    }
    device.cqs.weigh(cqn);
    Ok(ok(16))
}
