// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queue pairs.

use super::caps::Capabilities;
use super::{
    IFC, PRM, Placement, Reject, Reply, Request, admit, ok, ok_object, place, place_dbr, qp_ext,
    when,
};
use crate::engine;
use crate::engine::requester::Requester;
use crate::engine::responder::Responder;
use crate::ifc::command::{create_qp_in, modify_qp_in, query_qp_out};
use crate::ifc::context::qpc;
use crate::ifc::opcode::{self, Status};
use crate::objects::dc::{Dc, Initiator};
use crate::objects::device::Device;
use crate::objects::qp::{self, Decoded, Qp, ReceiveFrom, Service, State, WorkQueues};
use crate::objects::queue::SrqKind;
use crate::objects::transition::{merge, optional, optional_of, transition};

pub(super) fn check_cq(
    device: &Device,
    request: &Request<'_>,
    field: &'static str,
    cqn: u32,
) -> Result<(), Reject> {
    let cq = device.cqs.get(cqn).ok_or(Reject::absent(field, cqn))?;
    request.check_owner(field, cqn, cq.uid)
}

/// Checks what a send queue refers to.
pub(super) fn check_sender(
    device: &Device,
    request: &Request<'_>,
    decoded: &Decoded,
) -> Result<(), Reject> {
    let uar = device
        .uars
        .get(decoded.uar_page)
        .ok_or(Reject::absent("uar_page", decoded.uar_page))?;
    request.check_owner("uar_page", decoded.uar_page, uar.uid)?;
    let cqn = decoded.cqn_send;
    check_cq(device, request, "cqn_snd", cqn)
}

/// Checks what a queue pair wants to have in completions: 64 bytes are the first half of an entry of 128.
fn check_scatter(device: &Device, context: &[u8], decoded: &Decoded) -> Result<(), Reject> {
    let sides = [
        (
            ("cs_req", qpc::cs_req.get(context)),
            qp::scatter_request(qpc::cs_req.get(context)),
            decoded.cqn_send,
        ),
        (
            ("cs_res", qpc::cs_res.get(context)),
            qp::scatter_response(qpc::cs_res.get(context)),
            decoded.cqn_receive,
        ),
    ];
    for ((field, value), bytes, cqn) in sides {
        let rule = "none, 32 or 64 bytes: cs_req 0, 0x11 or 0x22, cs_res 0, 1 or 2";
        let bytes = bytes.ok_or(Reject::param(field, value, rule))?;
        if bytes == 64 && device.cqs.get(cqn).is_some_and(|cq| cq.entry == 64) {
            let rule = "64 bytes of data need a CQ with entries of 128";
            return Err(Reject::param(field, value, rule));
        }
    }
    Ok(())
}

/// Checks what a new queue pair refers to.
fn check_references(
    device: &Device,
    request: &Request<'_>,
    service: Service,
    decoded: &Decoded,
    sends: bool,
) -> Result<(), Reject> {
    // A UMR queue pair works on keys of every domain; the driver names none.
    if service != Service::RegUmr {
        let pd = device
            .pds
            .get(decoded.pd)
            .ok_or(Reject::absent("pd", decoded.pd))?;
        request.check_owner("pd", decoded.pd, pd.uid)?;
    }
    if sends {
        check_sender(device, request, decoded)?;
    }
    // A UMR queue pair and an initiator are never the target of anything, an XRC one receives into the SRQ that the packet
    // names.
    let receives_here = decoded.receive != ReceiveFrom::Nothing
        && !matches!(service, Service::RegUmr | Service::Xrc | Service::Dci);
    if receives_here {
        check_cq(device, request, "cqn_rcv", decoded.cqn_receive)?;
    }
    if let (ReceiveFrom::Shared(srqn), true) = (decoded.receive, receives_here) {
        let srq = device
            .srqs
            .get(srqn)
            .ok_or(Reject::absent("srqn_rmpn_xrqn", srqn))?;
        request.check_owner("srqn_rmpn_xrqn", srqn, srq.uid)?;
        if srq.kind != SrqKind::Rmp && service != Service::Xrc && request.uid() != 0 {
            return Err(Reject::param(
                "srqn_rmpn_xrqn",
                srqn,
                "a receive memory pool serves queue pairs that are not XRC",
            ));
        }
    }
    if service == Service::Xrc {
        device
            .xrcds
            .get(decoded.xrcd)
            .ok_or(Reject::absent("xrcd", decoded.xrcd))?;
    }
    Ok(())
}

