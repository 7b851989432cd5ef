// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a structure can break by itself. What depends on other objects only the running model can tell: see its refusals.

use super::names;
use crate::cmd::caps::Capabilities;
use crate::ifc::Field;
use crate::ifc::context::{cqc, eqc, mkc, qpc};
use crate::ifc::event::{eqe, kind};
use crate::ifc::wqe::{cqe, cqe_opcode};
use crate::objects::qp::{Service, State};

/// The rules that the bytes break, each as a sentence with field and value.
pub fn check(part: &str, bytes: &[u8]) -> Vec<String> {
    let mut c = Checker {
        bytes,
        problems: Vec::new(),
    };
    match part {
        "cqe" => c.cqe(),
        "eqe" => c.eqe(),
        "qpc" => c.qpc(),
        "cqc" => c.cqc(),
        "eqc" => c.eqc(),
        "mkc" => c.mkc(),
        _ => {}
    }
    c.problems
}

struct Checker<'a> {
    bytes: &'a [u8],
    problems: Vec<String>,
}

impl Checker<'_> {
    fn get(&self, field: Field) -> u64 {
        field.get(self.bytes)
    }

    fn require(&mut self, holds: bool, name: &str, field: Field, rule: &str) {
        if !holds {
            self.problems
                .push(format!("{name} = {:#x}: {rule}", self.get(field)));
        }
    }

    fn at_most(&mut self, name: &str, field: Field, limit: u32, capability: &str) {
        let holds = self.get(field) <= u64::from(limit);
        self.require(
            holds,
            name,
            field,
            &format!("at most {limit} ({capability})"),
        );
    }

    fn cqe(&mut self) {
        let opcode = self.get(cqe::opcode);
        let known = names::cqe_opcode(opcode);
        self.require(known.is_some(), "opcode", cqe::opcode, "an opcode of a CQE");
        let is = |which: u8| opcode == u64::from(which);
        self.require(
            !is(cqe_opcode::INVALID),
            "opcode",
            cqe::opcode,
            "an entry that the device has written (this is how software leaves an unused one)",
        );
        if is(cqe_opcode::REQ_ERR) || is(cqe_opcode::RESP_ERR) {
            let named = names::syndrome(self.get(cqe::syndrome)).is_some();
            self.require(
                named,
                "syndrome",
                cqe::syndrome,
                "a syndrome of an error CQE",
            );
        }
        if is(cqe_opcode::REQ) || is(cqe_opcode::REQ_ERR) {
            let named = names::send_opcode(self.get(cqe::send_opcode)).is_some();
            self.require(
                named,
                "send_opcode",
                cqe::send_opcode,
                "the opcode of a send WQE",
            );
        }
    }

    fn eqe(&mut self) {
        let event = self.get(eqe::event_type);
        let known = names::event_type(event).is_some();
        self.require(
            known,
            "event_type",
            eqe::event_type,
            "an event that the model raises",
        );
        if event == u64::from(kind::PORT_CHANGE) {
            let sub_type = self.get(eqe::event_sub_type);
            let known = names::event_detail(event, sub_type).is_some();
            self.require(
                known,
                "event_sub_type",
                eqe::event_sub_type,
                "1 (down) or 4 (active)",
            );
        }
        if event == u64::from(kind::CQ_ERROR) {
            let syndrome = self.get(eqe::cq_err_syndrome);
            let known = names::event_detail(event, syndrome).is_some();
            self.require(
                known,
                "cq_err_syndrome",
                eqe::cq_err_syndrome,
                "1 (overrun) or 2 (access violation)",
            );
        }
    }

    fn qpc(&mut self) {
        let state = self.get(qpc::state);
        self.require(
            names::qp_state(state).is_some(),
            "state",
            qpc::state,
            "a state of a QP",
        );
        let service = Service::from_number(self.get(qpc::st));
        self.require(
            service.is_some(),
            "st",
            qpc::st,
            "a service that the model has",
        );
        self.at_most(
            "log_sq_size",
            qpc::log_sq_size,
            Capabilities::LOG_MAX_QP_SIZE,
            "log_max_qp_sz",
        );
        self.at_most(
            "log_rq_size",
            qpc::log_rq_size,
            Capabilities::LOG_MAX_QP_SIZE,
            "log_max_qp_sz",
        );
        self.at_most(
            "log_msg_max",
            qpc::log_msg_max,
            Capabilities::LOG_MAX_MSG,
            "log_max_msg",
        );
        self.at_most(
            "log_rra_max",
            qpc::log_rra_max,
            Capabilities::LOG_MAX_READS,
            "log_max_ra_res_qp",
        );
        self.at_most(
            "log_sra_max",
            qpc::log_sra_max,
            Capabilities::LOG_MAX_READS,
            "log_max_ra_req_qp",
        );
        let receiving =
            (State::ReadyToReceive as u64..=State::SendQueueDrained as u64).contains(&state);
        if receiving && service.is_some_and(Service::is_reliable) {
            let mtu = self.get(qpc::mtu);
            self.require(
                (1..=5).contains(&mtu),
                "mtu",
                qpc::mtu,
                "1 (256 bytes) to 5 (4096 bytes)",
            );
        }
        if self.get(qpc::dbr_umem_valid) == 0 {
            let aligned = self.get(qpc::dbr_addr) % 8 == 0;
            self.require(
                aligned,
                "dbr_addr",
                qpc::dbr_addr,
                "a doorbell record is two aligned words",
            );
        }
    }

    fn cqc(&mut self) {
        self.at_most(
            "log_cq_size",
            cqc::log_cq_size,
            Capabilities::LOG_MAX_CQ_SIZE,
            "log_max_cq_sz",
        );
        self.at_most("cqe_sz", cqc::cqe_sz, 2, "64, 128 or padded 128 bytes");
        if self.get(cqc::dbr_umem_valid) == 0 {
            let aligned = self.get(cqc::dbr_addr) % 8 == 0;
            self.require(
                aligned,
                "dbr_addr",
                cqc::dbr_addr,
                "a doorbell record is two aligned words",
            );
        }
    }

    fn eqc(&mut self) {
        self.at_most(
            "log_eq_size",
            eqc::log_eq_size,
            Capabilities::LOG_MAX_EQ_SIZE,
            "log_max_eq_sz",
        );
        let vectors = u64::from(crate::hca_config::MSIX_VECTORS);
        let intr = self.get(eqc::intr);
        self.require(
            intr < vectors,
            "intr",
            eqc::intr,
            "one of the function's MSI-X vectors",
        );
    }

    fn mkc(&mut self) {
        let mode = self.get(mkc::access_mode_4_2);
        self.require(
            mode == 0,
            "access_mode_4_2",
            mkc::access_mode_4_2,
            "0: PA, MTT, KLM or KSM",
        );
        let end = u128::from(self.get(mkc::start_addr)) + u128::from(self.get(mkc::len));
        let fits = self.get(mkc::length64) != 0 || end <= 1 << 64;
        self.require(
            fits,
            "len",
            mkc::len,
            "start_addr + len lies within 64 bits",
        );
        let free = self.get(mkc::free) != 0;
        self.require(
            !free,
            "free",
            mkc::free,
            "0: accesses to a key that is free are refused",
        );
        let writes = self.get(mkc::rw) == 0 && self.get(mkc::a) == 0;
        let local = self.get(mkc::lw) != 0;
        self.require(
            writes || local,
            "lw",
            mkc::lw,
            "remote write or atomic access needs local write (IBA 10.6.3.1)",
        );
    }
}
