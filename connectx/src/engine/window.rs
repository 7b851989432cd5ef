// SPDX-License-Identifier: MIT OR Apache-2.0
//! Blocks of a send queue, read several at a time: they come from another processor's cache, one by one if asked for so.

use crate::ifc::wqe::BASIC_BLOCK;
use crate::objects::device::Host;
use crate::objects::qp::WorkQueues;

/// Most blocks read at once.
const BLOCKS: usize = 8;

/// Posted blocks that have been read. To be cleared before each look at the queue: it remembers nothing between them.
#[derive(Debug)]
pub struct Window {
    first: u16,
    count: u16,
    raw: [u8; BLOCKS * BASIC_BLOCK],
}

impl Default for Window {
    fn default() -> Self {
        Self {
            first: 0,
            count: 0,
            raw: [0; BLOCKS * BASIC_BLOCK],
        }
    }
}

impl Window {
    /// Forgets what has been read.
    pub fn clear(&mut self) {
        self.count = 0;
    }

    /// Takes blocks that came by another way.
    pub fn fill(&mut self, index: u16, bytes: &[u8]) {
        let len = bytes.len().min(self.raw.len());
        self.raw[..len].copy_from_slice(&bytes[..len]);
        (self.first, self.count) = (index, (len / BASIC_BLOCK) as u16);
    }

    /// The block with an index. It and the `posted - 1` after it are posted. `None` if it cannot be reached.
    pub fn block(
        &mut self,
        host: &Host,
        queues: &WorkQueues,
        index: u16,
        posted: u16,
    ) -> Option<&[u8]> {
        let ahead = index.wrapping_sub(self.first);
        if ahead < self.count {
            let at = usize::from(ahead) * BASIC_BLOCK;
            return self.raw.get(at..at + BASIC_BLOCK);
        }
        self.count = 0;
        let size = 1u64 << queues.log_send?;
        let slot = u64::from(index) & (size - 1);
        let offset = queues.send_start + slot * BASIC_BLOCK as u64;
        let (addr, left) = queues.buffer.locate(offset)?;
        // A block may lie across two pages only when the buffer starts unaligned to blocks.
        let whole = (left / BASIC_BLOCK as u64).min(size - slot);
        let count = whole.min(u64::from(posted.max(1))).min(BLOCKS as u64);
        let into = self.raw.get_mut(..count as usize * BASIC_BLOCK)?;
        if count == 0 || host.read(addr, into).is_err() {
            return None;
        }
        (self.first, self.count) = (index, count as u16);
        self.raw.get(..BASIC_BLOCK)
    }
}
