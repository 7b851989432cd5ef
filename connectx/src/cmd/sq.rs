// SPDX-License-Identifier: MIT OR Apache-2.0
//! Send queues without a queue pair. On an InfiniBand port nothing can be sent from one (that takes a TIS), but it executes
//! NOPs, which is what mlx5_core's write-combining test asks of it.

use super::caps::Capabilities;
use super::qp::{check_sender, insert, remove, reset};
use super::{
    PRM, Placement, Reject, Reply, Request, ok, ok_object, place, place_dbr, qp_ext, when,
};
use crate::engine;
use crate::ifc::command::{create_sq_in, modify_sq_in, query_sq_out};
use crate::ifc::context::{qpc, sqc, wq};
use crate::ifc::opcode::Status;
use crate::ifc::wqe::BASIC_BLOCK;
use crate::objects::device::Device;
use crate::objects::pacing::Limits;
use crate::objects::qp::{Decoded, Qp, Service, State, WorkQueues};

/// `MLX5_SQC_STATE_*`, include/linux/mlx5/mlx5_ifc.h.
const RESET: u64 = 0;
/// See [`RESET`].
const READY: u64 = 1;
/// See [`RESET`].
const ERROR: u64 = 3;

/// Bit of `modify_bitmask`, `MLX5_MODIFY_SQ_BITMASK_QOS_QUEUE_GROUP_ID` of rdma-core's mlx5_ifc.h.
const QOS_QUEUE_GROUP_ID: u64 = 1 << 2;

/// `MLX5_WQ_TYPE_CYCLIC`.
const CYCLIC: u64 = 1;
/// `qpc.rq_type`: no receive queue (`MLX5_ZERO_LEN_RQ`).
const NO_RQ: u64 = 3;

fn number(state: State) -> u64 {
    match state {
        State::Reset => RESET,
        State::Error | State::SendQueueError => ERROR,
        _ => READY,
    }
}

/// The context of a queue pair with such a send queue.
fn queue_pair(sq: &[u8], queue: &[u8]) -> Result<Vec<u8>, Reject> {
    for (name, value, right, rule) in [
        (
            "state",
            sqc::state.get(sq),
            RESET,
            "a send queue begins in RST",
        ),
        (
            "wq_type",
            wq::wq_type.get(queue),
            CYCLIC,
            "a send queue is cyclic",
        ),
        (
            "log_wq_stride",
            wq::log_wq_stride.get(queue),
            u64::from(BASIC_BLOCK.ilog2()),
            "a send queue's entries are basic blocks of 64 bytes",
        ),
    ] {
        if value != right {
            return Err(Reject::param(name, value, rule));
        }
    }
    let log_size = wq::log_wq_sz.get(queue);
    if log_size > u64::from(Capabilities::LOG_MAX_QP_SIZE) {
        return Err(Reject::param(
            "log_wq_sz",
            log_size,
            "at most the capability log_max_wq_sz",
        ));
    }
    let mut context = vec![0; qpc::SIZE];
    for (to, value) in [
        (qpc::rq_type, NO_RQ),
        (qpc::pd, wq::pd.get(queue)),
        (qpc::log_sq_size, log_size),
        (qpc::uar_page, wq::uar_page.get(queue)),
        (qpc::user_index, sqc::user_index.get(sq)),
        (qpc::cqn_snd, sqc::cqn.get(sq)),
    ] {
        to.set(&mut context, value);
    }
    Ok(context)
}