/// Objects that a queue pair holds a reference to.
fn count(device: &mut Device, decoded: &Decoded, umems: &[u32], change: fn(u32) -> u32) {
    if let Some(pd) = device.pds.get_mut(decoded.pd) {
        pd.refs = change(pd.refs);
    }
    if let Some(uar) = device.uars.get_mut(decoded.uar_page) {
        uar.refs = change(uar.refs);
    }
    for cqn in [decoded.cqn_send, decoded.cqn_receive] {
        if let Some(cq) = device.cqs.get_mut(cqn) {
            cq.refs = change(cq.refs);
        }
    }
    if let ReceiveFrom::Shared(srqn) = decoded.receive {
        if let Some(srq) = device.srqs.get_mut(srqn) {
            srq.refs = change(srq.refs);
        }
    }
    for id in umems {
        if let Some(umem) = device.umems.get_mut(*id) {
            umem.refs = change(umem.refs);
        }
    }
}

/// `qpc.send_dbr_mode`: doorbells say all that there is to send (`SendDbrMode.NO_DBR_EXT` of rdma-core's tests).
const NO_DBR_EXT: u64 = 1;

pub(super) fn create_qp(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let input = request.input;
    let context = create_qp_in::qpc.bytes(input).to_vec();
    let st = qpc::st.get(&context);
    let service = Service::from_number(st).ok_or(Reject::param(
        "st",
        st,
        "a transport service that the device has",
    ))?;
    for (name, field, most) in [
        (
            "log_sq_size",
            qpc::log_sq_size,
            Capabilities::LOG_MAX_QP_SIZE,
        ),
        (
            "log_rq_size",
            qpc::log_rq_size,
            Capabilities::LOG_MAX_QP_SIZE,
        ),
        ("log_rq_stride", qpc::log_rq_stride, 5),
        (
            "log_num_dci_stream_channels",
            qpc::log_num_dci_stream_channels,
            Capabilities::LOG_MAX_DCI_STREAMS,
        ),
        (
            "log_num_dci_errored_streams",
            qpc::log_num_dci_errored_streams,
            Capabilities::LOG_MAX_DCI_ERRORED_STREAMS,
        ),
    ] {
        if field.get32(&context) > most {
            return Err(Reject::param(
                name,
                field.get32(&context),
                "within the capability",
            ));
        }
    }
    let mode = qpc::send_dbr_mode.get(&context);
    if mode > NO_DBR_EXT {
        let rule = "0, or 1 for a send queue without a doorbell record";
        return Err(Reject::param("send_dbr_mode", mode, rule));
    }
    let (mut queues, len) = WorkQueues::geometry(&context);
    let umem = when(create_qp_in::wq_umem_valid, input, create_qp_in::wq_umem_id);
    let dbr_umem = when(qpc::dbr_umem_valid, &context, qpc::dbr_umem_id);
    let has_queues = len > 0;
    let dbr = if has_queues {
        place_dbr(device, request, qpc::dbr_addr.get(&context), dbr_umem)?
    } else {
        0
    };
    let decoded = Decoded::from_context(&context, dbr);
    check_references(
        device,
        request,
        service,
        &decoded,
        queues.log_send.is_some(),
    )?;
    check_scatter(device, &context, &decoded)?;
    let placement = Placement {
        list: create_qp_in::pas.tail(input),
        log_page_size: qpc::log_page_size.get32(&context),
        page_offset: qpc::page_offset.get(&context),
        umem: umem.map(|id| (id, create_qp_in::wq_umem_offset.get(input))),
    };
    queues.buffer = place(device, request, &placement, len)?;
    let umems: Vec<u32> = if has_queues {
        umem.into_iter().chain(dbr_umem).collect()
    } else {
        Vec::new()
    };
    let dc = match service {
        Service::Dci => Dc::Initiator(Initiator {
            log_errored: qpc::log_num_dci_stream_channels
                .is_set(&context)
                .then(|| qpc::log_num_dci_errored_streams.get32(&context)),
            ..Initiator::default()
        }),
        _ => Dc::None,
    };
    let qp = Qp {
        umems,
        dc,
        ..Qp::new(request.uid(), service, context, decoded, queues)
    };
    insert(device, qp, "qpn").map(ok_object)
}

