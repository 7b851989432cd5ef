// SPDX-License-Identifier: MIT OR Apache-2.0
//! Completions as a NIC writes them, for the poller of `kernels/include/ibgda/poll.h`.

use super::wqe::Fault;
use crate::hub::Arrivals;
use ibgda_device::abi::IBGDA_CQE_BYTES;
use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

/// 64-bit words of a completion.
const WORDS: usize = IBGDA_CQE_BYTES as usize / 8;

/// A completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cqe {
    /// `IBGDA_CQE_*`.
    pub(super) kind: u8,
    /// Of the request's WQE; 0 of receives.
    pub(super) opcode: u8,
    /// Which request: the low 16 bits are told.
    pub(super) index: u64,
    /// Bytes that came: of receives, reads, atomics.
    pub(super) bytes: u32,
    /// Or a key that was invalidated, in network byte order.
    pub(super) immediate: [u8; 4],
    pub(super) fault: Option<Fault>,
}

impl Cqe {
    /// As it lies in memory, of the lap that `owner` (0 or 1) says.
    fn image(&self, qpn: u32, owner: u8) -> [u64; WORDS] {
        let mut bytes = [0; IBGDA_CQE_BYTES as usize];
        bytes[36..40].copy_from_slice(&self.immediate);
        bytes[44..48].copy_from_slice(&self.bytes.to_be_bytes());
        if let Some(fault) = self.fault {
            (bytes[54], bytes[55]) = (fault.vendor, fault.syndrome);
        }
        bytes[56..60].copy_from_slice(&qpn.to_be_bytes());
        bytes[56] = self.opcode;
        bytes[60..62].copy_from_slice(&(self.index as u16).to_be_bytes());
        bytes[63] = (self.kind << 4) | owner;
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_ne_bytes(bytes.try_into().expect("8 bytes"));
        }
        words
    }
}

/// The writing end of a CQ.
#[derive(Debug)]
pub(super) struct CqWriter {
    ring: *mut u64,
    depth: u32,
    /// The poller's consumer index, big-endian, 24 bits.
    record: *const AtomicU32,
    qpn: u32,
    written: u64,
    /// Each completion takes the place of the one before.
    collapsed: bool,
    /// Of a CQ with events: each completion is one, armed or not, since an event too many is only a look too many.
    arrivals: Option<Arc<Arrivals>>,
}

// SAFETY: ring and record are valid as long as the writer is used (`new`), and only read and written by atomics.
unsafe impl Send for CqWriter {}

impl CqWriter {
    /// # Safety
    /// `depth` completions at `ring`, a power of two, and the record are valid and aligned to 8 bytes as long as the writer
    /// is used; nobody else writes the ring.
    pub(super) unsafe fn new(ring: *mut u8, depth: u32, record: *const u32, qpn: u32) -> Self {
        Self {
            ring: ring.cast(),
            depth,
            record: record.cast(),
            qpn,
            written: 0,
            collapsed: false,
            arrivals: None,
        }
    }

    /// Counts completions there too.
    pub(super) fn counting(self, arrivals: Option<Arc<Arrivals>>) -> Self {
        Self { arrivals, ..self }
    }

    /// Keeps the last completion only.
    pub(super) fn collapsed(self, collapsed: bool) -> Self {
        Self { collapsed, ..self }
    }

    /// Whether there is a place that the poller has taken the completion out of. A correct poller's queue always has: it
    /// is as deep as the work queue.
    pub(super) fn has_room(&self) -> bool {
        // SAFETY: by the contract of `new`. What the poller has taken is known before its place is written again.
        let consumer = u32::from_be(unsafe { &*self.record }.load(Ordering::Acquire));
        self.collapsed || (self.written as u32).wrapping_sub(consumer) & 0xff_ffff < self.depth
    }

    /// Writes the next one, for which there must be room: first its 56 bytes, then the 8 by which it is known to be there.
    pub(super) fn write(&mut self, cqe: &Cqe) {
        let (mask, lap) = (
            u64::from(self.depth) - 1,
            u64::from(self.depth).trailing_zeros(),
        );
        let (slot, owner) = match self.collapsed {
            true => (0, 0),
            false => (
                (self.written & mask) as usize,
                (self.written >> lap) as u8 & 1,
            ),
        };
        let words = cqe.image(self.qpn, owner);
        // SAFETY: by the contract of `new`, inside the ring.
        let place = unsafe { self.ring.add(slot * WORDS) };
        for (at, word) in words.into_iter().enumerate() {
            let order = match at {
                // With the release go the data, which was there before the verbs completion was.
                _ if at == WORDS - 1 => Ordering::Release,
                _ => Ordering::Relaxed,
            };
            // SAFETY: as above.
            unsafe { AtomicU64::from_ptr(place.add(at)) }.store(word, order);
        }
        self.written += 1;
        if let Some(arrivals) = &self.arrivals {
            arrivals.count();
        }
    }
}

