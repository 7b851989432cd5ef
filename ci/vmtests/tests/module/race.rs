// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two at once, and calls that are made to wait.

use crate::fixture::{Doorbell, Pair, alone};
use ibgda_uapi::*;
use ibgda_vmtests::broker::{Granted, Mapping, Number, Session, ioctl};
use ibgda_vmtests::machine::{self, Allowed, wait_until};
use ibgda_vmtests::verbs::{REGISTER, Verbs};
use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// N11: RELEASE twice at once.
#[test]
fn of_two_releases_at_once_one_finds_the_doorbell() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let doorbell = Doorbell::import(&session, pair.nic);
        session.release(doorbell.granted.handle).expect("release");
        let barrier = Barrier::new(2);
        let handle = AtomicU32::new(0);
        let release = || {
            barrier.wait();
            let result = session.release(handle.load(Ordering::Relaxed));
            barrier.wait();
            result
        };
        thread::scope(|scope| {
            const ROUNDS: usize = 200;
            let other = scope.spawn(|| (0..ROUNDS).map(|_| release()).collect::<Vec<_>>());
            let mut mine = Vec::new();
            for _ in 0..ROUNDS {
                let granted = session
                    .import(&doorbell.dmabuf, &doorbell.verbs.uverbs())
                    .expect("import");
                let _mapping = session.map(granted, 4096).expect("map");
                handle.store(granted.handle, Ordering::Relaxed);
                mine.push(release());
            }
            let others = other.join().expect("the other thread ends well");
            for pair in mine.into_iter().zip(others) {
                assert!(
                    matches!(
                        pair,
                        (Ok(()), Err(libc::ENOENT)) | (Err(libc::ENOENT), Ok(()))
                    ),
                    "{pair:?}"
                );
            }
        });
        assert!(
            session.fdinfo().contains("\ndoorbells:\t0\n"),
            "{}",
            session.fdinfo()
        );
    });
}

/// N11: IMPORT and RELEASE against close of the same file.
#[test]
fn closing_the_file_in_the_midst_of_its_calls_leaves_nothing_behind() {
    alone(|| {
        let pair = Pair::new();
        let verbs = Verbs::open(pair.nic);
        let dmabuf = verbs.export(&verbs.alloc_uar());
        for round in 0..100 {
            let session = pair.session();
            let number = Number(session.0.into_raw_fd());
            thread::scope(|scope| {
                let (dmabuf, uverbs) = (&dmabuf, verbs.uverbs());
                let caller = scope.spawn(move || {
                    let session = Session(unowned(number));
                    let mut imports = 0;
                    // Until the number is nobody's.
                    while let Ok(granted) = session.import(dmabuf, &uverbs) {
                        imports += 1;
                        let _ = session.map(granted, 4096);
                        let _ = session.release(granted.handle);
                    }
                    let _ = session.0.into_raw_fd();
                    imports
                });
                thread::sleep(Duration::from_micros(round * 100));
                // SAFETY: the number is the session's, which nobody closes but this.
                drop(unsafe { OwnedFd::from_raw_fd(number.0) });
                caller.join().expect("the caller ends well");
            });
        }
    });
}

/// The file of a number that somebody else closes.
fn unowned(number: Number) -> fs::File {
    // SAFETY: the caller gives it up with `into_raw_fd`.
    unsafe { fs::File::from_raw_fd(number.0) }
}

/// N11: faults, mmap and POPULATE against the destruction of the UAR. Once it is destroyed, every store lands in the sink.
#[test]
fn a_mapping_made_while_its_uar_is_destroyed_leads_to_the_sink() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let mut made = 0;
        for round in 0..60_u64 {
            let Doorbell {
                verbs,
                uar,
                granted,
                ..
            } = Doorbell::import(&session, pair.nic);
            let destroyed = AtomicBool::new(false);
            thread::scope(|scope| {
                let user = scope.spawn(|| {
                    let mut count = 0;
                    loop {
                        let over = destroyed.load(Ordering::Acquire);
                        let mapping = session.map(granted, 4096).expect("map");
                        let populated = session.populate(granted.handle, mapping.address);
                        mapping.store(REGISTER, round + 1);
                        if over {
                            assert_eq!(populated, Err(libc::ENOLINK));
                            assert_eq!(mapping.load(REGISTER), round + 1, "not the sink");
                            return count;
                        }
                        count += 1;
                    }
                });
                thread::sleep(Duration::from_micros(round * 50));
                verbs.destroy(uar);
                destroyed.store(true, Ordering::Release);
                made += user.join().expect("the user ends well");
            });
            session.release(granted.handle).expect("release");
        }
        assert!(made > 0, "no mapping was made in time");
    });
}

