// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queue pairs: context, states and the transitions between them.

use super::memory::Buffer;
use super::table::Weigh;
use crate::engine::requester::Requester;
use crate::engine::responder::Responder;
use crate::ifc::Field;
use crate::ifc::context::{ads, qpc};
use crate::ifc::opcode;
use crate::ifc::wqe::BASIC_BLOCK;

/// State of a queue pair, as in `qpc.state` (`MLX5_QP_STATE_*`, `include/linux/mlx5/qp.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum State {
    Reset = 0,
    Init = 1,
    ReadyToReceive = 2,
    ReadyToSend = 3,
    SendQueueError = 4,
    SendQueueDrained = 5,
    Error = 6,
}

impl State {
    /// Whether packets are taken and answered.
    pub fn answers(self) -> bool {
        matches!(
            self,
            Self::ReadyToReceive
                | Self::ReadyToSend
                | Self::SendQueueError
                | Self::SendQueueDrained
        )
    }
}

/// Transport service of a queue pair, as in `qpc.st` (`MLX5_QP_ST_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Service {
    Rc = 0x0,
    Uc = 0x1,
    Ud = 0x2,
    Xrc = 0x3,
    Smi = 0x7,
    Gsi = 0x8,
    RegUmr = 0xc,
}

impl Service {
    /// The service with a number, if the model has it.
    pub fn from_number(number: u64) -> Option<Self> {
        Some(match number {
            0x0 => Self::Rc,
            0x1 => Self::Uc,
            0x2 => Self::Ud,
            0x3 => Self::Xrc,
            0x7 => Self::Smi,
            0x8 => Self::Gsi,
            0xc => Self::RegUmr,
            _ => return None,
        })
    }

    /// Whether messages carry their own address.
    pub fn is_datagram(self) -> bool {
        matches!(self, Self::Ud | Self::Smi | Self::Gsi)
    }

    /// Whether requests are acknowledged.
    pub fn is_reliable(self) -> bool {
        matches!(self, Self::Rc | Self::Xrc)
    }
}

/// Where the receive WQEs of a queue pair come from (`qpc.rq_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum ReceiveFrom {
    /// Its own receive queue.
    Own,
    /// A shared receive queue, by number.
    Shared(u32),
    /// Nowhere.
    Nothing,
}

/// The part of the context that data path decisions need, decoded.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct Decoded {
    pub pd: u32,
    pub uar_page: u32,
    pub user_index: u32,
    pub cqn_send: u32,
    pub cqn_receive: u32,
    pub receive: ReceiveFrom,
    pub xrcd: u32,
    pub dbr: u64,
    pub mtu: usize,
    pub log_msg_max: u32,
    pub remote_qpn: u32,
    pub remote_lid: u16,
    pub remote_gid: Option<[u8; 16]>,
    pub sl: u8,
    pub pkey_index: u16,
    pub ack_timeout: u8,
    pub retry_count: u8,
    pub rnr_retry: u8,
    pub min_rnr_nak: u8,
    pub remote_read: bool,
    pub remote_write: bool,
    pub remote_atomic: bool,
    pub max_reads_out: usize,
    pub max_reads_in: usize,
    pub qkey: u32,
}

/// Geometry of the two work queues.
#[derive(Debug, Clone)]
pub struct WorkQueues {
    /// The memory of both: first the receive queue, then the send queue.
    pub buffer: Buffer,
    /// Log2 of the receive WQEs; `None` without a receive queue of its own.
    pub log_receive: Option<u32>,
    /// Log2 of the bytes of a receive WQE.
    pub log_stride: u32,
    /// Log2 of the send queue's basic blocks; `None` without a send queue.
    pub log_send: Option<u32>,
    /// First byte of the send queue in the buffer.
    pub send_start: u64,
}

