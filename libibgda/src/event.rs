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

use crate::broker::reason_text;

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
    /// A queue pair failed: the first error that a kernel found in one of its CQs. The loss of the NIC, of which
    /// kernels learn in the same way, is told once for all queues, as [`AsyncEventKind::NicLost`].
    QueueError {
        /// The CQ.
        cqn: u32,
        /// The record: status, QPN, WQE index, opcode, syndromes.
        error: ibgda_error,
    },
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

    /// An asynchronous event of the verbs device `device`; `name` is libibverbs' for it.
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
                format!("{device}, port {port}: {name}"),
                format!("asynchronous event {event} of the verbs device"),
                "see ibv_get_async_event(3)",
            ),
        }
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

fn now_ns() -> u64 {
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
