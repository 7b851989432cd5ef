// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a device call returned, in words.

use crate::{
    abi::{ibgda_error, ibgda_status},
    proxy_fault,
};
use std::{error::Error, fmt};

/// The result of a device call (`ibgda_status` in C); 0 is success.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(pub ibgda_status::Type);

impl Status {
    /// Success.
    pub const OK: Self = Self(ibgda_status::IBGDA_OK);
    /// Nothing happened before the deadline.
    pub const TIMEOUT: Self = Self(ibgda_status::IBGDA_TIMEOUT);
    /// The ring had no room within the queue's patience.
    pub const QUEUE_FULL: Self = Self(ibgda_status::IBGDA_ERR_QUEUE_FULL);
    /// The broker took the NIC back.
    pub const NIC_LOST: Self = Self(ibgda_status::IBGDA_ERR_NIC_LOST);
    /// The peer refused the rkey, the range or the kind of access.
    pub const REMOTE_ACCESS: Self = Self(ibgda_status::IBGDA_ERR_REMOTE_ACCESS);
    /// Flushed behind an earlier failure.
    pub const WR_FLUSHED: Self = Self(ibgda_status::IBGDA_ERR_WR_FLUSHED);
    /// The peer answered none of the tries: it is gone, or the link is cut.
    pub const TRANSPORT_RETRY_EXCEEDED: Self =
        Self(ibgda_status::IBGDA_ERR_TRANSPORT_RETRY_EXCEEDED);

    /// `Ok` for success.
    ///
    /// # Errors
    /// The status itself when it is any other.
    pub fn ok(self) -> Result<(), Self> {
        if self == Self::OK { Ok(()) } else { Err(self) }
    }

