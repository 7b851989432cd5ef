// SPDX-License-Identifier: MIT OR Apache-2.0
//! A guest's own books: which objects it has made, and which memory each of them names to the device. Written from the
//! layouts of the commands, so that it says what the device may do and not what it does.

use connectx::ifc::command::{
    create_cq_in, create_eq_in, create_eq_out, create_mkey_in, create_psv_in, create_psv_out,
    create_qp_in, create_rmp_in, create_sq_in, create_uctx_out, create_umem_in, create_xrc_srq_in,
    destroy_uctx_in, general_obj_in_cmd_hdr, general_obj_out_cmd_hdr, header, modify_cq_in, reply,
    set_pp_rate_limit_in,
};
use connectx::ifc::context::{
    cqc, eqc, mkc, qpc, rmpc, set_pp_rate_limit_context, sqc, umem, wq, xrc_srqc,
};
use connectx::ifc::{Field, be64_list, opcode};

use crate::ram::Ram;
use crate::watch::Owner;

/// Commands that make an object and that end it.
const LIVES: &[(u16, u16)] = &[
    (opcode::CREATE_UCTX, opcode::DESTROY_UCTX),
    (opcode::ALLOC_UAR, opcode::DEALLOC_UAR),
    (opcode::ALLOC_PD, opcode::DEALLOC_PD),
    (opcode::ALLOC_XRCD, opcode::DEALLOC_XRCD),
    (opcode::CREATE_UMEM, opcode::DESTROY_UMEM),
    (opcode::CREATE_PSV, opcode::DESTROY_PSV),
    (opcode::CREATE_MKEY, opcode::DESTROY_MKEY),
    (opcode::CREATE_EQ, opcode::DESTROY_EQ),
    (opcode::CREATE_CQ, opcode::DESTROY_CQ),
    (opcode::CREATE_XRC_SRQ, opcode::DESTROY_XRC_SRQ),
    (opcode::CREATE_RMP, opcode::DESTROY_RMP),
    (opcode::CREATE_SQ, opcode::DESTROY_SQ),
    (opcode::CREATE_QP, opcode::DESTROY_QP),
    (opcode::CREATE_DCT, opcode::DESTROY_DCT),
];

/// Where CREATE_PSV tells of what it makes.
const PSVS: [Field; 4] = [
    create_psv_out::psv0_index,
    create_psv_out::psv1_index,
    create_psv_out::psv2_index,
    create_psv_out::psv3_index,
];

/// The objects of a guest.
#[derive(Debug, Default)]
pub struct Ledger {
    /// Opcode that made it, and number.
    objects: Vec<(u16, u32)>,
    /// Of what has more than a number, the command that ends it: general objects and rates.
    others: Vec<Vec<u8>>,
}

impl Ledger {
    /// Takes note of a command and its output.
    pub fn note(&mut self, ram: &Ram, input: &[u8], output: &[u8]) {
        if output.len() < 8 || output[0] != 0 {
            return;
        }
        let op = header::opcode.get(input) as u16;
        match op {
            opcode::ENABLE_HCA | opcode::DISABLE_HCA | opcode::TEARDOWN_HCA => self.clear(ram),
            opcode::MODIFY_CQ if header::op_mod.get(input) == 1 => {
                let owner = Owner::Object(opcode::CREATE_CQ, header::object.get32(input));
                if !modify_cq_in::cq_umem_valid.is_set(input) {
                    let context = modify_cq_in::cqc.bytes(input);
                    let log = cqc::log_page_size.get32(context) + 12;
                    name_pages(ram, owner, modify_cq_in::pas.tail(input), log);
                }
            }
            opcode::CREATE_GENERAL_OBJECT => {
                let id = general_obj_out_cmd_hdr::obj_id.get(output);
                self.others.push(end_general(input, id));
            }
            opcode::DESTROY_GENERAL_OBJECT => {
                let end = end_general(input, general_obj_in_cmd_hdr::obj_id.get(input));
                self.others.retain(|other| *other != end);
            }
            opcode::SET_PP_RATE_LIMIT => {
                let end = end_rate(input);
                self.others.retain(|other| *other != end);
                let context = set_pp_rate_limit_in::ctx.bytes(input);
                if set_pp_rate_limit_context::rate_limit.is_set(context) {
                    self.others.push(end);
                }
            }
            _ => {}
        }
        if let Some(&(made, _)) = LIVES.iter().find(|(_, ends)| *ends == op) {
            self.remove(ram, made, destroyed(op, input));
        }
        if LIVES.iter().any(|(makes, _)| *makes == op) {
            if op == opcode::CREATE_PSV {
                let made = create_psv_in::num_psv.get(input) as usize;
                let numbers = PSVS.iter().map(|field| (op, field.get32(output)));
                self.objects.extend(numbers.take(made));
                return;
            }
            let number = created(op, output);
            self.objects.push((op, number));
            name_memory(ram, Owner::Object(op, number), op, input);
        }
    }

