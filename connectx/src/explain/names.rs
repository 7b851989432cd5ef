// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of values: enumerations of `include/linux/mlx5/{device,qp}.h` and of the InfiniBand specification.

use crate::ifc::event::{cq_error, kind, port_change};
use crate::ifc::wqe::{completion, cqe_opcode, send, syndrome};

/// What a value means where the number alone does not say.
pub fn meaning(part: &str, field: &str, value: u64) -> Option<&'static str> {
    match (part, field) {
        ("ctrl", "opcode") | ("cqe", "send_opcode") => send_opcode(value),
        ("ctrl", "completion") => Some(match u8::try_from(value).ok()? {
            completion::ON_ERROR => "no completion unless it fails",
            completion::ON_FIRST_ERROR => "completion on the first error",
            completion::ALWAYS => "completion",
            completion::ALWAYS_WITH_EVENT => "completion with an event",
            _ => return None,
        }),
        ("ctrl", "fence_mode") => Some(match value {
            0 => "none",
            1 => "initiator small fence",
            2 => "fence",
            3 => "strong ordering",
            4 => "fence and strong ordering",
            _ => return None,
        }),
        ("cqe", "opcode") => cqe_opcode(value),
        ("cqe", "syndrome") => syndrome(value),
        ("eqe", "event_type") => event_type(value),
        ("qpc", "state") => qp_state(value),
        ("qpc", "st") => service(value),
        ("qpc", "mtu") => Some(match value {
            1 => "256 bytes",
            2 => "512 bytes",
            3 => "1024 bytes",
            4 => "2048 bytes",
            5 => "4096 bytes",
            _ => return None,
        }),
        ("qpc", "pm_state") => Some(match value {
            0 => "armed",
            1 => "rearm",
            3 => "migrated",
            _ => return None,
        }),
        ("qpc", "rq_type") => Some(match value {
            0 => "a receive queue of its own",
            1 => "a shared receive queue",
            3 => "no receive queue",
            _ => return None,
        }),
        ("mkc", "access_mode_1_0") => Some(match value {
            0 => "PA: no translation",
            1 => "MTT: pages",
            2 => "KLM: pieces of other keys",
            3 => "KSM: pieces of one size",
            _ => return None,
        }),
        ("cqc", "cqe_sz") => Some(match value {
            0 => "64 bytes",
            1 => "128 bytes",
            2 => "128 bytes, padded",
            _ => return None,
        }),
        ("cqc" | "eqc", "st") => Some(match value {
            0x6 => "solicited armed",
            0x9 => "armed",
            0xa => "fired",
            _ => return None,
        }),
        ("hca_vport_context", "port_physical_state") => Some(match value {
            1 => "sleep",
            2 => "polling",
            3 => "disabled",
            4 => "training",
            5 => "link up",
            6 => "link error recovery",
            _ => return None,
        }),
        ("hca_vport_context", "vport_state" | "port_state") => Some(match value {
            1 => "down",
            2 => "init",
            3 => "armed",
            4 => "active",
            _ => return None,
        }),
        _ => None,
    }
}

/// Name of a send opcode.
pub fn send_opcode(value: u64) -> Option<&'static str> {
    Some(match u8::try_from(value).ok()? {
        send::NOP => "NOP",
        send::SEND_INVAL => "SEND with invalidate",
        send::RDMA_WRITE => "RDMA WRITE",
        send::RDMA_WRITE_IMM => "RDMA WRITE with immediate",
        send::SEND => "SEND",
        send::SEND_IMM => "SEND with immediate",
        send::RDMA_READ => "RDMA READ",
        send::ATOMIC_CS => "compare and swap",
        send::ATOMIC_FA => "fetch and add",
        send::ATOMIC_MASKED_CS => "masked compare and swap",
        send::ATOMIC_MASKED_FA => "masked fetch and add",
        send::LOCAL_INVAL => "local invalidate",
        send::SET_PSV => "set PSV",
        send::DUMP => "dump",
        send::UMR => "user memory registration",
        _ => return None,
    })
}

