// SPDX-License-Identifier: MIT OR Apache-2.0
//! Numbered objects.

use std::collections::VecDeque;
use std::ops::Range;

/// Which free number is given out next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reuse {
    /// The one freed last: an owner that still uses a freed number meets the next owner at once.
    #[default]
    NewestFirst,
    /// The one freed first.
    OldestFirst,
}

/// How much an object takes of what a function has for page lists and key lists: entries of 8 bytes.
pub trait Weigh {
    /// Entries; an object keeps as many as it has when it is made.
    fn entries(&self) -> usize {
        0
    }
}

/// Objects of one kind by number. Numbers are re-used only when asked to, in the order of [`Reuse`].
#[derive(Debug)]
pub struct Table<T> {
    first: u32,
    limit: usize,
    slots: Vec<Option<T>>,
    /// Entries of each object when it was last weighed.
    weights: Vec<usize>,
    weight: usize,
    free: VecDeque<u32>,
    live: usize,
    reuse: Reuse,
}

impl<T: Weigh> Table<T> {
    /// A table that gives out numbers from `first`, `limit` of them.
    pub fn new(first: u32, limit: usize) -> Self {
        Self {
            first,
            limit,
            slots: Vec::new(),
            weights: Vec::new(),
            weight: 0,
            free: VecDeque::new(),
            live: 0,
            reuse: Reuse::default(),
        }
    }

    /// Selects the order in which freed numbers come back.
    pub fn set_reuse(&mut self, reuse: Reuse) {
        self.reuse = reuse;
    }

    fn slot(&self, number: u32) -> Option<usize> {
        number.checked_sub(self.first).map(|i| i as usize)
    }

    /// Adds an object; `None` when the table is full.
    pub fn insert(&mut self, object: T) -> Option<u32> {
        if self.live >= self.limit {
            return None;
        }
        let number = match self.free.pop_front() {
            Some(number) => number,
            None => {
                let number = self.first + u32::try_from(self.slots.len()).ok()?;
                self.slots.push(None);
                self.weights.push(0);
                number
            }
        };
        let slot = self.slot(number)?;
        *self.slots.get_mut(slot)? = Some(object);
        self.live += 1;
        self.weigh(number);
        Some(number)
    }

    /// Adds an object with a number of a range; `None` when all of these are taken.
    pub fn insert_within(&mut self, object: T, range: Range<u32>) -> Option<u32> {
        let fits = |number: &u32| range.contains(number);
        if !self.free.iter().any(fits) {
            // Numbers that are passed over are free.
            let next = |table: &Self| table.first + table.slots.len() as u32;
            while next(self) < range.end {
                if self.slots.len() >= self.limit {
                    return None;
                }
                let number = next(self);
                self.slots.push(None);
                self.weights.push(0);
                self.free.push_back(number);
                if number >= range.start {
                    break;
                }
            }
        }
        let at = self.free.iter().position(fits)?;
        let number = self.free.remove(at)?;
        self.free.push_front(number);
        self.insert(object)
    }

    /// Weighs an object again, after a change to its lists.
    pub fn weigh(&mut self, number: u32) {
        let entries = self.get(number).map_or(0, Weigh::entries);
        let slot = self.slot(number);
        if let Some(weight) = slot.and_then(|slot| self.weights.get_mut(slot)) {
            self.weight = self.weight - *weight + entries;
            *weight = entries;
        }
    }

    /// Entries of all objects.
    pub fn weight(&self) -> usize {
        self.weight
    }

    /// The object with a number.
    #[inline]
    pub fn get(&self, number: u32) -> Option<&T> {
        self.slots.get(self.slot(number)?)?.as_ref()
    }

    /// The object with a number, to change it.
    #[inline]
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        let slot = self.slot(number)?;
        self.slots.get_mut(slot)?.as_mut()
    }

    /// Takes an object out and frees its number.
    pub fn remove(&mut self, number: u32) -> Option<T> {
        let slot = self.slot(number)?;
        let object = self.slots.get_mut(slot)?.take()?;
        self.live -= 1;
        self.weigh(number);
        match self.reuse {
            Reuse::NewestFirst => self.free.push_front(number),
            Reuse::OldestFirst => self.free.push_back(number),
        }
        Some(object)
    }

    /// Takes an object out for a while; its number stays taken. Put it back with [`Table::put_back`].
    #[inline]
    pub fn borrow_out(&mut self, number: u32) -> Option<T> {
        let slot = self.slot(number)?;
        self.slots.get_mut(slot)?.take()
    }

    /// Ends a [`Table::borrow_out`].
    #[inline]
    pub fn put_back(&mut self, number: u32, object: T) {
        if let Some(place) = self.slot(number).and_then(|slot| self.slots.get_mut(slot)) {
            *place = Some(object);
        }
    }

    /// Objects in the table.
    pub fn len(&self) -> usize {
        self.live
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.live == 0
    }

    /// All objects with their numbers, in the order of these.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.slots
            .iter()
            .zip(self.first..)
            .filter_map(|(slot, number)| Some((number, slot.as_ref()?)))
    }

    /// Drops every object. Numbers start again from the first.
    pub fn clear(&mut self) {
        self.slots.clear();
        self.weights.clear();
        self.weight = 0;
        self.free.clear();
        self.live = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Weigh for i32 {
        fn entries(&self) -> usize {
            *self as usize
        }
    }

    impl Weigh for char {}

    #[test]
    fn what_objects_take_is_given_back_with_them() {
        let mut table = Table::new(0, 4);
        let (a, b) = (table.insert(5).unwrap(), table.insert(7).unwrap());
        assert_eq!(table.weight(), 12);
        *table.get_mut(b).unwrap() = 9;
        table.weigh(b);
        assert_eq!(table.weight(), 14);
        table.remove(a);
        table.remove(a);
        assert_eq!(table.weight(), 9);
        assert_eq!(table.insert(1), Some(a));
        table.clear();
        assert_eq!(table.weight(), 0);
    }

    #[test]
    fn numbers_come_back_in_the_chosen_order() {
        let mut table = Table::new(16, 4);
        assert_eq!(
            (0..4).map(|i| table.insert(i)).collect::<Vec<_>>(),
            [Some(16), Some(17), Some(18), Some(19)]
        );
        assert_eq!(table.insert(9), None, "full");
        assert_eq!(table.remove(17), Some(1));
        assert_eq!(table.remove(17), None, "only once");
        assert_eq!(table.remove(19), Some(3));
        assert_eq!(table.insert(5), Some(19), "newest first");
        table.set_reuse(Reuse::OldestFirst);
        table.remove(19);
        assert_eq!(table.insert(6), Some(17));
        assert_eq!(table.len(), 3);
        assert_eq!(table.get(15), None);
        assert_eq!(table.get(u32::MAX), None);
    }

    #[test]
    fn a_borrowed_number_is_not_given_to_another() {
        let mut table = Table::new(0, 2);
        let n = table.insert('a').unwrap();
        let object = table.borrow_out(n).unwrap();
        assert_eq!(table.insert('b'), Some(1));
        assert_eq!(table.insert('c'), None);
        table.put_back(n, object);
        assert_eq!(table.get(n), Some(&'a'));
    }
}
