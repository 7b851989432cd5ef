// SPDX-License-Identifier: MIT OR Apache-2.0
//! What was refused while something ran.

use std::cell::RefCell;

use connectx::log::{KEPT, Record, Referee};

thread_local! {
    static NOTES: RefCell<Option<Vec<Record>>> = const { RefCell::new(None) };
}

/// Runs something, and gives the refusals of all guests that came and went in this thread meanwhile: of each, the last
/// [`KEPT`].
pub fn refusals_of(f: impl FnOnce()) -> Vec<Record> {
    NOTES.set(Some(Vec::new()));
    f();
    NOTES.take().unwrap_or_default()
}

/// Takes down a guest's refusals at its end.
pub(crate) struct Notes(pub(crate) Referee);

impl Drop for Notes {
    fn drop(&mut self) {
        NOTES.with_borrow_mut(|notes| {
            if let Some(notes) = notes {
                notes.extend(self.0.recent(KEPT));
            }
        });
    }
}
