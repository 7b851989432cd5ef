// SPDX-License-Identifier: MIT OR Apache-2.0
//! The decoder of the WQEs that kernels write: the ones of `kernels/include/ibgda/wqe.h`, and no others.
//!
//! A NIC ignores some of what it does not understand. Here whatever is not understood is refused, with a [`Fault`] that
//! becomes an error completion: a request that this route would do differently, or not at all, never passes.

use ibgda_device::{
    abi::{
        IBGDA_MAX_INLINE_BYTES, IBGDA_MAX_MESSAGE_BYTES, IBGDA_RECV_WQE_BYTES, IBGDA_WQEBB_BYTES,
    },
    proxy_fault as vendor,
};

/// A slot of the send queue, and one of the receive queue.
pub(super) type Slot = [u8; IBGDA_WQEBB_BYTES as usize];
pub(super) type ReceiveSlot = [u8; IBGDA_RECV_WQE_BYTES as usize];

/// Syndromes of error completions (mlx5 PRM; `enum ibgda_status`).
pub(super) mod syndrome {
    pub(in crate::proxy) const LOCAL_LENGTH: u8 = 0x01;
    pub(in crate::proxy) const LOCAL_QP_OPERATION: u8 = 0x02;
    pub(in crate::proxy) const LOCAL_PROTECTION: u8 = 0x04;
    pub(in crate::proxy) const WR_FLUSHED: u8 = 0x05;
}

/// Opcodes.
pub(super) mod opcode {
    pub(in crate::proxy) const NOP: u8 = 0x00;
    pub(in crate::proxy) const SEND_INVAL: u8 = 0x01;
    pub(in crate::proxy) const RDMA_WRITE: u8 = 0x08;
    pub(in crate::proxy) const RDMA_WRITE_IMM: u8 = 0x09;
    pub(in crate::proxy) const SEND: u8 = 0x0a;
    pub(in crate::proxy) const SEND_IMM: u8 = 0x0b;
    pub(in crate::proxy) const RDMA_READ: u8 = 0x10;
    pub(in crate::proxy) const ATOMIC_CS: u8 = 0x11;
    pub(in crate::proxy) const ATOMIC_FA: u8 = 0x12;
    pub(in crate::proxy) const ATOMIC_MASKED_CS: u8 = 0x14;
    pub(in crate::proxy) const ATOMIC_MASKED_FA: u8 = 0x15;
    pub(in crate::proxy) const DUMP: u8 = 0x23;
}

/// Bytes of a segment.
const SEGMENT: usize = 16;
/// Marks the length of inline data.
const INLINE: u32 = 1 << 31;
/// Most inline data in a slot: of a SEND, behind the control segment and the length.
pub(super) const INLINE_BYTES: usize = 3 * SEGMENT - 4;
const _: () = assert!(IBGDA_MAX_INLINE_BYTES as usize <= INLINE_BYTES);

/// Why a request is refused: the completion's syndrome, and the vendor syndrome ([`ibgda_device::proxy_fault`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) syndrome: u8,
    pub(super) vendor: u8,
}

impl Fault {
    pub(super) const fn local(vendor: u8) -> Self {
        Self {
            syndrome: syndrome::LOCAL_QP_OPERATION,
            vendor,
        }
    }

    pub(super) const FLUSHED: Self = Self {
        syndrome: syndrome::WR_FLUSHED,
        vendor: 0,
    };
}

/// Local memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Data {
    pub(super) address: u64,
    pub(super) lkey: u32,
    pub(super) bytes: u32,
}

/// The peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Remote {
    pub(super) address: u64,
    pub(super) rkey: u32,
}

/// What is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Payload {
    Nothing,
    Memory(Data),
    Inline {
        data: [u8; INLINE_BYTES],
        bytes: u32,
    },
}

/// What goes along with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum With {
    Nothing,
    /// In network byte order.
    Immediate([u8; 4]),
    /// A key of the peer's.
    Invalidate(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    CompareSwap { compare: u64, swap: u64 },
    FetchAdd(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Nop,
    /// Read back what was written to local memory.
    Flush(Data),
    Write(Remote, Payload, With),
    Read(Remote, Option<Data>),
    Send(Payload, With),
    Atomic(Remote, Data, Operation),
}

/// A decoded WQE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) opcode: u8,
    /// Has a completion when it succeeds, too.
    pub(super) wants_cqe: bool,
    pub(super) solicited: bool,
    /// Begins after every earlier read and atomic.
    pub(super) fenced: bool,
    pub(super) action: Action,
}

