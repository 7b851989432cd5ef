// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the opaque pointers of the C ABI are: no addresses, but the place of an object in a table, and a number that no
//! other object has had there. So one that was destroyed, is of another kind, or was never given out, is an error, and
//! an object that one thread destroys while another uses it ends when that one is done.
//!
//! | bits | |
//! |---|---|
//! | 63 to 48 | a tag, by which no handle is an address that could be read |
//! | 47 to 24 | how many objects the place has had before |
//! | 23 to 4 | the place |
//! | 3 to 0 | 8 |

use crate::{Error, Result, Source, worker::lock};
use std::{
    any::Any,
    cell::RefCell,
    collections::VecDeque,
    ptr,
    sync::{Arc, Mutex, MutexGuard, Once},
};

/// Not the upper half of any address of x86-64 or arm64.
const TAG: u64 = 0x1bda;
const LOW: u64 = 8;
const PLACES: usize = 1 << 20;
const GENERATIONS: u64 = 1 << 24;

/// An object of the C ABI.
pub(super) trait Object: Any + Send + Sync {
    /// What it is, in words.
    const WHAT: &'static str;
}

#[derive(Default)]
struct Place {
    generation: u64,
    object: Option<(Arc<dyn Any + Send + Sync>, &'static str)>,
    /// Its object is with a thread that has it alone.
    lent: bool,
}

#[derive(Default)]
struct Table {
    places: Vec<Place>,
    /// Places without an object. The oldest comes first, so that a stale handle is told as one for long.
    free: VecDeque<usize>,
}

static TABLE: Mutex<Table> = Mutex::new(Table {
    places: Vec::new(),
    free: VecDeque::new(),
});

fn table() -> MutexGuard<'static, Table> {
    static AT_FORK: Once = Once::new();
    AT_FORK.call_once(keep_through_forks);
    lock(&TABLE)
}

/// A child has one thread only. If another had the lock at that moment, nobody would ever let go of the child's.
fn keep_through_forks() {
    thread_local! {
        static HELD: RefCell<Option<MutexGuard<'static, Table>>> = const { RefCell::new(None) };
    }
    extern "C" fn before() {
        let held = lock(&TABLE);
        let _ = HELD.try_with(|slot| slot.replace(Some(held)));
    }
    extern "C" fn after() {
        let _ = HELD.try_with(|slot| slot.replace(None));
    }
    // SAFETY: the one locks at a fork, the others let go on the same thread.
    unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
}

fn encode(place: usize, generation: u64) -> u64 {
    (TAG << 48) | (generation << 24) | ((place as u64) << 4) | LOW
}

/// Place and generation.
fn decode(handle: u64) -> Option<(usize, u64)> {
    let is_one = handle >> 48 == TAG && handle & 0xf == LOW;
    is_one.then_some((
        (handle >> 4) as usize & (PLACES - 1),
        (handle >> 24) & (GENERATIONS - 1),
    ))
}

/// Gives out an object.
pub(super) fn give<T: Object>(call: &str, object: T) -> Result<*mut T> {
    let object: Arc<dyn Any + Send + Sync> = Arc::new(object);
    let mut table = table();
    let place = match table.free.pop_front() {
        Some(place) => place,
        None if table.places.len() < PLACES => {
            table.places.push(Place::default());
            table.places.len() - 1
        }
        None => {
            drop(table);
            return Err(Error::new(
                Source::Argument,
                libc::ENOMEM,
                call,
                format!("the process has {PLACES} objects of this library"),
                "destroy what is not used any more",
            ));
        }
    };
    table.places[place].object = Some((object, T::WHAT));
    let handle = encode(place, table.places[place].generation);
    Ok(ptr::without_provenance_mut(handle as usize))
}

