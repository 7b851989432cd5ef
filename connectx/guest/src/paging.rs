// SPDX-License-Identifier: MIT OR Apache-2.0
//! On-demand paging as mlx5_ib does it: keys whose pages come and go by UMR, page faults and their answers.

use connectx::ifc::command::{self, header, page_fault_resume_in, reply, set_hca_cap_in};
use connectx::ifc::context::mkc;
use connectx::ifc::event::{eqe, kind};
use connectx::ifc::wqe::{cqe_opcode, mkey_mask, send, umr_ctrl};
use connectx::ifc::{cap, opcode};
use connectx::objects::qp::Service;

use crate::{Cq, Guest, Qp, Settings, Shape, input, next_event, status};

/// Rights in a page entry.
pub const READ: u64 = 1;
pub const WRITE: u64 = 2;

/// A page fault as its event tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageFault {
    pub token: u64,
    pub key: u32,
    pub address: u64,
    pub pages: u64,
    pub after: u64,
}

impl Guest {
    /// Asks for page faults by the memory scheme; gives the status.
    pub fn enable_paging(&mut self) -> u8 {
        let mut set = input(opcode::SET_HCA_CAP, 16);
        header::op_mod.set(&mut set, 2 << 1);
        let mut caps = vec![0; cap::odp_cap::SIZE];
        cap::odp_cap::mem_page_fault.set(&mut caps, 1);
        set.truncate(set_hca_cap_in::capability.offset());
        set.extend(caps);
        status(&self.command(set, 16))
    }

    /// The next page fault; other events before it are dropped.
    pub fn page_fault(&mut self) -> Option<PageFault> {
        loop {
            let e = next_event(&self.ram, &mut self.events)?;
            if eqe::event_type.get(&e) != u64::from(kind::PAGE_FAULT) {
                continue;
            }
            assert_eq!(eqe::event_sub_type.get(&e), 2, "names memory");
            assert_eq!(eqe::page_fault_flags.get(&e), 0x80, "wants an answer");
            let high = eqe::page_fault_token_47_32.get(&e);
            return Some(PageFault {
                token: (high << 32) | eqe::page_fault_token_31_0.get(&e),
                key: eqe::page_fault_mkey.get32(&e),
                address: eqe::page_fault_va.get(&e),
                pages: eqe::page_fault_demand_pages.get(&e),
                after: eqe::page_fault_post_demand_pages.get(&e),
            });
        }
    }

    /// Answers a page fault; gives the status.
    pub fn resume(&mut self, token: u64, error: bool) -> u8 {
        let mut resume = input(opcode::PAGE_FAULT_RESUME, 16);
        page_fault_resume_in::error.set(&mut resume, u64::from(error));
        page_fault_resume_in::fault_token_47_32.set(&mut resume, token >> 32);
        page_fault_resume_in::fault_token_31_0.set(&mut resume, token & 0xffff_ffff);
        status(&self.command(resume, 8))
    }
}

/// Whose work requests change keys: a UMR queue pair, connected to itself.
pub struct Pager {
    qp: Qp,
    cq: Cq,
    pd: u32,
}

impl Pager {
    pub fn new(guest: &mut Guest, pd: u32, lid: u16) -> Self {
        let cq = Cq::new(guest, 4);
        let (uar, shape) = (guest.uar, Shape::of(Service::RegUmr));
        let qp = Qp::shaped(guest, pd, uar, &cq, &cq, shape).unwrap();
        qp.connect(guest, Settings::to(lid, qp.qpn));
        Self { qp, cq, pd }
    }

    /// A key with all rights and room for `entries` 16-byte entries (mode 3), or twice as many pages (mode 1), none of
    /// which is there; `log_size` is that of a page or entry.
    pub fn key(&mut self, guest: &mut Guest, mode: u64, at: u64, len: u64, log_size: u64) -> u32 {
        let entries = len.div_ceil(1 << log_size);
        let octowords = if mode == 1 {
            entries.div_ceil(2)
        } else {
            entries
        };
        let mut create = input(opcode::CREATE_MKEY, 0x110);
        let context = command::create_mkey_in::mkc.bytes_mut(&mut create);
        mkc::free.set(context, 1);
        mkc::umr_en.set(context, 1);
        mkc::access_mode_1_0.set(context, mode);
        mkc::qpn.set(context, 0xff_ffff);
        mkc::pd.set(context, u64::from(self.pd));
        mkc::translations_octword_size.set(context, octowords.next_multiple_of(4));
        let out = guest.ok(create, 16);
        let key = reply::object.get32(&out) << 8;
        let mut context = [0u8; mkc::SIZE];
        for right in [mkc::lr, mkc::lw, mkc::rr, mkc::rw, mkc::a] {
            right.set(&mut context, 1);
        }
        mkc::start_addr.set(&mut context, at);
        mkc::len.set(&mut context, len);
        mkc::log_page_size.set(&mut context, log_size);
        let mask = mkey_mask::LEN
            | mkey_mask::START_ADDR
            | mkey_mask::PAGE_SIZE
            | mkey_mask::LR
            | mkey_mask::LW
            | mkey_mask::RR
            | mkey_mask::RW
            | mkey_mask::A
            | mkey_mask::FREE;
        self.update(guest, key, mask, &context, 0, &[]);
        key
    }

    /// Writes page entries from a page on, a multiple of eight; those behind them up to the next multiple go.
    pub fn pages(&mut self, guest: &Guest, key: u32, first: u64, entries: &[u64]) {
        let bytes: Vec<u8> = entries.iter().flat_map(|e| e.to_be_bytes()).collect();
        self.update(guest, key, 0, &[0; mkc::SIZE], first / 2, &bytes);
    }

    /// Writes entries of a key of keys, from one on, a multiple of four: key and address under it.
    pub fn keys(&mut self, guest: &Guest, key: u32, first: u64, entries: &[(u32, u64)]) {
        let entry = |(key, address): &(u32, u64)| {
            [&[0; 4][..], &key.to_be_bytes(), &address.to_be_bytes()].concat()
        };
        let bytes: Vec<u8> = entries.iter().flat_map(entry).collect();
        self.update(guest, key, 0, &[0; mkc::SIZE], first, &bytes);
    }

    fn update(
        &mut self,
        guest: &Guest,
        key: u32,
        mask: u64,
        context: &[u8; mkc::SIZE],
        offset: u64,
        list: &[u8],
    ) {
        let mut list = list.to_vec();
        list.resize(list.len().next_multiple_of(64), 0);
        let mut control = [0u8; umr_ctrl::SIZE];
        umr_ctrl::is_inline.set(&mut control, 1);
        umr_ctrl::translation_offset_en.set(&mut control, 1);
        umr_ctrl::xlt_octowords.set(&mut control, list.len() as u64 / 16);
        umr_ctrl::xlt_offset.set(&mut control, offset);
        umr_ctrl::mkey_mask.set(&mut control, mask);
        let bytes = [&control[..], context, &list].concat();
        let segments: Vec<[u8; 16]> = bytes.chunks(16).map(|c| c.try_into().unwrap()).collect();
        self.qp.post(guest, send::UMR, key, &segments);
        let cqe = self.cq.wait(guest);
        assert_eq!(cqe.opcode, cqe_opcode::REQ, "UMR: {cqe:?}");
    }
}
