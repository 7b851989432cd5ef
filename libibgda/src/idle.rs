// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a thread waits for words in memory that nothing wakes it for: it spins, lets others run, then sleeps ever longer.

use std::time::Duration;

/// Looks in a row before the thread lets others run between two, and before it begins to sleep.
const SPINS: u32 = 2_000;
const YIELDS: u32 = 200;
/// The first pause, and the longest. Between them a pause is an eighth of what was slept since the last find: so it
/// adds at most that to the time that was waited anyway.
const FIRST_PAUSE: Duration = Duration::from_micros(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// What to do after a look that found nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pause {
    Spin,
    Yield,
    Sleep(Duration),
}

/// How long nothing was found.
#[derive(Debug, Default)]
pub(crate) struct Idle {
    looks: u32,
    slept: Duration,
}

impl Idle {
    pub(crate) fn next(&mut self) -> Pause {
        self.looks = self.looks.saturating_add(1);
        if self.looks <= SPINS {
            Pause::Spin
        } else if self.looks <= SPINS + YIELDS {
            Pause::Yield
        } else {
            let pause = (self.slept / 8).clamp(FIRST_PAUSE, LONGEST_PAUSE);
            self.slept = self.slept.saturating_add(pause);
            Pause::Sleep(pause)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_the_idle_time_and_no_further_than_the_longest() {
        let mut idle = Idle::default();
        for _ in 0..SPINS {
            assert_eq!(idle.next(), Pause::Spin);
        }
        for _ in 0..YIELDS {
            assert_eq!(idle.next(), Pause::Yield);
        }
        let (mut slept, mut last) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..100_000 {
            let Pause::Sleep(pause) = idle.next() else {
                panic!("spins again");
            };
            assert!(pause >= last && (FIRST_PAUSE..=LONGEST_PAUSE).contains(&pause));
            assert!(
                pause == FIRST_PAUSE || pause <= slept / 8,
                "{pause:?} after {slept:?}"
            );
            (slept, last) = (slept + pause, pause);
        }
        assert_eq!(last, LONGEST_PAUSE);
    }
}