    /// The code's name in C, what it means, and what to do about it.
    fn words(self) -> (&'static str, &'static str, &'static str) {
        match self.0 {
            ibgda_status::IBGDA_OK => ("IBGDA_OK", "success", ""),
            ibgda_status::IBGDA_TIMEOUT => (
                "IBGDA_TIMEOUT",
                "nothing completed before the deadline",
                "wait longer, or look whether the peer is alive",
            ),
            ibgda_status::IBGDA_ERR_QUEUE_FULL => (
                "IBGDA_ERR_QUEUE_FULL",
                "no slot became free within the queue's post timeout",
                "the NIC or the peer does not complete requests: poll the CQ, or see whether the peer is alive",
            ),
            ibgda_status::IBGDA_ERR_NIC_LOST => (
                "IBGDA_ERR_NIC_LOST",
                "the NIC was reset or removed, or the right to it withdrawn",
                "the status page has the reason; rebind the context and make new queues",
            ),
            ibgda_status::IBGDA_ERR_INVALID_ARGUMENT => (
                "IBGDA_ERR_INVALID_ARGUMENT",
                "a length, alignment, range or flag that no NIC would take",
                "messages have at most 2^30 bytes, inline data 1 to 28, atomics 8-byte alignment; nothing was posted",
            ),
            ibgda_status::IBGDA_ERR_INVALID_INDEX => (
                "IBGDA_ERR_INVALID_INDEX",
                "an index beyond the last reserved slot",
                "pass the index that reserving or posting gave",
            ),
            ibgda_status::IBGDA_ERR_UNKNOWN_CQE => (
                "IBGDA_ERR_UNKNOWN_CQE",
                "a completion of a kind that this queue cannot have",
                "is the CQ's memory written by something else?",
            ),
            ibgda_status::IBGDA_ERR_NO_QUEUE => (
                "IBGDA_ERR_NO_QUEUE",
                "this QP has no such queue, or its handle was not made for this use",
                "create the QP with a receive depth, as shared, or with events",
            ),
            ibgda_status::IBGDA_ERR_MODE => (
                "IBGDA_ERR_MODE",
                "the template argument says another use of the QP than its handle was made for",
                "pass the mode of the handle, and at most one of IBGDA_WARP and IBGDA_BLOCK",
            ),
            ibgda_status::IBGDA_ERR_FLAGS => (
                "IBGDA_ERR_FLAGS",
                "flags: a bit that means nothing, or IBGDA_SKIP in a single thread's call",
                "nothing was posted",
            ),
            ibgda_status::IBGDA_ERR_BYTES => (
                "IBGDA_ERR_BYTES",
                "bytes: more than 2^30, or for inline data not 1 to 28",
                "split the message; nothing was posted",
            ),
            ibgda_status::IBGDA_ERR_REMOTE => (
                "IBGDA_ERR_REMOTE",
                "remote: not aligned to the size of the atomic or signal, or the range passes the end of the address space",
                "nothing was posted",
            ),
            ibgda_status::IBGDA_ERR_RKEY => (
                "IBGDA_ERR_RKEY",
                "rkey: a value that no region has",
                "take it from the peer's region; nothing was posted",
            ),
            ibgda_status::IBGDA_ERR_LOCAL => (
                "IBGDA_ERR_LOCAL",
                "local: the range passes the end of the address space",
                "nothing was posted",
            ),
            ibgda_status::IBGDA_ERR_LKEY => (
                "IBGDA_ERR_LKEY",
                "lkey: a value that no region has",
                "take it from the region of the local address; nothing was posted",
            ),
            ibgda_status::IBGDA_ERR_LOCAL_LENGTH => (
                "IBGDA_ERR_LOCAL_LENGTH",
                "a message longer than its buffer or than the QP allows",
                "make the receive as long as what is sent to it",
            ),
            ibgda_status::IBGDA_ERR_LOCAL_QP_OPERATION => (
                "IBGDA_ERR_LOCAL_QP_OPERATION",
                "the NIC could not make sense of the WQE",
                "was its slot overwritten, or posted by hand?",
            ),
            ibgda_status::IBGDA_ERR_LOCAL_PROTECTION => (
                "IBGDA_ERR_LOCAL_PROTECTION",
                "the local key does not cover the local address range",
                "check lkey, address and length, and that the region is of the QP's context",
            ),
            ibgda_status::IBGDA_ERR_WR_FLUSHED => (
                "IBGDA_ERR_WR_FLUSHED",
                "not executed, because an earlier request failed or the QP was stopped",
                "the queue's first error says which request and why",
            ),
            ibgda_status::IBGDA_ERR_MW_BIND => (
                "IBGDA_ERR_MW_BIND",
                "memory window not bound",
                "check the window's rights",
            ),
            ibgda_status::IBGDA_ERR_BAD_RESPONSE => (
                "IBGDA_ERR_BAD_RESPONSE",
                "the peer's answer made no sense",
                "are the two QPs connected to each other, with the same packet sequence numbers?",
            ),
            ibgda_status::IBGDA_ERR_LOCAL_ACCESS => (
                "IBGDA_ERR_LOCAL_ACCESS",
                "the local region does not allow what the request does to it",
                "register the target of reads and receives with write access",
            ),
            ibgda_status::IBGDA_ERR_REMOTE_INVALID_REQUEST => (
                "IBGDA_ERR_REMOTE_INVALID_REQUEST",
                "the peer's QP does not take this kind of request, or it is longer than the receive",
                "check the peer QP's access rights and its receives",
            ),
            ibgda_status::IBGDA_ERR_REMOTE_ACCESS => (
                "IBGDA_ERR_REMOTE_ACCESS",
                "the peer refused the access: rkey unknown, range outside the region, or right not given",
                "check rkey, remote address and length, and the access the peer registered the region with",
            ),
            ibgda_status::IBGDA_ERR_REMOTE_OPERATION => (
                "IBGDA_ERR_REMOTE_OPERATION",
                "the peer failed while executing the request",
                "see the peer's errors",
            ),
            ibgda_status::IBGDA_ERR_TRANSPORT_RETRY_EXCEEDED => (
                "IBGDA_ERR_TRANSPORT_RETRY_EXCEEDED",
                "the peer did not acknowledge, retries are used up",
                "is the peer's QP connected and alive, the link up, the MTU the same on both sides?",
            ),
            ibgda_status::IBGDA_ERR_RNR_RETRY_EXCEEDED => (
                "IBGDA_ERR_RNR_RETRY_EXCEEDED",
                "the peer posted no receive in time",
                "post receives before the peer sends",
            ),
            ibgda_status::IBGDA_ERR_REMOTE_ABORTED => (
                "IBGDA_ERR_REMOTE_ABORTED",
                "the peer aborted",
                "see the peer's errors",
            ),
            other if other & !0xff != ibgda_status::IBGDA_ERR_COMPLETION => (
                "unknown status",
                "a number that no device call of this version returns",
                "is it an ibgda_status, and the header no newer than this library?",
            ),
            _ => (
                "IBGDA_ERR_COMPLETION",
                "an error completion with a syndrome that has no name",
                "see the NIC's documentation",
            ),
        }
    }

    /// The code's name in C.
    pub fn name(self) -> &'static str {
        self.words().0
    }

    /// What to do about it; empty for success.
    pub fn advice(self) -> &'static str {
        self.words().2
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, meaning, _) = self.words();
        write!(f, "{meaning} ({name}, {:#x})", self.0)
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({:#x})", self.name(), self.0)
    }
}

impl Error for Status {}

/// The name of a WQE opcode as completions carry it.
pub fn opcode_name(opcode: u8) -> &'static str {
    match opcode {
        0x00 => "NOP",
        0x01 => "SEND_INVAL",
        0x08 => "RDMA_WRITE",
        0x09 => "RDMA_WRITE_IMM",
        0x0a => "SEND",
        0x0b => "SEND_IMM",
        0x10 => "RDMA_READ",
        0x11 => "ATOMIC_CS",
        0x12 => "ATOMIC_FA",
        0x14 => "ATOMIC_MASKED_CS",
        0x15 => "ATOMIC_MASKED_FA",
        0x23 => "DUMP",
        0x25 => "UMR",
        _ => "unknown opcode",
    }
}

