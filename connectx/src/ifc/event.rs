// SPDX-License-Identifier: MIT OR Apache-2.0
//! Event queue entries. Layouts and numbers from `include/linux/mlx5/device.h` (Linux 7.3).

use super::layout;

layout! {
    /// Event queue entry, with the fields of every event type that the model raises.
    eqe(0x40) {
        event_type = 0x01[0; 8],
        event_sub_type = 0x03[0; 8],
        /// Command completion: the slots that are done.
        cmd_vector = 0x20[0; 32],
        /// Completion: the CQ.
        comp_cqn = 0x38[0; 32],
        /// CQ error.
        cq_err_cqn = 0x20[0; 32],
        cq_err_syndrome = 0x2b[0; 8],
        /// Page request: the function and how many pages it wants (negative: gives back).
        page_req_func_id = 0x22[0; 16],
        page_req_num_pages = 0x24[0; 32],
        /// Page fault of the memory scheme (`mlx5_eqe_page_fault.memory`), in pages of 4 KiB.
        page_fault_flags = 0x20[0; 8],
        page_fault_post_demand_pages = 0x22[0; 16],
        page_fault_token_47_32 = 0x26[0; 16],
        page_fault_token_31_0 = 0x28[0; 32],
        page_fault_demand_pages = 0x2c[0; 20],
        page_fault_mkey = 0x30[0; 32],
        page_fault_va = 0x34[0; 64],
        /// Port change.
        port_num = 0x28[0; 4],
        /// Of a DCT.
        dctn = 0x38[0; 32],
        /// Affiliated asynchronous event of a QP or SRQ: kind of queue and its number.
        queue_type = 0x34[0; 8],
        queue_number = 0x38[0; 32],
        signature = 0x3e[0; 8],
        owner = 0x3f[7; 1],
    }
}

/// Event types.
#[allow(missing_docs)]
pub mod kind {
    pub const COMPLETION: u8 = 0x00;
    pub const COMM_EST: u8 = 0x02;
    pub const SQ_DRAINED: u8 = 0x03;
    pub const CQ_ERROR: u8 = 0x04;
    pub const WQ_CATAS_ERROR: u8 = 0x05;
    pub const PORT_CHANGE: u8 = 0x09;
    pub const COMMAND: u8 = 0x0a;
    pub const PAGE_REQUEST: u8 = 0x0b;
    pub const PAGE_FAULT: u8 = 0x0c;
    pub const WQ_INVAL_REQ_ERROR: u8 = 0x10;
    pub const WQ_ACCESS_ERROR: u8 = 0x11;
    pub const SRQ_CATAS_ERROR: u8 = 0x12;
    pub const SRQ_LAST_WQE: u8 = 0x13;
    pub const SRQ_RQ_LIMIT: u8 = 0x14;
    pub const DCT_DRAINED: u8 = 0x1c;
    pub const DCT_KEY_VIOLATION: u8 = 0x1d;
}

/// Sub-types of [`kind::PORT_CHANGE`].
#[allow(missing_docs)]
pub mod port_change {
    pub const DOWN: u8 = 1;
    pub const ACTIVE: u8 = 4;
}

/// Of [`kind::PAGE_FAULT`] (`drivers/infiniband/hw/mlx5/odp.c`).
pub mod page_fault {
    /// Sub-type that names a key and a range under it: `MLX5_PFAULT_SUBTYPE_MEMORY`.
    pub const MEMORY: u8 = 2;
    /// Flag that asks for PAGE_FAULT_RESUME: `MLX5_MEMORY_PAGE_FAULT_FLAGS_LAST`.
    pub const LAST: u8 = 1 << 7;
}

/// Syndromes of [`kind::CQ_ERROR`].
#[allow(missing_docs)]
pub mod cq_error {
    pub const OVERRUN: u8 = 0x01;
    pub const ACCESS_VIOLATION: u8 = 0x02;
}