pub(super) fn create_sq(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let sq = create_sq_in::ctx.tail(request.input);
    let queue = sqc::wq.tail(sq);
    let context = queue_pair(sq, queue)?;
    let umem = when(wq::wq_umem_valid, queue, wq::wq_umem_id);
    let dbr_umem = when(wq::dbr_umem_valid, queue, wq::dbr_umem_id);
    let dbr = place_dbr(device, request, wq::dbr_addr.get(queue), dbr_umem)?;
    let decoded = Decoded::from_context(&context, dbr);
    // The driver names no protection domain where it has no Ethernet netdev: NOPs use no memory.
    if let Some(pd) = device.pds.get(decoded.pd) {
        request.check_owner("pd", decoded.pd, pd.uid)?;
    }
    check_sender(device, request, &decoded)?;
    let (mut queues, len) = WorkQueues::geometry(&context);
    let placement = Placement {
        list: queue.get(wq::SIZE..).unwrap_or_default(),
        log_page_size: wq::log_wq_pg_sz.get32(queue),
        page_offset: wq::page_offset.get(queue),
        umem: umem.map(|id| (id, wq::wq_umem_offset.get(queue))),
    };
    queues.buffer = place(device, request, &placement, len)?;
    let umems: Vec<u32> = umem.into_iter().chain(dbr_umem).collect();
    let qp = Qp {
        umems,
        ..Qp::new(request.uid(), Service::Sq, context, decoded, queues)
    };
    insert(device, qp, "sqn").map(ok_object)
}

/// The send queue that a command names, if its user may.
fn named<'a>(
    device: &'a mut Device,
    request: &Request<'_>,
) -> Result<(u32, &'a mut Box<Qp>), Reject> {
    let sqn = request.object();
    let qp = device
        .qps
        .get_mut(sqn)
        .filter(|qp| qp.service == Service::Sq)
        .ok_or(Reject::absent("sqn", sqn))?;
    request.check_owner("sqn", sqn, qp.uid)?;
    Ok((sqn, qp))
}

pub(super) fn modify_sq(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let from = modify_sq_in::sq_state.get(request.input);
    let to = sqc::state.get(modify_sq_in::ctx.tail(request.input));
    let (sqn, qp) = named(device, request)?;
    let now = number(qp.state);
    let bad = |field, value, rule| {
        Err(Reject::new(
            Status::BadResourceState,
            field,
            value,
            rule,
            PRM,
        ))
    };
    if from != now {
        return bad("sq_state", from, "the state that the queue is in");
    }
    if modify_sq_in::modify_bitmask.get(request.input) & QOS_QUEUE_GROUP_ID != 0 {
        let given = modify_sq_in::ctx.tail(request.input);
        let limits = Limits {
            requester_group: sqc::qos_queue_group_id.get32(given),
            ..qp.limits
        };
        qp_ext::limit(device, request, sqn, limits)?;
    }
    let (sqn, qp) = named(device, request)?;
    match (from, to) {
        (RESET, READY) => {
            qp.state = State::ReadyToSend;
            qp.requester.start(0, &qp.decoded);
        }
        (ERROR, RESET) => reset(device, sqn),
        (RESET | READY, ERROR) => engine::to_error(device, sqn),
        (RESET, RESET) | (READY, READY) => {}
        _ => return bad("state", to, "RST to RDY, either to ERR, and ERR to RST"),
    }
    Ok(ok(16))
}

pub(super) fn destroy_sq(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let (sqn, _) = named(device, request)?;
    remove(device, sqn);
    Ok(ok(16))
}

pub(super) fn query_sq(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let (_, qp) = named(device, request)?;
    let mut out = ok(query_sq_out::SIZE);
    let sq = query_sq_out::sq_context.bytes_mut(&mut out);
    sqc::state.set(sq, number(qp.state));
    sqc::user_index.set(sq, u64::from(qp.decoded.user_index));
    sqc::cqn.set(sq, u64::from(qp.decoded.cqn_send));
    let queue = sqc::wq.bytes_mut(sq);
    for (field, value) in [
        (wq::wq_type, CYCLIC),
        (wq::pd, u64::from(qp.decoded.pd)),
        (wq::uar_page, u64::from(qp.decoded.uar_page)),
        (wq::log_wq_stride, u64::from(BASIC_BLOCK.ilog2())),
        (wq::log_wq_sz, u64::from(qp.queues.log_send.unwrap_or(0))),
        (wq::hw_counter, u64::from(qp.requester.fetched)),
        (wq::sw_counter, u64::from(qp.requester.producer)),
    ] {
        field.set(queue, value);
    }
    Ok(out)
}
