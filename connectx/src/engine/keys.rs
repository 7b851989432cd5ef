// SPDX-License-Identifier: MIT OR Apache-2.0
//! Work on memory keys themselves: invalidation and user-mode registration (UMR).

use super::completion::{Failure, vendor};
use super::memory::{self, Denied, Purpose};
use super::requester::{accessor, local_failure};
use super::wqe::{Operation, Update, Wqe};
use crate::ifc::context::{mkc, qpc};
use crate::ifc::wqe::{mkey_mask, syndrome, umr_ctrl};
use crate::objects::device::Device;
use crate::objects::memory::{Mkey, Translation, key_length};
use crate::objects::qp::{Qp, Service};
use crate::objects::signature::Bsf;

/// Number in a key's context that stands for "any queue pair".
const ANY_QP: u32 = 0xff_ffff;
/// Longest list of entries in one WQE: the count has 16 bits.
const MAX_ENTRIES: usize = 0xffff * 16;

/// Executes a local operation on a key.
pub(super) fn execute(device: &mut Device, qp: &Qp, wqe: &Wqe) -> Result<(), Failure> {
    match (wqe.operation, &wqe.update) {
        (Operation::Invalidate { key }, _) => {
            invalidate(device, qp, key, By::Owner).map_err(local_failure)
        }
        (Operation::SetPsv { psv, transient }, _) => set_psv(device, qp, psv, transient),
        (Operation::Update { key }, Some(request)) => update(device, qp, wqe, key, request),
        _ => Ok(()),
    }
}

/// Gives a PSV of the queue pair's protection domain its value.
fn set_psv(device: &mut Device, qp: &Qp, number: u32, transient: u64) -> Result<(), Failure> {
    match device.psvs.get_mut(number) {
        Some(psv) if psv.pd == qp.decoded.pd => {
            psv.transient = transient;
            Ok(())
        }
        _ => {
            let object = format!("qp {:#x} SET_PSV", qp.number);
            let rule = "a PSV of the queue pair's protection domain";
            device.refuse(object, "psv_index", number, rule, "PRM, SET_PSV");
            Err(Failure::new(syndrome::MW_BIND, vendor::KEY_UPDATE))
        }
    }
}

/// On whose behalf a key is taken away.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// Its owner's, by a work request.
    Owner,
    /// A peer's, by a SEND with invalidate: the key must permit that.
    Peer,
}

/// Takes away a key that its owner permitted to be invalidated.
pub(super) fn invalidate(device: &mut Device, qp: &Qp, key: u32, by: By) -> Result<(), Denied> {
    let denied = |device: &Device, reason, rule| {
        let object = format!("qp {:#x} invalidate", qp.number);
        device.refuse(object, "rkey", key, rule, "IBA 10.6.7.2.4");
        Err(reason)
    };
    match device.mkeys.get_mut(key >> 8) {
        Some(mkey) if by == By::Peer && !mkc::en_rinval.is_set(&mkey.context) => denied(
            device,
            Denied::Permission,
            "a key that permits a peer to invalidate it (en_rinval)",
        ),
        Some(mkey) if mkey.variant == key as u8 && mkey.pd == qp.decoded.pd && !mkey.free => {
            mkey.free = true;
            Ok(())
        }
        Some(_) => denied(
            device,
            Denied::Domain,
            "a valid key of the queue pair's protection domain",
        ),
        None => denied(device, Denied::Key, "a key that exists"),
    }
}

/// What a queue pair may not do to a key, by name of the field and rule.
fn objection(
    qp: &Qp,
    key: &Mkey,
    request: &Update,
    entries: usize,
) -> Option<(&'static str, &'static str)> {
    let mask = umr_ctrl::mkey_mask.get(&request.control);
    let driver = qp.service == Service::RegUmr || qpc::fre.is_set(&qp.context);
    if !key.updatable {
        return Some(("umr_en", "the key permits changes by work requests"));
    }
    if qp.service != Service::RegUmr && key.pd != qp.decoded.pd {
        return Some(("pd", "the key is in the queue pair's protection domain"));
    }
    if qp.service != Service::RegUmr && mask & mkey_mask::PD != 0 {
        let rule = "only a UMR queue pair moves keys between protection domains";
        return Some(("mkey_mask", rule));
    }
    let indirect = matches!(
        key.translation,
        Translation::Keys(_) | Translation::Fixed { .. }
    );
    if !driver && entries > 0 && !indirect {
        return Some(("fre", "page entries are the driver's to write"));
    }
    let room = key.signature.as_ref().map_or(0, |signature| signature.room);
    if request.bsf.len() > room {
        return Some(("bsf_octword_size", "the key has room for the BSF"));
    }
    if umr_ctrl::fail_if_not_free.is_set(&request.control) && !key.free {
        return Some(("free", "the key is free before it is bound"));
    }
    if umr_ctrl::fail_if_free.is_set(&request.control) && key.free {
        return Some(("free", "the key is in use"));
    }
    let bound_elsewhere = key.qpn.is_some_and(|qpn| qpn != qp.number);
    if umr_ctrl::check_qpn.is_set(&request.control) && bound_elsewhere {
        return Some(("qpn", "the key is bound to this queue pair"));
    }
    None
}