/// Adds a queue pair or send queue and gives its number.
pub(super) fn insert(device: &mut Device, qp: Qp, what: &'static str) -> Result<u32, Reject> {
    let qp = Box::new(qp);
    let (decoded, umems) = (qp.decoded.clone(), qp.umems.clone());
    admit(device, &qp)?;
    let number = device
        .qps
        .insert(qp)
        .ok_or(Reject::full(what, device.qps.len()))?;
    if let Some(qp) = device.qps.get_mut(number) {
        qp.number = number;
    }
    count(device, &decoded, &umems, |refs| refs.saturating_add(1));
    Ok(number)
}

/// Adds a queue pair that the device makes by itself, if there is room.
pub(crate) fn insert_qp(device: &mut Device, qp: Qp) -> Option<u32> {
    insert(device, qp, "qpn").ok()
}

/// Takes away a queue pair or send queue, and what refers to it.
pub(crate) fn remove(device: &mut Device, number: u32) {
    if let Some(mut qp) = device.qps.remove(number) {
        device.timers.forget(&qp);
        device.page_faults.forget(&mut qp);
        count(device, &qp.decoded, &qp.umems, |refs| {
            refs.saturating_sub(1)
        });
        device.multicast.retain(|(_, member)| *member != number);
        qp_ext::leave(device, qp.limits);
    }
}

/// The queue pair that a command names, if its user may.
fn named<'a>(
    device: &'a mut Device,
    request: &Request<'_>,
) -> Result<(u32, &'a mut Box<Qp>), Reject> {
    let qpn = request.object();
    let qp = device
        .qps
        .get_mut(qpn)
        .filter(|qp| qp.service.is_queue_pair())
        .ok_or(Reject::absent("qpn", qpn))?;
    request.check_owner("qpn", qpn, qp.uid)?;
    Ok((qpn, qp))
}

pub(super) fn destroy_qp(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let (qpn, _) = named(device, request)?;
    remove(device, qpn);
    Ok(ok(16))
}

pub(super) fn query_qp(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let (_, qp) = named(device, request)?;
    let mut out = ok(query_qp_out::SIZE);
    query_qp_out::qpc
        .bytes_mut(&mut out)
        .copy_from_slice(&qp.query());
    Ok(out)
}

