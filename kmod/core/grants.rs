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

#[cfg(test)]
mod tests {
    //! All histories, up to a depth, of two processes, their files, two UAR pages and a firmware that hands out the lowest
    //! free page; with resets of the NIC, files that outlive their openers, and GPUs that keep what they once had mapped
    //! until their process is dead.

    use super::*;
    use std::{collections::BTreeSet, vec::Vec};

    const PROCESSES: usize = 2;
    const PAGES: usize = 2;

    /// A page as the firmware sees it.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    enum Uar {
        Free,
        Of(usize),
        /// Destroyed, but a grant holds its dma-buf.
        Deferred,
    }

    #[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
    struct Held {
        page: usize,
        owner: usize,
        /// It keeps firmware from handing the page out, until a reset of the NIC.
        holds_uar: bool,
        released: bool,
        dead: bool,
    }

    impl Grant for Held {
        type Owner = usize;

        fn owner(&self) -> &usize {
            &self.owner
        }
        fn file_released(&self) -> bool {
            self.released
        }
        fn owner_dead(&self) -> bool {
            self.dead
        }
    }

    #[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
    struct World {
        alive: [bool; PROCESSES],
        /// The broker's file of each process: open, maybe in other hands.
        file: [bool; PROCESSES],
        uars: [Uar; PAGES],
        grants: Vec<Held>,
        /// What each process's GPU can still store to.
        reach: [[bool; PAGES]; PROCESSES],
    }

    #[derive(Clone, Copy, Debug)]
    enum Event {
        Open(usize),
        Alloc(usize),
        Import(usize, usize),
        Destroy(usize, usize),
        Close(usize),
        Die(usize),
        /// Its file stays open in other hands.
        DieLeavingFile(usize),
        Reap,
        Reset,
    }

    impl World {
        fn new() -> Self {
            Self {
                alive: [true; PROCESSES],
                file: [false; PROCESSES],
                uars: [Uar::Free; PAGES],
                grants: Vec::new(),
                reach: [[false; PAGES]; PROCESSES],
            }
        }

        fn events() -> Vec<Event> {
            let mut events = Vec::from([Event::Reap, Event::Reset]);
            for process in 0..PROCESSES {
                events.extend([
                    Event::Open(process),
                    Event::Alloc(process),
                    Event::Close(process),
                    Event::Die(process),
                    Event::DieLeavingFile(process),
                ]);
                for page in 0..PAGES {
                    events.extend([Event::Import(process, page), Event::Destroy(process, page)]);
                }
            }
            events
        }

        fn destroy(&mut self, page: usize) {
            let held = self
                .grants
                .iter()
                .any(|grant| grant.page == page && grant.holds_uar);
            self.uars[page] = if held { Uar::Deferred } else { Uar::Free };
        }

        fn close(&mut self, process: usize) {
            self.file[process] = false;
            for grant in &mut self.grants {
                grant.released |= grant.owner == process;
            }
        }

        fn die(&mut self, process: usize) {
            self.alive[process] = false;
            self.reach[process] = [false; PAGES];
            for grant in &mut self.grants {
                grant.dead |= grant.owner == process;
            }
            for page in 0..PAGES {
                if self.uars[page] == Uar::Of(process) {
                    self.destroy(page);
                }
            }
        }

        fn reap(&mut self) {
            self.grants.retain(|grant| !ended(grant));
            for page in 0..PAGES {
                if self.uars[page] == Uar::Deferred {
                    self.destroy(page);
                }
            }
        }

        /// Applies an event; `None` when it cannot happen. `Err`: a page that another process's GPU reaches was granted.
        fn after(&self, event: Event, rule: bool) -> Option<Result<Self, Event>> {
            let mut world = self.clone();
            match event {
                Event::Open(process) if self.alive[process] && !self.file[process] => {
                    world.file[process] = true;
                }
                Event::Alloc(process) if self.alive[process] => {
                    let page = self.uars.iter().position(|&uar| uar == Uar::Free)?;
                    world.uars[page] = Uar::Of(process);
                }
                Event::Import(process, page)
                    if self.alive[process]
                        && self.file[process]
                        && self.uars[page] == Uar::Of(process) =>
                {
                    world.reap();
                    let of_page = |grant: &&Held| grant.page == page;
                    let barred = world
                        .grants
                        .iter()
                        .filter(of_page)
                        .any(|grant| bars(grant, &process));
                    if rule && barred {
                        return Some(Ok(world));
                    }
                    for other in (0..PROCESSES).filter(|&other| other != process) {
                        if world.reach[other][page] {
                            return Some(Err(event));
                        }
                    }
                    world.reach[process][page] = true;
                    let grant = Held {
                        page,
                        owner: process,
                        holds_uar: true,
                        released: false,
                        dead: false,
                    };
                    // A second grant of the same page says nothing new.
                    if !world.grants.contains(&grant) {
                        world.grants.push(grant);
                        world.grants.sort();
                    }
                }
                Event::Destroy(process, page) if self.uars[page] == Uar::Of(process) => {
                    world.destroy(page);
                }
                Event::Close(process) if self.file[process] => world.close(process),
                Event::Die(process) if self.alive[process] => {
                    world.close(process);
                    world.die(process);
                }
                Event::DieLeavingFile(process) if self.alive[process] => world.die(process),
                Event::Reap => world.reap(),
                Event::Reset => {
                    world.uars = [Uar::Free; PAGES];
                    for grant in &mut world.grants {
                        grant.holds_uar = false;
                    }
                }
                _ => return None,
            }
            Some(Ok(world))
        }
    }

    /// Visits every world within `depth` events; the first violation.
    fn explore(depth: usize, rule: bool, mut visit: impl FnMut(&World)) -> Result<usize, Event> {
        let mut seen = BTreeSet::from([World::new()]);
        let mut frontier = Vec::from([World::new()]);
        for _ in 0..depth {
            let mut next = Vec::new();
            for world in &frontier {
                visit(world);
                for event in World::events() {
                    if let Some(after) = world.after(event, rule) {
                        let after = after?;
                        if seen.insert(after.clone()) {
                            next.push(after);
                        }
                    }
                }
            }
            frontier = next;
        }
        Ok(seen.len())
    }

    #[test]
    fn no_page_is_granted_while_another_process_can_reach_it_and_every_grant_ends() {
        let worlds = explore(12, true, |world| {
            let mut end = world.clone();
            for process in 0..PROCESSES {
                end.close(process);
                end.die(process);
            }
            end.reap();
            assert!(end.grants.is_empty());
            assert!(end.uars.iter().all(|&uar| uar == Uar::Free));
        });
        let worlds = worlds.unwrap_or_else(|event| panic!("{event:?}"));
        assert!(worlds > 1000, "only {worlds} worlds");
    }

    #[test]
    fn without_the_rule_such_a_page_is_found() {
        assert!(explore(12, false, |_| ()).is_err());
    }

    #[test]
    fn limits_leave_room_for_others() {
        let limits = Limits {
            per_owner: 2,
            total: 3,
        };
        assert!(limits.allow(1, 2) && !limits.allow(2, 2) && !limits.allow(0, 3));
    }
}
