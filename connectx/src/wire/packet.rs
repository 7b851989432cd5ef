// SPDX-License-Identifier: MIT OR Apache-2.0
//! Packets of the InfiniBand transport, decoded. What a header says is a field here; the names are those of the
//! InfiniBand Architecture Specification, volume 1, chapter 9.

use super::payload::Payload;

/// Place of a packet in its message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// First or only packet.
    pub first: bool,
    /// Last or only packet.
    pub last: bool,
}

/// RDMA extended transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reth {
    /// Remote address.
    pub address: u64,
    /// Remote key.
    pub rkey: u32,
    /// Length of the message.
    pub len: u32,
}

/// What rides on the last packet of a SEND or WRITE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rider {
    /// Nothing.
    None,
    /// Immediate data.
    Immediate(u32),
    /// A key of the receiver to be invalidated.
    Invalidate(u32),
}

/// Reasons for a negative acknowledgement (AETH syndrome `011xxxxx`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Nak {
    Sequence,
    InvalidRequest,
    RemoteAccess,
    RemoteOperation,
}

/// What an acknowledgement says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Everything up to the packet's PSN is done.
    Ack,
    /// No receive WQE: try again after the time that the code stands for.
    ReceiverNotReady(u8),
    /// Refused.
    Nak(Nak),
}

/// Atomic operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Atomic {
    CompareSwap {
        compare: u64,
        compare_mask: u64,
        swap: u64,
        swap_mask: u64,
    },
    /// Adds without carry across the bits that `boundary` marks.
    FetchAdd { add: u64, boundary: u64 },
}

impl Atomic {
    /// Whether it is one of the two that every adapter has, with no masks.
    pub fn is_plain(self) -> bool {
        match self {
            Self::CompareSwap {
                compare_mask,
                swap_mask,
                ..
            } => compare_mask == u64::MAX && swap_mask == u64::MAX,
            Self::FetchAdd { boundary, .. } => boundary == 0,
        }
    }
}

/// What a packet does.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Kind {
    Send {
        position: Position,
        rider: Rider,
    },
    Write {
        position: Position,
        reth: Option<Reth>,
        rider: Rider,
    },
    ReadRequest(Reth),
    AtomicRequest {
        address: u64,
        rkey: u32,
        operation: Atomic,
        /// Bytes of the operand: 8, or 4 of an extended atomic.
        len: u32,
    },
    ReadResponse {
        position: Position,
    },
    AtomicResponse {
        original: u64,
    },
    Acknowledge(Verdict),
}

/// Datagram extended transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deth {
    /// Queue key.
    pub qkey: u32,
    /// Queue pair of the sender.
    pub source_qpn: u32,
}

/// Header of the dynamically connected transport. Its layout is not public; this is what must be in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dceth {
    /// Initiator: in a request the sender, in an answer the receiver.
    pub initiator: u32,
    /// Number of the connection, which grows with every one that a function makes.
    pub session: u64,
    /// Access key, in requests.
    pub access_key: u64,
}

/// Global route header, as far as the model uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Grh {
    pub source: [u8; 16],
    pub destination: [u8; 16],
    pub traffic_class: u8,
    pub flow_label: u32,
    pub hop_limit: u8,
}

/// Transport service of a packet, the upper bits of the BTH opcode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Transport {
    Rc,
    Uc,
    Ud,
    Xrc,
    Dc,
}

/// A packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    /// Local identifier of the sender.
    pub source_lid: u16,
    /// Local identifier of the receiver.
    pub destination_lid: u16,
    /// Service level.
    pub sl: u8,
    /// Route header, if there is one.
    pub grh: Option<Grh>,
    /// Service.
    pub transport: Transport,
    /// Partition key.
    pub pkey: u16,
    /// Receiving queue pair.
    pub qpn: u32,
    /// Sequence number, 24 bits.
    pub psn: u32,
    /// Sequence numbers that it takes: over an ideal link one packet stands for several of an MTU each.
    pub span: u32,
    /// An acknowledgement is asked for.
    pub ack_request: bool,
    /// Solicited event.
    pub solicited: bool,
    /// Of a datagram.
    pub deth: Option<Deth>,
    /// Of a dynamic connection.
    pub dceth: Option<Dceth>,
    /// XRC: shared receive queue at the receiver.
    pub xrc_srqn: Option<u32>,
    /// What it does.
    pub kind: Kind,
    /// Data.
    pub payload: Payload,
}

impl Packet {
    /// Whether it answers a request.
    pub fn is_answer(&self) -> bool {
        matches!(
            self.kind,
            Kind::ReadResponse { .. } | Kind::AtomicResponse { .. } | Kind::Acknowledge(_)
        )
    }

    /// Whether it begins a message.
    pub fn begins(&self) -> bool {
        match self.kind {
            Kind::Send { position, .. } | Kind::Write { position, .. } => position.first,
            Kind::ReadRequest(_) | Kind::AtomicRequest { .. } => true,
            _ => false,
        }
    }

    /// Sequence number after it.
    pub fn end_psn(&self) -> u32 {
        psn::add(self.psn, self.span)
    }
}

/// Arithmetic on sequence numbers, which wrap at 24 bits.
pub mod psn {
    /// Mask of a sequence number.
    pub const MASK: u32 = 0xff_ffff;

    /// `psn` moved forward by `n`.
    #[inline]
    pub fn add(psn: u32, n: u32) -> u32 {
        psn.wrapping_add(n) & MASK
    }

    /// How far `a` is after `b`; negative if before.
    #[inline]
    pub fn distance(a: u32, b: u32) -> i32 {
        (((a.wrapping_sub(b)) << 8) as i32) >> 8
    }
}

#[cfg(test)]
mod tests {
    use super::psn::{add, distance};

    #[test]
    fn sequence_numbers_wrap_at_24_bits() {
        assert_eq!(add(0xff_ffff, 1), 0);
        assert_eq!(distance(0, 0xff_ffff), 1);
        assert_eq!(distance(0xff_ffff, 0), -1);
        assert_eq!(distance(5, 5), 0);
        assert_eq!(distance(0x80_0000, 0), -0x80_0000);
    }
}
