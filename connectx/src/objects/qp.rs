// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queue pairs: context, states and the transitions between them.

use super::dc::Dc;
use super::memory::Buffer;
use super::pacing::Limits;
use super::table::Weigh;
use crate::engine::requester::Requester;
use crate::engine::responder::Responder;
use crate::ifc::context::{ads, qpc};
use crate::ifc::wqe::BASIC_BLOCK;
use crate::wire::packet::Atomic;

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
#[repr(u16)]
#[allow(missing_docs)]
pub enum Service {
    Rc = 0x0,
    Uc = 0x1,
    Ud = 0x2,
    Xrc = 0x3,
    Dci = 0x5,
    Smi = 0x7,
    Gsi = 0x8,
    RegUmr = 0xc,
    /// A send queue without a queue pair, which `qpc.st` cannot name.
    Sq = 0x100,
    /// A target of dynamic connections, which CREATE_QP does not make.
    Dct = 0x101,
    /// A target's end of one connection, which no command names.
    Dcr = 0x102,
}

impl Service {
    /// The service with a number, if the model has it.
    pub fn from_number(number: u64) -> Option<Self> {
        Some(match number {
            0x0 => Self::Rc,
            0x1 => Self::Uc,
            0x2 => Self::Ud,
            0x3 => Self::Xrc,
            0x5 => Self::Dci,
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
        matches!(self, Self::Rc | Self::Xrc | Self::Dci | Self::Dcr)
    }

    /// Whether it is a queue pair that CREATE_QP makes, to the commands that name one.
    pub fn is_queue_pair(self) -> bool {
        !matches!(self, Self::Sq | Self::Dct | Self::Dcr)
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

/// Atomics that a queue pair answers (`qpc.atomic_mode`, `MLX5_ATOMIC_MODE_*` of `include/linux/mlx5/qp.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AtomicMode(pub u8);

impl AtomicMode {
    /// Whether an operation on `len` bytes is one of the mode's.
    pub fn permits(self, len: u32, operation: Atomic) -> bool {
        match self.0 {
            0 => false,
            // As the IB specification has them, and the same on every adapter (CX).
            1 | 2 => len == 8 && operation.is_plain(),
            // Extended, on up to 2^mode bytes.
            mode => len <= 1 << mode,
        }
    }
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
    /// The send queue has a doorbell record.
    pub send_record: bool,
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
    pub atomic_mode: AtomicMode,
    pub max_reads_out: usize,
    pub max_reads_in: usize,
    pub qkey: u32,
    /// A wrong signature stops the send queue once what has begun is done.
    pub drain_sigerr: bool,
    /// Most bytes that a READ or atomic leaves in its completion.
    pub scatter_request: usize,
    /// Most bytes that a SEND leaves in the receiver's completion.
    pub scatter_response: usize,
}

/// Bytes that `qpc.cs_req` permits in a completion (`MLX5_REQ_SCAT_DATA32_CQE`, `…64…` of `include/linux/mlx5/qp.h`).
pub fn scatter_request(cs_req: u64) -> Option<usize> {
    match cs_req {
        0 => Some(0),
        0x11 => Some(32),
        0x22 => Some(64),
        _ => None,
    }
}

/// Bytes that `qpc.cs_res` permits in a completion (`MLX5_RES_SCAT_DATA32_CQE`, `…64…`).
pub fn scatter_response(cs_res: u64) -> Option<usize> {
    match cs_res {
        0 => Some(0),
        1 => Some(32),
        2 => Some(64),
        _ => None,
    }
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
    /// Role in dynamic connections.
    pub dc: Dc,
    /// How fast it may send.
    pub limits: Limits,
    /// WQEs may copy within local memory.
    pub mmo: bool,
}

impl Qp {
    /// One in reset that has done nothing yet, without a number or UMEMs.
    pub fn new(
        uid: u16,
        service: Service,
        context: Vec<u8>,
        decoded: Decoded,
        queues: WorkQueues,
    ) -> Self {
        Self {
            number: 0,
            uid,
            service,
            state: State::Reset,
            context,
            decoded,
            queues,
            umems: Vec::new(),
            requester: Requester::default(),
            responder: Responder::default(),
            scheduled: false,
            dc: Dc::None,
            limits: Limits::default(),
            mmo: false,
        }
    }
}

impl Weigh for Box<Qp> {
    fn entries(&self) -> usize {
        self.queues.buffer.entries()
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
            send_record: !qpc::send_dbr_mode.is_set(context),
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
            atomic_mode: AtomicMode(qpc::atomic_mode.get(context) as u8),
            max_reads_out: 1 << qpc::log_sra_max.get(context),
            max_reads_in: 1 << qpc::log_rra_max.get(context),
            qkey: qpc::q_key.get32(context),
            drain_sigerr: qpc::drain_sigerr.is_set(context),
            // What is neither was refused when the queue pair was made.
            scatter_request: scatter_request(qpc::cs_req.get(context)).unwrap_or(0),
            scatter_response: scatter_response(qpc::cs_res.get(context)).unwrap_or(0),
        }
    }
}

impl Qp {
    /// The number that completions show: of a target's responders, the target's.
    pub fn shown_number(&self) -> u32 {
        match &self.dc {
            Dc::Responder(peer) => peer.dctn,
            _ => self.number,
        }
    }

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
