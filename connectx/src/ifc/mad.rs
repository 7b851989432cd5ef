// SPDX-License-Identifier: MIT OR Apache-2.0
//! Management datagrams and their attributes. Offsets are those of the InfiniBand Architecture Specification, volume 1,
//! 13.4 (common), 14.2 (subnet management), 15.2 (subnet administration) and 16.1 (performance).

use super::layout;

layout! {
    /// Management datagram.
    mad(0x100) {
        base_version = 0x00[0; 8],
        mgmt_class = 0x01[0; 8],
        class_version = 0x02[0; 8],
        method = 0x03[0; 8],
        status = 0x04[0; 16],
        class_specific = 0x06[0; 16],
        transaction_id = 0x08[0; 64],
        attribute_id = 0x10[0; 16],
        attribute_modifier = 0x14[0; 32],
        /// Data of subnet management and performance.
        data = 0x40[0; 512],
        rmpp_version = 0x18[0; 8],
        rmpp_type = 0x19[0; 8],
        rmpp_flags = 0x1a[5; 3],
        rmpp_segment = 0x1c[0; 32],
        rmpp_payload_length = 0x20[0; 32],
        sa_attribute_offset = 0x2c[0; 16],
        sa_component_mask = 0x30[0; 64],
        /// Data of subnet administration.
        sa_data = 0x38[0; 1600],
    }
    /// ClassPortInfo.
    class_port_info(0x48) {
        base_version = 0x00[0; 8],
        class_version = 0x01[0; 8],
        capability_mask = 0x02[0; 16],
        resp_time_value = 0x07[3; 5],
    }
    /// NodeInfo.
    node_info(0x28) {
        base_version = 0x00[0; 8],
        class_version = 0x01[0; 8],
        node_type = 0x02[0; 8],
        num_ports = 0x03[0; 8],
        system_image_guid = 0x04[0; 64],
        node_guid = 0x0c[0; 64],
        port_guid = 0x14[0; 64],
        partition_cap = 0x1c[0; 16],
        device_id = 0x1e[0; 16],
        revision = 0x20[0; 32],
        local_port_num = 0x24[0; 8],
        vendor_id = 0x25[0; 24],
    }
    /// PortInfo.
    port_info(0x40) {
        gid_prefix = 0x08[0; 64],
        lid = 0x10[0; 16],
        master_sm_lid = 0x12[0; 16],
        capability_mask = 0x14[0; 32],
        local_port_num = 0x1c[0; 8],
        link_width_enabled = 0x1d[0; 8],
        link_width_supported = 0x1e[0; 8],
        link_width_active = 0x1f[0; 8],
        link_speed_supported = 0x20[0; 4],
        port_state = 0x20[4; 4],
        port_physical_state = 0x21[0; 4],
        link_down_default_state = 0x21[4; 4],
        link_speed_active = 0x23[0; 4],
        link_speed_enabled = 0x23[4; 4],
        neighbor_mtu = 0x24[0; 4],
        vl_cap = 0x25[0; 4],
        mtu_cap = 0x29[4; 4],
        operational_vls = 0x2b[0; 4],
        guid_cap = 0x32[0; 8],
        subnet_timeout = 0x33[3; 5],
        resp_time_value = 0x34[3; 5],
        link_speed_ext_active = 0x3e[0; 4],
        link_speed_ext_supported = 0x3e[4; 4],
        link_speed_ext_enabled = 0x3f[3; 5],
    }
    /// PortCounters.
    port_counters(0x2c) {
        port_select = 0x01[0; 8],
        counter_select = 0x02[0; 16],
        port_xmit_discards = 0x0e[0; 16],
        port_xmit_data = 0x18[0; 32],
        port_rcv_data = 0x1c[0; 32],
        port_xmit_pkts = 0x20[0; 32],
        port_rcv_pkts = 0x24[0; 32],
    }
    /// PortCountersExtended.
    port_counters_extended(0x48) {
        port_select = 0x01[0; 8],
        counter_select = 0x02[0; 16],
        port_xmit_data = 0x08[0; 64],
        port_rcv_data = 0x10[0; 64],
        port_xmit_pkts = 0x18[0; 64],
        port_rcv_pkts = 0x20[0; 64],
    }
    /// NodeRecord.
    node_record(0x6c) {
        lid = 0x00[0; 16],
        node_info = 0x04[0; 320],
        node_description = 0x2c[0; 512],
    }
    /// PortInfoRecord.
    port_info_record(0x44) {
        lid = 0x00[0; 16],
        port_num = 0x02[0; 8],
        port_info = 0x04[0; 512],
    }
    /// PathRecord.
    path_record(0x40) {
        dgid = 0x08[0; 128],
        sgid = 0x18[0; 128],
        dlid = 0x28[0; 16],
        slid = 0x2a[0; 16],
        reversible = 0x31[0; 1],
        numb_path = 0x31[1; 7],
        pkey = 0x32[0; 16],
        sl = 0x35[4; 4],
        mtu_selector = 0x36[0; 2],
        mtu = 0x36[2; 6],
        rate_selector = 0x37[0; 2],
        rate = 0x37[2; 6],
        packet_life_time_selector = 0x38[0; 2],
        packet_life_time = 0x38[2; 6],
    }
    /// MCMemberRecord.
    mc_member_record(0x34) {
        mgid = 0x00[0; 128],
        port_gid = 0x10[0; 128],
        qkey = 0x20[0; 32],
        mlid = 0x24[0; 16],
        mtu_selector = 0x26[0; 2],
        mtu = 0x26[2; 6],
        tclass = 0x27[0; 8],
        pkey = 0x28[0; 16],
        rate_selector = 0x2a[0; 2],
        rate = 0x2a[2; 6],
        packet_life_time_selector = 0x2b[0; 2],
        packet_life_time = 0x2b[2; 6],
        sl = 0x2c[0; 4],
        flow_label = 0x2c[4; 20],
        hop_limit = 0x2f[0; 8],
        scope = 0x30[0; 4],
        join_state = 0x30[4; 4],
    }
}