impl WorkQueues {
    /// Geometry that a context asks for, and the bytes it takes.
    pub fn geometry(context: &[u8]) -> (Self, u64) {
        let own = qpc::rq_type.get(context) == 0;
        let log_receive = own.then(|| qpc::log_rq_size.get32(context));
        let log_stride = qpc::log_rq_stride.get32(context) + 4;
        let log_send = (!qpc::no_sq.is_set(context)).then(|| qpc::log_sq_size.get32(context));
        let receive = log_receive.map_or(0, |log| 1u64 << (log + log_stride));
        // The send queue starts on a basic block.
        let send_start = receive.next_multiple_of(BASIC_BLOCK as u64);
        let len = match log_send {
            Some(log) => send_start + ((BASIC_BLOCK as u64) << log),
            None => receive,
        };
        (
            Self {
                buffer: Buffer::empty(),
                log_receive,
                log_stride,
                log_send,
                send_start,
            },
            len,
        )
    }
}

/// A queue pair.
#[derive(Debug)]
pub struct Qp {
    /// Its number.
    pub number: u32,
    /// Owner.
    pub uid: u16,
    /// Transport service.
    pub service: Service,
    /// State.
    pub state: State,
    /// The context as given by the commands so far.
    pub context: Vec<u8>,
    /// The context, decoded.
    pub decoded: Decoded,
    /// Work queues.
    pub queues: WorkQueues,
    /// UMEMs that the queues and the doorbell record lie in.
    pub umems: Vec<u32>,
    /// Sending half.
    pub requester: Requester,
    /// Receiving half.
    pub responder: Responder,
    /// In the engine's list of queue pairs with work.
    pub scheduled: bool,
}