/// The object of a handle, as `argument` of `call`.
pub(super) fn borrow<T: Object>(call: &str, argument: &str, handle: *const T) -> Result<Arc<T>> {
    if handle.is_null() {
        return Err(super::null(call, argument));
    }
    let found = decode(handle.addr() as u64).and_then(|(place, generation)| {
        let table = table();
        let place = table.places.get(place)?;
        (place.generation == generation).then(|| (place.object.clone(), place.lent))
    });
    match found {
        Some((Some((object, what)), _)) => object
            .downcast()
            .map_err(|_| wrong::<T>(call, argument, what)),
        Some((None, true)) => Err(busy(call, argument)),
        _ => Err(gone::<T>(call, argument, handle.addr())),
    }
}

/// Has `work` done to an object that nobody else uses meanwhile.
pub(super) fn alone<T: Object>(
    call: &str,
    argument: &str,
    handle: *const T,
    work: impl FnOnce(&mut T) -> Result<()>,
) -> Result<()> {
    // Another kind's is not taken.
    drop(borrow(call, argument, handle)?);
    let (index, generation) = decode(handle.addr() as u64).expect("it was just found");
    let lend = |table: &mut Table| {
        let place = table.places.get_mut(index)?;
        let is_here = place.generation == generation && place.object.is_some();
        if !is_here {
            return None;
        }
        place.lent = true;
        place.object.take()
    };
    let Some((object, what)) = lend(&mut table()) else {
        return Err(busy(call, argument));
    };
    let give_back = |object| {
        let place = &mut table().places[index];
        (place.object, place.lent) = (Some((object, what)), false);
    };
    let mut object = match object.downcast::<T>().map(Arc::try_unwrap) {
        Ok(Ok(object)) => object,
        Ok(Err(shared)) => {
            give_back(shared);
            return Err(busy(call, argument));
        }
        Err(_) => unreachable!("it was of this kind"),
    };
    let done = work(&mut object);
    give_back(Arc::new(object));
    done
}

fn busy(call: &str, argument: &str) -> Error {
    Error::new(
        Source::Argument,
        libc::EBUSY,
        call,
        format!("{argument} is used by another thread"),
        "let one call end before the other, which needs it alone",
    )
}

/// Takes an object back. It ends when no other thread uses it any more.
pub(super) fn take<T: Object>(call: &str, argument: &str, handle: *const T) -> Result<Arc<T>> {
    // Another kind's is not taken.
    let object = borrow(call, argument, handle)?;
    let (place, generation) = decode(handle.addr() as u64).expect("it was just found");
    let mut table = table();
    let Some(found) = table.places.get_mut(place) else {
        unreachable!("places stay")
    };
    if found.generation != generation || found.object.is_none() {
        let lent = found.generation == generation && found.lent;
        drop(table);
        return Err(match lent {
            true => busy(call, argument),
            false => gone::<T>(call, argument, handle.addr()),
        });
    }
    let taken = found.object.take();
    found.generation += 1;
    // One that has had as many objects as there are numbers for is not used again.
    if found.generation < GENERATIONS {
        table.free.push_back(place);
    }
    drop(table);
    drop(taken);
    Ok(object)
}

fn gone<T: Object>(call: &str, argument: &str, handle: usize) -> Error {
    let why = match decode(handle as u64) {
        Some(_) => format!("{argument} {handle:#x} has been destroyed, or is of another process"),
        None => format!("{argument} {handle:#x} is no {} of this library", T::WHAT),
    };
    Error::new(
        Source::Argument,
        libc::EBADF,
        call,
        why,
        "pass what the library gave out, and not after it was destroyed",
    )
}

