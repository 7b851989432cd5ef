// SPDX-License-Identifier: MIT OR Apache-2.0
//! Transitions of queue pairs: between which states, and which fields of the context each takes.

use super::qp::{Service, State};
use crate::ifc::Field;
use crate::ifc::context::{ads, qpc};
use crate::ifc::opcode;

/// Where a transition command may start and where it ends, or `None` for a command that is no transition
/// (IBA 10.3.1; the commands that mlx5_ib has for them are in `optab` of drivers/infiniband/hw/mlx5/qp.c).
pub fn transition(command: u16) -> Option<(&'static [State], State)> {
    use State::*;
    const ANY: &[State] = &[
        Reset,
        Init,
        ReadyToReceive,
        ReadyToSend,
        SendQueueError,
        SendQueueDrained,
        Error,
    ];
    Some(match command {
        opcode::RST2INIT_QP => (&[Reset], Init),
        opcode::INIT2INIT_QP => (&[Init], Init),
        opcode::INIT2RTR_QP => (&[Init], ReadyToReceive),
        opcode::RTR2RTS_QP => (&[ReadyToReceive], ReadyToSend),
        opcode::RTS2RTS_QP => (&[ReadyToSend], ReadyToSend),
        opcode::SQERR2RTS_QP => (&[SendQueueError], ReadyToSend),
        opcode::SQD_RTS_QP => (&[SendQueueDrained], ReadyToSend),
        opcode::TO_ERR_QP => (ANY, Error),
        opcode::TO_RST_QP => (ANY, Reset),
        _ => return None,
    })
}

/// Bits of `opt_param_mask`, `MLX5_QP_OPTPAR_*` of `include/linux/mlx5/qp.h`.
#[allow(missing_docs)]
pub mod optional {
    pub const ALT_ADDR_PATH: u32 = 1 << 0;
    pub const RRE: u32 = 1 << 1;
    pub const RAE: u32 = 1 << 2;
    pub const RWE: u32 = 1 << 3;
    pub const PKEY_INDEX: u32 = 1 << 4;
    pub const Q_KEY: u32 = 1 << 5;
    pub const RNR_TIMEOUT: u32 = 1 << 6;
    pub const PM_STATE: u32 = 1 << 10;
    /// `MLX5_QPC_OPT_MASK_INIT2INIT_DRAIN_SIGERR` of rdma-core's mlx5_ifc.h.
    pub const DRAIN_SIGERR: u32 = 1 << 11;
    pub const LAG_TX_AFF: u32 = 1 << 15;
    pub const PRI_PORT: u32 = 1 << 16;
    pub const SRQN: u32 = 1 << 18;
    pub const CQN_RCV: u32 = 1 << 19;
    pub const PP_INDEX: u32 = 1 << 22;
    pub const COUNTER_SET_ID: u32 = 1 << 25;
}

/// Bits of `opt_param_mask_95_32`, `MLX5_QPC_OPT_MASK_32_*` of rdma-core's mlx5_ifc.h.
#[allow(missing_docs)]
pub mod extension {
    pub const DCI_STREAM_CHANNEL_ID: u64 = 1 << 0;
    pub const QOS_QUEUE_GROUP_ID: u64 = 1 << 1;
    pub const INIT2INIT_MMO: u64 = 1 << 3;
}

