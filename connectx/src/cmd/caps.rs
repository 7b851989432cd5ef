// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the device says it can do.

use crate::ifc::cap::{atomic_caps, cmd_hca_cap as cap};

/// Capability types of QUERY_HCA_CAP, `MLX5_CAP_*` of `include/linux/mlx5/device.h`.
pub const GENERAL: u16 = 0;
/// See [`GENERAL`].
pub const ATOMIC: u16 = 3;

/// See [`GENERAL`].
pub const DEVICE_MEMORY: u16 = 0xf;

/// Groups whose capabilities the device has none of. Firmware answers for them all the same: who asks for a group before
/// the general capability that goes with it (rdma-core's tests do, for flow tables) finds zeros.
pub const EMPTY: [u16; 5] = [
    1,   // MLX5_CAP_ETHERNET_OFFLOADS
    2,   // MLX5_CAP_ODP
    4,   // MLX5_CAP_ROCE
    7,   // MLX5_CAP_FLOW_TABLE
    0xc, // MLX5_CAP_QOS
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
    /// Longest WQE of a send queue: more than its `ds` can say, as hardware's is.
    pub const MAX_SEND_WQE: u64 = 1024;
    /// Longest WQE of a receive queue.
    pub const MAX_RECEIVE_WQE: u64 = 512;
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
            (cap::vport_group_manager, 1),
            (cap::ib_virt, 1),
            (cap::device_memory, 1),
            (cap::local_ca_ack_delay, 15),
            (cap::num_ports, 1),
            (cap::log_max_msg, u64::from(Self::LOG_MAX_MSG)),
            (cap::cqe_version, 1),
            (cap::compact_address_vector, 1),
            (cap::umr_indirect_mkey_disabled, 1),
            (cap::atomic, 1),
            (cap::sctr_data_cqe, 1),
            (cap::cq_oi, 1),
            (cap::cq_resize, 1),
            (cap::cq_moderation, 1),
            (cap::block_lb_mc, 1),
            (cap::imaicl, 1),
            (cap::qkv, 1),
            (cap::pkv, 1),
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

    /// Capabilities of atomics: compare-swap and fetch-add on 8 bytes, with masks also on 4.
    pub fn atomic(&self) -> Vec<u8> {
        let mut caps = vec![0; atomic_caps::SIZE];
        atomic_caps::atomic_req_8B_endianness_mode
            .set(&mut caps, u64::from(self.atomic_host_order));
        // Bits of atomic_operations: 0 compare-swap, 1 fetch-add, 2 masked compare-swap, 3 masked fetch-add; sizes in bytes, one bit each.
        atomic_caps::supported_atomic_req_8B_endianness_mode_1.set(&mut caps, 1);
        atomic_caps::atomic_operations.set(&mut caps, 0b1111);
        atomic_caps::atomic_size_qp.set(&mut caps, 4 | 8);
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
        for wrong in ["log_max_qp=30", "dct=1", "nonsense=1", "bf", "bf=x"] {
            let before = caps.max.clone();
            assert!(caps.set(wrong).is_err(), "{wrong}");
            assert_eq!(caps.max, before);
        }
    }
}
