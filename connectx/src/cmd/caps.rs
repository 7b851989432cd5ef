// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the device says it can do.

use crate::ifc::cap::{atomic_caps, cmd_hca_cap as cap, cmd_hca_cap_2, odp_cap, qos_cap};

/// Capability types of QUERY_HCA_CAP, `MLX5_CAP_*` of `include/linux/mlx5/device.h`.
pub const GENERAL: u16 = 0;
/// See [`GENERAL`].
pub const ATOMIC: u16 = 3;

/// See [`GENERAL`].
pub const ODP: u16 = 2;
/// See [`GENERAL`].
pub const QOS: u16 = 0xc;
/// See [`GENERAL`].
pub const GENERAL_2: u16 = 0x20;
/// See [`GENERAL`].
pub const DEVICE_MEMORY: u16 = 0xf;

/// Groups whose capabilities the device has none of. Firmware answers for them all the same: who asks for a group before
/// the general capability that goes with it (rdma-core's tests do, for flow tables) finds zeros.
pub const EMPTY: [u16; 3] = [
    1, // MLX5_CAP_ETHERNET_OFFLOADS
    4, // MLX5_CAP_ROCE
    7, // MLX5_CAP_FLOW_TABLE
];

/// Capabilities: the most that can be had, and what is in force.
#[derive(Debug, Clone)]
pub struct Capabilities {
    /// General, at most.
    pub max: Vec<u8>,
    /// General, in force.
    pub current: Vec<u8>,
    /// Atomics give their result in the host's byte order, which the driver asks for; otherwise big-endian.
    pub atomic_host_order: bool,
    /// Page faults are reported by the memory scheme, which the driver asks for; otherwise not at all.
    pub memory_page_faults: bool,
}

impl Capabilities {
    /// Log2 of the most user contexts.
    pub const LOG_MAX_UCTX: u32 = 10;
    /// Log2 of the most UMEMs.
    pub const LOG_MAX_UMEM: u32 = 16;
    /// Log2 of the most protection domains.
    pub const LOG_MAX_PD: u32 = 16;
    /// Log2 of the most XRC domains.
    pub const LOG_MAX_XRCD: u32 = 16;
    /// Log2 of the most memory keys.
    pub const LOG_MAX_MKEY: u32 = 20;
    /// Log2 of the most event queues.
    pub const LOG_MAX_EQ: u32 = 6;
    /// Log2 of the most completion queues.
    pub const LOG_MAX_CQ: u32 = 16;
    /// Log2 of the most queue pairs.
    pub const LOG_MAX_QP: u32 = 17;
    /// Log2 of the most shared receive queues.
    pub const LOG_MAX_SRQ: u32 = 16;
    /// Log2 of the most entries of a queue pair's queues.
    pub const LOG_MAX_QP_SIZE: u32 = 15;
    /// Log2 of the most entries of a shared receive queue.
    pub const LOG_MAX_SRQ_SIZE: u32 = 15;
    /// Log2 of the most entries of a completion queue.
    pub const LOG_MAX_CQ_SIZE: u32 = 22;
    /// Log2 of the most entries of an event queue.
    pub const LOG_MAX_EQ_SIZE: u32 = 16;
    /// Log2 of the longest message.
    pub const LOG_MAX_MSG: u32 = 30;
    /// Log2 of the most READs and atomics in flight in each direction.
    pub const LOG_MAX_READS: u32 = 4;
    /// Log2 of the most streams of an initiator of dynamic connections.
    pub const LOG_MAX_DCI_STREAMS: u32 = 6;
    /// Log2 of the most of them in error before the initiator is.
    pub const LOG_MAX_DCI_ERRORED_STREAMS: u32 = 6;
    /// Log2 of the most bytes that a WQE copies within local memory.
    pub const LOG_DMA_MMO_MAX_SIZE: u32 = 20;
    /// Log2 of the numbers of queue pairs that are reserved together, and of the most of these blocks.
    pub const LOG_RESERVED_QPNS: u32 = 5;
    /// See above.
    pub const LOG_MAX_RESERVED_BLOCKS: u32 = 10;
    /// Rates of packet pacing, with the first that stands for none.
    pub const RATE_TABLE_SIZE: u16 = 128;
    /// Lowest rate of packet pacing, in kbit/s.
    pub const MIN_RATE_KBPS: u32 = 1;
    /// Highest rate of packet pacing, in kbit/s.
    pub const MAX_RATE_KBPS: u32 = 200_000_000;
    /// Log2 of the most scheduling elements.
    pub const LOG_MAX_ELEMENTS: u32 = 10;
    /// Most levels of a tree of scheduling elements.
    pub const MAX_SCHED_DEPTH: u32 = 16;
    /// Most of a scheduling element's `bw_share`.
    pub const MAX_BW_SHARE: u32 = 100;
    /// Longest WQE of a send queue: more than its `ds` can say, as hardware's is.
    pub const MAX_SEND_WQE: u64 = 1024;
    /// Longest WQE of a receive queue.
    pub const MAX_RECEIVE_WQE: u64 = 512;
    /// Most completions of a compressed session. It waits for none that is not under way: `cqe_compression_timeout` is 0.
    pub const MAX_SESSION: u16 = 24;
    /// Octowords of a BSF.
    pub const LOG_MAX_BSF: u32 = 2;
    /// Prediction signature values, of which a key with signatures has two.
    pub const LOG_MAX_PSV: u32 = 18;
    /// Rate of the device's clock.
    pub const CLOCK_KHZ: u64 = 156_250;

