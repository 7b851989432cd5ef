// SPDX-License-Identifier: MIT OR Apache-2.0
//! What happens to a context without being asked for: what it is, why, and what to do.

use ibgda_device::abi::ibgda_error;
use ibgda_uapi::{
    IBGDA_EVENT_DOORBELL, IBGDA_EVENT_LOST, IBGDA_EVENT_OVERFLOW, IBGDA_EVENT_RECOVERED,
    ibgda_event,
};
use ibgda_verbs_sys::ibv_event_type as verbs;
use nix::time::{ClockId, clock_gettime};
use std::fmt;

use crate::{broker::reason_text, hub::kind};

/// What kind of event, for programs; [`AsyncEvent`]'s text is for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEventKind {
    /// The NIC was reset or taken away, or the right to it withdrawn: everything made from the context is dead.
    NicLost {
        /// The generation that ended.
        generation: u32,
        /// `IBGDA_REASON_*` of the ioctl ABI.
        reason: u32,
    },
    /// The NIC is back, and waits for [`Context::rebind`](crate::Context::rebind).
    NicRecovered {
        /// The generation that rebinding begins.
        generation: u32,
    },
    /// One doorbell page was taken back: its UAR was destroyed, not by this library.
    DoorbellRevoked {
        /// The broker's handle of it.
        handle: u32,
    },
    /// More happened than the broker keeps records of.
    EventsDropped {
        /// Records that were dropped.
        count: u32,
    },
    /// The state of a port changed.
    Port {
        /// The port, from 1.
        port: u8,
        /// Whether it is active now.
        active: bool,
    },
    /// Any other asynchronous event of the verbs device.
    Verbs {
        /// `enum ibv_event_type`.
        event: u32,
    },
    /// The NIC told of a queue pair, made while the context had a callback, or on route proxy.
    QueuePair {
        /// The QP.
        qpn: u32,
        /// What happened to it.
        event: QueuePairEvent,
    },
    /// The NIC told that it puts no more completions into a CQ, made while the context had a callback, or with events.
    CompletionQueue {
        /// The CQ.
        cqn: u32,
        /// 1 overrun, 2 its memory cannot be written.
        syndrome: u8,
    },
    /// A queue pair failed: the first error that a kernel found in one of its CQs. The loss of the NIC, of which
    /// kernels learn in the same way, is told once for all queues, as [`AsyncEventKind::NicLost`].
    QueueError {
        /// The CQ.
        cqn: u32,
        /// The record: status, QPN, WQE index, opcode, syndromes.
        error: ibgda_error,
    },
}

/// What the NIC says of a queue pair without being asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QueuePairEvent {
    /// It uses the alternate path now.
    PathMigrated,
    /// It was to use the alternate path, and could not.
    PathMigrationFailed,
    /// Its queue cannot be read, or its CQ cannot be written: local catastrophic error.
    LocalCatastrophic,
    /// A peer's request was none that this QP could answer.
    RequestError,
    /// A peer's request was for memory, or of a kind, that it may not use.
    AccessError,
}

/// Something that happened. Its `Display` is what happened, why, and what to do.
#[derive(Clone, Debug)]
pub struct AsyncEvent {
    kind: AsyncEventKind,
    what: String,
    why: String,
    advice: String,
    time_ns: u64,
}

impl AsyncEvent {
    /// What kind of event.
    pub fn kind(&self) -> AsyncEventKind {
        self.kind
    }

    /// What happened, with its values.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// Why, as far as known; may be empty.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// What to do about it; may be empty.
    pub fn advice(&self) -> &str {
        &self.advice
    }

    /// When, on CLOCK_MONOTONIC, ns: of the broker's events when it happened, of others when it was seen.
    pub fn time_ns(&self) -> u64 {
        self.time_ns
    }

    fn now(
        kind: AsyncEventKind,
        what: impl Into<String>,
        why: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self {
            kind,
            what: what.into(),
            why: why.into(),
            advice: advice.into(),
            time_ns: now_ns(),
        }
    }

    /// A record of the broker.
    pub(crate) fn of_broker(record: &ibgda_event) -> Self {
        const REBIND: &str =
            "drop what was made from the context, rebind it, and make new queues and regions";
        let generation = record.generation;
        let event = match record.type_ {
            IBGDA_EVENT_LOST => Self::now(
                AsyncEventKind::NicLost {
                    generation,
                    reason: record.reason,
                },
                format!("the NIC of generation {generation} is lost"),
                reason_text(record.reason),
                REBIND,
            ),
            IBGDA_EVENT_RECOVERED => Self::now(
                AsyncEventKind::NicRecovered { generation },
                "the NIC is back",
                format!("it was lost by: {}", reason_text(record.reason)),
                REBIND,
            ),
            IBGDA_EVENT_DOORBELL => Self::now(
                AsyncEventKind::DoorbellRevoked {
                    handle: record.handle,
                },
                format!("doorbell {:#x} was taken back", record.handle),
                reason_text(record.reason),
                "its QP cannot be rung any more: make another",
            ),
            IBGDA_EVENT_OVERFLOW => Self::now(
                AsyncEventKind::EventsDropped {
                    count: record.handle,
                },
                format!("{} events of the broker were dropped", record.handle),
                "more happened than it keeps records of",
                "look at the state of the context",
            ),
            other => Self::now(
                AsyncEventKind::EventsDropped { count: 1 },
                format!("an event of the broker of type {other} was not understood"),
                "the module is newer than this library",
                "look at the state of the context",
            ),
        };
        Self {
            time_ns: record.time_ns,
            ..event
        }
    }

