// SPDX-License-Identifier: MIT OR Apache-2.0
//! DOORBELL_IMPORT: what is no doorbell page of the bound NIC, and how many there may be.

use crate::fixture::{Doorbell, Pair, alone};
use ibgda_uapi::*;
use ibgda_vmtests::broker::{Number, Session};
use ibgda_vmtests::machine::{Allowed, gpus, nics};
use ibgda_vmtests::process::{End, in_child};
use ibgda_vmtests::verbs::Verbs;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

#[test]
fn import_needs_a_bound_session() {
    alone(|| {
        let session = Session::open();
        assert_eq!(
            session.import(&Number(-1), &Number(-1)),
            Err(libc::ENOTCONN)
        );
        assert_eq!(
            session.alloc_queue(4096, -1, IBGDA_MEM_WB),
            Err(libc::ENOTCONN)
        );
        assert_eq!(session.status_offset(), Err(libc::ENOTCONN));
        assert_eq!(session.rebind().err(), Some(libc::ENOTCONN));
    });
}

/// N7: other kinds of files, and the uverbs file of another context.
#[test]
fn import_refuses_descriptors_of_another_kind() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let verbs = Verbs::open(pair.nic);
        let uar = verbs.alloc_uar();
        let dmabuf = verbs.export(&uar);
        let null = File::open("/dev/null").expect("open /dev/null");
        let other = Verbs::open(pair.nic);
        let uverbs = verbs.uverbs();
        assert_eq!(
            session.import(&null, &uverbs),
            Err(libc::EBADF),
            "a file as dma-buf"
        );
        assert_eq!(
            session.import(&Number(-1), &uverbs),
            Err(libc::EBADF),
            "no dma-buf"
        );
        assert_eq!(
            session.import(&Number(1000), &uverbs),
            Err(libc::EBADF),
            "a closed dma-buf"
        );
        assert_eq!(
            session.import(&dmabuf, &null),
            Err(libc::EBADF),
            "a device as uverbs file"
        );
        assert_eq!(
            session.import(&dmabuf, &Number(-1)),
            Err(libc::EBADF),
            "no uverbs file"
        );
        assert_eq!(
            session.import(&dmabuf, &session),
            Err(libc::EBADF),
            "the broker as uverbs file"
        );
        assert_eq!(
            session.import(&dmabuf, &other.uverbs()),
            Err(libc::EINVAL),
            "another context's uverbs file"
        );
        assert_eq!(
            session.import_as(&dmabuf, &uverbs, 7),
            Err(libc::EINVAL),
            "an unknown type"
        );
        assert_eq!(
            session.import_as(&dmabuf, &uverbs, IBGDA_MEM_WB),
            Err(libc::EOPNOTSUPP)
        );
        session
            .import(&dmabuf, &uverbs)
            .expect("after all those the right ones");
    });
}

/// N7: the wrong exporter.
#[test]
fn import_refuses_the_dmabuf_of_another_exporter() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let verbs = Verbs::open(pair.nic);
        let dmabuf = udmabuf();
        assert_eq!(session.import(&dmabuf, &verbs.uverbs()), Err(libc::EINVAL));
        match heap_dmabuf() {
            Some(dmabuf) => {
                assert_eq!(session.import(&dmabuf, &verbs.uverbs()), Err(libc::EINVAL));
            }
            None => eprintln!("skipped in part: this kernel has no dma-buf heap"),
        }
    });
}

/// A page of a memfd as a dma-buf.
fn udmabuf() -> OwnedFd {
    #[repr(C)]
    struct Create {
        memfd: u32,
        flags: u32,
        offset: u64,
        size: u64,
    }
    const CREATE: u32 = 0x4018_7542;
    // SAFETY: new descriptors, checked and owned; the argument is udmabuf's.
    unsafe {
        let memfd = libc::memfd_create(c"page".as_ptr(), libc::MFD_ALLOW_SEALING);
        assert!(memfd >= 0);
        let memfd = OwnedFd::from_raw_fd(memfd);
        assert_eq!(libc::ftruncate(memfd.as_raw_fd(), 4096), 0);
        assert_eq!(
            libc::fcntl(memfd.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK),
            0
        );
        let device = File::options()
            .read(true)
            .write(true)
            .open("/dev/udmabuf")
            .expect("open /dev/udmabuf");
        let create = Create {
            memfd: memfd.as_raw_fd() as u32,
            flags: 0,
            offset: 0,
            size: 4096,
        };
        let fd = libc::ioctl(device.as_raw_fd(), CREATE.into(), &create);
        assert!(fd >= 0, "udmabuf: {}", std::io::Error::last_os_error());
        OwnedFd::from_raw_fd(fd)
    }
}