/// N11: POPULATE against munmap of the same address.
#[test]
fn populate_meets_only_the_doorbells_mapping_while_others_take_its_place() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let doorbell = Doorbell::import(&session, pair.nic);
        let place = session.map(doorbell.granted, 4096).expect("map");
        let stop = AtomicBool::new(false);
        let address = place.address as usize;
        let handle = doorbell.granted.handle;
        thread::scope(|scope| {
            let populate = scope.spawn(|| {
                let mut counts = [0_u32; 2];
                while !stop.load(Ordering::Relaxed) {
                    match session.populate(handle, address as *const u8) {
                        Ok(()) => counts[0] += 1,
                        Err(libc::EFAULT) => counts[1] += 1,
                        Err(error) => panic!("errno {error}"),
                    }
                }
                counts
            });
            let fixed = |fd: i32, flags: i32, offset: u64| {
                // SAFETY: the place is ours, and nobody reads or writes there.
                let mapped = unsafe {
                    libc::mmap(
                        address as *mut libc::c_void,
                        4096,
                        libc::PROT_READ | libc::PROT_WRITE,
                        libc::MAP_FIXED | flags,
                        fd,
                        offset as i64,
                    )
                };
                assert_eq!(mapped as usize, address);
            };
            for _ in 0..2000 {
                fixed(-1, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, 0);
                // SAFETY: as above.
                assert_eq!(unsafe { *(address as *const u64) }, 0, "not a fresh page");
                fixed(
                    session.as_raw_fd(),
                    libc::MAP_SHARED,
                    doorbell.granted.mmap_offset,
                );
            }
            stop.store(true, Ordering::Relaxed);
            let counts = populate.join().expect("the thread ends well");
            assert!(counts[0] > 0, "{counts:?}");
        });
    });
}

/// N11: rmdir of the pair against IMPORT and REBIND: when it has returned, nothing is granted.
#[test]
fn nothing_is_granted_once_the_entry_is_removed() {
    alone(|| {
        let Pair { gpu, nic, allowed } = Pair::new();
        let session = Session::bound(gpu, nic);
        let doorbell = Doorbell::import(&session, nic);
        session.release(doorbell.granted.handle).expect("release");
        let (dmabuf, uverbs) = (&doorbell.dmabuf, doorbell.verbs.uverbs());
        let mut allowed = Some(allowed);
        let removed = AtomicBool::new(false);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let importer = scope.spawn(|| {
                let mut imports = 0;
                while !stop.load(Ordering::Relaxed) {
                    let late = removed.load(Ordering::Acquire);
                    let result = session.import(dmabuf, &uverbs);
                    match result {
                        Ok(Granted { handle, .. }) => {
                            // What the other thread said before and after is about this import.
                            assert!(
                                !(late && removed.load(Ordering::Acquire)),
                                "granted without permission"
                            );
                            imports += 1;
                            session.release(handle).expect("release");
                        }
                        Err(libc::ENOLINK) => {
                            let _ = session.rebind();
                        }
                        Err(error) => panic!("errno {error}"),
                    }
                }
                imports
            });
            for _ in 0..30 {
                thread::sleep(Duration::from_millis(5));
                drop(allowed.take());
                removed.store(true, Ordering::Release);
                thread::sleep(Duration::from_millis(5));
                removed.store(false, Ordering::Release);
                allowed = Some(Allowed::pair(gpu, nic));
            }
            stop.store(true, Ordering::Relaxed);
            assert!(importer.join().expect("the thread ends well") > 0);
        });
    });
}

/// Memory of which nobody supplies the pages: whoever touches it waits, also the kernel.
struct Missing {
    page: Mapping,
    userfault: OwnedFd,
}

#[repr(C)]
#[derive(Default)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioRegister {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

impl Missing {
    fn new() -> Self {
        const API: u64 = 0xc018_aa3f;
        const REGISTER_MISSING: u64 = 0xc020_aa00;
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let page = Mapping::new(&Number(-1), 8192, rw, anonymous, 0).expect("pages");
        // The first page is there.
        page.store(0, 0);
        // SAFETY: a new descriptor, checked and owned; the arguments are userfaultfd's.
        let userfault = unsafe {
            let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC);
            assert!(fd >= 0, "userfaultfd: {}", std::io::Error::last_os_error());
            let userfault = OwnedFd::from_raw_fd(fd as i32);
            let mut api = UffdioApi {
                api: 0xaa,
                ..UffdioApi::default()
            };
            assert_eq!(libc::ioctl(fd as i32, API, &mut api), 0);
            let mut register = UffdioRegister {
                start: page.address as u64 + 4096,
                len: 4096,
                mode: 1,
                ioctls: 0,
            };
            assert_eq!(libc::ioctl(fd as i32, REGISTER_MISSING, &mut register), 0);
            userfault
        };
        Self { page, userfault }
    }

    /// Waits until somebody waits for the page.
    fn wait(&self) {
        let mut poll = libc::pollfd {
            fd: self.userfault.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry.
        assert_eq!(unsafe { libc::poll(&mut poll, 1, 10_000) }, 1);
    }

    /// Supplies the page.
    fn supply(self) -> Mapping {
        // Nobody is told any more: the page is an ordinary one.
        drop(self.userfault);
        self.page
    }
}