impl Request {
    /// Bytes that it brings to local memory.
    pub(super) fn fetches(&self) -> u32 {
        match self.action {
            Action::Read(_, Some(data)) | Action::Atomic(_, data, _) => data.bytes,
            _ => 0,
        }
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn long(bytes: &[u8], at: usize) -> u64 {
    (u64::from(word(bytes, at)) << 32) | u64::from(word(bytes, at + 4))
}

/// What the control segment says besides: checked, whatever the opcode.
struct Control {
    opcode: u8,
    segments: usize,
    flags: u8,
    immediate: [u8; 4],
}

/// `fm_ce_se`: solicited; completion always; fence with what was read before (4), which is rdma-core's.
const SOLICITED: u8 = 1 << 1;
const COMPLETION: u8 = 3 << 2;
const COMPLETION_ALWAYS: u8 = 2 << 2;
const FENCE: u8 = 7 << 5;
const FENCE_READS: u8 = 4 << 5;
const RESERVED_FLAGS: u8 = !(SOLICITED | COMPLETION | FENCE);

fn control(slot: &Slot, index: u64, qpn: u32) -> Result<Control, Fault> {
    let [opmod, index_high, index_low, opcode] = word(slot, 0).to_be_bytes();
    let (qpn_segments, flags) = (word(slot, 4), slot[11]);
    let faults = [
        (
            u16::from_be_bytes([index_high, index_low]) != index as u16,
            vendor::INDEX,
        ),
        (qpn_segments >> 8 != qpn, vendor::QPN),
        (
            matches!(opcode, opcode::ATOMIC_MASKED_CS | opcode::ATOMIC_MASKED_FA),
            vendor::MASKED_ATOMIC,
        ),
        (
            // The signature, and the stream of a connection that this is not.
            opmod != 0 || slot[8..11] != [0; 3] || flags & RESERVED_FLAGS != 0,
            vendor::RESERVED,
        ),
        (
            ![0, COMPLETION_ALWAYS].contains(&(flags & COMPLETION))
                || ![0, FENCE_READS].contains(&(flags & FENCE)),
            vendor::FLAGS,
        ),
        (!(1..=4).contains(&(qpn_segments & 0xff)), vendor::SEGMENTS),
    ];
    if let Some((_, fault)) = faults.into_iter().find(|(wrong, _)| *wrong) {
        return Err(Fault::local(fault));
    }
    Ok(Control {
        opcode,
        segments: (qpn_segments & 0xff) as usize,
        flags,
        immediate: [slot[12], slot[13], slot[14], slot[15]],
    })
}

/// A segment of the peer's memory.
fn remote(segment: &[u8]) -> Result<Remote, Fault> {
    if word(segment, 12) != 0 {
        return Err(Fault::local(vendor::RESERVED));
    }
    Ok(Remote {
        address: long(segment, 0),
        rkey: word(segment, 8),
    })
}

/// A segment of local memory. A length of 0 would be 2 GiB to a NIC.
fn data(segment: &[u8]) -> Result<Data, Fault> {
    let bytes = word(segment, 0);
    match bytes {
        0 => Err(Fault::local(vendor::SEGMENT)),
        _ if bytes & INLINE != 0 => Err(Fault::local(vendor::SEGMENT)),
        _ if bytes > IBGDA_MAX_MESSAGE_BYTES => Err(Fault {
            syndrome: syndrome::LOCAL_LENGTH,
            vendor: 0,
        }),
        _ => Ok(Data {
            address: long(segment, 8),
            lkey: word(segment, 4),
            bytes,
        }),
    }
}

/// What is sent: nothing, local memory by one segment, or data in just as many segments as it needs.
fn payload(segments: &[u8]) -> Result<Payload, Fault> {
    if segments.is_empty() {
        return Ok(Payload::Nothing);
    }
    let length = word(segments, 0);
    if length & INLINE == 0 {
        return match segments.len() {
            SEGMENT => data(segments).map(Payload::Memory),
            _ => Err(Fault::local(vendor::SEGMENTS)),
        };
    }
    let bytes = (length & !INLINE) as usize;
    if bytes == 0 || bytes > INLINE_BYTES {
        return Err(Fault::local(vendor::SEGMENT));
    }
    if (4 + bytes).next_multiple_of(SEGMENT) != segments.len() {
        return Err(Fault::local(vendor::SEGMENTS));
    }
    let mut data = [0; INLINE_BYTES];
    data[..bytes].copy_from_slice(&segments[4..4 + bytes]);
    Ok(Payload::Inline {
        data,
        bytes: bytes as u32,
    })
}

fn atomic(opcode: u8, segments: &[u8]) -> Result<Action, Fault> {
    let (remote, data) = (remote(segments)?, data(&segments[2 * SEGMENT..])?);
    let operands = &segments[SEGMENT..];
    if remote.address % 8 != 0 {
        return Err(Fault::local(vendor::ALIGNMENT));
    }
    if data.bytes != 8 {
        return Err(Fault::local(vendor::SEGMENT));
    }
    let (swap_or_add, compare) = (long(operands, 0), long(operands, 8));
    let operation = match opcode {
        opcode::ATOMIC_CS => Operation::CompareSwap {
            compare,
            swap: swap_or_add,
        },
        _ if compare != 0 => return Err(Fault::local(vendor::RESERVED)),
        _ => Operation::FetchAdd(swap_or_add),
    };
    Ok(Action::Atomic(remote, data, operation))
}

/// The request of slot `index` of a QP.
pub(super) fn decode(slot: &Slot, index: u64, qpn: u32) -> Result<Request, Fault> {
    let control = control(slot, index, qpn)?;
    let segments = &slot[SEGMENT..control.segments * SEGMENT];
    // Segments behind the control segment that each kind of request has.
    let has = |least: usize, most: usize| match (least..=most).contains(&(control.segments - 1)) {
        true => Ok(()),
        false => Err(Fault::local(vendor::SEGMENTS)),
    };
    let immediate = With::Immediate(control.immediate);
    let action = match control.opcode {
        opcode::NOP => has(0, 0).map(|()| Action::Nop)?,
        opcode::DUMP => {
            has(1, 1)?;
            Action::Flush(data(segments)?)
        }
        opcode::RDMA_WRITE | opcode::RDMA_WRITE_IMM => {
            has(1, 3)?;
            let with = match control.opcode {
                opcode::RDMA_WRITE => With::Nothing,
                _ => immediate,
            };
            Action::Write(remote(segments)?, payload(&segments[SEGMENT..])?, with)
        }
        opcode::RDMA_READ => {
            has(1, 2)?;
            let into = &segments[SEGMENT..];
            let into = (!into.is_empty()).then(|| data(into)).transpose()?;
            Action::Read(remote(segments)?, into)
        }
        opcode::SEND => Action::Send(payload(segments)?, With::Nothing),
        opcode::SEND_IMM => Action::Send(payload(segments)?, immediate),
        opcode::SEND_INVAL => {
            let key = With::Invalidate(u32::from_be_bytes(control.immediate));
            Action::Send(payload(segments)?, key)
        }
        opcode::ATOMIC_CS | opcode::ATOMIC_FA => {
            has(3, 3)?;
            atomic(control.opcode, segments)?
        }
        _ => return Err(Fault::local(vendor::OPCODE)),
    };
    Ok(Request {
        opcode: control.opcode,
        wants_cqe: control.flags & COMPLETION != 0,
        solicited: control.flags & SOLICITED != 0,
        fenced: control.flags & FENCE != 0,
        action,
    })
}

/// The buffer of a receive.
pub(super) fn decode_receive(slot: &ReceiveSlot) -> Result<Data, Fault> {
    data(slot).map_err(|fault| match fault.syndrome {
        syndrome::LOCAL_LENGTH => fault,
        _ => Fault::local(vendor::RECEIVE),
    })
}

#[cfg(test)]
mod tests;
