// SPDX-License-Identifier: MIT OR Apache-2.0
//! Event queues, completion queues, shared receive queues.

use super::memory::Buffer;
use super::table::Weigh;
use crate::engine::completion::Completion;

/// An event queue.
#[derive(Debug)]
pub struct Eq {
    /// Completion queues that report to it.
    pub refs: u32,
    /// Where entries go.
    pub buffer: Buffer,
    /// Log2 of the number of entries.
    pub log_size: u32,
    /// UAR page with its doorbell.
    pub uar_page: u32,
    /// MSI-X vector.
    pub vector: u16,
    /// Event types it takes, a bit each.
    pub mask: [u64; 4],
    /// Entries written.
    pub producer: u32,
    /// Consumer index as last told, 24 bits.
    pub consumer: u32,
    /// Interrupt at the next entry.
    pub armed: bool,
    /// Entries were lost.
    pub overrun: bool,
    /// An entry could not be written: nothing more is.
    pub write_failed: bool,
    /// The context as it was given, for QUERY_EQ.
    pub context: Vec<u8>,
}

impl Eq {
    /// Whether the queue takes events of a type.
    pub fn takes(&self, event_type: u8) -> bool {
        self.mask
            .get(usize::from(event_type >> 6))
            .is_some_and(|word| (word >> (event_type & 63)) & 1 == 1)
    }
}

/// What a completion queue waits for before it sends an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arm {
    /// Nothing.
    Off,
    /// Any completion.
    Any,
    /// A solicited completion or an error.
    Solicited,
}

/// State of a completion queue, `MLX5_CQC_STATUS_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum CqStatus {
    /// Works.
    Ok = 0x0,
    /// An entry was written that nobody had room for.
    Overflow = 0x9,
    /// Its memory could not be reached.
    WriteFail = 0xa,
}

/// What the mini CQEs of a compressed session hold beside the byte count, `cqc.mini_cqe_res_format`. Hash and checksum are
/// those of Ethernet's packets: InfiniBand's have none, and zeros here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MiniFormat {
    /// The hash.
    Hash,
    /// The checksum.
    Checksum,
    /// The checksum, and the WQE's counter, which is the title's and those after it in the other formats.
    ChecksumStride,
}

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    /// Owner.
    pub uid: u16,
    /// Queue pairs and shared receive queues that complete to it.
    pub refs: u32,
    /// Where entries go.
    pub buffer: Buffer,
    /// Bus address of the doorbell record.
    pub dbr: u64,
    /// Log2 of the number of entries.
    pub log_size: u32,
    /// Bytes of an entry: 64 or 128.
    pub entry: u64,
    /// The half of a 128-byte entry that a completion does not need is zeroed.
    pub padded: bool,
    /// Every entry overwrites the first.
    pub collapsed: bool,
    /// Compresses completions of receives.
    pub compression: Option<MiniFormat>,
    /// Completions of the session at hand, not yet written.
    pub session: Vec<Completion>,
    /// Entries may overwrite ones not consumed.
    pub overrun_ignore: bool,
    /// Event queue.
    pub eqn: u32,
    /// UAR page with its doorbell.
    pub uar_page: u32,
    /// Entries written.
    pub producer: u32,
    /// Consumer index as last read from the doorbell record, 24 bits.
    pub consumer: u32,
    /// What it waits for.
    pub arm: Arm,
    /// The word that armed it last.
    pub arm_word: Option<u32>,
    /// Producer index after the last solicited completion or error.
    pub last_solicited: u32,
    /// Producer index at the last event.
    pub last_notified: u32,
    /// State.
    pub status: CqStatus,
    /// The context as it was given, for QUERY_CQ.
    pub context: Vec<u8>,
    /// UMEMs that it lies in, and its doorbell record.
    pub umems: Vec<u32>,
}

/// Where the entries of a receive queue come from and how they are linked.
#[derive(Debug)]
pub struct Srq {
    /// Owner.
    pub uid: u16,
    /// Queue pairs that receive from it.
    pub refs: u32,
    /// Kind of object: only the command group that made it may touch it.
    pub kind: SrqKind,
    /// Where entries are.
    pub buffer: Buffer,
    /// Bus address of the doorbell record.
    pub dbr: u64,
    /// Log2 of the number of entries.
    pub log_size: u32,
    /// Log2 of the bytes of an entry.
    pub log_stride: u32,
    /// Protection domain.
    pub pd: u32,
    /// Completion queue of an XRC SRQ.
    pub cqn: Option<u32>,
    /// XRC domain of an XRC SRQ.
    pub xrcd: Option<u32>,
    /// User index in completions of an XRC SRQ.
    pub user_index: u32,
    /// Entry to be used next: entries are linked by their first segment.
    pub head: u16,
    /// Entries used.
    pub consumed: u16,
    /// Event when fewer entries than this are left; 0 for none.
    pub limit: u16,
    /// An error that stops it.
    pub error: bool,
    /// The context as it was given, for queries.
    pub context: Vec<u8>,
    /// UMEMs that it lies in.
    pub umems: Vec<u32>,
}

/// Kinds of shared receive queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SrqKind {
    /// XRC SRQ: completes to its own CQ.
    Xrc,
    /// Receive memory pool: completes to the CQ of the QP that receives.
    Rmp,
}

impl Weigh for Eq {
    fn entries(&self) -> usize {
        self.buffer.entries()
    }
}

impl Weigh for Cq {
    fn entries(&self) -> usize {
        self.buffer.entries()
    }
}

impl Weigh for Srq {
    fn entries(&self) -> usize {
        self.buffer.entries()
    }
}