    fn remove(&mut self, ram: &Ram, made: u16, number: u32) {
        self.objects.retain(|object| *object != (made, number));
        ram.watch(|watch| watch.forget(|owner| owner == Owner::Object(made, number)));
    }

    /// Everything is gone, as after a reset.
    pub fn clear(&mut self, ram: &Ram) {
        self.objects.clear();
        self.others.clear();
        ram.watch(|watch| watch.forget(|owner| matches!(owner, Owner::Object(..))));
    }

    /// Commands that end each object, latest first.
    pub fn endings(&self) -> Vec<Vec<u8>> {
        let command = |op: u16, number: u32| {
            let mut input = crate::input(op, 16);
            if op == opcode::DESTROY_UCTX {
                destroy_uctx_in::uid.set(&mut input, u64::from(number));
            } else {
                header::object.set(&mut input, u64::from(number));
            }
            input
        };
        let ending = |&(made, number): &(u16, u32)| {
            let drain = (made == opcode::CREATE_DCT).then(|| command(opcode::DRAIN_DCT, number));
            let end = LIVES.iter().find(|(makes, _)| *makes == made);
            let end = end.map(|(_, op)| command(*op, number));
            drain.into_iter().chain(end)
        };
        let others = self.others.iter().rev().cloned();
        others
            .chain(self.objects.iter().rev().flat_map(ending))
            .collect()
    }
}

/// Ends the general object of the type that `input` names.
fn end_general(input: &[u8], id: u64) -> Vec<u8> {
    let mut end = crate::input(opcode::DESTROY_GENERAL_OBJECT, 16);
    let kind = general_obj_in_cmd_hdr::obj_type.get(input);
    general_obj_in_cmd_hdr::obj_type.set(&mut end, kind);
    general_obj_in_cmd_hdr::obj_id.set(&mut end, id);
    end
}

/// Takes away the rate that `input` sets.
fn end_rate(input: &[u8]) -> Vec<u8> {
    let mut end = crate::input(opcode::SET_PP_RATE_LIMIT, set_pp_rate_limit_in::SIZE);
    let index = set_pp_rate_limit_in::rate_limit_index.get(input);
    set_pp_rate_limit_in::rate_limit_index.set(&mut end, index);
    end
}

fn created(op: u16, output: &[u8]) -> u32 {
    match op {
        opcode::CREATE_EQ => create_eq_out::eq_number.get32(output),
        opcode::CREATE_UCTX => create_uctx_out::uid.get32(output),
        _ => reply::object.get32(output),
    }
}

fn destroyed(op: u16, input: &[u8]) -> u32 {
    match op {
        opcode::DESTROY_EQ => connectx::ifc::command::destroy_eq_in::eq_number.get32(input),
        opcode::DESTROY_UCTX => destroy_uctx_in::uid.get32(input),
        _ => header::object.get32(input),
    }
}