    /// An asynchronous event of the verbs device `device`, of a port or with port 0; `name` is libibverbs' for it.
    pub(crate) fn of_verbs(device: &str, event: u32, port: u8, name: &str) -> Self {
        let port_state = |active| AsyncEventKind::Port { port, active };
        let other = AsyncEventKind::Verbs { event };
        let port_name = format!("port {port} of {device}");
        match event {
            verbs::IBV_EVENT_PORT_ERR => Self::now(
                port_state(false),
                format!("{port_name} is down"),
                "its link was lost",
                "requests retry for a while (ack_timeout, retry_count): is the cable in, and the switch up?",
            ),
            verbs::IBV_EVENT_PORT_ACTIVE => Self::now(
                port_state(true),
                format!("{port_name} is active"),
                "its link is up, and the subnet manager has configured it",
                "QPs that ran out of retries stay in error: make new ones",
            ),
            verbs::IBV_EVENT_LID_CHANGE | verbs::IBV_EVENT_GID_CHANGE => Self::now(
                other,
                format!("{port_name} has another address ({name})"),
                "the subnet manager gave it one",
                "peers cannot reach its QPs any more: open the context again, and exchange addresses",
            ),
            verbs::IBV_EVENT_DEVICE_FATAL => Self::now(
                other,
                format!("{device} failed ({name})"),
                "the NIC or its driver reported an error from which it must be reset, or it is being removed",
                "the loss of the NIC is reported too; rebind the context then",
            ),
            _ => Self::now(
                other,
                match port {
                    0 => format!("{device}: {name}"),
                    _ => format!("{device}, port {port}: {name}"),
                },
                format!("asynchronous event {event} of the verbs device"),
                "see ibv_get_async_event(3)",
            ),
        }
    }

    /// Whether it is the failure of the whole device, as libibverbs tells it.
    pub(crate) fn is_device_failure(&self) -> bool {
        let event = verbs::IBV_EVENT_DEVICE_FATAL;
        self.kind == AsyncEventKind::Verbs { event }
    }

    /// An event of the NIC's about the QP or CQ of this number; `None` for a type that nobody subscribes to.
    pub(crate) fn of_object(number: u32, kind: u8, syndrome: u8) -> Option<Self> {
        const REMAKE: &str =
            "destroy the QP, make another and connect it, when the cause is mended";
        let (event, what, why, advice) = match kind {
            kind::CQ_ERROR => {
                return Some(Self::now(
                    AsyncEventKind::CompletionQueue {
                        cqn: number,
                        syndrome,
                    },
                    format!("CQ {number:#x} takes no more completions"),
                    match syndrome {
                        1 => "it overran: more completed than it has entries".to_owned(),
                        2 => "the NIC cannot write its memory".to_owned(),
                        other => format!("syndrome {other:#x}"),
                    },
                    "destroy it and its QP, and make others",
                ));
            }
            kind::PATH_MIGRATED => (
                QueuePairEvent::PathMigrated,
                "uses its alternate path",
                "the primary path failed, or migration was asked for",
                "",
            ),
            kind::PATH_MIGRATION_FAILED => (
                QueuePairEvent::PathMigrationFailed,
                "cannot use its alternate path",
                "the request to migrate did not fit",
                "",
            ),
            kind::WQ_CATASTROPHIC => (
                QueuePairEvent::LocalCatastrophic,
                "failed: local catastrophic error",
                "the NIC could not read its queue, or write its completions",
                REMAKE,
            ),
            kind::WQ_INVALID_REQUEST => (
                QueuePairEvent::RequestError,
                "refused a request of its peer",
                "it is of a kind, length or alignment that the QP does not take (WQ_INVAL_REQ_ERROR)",
                "is each QP connected by the other's own address, of the same MTU? make new ones: both ends are in error",
            ),
            kind::WQ_ACCESS => (
                QueuePairEvent::AccessError,
                "refused a request of its peer",
                "it touches what its rkey, or the access of the QP, does not permit (WQ_ACCESS_ERROR)",
                "see the rkey, address and length that the peer used; make new QPs: both ends are in error",
            ),
            _ => return None,
        };
        Some(Self::now(
            AsyncEventKind::QueuePair { qpn: number, event },
            format!("QP {number:#x} {what}"),
            why,
            advice,
        ))
    }