pub(super) fn modify_qp(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let command = request.opcode();
    let (qpn, qp) = named(device, request)?;
    let Some((starts, end)) = transition(command) else {
        return Err(Reject::new(
            Status::BadOp,
            "opcode",
            command,
            "a transition of a queue pair",
            IFC,
        ));
    };
    if !starts.contains(&qp.state) {
        let rule = "a transition starts in the state that its name says";
        return Err(Reject::new(
            Status::BadQpState,
            "state",
            qp.state as u64,
            rule,
            PRM,
        ));
    }
    match end {
        State::Error => engine::to_error(device, qpn),
        State::Reset => reset(device, qpn),
        _ => {
            let given = modify_qp_in::qpc.bytes(request.input);
            check_values(command, qp.service, given)?;
            let mask = modify_qp_in::opt_param_mask.get32(request.input);
            let unknown = mask & !optional_of(command, qp.service);
            if unknown != 0 {
                let rule = "an option of this transition of this service";
                return Err(Reject::param("opt_param_mask", unknown, rule));
            }
            qp_ext::extend(device, request, qpn)?;
            let rate = when_rate(device, request, mask, given)?;
            let Some(qp) = device.qps.get_mut(qpn) else {
                return Err(Reject::absent("qpn", qpn));
            };
            if let Some(rate) = rate {
                qp.limits.rate_index = rate;
            }
            merge(command, mask, given, &mut qp.context);
            qp.decoded = Decoded::from_context(&qp.context, qp.decoded.dbr);
            enter(qp, command, end);
            device.schedule(qpn);
        }
    }
    Ok(ok(16))
}

/// The rate of packet pacing that a transition chooses.
fn when_rate(
    device: &Device,
    request: &Request<'_>,
    mask: u32,
    given: &[u8],
) -> Result<Option<u16>, Reject> {
    if mask & optional::PP_INDEX == 0 {
        return Ok(None);
    }
    let index = qpc::packet_pacing_rate_limit_index.get(given) as u16;
    if index != 0 {
        let field = "packet_pacing_rate_limit_index";
        let rate = device.rates.get(&index);
        let rate = rate.ok_or(Reject::absent(field, index.into()))?;
        request.check_owner(field, index.into(), rate.uid)?;
    }
    Ok(Some(index))
}

/// Values that a transition brings and that would have no meaning.
fn check_values(command: u16, service: Service, given: &[u8]) -> Result<(), Reject> {
    if command == opcode::INIT2RTR_QP && !service.is_datagram() && service != Service::RegUmr {
        let mtu = qpc::mtu.get(given);
        if !(1..=5).contains(&mtu) {
            return Err(Reject::param(
                "mtu",
                mtu,
                "1 to 5, which are 256 to 4096 bytes",
            ));
        }
        let log_msg_max = qpc::log_msg_max.get32(given);
        if log_msg_max > Capabilities::LOG_MAX_MSG {
            return Err(Reject::param(
                "log_msg_max",
                log_msg_max,
                "at most the capability log_max_msg",
            ));
        }
    }
    for (name, field) in [
        ("log_sra_max", qpc::log_sra_max),
        ("log_rra_max", qpc::log_rra_max),
    ] {
        if field.get32(given) > Capabilities::LOG_MAX_READS {
            return Err(Reject::param(
                name,
                field.get(given),
                "at most the capability log_max_ra_req_qp or log_max_ra_res_qp",
            ));
        }
    }
    Ok(())
}

/// Both halves as they are in RESET: the queues start again from their first entry.
pub(super) fn reset(device: &mut Device, qpn: u32) {
    let Some(qp) = device.qps.get_mut(qpn) else {
        return;
    };
    device.timers.forget(qp);
    device.page_faults.forget(qp);
    if let Dc::Initiator(initiator) = &mut qp.dc {
        initiator.reset();
    }
    qp.mmo = false;
    qp.state = State::Reset;
    qp.requester = Requester::default();
    qp.responder = Responder::default();
}

fn enter(qp: &mut Qp, command: u16, state: State) {
    qp.state = state;
    match command {
        opcode::INIT2RTR_QP => qp.responder.expected_psn = qpc::next_rcv_psn.get32(&qp.context),
        opcode::RTR2RTS_QP => qp
            .requester
            .start(qpc::next_send_psn.get32(&qp.context), &qp.decoded),
        // What was posted may have been changed since it was copied (mlx5dv_qp_cancel_posted_send_wrs).
        opcode::SQD_RTS_QP => qp.requester.forget_copy(),
        _ => {}
    }
}
