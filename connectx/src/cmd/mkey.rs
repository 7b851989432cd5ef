// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory keys.

use std::sync::Arc;

use super::{Reject, Reply, Request, admit, listed_pages, ok, ok_object, when};
use crate::ifc::be64_list;
use crate::ifc::command::{create_mkey_in, query_mkey_out};
use crate::ifc::context::mkc;
use crate::objects::device::Device;
use crate::objects::memic;
use crate::objects::memory::{
    ABSENT, Access, KeyEntry, Mkey, Pages, READ_ONLY, Translation, key_entries, key_length,
    page_entry,
};
use crate::objects::signature::{Bsf, Signature};

/// `mkc.access_mode`, `MLX5_MKC_ACCESS_MODE_*`.
mod mode {
    pub const PA: u64 = 0;
    pub const MTT: u64 = 1;
    pub const KLMS: u64 = 2;
    pub const KSM: u64 = 3;
    pub const MEMIC: u64 = 5;
}

const MODES: &str = "0 PA, 1 MTT, 2 KLM, 3 KSM or 5 MEMIC";

/// Most translation entries of a key, in octowords: 64 GiB in 4 KiB pages.
const MAX_OCTOWORDS: u64 = 1 << 23;

fn translation(
    device: &Device,
    request: &Request<'_>,
    context: &[u8],
) -> Result<Translation, Reject> {
    let input = request.input;
    let octowords = create_mkey_in::translations_octword_actual_size.get(input);
    if octowords > MAX_OCTOWORDS {
        return Err(Reject::param(
            "translations_octword_actual_size",
            octowords,
            "at most 2^23",
        ));
    }
    match (mkc::access_mode_4_2.get(context) << 2) | mkc::access_mode_1_0.get(context) {
        mode::PA => Ok(Translation::Physical),
        // A key made free gets its entries by work requests; what it has room for is settled here.
        mode::MTT if mkc::free.is_set(context) => Ok(Translation::Pages {
            pages: Pages {
                addresses: vec![ABSENT; room(context)? * 2].into(),
                log_size: mkc::log_page_size.get32(context).clamp(12, 31),
            },
            page_offset: 0,
        }),
        mode @ (mode::KLMS | mode::KSM) if mkc::free.is_set(context) => {
            let none = KeyEntry {
                len: 0,
                key: 0,
                address: 0,
            };
            let entries = vec![none; room(context)?].into();
            Ok(indirect(mode, context, entries))
        }
        mode::MTT => page_translation(device, request, context),
        mode @ (mode::KLMS | mode::KSM) => {
            let list = create_mkey_in::pas.tail(input);
            let list = list.get(..octowords as usize * 16).ok_or(Reject::param(
                "translations_octword_actual_size",
                octowords,
                "the list has as many entries as it says",
            ))?;
            Ok(indirect(mode, context, key_entries(list).collect()))
        }
        mode::MEMIC => {
            // The start address is where the memory lies in the BAR; what is addressed counts from 0 (dm.c, mr.c of mlx5_ib).
            let given = mkc::start_addr.get(context);
            let start = given.wrapping_sub(memic::START);
            if !device.memic.covers(start, mkc::len.get(context)) || mkc::length64.is_set(context) {
                let rule = "the range lies within allocated device memory";
                return Err(Reject::param("start_addr", given, rule));
            }
            Ok(Translation::Device { start })
        }
        other => Err(Reject::param("access_mode", other, MODES)),
    }
}

/// What the key can have of signatures: room for a BSF, which a work request brings.
fn signature(context: &[u8]) -> Result<Option<Box<Signature>>, Reject> {
    let octowords = mkc::bsf_octword_size.get(context);
    if !mkc::bsf_en.is_set(context) || octowords == 0 {
        return Ok(None);
    }
    let room = octowords as usize * 16;
    if room > Bsf::SIZE {
        let rule = "at most 2^log_max_bsf_list_size";
        return Err(Reject::param("bsf_octword_size", octowords, rule));
    }
    Ok(Some(Box::new(Signature {
        room,
        enabled: true,
        expected: mkc::expected_sigerr_count.is_set(context),
        ..Signature::default()
    })))
}

/// A list of keys.
fn indirect(mode: u64, context: &[u8], entries: Arc<[KeyEntry]>) -> Translation {
    match mode {
        mode::KSM => Translation::Fixed {
            entries,
            log_size: mkc::log_page_size.get32(context).max(12),
        },
        _ => Translation::Keys(entries),
    }
}

/// Entries that a free key has room for, in octowords. They are there as soon as the key is, whatever is put into them, so
/// a command of a few bytes must not ask for many.
fn room(context: &[u8]) -> Result<usize, Reject> {
    /// The capability `log_max_klm_list_size`.
    const MOST: u64 = 1 << 16;
    let octowords = mkc::translations_octword_size.get(context);
    if octowords > MOST {
        let field = "translations_octword_size";
        let rule = "at most 2^log_max_klm_list_size";
        return Err(Reject::param(field, octowords, rule));
    }
    Ok(octowords as usize)
}