    /// Capabilities after power-on.
    pub fn new() -> Self {
        let mut general = vec![0; cap::SIZE];
        let values = [
            (cap::log_max_srq_sz, u64::from(Self::LOG_MAX_SRQ_SIZE)),
            (cap::log_max_qp_sz, u64::from(Self::LOG_MAX_QP_SIZE)),
            (cap::log_max_qp, u64::from(Self::LOG_MAX_QP)),
            (cap::log_max_srq, u64::from(Self::LOG_MAX_SRQ)),
            (cap::log_max_cq_sz, u64::from(Self::LOG_MAX_CQ_SIZE)),
            (cap::log_max_cq, u64::from(Self::LOG_MAX_CQ)),
            (cap::log_max_eq_sz, u64::from(Self::LOG_MAX_EQ_SIZE)),
            (cap::log_max_mkey, u64::from(Self::LOG_MAX_MKEY)),
            (cap::log_max_eq, u64::from(Self::LOG_MAX_EQ)),
            (cap::log_max_klm_list_size, 16),
            (cap::log_max_ra_req_qp, u64::from(Self::LOG_MAX_READS)),
            (cap::log_max_ra_res_qp, u64::from(Self::LOG_MAX_READS)),
            (cap::log_max_ra_req_dc, u64::from(Self::LOG_MAX_READS)),
            (cap::log_max_ra_res_dc, u64::from(Self::LOG_MAX_READS)),
            (cap::qpc_extension, 1),
            (cap::vport_group_manager, 1),
            (cap::ib_virt, 1),
            (cap::device_memory, 1),
            (cap::local_ca_ack_delay, 15),
            (cap::num_ports, 1),
            (cap::log_max_msg, u64::from(Self::LOG_MAX_MSG)),
            (cap::cqe_version, 1),
            (cap::compact_address_vector, 1),
            (cap::pg, 1),
            (cap::fixed_buffer_size, 1),
            (cap::null_mkey, 1),
            (cap::umr_extended_translation_offset, 1),
            (cap::atomic, 1),
            (cap::sctr_data_cqe, 1),
            (cap::cq_oi, 1),
            (cap::cq_resize, 1),
            (cap::cq_moderation, 1),
            (cap::block_lb_mc, 1),
            (cap::imaicl, 1),
            (cap::sho, 1),
            (cap::log_max_bsf_list_size, Self::LOG_MAX_BSF.into()),
            (cap::sigerr_cqe, 1),
            (cap::sigerr_domain_and_sig_type, 1),
            (cap::drain_sigerr, 1),
            (cap::sig_block_4048, 1),
            (cap::sig_crc32c, 1),
            (cap::sig_crc64_xp10, 1),
            (cap::qkv, 1),
            (cap::pkv, 1),
            (cap::hca_cap_2, 1),
            (cap::qos, 1),
            (cap::general_obj_types, super::general::TYPES),
            (cap::cqe_128_always, 1),
            (cap::cqe_compression, 1),
            (cap::cqe_compression_128, 1),
            (cap::mini_cqe_resp_stride_index, 1),
            (cap::cqe_compression_max_num, Self::MAX_SESSION.into()),
            (cap::dma_mmo_qp, 1),
            (
                cap::log_dma_mmo_max_size,
                u64::from(Self::LOG_DMA_MMO_MAX_SIZE),
            ),
            (cap::dp_ordering_ooo_all_ud, 1),
            (cap::dp_ordering_ooo_all_uc, 1),
            (cap::dp_ordering_ooo_all_xrc, 1),
            (cap::dp_ordering_ooo_all_dc, 1),
            (cap::dp_ordering_ooo_all_rc, 1),
            (cap::dct, 1),
            (
                cap::log_max_dci_stream_channels,
                u64::from(Self::LOG_MAX_DCI_STREAMS),
            ),
            (
                cap::log_max_dci_errored_streams,
                u64::from(Self::LOG_MAX_DCI_ERRORED_STREAMS),
            ),
            (cap::xrc, 1),
            (cap::ud, 1),
            (cap::uc, 1),
            (cap::rc, 1),
            (cap::log_pg_sz, 12),
            (cap::bf, 1),
            (cap::log_bf_reg_size, 9),
            (cap::log_max_sq, u64::from(Self::LOG_MAX_QP)),
            (cap::log_max_wq_sz, u64::from(Self::LOG_MAX_QP_SIZE)),
            (cap::max_wqe_sz_sq, Self::MAX_SEND_WQE),
            (cap::max_wqe_sz_sq_dc, Self::MAX_SEND_WQE),
            (cap::max_wqe_sz_rq, Self::MAX_RECEIVE_WQE),
            (cap::max_qp_mcg, 8),
            (cap::log_max_mcg, 8),
            (cap::log_max_pd, u64::from(Self::LOG_MAX_PD)),
            (cap::log_max_xrcd, u64::from(Self::LOG_MAX_XRCD)),
            (cap::log_max_uctx, u64::from(Self::LOG_MAX_UCTX)),
            (cap::log_max_umem, u64::from(Self::LOG_MAX_UMEM)),
            (cap::device_frequency_khz, Self::CLOCK_KHZ),
            (cap::num_of_uars_per_page, 4),
        ];
        for (field, value) in values {
            field.set(&mut general, value);
        }
        Self {
            max: general.clone(),
            current: general,
            atomic_host_order: false,
            memory_page_faults: false,
        }
    }