/// The syndrome of a verbs completion's status: what libmlx5 makes a status of, backwards. `None`: success.
pub(super) fn syndrome_of(status: ibgda_verbs_sys::ibv_wc_status::Type) -> Option<u8> {
    use ibgda_verbs_sys::ibv_wc_status as wc;
    Some(match status {
        wc::IBV_WC_SUCCESS => return None,
        wc::IBV_WC_LOC_LEN_ERR => 0x01,
        wc::IBV_WC_LOC_QP_OP_ERR => 0x02,
        wc::IBV_WC_LOC_PROT_ERR => 0x04,
        wc::IBV_WC_WR_FLUSH_ERR => 0x05,
        wc::IBV_WC_MW_BIND_ERR => 0x06,
        wc::IBV_WC_BAD_RESP_ERR => 0x10,
        wc::IBV_WC_LOC_ACCESS_ERR => 0x11,
        wc::IBV_WC_REM_INV_REQ_ERR => 0x12,
        wc::IBV_WC_REM_ACCESS_ERR => 0x13,
        wc::IBV_WC_REM_OP_ERR => 0x14,
        wc::IBV_WC_RETRY_EXC_ERR => 0x15,
        wc::IBV_WC_RNR_RETRY_EXC_ERR => 0x16,
        wc::IBV_WC_REM_ABORT_ERR => 0x22,
        // None that an RC QP of such requests can have; it is an error all the same.
        _ => 0xff,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ibgda_device::abi::{IBGDA_CQE_REQ, IBGDA_CQE_REQ_ERR, IBGDA_CQE_RESP_SEND_IMM, ibgda_cq};
    use ibgda_test_kernels::Poller;

    const DEPTH: u32 = 4;

    /// A ring in memory, with the poller that kernels have.
    struct Ring {
        memory: Box<[u64; DEPTH as usize * WORDS]>,
        record: Box<[u32; 2]>,
        cq: Box<ibgda_cq>,
    }

    impl Ring {
        fn new() -> Self {
            let mut ring = Self {
                memory: Box::new([u64::from_ne_bytes([0xf0; 8]); DEPTH as usize * WORDS]),
                record: Box::new([0; 2]),
                cq: Box::default(),
            };
            ring.cq.ring = ring.memory.as_ptr().cast();
            ring.cq.doorbell_record = ring.record.as_mut_ptr();
            ring.cq.depth = DEPTH;
            ring
        }

        fn writer(&mut self) -> CqWriter {
            let (ring, record) = (self.memory.as_mut_ptr(), self.record.as_ptr());
            // SAFETY: both are dropped after the writer, at the end of each test.
            unsafe { CqWriter::new(ring.cast(), DEPTH, record, 0x4a5b6c) }
        }
    }

    #[test]
    fn the_poller_of_the_device_header_reads_what_is_written() {
        let mut ring = Ring::new();
        let mut writer = ring.writer();
        // SAFETY: the ring outlives the poller.
        let mut poller = unsafe { Poller::new(&raw mut *ring.cq) };
        assert_eq!(poller.poll(0).0, ibgda_device::Status::TIMEOUT);
        // Three laps, and more than 65536 requests apart.
        for index in (0..3 * u64::from(DEPTH)).map(|n| n * 7_001) {
            let receive = Cqe {
                kind: IBGDA_CQE_RESP_SEND_IMM as u8,
                opcode: 0,
                index,
                bytes: 0x1234_5678,
                immediate: 0xdead_beef_u32.to_be_bytes(),
                fault: None,
            };
            writer.write(&receive);
            let (status, cqe) = poller.poll(0);
            assert_eq!(status, ibgda_device::Status::OK);
            assert_eq!(
                (cqe.wqe_index, cqe.qpn, cqe.byte_count, cqe.immediate),
                (index, 0x4a5b6c, 0x1234_5678, 0xdead_beef)
            );
            assert_eq!(u32::from(cqe.kind), IBGDA_CQE_RESP_SEND_IMM);
            assert_eq!(poller.poll(0).0, ibgda_device::Status::TIMEOUT);
        }
        let failed = Cqe {
            kind: IBGDA_CQE_REQ_ERR as u8,
            opcode: 0x12,
            index: 11 * 7_001 + 1,
            fault: Some(Fault {
                syndrome: 0x13,
                vendor: 0x88,
            }),
            ..Cqe::default()
        };
        writer.write(&failed);
        let (status, cqe) = poller.poll(0);
        assert_eq!(status, ibgda_device::Status::REMOTE_ACCESS);
        assert_eq!(
            (cqe.wqe_index, cqe.opcode, cqe.syndrome, cqe.vendor_syndrome),
            (failed.index, 0x12, 0x13, 0x88)
        );
    }

    #[test]
    fn a_full_ring_has_no_room_until_the_poller_takes_one() {
        let mut ring = Ring::new();
        let mut writer = ring.writer();
        // SAFETY: as above.
        let mut poller = unsafe { Poller::new(&raw mut *ring.cq) };
        for index in 0..100 {
            let cqe = Cqe {
                kind: IBGDA_CQE_REQ as u8,
                index,
                ..Cqe::default()
            };
            if index >= DEPTH.into() {
                assert!(!writer.has_room(), "before {index}");
                assert_eq!(poller.poll(0).1.wqe_index, index - u64::from(DEPTH));
            }
            assert!(writer.has_room(), "at {index}");
            writer.write(&cqe);
        }
    }

    #[test]
    fn only_success_has_no_syndrome_and_the_others_are_those_of_the_header() {
        use ibgda_device::Status;
        for status in 0..=23 {
            let Some(syndrome) = syndrome_of(status) else {
                assert_eq!(status, 0);
                continue;
            };
            let named = Status(0x100 | u32::from(syndrome)).name() != "IBGDA_ERR_COMPLETION";
            assert!(named || syndrome == 0xff, "{status}: {syndrome:#x}");
        }
    }
}
