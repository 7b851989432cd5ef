// SPDX-License-Identifier: MIT OR Apache-2.0
//! Work queue entries, completion queue entries and doorbells. Layouts and numbers from `include/linux/mlx5/qp.h` and
//! `include/linux/mlx5/device.h` (Linux 7.3) and, where the kernel has no use for them, rdma-core's `mlx5dv.h` (56.1).

use super::layout;

/// Size of a send queue's basic block: WQEs start on one and are counted in it.
pub const BASIC_BLOCK: usize = 64;
/// Size of the unit in which a WQE gives its length (`ds`).
pub const SEGMENT: usize = 16;
/// Longest WQE: `ds` has 6 bits.
pub const MAX_WQE: usize = 63 * SEGMENT;

layout! {
    /// Control segment.
    ctrl(0x10) {
        opmod = 0x00[0; 8],
        wqe_index = 0x01[0; 16],
        opcode = 0x03[0; 8],
        qpn = 0x04[0; 24],
        ds = 0x07[2; 6],
        signature = 0x08[0; 8],
        fence_mode = 0x0b[0; 3],
        completion = 0x0b[4; 2],
        solicited = 0x0b[6; 1],
        dci_stream_channel_id = 0x09[0; 16],
        /// Immediate data, or the key to invalidate, or the key that a UMR works on.
        imm = 0x0c[0; 32],
    }
    /// Remote address segment.
    raddr(0x10) {
        address = 0x00[0; 64],
        rkey = 0x08[0; 32],
    }
    /// Atomic segment of an 8-byte operation. Of a masked fetch-add, `compare` is the field boundary.
    atomic(0x10) {
        swap_add = 0x00[0; 64],
        compare = 0x08[0; 64],
    }
    /// Atomic segment of an 8-byte compare-swap with masks (UCX `uct_ib_mlx5_atomic_masked_cswap64_seg`).
    masked_atomic(0x20) {
        swap_add = 0x00[0; 64],
        compare = 0x08[0; 64],
        swap_add_mask = 0x10[0; 64],
        compare_mask = 0x18[0; 64],
    }
    /// Atomic segment of a 4-byte operation (UCX `uct_ib_mlx5_atomic_masked_{cswap,fadd}32_seg`); of a fetch-add, `compare`
    /// is the field boundary and there are no masks.
    masked_atomic_32(0x10) {
        swap_add = 0x00[0; 32],
        compare = 0x04[0; 32],
        swap_add_mask = 0x08[0; 32],
        compare_mask = 0x0c[0; 32],
    }
    /// Data segment: a pointer, or with `is_inline` the head of inline data.
    data(0x10) {
        is_inline = 0x00[0; 1],
        byte_count = 0x00[1; 31],
        lkey = 0x04[0; 32],
        address = 0x08[0; 64],
    }
    /// Address vector of a datagram; the second 32 bytes are absent in the compact form.
    av(0x30) {
        qkey = 0x00[0; 32],
        /// Of a dynamic connection, in the place of `qkey`.
        dc_key = 0x00[0; 64],
        extended = 0x08[0; 1],
        dqpn = 0x09[0; 24],
        stat_rate = 0x0c[0; 4],
        sl = 0x0c[4; 4],
        use_own_lmc = 0x0d[0; 1],
        mlid = 0x0d[1; 7],
        rlid = 0x0e[0; 16],
        tclass = 0x1a[0; 8],
        hop_limit = 0x1b[0; 8],
        grh = 0x1c[1; 1],
        sgid_index = 0x1c[4; 8],
        flow_label = 0x1d[4; 20],
        rgid = 0x20[0; 128],
    }
    /// UMR control segment.
    umr_ctrl(0x30) {
        is_inline = 0x00[0; 1],
        /// Fail if the key is free: the kernel's `MLX5_UMR_CHECK_FREE`.
        fail_if_free = 0x00[1; 1],
        /// Fail if it is not: the kernel's `CHECK_NOT_FREE`, rdma-core's `CHECK_FREE`.
        fail_if_not_free = 0x00[2; 1],
        translation_offset_en = 0x00[3; 1],
        /// Fail unless the key is bound to this queue pair.
        check_qpn = 0x00[4; 1],
        xlt_octowords = 0x04[0; 16],
        xlt_offset = 0x06[0; 16],
        /// In the place of the offset, if there is none.
        bsf_octowords = 0x06[0; 16],
        mkey_mask = 0x08[0; 64],
        xlt_offset_47_16 = 0x10[0; 32],
    }
    /// Segment of a SET_PSV (`mlx5_seg_set_psv`).
    set_psv(0x10) {
        psv_index = 0x01[0; 24],
        syndrome = 0x04[0; 16],
        transient_signature = 0x08[0; 64],
    }
    /// Byte stream format: which signatures a key's data has in memory and on the wire (`mlx5_bsf`).
    bsf(0x40) {
        bsf_size = 0x00[0; 2],
        /// Both have the same block structure: `wire` is then what is copied from one to the other.
        sbs = 0x00[3; 1],
        check_byte_mask = 0x01[0; 8],
        wire = 0x02[0; 8],
        mem_bs_selector = 0x03[0; 8],
        raw_data_size = 0x04[0; 32],
        w_bfs = 0x08[0; 8],
        w_psv = 0x09[0; 24],
        m_bfs = 0x0c[0; 8],
        m_psv = 0x0d[0; 24],
        w_tfs_psv = 0x18[0; 32],
        m_tfs_psv = 0x1c[0; 32],
        w_inl = 0x20[0; 128],
        m_inl = 0x30[0; 128],
    }
    /// What a BSF says of T10-DIF (`mlx5_bsf_inl`).
    bsf_inl(0x10) {
        valid = 0x00[0; 1],
        sig_type = 0x08[0; 8],
        repeat_block = 0x09[0; 1],
        inc_reftag = 0x0d[1; 1],
        escape = 0x0d[6; 2],
        dif_app_bitmask_check = 0x0e[0; 16],
    }
    /// Completion queue entry that tells of a wrong signature (`mlx5_sig_err_cqe`; what it is of, of rdma-core's cq.c).
    sig_err_cqe(0x40) {
        expected_trans_sig = 0x10[0; 32],
        actual_trans_sig = 0x14[0; 32],
        expected_reftag = 0x18[0; 32],
        actual_reftag = 0x1c[0; 32],
        syndrome = 0x20[0; 16],
        sig_type = 0x22[0; 8],
        domain = 0x23[0; 8],
        mkey = 0x24[0; 32],
        err_offset = 0x28[0; 64],
        qpn = 0x39[0; 24],
    }
    /// Next segment of a shared receive queue's WQE.
    srq_next(0x10) {
        next_wqe_index = 0x02[0; 16],
    }
    /// Completion queue entry.
    cqe(0x40) {
        ml_path = 0x11[0; 8],
        slid = 0x16[0; 16],
        grh = 0x18[2; 2],
        sl = 0x18[4; 4],
        rqpn = 0x19[0; 24],
        srqn = 0x21[0; 24],
        user_index = 0x21[0; 24],
        imm = 0x24[0; 32],
        byte_cnt = 0x2c[0; 32],
        timestamp = 0x30[0; 64],
        /// Of an error: vendor's syndrome, syndrome.
        vendor_syndrome = 0x36[0; 8],
        syndrome = 0x37[0; 8],
        send_opcode = 0x38[0; 8],
        qpn = 0x39[0; 24],
        wqe_counter = 0x3c[0; 16],
        signature = 0x3e[0; 8],
        opcode = 0x3f[0; 4],
        format = 0x3f[4; 2],
        solicited = 0x3f[6; 1],
        owner = 0x3f[7; 1],
    }
    /// What a completion of a session has of its own (`mlx5_mini_cqe8`); a checksum has the hash's first half.
    mini_cqe(0x08) {
        checksum = 0x00[0; 16],
        stridx = 0x02[0; 16],
        byte_cnt = 0x04[0; 32],
    }
    /// Arm word and CQ number as written to a UAR page's CQ register.
    cq_doorbell(0x08) {
        sequence = 0x00[2; 2],
        solicited_only = 0x00[7; 1],
        consumer_index = 0x01[0; 24],
        cqn = 0x05[0; 24],
    }
    /// EQ register of a UAR page.
    eq_doorbell(0x04) {
        eqn = 0x00[0; 8],
        consumer_index = 0x01[0; 24],
    }
    /// Start of a control segment as written to a UAR page's send doorbell.
    sq_doorbell(0x08) {
        wqe_index = 0x01[0; 16],
        qpn = 0x04[0; 24],
        ds = 0x07[2; 6],
    }
}