/// Name of a CQE opcode.
pub fn cqe_opcode(value: u64) -> Option<&'static str> {
    Some(match u8::try_from(value).ok()? {
        cqe_opcode::REQ => "a request is done",
        cqe_opcode::RESP_WR_IMM => "an RDMA WRITE with immediate has arrived",
        cqe_opcode::RESP_SEND => "a SEND has arrived",
        cqe_opcode::RESP_SEND_IMM => "a SEND with immediate has arrived",
        cqe_opcode::RESP_SEND_INV => "a SEND with invalidate has arrived",
        cqe_opcode::RESIZE_CQ => "the last entry of the CQ before its resize",
        cqe_opcode::REQ_ERR => "a request has failed",
        cqe_opcode::RESP_ERR => "a receive has failed",
        cqe_opcode::INVALID => "never written by the device",
        _ => return None,
    })
}

/// Name of the syndrome of an error CQE.
pub fn syndrome(value: u64) -> Option<&'static str> {
    Some(match u8::try_from(value).ok()? {
        syndrome::LOCAL_LENGTH => "local length error",
        syndrome::LOCAL_QP_OP => "local QP operation error",
        syndrome::LOCAL_PROT => "local protection error",
        syndrome::WR_FLUSH => "flushed: the QP is in error",
        syndrome::MW_BIND => "memory window bind error",
        syndrome::BAD_RESP => "bad response",
        syndrome::LOCAL_ACCESS => "local access error",
        syndrome::REMOTE_INVAL_REQ => "remote invalid request error",
        syndrome::REMOTE_ACCESS => "remote access error",
        syndrome::REMOTE_OP => "remote operation error",
        syndrome::TRANSPORT_RETRY_EXC => "transport retry counter exceeded",
        syndrome::RNR_RETRY_EXC => "RNR retry counter exceeded",
        syndrome::REMOTE_ABORTED => "remote aborted error",
        _ => return None,
    })
}

/// Name of an event.
pub fn event_type(value: u64) -> Option<&'static str> {
    Some(match u8::try_from(value).ok()? {
        kind::COMPLETION => "completion",
        kind::COMM_EST => "communication established",
        kind::SQ_DRAINED => "send queue drained",
        kind::CQ_ERROR => "CQ error",
        kind::WQ_CATAS_ERROR => "work queue catastrophic error",
        kind::PORT_CHANGE => "port state change",
        kind::COMMAND => "command completion",
        kind::PAGE_FAULT => "page fault",
        kind::PAGE_REQUEST => "page request",
        kind::WQ_INVAL_REQ_ERROR => "invalid request error of a work queue",
        kind::WQ_ACCESS_ERROR => "access error of a work queue",
        kind::SRQ_CATAS_ERROR => "SRQ catastrophic error",
        kind::SRQ_LAST_WQE => "last WQE of an SRQ taken",
        kind::SRQ_RQ_LIMIT => "SRQ limit reached",
        _ => return None,
    })
}

/// Name of the sub-type of a port change, or of the syndrome of a CQ error.
pub fn event_detail(event: u64, value: u64) -> Option<&'static str> {
    Some(
        match (u8::try_from(event).ok()?, u8::try_from(value).ok()?) {
            (kind::PORT_CHANGE, port_change::DOWN) => "down",
            (kind::PORT_CHANGE, port_change::ACTIVE) => "active",
            (kind::CQ_ERROR, cq_error::OVERRUN) => "overrun",
            (kind::CQ_ERROR, cq_error::ACCESS_VIOLATION) => "access violation",
            _ => return None,
        },
    )
}

/// Name of a QP state (`MLX5_QP_STATE_*`).
pub fn qp_state(value: u64) -> Option<&'static str> {
    [
        "RESET",
        "INIT",
        "RTR",
        "RTS",
        "SQER",
        "SQD",
        "ERR",
        "SQ draining",
    ]
    .get(usize::try_from(value).ok()?)
    .copied()
}

/// Name of a transport service (`MLX5_QP_ST_*`).
pub fn service(value: u64) -> Option<&'static str> {
    Some(match value {
        0x0 => "RC",
        0x1 => "UC",
        0x2 => "UD",
        0x3 => "XRC",
        0x5 => "DC initiator",
        0x6 => "DC target",
        0x7 => "QP0",
        0x8 => "QP1",
        0x9 => "raw Ethernet",
        0xc => "UMR",
        _ => return None,
    })
}