/// Bits of `opt_param_mask` that a transition of a service knows (`opt_mask` of drivers/infiniband/hw/mlx5/qp.c, from
/// IBA table 92). What else is set asks for a change that would not happen.
pub fn optional_of(command: u16, service: Service) -> u32 {
    use optional::*;
    let rights = match service {
        Service::Rc | Service::Xrc => RRE | RAE | RWE,
        Service::Uc => RWE,
        _ => 0,
    };
    let connected = rights != 0;
    let if_connected = |bits| if connected { bits } else { 0 };
    let if_reliable = |bits| if service.is_reliable() { bits } else { 0 };
    let if_datagram = |bits| if service.is_datagram() { bits } else { 0 };
    let own = match command {
        // All that there is is required (but what a service does not have); the driver sets no bits.
        opcode::RST2INIT_QP => LAG_TX_AFF,
        opcode::INIT2INIT_QP => {
            let own = if_connected(LAG_TX_AFF | DRAIN_SIGERR) | if_datagram(Q_KEY);
            rights | PKEY_INDEX | PRI_PORT | own
        }
        opcode::INIT2RTR_QP => {
            rights | PKEY_INDEX | if_connected(ALT_ADDR_PATH | LAG_TX_AFF) | if_datagram(Q_KEY)
        }
        opcode::RTR2RTS_QP | opcode::RTS2RTS_QP => {
            let move_path = if_connected(ALT_ADDR_PATH | PM_STATE);
            let move_queue = match (command, service) {
                (opcode::RTS2RTS_QP, Service::Ud) => SRQN | CQN_RCV,
                _ => 0,
            };
            let timer = if_reliable(RNR_TIMEOUT);
            rights | move_path | timer | if_datagram(Q_KEY) | move_queue | PP_INDEX
        }
        opcode::SQERR2RTS_QP | opcode::SQD_RTS_QP => {
            rights | if_reliable(RNR_TIMEOUT) | if_datagram(Q_KEY)
        }
        _ => return 0,
    };
    own | COUNTER_SET_ID
}

/// Copies fields from one context to another.
fn copy(from: &[u8], to: &mut [u8], fields: &[Field]) {
    for field in fields {
        field.set(to, field.get(from));
    }
}

/// Copies the address path, but for the parts that have their own time: P_Key index and ACK timeout.
fn copy_path(from: &[u8], to: &mut [u8], path: Field) {
    let kept_pkey = ads::pkey_index.get(path.bytes(to));
    let kept_timeout = ads::ack_timeout.get(path.bytes(to));
    path.bytes_mut(to).copy_from_slice(path.bytes(from));
    ads::pkey_index.set(path.bytes_mut(to), kept_pkey);
    ads::ack_timeout.set(path.bytes_mut(to), kept_timeout);
}

