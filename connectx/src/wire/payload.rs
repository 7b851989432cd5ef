// SPDX-License-Identifier: MIT OR Apache-2.0
//! Data of packets: their own, or still where its sender has it.

/// Data of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Payload {
    /// Bytes on the wire.
    Bytes(Vec<u8>),
    /// Bytes in the memory of the function that sends: an ideal link takes no time, so that they can go from there to the
    /// receiver's memory at once.
    Lent {
        /// Whose they are.
        lender: Lender,
        /// How many.
        len: usize,
    },
}

/// Where lent data is. It is looked up when the packet is delivered, so that nothing is read that was taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lender {
    /// Bytes from `offset` on of what a WQE in flight sends.
    Request {
        /// Queue pair.
        qpn: u32,
        /// [`Flight`](crate::engine::requester) of the WQE.
        flight: u64,
        /// First byte.
        offset: usize,
    },
    /// What a READ asked for.
    Response {
        /// Queue pair that answers.
        qpn: u32,
        /// Protection domain of the READ.
        pd: u32,
        /// Key.
        rkey: u32,
        /// First byte.
        address: u64,
    },
}

impl Payload {
    /// No data.
    pub const NONE: Self = Self::Bytes(Vec::new());

    /// Bytes of data.
    pub fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Lent { len, .. } => *len,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
