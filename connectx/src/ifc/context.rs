// SPDX-License-Identifier: MIT OR Apache-2.0
//! Contexts: what the device keeps about an object. Offsets are those of `include/linux/mlx5/mlx5_ifc.h` (Linux 7.3).

use super::layout;

layout! {
    /// Queue pair context (`qpc`).
    qpc(0xe8) {
        state = 0x00[0; 4],
        st = 0x01[0; 8],
        pm_state = 0x02[3; 2],
        end_padding_mode = 0x03[4; 2],
        wq_signature = 0x04[0; 1],
        block_lb_mc = 0x04[1; 1],
        drain_sigerr = 0x04[5; 1],
        dp_ordering_force = 0x04[7; 1],
        pd = 0x05[0; 24],
        mtu = 0x08[0; 3],
        log_msg_max = 0x08[3; 5],
        log_rq_size = 0x09[1; 4],
        log_rq_stride = 0x09[5; 3],
        no_sq = 0x0a[0; 1],
        log_sq_size = 0x0a[1; 4],
        ts_format = 0x0b[0; 2],
        rlky = 0x0b[3; 1],
        counter_set_id = 0x0c[0; 8],
        uar_page = 0x0d[0; 24],
        // The kernel header has no name for it; rdma-core's tests have (mlx5_prm_structs.py).
        send_dbr_mode = 0x10[0; 2],
        user_index = 0x11[0; 24],
        log_page_size = 0x14[3; 5],
        remote_qpn = 0x15[0; 24],
        primary_address_path = 0x18[0; 352],
        secondary_address_path = 0x44[0; 352],
        log_ack_req_freq = 0x70[0; 4],
        log_sra_max = 0x71[0; 3],
        retry_count = 0x71[5; 3],
        rnr_retry = 0x72[0; 3],
        fre = 0x72[4; 1],
        cur_rnr_retry = 0x72[5; 3],
        cur_retry_count = 0x73[0; 3],
        packet_pacing_rate_limit_index = 0x76[0; 16],
        next_send_psn = 0x79[0; 24],
        log_num_dci_stream_channels = 0x7c[3; 5],
        cqn_snd = 0x7d[0; 24],
        log_num_dci_errored_streams = 0x80[3; 5],
        deth_sqpn = 0x81[0; 24],
        last_acked_psn = 0x89[0; 24],
        ssn = 0x8d[0; 24],
        log_rra_max = 0x91[0; 3],
        atomic_mode = 0x91[4; 4],
        rre = 0x92[0; 1],
        rwe = 0x92[1; 1],
        rae = 0x92[2; 1],
        page_offset = 0x92[4; 6],
        dp_ordering_1 = 0x93[4; 1],
        min_rnr_nak = 0x94[3; 5],
        next_rcv_psn = 0x95[0; 24],
        xrcd = 0x99[0; 24],
        cqn_rcv = 0x9d[0; 24],
        dbr_addr = 0xa0[0; 64],
        q_key = 0xa8[0; 32],
        rq_type = 0xac[5; 3],
        srqn_rmpn_xrqn = 0xad[0; 24],
        rmsn = 0xb1[0; 24],
        hw_sq_wqebb_counter = 0xb4[0; 16],
        sw_sq_wqebb_counter = 0xb6[0; 16],
        hw_rq_counter = 0xb8[0; 32],
        sw_rq_counter = 0xbc[0; 32],
        cs_req = 0xc6[0; 8],
        cs_res = 0xc7[0; 8],
        dc_access_key = 0xc8[0; 64],
        dbr_umem_valid = 0xd0[3; 1],
        // The kernel header has no name for it; DPDK mlx5_prm.h has.
        dbr_umem_id = 0xe4[0; 32],
    }
    /// Extension of the queue pair context (`qpc_ext` of rdma-core's mlx5_ifc.h).
    qpc_ext(0xc0) {
        mmo = 0x00[2; 1],
        dci_stream_channel_id = 0x02[0; 16],
        qos_queue_group_id_requester = 0x04[0; 32],
        qos_queue_group_id_responder = 0x08[0; 32],
    }
    /// Scheduling element (`sched_elem` of rdma-core's mlx5_ifc.h).
    sched_elem(0x80) {
        modify_field_select = 0x00[0; 64],
        scheduling_hierarchy = 0x08[0; 8],
        sched_context = 0x20[0; 512],
    }
    /// Context of a scheduling element (`sched_context`).
    sched_context(0x40) {
        element_type = 0x00[0; 8],
        tsar_type = 0x05[0; 8],
        parent_element_id = 0x08[0; 32],
        bw_share = 0x14[0; 32],
        max_average_bw = 0x18[0; 32],
    }
    /// Rate of packet pacing (`set_pp_rate_limit_context`).
    set_pp_rate_limit_context(0x30) {
        rate_limit = 0x00[0; 32],
        burst_upper_bound = 0x04[0; 32],
        typical_packet_size = 0x0a[0; 16],
    }
    /// Destination of dynamic connections and the queue pair that stands for its path (rdma-core `av_qp_mapping`).
    av_qp_mapping(0x40) {
        qpn = 0x0c[0; 32],
        rgid_or_rip = 0x30[0; 128],
    }
    /// Context of a target of dynamic connections (`dctc`).
    dctc(0x40) {
        state = 0x00[4; 4],
        user_index = 0x05[0; 24],
        cqn = 0x09[0; 24],
        counter_set_id = 0x0c[0; 8],
        atomic_mode = 0x0d[0; 4],
        rre = 0x0d[4; 1],
        rwe = 0x0d[5; 1],
        rae = 0x0d[6; 1],
        cs_res = 0x11[0; 8],
        min_rnr_nak = 0x12[3; 5],
        srqn_xrqn = 0x15[0; 24],
        pd = 0x19[0; 24],
        tclass = 0x1c[0; 8],
        flow_label = 0x1d[4; 20],
        dc_access_key = 0x20[0; 64],
        mtu = 0x28[5; 3],
        port = 0x29[0; 8],
        pkey_index = 0x2a[0; 16],
        my_addr_index = 0x2d[0; 8],
        hop_limit = 0x2f[0; 8],
        dc_access_key_violation_count = 0x30[0; 32],
    }
    /// Address path of a queue pair (`ads`).
    ads(0x2c) {
        fl = 0x00[0; 1],
        pkey_index = 0x02[0; 16],
        grh = 0x05[0; 1],
        mlid = 0x05[1; 7],
        rlid = 0x06[0; 16],
        ack_timeout = 0x08[0; 5],
        src_addr_index = 0x09[0; 8],
        stat_rate = 0x0a[4; 4],
        hop_limit = 0x0b[0; 8],
        tclass = 0x0c[4; 8],
        flow_label = 0x0d[4; 20],
        rgid_rip = 0x10[0; 128],
        sl = 0x24[4; 4],
        vhca_port_num = 0x25[0; 8],
    }
    /// Completion queue context (`cqc`).
    cqc(0x40) {
        status = 0x00[0; 4],
        dbr_umem_valid = 0x00[6; 1],
        cqe_sz = 0x01[0; 3],
        cc = 0x01[3; 1],
        scqe_break_moderation_en = 0x01[5; 1],
        oi = 0x01[6; 1],
        cq_period_mode = 0x01[7; 2],
        cqe_comp_en = 0x02[1; 1],
        mini_cqe_res_format = 0x02[2; 2],
        cqe_compression_layout = 0x03[6; 2],
        st = 0x02[4; 4],
        page_offset = 0x0a[4; 6],
        log_cq_size = 0x0c[3; 5],
        uar_page = 0x0d[0; 24],
        cq_period = 0x10[4; 12],
        cq_max_count = 0x12[0; 16],
        c_eqn = 0x14[0; 32],
        log_page_size = 0x18[3; 5],
        last_notified_index = 0x21[0; 24],
        last_solicit_index = 0x25[0; 24],
        consumer_counter = 0x29[0; 24],
        producer_counter = 0x2d[0; 24],
        dbr_addr = 0x38[0; 64],
        // The kernel header has no name for it; DPDK mlx5_prm.h has.
        dbr_umem_id = 0x04[0; 32],
    }
    /// Event queue context (`eqc`).
    eqc(0x40) {
        status = 0x00[0; 4],
        oi = 0x01[6; 1],
        st = 0x02[4; 4],
        page_offset = 0x0a[4; 6],
        log_eq_size = 0x0c[3; 5],
        uar_page = 0x0d[0; 24],
        intr = 0x16[4; 12],
        log_page_size = 0x18[3; 5],
        consumer_counter = 0x29[0; 24],
        producer_counter = 0x2d[0; 24],
    }
    /// Memory key context (`mkc`).
    mkc(0x40) {
        free = 0x00[1; 1],
        access_mode_4_2 = 0x00[3; 3],
        relaxed_ordering_write = 0x01[5; 1],
        umr_en = 0x02[0; 1],
        a = 0x02[1; 1],
        rw = 0x02[2; 1],
        rr = 0x02[3; 1],
        lw = 0x02[4; 1],
        lr = 0x02[5; 1],
        access_mode_1_0 = 0x02[6; 2],
        qpn = 0x04[0; 24],
        mkey_7_0 = 0x07[0; 8],
        length64 = 0x0c[0; 1],
        bsf_en = 0x0c[1; 1],
        expected_sigerr_count = 0x0c[5; 1],
        en_rinval = 0x0c[7; 1],
        pd = 0x0d[0; 24],
        start_addr = 0x10[0; 64],
        len = 0x18[0; 64],
        bsf_octword_size = 0x20[0; 32],
        translations_octword_size = 0x34[0; 32],
        relaxed_ordering_read = 0x3b[1; 1],
        log_page_size = 0x3b[2; 6],
    }
    /// Shared receive queue context, before ISSI 1 (`srqc`).
    srqc(0x40) {
        state = 0x00[0; 4],
        log_srq_size = 0x00[4; 4],
        wq_signature = 0x04[0; 1],
        cont_srq = 0x04[1; 1],
        log_rq_stride = 0x04[5; 3],
        xrcd = 0x05[0; 24],
        page_offset = 0x08[0; 6],
        cqn = 0x09[0; 24],
        log_page_size = 0x10[2; 6],
        pd = 0x19[0; 24],
        lwm = 0x1c[0; 16],
        wqe_cnt = 0x1e[0; 16],
        dbr_addr = 0x28[0; 64],
    }
    /// XRC shared receive queue context (`xrc_srqc`).
    xrc_srqc(0x40) {
        state = 0x00[0; 4],
        log_xrc_srq_size = 0x00[4; 4],
        wq_signature = 0x04[0; 1],
        cont_srq = 0x04[1; 1],
        basic_cyclic_rcv_wqe = 0x04[4; 1],
        log_rq_stride = 0x04[5; 3],
        xrcd = 0x05[0; 24],
        page_offset = 0x08[0; 6],
        dbr_umem_valid = 0x08[7; 1],
        cqn = 0x09[0; 24],
        user_index_equal_xrc_srqn = 0x10[0; 1],
        log_page_size = 0x10[2; 6],
        user_index = 0x11[0; 24],
        pd = 0x19[0; 24],
        lwm = 0x1c[0; 16],
        wqe_cnt = 0x1e[0; 16],
        db_record_addr_h = 0x28[0; 32],
        db_record_addr_l = 0x2c[0; 30],
    }
    /// Receive memory pool context (`rmpc`).
    rmpc(0xf0) {
        state = 0x01[0; 4],
        basic_cyclic_rcv_wqe = 0x04[0; 1],
        wq = 0x30[0; 1536],
    }
    /// Work queue of a receive memory pool (`wq`).
    wq(0xc0) {
        wq_type = 0x00[0; 4],
        wq_signature = 0x00[4; 1],
        end_padding_mode = 0x00[5; 2],
        page_offset = 0x05[3; 5],
        lwm = 0x06[0; 16],
        pd = 0x09[0; 24],
        uar_page = 0x0d[0; 24],
        dbr_addr = 0x10[0; 64],
        hw_counter = 0x18[0; 32],
        sw_counter = 0x1c[0; 32],
        log_wq_stride = 0x21[4; 4],
        log_wq_pg_sz = 0x22[3; 5],
        log_wq_sz = 0x23[3; 5],
        dbr_umem_valid = 0x24[0; 1],
        wq_umem_valid = 0x24[1; 1],
        dbr_umem_id = 0x28[0; 32],
        wq_umem_id = 0x2c[0; 32],
        wq_umem_offset = 0x30[0; 64],
    }
    /// Send queue context (`sqc`).
    sqc(0xf0) {
        flush_in_error_en = 0x00[3; 1],
        state = 0x01[0; 4],
        user_index = 0x05[0; 24],
        cqn = 0x09[0; 24],
        tis_lst_sz = 0x20[0; 16],
        qos_queue_group_id = 0x22[0; 16],
        tis_num_0 = 0x2d[0; 24],
        wq = 0x30[0; 1536],
    }
    /// User memory (`umem`).
    umem(0x20) {
        ats = 0x10[0; 1],
        log_page_size = 0x13[3; 5],
        page_offset = 0x14[0; 32],
        num_of_mtt = 0x18[0; 64],
        mtt = 0x20[0; 64],
    }
    /// Memory translation table entry (`mtt`).
    mtt(0x8) {
        ptag_63_32 = 0x00[0; 32],
        ptag_31_8 = 0x04[0; 24],
        wr_en = 0x07[6; 1],
        rd_en = 0x07[7; 1],
    }
    /// InfiniBand port as a function sees it (`hca_vport_context`).
    hca_vport_context(0x200) {
        field_select = 0x00[0; 32],
        sm_virt_aware = 0x20[0; 1],
        has_smi = 0x20[1; 1],
        has_raw = 0x20[2; 1],
        grh_required = 0x20[3; 1],
        port_physical_state = 0x22[0; 4],
        vport_state_policy = 0x22[4; 4],
        port_state = 0x23[0; 4],
        vport_state = 0x23[4; 4],
        system_image_guid = 0x28[0; 64],
        port_guid = 0x30[0; 64],
        node_guid = 0x38[0; 64],
        cap_mask1 = 0x40[0; 32],
        cap_mask1_field_select = 0x44[0; 32],
        cap_mask2 = 0x48[0; 32],
        lid = 0x60[0; 16],
        init_type_reply = 0x62[4; 4],
        lmc = 0x63[0; 3],
        subnet_timeout = 0x63[3; 5],
        sm_lid = 0x64[0; 16],
        sm_sl = 0x66[0; 4],
        qkey_violation_counter = 0x68[0; 16],
        pkey_violation_counter = 0x6a[0; 16],
    }
}
