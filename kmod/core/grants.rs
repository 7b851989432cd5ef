// SPDX-License-Identifier: GPL-2.0
//! Who may have a doorbell page.
//!
//! The rule: a page granted to one process is not granted to another until every grant of that page has *ended*; and a
//! grant ends when its owner is dead and its file is released, never by what the owner says. A GPU page-table entry that
//! outlives the CPU mapping can then only ever reach pages of its own, dead, process.

/// What the rule needs to know of a grant.
pub trait Grant {
    /// Identity of a process. It must not be re-used while a grant of it exists.
    type Owner: PartialEq;

    /// Whose it is.
    fn owner(&self) -> &Self::Owner;
    /// Whether the file it was made through is released.
    fn file_released(&self) -> bool;
    /// Whether every thread of the owner is gone.
    fn owner_dead(&self) -> bool;
}

/// Whether `grant` no longer stands between its page and another process.
pub fn ended(grant: &impl Grant) -> bool {
    grant.file_released() && grant.owner_dead()
}

/// Whether `grant`, which has not ended, keeps its page from `asker`.
pub fn bars<G: Grant>(grant: &G, asker: &G::Owner) -> bool {
    grant.owner() != asker
}

/// Bounds on what may be granted, so that nobody can fill the table for the others.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Grants of one process, parked ones included.
    pub per_owner: u32,
    /// Grants in all.
    pub total: u32,
}

impl Limits {
    /// Whether one more grant is within the limits.
    pub const fn allow(&self, of_owner: u32, in_all: u32) -> bool {
        of_owner < self.per_owner && in_all < self.total
    }
}