    /// What a virtual function has less: it does not manage the virtual ports of others (`MLX5_VPORT_MANAGER`).
    pub(crate) fn of_virtual_function(&mut self) {
        for caps in [&mut self.max, &mut self.current] {
            cap::vport_group_manager.set(caps, 0);
        }
    }

    /// Changes a general capability as `NAME=VALUE` says, by its name in `cmd_hca_cap`: to less than the model has, or to a
    /// restriction.
    pub fn set(&mut self, setting: &str) -> Result<(), String> {
        let (name, value) = setting
            .split_once('=')
            .ok_or_else(|| format!("{setting}: not NAME=VALUE"))?;
        let value: u64 = value.parse().map_err(|e| format!("{setting}: {e}"))?;
        let (_, field) = cap::FIELDS
            .iter()
            .find(|(known, _)| *known == name)
            .ok_or_else(|| format!("{name}: no capability of mlx5_ifc.h that the model knows"))?;
        let most = match field.get(&self.max) {
            0 if name.ends_with("_disabled") => 1,
            has => has,
        };
        if value > most {
            return Err(format!("{setting}: the model has no more than {most}"));
        }
        field.set(&mut self.max, value);
        field.set(&mut self.current, value);
        Ok(())
    }

    /// Whether WQEs may be written into UAR pages.
    pub fn blueflame(&self) -> bool {
        cap::bf.is_set(&self.current)
    }

    /// The second part of the general capabilities. Out-of-order placement is permitted to the device, not asked of it:
    /// the model's links keep the order, so there is nothing to place early.
    pub fn general_2(&self) -> Vec<u8> {
        let mut caps = vec![0; cmd_hca_cap_2::SIZE];
        cmd_hca_cap_2::dp_ordering_force.set(&mut caps, 1);
        let log_reserved = u64::from(Self::LOG_RESERVED_QPNS);
        cmd_hca_cap_2::log_reserved_qpn_granularity.set(&mut caps, log_reserved);
        cmd_hca_cap_2::send_dbr_mode_no_dbr_ext.set(&mut caps, 1);
        let log_max_qp = u64::from(Self::LOG_MAX_QP);
        cmd_hca_cap_2::log_max_send_dbr_less_qp_sq.set(&mut caps, log_max_qp);
        caps
    }

