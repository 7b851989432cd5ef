// SPDX-License-Identifier: MIT OR Apache-2.0
//! What commands name by a number: memory, and CQs.

use super::verbs::VerbsCq;
use crate::{
    error::{Error, Result},
    hub::Arrivals,
    worker::lock,
};
use std::{
    collections::HashMap,
    ptr,
    sync::{Arc, Mutex},
};

fn no_such(what: &str, why: String) -> Error {
    Error::argument(what, why, "")
}

/// Memory by its number: address and length.
#[derive(Debug, Default)]
pub(super) struct Names(Mutex<Numbered>);

#[derive(Debug, Default)]
struct Numbered {
    last: u32,
    ranges: HashMap<u32, (usize, usize)>,
}

impl Names {
    pub(super) fn add(&self, address: *mut u8, bytes: usize) -> u32 {
        let mut all = lock(&self.0);
        // From 1; 24 bits, as QP contexts have for a page. Objects that live are fewer.
        loop {
            all.last = all.last % 0xff_ffff + 1;
            if !all.ranges.contains_key(&all.last) {
                break;
            }
        }
        let (number, range) = (all.last, (address.expose_provenance(), bytes));
        all.ranges.insert(number, range);
        number
    }

    pub(super) fn remove(&self, number: u32) {
        lock(&self.0).ranges.remove(&number);
    }

    /// The address of `bytes` bytes at an offset, aligned to 8.
    pub(super) fn find(&self, what: &str, number: u32, offset: u64, bytes: u64) -> Result<*mut u8> {
        let found = lock(&self.0).ranges.get(&number).copied();
        let inside = found.filter(|(address, length)| {
            let end = offset.checked_add(bytes);
            end.is_some_and(|end| end <= *length as u64) && (*address as u64 + offset) % 8 == 0
        });
        let Some((address, _)) = inside else {
            return Err(no_such(
                what,
                format!("{bytes} bytes at offset {offset} are not in memory {number}, {found:x?}"),
            ));
        };
        Ok(ptr::with_exposed_provenance_mut(address + offset as usize))
    }
}

/// Where the ring of a CQ and its consumer's record are, until a QP takes it.
#[derive(Clone, Debug)]
pub(super) struct CqPlace {
    pub(super) verbs: Arc<VerbsCq>,
    pub(super) ring: usize,
    pub(super) depth: u32,
    pub(super) record: usize,
    pub(super) collapsed: bool,
    /// Of a CQ with events, of which a waiter hears.
    pub(super) arrivals: Option<Arc<Arrivals>>,
}

/// CQs by number.
#[derive(Debug, Default)]
pub(super) struct Cqs(Mutex<HashMap<u32, CqPlace>>);

impl Cqs {
    pub(super) fn add(&self, number: u32, place: CqPlace) {
        lock(&self.0).insert(number, place);
    }

    pub(super) fn remove(&self, number: u32) {
        // Destroyed when the number is not in the table any more, and not under its lock.
        let place = lock(&self.0).remove(&number);
        drop(place);
    }

    pub(super) fn count(&self, number: u32, arrivals: Arc<Arrivals>) {
        if let Some(place) = lock(&self.0).get_mut(&number) {
            place.arrivals = Some(arrivals);
        }
    }

    pub(super) fn find(&self, what: &str, number: u32) -> Result<CqPlace> {
        let found = lock(&self.0).get(&number).cloned();
        found.ok_or_else(|| no_such(what, format!("there is no CQ {number:#x}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_found_by_its_number_and_only_inside() {
        let names = Names::default();
        let mut memory = [0_u64; 8];
        let start = memory.as_mut_ptr().cast::<u8>();
        let (one, other) = (names.add(start, 64), names.add(start, 8));
        assert_ne!(one, other);
        assert_eq!(
            names.find("it", one, 56, 8).expect("inside"),
            start.wrapping_add(56)
        );
        for (number, offset, bytes) in [
            (one, 60, 8),
            (one, 57, 1),
            (one, u64::MAX, 2),
            (other, 8, 8),
            (other + 1, 0, 8),
        ] {
            let error = names
                .find("it", number, offset, bytes)
                .expect_err("outside");
            assert!(error.to_string().contains("are not in memory"), "{error}");
        }
        names.remove(one);
        names.find("it", one, 0, 8).expect_err("gone");
    }
}
