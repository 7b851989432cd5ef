// SPDX-License-Identifier: MIT OR Apache-2.0
//! Start-up, shutdown and identification of the function.

use super::caps::{ATOMIC, DEVICE_MEMORY, EMPTY, GENERAL, GENERAL_2, ODP, QOS};
use super::{Reject, Reply, Request, ok};
use crate::ifc::cap::{atomic_caps, odp_cap};
use crate::ifc::command::{
    query_adapter_out, query_hca_cap_out, query_issi_out, set_hca_cap_in, set_issi_in,
};
use crate::ifc::opcode::Status;
use crate::objects::device::{Device, Phase};

/// IEEE vendor id of Mellanox.
const VENDOR: u64 = 0x2c9;
/// Board id, shown by tools.
const BOARD: &[u8] = b"IBGDA0000000001";
/// The newest interface step sequence that the model speaks.
const MAX_ISSI: u64 = 1;

pub(super) fn enable_hca(device: &mut Device, _: &Request<'_>) -> Result<Reply, Reject> {
    // A driver that comes back without a PCI reset (health recovery, kexec) knows nothing of what was there.
    device.drop_everything();
    device.phase = Phase::Enabled;
    Ok(ok(12))
}

pub(super) fn disable_hca(device: &mut Device, _: &Request<'_>) -> Result<Reply, Reject> {
    device.drop_everything();
    Ok(ok(12))
}

pub(super) fn init_hca(device: &mut Device, _: &Request<'_>) -> Result<Reply, Reject> {
    device.phase = Phase::Initialised;
    super::pages::started(device);
    Ok(ok(16))
}

pub(super) fn teardown_hca(device: &mut Device, _: &Request<'_>) -> Result<Reply, Reject> {
    for (kind, left) in device.objects().into_iter().filter(|&(_, n)| n > 0) {
        device.counters.never_reclaimed += left;
        let rule = "the driver destroys what it made before it tears the HCA down";
        device.refuse("cmd TEARDOWN_HCA", kind, left, rule, super::PRM);
    }
    // The pages stay with us until the driver takes them.
    let pages = std::mem::take(&mut device.pages);
    let (issi, caps) = (device.issi, device.caps.clone());
    device.drop_everything();
    (device.pages, device.issi, device.caps) = (pages, issi, caps);
    device.phase = Phase::Enabled;
    Ok(ok(16))
}

pub(super) fn nop(_: &mut Device, _: &Request<'_>) -> Result<Reply, Reject> {
    Ok(ok(16))
}

pub(super) fn query_issi(device: &mut Device, _: &Request<'_>) -> Result<Reply, Reject> {
    let mut out = ok(query_issi_out::SIZE);
    query_issi_out::current_issi.set(&mut out, u64::from(device.issi));
    query_issi_out::supported_issi_dw0.set(&mut out, 1 << MAX_ISSI);
    Ok(out)
}

pub(super) fn set_issi(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let issi = set_issi_in::current_issi.get(request.input);
    if issi > MAX_ISSI {
        return Err(Reject::param(
            "current_issi",
            issi,
            "an ISSI that QUERY_ISSI lists",
        ));
    }
    device.issi = issi as u16;
    Ok(ok(16))
}

pub(super) fn query_hca_cap(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let group;
    let current = request.op_mod() & 1 == 1;
    let caps: &[u8] = match request.op_mod() >> 1 {
        GENERAL if current => &device.caps.current,
        GENERAL => &device.caps.max,
        ATOMIC => {
            group = device.caps.atomic();
            &group
        }
        ODP => {
            group = device.caps.odp(current);
            &group
        }
        QOS => {
            group = device.caps.qos();
            &group
        }
        GENERAL_2 => {
            group = device.caps.general_2();
            &group
        }
        DEVICE_MEMORY => {
            group = super::memic::capabilities();
            &group
        }
        kind if EMPTY.contains(&kind) => &[],
        kind => {
            return Err(Reject::new(
                Status::BadParam,
                "op_mod",
                kind,
                "a capability type that the device has",
                super::IFC,
            ));
        }
    };
    let mut out = ok(query_hca_cap_out::SIZE);
    query_hca_cap_out::capability.bytes_mut(&mut out)[..caps.len()].copy_from_slice(caps);
    Ok(out)
}

pub(super) fn set_hca_cap(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    match request.op_mod() >> 1 {
        GENERAL => {
            let given = set_hca_cap_in::capability.tail(request.input);
            let len = device.caps.current.len().min(given.len());
            device.caps.current[..len].copy_from_slice(&given[..len]);
            Ok(ok(16))
        }
        ATOMIC => {
            let given = set_hca_cap_in::capability.tail(request.input);
            device.caps.atomic_host_order =
                atomic_caps::atomic_req_8B_endianness_mode.get(given) == 1;
            Ok(ok(16))
        }
        ODP => {
            let given = set_hca_cap_in::capability.tail(request.input);
            let (most, now) = (device.caps.odp(false), device.caps.odp(true));
            let can = most.iter().zip(&now).map(|(most, now)| most | now);
            let beyond = can.zip(given).find(|(can, given)| **given & !can != 0);
            if let Some((_, given)) = beyond {
                let rule = "only services and a scheme that the device has";
                return Err(Reject::param("odp_cap", *given, rule));
            }
            device.caps.memory_page_faults =
                given.len() >= odp_cap::SIZE && odp_cap::mem_page_fault.is_set(given);
            Ok(ok(16))
        }
        kind => Err(Reject::new(
            Status::BadParam,
            "op_mod",
            kind,
            "a capability type that the device has",
            super::IFC,
        )),
    }
}

pub(super) fn query_adapter(_: &mut Device, _: &Request<'_>) -> Result<Reply, Reject> {
    let mut out = ok(query_adapter_out::SIZE);
    query_adapter_out::ieee_vendor_id.set(&mut out, VENDOR);
    query_adapter_out::vsd_contd_psid.bytes_mut(&mut out)[..BOARD.len()].copy_from_slice(BOARD);
    Ok(out)
}