fn page_translation(
    device: &Device,
    request: &Request<'_>,
    context: &[u8],
) -> Result<Translation, Reject> {
    let input = request.input;
    // For MTTs the context counts single bytes: the field is the whole log, not one above 4 KiB.
    let log_size = mkc::log_page_size.get32(context);
    if log_size < 12 {
        return Err(Reject::param("log_page_size", log_size, "at least 12"));
    }
    let start = mkc::start_addr.get(context);
    let len = mkc::len.get(context);
    // Only with it do the entries say what may be done with their pages, and which are not there.
    let rights = create_mkey_in::pg_access.is_set(input);
    let listed = create_mkey_in::pas.tail(input);
    if rights && mkc::length64.is_set(context) {
        // All addresses, of which only the first have entries: the driver's keys that stand for no memory.
        let octowords = create_mkey_in::translations_octword_actual_size.get(input);
        let within = (1u64 << log_size) - 1;
        let entries = be64_list(listed).take(octowords as usize * 2);
        let pages = entries.map(|entry| page_entry(entry) & (!within | ABSENT | READ_ONLY));
        return Ok(Translation::Pages {
            pages: Pages {
                addresses: pages.collect(),
                log_size,
            },
            page_offset: start & within,
        });
    }
    if mkc::length64.is_set(context) || start.checked_add(len).is_none() {
        return Err(Reject::param(
            "len",
            len,
            "the range ends within the address space",
        ));
    }
    let within = start & ((1 << log_size) - 1);
    let Some(id) = when(
        create_mkey_in::mkey_umem_valid,
        input,
        create_mkey_in::mkey_umem_id,
    ) else {
        let mut pages = listed_pages(listed, log_size, within, len)?;
        if rights {
            let missing = |(page, entry)| page | page_entry(entry) & (ABSENT | READ_ONLY);
            let entries = pages.addresses.iter().copied().zip(be64_list(listed));
            pages.addresses = entries.map(missing).collect();
        }
        return Ok(Translation::Pages {
            pages,
            page_offset: within,
        });
    };
    let umem = device
        .umems
        .get(id)
        .ok_or(Reject::absent("mkey_umem_id", id))?;
    request.check_owner("mkey_umem_id", id, umem.uid)?;
    let offset = create_mkey_in::mkey_umem_offset.get(input);
    if offset.checked_add(len).is_none_or(|end| end > umem.len) {
        return Err(Reject::param(
            "mkey_umem_offset",
            offset,
            "the range lies within the UMEM",
        ));
    }
    let pages = Pages {
        addresses: umem.pages.addresses.clone(),
        log_size: umem.pages.log_size,
    };
    Ok(Translation::Pages {
        pages,
        page_offset: umem.page_offset + offset,
    })
}

pub(super) fn create_mkey(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let context = create_mkey_in::mkc.bytes(request.input);
    let pd = mkc::pd.get32(context);
    let owner = device.pds.get(pd).ok_or(Reject::absent("pd", pd))?;
    request.check_owner("pd", pd, owner.uid)?;
    if request.uid() != 0
        && mkc::access_mode_1_0.get(context) == mode::PA
        && mkc::access_mode_4_2.get(context) == 0
    {
        return Err(Reject::param(
            "access_mode",
            mode::PA,
            "only the driver may address memory without translation",
        ));
    }
    let translation = translation(device, request, context)?;
    let umem = when(
        create_mkey_in::mkey_umem_valid,
        request.input,
        create_mkey_in::mkey_umem_id,
    )
    .filter(|_| matches!(translation, Translation::Pages { .. }) && !mkc::free.is_set(context));
    let key = Mkey {
        uid: request.uid(),
        variant: mkc::mkey_7_0.get(context) as u8,
        free: mkc::free.is_set(context),
        pd,
        access: Access::of(context),
        start: match translation {
            Translation::Device { .. } => 0,
            _ => mkc::start_addr.get(context),
        },
        len: key_length(context),
        translation,
        context: context.to_vec(),
        capacity: mkc::translations_octword_size.get32(context),
        updatable: mkc::umr_en.is_set(context),
        qpn: None,
        umem,
        signature: signature(context)?,
    };
    admit(device, &key)?;
    let index = device
        .mkeys
        .insert(key)
        .ok_or(Reject::full("mkey_index", device.mkeys.len()))?;
    if let Some(pd) = device.pds.get_mut(pd) {
        pd.refs += 1;
    }
    if let Some(umem) = umem.and_then(|id| device.umems.get_mut(id)) {
        umem.refs += 1;
    }
    Ok(ok_object(index))
}

pub(super) fn query_mkey(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let index = request.object();
    let key = device
        .mkeys
        .get(index)
        .ok_or(Reject::absent("mkey_index", index))?;
    request.check_owner("mkey_index", index, key.uid)?;
    let mut out = ok(query_mkey_out::SIZE);
    let context = query_mkey_out::mkc.bytes_mut(&mut out);
    context.copy_from_slice(&key.context);
    mkc::free.set(context, u64::from(key.free));
    Ok(out)
}

pub(super) fn destroy_mkey(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let index = request.object();
    let key = device
        .mkeys
        .get(index)
        .ok_or(Reject::absent("mkey_index", index))?;
    request.check_owner("mkey_index", index, key.uid)?;
    if let Some(key) = device.mkeys.remove(index) {
        if let Some(pd) = device.pds.get_mut(key.pd) {
            pd.refs = pd.refs.saturating_sub(1);
        }
        if let Some(umem) = key.umem.and_then(|id| device.umems.get_mut(id)) {
            umem.refs = umem.refs.saturating_sub(1);
        }
    }
    Ok(ok(16))
}
