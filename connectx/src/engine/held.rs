// SPDX-License-Identifier: MIT OR Apache-2.0
//! Completions that a fault holds back: later than they should be, or after one that came later.

use std::time::{Duration, Instant};

use super::completion::{self, Completion};
use crate::fault::Hold;
use crate::objects::device::Device;
use crate::objects::qp::State;

/// How long a completion waits at most for one that overtakes it.
const OVERTAKE: Duration = Duration::from_secs(1);
/// Completions held back at one time; further ones are written at once.
const MOST: usize = 1 << 16;

/// Completions that wait, in the order in which they came.
#[derive(Debug, Default)]
pub struct Held(Vec<Waiting>);

#[derive(Debug, Clone, Copy)]
struct Waiting {
    cqn: u32,
    completion: Completion,
    /// When it is written whatever happens.
    until: Instant,
    /// The next completion in its queue goes first; else those of its queue pair wait behind it.
    overtaken: bool,
}

impl Held {
    /// When the first is due.
    pub fn next(&self) -> Option<Instant> {
        self.0.iter().map(|waiting| waiting.until).min()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn take(&mut self, which: impl Fn(&Waiting) -> bool) -> Vec<Waiting> {
        let (taken, left) = self.0.drain(..).partition(which);
        self.0 = left;
        taken
    }
}

/// Writes a completion now, or keeps it for later. `false` if its queue has failed.
pub(super) fn post(device: &mut Device, cqn: u32, completion: &Completion) -> bool {
    let waiting = |until, overtaken| Waiting {
        cqn,
        completion: *completion,
        until,
        overtaken,
    };
    let now = Instant::now();
    let ahead =
        device.held.0.iter().rev().find(|held| {
            !held.overtaken && (held.cqn, held.completion.qpn) == (cqn, completion.qpn)
        });
    let kept = if device.held.0.len() >= MOST {
        None
    } else if let Some(ahead) = ahead {
        Some(waiting(ahead.until, false))
    } else {
        let hold = device.faults.hold(completion.qpn);
        hold.map(|hold| match hold {
            Hold::Delay(delay) => waiting(now + delay, false),
            Hold::Reorder => waiting(now + OVERTAKE, true),
        })
    };
    if let Some(kept) = kept {
        device.held.0.push(kept);
        return true;
    }
    let written = completion::write(device, cqn, completion);
    let overtaken = device.held.take(|held| held.overtaken && held.cqn == cqn);
    write(device, &overtaken, Some(completion.qpn));
    written
}

/// Writes what has waited long enough. Returns whether anything has.
pub fn release(device: &mut Device, now: Instant) -> bool {
    let due = device.held.take(|held| held.until <= now);
    write(device, &due, None);
    !due.is_empty()
}

/// Not those of a queue pair that the driver has reset or destroyed meanwhile: it has cleaned the queue of them. The
/// queue pair `at_work` lives, but is not in the table while it works.
fn write(device: &mut Device, list: &[Waiting], at_work: Option<u32>) {
    for held in list {
        let qpn = held.completion.qpn;
        let live = |qpn| {
            device
                .qps
                .get(qpn)
                .is_some_and(|qp| qp.state != State::Reset)
        };
        if at_work == Some(qpn) || live(qpn) {
            completion::write(device, held.cqn, &held.completion);
        }
    }
}
