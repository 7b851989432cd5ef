// SPDX-License-Identifier: MIT OR Apache-2.0
//! The status page.

use crate::fixture::{Pair, alone, monotonic};
use ibgda_uapi::*;
use ibgda_vmtests::broker::{Mapping, Session, Status};

/// N3: what is mapped for reading stays so.
#[test]
fn the_status_page_is_never_writable() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let offset = session.status_offset().expect("STATUS");
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        assert!(Mapping::new(&session, 4096, rw, libc::MAP_SHARED, offset).is_err());
        assert!(Mapping::new(&session, 8192, libc::PROT_READ, libc::MAP_SHARED, offset).is_err());
        let Status(mapping) = session.status();
        assert_eq!(mapping.protect(rw), Err(libc::EACCES));
        assert_eq!(
            mapping.protect(libc::PROT_READ | libc::PROT_EXEC),
            Err(libc::EACCES)
        );
    });
}

#[test]
fn the_status_page_says_what_is() {
    alone(|| {
        let pair = Pair::new();
        let session = Session::open();
        let before = monotonic();
        session.bind(pair.gpu, pair.nic).expect("bind");
        let status = session.status();
        assert_eq!(
            (status.state(), status.generation(), status.reason()),
            (IBGDA_STATE_READY, 1, 0)
        );
        assert_eq!(status.port_state(), 4, "the port is active");
        assert!(
            (before..=monotonic()).contains(&status.time_ns()),
            "{}",
            status.time_ns()
        );
        assert!(status.sequence() > 0 && status.sequence() % 2 == 0);
        for offset in (IBGDA_STATUS_WORDS as usize * 8..4096).step_by(8) {
            assert_eq!(status.0.load(offset), 0, "nothing else is in the page");
        }
    });
}