impl Weigh for Box<Qp> {
    fn entries(&self) -> usize {
        self.queues.buffer.entries()
    }
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

/// Bits of `opt_param_mask`, `MLX5_QP_OPTPAR_*` of `include/linux/mlx5/qp.h`.
mod optional {
    pub const RRE: u32 = 1 << 1;
    pub const RAE: u32 = 1 << 2;
    pub const RWE: u32 = 1 << 3;
    pub const PKEY_INDEX: u32 = 1 << 4;
    pub const Q_KEY: u32 = 1 << 5;
    pub const RNR_TIMEOUT: u32 = 1 << 6;
    pub const PRIMARY_ADDR_PATH: u32 = 1 << 7;
    pub const SRA_MAX: u32 = 1 << 8;
    pub const RRA_MAX: u32 = 1 << 9;
    pub const RETRY_COUNT: u32 = 1 << 12;
    pub const RNR_RETRY: u32 = 1 << 13;
    pub const ACK_TIMEOUT: u32 = 1 << 14;
}

/// Where a transition command may start and where it ends, or `None` for a command that is no transition.
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

/// Takes over from `given` into `context` what `command` sets, and of the rest what `opt_param_mask` names.
pub fn merge(command: u16, opt_param_mask: u32, given: &[u8], context: &mut [u8]) {
    let path = qpc::primary_address_path;
    match command {
        opcode::RST2INIT_QP | opcode::INIT2INIT_QP => {
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
        (optional::SRA_MAX, &[qpc::log_sra_max]),
        (optional::RRA_MAX, &[qpc::log_rra_max]),
        (optional::RETRY_COUNT, &[qpc::retry_count]),
        (optional::RNR_RETRY, &[qpc::rnr_retry]),
    ];
    for (bit, fields) in optional {
        if opt_param_mask & bit != 0 {
            copy(given, context, fields);
        }
    }
    let from = path.bytes(given).to_vec();
    if opt_param_mask & optional::PRIMARY_ADDR_PATH != 0 {
        copy_path(given, context, path);
    }
    if opt_param_mask & optional::PKEY_INDEX != 0 {
        copy(&from, path.bytes_mut(context), &[ads::pkey_index]);
    }
    if opt_param_mask & optional::ACK_TIMEOUT != 0 {
        copy(&from, path.bytes_mut(context), &[ads::ack_timeout]);
    }
}

impl Decoded {
    /// Decodes a context. `dbr` is the bus address of the doorbell record, which the context gives only without a UMEM.
    pub fn from_context(context: &[u8], dbr: u64) -> Self {
        let path = qpc::primary_address_path.bytes(context);
        let gid = ads::grh.is_set(path).then(|| {
            let mut gid = [0; 16];
            gid.copy_from_slice(ads::rgid_rip.bytes(path));
            gid
        });
        Self {
            pd: qpc::pd.get32(context),
            uar_page: qpc::uar_page.get32(context),
            user_index: qpc::user_index.get32(context),
            cqn_send: qpc::cqn_snd.get32(context),
            cqn_receive: qpc::cqn_rcv.get32(context),
            receive: match qpc::rq_type.get(context) {
                0 => ReceiveFrom::Own,
                1 => ReceiveFrom::Shared(qpc::srqn_rmpn_xrqn.get32(context)),
                _ => ReceiveFrom::Nothing,
            },
            xrcd: qpc::xrcd.get32(context),
            dbr,
            // IB MTU codes 1 to 5 are 256 to 4096 bytes; what is out of range was refused by the command.
            mtu: 128 << qpc::mtu.get(context).clamp(1, 5),
            log_msg_max: qpc::log_msg_max.get32(context).min(30),
            remote_qpn: qpc::remote_qpn.get32(context),
            remote_lid: ads::rlid.get(path) as u16,
            remote_gid: gid,
            sl: ads::sl.get(path) as u8,
            pkey_index: ads::pkey_index.get(path) as u16,
            ack_timeout: ads::ack_timeout.get(path) as u8,
            retry_count: qpc::retry_count.get(context) as u8,
            rnr_retry: qpc::rnr_retry.get(context) as u8,
            min_rnr_nak: qpc::min_rnr_nak.get(context) as u8,
            remote_read: qpc::rre.is_set(context),
            remote_write: qpc::rwe.is_set(context),
            remote_atomic: qpc::rae.is_set(context),
            max_reads_out: 1 << qpc::log_sra_max.get(context),
            max_reads_in: 1 << qpc::log_rra_max.get(context),
            qkey: qpc::q_key.get32(context),
        }
    }
}

impl Qp {
    /// The context as QUERY_QP shows it: what was given, and where the queues stand.
    pub fn query(&self) -> Vec<u8> {
        let mut context = self.context.clone();
        qpc::state.set(&mut context, self.state as u64);
        qpc::next_send_psn.set(&mut context, u64::from(self.requester.next_psn));
        qpc::last_acked_psn.set(&mut context, u64::from(self.requester.acked_psn()));
        qpc::next_rcv_psn.set(&mut context, u64::from(self.responder.expected_psn));
        qpc::hw_sq_wqebb_counter.set(&mut context, u64::from(self.requester.fetched));
        qpc::sw_sq_wqebb_counter.set(&mut context, u64::from(self.requester.producer));
        qpc::hw_rq_counter.set(&mut context, u64::from(self.responder.consumed));
        context
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn the_send_queue_follows_the_receive_queue() {
        let mut context = vec![0; qpc::SIZE];
        qpc::log_rq_size.set(&mut context, 9);
        qpc::log_sq_size.set(&mut context, 8);
        let (queues, len) = WorkQueues::geometry(&context);
        assert_eq!((queues.send_start, len), (8192, 8192 + 256 * 64));
        qpc::log_rq_size.set(&mut context, 0);
        let (queues, len) = WorkQueues::geometry(&context);
        assert_eq!((queues.send_start, len), (64, 64 + 256 * 64));
        qpc::rq_type.set(&mut context, 3);
        let (queues, len) = WorkQueues::geometry(&context);
        assert_eq!(
            (queues.send_start, len, queues.log_receive),
            (0, 256 * 64, None)
        );
        qpc::no_sq.set(&mut context, 1);
        assert_eq!(WorkQueues::geometry(&context).1, 0);
    }
}
