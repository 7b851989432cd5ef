// SPDX-License-Identifier: MIT OR Apache-2.0
//! The status page: what the broker's says to kernels, written by the library.

use super::memory::pages;
use crate::{broker::SessionState, error::Result, event::now_ns, mapping::Mapping};
use ibgda_uapi::{
    IBGDA_STATE_LOST, IBGDA_STATE_READY, IBGDA_STATE_RECOVERED, IBGDA_STATUS_WORD_REASON,
    IBGDA_STATUS_WORD_STATE, IBGDA_STATUS_WORD_TIME,
};
use std::sync::atomic::{AtomicU64, Ordering};

/// A page of words; the state is written last.
#[derive(Debug)]
pub(super) struct StatusPage {
    page: Mapping,
}

fn state_word(generation: u32, state: u32) -> u64 {
    (u64::from(generation) << 32) | u64::from(state)
}

impl StatusPage {
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            page: pages("a status page", 1)?,
        })
    }

    pub(super) fn address(&self) -> *const u64 {
        self.page.address().cast_const().cast()
    }

    fn word(&self, index: u32) -> &AtomicU64 {
        // SAFETY: inside the page, aligned, and accessed as a word everywhere.
        unsafe { AtomicU64::from_ptr(self.page.address().cast::<u64>().add(index as usize)) }
    }

    fn now(&self) -> u64 {
        self.word(IBGDA_STATUS_WORD_STATE).load(Ordering::Acquire)
    }

    /// 0 in a forked child, in which the page is not mapped.
    pub(super) fn state(&self) -> SessionState {
        let word = |index| match self.page.is_here() {
            true => self.word(index).load(Ordering::Acquire),
            false => 0,
        };
        let state = word(IBGDA_STATUS_WORD_STATE);
        SessionState {
            state: state as u32,
            generation: (state >> 32) as u32,
            reason: (word(IBGDA_STATUS_WORD_REASON) >> 32) as u32,
            changed_ns: word(IBGDA_STATUS_WORD_TIME),
        }
    }

    /// A generation begins.
    pub(super) fn begin(&self, generation: u32) {
        self.word(IBGDA_STATUS_WORD_TIME)
            .store(now_ns(), Ordering::Relaxed);
        self.word(IBGDA_STATUS_WORD_STATE)
            .store(state_word(generation, IBGDA_STATE_READY), Ordering::Release);
    }

    /// Changes the state, unless it has become another's.
    fn change(&self, from: u64, to: u64) -> bool {
        self.word(IBGDA_STATUS_WORD_TIME)
            .store(now_ns(), Ordering::Relaxed);
        self.word(IBGDA_STATUS_WORD_STATE)
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// The NIC of this generation is lost.
    pub(super) fn lose(&self, generation: u32, reason: u32) {
        let ready = state_word(generation, IBGDA_STATE_READY);
        if self.now() == ready {
            self.word(IBGDA_STATUS_WORD_REASON)
                .store(u64::from(reason) << 32, Ordering::Relaxed);
            self.change(ready, state_word(generation, IBGDA_STATE_LOST));
        }
    }

    /// Whether this generation is lost, and no other has begun.
    pub(super) fn is_lost(&self, generation: u32) -> bool {
        self.now() == state_word(generation, IBGDA_STATE_LOST)
    }

    /// It is back, and waits to be joined again as the next generation; unless it has been.
    pub(super) fn recover(&self, generation: u32) -> bool {
        let lost = state_word(generation, IBGDA_STATE_LOST);
        self.now() == lost && self.change(lost, state_word(generation + 1, IBGDA_STATE_RECOVERED))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generation_is_lost_and_comes_back_once() {
        let page = StatusPage::new().expect("memory");
        page.begin(1);
        let is = |state, generation, reason| {
            let now = page.state();
            assert_eq!(
                (now.state, now.generation, now.reason),
                (state, generation, reason)
            );
            assert!(now.changed_ns > 0);
        };
        is(IBGDA_STATE_READY, 1, 0);
        assert!(!page.recover(1));
        page.lose(2, 1);
        is(IBGDA_STATE_READY, 1, 0);
        page.lose(1, 1);
        is(IBGDA_STATE_LOST, 1, 1);
        page.lose(1, 2);
        is(IBGDA_STATE_LOST, 1, 1);
        assert!(page.recover(1));
        is(IBGDA_STATE_RECOVERED, 2, 1);
        page.begin(2);
        // Of the thread of a generation that is over.
        assert!(!page.recover(1));
        page.lose(1, 2);
        is(IBGDA_STATE_READY, 2, 1);
    }
}
