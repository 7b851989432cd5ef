// SPDX-License-Identifier: MIT OR Apache-2.0
//! Event records and the eventfd.

use crate::fixture::{Doorbell, Pair, alone, eventfd, signals};
use ibgda_uapi::*;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// N14: not an eventfd, the same twice, another; N12: records that cannot be written are not taken.
#[test]
fn events_wait_for_their_reader_and_an_eventfd_can_be_changed() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        assert_eq!(
            session.set_eventfd(session.as_raw_fd()),
            Err(libc::EBADF),
            "not an eventfd"
        );
        assert_eq!(session.set_eventfd(-2), Err(libc::EBADF));
        assert_eq!(session.set_eventfd(1000), Err(libc::EBADF));
        session.set_eventfd(-1).expect("none to stop");
        assert_eq!(session.events(1).err(), Some(libc::EAGAIN));
        let (first, second) = (eventfd(), eventfd());
        session.set_eventfd(first.as_raw_fd()).expect("set");
        session
            .set_eventfd(first.as_raw_fd())
            .expect("the same again");
        session.set_eventfd(second.as_raw_fd()).expect("another");
        let destroy = |count| {
            for _ in 0..count {
                let Doorbell { verbs, uar, .. } = Doorbell::import(&session, pair.nic);
                verbs.destroy(uar);
            }
        };
        destroy(3);
        assert_eq!((signals(&first), signals(&second)), (0, 3));
        session.set_eventfd(-1).expect("stop");
        // More than are kept.
        destroy(70);
        assert_eq!(signals(&second), 0);
        // What cannot be written is not taken.
        for _ in 0..2 {
            assert_eq!(session.events_to(1 << 46, 10), Err(libc::EFAULT));
        }
        let mut records = Vec::new();
        while let Ok(some) = session.events(10) {
            assert!(some.len() <= 10);
            records.extend(some);
        }
        assert_eq!(
            (records[0].type_, records[0].handle),
            (IBGDA_EVENT_OVERFLOW, 9)
        );
        assert_eq!(records.len(), 1 + 64);
        assert!(
            records[1..]
                .iter()
                .all(|record| record.type_ == IBGDA_EVENT_DOORBELL)
        );
        assert!(records[1..].is_sorted_by_key(|record| record.time_ns));
    });
}

/// N14: an eventfd that its owner closes, that is full, or that is exchanged while it is signalled.
#[test]
fn an_eventfd_that_is_closed_or_full_or_exchanged_delays_no_event() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let destroy = || {
            let Doorbell { verbs, uar, .. } = Doorbell::import(&session, pair.nic);
            verbs.destroy(uar);
        };
        let closed = eventfd();
        session.set_eventfd(closed.as_raw_fd()).expect("set");
        drop(closed);
        destroy();

        let mut full = eventfd();
        full.write_all(&(u64::MAX - 1).to_ne_bytes())
            .expect("fill the eventfd");
        session.set_eventfd(full.as_raw_fd()).expect("set");
        for _ in 0..3 {
            destroy();
        }
        assert!(signals(&full) >= u64::MAX - 1);
        assert_eq!(session.events(64).expect("records").len(), 4);

        // Exchanged by one thread while another's events signal it.
        let (first, second) = (eventfd(), eventfd());
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for fd in [first.as_raw_fd(), second.as_raw_fd(), -1] {
                        session.set_eventfd(fd).expect("exchange");
                    }
                }
            });
            for _ in 0..40 {
                destroy();
            }
            stop.store(true, Ordering::Relaxed);
        });
        session.set_eventfd(first.as_raw_fd()).expect("set");
        assert!(signals(&first) + signals(&second) <= 40);
        destroy();
        assert_eq!((signals(&first), signals(&second)), (1, 0));
    });
}
