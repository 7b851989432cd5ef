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

/// The memory that may be touched, and the accesses that went elsewhere.
#[derive(Debug, Default)]
pub struct Watch {
    named: Vec<(Owner, Range<u64>)>,
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
        let inside = |range: &Range<u64>| range.start <= addr && end <= range.end;
        // Latest first: what was made last is used most.
        let named = !self.anything.is_empty() || self.named.iter().rev().any(|(_, r)| inside(r));
        if !named && self.strays.len() < Self::KEPT {
            self.strays.push(Stray { addr, len, write });
        }
    }

    /// Whether an object lies in the command queue's memory or its mailboxes', and may write over an answer.
    pub fn shared_with_commands(&self) -> bool {
        let of = |wanted: bool| {
            let named = self.named.iter();
            named.filter(move |(owner, _)| matches!(owner, Owner::Commands) == wanted)
        };
        of(false).any(|(_, object)| {
            of(true).any(|(_, range)| object.start < range.end && range.start < object.end)
        })
    }

    /// Accesses to memory that nothing named at the time.
    pub fn strays(&self) -> &[Stray] {
        &self.strays
    }
}