/// Takes over from `given` into `context` what `command` sets, and of the rest what `opt_param_mask` names.
pub fn merge(command: u16, opt_param_mask: u32, given: &[u8], context: &mut [u8]) {
    let path = qpc::primary_address_path;
    match command {
        opcode::RST2INIT_QP => {
            copy(
                given,
                context,
                &[
                    qpc::pm_state,
                    qpc::rre,
                    qpc::rwe,
                    qpc::rae,
                    qpc::atomic_mode,
                    qpc::q_key,
                    qpc::counter_set_id,
                ],
            );
            let from = path.bytes(given).to_vec();
            copy(
                &from,
                path.bytes_mut(context),
                &[ads::pkey_index, ads::vhca_port_num],
            );
        }
        opcode::INIT2RTR_QP => {
            let fields = [
                qpc::mtu,
                qpc::log_msg_max,
                qpc::remote_qpn,
                qpc::next_rcv_psn,
                qpc::log_rra_max,
                qpc::min_rnr_nak,
            ];
            copy(given, context, &fields);
            // The driver sets both for a queue pair that permits it, and neither for another.
            copy(
                given,
                context,
                &[qpc::dp_ordering_1, qpc::dp_ordering_force],
            );
            copy_path(given, context, path);
        }
        opcode::RTR2RTS_QP => {
            let fields = [
                qpc::log_ack_req_freq,
                qpc::retry_count,
                qpc::rnr_retry,
                qpc::next_send_psn,
                qpc::log_sra_max,
            ];
            copy(given, context, &fields);
            let from = path.bytes(given).to_vec();
            copy(&from, path.bytes_mut(context), &[ads::ack_timeout]);
        }
        _ => {}
    }
    let optional: &[(u32, &[Field])] = &[
        (optional::RRE, &[qpc::rre]),
        (optional::RAE, &[qpc::rae, qpc::atomic_mode]),
        (optional::RWE, &[qpc::rwe]),
        (optional::Q_KEY, &[qpc::q_key]),
        (optional::RNR_TIMEOUT, &[qpc::min_rnr_nak]),
        (optional::PM_STATE, &[qpc::pm_state]),
        (optional::DRAIN_SIGERR, &[qpc::drain_sigerr]),
        (optional::COUNTER_SET_ID, &[qpc::counter_set_id]),
        (optional::PP_INDEX, &[qpc::packet_pacing_rate_limit_index]),
    ];
    for (bit, fields) in optional {
        if opt_param_mask & bit != 0 {
            copy(given, context, fields);
        }
    }
    let from = path.bytes(given).to_vec();
    for (bit, field) in [
        (optional::PKEY_INDEX, ads::pkey_index),
        (optional::PRI_PORT, ads::vhca_port_num),
    ] {
        if opt_param_mask & bit != 0 {
            copy(&from, path.bytes_mut(context), &[field]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::qp::Decoded;
    use super::*;

    #[test]
    fn transitions_are_those_of_the_specification() {
        use State::*;
        let ok =
            |command, from| transition(command).is_some_and(|(starts, _)| starts.contains(&from));
        assert!(
            ok(opcode::RST2INIT_QP, Reset)
                && !ok(opcode::RST2INIT_QP, Init)
                && !ok(opcode::RST2INIT_QP, Error)
        );
        assert!(ok(opcode::INIT2RTR_QP, Init) && !ok(opcode::INIT2RTR_QP, Reset));
        assert!(ok(opcode::RTR2RTS_QP, ReadyToReceive) && !ok(opcode::RTR2RTS_QP, Init));
        assert!(ok(opcode::RTS2RTS_QP, ReadyToSend) && !ok(opcode::RTS2RTS_QP, ReadyToReceive));
        for from in [
            Reset,
            Init,
            ReadyToReceive,
            ReadyToSend,
            SendQueueError,
            SendQueueDrained,
            Error,
        ] {
            assert!(ok(opcode::TO_ERR_QP, from) && ok(opcode::TO_RST_QP, from));
        }
        assert_eq!(transition(opcode::QUERY_QP), None);
    }

    #[test]
    fn each_transition_takes_its_own_fields() {
        let mut given = vec![0; qpc::SIZE];
        qpc::rwe.set(&mut given, 1);
        qpc::remote_qpn.set(&mut given, 0x77);
        qpc::mtu.set(&mut given, 5);
        qpc::retry_count.set(&mut given, 7);
        ads::rlid.set(qpc::primary_address_path.bytes_mut(&mut given), 9);
        ads::pkey_index.set(qpc::primary_address_path.bytes_mut(&mut given), 3);
        ads::ack_timeout.set(qpc::primary_address_path.bytes_mut(&mut given), 14);
        let mut context = vec![0; qpc::SIZE];
        merge(opcode::RST2INIT_QP, 0, &given, &mut context);
        let d = Decoded::from_context(&context, 0);
        assert!(d.remote_write);
        assert_eq!((d.remote_qpn, d.pkey_index, d.remote_lid), (0, 3, 0));
        qpc::rwe.set(&mut given, 0);
        ads::pkey_index.set(qpc::primary_address_path.bytes_mut(&mut given), 5);
        merge(opcode::INIT2RTR_QP, 0, &given, &mut context);
        let d = Decoded::from_context(&context, 0);
        assert!(d.remote_write, "RWE is optional here");
        assert_eq!(
            (
                d.remote_qpn,
                d.pkey_index,
                d.remote_lid,
                d.mtu,
                d.ack_timeout
            ),
            (0x77, 3, 9, 4096, 0)
        );
        merge(opcode::RTR2RTS_QP, optional::RWE, &given, &mut context);
        let d = Decoded::from_context(&context, 0);
        assert!(!d.remote_write);
        assert_eq!((d.retry_count, d.ack_timeout), (7, 14));
    }
}