/// Opcodes of send WQEs.
#[allow(missing_docs)]
pub mod send {
    pub const NOP: u8 = 0x00;
    pub const SEND_INVAL: u8 = 0x01;
    pub const RDMA_WRITE: u8 = 0x08;
    pub const RDMA_WRITE_IMM: u8 = 0x09;
    pub const SEND: u8 = 0x0a;
    pub const SEND_IMM: u8 = 0x0b;
    pub const RDMA_READ: u8 = 0x10;
    pub const ATOMIC_CS: u8 = 0x11;
    pub const ATOMIC_FA: u8 = 0x12;
    pub const ATOMIC_MASKED_CS: u8 = 0x14;
    pub const ATOMIC_MASKED_FA: u8 = 0x15;
    pub const LOCAL_INVAL: u8 = 0x1b;
    pub const SET_PSV: u8 = 0x20;
    pub const DUMP: u8 = 0x23;
    pub const UMR: u8 = 0x25;
    pub const MMO: u8 = 0x2f;
}

/// `ctrl.opmod` of a masked atomic: this bit, and log2 of the operand's bytes less 2 (UCX `UCT_IB_MLX5_OPMOD_EXT_ATOMIC`).
pub const EXTENDED_ATOMIC: u8 = 8;

/// `ctrl.opmod` of an MMO that copies (`MLX5_OPC_MOD_MMO_DMA` of rdma-core).
pub const MMO_DMA: u8 = 1;

