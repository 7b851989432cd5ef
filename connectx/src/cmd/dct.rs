// SPDX-License-Identifier: MIT OR Apache-2.0
//! Targets of dynamic connections.

use super::qp::{check_cq, insert, remove};
use super::{PRM, Reject, Reply, Request, ok, ok_object};
use crate::engine;
use crate::ifc::command::{create_dct_in, query_dct_out};
use crate::ifc::context::{ads, dctc, qpc};
use crate::ifc::opcode::Status;
use crate::objects::dc::{Dc, Target, TargetState};
use crate::objects::device::Device;
use crate::objects::qp::{Decoded, Qp, Service, State, WorkQueues};
use crate::objects::queue::SrqKind;

/// `qpc.rq_type`: a shared receive queue (`MLX5_SRQ_RQ`).
const SRQ: u64 = 1;

/// The context of a queue pair that receives as the target does.
fn queue_pair(given: &[u8], log_reads: u32) -> Vec<u8> {
    let mut context = vec![0; qpc::SIZE];
    for (to, value) in [
        (qpc::pd, dctc::pd.get(given)),
        (qpc::mtu, dctc::mtu.get(given)),
        (qpc::no_sq, 1),
        (qpc::user_index, dctc::user_index.get(given)),
        (qpc::cqn_rcv, dctc::cqn.get(given)),
        (qpc::rq_type, SRQ),
        (qpc::srqn_rmpn_xrqn, dctc::srqn_xrqn.get(given)),
        (qpc::atomic_mode, dctc::atomic_mode.get(given)),
        (qpc::rre, dctc::rre.get(given)),
        (qpc::rwe, dctc::rwe.get(given)),
        (qpc::rae, dctc::rae.get(given)),
        (qpc::min_rnr_nak, dctc::min_rnr_nak.get(given)),
        (qpc::log_rra_max, u64::from(log_reads)),
        (qpc::dc_access_key, dctc::dc_access_key.get(given)),
    ] {
        to.set(&mut context, value);
    }
    let path = qpc::primary_address_path.bytes_mut(&mut context);
    ads::pkey_index.set(path, dctc::pkey_index.get(given));
    context
}

pub(super) fn create_dct(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let given = create_dct_in::dct_context_entry.bytes(request.input);
    let mtu = dctc::mtu.get(given);
    if !(1..=5).contains(&mtu) {
        let rule = "1 to 5, which are 256 to 4096 bytes";
        return Err(Reject::param("mtu", mtu, rule));
    }
    let pd = dctc::pd.get32(given);
    let owner = device.pds.get(pd).ok_or(Reject::absent("pd", pd))?;
    request.check_owner("pd", pd, owner.uid)?;
    check_cq(device, request, "cqn", dctc::cqn.get32(given))?;
    let srqn = dctc::srqn_xrqn.get32(given);
    let srq = device
        .srqs
        .get(srqn)
        .ok_or(Reject::absent("srqn_xrqn", srqn))?;
    request.check_owner("srqn_xrqn", srqn, srq.uid)?;
    if srq.kind != SrqKind::Rmp {
        let rule = "a receive memory pool serves targets of dynamic connections";
        return Err(Reject::param("srqn_xrqn", srqn, rule));
    }
    let context = queue_pair(given, super::caps::Capabilities::LOG_MAX_READS);
    let decoded = Decoded::from_context(&context, 0);
    let queues = WorkQueues::geometry(&context).0;
    let qp = Qp {
        state: State::ReadyToReceive,
        dc: Dc::Target(Target {
            access_key: dctc::dc_access_key.get(given),
            state: TargetState::Active,
            violations: 0,
            armed: false,
            context: given.to_vec(),
            responders: Vec::new(),
        }),
        ..Qp::new(request.uid(), Service::Dct, context, decoded, queues)
    };
    insert(device, qp, "dctn").map(ok_object)
}

/// The target that a command names, if its user may.
fn named<'a>(
    device: &'a mut Device,
    request: &Request<'_>,
) -> Result<(u32, &'a mut Target), Reject> {
    let dctn = request.object();
    let absent = Reject::absent("dctn", dctn);
    let Some(qp) = device.qps.get_mut(dctn) else {
        return Err(absent);
    };
    let Dc::Target(target) = &mut qp.dc else {
        return Err(absent);
    };
    request.check_owner("dctn", dctn, qp.uid)?;
    Ok((dctn, target))
}

pub(super) fn drain_dct(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let (dctn, _) = named(device, request)?;
    engine::dc::drain(device, dctn);
    Ok(ok(16))
}

pub(super) fn destroy_dct(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let (dctn, target) = named(device, request)?;
    if target.state != TargetState::Drained {
        let rule = "a target is drained before it is destroyed";
        let state = target.state as u64;
        return Err(Reject::new(
            Status::BadResourceState,
            "state",
            state,
            rule,
            PRM,
        ));
    }
    remove(device, dctn);
    Ok(ok(16))
}

pub(super) fn query_dct(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let (_, target) = named(device, request)?;
    let mut out = ok(query_dct_out::SIZE);
    let context = query_dct_out::dct_context_entry.bytes_mut(&mut out);
    context.copy_from_slice(&target.context);
    dctc::state.set(context, target.state as u64);
    dctc::dc_access_key_violation_count.set(context, u64::from(target.violations));
    Ok(out)
}

/// The next connection with a wrong key is an event.
pub(super) fn arm_dct(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let (_, target) = named(device, request)?;
    target.armed = true;
    Ok(ok(16))
}
