// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a queue pair has done, read from what its kernels write anyway: counting costs them nothing.

use ibgda_device::abi::{ibgda_cq, ibgda_qp};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Numbers of a queue pair since it was made. Each is read by itself while kernels go on, so that they need not fit
/// together.
///
/// Requests are counted in slots of the send queue: one each, but two for those that consist of two WQEs
/// (`ibgda_put_signal`, `IBGDA_FLUSH`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpCounters {
    /// Send slots that kernels have reserved. Of a shared QP a reservation that waits for room counts, and is taken
    /// back when none comes.
    pub posted: u64,
    /// Of these, the NIC was told of by the doorbell record. Of a QP in exported memory, which the host does not read,
    /// those that are known to have succeeded.
    pub told: u64,
    /// Of these, known to have succeeded: as far as a kernel has looked at the CQ.
    pub completed: u64,
    /// The others, once one of them has failed: that one, and those that were or will be flushed behind it.
    pub failed: u64,
    /// Receives posted.
    pub recv_posted: u64,
    /// Of these, known to have taken a message.
    pub recv_completed: u64,
    /// Doorbells that the library's thread has carried, on route cpu-doorbell; else 0: a GPU's own are not counted.
    pub carried: u64,
}

/// # Safety
/// The word is valid and aligned; others may write it, whole.
unsafe fn word(word: *const u64) -> u64 {
    // SAFETY: by this function's contract.
    unsafe { AtomicU64::from_ptr(word.cast_mut()) }.load(Ordering::Relaxed)
}

/// # Safety
/// As for `word`.
unsafe fn status(cq: *const ibgda_cq) -> u32 {
    // SAFETY: by this function's contract.
    unsafe { AtomicU32::from_ptr((&raw const (*cq).error.status).cast_mut()) }
        .load(Ordering::Relaxed)
}

/// Send slots told of, from the record's 16 bits: at most half of a ring of them, and so fewer than 65536, wait.
fn told(posted: u64, record: u16) -> u64 {
    posted - u64::from((posted as u16).wrapping_sub(record)).min(posted)
}

/// # Safety
/// The handle and its CQs are valid, and its record if it is to be read; kernels may use them meanwhile.
pub(crate) unsafe fn read(qp: *const ibgda_qp, shared: bool, reads_record: bool) -> QpCounters {
    /// `shared.h`: how the publisher's word of a shared QP is made.
    const TIRED: u64 = 2;
    // SAFETY: by this function's contract; what is constant of the handle is read as it is.
    unsafe {
        let (send_cq, recv_cq) = ((*qp).send_cq, (*qp).recv_cq);
        // The record before the producer, which is then not behind it.
        let record = reads_record
            .then(|| AtomicU32::from_ptr((*qp).doorbell_record.add(1)).load(Ordering::Acquire));
        let completed = word(&raw const (*send_cq).completed);
        let failed = status(send_cq) != 0;
        let publisher = word(&raw const (*qp).publisher);
        let rung = word(&raw const (*qp).rung);
        let posted = word(&raw const (*qp).producer);
        let told = match publisher {
            _ if !shared => record.map_or(completed, |record| {
                told(posted, u32::from_be(record) as u16)
            }),
            word if word & TIRED != 0 => rung,
            word => word >> 2,
        };
        QpCounters {
            posted,
            told,
            completed,
            failed: if failed {
                posted.saturating_sub(completed)
            } else {
                0
            },
            recv_posted: word(&raw const (*qp).recv_producer),
            recv_completed: if recv_cq.is_null() {
                0
            } else {
                word(&raw const (*recv_cq).completed)
            },
            carried: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr;

    #[test]
    fn the_record_says_how_many_were_told_of_across_its_16_bits() {
        for (posted, record, expected) in [
            (0, 0, 0),
            (5, 0, 0),
            (5, 3, 3),
            (65_536, 0, 65_536),
            (65_540, 65_535, 65_535),
            (1 << 40, 0xfff0, (1 << 40) - 16),
        ] {
            assert_eq!(told(posted, record), expected, "{posted}, {record}");
        }
    }

    #[test]
    fn counters_are_what_the_handle_says() {
        let mut send_cq = ibgda_cq {
            completed: 6,
            ..Default::default()
        };
        let mut recv_cq = ibgda_cq {
            completed: 2,
            ..Default::default()
        };
        let mut record = [0, 8_u32.to_be()];
        let mut qp = ibgda_qp {
            doorbell_record: record.as_mut_ptr(),
            send_cq: &raw mut send_cq,
            recv_cq: &raw mut recv_cq,
            producer: 9,
            recv_producer: 4,
            publisher: (7 << 2) | 3,
            rung: 5,
            ..Default::default()
        };
        let expected = QpCounters {
            posted: 9,
            told: 8,
            completed: 6,
            failed: 0,
            recv_posted: 4,
            recv_completed: 2,
            carried: 0,
        };
        // SAFETY: all of it is alive, here and below.
        assert_eq!(unsafe { read(&qp, false, true) }, expected);
        // SAFETY: as above; the record is not read.
        assert_eq!(unsafe { read(&qp, false, false) }.told, 6);
        // SAFETY: as above.
        assert_eq!(unsafe { read(&qp, true, true) }.told, 5, "a tired teller's");
        qp.publisher = 7 << 2;
        // SAFETY: as above.
        assert_eq!(unsafe { read(&qp, true, true) }.told, 7);

        qp.recv_cq = ptr::null_mut();
        // SAFETY: `qp` points to it, and no reference to it is used.
        unsafe { (*qp.send_cq).error.status = 0x113 };
        // SAFETY: as above.
        let counters = unsafe { read(&qp, false, true) };
        assert_eq!((counters.failed, counters.recv_completed), (3, 0));
    }
}
