// SPDX-License-Identifier: GPL-2.0
//! The last `N` of something, and how many before those were dropped.

/// A bounded queue that drops its oldest entry when full, and counts those.
pub struct Ring<T, const N: usize> {
    entries: [T; N],
    start: usize,
    length: usize,
    dropped: u32,
}

impl<T: Copy, const N: usize> Ring<T, N> {
    /// An empty ring; `filler` is never handed out.
    pub const fn new(filler: T) -> Self {
        Self {
            entries: [filler; N],
            start: 0,
            length: 0,
            dropped: 0,
        }
    }

    /// Appends an entry.
    pub fn push(&mut self, entry: T) {
        if self.length == N {
            self.start = (self.start + 1) % N;
            self.length -= 1;
            self.dropped = self.dropped.saturating_add(1);
        }
        self.entries[(self.start + self.length) % N] = entry;
        self.length += 1;
    }

    /// Takes the oldest entry.
    pub fn pop(&mut self) -> Option<T> {
        if self.length == 0 {
            return None;
        }
        let entry = self.entries[self.start];
        self.start = (self.start + 1) % N;
        self.length -= 1;
        Some(entry)
    }

    /// Puts back an entry that was popped, before all others: it is the oldest, so where there is no room it is dropped.
    pub fn unpop(&mut self, entry: T) {
        if self.length == N {
            self.dropped = self.dropped.saturating_add(1);
            return;
        }
        self.start = (self.start + N - 1) % N;
        self.length += 1;
        self.entries[self.start] = entry;
    }

    /// Counts entries as dropped, which were once taken as such.
    pub fn untake_dropped(&mut self, count: u32) {
        self.dropped = self.dropped.saturating_add(count);
    }

    /// How many entries were dropped since the last call; 0 when none was.
    pub fn take_dropped(&mut self) -> u32 {
        core::mem::take(&mut self.dropped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    #[test]
    fn behaves_as_a_queue_that_forgets_the_oldest() {
        let mut ring = Ring::<u32, 3>::new(0);
        let mut model = VecDeque::new();
        let mut dropped = 0;
        for step in 0..1000_u32 {
            // Pushes and pops in a changing rhythm.
            if step * step % 7 < 4 {
                ring.push(step);
                model.push_back(step);
                if model.len() > 3 {
                    model.pop_front();
                    dropped += 1;
                }
            } else if step % 3 == 0 {
                // Taken and put back.
                let (taken, lost) = (ring.pop(), ring.take_dropped());
                if step % 2 == 0 {
                    ring.push(step);
                    model.push_back(step);
                    if model.len() > 3 {
                        model.pop_front();
                        dropped += 1;
                    }
                }
                if let Some(entry) = taken {
                    ring.unpop(entry);
                }
                ring.untake_dropped(lost);
            } else {
                assert_eq!(ring.pop(), model.pop_front());
            }
            if step % 50 == 0 {
                assert_eq!(ring.take_dropped(), core::mem::take(&mut dropped));
            }
        }
    }
}