    /// The first error of CQ `cqn`.
    pub(crate) fn of_queue(cqn: u32, error: ibgda_error) -> Self {
        Self::now(
            AsyncEventKind::QueueError { cqn, error },
            format!(
                "QP {:#x}, CQ {cqn:#x}: request {} failed",
                error.qpn, error.wqe_index
            ),
            error.to_string(),
            "the QP takes no more requests: destroy it, make another and connect it, when the cause is mended",
        )
    }
}

impl fmt::Display for AsyncEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if !self.why.is_empty() {
            write!(f, ": {}", self.why)?;
        }
        if !self.advice.is_empty() {
            write!(f, "; {}", self.advice)?;
        }
        Ok(())
    }
}

pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("every Linux has this clock");
    now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(type_: u32, reason: u32, handle: u32) -> ibgda_event {
        ibgda_event {
            type_,
            reason,
            generation: 3,
            handle,
            time_ns: 42,
        }
    }

    #[test]
    fn every_record_of_the_broker_has_its_kind_words_and_time() {
        for (record, kind, words) in [
            (
                record(IBGDA_EVENT_LOST, 1, 0),
                AsyncEventKind::NicLost {
                    generation: 3,
                    reason: 1,
                },
                ["generation 3", "NIC reset", "rebind"],
            ),
            (
                record(IBGDA_EVENT_RECOVERED, 2, 0),
                AsyncEventKind::NicRecovered { generation: 3 },
                ["is back", "NIC removed", "rebind"],
            ),
            (
                record(IBGDA_EVENT_DOORBELL, 5, 0x20),
                AsyncEventKind::DoorbellRevoked { handle: 0x20 },
                ["0x20", "UAR destroyed", "make another"],
            ),
            (
                record(IBGDA_EVENT_OVERFLOW, 0, 17),
                AsyncEventKind::EventsDropped { count: 17 },
                ["17 events", "more happened", "state"],
            ),
            (
                record(99, 0, 0),
                AsyncEventKind::EventsDropped { count: 1 },
                ["type 99", "newer", "state"],
            ),
        ] {
            let event = AsyncEvent::of_broker(&record);
            assert_eq!((event.kind(), event.time_ns()), (kind, 42));
            for word in words {
                assert!(event.to_string().contains(word), "{word:?}: {event}");
            }
        }
    }

    #[test]
    fn verbs_events_name_the_port_or_the_device() {
        let event = AsyncEvent::of_verbs("mlx5_0", verbs::IBV_EVENT_PORT_ERR, 1, "port error");
        assert_eq!(
            event.kind(),
            AsyncEventKind::Port {
                port: 1,
                active: false
            }
        );
        assert!(event.to_string().contains("port 1 of mlx5_0 is down"));
        let event = AsyncEvent::of_verbs("mlx5_0", verbs::IBV_EVENT_SM_CHANGE, 1, "SM change");
        assert_eq!(
            event.kind(),
            AsyncEventKind::Verbs {
                event: verbs::IBV_EVENT_SM_CHANGE
            }
        );
        assert!(event.to_string().contains("SM change"), "{event}");
        assert!(event.time_ns() > 0);
    }

    #[test]
    fn what_the_nic_says_of_queues_names_them() {
        let qp = |event| AsyncEventKind::QueuePair { qpn: 0x4a, event };
        let cq = |syndrome| AsyncEventKind::CompletionQueue {
            cqn: 0x4a,
            syndrome,
        };
        for (number, syndrome, expected, word) in [
            (0x01, 0, qp(QueuePairEvent::PathMigrated), "alternate path"),
            (
                0x07,
                0,
                qp(QueuePairEvent::PathMigrationFailed),
                "cannot use",
            ),
            (
                0x05,
                0,
                qp(QueuePairEvent::LocalCatastrophic),
                "read its queue",
            ),
            (0x10, 0, qp(QueuePairEvent::RequestError), "MTU"),
            (0x11, 0, qp(QueuePairEvent::AccessError), "rkey"),
            (0x04, 1, cq(1), "overran"),
            (0x04, 2, cq(2), "write its memory"),
            (0x04, 9, cq(9), "syndrome 0x9"),
        ] {
            let event = AsyncEvent::of_object(0x4a, number, syndrome).expect("has words");
            assert_eq!(event.kind(), expected);
            let text = event.to_string();
            assert!(
                text.contains(word) && text.contains("0x4a"),
                "{word:?}: {text}"
            );
        }
        assert!(
            AsyncEvent::of_object(1, 0x02, 0).is_none(),
            "nobody asks for it"
        );
    }

    #[test]
    fn an_error_of_a_queue_says_which_request_of_which_qp() {
        let error = ibgda_error {
            status: 0x113,
            qpn: 0x4a,
            wqe_index: 7,
            kind: 13,
            opcode: 8,
            syndrome: 0x13,
            vendor_syndrome: 0x88,
            reserved: 0,
        };
        let event = AsyncEvent::of_queue(0x11, error);
        assert_eq!(
            event.kind(),
            AsyncEventKind::QueueError { cqn: 0x11, error }
        );
        for word in ["QP 0x4a", "CQ 0x11", "request 7", "rkey", "make another"] {
            assert!(event.to_string().contains(word), "{word:?}: {event}");
        }
    }
}
