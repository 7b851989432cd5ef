// SPDX-License-Identifier: MIT OR Apache-2.0
//! Registers: those of ACCESS_REG and those of BAR 0. Offsets are those of `include/linux/mlx5/mlx5_ifc.h` (Linux 7.3).

use super::layout;

layout! {
    /// Port type and speed (`ptys_reg`).
    ptys_reg(0x40) {
        local_port = 0x01[0; 8],
        proto_mask = 0x03[5; 3],
        an_status = 0x04[0; 4],
        data_rate_oper = 0x06[0; 16],
        ib_link_width_capability = 0x10[0; 16],
        ib_proto_capability = 0x12[0; 16],
        ib_link_width_admin = 0x1c[0; 16],
        ib_proto_admin = 0x1e[0; 16],
        ib_link_width_oper = 0x28[0; 16],
        ib_proto_oper = 0x2a[0; 16],
        connector_type = 0x2f[4; 4],
    }
    /// Port MTU (`pmtu_reg`).
    pmtu_reg(0x10) {
        local_port = 0x01[0; 8],
        max_mtu = 0x04[0; 16],
        admin_mtu = 0x08[0; 16],
        oper_mtu = 0x0c[0; 16],
    }
    /// Port virtual lanes (`pvlc_reg`).
    pvlc_reg(0x10) {
        local_port = 0x01[0; 8],
        vl_hw_cap = 0x07[4; 4],
        vl_admin = 0x0b[4; 4],
        vl_operational = 0x0f[4; 4],
    }
    /// Port administrative and operational status (`paos_reg`).
    paos_reg(0x10) {
        swid = 0x00[0; 8],
        local_port = 0x01[0; 8],
        admin_status = 0x02[4; 4],
        oper_status = 0x03[4; 4],
    }
    /// Initialisation segment (`initial_seg`).
    iseg(0x400c) {
        fw_rev_minor = 0x00[0; 16],
        fw_rev_major = 0x02[0; 16],
        cmd_interface_rev = 0x04[0; 16],
        fw_rev_subminor = 0x06[0; 16],
        cmdq_phy_addr_63_32 = 0x10[0; 32],
        cmdq_phy_addr_31_12 = 0x14[0; 20],
        nic_interface = 0x16[6; 2],
        log_cmdq_size = 0x17[0; 4],
        log_cmdq_stride = 0x17[4; 4],
        command_doorbell_vector = 0x18[0; 32],
        initializing = 0x1fc[0; 1],
        nic_interface_supported = 0x1fc[5; 3],
        health_buffer = 0x200[0; 512],
        health_counter = 0x1011[0; 24],
        clear_int = 0x100f[7; 1],
        health_syndrome = 0x1010[0; 8],
    }
    /// Health buffer (`health_buffer`).
    health_buffer(0x40) {
        assert_existptr = 0x20[0; 32],
        assert_callra = 0x24[0; 32],
        time = 0x2c[0; 32],
        fw_version = 0x30[0; 32],
        hw_id = 0x34[0; 32],
        rfr = 0x38[0; 1],
        severity = 0x38[5; 3],
        irisc_index = 0x3c[0; 8],
        synd = 0x3d[0; 8],
        ext_synd = 0x3e[0; 16],
    }
}