/// A page of the system's dma-buf heap, if the kernel has one.
fn heap_dmabuf() -> Option<OwnedFd> {
    #[repr(C)]
    #[derive(Default)]
    struct Allocation {
        len: u64,
        fd: u32,
        fd_flags: u32,
        heap_flags: u64,
    }
    const ALLOC: u64 = 0xc018_4800;
    let heap = match File::open("/dev/dma_heap/system") {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        heap => heap.expect("open the heap"),
    };
    let mut allocation = Allocation {
        len: 4096,
        fd_flags: (libc::O_RDWR | libc::O_CLOEXEC) as u32,
        ..Allocation::default()
    };
    // SAFETY: the argument is the heap's; the new descriptor is checked and owned.
    unsafe {
        let done = libc::ioctl(heap.as_raw_fd(), ALLOC, &mut allocation);
        assert_eq!(done, 0, "dma heap: {}", std::io::Error::last_os_error());
        Some(OwnedFd::from_raw_fd(allocation.fd as i32))
    }
}

/// N7: the BAR of another device.
#[test]
fn import_refuses_a_doorbell_of_another_nic() {
    alone(|| {
        let gpu = gpus()[0];
        let _allowed = [nics()[0], nics()[1]].map(|nic| Allowed::pair(gpu, nic));
        // Both ways: one of the two BARs lies above the other, so each of the check's bounds is met.
        for (bound, other) in [(nics()[0], nics()[1]), (nics()[1], nics()[0])] {
            let session = Session::bound(gpu, bound);
            let verbs = Verbs::open(other);
            let dmabuf = verbs.export(&verbs.alloc_uar());
            assert_eq!(
                session.import(&dmabuf, &verbs.uverbs()),
                Err(libc::ERANGE),
                "a doorbell of {other} for a session on {bound}"
            );
        }
    });
}

/// N8: a page that is not a UAR any more.
#[test]
fn import_refuses_a_destroyed_uar() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let verbs = Verbs::open(pair.nic);
        let uar = verbs.alloc_uar();
        let dmabuf = verbs.export(&uar);
        verbs.destroy(uar);
        assert_eq!(session.import(&dmabuf, &verbs.uverbs()), Err(libc::EINVAL));
    });
}

#[test]
fn import_places_the_page_where_firmware_says() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let doorbell = Doorbell::import(&session, pair.nic);
        assert_eq!(
            doorbell.granted.bar_offset,
            u64::from(doorbell.uar.page_id) * 4096
        );
    });
}

/// N16: the pages of one session.
#[test]
fn one_session_cannot_fill_the_table() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let limit = session.info().expect("INFO").max_doorbells;
        let doorbell = Doorbell::import(&session, pair.nic);
        let again = || session.import(&doorbell.dmabuf, &doorbell.verbs.uverbs());
        for _ in 1..limit {
            again().expect("within the limit");
        }
        assert_eq!(again(), Err(libc::EDQUOT));
        session
            .release(doorbell.granted.handle)
            .expect("release one");
        again().expect("there is room for one");
    });
}

/// N16: the pages of one process, over all its sessions.
#[test]
fn one_process_cannot_fill_the_table() {
    alone(|| {
        let pair = Pair::new();
        let verbs = Verbs::open(pair.nic);
        let dmabuf = verbs.export(&verbs.alloc_uar());
        let sessions: Vec<_> = (0..5).map(|_| pair.session()).collect();
        let limit = sessions[0].info().expect("INFO").max_doorbells as usize;
        for number in 0..4096 {
            sessions[number / limit]
                .import(&dmabuf, &verbs.uverbs())
                .unwrap_or_else(|error| panic!("grant {number}: errno {error}"));
        }
        let last = &sessions[4096 / limit];
        assert_eq!(last.import(&dmabuf, &verbs.uverbs()), Err(libc::EDQUOT));
        // A doorbell that was released is still granted; another process has a share of its own.
        let end = in_child(|| {
            let verbs = Verbs::open(pair.nic);
            let dmabuf = verbs.export(&verbs.alloc_uar());
            pair.session()
                .import(&dmabuf, &verbs.uverbs())
                .expect("within the limit");
            0
        });
        assert_eq!(end, End::Exit(0));
    });
}

/// N16: names that were used are not used again, so that a stale one cannot name another object.
#[test]
fn handles_and_offsets_are_never_used_again() {
    alone(|| {
        let pair = Pair::new();
        let sessions = [pair.session(), pair.session()];
        let (mut handles, mut end) = ([0; 2], 0);
        for round in 0..2000 {
            let which = round % 2;
            let length = 4096 * (1 + round as u64 % 3);
            let queue = sessions[which]
                .alloc_queue(length, -1, IBGDA_MEM_WB)
                .expect("queue memory");
            assert!(queue.handle > handles[which], "{queue:?} in round {round}");
            assert!(queue.mmap_offset >= end, "{queue:?} in round {round}");
            handles[which] = queue.handle;
            end = queue.mmap_offset + length;
            sessions[which].release(queue.handle).expect("release");
        }
    });
}
