// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the model may touch of a guest's memory: what the guest's commands and live objects name, and nothing else.

use std::ops::Range;

/// On whose account memory may be touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// The command queue and the mailboxes.
    Commands,
    /// The mailboxes of one command.
    Command,
    /// An object: the opcode that makes its kind, and its number.
    Object(u16, u32),
}

/// An access to memory that nothing names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stray {
    pub addr: u64,
    pub len: usize,
    pub write: bool,
}

/// Ranges by their start, each with the furthest end of those up to it. A guest of the fuzzer names tens of thousands.
#[derive(Debug)]
struct Reach(Vec<(u64, u64)>);

impl Reach {
    fn of<'a>(ranges: impl Iterator<Item = &'a Range<u64>>) -> Self {
        let mut ends: Vec<(u64, u64)> = ranges.map(|range| (range.start, range.end)).collect();
        ends.sort_unstable();
        let mut furthest = 0;
        for (_, end) in &mut ends {
            furthest = furthest.max(*end);
            *end = furthest;
        }
        Self(ends)
    }

    /// How far the ranges that start before an address reach, 0 without any.
    fn before(&self, addr: u64) -> u64 {
        let count = self.0.partition_point(|(start, _)| *start < addr);
        count.checked_sub(1).map_or(0, |last| self.0[last].1)
    }
}

/// The memory that may be touched, and the accesses that went elsewhere.
#[derive(Debug, Default)]
pub struct Watch {
    named: Vec<(Owner, Range<u64>)>,
    /// Of what is named, since the last change.
    reach: Option<Reach>,
    /// Something may address all memory, such as a key without translation.
    anything: Vec<Owner>,
    strays: Vec<Stray>,
    /// Strays are kept.
    watching: bool,
    /// Accesses since the start.
    pub accesses: u64,
}

impl Watch {
    /// More strays say nothing new.
    const KEPT: usize = 16;

    /// Looks, or not: what a test does on purpose may be wrong.
    pub fn keep(&mut self, on: bool) {
        self.watching = on;
    }

    /// Permits `len` bytes from `addr`.
    pub fn name(&mut self, owner: Owner, addr: u64, len: u64) {
        self.reach = None;
        match self.named.last_mut() {
            Some((last, range)) if *last == owner && range.end == addr => {
                range.end = addr.saturating_add(len);
            }
            _ => self.named.push((owner, addr..addr.saturating_add(len))),
        }
    }

    /// Permits everything.
    pub fn name_all(&mut self, owner: Owner) {
        self.anything.push(owner);
    }

    /// Withdraws what an owner names.
    pub fn forget(&mut self, which: impl Fn(Owner) -> bool) {
        self.reach = None;
        self.named.retain(|(owner, _)| !which(*owner));
        self.anything.retain(|owner| !which(*owner));
    }

    /// The model touches memory. Counts also when nothing is there: an address that nobody named is wrong in itself.
    pub(crate) fn access(&mut self, addr: u64, len: usize, write: bool) {
        self.accesses += 1;
        if !self.watching {
            return;
        }
        let end = addr.saturating_add(len as u64);
        let named = &self.named;
        let reach = self
            .reach
            .get_or_insert_with(|| Reach::of(named.iter().map(|(_, range)| range)));
        let named = !self.anything.is_empty() || reach.before(addr.saturating_add(1)) >= end;
        if !named && self.strays.len() < Self::KEPT {
            self.strays.push(Stray { addr, len, write });
        }
    }

    /// Whether an object lies in the command queue's memory or its mailboxes', and may write over an answer.
    pub fn shared_with_commands(&self) -> bool {
        let is_command = |owner: &Owner| matches!(owner, Owner::Commands);
        let commands = self.named.iter().filter(|(owner, _)| is_command(owner));
        let reach = Reach::of(commands.map(|(_, range)| range));
        let mut objects = self.named.iter().filter(|(owner, _)| !is_command(owner));
        objects.any(|(_, object)| !object.is_empty() && reach.before(object.end) > object.start)
    }

    /// Accesses to memory that nothing named at the time.
    pub fn strays(&self) -> &[Stray] {
        &self.strays
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_access_is_inside_one_range() {
        let mut watch = Watch::default();
        watch.keep(true);
        let strays = |watch: &mut Watch, addr, len| {
            let before = watch.strays().len();
            watch.access(addr, len, false);
            watch.strays().len() - before
        };
        assert_eq!(strays(&mut watch, 0x1000, 1), 1, "nothing is named");
        watch.name(Owner::Object(1, 1), 0x1000, 0x1000);
        watch.name(Owner::Object(1, 2), 0x2000, 0x1000);
        watch.name(Owner::Object(1, 3), 0x1800, 0x10);
        assert_eq!(strays(&mut watch, 0x1000, 0x1000), 0);
        assert_eq!(strays(&mut watch, 0x1900, 0x10), 0, "behind a shorter one");
        assert_eq!(strays(&mut watch, 0x1ff8, 0x10), 1, "of two owners");
        assert_eq!(strays(&mut watch, 0xfff, 2), 1);
        assert_eq!(strays(&mut watch, 0x3000, 1), 1);
        watch.forget(|owner| owner == Owner::Object(1, 1));
        assert_eq!(strays(&mut watch, 0x1900, 0x10), 1);
    }

    #[test]
    fn objects_in_the_commands_memory_are_known() {
        let mut watch = Watch::default();
        watch.name(Owner::Commands, 0x1000, 0x1000);
        watch.name(Owner::Object(1, 1), 0x2000, 0x1000);
        watch.name(Owner::Object(1, 2), 0, 0x1000);
        assert!(!watch.shared_with_commands());
        watch.name(Owner::Object(1, 3), 0x1fff, 1);
        assert!(watch.shared_with_commands());
    }
}
