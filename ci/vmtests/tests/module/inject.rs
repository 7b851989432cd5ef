// SPDX-License-Identifier: MIT OR Apache-2.0
//! Allocations and copies that fail, on a kernel that can be told to fail them (CONFIG_FAILSLAB, FAIL_PAGE_ALLOC,
//! FAULT_INJECTION_USERCOPY and FAULT_INJECTION_DEBUG_FS).

use crate::fixture::{Pair, alone};
use ibgda_uapi::*;
use ibgda_vmtests::broker::Session;
use ibgda_vmtests::machine::entry_path;
use ibgda_vmtests::verbs::Verbs;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Of this thread: its n-th allocation or copy from now on fails.
struct Nth(File);

impl Nth {
    /// `None` on a kernel without.
    fn open() -> Option<Self> {
        let file = File::options()
            .read(true)
            .write(true)
            .open("/proc/thread-self/fail-nth")
            .ok()?;
        for (kind, file, value) in [
            ("failslab", "ignore-gfp-wait", "N"),
            ("fail_page_alloc", "ignore-gfp-wait", "N"),
            ("fail_page_alloc", "ignore-gfp-highmem", "N"),
            ("fail_page_alloc", "min-order", "0"),
        ] {
            let path = Path::new("/sys/kernel/debug").join(kind).join(file);
            if path.exists() {
                fs::write(path, value).expect("set how allocations fail");
            }
        }
        Some(Self(file))
    }

    /// Runs an action with its n-th point failing. `false`: it has fewer.
    fn strikes(&self, n: u32, action: impl FnOnce()) -> bool {
        self.0
            .write_all_at(n.to_string().as_bytes(), 0)
            .expect("arm");
        action();
        let mut left = [0; 16];
        // The reading itself may be what is struck.
        let read = self.0.read_at(&mut left, 0);
        let _ = self.0.write_at(b"0", 0);
        match read {
            Ok(length) => left[..length].starts_with(b"0"),
            Err(_) => false,
        }
    }
}

/// Releases an object. A call whose answer could not be copied out has done it all the same.
fn gone(session: &Session, handle: u32) {
    while !matches!(session.release(handle), Ok(()) | Err(libc::ENOENT)) {}
}

/// N12: every allocation and every copy of every call fails once. The call fails or does not, and the session holds what
/// it says; in the end nothing is left.
#[test]
fn a_call_whose_allocations_or_copies_fail_leaves_nothing_behind() {
    if Nth::open().is_none() {
        eprintln!("skipped: this kernel has no fault injection (/proc/thread-self/fail-nth)");
        return;
    }
    alone(|| {
        let nth = Nth::open().expect("fault injection");
        let pair = Pair::new();
        let verbs = Verbs::open(pair.nic);
        let dmabuf = verbs.export(&verbs.alloc_uar());
        let session = pair.session();
        let eventfd = crate::fixture::eventfd();
        let queue = session
            .alloc_queue(4096, -1, IBGDA_MEM_WB)
            .expect("queue memory");
        let kept = session
            .import(&dmabuf, &verbs.uverbs())
            .expect("a doorbell that is kept");
        let calls: [(&str, &dyn Fn()); 7] = [
            ("open and BIND", &|| {
                if let Ok(file) = File::options().read(true).write(true).open("/dev/ibgda") {
                    let _ = Session(file).bind(pair.gpu, pair.nic);
                }
            }),
            ("DOORBELL_IMPORT", &|| {
                if let Ok(granted) = session.import(&dmabuf, &verbs.uverbs()) {
                    gone(&session, granted.handle);
                }
            }),
            ("QUEUE_ALLOC", &|| {
                if let Ok(granted) = session.alloc_queue(16384, -1, IBGDA_MEM_WB) {
                    gone(&session, granted.handle);
                }
            }),
            ("mmap and POPULATE", &|| {
                for (granted, length) in [(kept, 4096), (queue, 4096)] {
                    if let Ok(mapping) = session.map(granted, length) {
                        let _ = session.populate(granted.handle, mapping.address);
                    }
                }
            }),
            ("EVENTFD", &|| {
                use std::os::fd::AsRawFd;
                let _ = session.set_eventfd(eventfd.as_raw_fd());
                let _ = session.set_eventfd(-1);
            }),
            ("EVENTS", &|| {
                let _ = session.events(8);
            }),
            ("mkdir of a pair", &|| {
                let path = entry_path("*@*");
                if fs::create_dir(&path).is_ok() {
                    while fs::remove_dir(&path).is_err() {}
                }
            }),
        ];
        for (name, call) in calls {
            let mut n = 1;
            while nth.strikes(n, call) {
                let info = session.fdinfo();
                for line in ["doorbells:\t1", "queues:\t1", "queue-bytes:\t4096"] {
                    assert!(
                        info.lines().any(|got| got == line),
                        "{name}, point {n}: not {line:?} in\n{info}"
                    );
                }
                n += 1;
                assert!(n < 10_000, "{name}: no end of points");
            }
            println!("{name}: {} points", n - 1);
            assert!(n > 1, "{name}: nothing was struck");
        }
        assert!(!entry_path("*@*").exists());
    });
}