/// Opcodes of CQEs.
#[allow(missing_docs)]
pub mod cqe_opcode {
    pub const REQ: u8 = 0x0;
    pub const RESP_WR_IMM: u8 = 0x1;
    pub const RESP_SEND: u8 = 0x2;
    pub const RESP_SEND_IMM: u8 = 0x3;
    pub const RESP_SEND_INV: u8 = 0x4;
    pub const RESIZE_CQ: u8 = 0x5;
    pub const SIG_ERR: u8 = 0xc;
    pub const REQ_ERR: u8 = 0xd;
    pub const RESP_ERR: u8 = 0xe;
    pub const INVALID: u8 = 0xf;
}

/// Syndromes of error CQEs.
#[allow(missing_docs)]
pub mod syndrome {
    pub const LOCAL_LENGTH: u8 = 0x01;
    pub const LOCAL_QP_OP: u8 = 0x02;
    pub const LOCAL_PROT: u8 = 0x04;
    pub const WR_FLUSH: u8 = 0x05;
    pub const MW_BIND: u8 = 0x06;
    pub const BAD_RESP: u8 = 0x10;
    pub const LOCAL_ACCESS: u8 = 0x11;
    pub const REMOTE_INVAL_REQ: u8 = 0x12;
    pub const REMOTE_ACCESS: u8 = 0x13;
    pub const REMOTE_OP: u8 = 0x14;
    pub const TRANSPORT_RETRY_EXC: u8 = 0x15;
    pub const RNR_RETRY_EXC: u8 = 0x16;
    pub const REMOTE_ABORTED: u8 = 0x22;
}

/// Completion modes of a WQE (`ctrl.completion`).
#[allow(missing_docs)]
pub mod completion {
    pub const ON_ERROR: u8 = 0;
    pub const ON_FIRST_ERROR: u8 = 1;
    pub const ALWAYS: u8 = 2;
    pub const ALWAYS_WITH_EVENT: u8 = 3;
}

/// Key that ends a scatter list (`MLX5_INVALID_LKEY`, and the value of `terminate_scatter_list_mkey` where that is absent).
pub const INVALID_LKEY: u32 = 0x100;

/// Fields of a memory key that a UMR changes, `MLX5_MKEY_MASK_*`.
#[allow(missing_docs)]
pub mod mkey_mask {
    pub const LEN: u64 = 1 << 0;
    pub const PAGE_SIZE: u64 = 1 << 1;
    pub const START_ADDR: u64 = 1 << 6;
    pub const PD: u64 = 1 << 7;
    pub const EN_RINVAL: u64 = 1 << 8;
    pub const SIG_ERR: u64 = 1 << 9;
    pub const BSF_ENABLE: u64 = 1 << 12;
    pub const KEY: u64 = 1 << 13;
    pub const QPN: u64 = 1 << 14;
    pub const LR: u64 = 1 << 17;
    pub const LW: u64 = 1 << 18;
    pub const RR: u64 = 1 << 19;
    pub const RW: u64 = 1 << 20;
    pub const A: u64 = 1 << 21;
    pub const FREE: u64 = 1 << 29;
    pub const PAGE_SIZE_5: u64 = 1 << 42;
}

/// Offsets within a UAR page.
pub mod uar {
    /// Size of a page.
    pub const PAGE: u64 = 4096;
    /// CQ arm, 8 bytes.
    pub const CQ: u64 = 0x20;
    /// EQ consumer index with arm, 4 bytes.
    pub const EQ_ARM: u64 = 0x40;
    /// EQ consumer index without arm, 4 bytes.
    pub const EQ: u64 = 0x48;
    /// Send doorbell of queues without a doorbell record, 8 bytes (`DB_BF_DBR_LESS_BUF_OFFSET` of rdma-core's tests).
    pub const SQ_DBR_LESS: u64 = 0x600;
    /// First of four send doorbell registers of `1 << log_bf_reg_size` bytes, each of two buffers that take turns.
    pub const SQ: u64 = 0x800;
    /// Bytes of a buffer; a doorbell is a write to the first 8.
    pub const SQ_STRIDE: u64 = 0x100;
    /// End of the send doorbell registers.
    pub const SQ_END: u64 = 0x1000;
}

/// Offsets within a doorbell record, which is two big-endian words.
pub mod dbr {
    /// Receive queue producer, low 16 bits.
    pub const RECEIVE: u64 = 0;
    /// Send queue producer, low 16 bits.
    pub const SEND: u64 = 4;
    /// CQ consumer index, low 24 bits.
    pub const CQ_CONSUMER: u64 = 0;
    /// CQ arm word.
    pub const CQ_ARM: u64 = 4;
}
