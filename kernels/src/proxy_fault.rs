// SPDX-License-Identifier: MIT OR Apache-2.0
//! Vendor syndromes of the error completions that libibgda's route proxy makes itself, of the syndrome LOCAL_QP_OPERATION:
//! what it found wrong with a WQE. A NIC's own are others, and known to its vendor.

/// The WQE's index is not that of its slot.
pub const INDEX: u8 = 0xe1;
/// The WQE names another QP.
pub const QPN: u8 = 0xe2;
/// The number of segments does not fit the opcode, or the data.
pub const SEGMENTS: u8 = 0xe3;
/// Something that is to be 0 is not: the opcode's modifier, the signature, a reserved field.
pub const RESERVED: u8 = 0xe4;
/// Flags that the route does not know: a way to complete or to fence.
pub const FLAGS: u8 = 0xe5;
/// An opcode that verbs do not have.
pub const OPCODE: u8 = 0xe6;
/// An atomic on 4 bytes, or with masks.
pub const MASKED_ATOMIC: u8 = 0xe7;
/// A data segment's length.
pub const SEGMENT: u8 = 0xe8;
/// An atomic at an address that is not a multiple of 8.
pub const ALIGNMENT: u8 = 0xe9;
/// The doorbell record says more slots than the ring has room for.
pub const OVERRUN: u8 = 0xea;
/// The verbs library refused the request.
pub const POST: u8 = 0xeb;
/// A flush of GPU memory.
pub const GPU_FLUSH: u8 = 0xec;
/// A receive's data segment.
pub const RECEIVE: u8 = 0xed;

/// Each in words: what is wrong, and what to do.
pub(crate) fn text(vendor: u8) -> Option<&'static str> {
    Some(match vendor {
        INDEX => "the WQE's index is not its slot's: was the slot overwritten?",
        QPN => "the WQE names another QP",
        SEGMENTS => "the WQE's number of segments does not fit its opcode or its data",
        RESERVED => "a reserved field, the signature or the opcode's modifier is not 0",
        FLAGS => {
            "the WQE asks for another completion than none or always, or for another fence than that of reads"
        }
        OPCODE => "the verbs have no request like this opcode",
        MASKED_ATOMIC => {
            "the verbs have atomics on 8 bytes only, and no masked ones: use ibgda_fetch_add and ibgda_compare_swap, or another route"
        }
        SEGMENT => {
            "a data segment of 0 bytes, inline data in a place or of a length that is none, or an atomic's of not 8 bytes"
        }
        ALIGNMENT => "the atomic's remote address is not a multiple of 8",
        OVERRUN => "the doorbell record says more slots than the ring has room for",
        POST => "the verbs library refused the request, or the device is gone",
        GPU_FLUSH => {
            "IBGDA_FLUSH of GPU memory: the verbs have no request that reads it back; use another route"
        }
        RECEIVE => "the receive's data segment has no length, or is inline",
        _ => return None,
    })
}
