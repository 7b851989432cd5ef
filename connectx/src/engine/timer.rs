// SPDX-License-Identifier: MIT OR Apache-2.0
//! Deadlines of queue pairs.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::objects::qp::Qp;

/// Deadlines, the earliest first. An entry only says "look at this queue pair": the queue pair knows its deadlines, of
/// which it has two at most, one for each half. What is not wanted any more is taken out, or a guest could have entries
/// for hours from now pile up.
#[derive(Debug, Default)]
pub struct Timers {
    looks: BTreeSet<(Instant, u32)>,
}

impl Timers {
    /// Looks at a queue pair at `when`, and not at `instead` for the same reason.
    pub fn add(&mut self, when: Instant, qpn: u32, instead: Option<Instant>) {
        if let Some(old) = instead {
            self.remove(old, qpn);
        }
        self.looks.insert((when, qpn));
    }

    /// Does not look at a queue pair at `when`.
    pub fn remove(&mut self, when: Instant, qpn: u32) {
        self.looks.remove(&(when, qpn));
    }

    /// Forgets what a queue pair's halves wanted.
    pub fn forget(&mut self, qp: &Qp) {
        let wanted = [qp.requester.timer_at, qp.responder.next_poll];
        for when in wanted.into_iter().flatten() {
            self.remove(when, qp.number);
        }
    }

    /// The earliest deadline.
    pub fn next(&self) -> Option<Instant> {
        self.looks.first().map(|(when, _)| *when)
    }

    /// Takes a queue pair whose deadline has come.
    pub fn pop_due(&mut self, now: Instant) -> Option<u32> {
        if self.next()? > now {
            return None;
        }
        self.looks.pop_first().map(|(_, qpn)| qpn)
    }

    /// Deadlines.
    pub fn len(&self) -> usize {
        self.looks.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.looks.is_empty()
    }
}

/// Local ACK timeout: 4.096 µs · 2^code, `None` for code 0, which means forever (IBA 9.7.6.1.3).
pub fn ack_timeout(code: u8) -> Option<Duration> {
    (code != 0).then(|| Duration::from_nanos(4096) * (1 << code.min(31)))
}

/// Time that an RNR NAK's timer code stands for (IBA table 45).
pub fn rnr_delay(code: u8) -> Duration {
    const TENS_OF_MICROSECONDS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(10) * TENS_OF_MICROSECONDS[usize::from(code & 31)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_the_specification_s() {
        assert_eq!(ack_timeout(0), None);
        assert_eq!(ack_timeout(14), Some(Duration::from_nanos(67_108_864)));
        assert_eq!(rnr_delay(0), Duration::from_micros(655_360));
        assert_eq!(rnr_delay(1), Duration::from_micros(10));
        assert_eq!(rnr_delay(12), Duration::from_micros(640));
        assert_eq!(rnr_delay(31), Duration::from_micros(491_520));
    }

    #[test]
    fn the_earliest_deadline_comes_first() {
        let now = Instant::now();
        let mut timers = Timers::default();
        let second = |n| now + Duration::from_secs(n);
        timers.add(second(2), 2, None);
        timers.add(second(3), 1, None);
        timers.add(second(1), 1, Some(second(3)));
        assert_eq!(timers.pop_due(now), None);
        assert_eq!(timers.next(), Some(now + Duration::from_secs(1)));
        assert_eq!(timers.pop_due(now + Duration::from_secs(3)), Some(1));
        assert_eq!(timers.pop_due(now + Duration::from_secs(3)), Some(2));
        assert_eq!(timers.pop_due(now + Duration::from_secs(3)), None);
    }
}