/// N22: a call of the broker's is stalled where it reads or writes its caller's memory; meanwhile a UAR is destroyed, a
/// uverbs file closed, a policy entry removed and the RDMA driver unbound. None of them waits for the call.
#[test]
fn a_call_that_waits_for_its_callers_memory_delays_nobody_else() {
    alone(|| {
        let Pair { gpu, nic, allowed } = Pair::new();
        let mut allowed = Some(allowed);
        // The command's number, its size, and where in it the missing page begins.
        for (name, command, size, at) in [
            ("INFO, read", IBGDA_IOC_INFO, 40, 16),
            ("BIND, read", IBGDA_IOC_BIND, 136, 16),
            ("RELEASE, read", IBGDA_IOC_RELEASE, 8, 4),
            ("QUEUE_ALLOC, read", IBGDA_IOC_QUEUE_ALLOC, 40, 24),
            ("EVENTS, written", IBGDA_IOC_EVENTS, 24, 24),
        ] {
            let session = Session::bound(gpu, nic);
            let status = session.status();
            let doorbell = Doorbell::import(&session, nic);
            let other = Doorbell::import(&session, nic);
            other.verbs.destroy(other.uar);
            let missing = Missing::new();
            let start = missing.page.address as usize + 4096 - at;
            for offset in (0..at).step_by(4) {
                let word = if offset == 0 { size } else { 0_u32 };
                // SAFETY: in the first page.
                unsafe { ((start + offset) as *mut u32).write(word) };
            }
            if command == IBGDA_IOC_EVENTS {
                // The records go to the missing page.
                // SAFETY: in the first page.
                unsafe {
                    ((start + 8) as *mut u64).write(missing.page.address as u64 + 4096);
                    ((start + 16) as *mut u32).write(8);
                }
            }
            thread::scope(|scope| {
                let stalled = scope.spawn(|| {
                    // SAFETY: the memory is as long as the argument.
                    unsafe { ioctl(&session, command, start as *mut u8) }
                });
                missing.wait();
                // A scope waits for its threads, so a panic would hang with them.
                let (done, waits) = channel::<()>();
                scope.spawn(move || {
                    if waits.recv_timeout(Duration::from_secs(20)) == Err(RecvTimeoutError::Timeout)
                    {
                        eprintln!("{name}: others wait for the call");
                        // SAFETY: ends the process, and with it the stalled call.
                        unsafe { libc::_exit(1) };
                    }
                });
                let Doorbell {
                    verbs, uar, dmabuf, ..
                } = doorbell;
                verbs.destroy(uar);
                drop((verbs, dmabuf));
                drop(allowed.take());
                allowed = Some(Allowed::pair(gpu, nic));
                machine::unbind_mlx5_ib(nic)();
                drop(done);
                assert_eq!(status.state(), IBGDA_STATE_LOST);
                assert!(!stalled.is_finished(), "{name}: the call has not waited");
                missing.supply();
                let _ = stalled.join().expect("the call ends");
            });
        }
    });
}

/// N15: binding against the removal of the GPU: when that has returned, no session has it.
#[test]
fn no_session_is_left_with_a_gpu_that_was_removed_as_it_was_bound() {
    alone(|| {
        let pair = Pair::new();
        let mut bound = 0;
        for _ in 0..10 {
            let stop = AtomicBool::new(false);
            let sessions = thread::scope(|scope| {
                let binder = scope.spawn(|| {
                    let mut sessions = Vec::new();
                    while !stop.load(Ordering::Relaxed) {
                        let session = Session::open();
                        if session.bind(pair.gpu, pair.nic).is_ok() {
                            sessions.push(session);
                        }
                    }
                    sessions
                });
                thread::sleep(Duration::from_millis(5));
                fs::write(pair.gpu.sysfs().join("remove"), "1").expect("remove the GPU");
                stop.store(true, Ordering::Relaxed);
                binder.join().expect("the binder ends well")
            });
            bound += sessions.len();
            let ready = sessions
                .iter()
                .filter(|session| session.status().state() == IBGDA_STATE_READY)
                .count();
            fs::write("/sys/bus/pci/rescan", "1").expect("rescan");
            wait_until("the GPU is back", || pair.gpu.sysfs().exists());
            assert_eq!(
                ready,
                0,
                "of {} sessions with a removed GPU",
                sessions.len()
            );
        }
        assert!(bound > 0, "no session was bound in time");
    });
}