    /// Capabilities of on-demand paging, at most or as in force. There is one scheme, which the driver has to turn on.
    pub fn odp(&self, current: bool) -> Vec<u8> {
        // Bits of `odp_per_transport_service_cap`.
        const SEND: u64 = 0b10_0000;
        const ALL: u64 = 0b11_1111;
        let mut caps = vec![0; odp_cap::SIZE];
        if !cap::pg.is_set(&self.current) {
            return caps;
        }
        let in_force = current && self.memory_page_faults;
        odp_cap::memory_page_prefetch.set(&mut caps, 1);
        odp_cap::mem_page_fault.set(&mut caps, u64::from(!current || in_force));
        // rdma-core looks for the services where drivers did that knew no scheme but by transports (get_dc_odp_caps). They
        // are there once the other is in force, so that nobody takes them for that one.
        for (by_memory, by_transport, services) in [
            (odp_cap::memory_rc, odp_cap::transport_rc, ALL),
            (odp_cap::memory_ud, odp_cap::transport_ud, SEND),
            (odp_cap::memory_xrc, odp_cap::transport_xrc, ALL),
            (odp_cap::memory_dc, odp_cap::transport_dc, ALL),
        ] {
            by_memory.set(&mut caps, services);
            if in_force {
                by_transport.set(&mut caps, services);
            }
        }
        caps
    }

    /// Capabilities of quality of service.
    pub fn qos(&self) -> Vec<u8> {
        let mut caps = vec![0; qos_cap::SIZE];
        for (field, value) in [
            (qos_cap::packet_pacing, 1),
            (qos_cap::packet_pacing_uid, 1),
            (qos_cap::packet_pacing_max_rate, Self::MAX_RATE_KBPS),
            (qos_cap::packet_pacing_min_rate, Self::MIN_RATE_KBPS),
            (
                qos_cap::packet_pacing_rate_table_size,
                Self::RATE_TABLE_SIZE.into(),
            ),
            (qos_cap::nic_sq_scheduling, 1),
            (qos_cap::nic_bw_share, 1),
            (qos_cap::nic_rate_limit, 1),
            (qos_cap::nic_qp_scheduling, 1),
            (qos_cap::log_max_qos_nic_queue_group, Self::LOG_MAX_ELEMENTS),
            (qos_cap::max_tsar_bw_share, Self::MAX_BW_SHARE),
            // A bit for each of `ElementKind`, and for DWRR.
            (qos_cap::nic_element_type, (1 << 0) | (1 << 4)),
            (qos_cap::nic_tsar_type, 1 << 0),
        ] {
            field.set(&mut caps, u64::from(value));
        }
        caps
    }

    /// Capabilities of atomics: compare-swap and fetch-add on 8 bytes, with masks also on 4.
    pub fn atomic(&self) -> Vec<u8> {
        let mut caps = vec![0; atomic_caps::SIZE];
        atomic_caps::atomic_req_8B_endianness_mode
            .set(&mut caps, u64::from(self.atomic_host_order));
        // Bits of atomic_operations: 0 compare-swap, 1 fetch-add, 2 masked compare-swap, 3 masked fetch-add; sizes in bytes, one bit each.
        atomic_caps::supported_atomic_req_8B_endianness_mode_1.set(&mut caps, 1);
        atomic_caps::atomic_operations.set(&mut caps, 0b1111);
        atomic_caps::atomic_size_qp.set(&mut caps, 4 | 8);
        atomic_caps::atomic_size_dc.set(&mut caps, 4 | 8);
        caps
    }
}

impl Default for Capabilities {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capability_is_taken_away_by_name() {
        let mut caps = Capabilities::new();
        assert!(caps.blueflame());
        caps.set("bf=0").unwrap();
        assert!(!caps.blueflame() && !cap::bf.is_set(&caps.max));
        caps.set("log_max_qp=10").unwrap();
        assert_eq!(cap::log_max_qp.get(&caps.current), 10);
        caps.set("umr_modify_entity_size_disabled=1").unwrap();
        for wrong in ["log_max_qp=30", "dct=2", "nonsense=1", "bf", "bf=x"] {
            let before = caps.max.clone();
            assert!(caps.set(wrong).is_err(), "{wrong}");
            assert_eq!(caps.max, before);
        }
    }
}