impl fmt::Display for ibgda_error {
    /// The latched error of a queue, in one sentence with every field in it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = Status(self.status);
        match self.kind.into() {
            _ if status == Status::OK => write!(f, "no error"),
            crate::abi::IBGDA_CQE_INVALID => write!(f, "{status}; {}", status.advice()),
            crate::abi::IBGDA_CQE_RESP_ERR => write!(
                f,
                "receive {} of QP {:#x} failed: {status}; syndrome {:#04x}, vendor syndrome {:#04x}; {}",
                self.wqe_index,
                self.qpn,
                self.syndrome,
                self.vendor_syndrome,
                advice(self)
            ),
            _ => write!(
                f,
                "{} at WQE {} of QP {:#x} failed: {status}; syndrome {:#04x}, vendor syndrome {:#04x}; {}",
                opcode_name(self.opcode),
                self.wqe_index,
                self.qpn,
                self.syndrome,
                self.vendor_syndrome,
                advice(self)
            ),
        }
    }
}

/// What to do about an error completion. What route proxy refused itself is known better than its syndrome says.
fn advice(error: &ibgda_error) -> String {
    let status = Status(error.status);
    let refused = match error.status {
        ibgda_status::IBGDA_ERR_LOCAL_QP_OPERATION => proxy_fault::text(error.vendor_syndrome),
        _ => None,
    };
    match refused {
        Some(why) => format!("on route proxy: {why}"),
        None => status.advice().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_completion_reads_as_a_sentence_with_all_its_fields() {
        let error = ibgda_error {
            wqe_index: 65_537,
            status: ibgda_status::IBGDA_ERR_REMOTE_ACCESS,
            qpn: 0x4a,
            kind: 13,
            opcode: 8,
            syndrome: 0x13,
            vendor_syndrome: 0x88,
            reserved: 0,
        };
        let text = error.to_string();
        for part in [
            "RDMA_WRITE",
            "WQE 65537",
            "QP 0x4a",
            "IBGDA_ERR_REMOTE_ACCESS",
            "0x13",
            "0x88",
            "check rkey",
        ] {
            assert!(text.contains(part), "{part:?} is missing in {text:?}");
        }
    }

    #[test]
    fn what_route_proxy_refused_is_said_in_words() {
        let error = ibgda_error {
            status: ibgda_status::IBGDA_ERR_LOCAL_QP_OPERATION,
            kind: 13,
            opcode: 0x15,
            syndrome: 2,
            vendor_syndrome: proxy_fault::MASKED_ATOMIC,
            ..Default::default()
        };
        let text = error.to_string();
        for part in ["ATOMIC_MASKED_FA", "route proxy", "ibgda_fetch_add", "0xe7"] {
            assert!(text.contains(part), "{part:?} is missing in {text:?}");
        }
        let other = ibgda_error {
            vendor_syndrome: 0x68,
            ..error
        };
        assert!(other.to_string().contains("posted by hand"), "{other}");
        let codes: Vec<u8> = (0..=u8::MAX)
            .filter(|&code| proxy_fault::text(code).is_some())
            .collect();
        assert_eq!(codes, (0xe1..=0xed).collect::<Vec<u8>>());
    }

    #[test]
    fn loss_names_no_request() {
        let error = ibgda_error {
            status: ibgda_status::IBGDA_ERR_NIC_LOST,
            kind: 15,
            ..Default::default()
        };
        assert!(!error.to_string().contains("WQE"));
        assert_eq!(ibgda_error::default().to_string(), "no error");
    }

    #[test]
    fn numbers_without_a_name_are_told_from_completions_without_one() {
        for unknown in [8, 13, 0x3f, 0x47, 0xff, 0x200, u32::MAX] {
            assert_eq!(Status(unknown).name(), "unknown status", "{unknown:#x}");
            assert!(
                Status(unknown)
                    .to_string()
                    .contains(&format!("{unknown:#x}"))
            );
        }
        assert_eq!(Status(0x1ff).name(), "IBGDA_ERR_COMPLETION");
    }

    #[test]
    fn every_named_status_has_words_of_its_own() {
        let named = (0..=7)
            .chain(0x40..=0x46)
            .chain([0x101, 0x102, 0x104, 0x105, 0x106])
            .chain(0x110..=0x116)
            .chain([0x122]);
        let mut seen = std::collections::HashSet::new();
        for code in named {
            assert!(
                seen.insert(Status(code).name()),
                "{code:#x} has no words of its own"
            );
        }
    }

    #[test]
    fn the_guide_has_every_status_in_these_words() {
        let guide = include_str!("../../docs/guide.md");
        let nameless = [Status(!0).name(), Status(0x1ff).name()];
        for code in (1..=0x122).filter(|&code| !nameless.contains(&Status(code).name())) {
            let (name, meaning, advice) = Status(code).words();
            let row = format!("| {code:#x} | `{name}` | {meaning} | {advice} |");
            assert!(guide.contains(&row), "docs/guide.md lacks {row}");
        }
    }
}