/// Permits the pages of a list.
fn name_pages(ram: &Ram, owner: Owner, list: &[u8], log_page_size: u32) {
    let size = 1u64 << log_page_size.min(63);
    ram.watch(|watch| {
        for page in be64_list(list) {
            watch.name(owner, page & !(size - 1), size);
        }
    });
}

fn name_memory(ram: &Ram, owner: Owner, op: u16, input: &[u8]) {
    let pages = |list: &[u8], log| name_pages(ram, owner, list, log);
    let record = |address| ram.watch(|watch| watch.name(owner, address, 8));
    match op {
        opcode::CREATE_UMEM => {
            let context = create_umem_in::umem.tail(input);
            let log = umem::log_page_size.get32(context) + 12;
            pages(umem::mtt.tail(context), log);
        }
        opcode::CREATE_MKEY => {
            let context = create_mkey_in::mkc.bytes(input);
            let mode = (mkc::access_mode_4_2.get(context) << 2) | mkc::access_mode_1_0.get(context);
            let listed = mode == 1
                && !mkc::free.is_set(context)
                && !create_mkey_in::mkey_umem_valid.is_set(input);
            if mode == 0 {
                ram.watch(|watch| watch.name_all(owner));
            } else if listed {
                let log = mkc::log_page_size.get32(context);
                let list = create_mkey_in::pas.tail(input);
                // With it, a page that may neither be read nor written is none.
                let rights = create_mkey_in::pg_access.is_set(input);
                let there = be64_list(list).filter(|entry| !rights || entry & 3 != 0);
                pages(&there.flat_map(u64::to_be_bytes).collect::<Vec<_>>(), log);
            }
        }
        opcode::CREATE_EQ => {
            let log = eqc::log_page_size.get32(create_eq_in::eqc.bytes(input)) + 12;
            pages(create_eq_in::pas.tail(input), log);
        }
        opcode::CREATE_CQ => {
            let context = create_cq_in::cqc.bytes(input);
            if !create_cq_in::cq_umem_valid.is_set(input) {
                let log = cqc::log_page_size.get32(context) + 12;
                pages(create_cq_in::pas.tail(input), log);
            }
            if !cqc::dbr_umem_valid.is_set(context) {
                record(cqc::dbr_addr.get(context));
            }
        }
        opcode::CREATE_QP => {
            let context = create_qp_in::qpc.bytes(input);
            if !create_qp_in::wq_umem_valid.is_set(input) {
                let log = qpc::log_page_size.get32(context) + 12;
                pages(create_qp_in::pas.tail(input), log);
            }
            if !qpc::dbr_umem_valid.is_set(context) {
                record(qpc::dbr_addr.get(context));
            }
            // The driver's own queue pairs may write page entries of keys.
            if qpc::st.get(context) == 0xc || qpc::fre.is_set(context) {
                ram.watch(|watch| watch.name_all(owner));
            }
        }
        opcode::CREATE_XRC_SRQ => {
            let context = create_xrc_srq_in::srqc.bytes(input);
            if !create_xrc_srq_in::xrc_srq_umem_valid.is_set(input) {
                let log = xrc_srqc::log_page_size.get32(context) + 12;
                pages(create_xrc_srq_in::pas.tail(input), log);
            }
            let low = xrc_srqc::db_record_addr_l.get(context) << 2;
            record((xrc_srqc::db_record_addr_h.get(context) << 32) | low);
        }
        opcode::CREATE_RMP | opcode::CREATE_SQ => {
            let pool = match op {
                opcode::CREATE_RMP => rmpc::wq.tail(create_rmp_in::rmpc.tail(input)),
                _ => sqc::wq.tail(create_sq_in::ctx.tail(input)),
            };
            if !wq::wq_umem_valid.is_set(pool) {
                let log = wq::log_wq_pg_sz.get32(pool) + 12;
                pages(pool.get(wq::SIZE..).unwrap_or_default(), log);
            }
            if !wq::dbr_umem_valid.is_set(pool) {
                record(wq::dbr_addr.get(pool));
            }
        }
        _ => {}
    }
}