fn wrong<T: Object>(call: &str, argument: &str, what: &str) -> Error {
    Error::new(
        Source::Argument,
        libc::EBADF,
        call,
        format!("{argument} is a {what}, not a {}", T::WHAT),
        "pass what the library gave out for this",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::{
            Barrier,
            atomic::{AtomicUsize, Ordering},
        },
        thread,
    };

    struct Apple(Arc<AtomicUsize>);
    struct Pear;

    impl Object for Apple {
        const WHAT: &'static str = "apple";
    }
    impl Object for Pear {
        const WHAT: &'static str = "pear";
    }
    impl Drop for Apple {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn apple() -> (*mut Apple, Arc<AtomicUsize>) {
        let ended = Arc::default();
        let handle = give("test", Apple(Arc::clone(&ended))).expect("a place");
        (handle, ended)
    }

    fn refused<T: Object>(handle: *const T) -> String {
        let error = borrow("test", "it", handle).map(drop).expect_err("refused");
        let errno = if handle.is_null() {
            libc::EINVAL
        } else {
            libc::EBADF
        };
        assert_eq!(error.errno(), errno, "{error}");
        error.to_string()
    }

    #[test]
    fn what_was_destroyed_is_of_another_kind_or_no_handle_is_told() {
        let (handle, ended) = apple();
        assert!(borrow("test", "it", handle).is_ok());
        assert!(refused(handle.cast::<Pear>()).contains("not a pear"));
        assert!(take("test", "it", handle.cast::<Pear>()).is_err());
        assert_eq!(ended.load(Ordering::SeqCst), 0);
        drop(take("test", "it", handle).expect("destroyed"));
        assert_eq!(ended.load(Ordering::SeqCst), 1);
        assert!(refused(handle).contains("has been destroyed"));
        assert!(take("test", "it", handle).is_err(), "twice");
        // The place has another now, perhaps; never the same number.
        let others: Vec<_> = (0..100).map(|_| apple().0).collect();
        assert!(!others.contains(&handle));
        assert!(refused(handle).contains("has been destroyed"));
        for other in others {
            drop(take("test", "it", other).expect("destroyed"));
        }
        assert!(refused(ptr::null::<Apple>()).contains("it is NULL"));
        let stack = 7_u64;
        for wrong in [1, 8, usize::MAX, (&raw const stack).addr(), TAG as usize] {
            let text = refused(ptr::without_provenance::<Apple>(wrong));
            assert!(text.contains("is no apple"), "{text}");
        }
    }

    #[test]
    fn who_needs_it_alone_waits_for_nobody() {
        let (handle, ended) = apple();
        let errno = |result: Result<()>| result.err().map(|error| error.errno());
        let used = borrow("test", "it", handle).expect("alive");
        assert_eq!(
            errno(alone("test", "it", handle, |_| Ok(()))),
            Some(libc::EBUSY)
        );
        drop(used);
        let others = |apple: &mut Apple| {
            assert_eq!(apple.0.load(Ordering::SeqCst), 0);
            assert_eq!(
                errno(borrow("test", "it", handle).map(drop)),
                Some(libc::EBUSY)
            );
            assert_eq!(
                errno(take("test", "it", handle).map(drop)),
                Some(libc::EBUSY)
            );
            Ok(())
        };
        alone("test", "it", handle, others).expect("alone");
        assert_eq!(ended.load(Ordering::SeqCst), 0);
        drop(take("test", "it", handle).expect("destroyed"));
        assert_eq!(
            errno(alone("test", "it", handle, |_| Ok(()))),
            Some(libc::EBADF)
        );
    }

    #[test]
    fn one_thread_destroys_what_others_use() {
        const THREADS: usize = 4;
        for _ in 0..200 {
            let (handle, ended) = apple();
            let (handle, together) = (handle.addr(), Barrier::new(THREADS));
            let taken = AtomicUsize::new(0);
            thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| {
                        let handle = ptr::without_provenance::<Apple>(handle);
                        together.wait();
                        let used = borrow("test", "it", handle);
                        let is_alive = |_: &Arc<Apple>| ended.load(Ordering::SeqCst) == 0;
                        assert!(used.as_ref().map_or(true, is_alive), "ended in use");
                        taken
                            .fetch_add(take("test", "it", handle).is_ok().into(), Ordering::SeqCst);
                        drop(used);
                    });
                }
            });
            assert_eq!(taken.load(Ordering::SeqCst), 1);
            assert_eq!(ended.load(Ordering::SeqCst), 1);
        }
    }
}