fn update(
    device: &mut Device,
    qp: &Qp,
    wqe: &Wqe,
    number: u32,
    request: &Update,
) -> Result<(), Failure> {
    let failure = Failure::new(syndrome::MW_BIND, vendor::KEY_UPDATE);
    let refuse = |device: &Device, field: &str, rule: &str| {
        let object = format!("mkey {number:#x}, UMR by qp {:#x}", qp.number);
        device.refuse(object, field, number, rule, "PRM, UMR");
        failure
    };
    let list = entries(device, qp, wqe, request)?;
    let bsf = match &request.bsf[..] {
        [] => None,
        raw => Some(Bsf::parse(raw).map_err(|(field, value, rule)| {
            let object = format!("mkey {number:#x}, UMR by qp {:#x}", qp.number);
            device.refuse(object, field, value, rule, "rdma-core wqe.h, mlx5_bsf");
            failure
        })?),
    };
    let Some(key) = device.mkeys.get(number >> 8) else {
        return Err(refuse(device, "mkey", "a key that exists"));
    };
    if let Some((field, rule)) = objection(qp, key, request, list.len()) {
        return Err(refuse(device, field, rule));
    }
    let (old_pd, new_pd) = (key.pd, mkc::pd.get32(&request.context));
    let mask = umr_ctrl::mkey_mask.get(&request.control);
    let moves = mask & mkey_mask::PD != 0 && new_pd != old_pd;
    if moves && device.pds.get(new_pd).is_none() {
        return Err(refuse(device, "pd", "a protection domain that exists"));
    }
    let Some(key) = device.mkeys.get_mut(number >> 8) else {
        return Err(failure);
    };
    let offset = if umr_ctrl::translation_offset_en.is_set(&request.control) {
        (umr_ctrl::xlt_offset_47_16.get(&request.control) << 16)
            | umr_ctrl::xlt_offset.get(&request.control)
    } else {
        0
    };
    if !list.is_empty() && !key.translation.replace(offset, &list, key.capacity) {
        let rule = format!(
            "{} octowords lie within the key's {}",
            list.len() / 16,
            key.capacity
        );
        let object = format!("mkey {number:#x}, UMR by qp {:#x}", qp.number);
        device.refuse(object, "xlt_offset", offset, &rule, "PRM, UMR");
        return Err(failure);
    }
    if let (Some(bsf), Some(signature)) = (bsf, &mut key.signature) {
        signature.bsf = Some(bsf);
    }
    change(key, mask, &request.context);
    if moves {
        if let Some(pd) = device.pds.get_mut(old_pd) {
            pd.refs = pd.refs.saturating_sub(1);
        }
        if let Some(pd) = device.pds.get_mut(new_pd) {
            pd.refs = pd.refs.saturating_add(1);
        }
    }
    Ok(())
}

/// The new entries: inside the WQE or where it points.
fn entries(device: &Device, qp: &Qp, wqe: &Wqe, request: &Update) -> Result<Vec<u8>, Failure> {
    let Some(sge) = wqe.gather.first() else {
        return Ok(request.inline.clone());
    };
    let len = umr_ctrl::xlt_octowords.get(&request.control) as usize * 16;
    let mut list = vec![0; len.min(MAX_ENTRIES)];
    // The driver's list lies under a key of its own domain, not of the keys that it changes.
    let mut who = accessor(qp);
    if let (Service::RegUmr, Some(key)) = (qp.service, device.mkeys.get(sge.key >> 8)) {
        who.pd = key.pd;
    }
    memory::read(
        device,
        who,
        sge.key,
        sge.address,
        Purpose::LocalRead,
        &mut list,
    )
    .map_err(local_failure)?;
    Ok(list)
}

/// Takes over what the mask names.
fn change(key: &mut Mkey, mask: u64, given: &[u8]) {
    let fields = [
        (mkey_mask::LEN, &[mkc::len, mkc::length64][..]),
        (
            mkey_mask::PAGE_SIZE | mkey_mask::PAGE_SIZE_5,
            &[mkc::log_page_size],
        ),
        (mkey_mask::START_ADDR, &[mkc::start_addr]),
        (mkey_mask::PD, &[mkc::pd]),
        (mkey_mask::EN_RINVAL, &[mkc::en_rinval]),
        (mkey_mask::SIG_ERR, &[mkc::expected_sigerr_count]),
        (mkey_mask::BSF_ENABLE, &[mkc::bsf_en]),
        (mkey_mask::KEY, &[mkc::mkey_7_0]),
        (mkey_mask::QPN, &[mkc::qpn]),
        (mkey_mask::LR, &[mkc::lr]),
        (mkey_mask::LW, &[mkc::lw]),
        (mkey_mask::RR, &[mkc::rr]),
        (mkey_mask::RW, &[mkc::rw]),
        (mkey_mask::A, &[mkc::a]),
        (mkey_mask::FREE, &[mkc::free]),
    ];
    for (bits, list) in fields {
        if mask & bits != 0 {
            for field in list {
                field.set(&mut key.context, field.get(given));
            }
        }
    }
    let context = &key.context;
    key.len = key_length(context);
    key.start = mkc::start_addr.get(context);
    key.pd = mkc::pd.get32(context);
    key.variant = mkc::mkey_7_0.get(context) as u8;
    if mask & mkey_mask::FREE != 0 {
        key.free = mkc::free.is_set(context);
    }
    if let Some(signature) = &mut key.signature {
        signature.enabled = mkc::bsf_en.is_set(context);
        let expected = mkc::expected_sigerr_count.is_set(context);
        if signature.expected != expected {
            signature.expected = expected;
            signature.reported.set(false);
        }
    }
    key.access = crate::objects::memory::Access::of(context);
    if mask & mkey_mask::QPN != 0 {
        key.qpn = Some(mkc::qpn.get32(context)).filter(|qpn| *qpn != ANY_QP);
    }
    let log = mkc::log_page_size.get32(context);
    match &mut key.translation {
        Translation::Pages { pages, page_offset } => {
            pages.log_size = log.clamp(12, 31);
            *page_offset = key.start & ((1 << pages.log_size) - 1);
        }
        Translation::Fixed { log_size, .. } => *log_size = log.max(12),
        _ => {}
    }
}
