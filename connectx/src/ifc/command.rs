// SPDX-License-Identifier: MIT OR Apache-2.0
//! Commands and their answers. Offsets are those of `include/linux/mlx5/mlx5_ifc.h` (Linux 7.3).

use super::layout;

layout! {
    /// Head of every command: what the dispatcher reads.
    header(0x10) {
        opcode = 0x00[0; 16],
        uid = 0x02[0; 16],
        op_mod = 0x06[0; 16],
        /// First operand; most commands name their object here.
        object = 0x09[0; 24],
    }
    /// Head of every answer.
    reply(0x10) {
        status = 0x00[0; 8],
        syndrome = 0x04[0; 32],
        /// Number of the object that the command made.
        object = 0x09[0; 24],
    }
    /// QUERY_HCA_CAP (`query_hca_cap_in`).
    query_hca_cap_in(0x10) {
        op_mod = 0x06[0; 16],
        other_function = 0x08[0; 1],
        function_id = 0x0a[0; 16],
    }
    /// QUERY_HCA_CAP (`query_hca_cap_out`).
    query_hca_cap_out(0x1010) {
        capability = 0x10[0; 32768],
    }
    /// SET_HCA_CAP (`set_hca_cap_in`).
    set_hca_cap_in(0x1010) {
        op_mod = 0x06[0; 16],
        capability = 0x10[0; 32768],
    }
    /// QUERY_ADAPTER (`query_adapter_out`).
    query_adapter_out(0x110) {
        ieee_vendor_id = 0x29[0; 24],
        vsd_vendor_id = 0x2e[0; 16],
        vsd_contd_psid = 0x100[0; 128],
    }
    /// QUERY_PAGES (`query_pages_in`).
    query_pages_in(0x10) {
        op_mod = 0x06[0; 16],
        function_id = 0x0a[0; 16],
    }
    /// QUERY_PAGES (`query_pages_out`).
    query_pages_out(0x10) {
        function_id = 0x0a[0; 16],
        num_pages = 0x0c[0; 32],
    }
    /// MANAGE_PAGES (`manage_pages_in`).
    manage_pages_in(0x10) {
        op_mod = 0x06[0; 16],
        function_id = 0x0a[0; 16],
        input_num_entries = 0x0c[0; 32],
        pas = 0x10[0; 64],
    }
    /// MANAGE_PAGES (`manage_pages_out`).
    manage_pages_out(0x10) {
        output_num_entries = 0x08[0; 32],
        pas = 0x10[0; 64],
    }
    /// QUERY_ISSI (`query_issi_out`).
    query_issi_out(0x70) {
        current_issi = 0x0a[0; 16],
        supported_issi_dw0 = 0x6c[0; 32],
    }
    /// SET_ISSI (`set_issi_in`).
    set_issi_in(0x10) {
        current_issi = 0x0a[0; 16],
    }
    /// QUERY_SPECIAL_CONTEXTS (`query_special_contexts_out`).
    query_special_contexts_out(0x20) {
        dump_fill_mkey = 0x08[0; 32],
        resd_lkey = 0x0c[0; 32],
        null_mkey = 0x10[0; 32],
    }
    /// PAGE_FAULT_RESUME of the memory scheme (`page_fault_resume_in`, `mem_page_fault_info`).
    page_fault_resume_in(0x10) {
        error = 0x08[0; 1],
        fault_token_47_32 = 0x0a[0; 16],
        fault_token_31_0 = 0x0c[0; 32],
    }
    /// ALLOC_UAR (`alloc_uar_out`).
    alloc_uar_out(0x10) {
        uar = 0x09[0; 24],
    }
    /// CREATE_EQ (`create_eq_in`).
    create_eq_in(0x110) {
        eqc = 0x10[0; 512],
        event_bitmask = 0x58[0; 256],
        pas = 0x110[0; 64],
    }
    /// CREATE_EQ (`create_eq_out`).
    create_eq_out(0x10) {
        eq_number = 0x0b[0; 8],
    }
    /// DESTROY_EQ (`destroy_eq_in`).
    destroy_eq_in(0x10) {
        eq_number = 0x0b[0; 8],
    }
    /// QUERY_EQ (`query_eq_out`).
    query_eq_out(0x110) {
        eqc = 0x10[0; 512],
        event_bitmask = 0x58[0; 64],
        pas = 0x110[0; 64],
    }
    /// CREATE_CQ; with `cq_umem_valid` the pages come from a UMEM (`create_cq_in`).
    create_cq_in(0x110) {
        cqc = 0x10[0; 512],
        cq_umem_valid = 0x5c[0; 1],
        pas = 0x110[0; 64],
        // The kernel header has no names for these; DPDK mlx5_prm.h has.
        cq_umem_offset = 0x50[0; 64],
        cq_umem_id = 0x58[0; 32],
    }
    /// QUERY_CQ (`query_cq_out`).
    query_cq_out(0x110) {
        cqc = 0x10[0; 512],
        pas = 0x110[0; 64],
    }
    /// MODIFY_CQ (`modify_cq_in`).
    modify_cq_in(0x110) {
        op_mod = 0x06[0; 16],
        cqn = 0x09[0; 24],
        field_select = 0x0c[0; 32],
        cqc = 0x10[0; 512],
        cq_umem_valid = 0x5c[0; 1],
        pas = 0x110[0; 64],
    }
    /// CREATE_QP (`create_qp_in`).
    create_qp_in(0x110) {
        input_qpn = 0x09[0; 24],
        opt_param_mask = 0x10[0; 32],
        qpc = 0x18[0; 1856],
        wq_umem_offset = 0x100[0; 64],
        wq_umem_id = 0x108[0; 32],
        wq_umem_valid = 0x10c[0; 1],
        pas = 0x110[0; 64],
    }
    /// CREATE_QP (`create_qp_out`).
    create_qp_out(0x10) {
        qpn = 0x09[0; 24],
        ece = 0x0c[0; 32],
    }
    /// Every transition of a queue pair (`rst2init_qp_in`).
    modify_qp_in(0x110) {
        // The kernel header has no names for the extension; rdma-core's mlx5_ifc.h has.
        qpc_ext = 0x08[0; 1],
        qpn = 0x09[0; 24],
        opt_param_mask = 0x10[0; 32],
        ece = 0x14[0; 32],
        qpc = 0x18[0; 1856],
        opt_param_mask_95_32 = 0x108[0; 64],
        qpc_data_ext = 0x110[0; 1536],
    }
    /// QUERY_QP (`query_qp_out`).
    query_qp_out(0x1d0) {
        opt_param_mask = 0x10[0; 32],
        qpc = 0x18[0; 1856],
    }
    /// CREATE_MKEY (`create_mkey_in`).
    create_mkey_in(0x110) {
        pg_access = 0x0c[0; 1],
        mkey_umem_valid = 0x0c[1; 1],
        mkc = 0x10[0; 512],
        translations_octword_actual_size = 0x60[0; 32],
        pas = 0x110[0; 32],
        // The kernel header has no names for these; DPDK mlx5_prm.h has.
        mkey_umem_id = 0x64[0; 32],
        mkey_umem_offset = 0x68[0; 64],
    }
    /// SET_PP_RATE_LIMIT (`set_pp_rate_limit_in`).
    set_pp_rate_limit_in(0x40) {
        rate_limit_index = 0x0a[0; 16],
        ctx = 0x10[0; 384],
    }
    /// Head of the commands for general objects (`general_obj_in_cmd_hdr` of rdma-core's mlx5_ifc.h).
    general_obj_in_cmd_hdr(0x10) {
        obj_type = 0x06[0; 16],
        obj_id = 0x08[0; 32],
        log_obj_range = 0x0c[3; 5],
    }
    /// Head of their answers (`general_obj_out_cmd_hdr`).
    general_obj_out_cmd_hdr(0x10) {
        obj_id = 0x08[0; 32],
    }
    /// CREATE_GENERAL_OBJECT of a scheduling element (rdma-core `create_sched_elem_in`).
    create_sched_elem_in(0x90) {
        sched_elem = 0x10[0; 1024],
    }
    /// CREATE_GENERAL_OBJECT of a mapping (rdma-core `create_av_qp_mapping_in`).
    create_av_qp_mapping_in(0x50) {
        mapping = 0x10[0; 512],
    }
    /// CREATE_DCT (`create_dct_in`).
    create_dct_in(0x80) {
        dct_context_entry = 0x10[0; 512],
    }
    /// QUERY_DCT (`query_dct_out`).
    query_dct_out(0x80) {
        dct_context_entry = 0x10[0; 512],
    }
    /// QUERY_MKEY (`query_mkey_in`).
    query_mkey_in(0x10) {
        mkey_index = 0x09[0; 24],
        pg_access = 0x0c[0; 1],
    }
    /// QUERY_MKEY (`query_mkey_out`).
    query_mkey_out(0x130) {
        mkc = 0x10[0; 512],
    }
    /// CREATE_PSV (`create_psv_in`).
    create_psv_in(0x10) {
        num_psv = 0x08[0; 4],
        pd = 0x09[0; 24],
    }
    /// CREATE_PSV (`create_psv_out`).
    create_psv_out(0x20) {
        psv0_index = 0x11[0; 24],
        psv1_index = 0x15[0; 24],
        psv2_index = 0x19[0; 24],
        psv3_index = 0x1d[0; 24],
    }
    /// CREATE_UMEM (`create_umem_in`).
    create_umem_in(0x30) {
        umem = 0x10[0; 256],
    }
    /// CREATE_UCTX (`create_uctx_in`).
    create_uctx_in(0x40) {
        uctx = 0x10[0; 384],
        cap = 0x10[0; 32],
    }
    /// CREATE_UCTX (`create_uctx_out`).
    create_uctx_out(0x10) {
        uid = 0x0a[0; 16],
    }
    /// DESTROY_UCTX (`destroy_uctx_in`).
    destroy_uctx_in(0x10) {
        uid = 0x0a[0; 16],
    }
    /// CREATE_XRC_SRQ (`create_xrc_srq_in`).
    create_xrc_srq_in(0x110) {
        srqc = 0x10[0; 512],
        xrc_srq_umem_valid = 0x5c[0; 1],
        pas = 0x110[0; 64],
        // The kernel header has no names for these; UCX ib_mlx5_ifc.h has.
        xrc_srq_umem_offset = 0x50[0; 64],
        xrc_srq_umem_id = 0x58[0; 32],
    }
    /// QUERY_XRC_SRQ (`query_xrc_srq_out`).
    query_xrc_srq_out(0x110) {
        srqc = 0x10[0; 512],
    }
    /// CREATE_RMP (`create_rmp_in`).
    create_rmp_in(0x110) {
        rmpc = 0x20[0; 1920],
    }
    /// MODIFY_RMP (`modify_rmp_in`).
    modify_rmp_in(0x110) {
        rmp_state = 0x08[0; 4],
        rmpn = 0x09[0; 24],
        bitmask = 0x10[0; 64],
        rmpc = 0x20[0; 1920],
    }
    /// QUERY_RMP (`query_rmp_out`).
    query_rmp_out(0x110) {
        rmpc = 0x20[0; 1920],
    }
    /// CREATE_SQ (`create_sq_in`).
    create_sq_in(0x110) {
        ctx = 0x20[0; 1920],
    }
    /// MODIFY_SQ (`modify_sq_in`).
    modify_sq_in(0x110) {
        sq_state = 0x08[0; 4],
        sqn = 0x09[0; 24],
        modify_bitmask = 0x10[0; 64],
        ctx = 0x20[0; 1920],
    }
    /// QUERY_SQ (`query_sq_out`).
    query_sq_out(0x110) {
        sq_context = 0x20[0; 1920],
    }
    /// ARM_XRC_SRQ (`arm_xrc_srq_in`).
    arm_xrc_srq_in(0x10) {
        op_mod = 0x06[0; 16],
        xrc_srqn = 0x09[0; 24],
        lwm = 0x0e[0; 16],
    }
    /// ACCESS_REG (`access_register_in`).
    access_register_in(0x10) {
        op_mod = 0x06[0; 16],
        register_id = 0x0a[0; 16],
        argument = 0x0c[0; 32],
        register_data = 0x10[0; 32],
    }
    /// ACCESS_REG (`access_register_out`).
    access_register_out(0x10) {
        register_data = 0x10[0; 32],
    }
    /// MAD_IFC (`mad_ifc_in`).
    mad_ifc_in(0x110) {
        op_mod = 0x06[0; 16],
        remote_lid = 0x08[0; 16],
        port = 0x0b[0; 8],
        plane_index = 0x0a[0; 8],
        mad = 0x10[0; 2048],
    }
    /// MAD_IFC (`mad_ifc_out`).
    mad_ifc_out(0x110) {
        response_mad_packet = 0x10[0; 2048],
    }
    /// QUERY_HCA_VPORT_CONTEXT (`query_hca_vport_context_in`).
    query_hca_vport_context_in(0x10) {
        other_vport = 0x08[0; 1],
        port_num = 0x09[4; 4],
        vport_number = 0x0a[0; 16],
    }
    /// QUERY_HCA_VPORT_CONTEXT (`query_hca_vport_context_out`).
    query_hca_vport_context_out(0x210) {
        hca_vport_context = 0x10[0; 4096],
    }
    /// MODIFY_HCA_VPORT_CONTEXT (`modify_hca_vport_context_in`).
    modify_hca_vport_context_in(0x210) {
        other_vport = 0x08[0; 1],
        port_num = 0x09[4; 4],
        vport_number = 0x0a[0; 16],
        hca_vport_context = 0x10[0; 4096],
    }
    /// QUERY_HCA_VPORT_GID (`query_hca_vport_gid_in`).
    query_hca_vport_gid_in(0x10) {
        other_vport = 0x08[0; 1],
        port_num = 0x09[4; 4],
        vport_number = 0x0a[0; 16],
        gid_index = 0x0e[0; 16],
    }
    /// QUERY_HCA_VPORT_GID (`query_hca_vport_gid_out`).
    query_hca_vport_gid_out(0x10) {
        gids_num = 0x0c[0; 16],
        gid = 0x10[0; 128],
    }
    /// QUERY_HCA_VPORT_PKEY (`query_hca_vport_pkey_in`).
    query_hca_vport_pkey_in(0x10) {
        other_vport = 0x08[0; 1],
        port_num = 0x09[4; 4],
        vport_number = 0x0a[0; 16],
        pkey_index = 0x0e[0; 16],
    }
    /// QUERY_HCA_VPORT_PKEY (`query_hca_vport_pkey_out`).
    query_hca_vport_pkey_out(0x10) {
        pkey = 0x10[0; 32],
    }
    /// ALLOC_MEMIC (`alloc_memic_in`).
    alloc_memic_in(0x20) {
        log_memic_addr_alignment = 0x0f[0; 8],
        range_start_addr = 0x10[0; 64],
        range_size = 0x18[0; 32],
        memic_size = 0x1c[0; 32],
    }
    /// ALLOC_MEMIC (`alloc_memic_out`).
    alloc_memic_out(0x10) {
        memic_start_addr = 0x08[0; 64],
    }
    /// DEALLOC_MEMIC (`dealloc_memic_in`).
    dealloc_memic_in(0x20) {
        memic_start_addr = 0x10[0; 64],
        memic_size = 0x18[0; 32],
    }
    /// MODIFY_MEMIC (`modify_memic_in`).
    modify_memic_in(0x40) {
        memic_operation_type = 0x0f[0; 8],
        memic_start_addr = 0x10[0; 64],
    }
    /// MODIFY_MEMIC (`modify_memic_out`).
    modify_memic_out(0x40) {
        memic_operation_addr = 0x10[0; 64],
    }
    /// ATTACH_TO_MCG and DETACH_FROM_MCG (`attach_to_mcg_in`).
    attach_to_mcg_in(0x20) {
        qpn = 0x09[0; 24],
        multicast_gid = 0x10[0; 128],
    }
}
