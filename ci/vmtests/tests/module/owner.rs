// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whose page it is: fork, exec, threads, death.

use crate::fixture::{
    Doorbell, Pair, REPORT, alone, import_when_free, no_grants, report, settle, use_doorbells,
};
use ibgda_uapi::*;
use ibgda_vmtests::broker::{Granted, Session};
use ibgda_vmtests::machine::{self, StandInGpu, live_objects, wait_until};
use ibgda_vmtests::process::{End, Line, fork, in_child};
use ibgda_vmtests::verbs::{Loopback, REGISTER, Verbs};
use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// N5: what a child touches and calls.
#[test]
fn a_forked_child_has_neither_the_mapping_nor_the_session() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let doorbell = Doorbell::import(&session, pair.nic);
        let mapping = session.map(doorbell.granted, 4096).expect("map");
        session
            .populate(doorbell.granted.handle, mapping.address)
            .expect("populate");
        let queue = session
            .alloc_queue(4096, -1, IBGDA_MEM_WB)
            .expect("queue memory");
        let memory = session.map(queue, 4096).expect("map");
        memory.store(0, 1);
        for touched in [&mapping, &memory] {
            let end = in_child(|| {
                touched.store(0, 0);
                0
            });
            assert_eq!(end, End::Signal(libc::SIGSEGV));
        }
        let end = in_child(|| {
            assert_eq!(session.info().err(), Some(libc::EPERM));
            assert_eq!(session.release(doorbell.granted.handle), Err(libc::EPERM));
            assert_eq!(
                session.import(&doorbell.dmabuf, &doorbell.verbs.uverbs()),
                Err(libc::EPERM)
            );
            assert_eq!(session.map(doorbell.granted, 4096).err(), Some(libc::EPERM));
            0
        });
        assert_eq!(end, End::Exit(0));
        session
            .release(doorbell.granted.handle)
            .expect("the parent still has it");
    });
}

/// N6: the file is kept over execve.
#[test]
fn a_session_does_not_survive_exec() {
    alone(|| {
        let pair = Pair::new();
        let end = in_child(|| {
            let session = pair.session();
            let fd = session.as_raw_fd();
            // SAFETY: our descriptor.
            unsafe { libc::fcntl(fd, libc::F_SETFD, 0) };
            let script = format!(
                "import fcntl, struct, sys\n\
             try: fcntl.ioctl({fd}, 0xbd00, bytearray(struct.pack('<I', 40) + bytes(36)))\n\
             except OSError as error: sys.exit(error.errno)"
            );
            use std::os::unix::process::CommandExt;
            let error = Command::new("python3").args(["-c", &script]).exec();
            panic!("exec: {error}");
        });
        assert_eq!(end, End::Exit(libc::EPERM));
    });
}

/// N6, N8: the whole life of a page.
#[test]
fn a_page_is_its_owners_until_the_owner_is_dead_and_its_file_closed() {
    alone(|| {
        let pair = Pair::new();
        let mut owner = fork(|line| {
            let session = pair.session();
            let doorbell = Doorbell::import(&session, pair.nic);
            // Inherits the dma-buf, the uverbs file, and the broker's file.
            let mut heir = fork(|line| {
                let own = pair.session();
                let import = || own.import(&doorbell.dmabuf, &doorbell.verbs.uverbs());
                line.wait();
                assert_eq!(import(), Err(libc::EBUSY), "while the owner has it");
                line.go();
                line.wait();
                assert_eq!(import(), Err(libc::EBUSY), "after the owner's RELEASE");
                line.go();
                line.wait();
                assert_eq!(
                    import(),
                    Err(libc::EBUSY),
                    "after the owner closed its file, which we still hold"
                );
                line.go();
                // The owner dies now. It is our parent, so we see another one then.
                // SAFETY: no requirements.
                let owner = unsafe { libc::getppid() };
                line.wait();
                // SAFETY: no requirements.
                wait_until("the owner is dead", || unsafe { libc::getppid() } != owner);
                assert_eq!(
                    import(),
                    Err(libc::EBUSY),
                    "the owner is dead, its file is not released"
                );
                // SAFETY: closes the inherited descriptor, which this process does not use any more.
                unsafe { libc::close(session.as_raw_fd()) };
                import_when_free(&own, &doorbell.dmabuf, &doorbell.verbs.uverbs());
                report("ok");
                0
            });
            heir.go();
            heir.wait();
            session.release(doorbell.granted.handle).expect("release");
            heir.go();
            heir.wait();
            // SAFETY: the session is not used after this, and not closed again: the process ends below.
            unsafe { libc::close(session.as_raw_fd()) };
            heir.go();
            heir.wait();
            heir.go();
            line.go();
            // SAFETY: leaves the child to itself, without any clean-up.
            unsafe { libc::_exit(0) }
        });
        let report_file = Path::new(REPORT);
        let _ = fs::remove_file(report_file);
        owner.wait();
        assert_eq!(owner.end(), End::Exit(0));
        wait_until("the heir has the page", || report_file.exists());
        fs::remove_file(report_file).expect("remove the report");
    });
}

/// N8: the leader is dead, a thread is not.
#[test]
fn a_thread_that_outlives_its_leader_keeps_the_page() {
    alone(|| {
        let pair = Pair::new();
        let verbs = Verbs::open(pair.nic);
        let uar = verbs.alloc_uar();
        let dmabuf = verbs.export(&uar);
        let mut owner = fork(|line| {
            let session = pair.session();
            session.import(&dmabuf, &verbs.uverbs()).expect("import");
            drop(session);
            let mut line_of_thread = std::mem::replace(line, Line::dead());
            std::thread::spawn(move || {
                line_of_thread.go();
                line_of_thread.wait();
                // SAFETY: ends the process, leader or not.
                unsafe { libc::_exit(0) }
            });
            // SAFETY: ends this thread, the leader, alone.
            unsafe { libc::syscall(libc::SYS_exit, 0) };
            1
        });
        owner.wait();
        wait_until("the leader is a zombie", || {
            let stat = fs::read_to_string(format!("/proc/{}/stat", owner.pid)).expect("read stat");
            stat.contains(") Z ")
        });
        let session = pair.session();
        for _ in 0..20 {
            assert_eq!(
                session.import(&dmabuf, &verbs.uverbs()),
                Err(libc::EBUSY),
                "while a thread lives"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        owner.go();
        assert_eq!(owner.end(), End::Exit(0));
        import_when_free(&session, &dmabuf, &verbs.uverbs());
    });
}

/// N20: kill -9 with a doorbell in use.
#[test]
fn a_killed_owner_leaves_nothing_on_the_nic() {
    alone(|| {
        let pair = Pair::new();
        let crash = || {
            let mut child = fork(|line| {
                let session = pair.session();
                let doorbell = Doorbell::import(&session, pair.nic);
                let mapping = session.map(doorbell.granted, 4096).expect("map");
                let _qp = Loopback::new(&doorbell.verbs, &doorbell.uar);
                line.go();
                loop {
                    mapping.store(8, 0);
                }
            });
            child.wait();
            child.kill();
            assert_eq!(child.end(), End::Signal(libc::SIGKILL));
        };
        // mlx5_ib keeps a few things from the first use on.
        crash();
        settle();
        let before = live_objects(0);
        for _ in 0..5 {
            crash();
        }
        wait_until("the model's counts are back", || live_objects(0) == before);
    });
}

/// Waits until firmware hands the page out again. The context is older than the page's end, since one takes pages for itself
/// that it tells nobody of, and it keeps what it gets, since what it gave back would be the next one it gets.
fn wait_for_page(verbs: &Verbs, page: &str) {
    wait_until("the page is handed out again", || {
        verbs.alloc_uar().page_id.to_string() == page
    });
}

/// N20: a GPU goes on storing after everything was given back.
#[test]
fn a_gpu_that_keeps_storing_after_release_reaches_no_page_of_another_process() {
    alone(|| {
        let pair = Pair::new();
        let gpu = StandInGpu::new(pair.gpu);
        let mut owner = fork(|line| {
            let session = pair.session();
            let doorbell = Doorbell::import(&session, pair.nic);
            let qp = Loopback::new(&doorbell.verbs, &doorbell.uar);
            let address = machine::bar0(pair.nic) + doorbell.granted.bar_offset + REGISTER as u64;
            gpu.keep_storing(address, qp.stray_doorbell(), 200);
            drop(qp);
            // Everything a process can do to give the page back.
            session.release(doorbell.granted.handle).expect("release");
            drop(session);
            let Doorbell {
                verbs, uar, dmabuf, ..
            } = doorbell;
            fs::write(REPORT, uar.page_id.to_string()).expect("write the report");
            verbs.destroy(uar);
            drop((dmabuf, verbs));
            line.go();
            line.wait();
            0
        });
        owner.wait();
        let page = fs::read_to_string(REPORT).expect("read the report");
        fs::remove_file(REPORT).expect("remove the report");
        let session = pair.session();
        let verbs = Verbs::open(pair.nic);
        let has_page =
            |verbs: &Verbs| (0..8).any(|_| verbs.alloc_uar().page_id.to_string() == page);
        for _ in 0..10 {
            assert!(
                !has_page(&verbs),
                "firmware handed out the page the GPU still stores to"
            );
        }
        // A page of our own, and the GPU's stores do not reach it.
        let doorbell = Doorbell::import(&session, pair.nic);
        let mapping = session.map(doorbell.granted, 4096).expect("map");
        let mut qp = Loopback::new(&doorbell.verbs, &doorbell.uar);
        let stores = gpu.stores();
        for value in 1..10 {
            assert!(qp.write_rings(value, Duration::from_secs(10), |word| {
                mapping.store(REGISTER, word)
            }));
        }
        wait_until("the GPU has gone on storing", || {
            gpu.stores() > stores + 100
        });
        // Its GPU stops with it, as a context does.
        drop(gpu);
        owner.go();
        assert_eq!(owner.end(), End::Exit(0));
        wait_for_page(&verbs, &page);
    });
}

/// N11, N20: kill -9 at any point.
#[test]
fn a_process_killed_at_any_point_leaves_nothing_behind() {
    alone(|| {
        let pair = Pair::new();
        let kill_after = |delay: Duration| {
            let child = fork(|_| {
                let session = pair.session();
                use_doorbells(&session, pair.nic, || true);
                0
            });
            std::thread::sleep(delay);
            child.kill();
            assert_eq!(child.end(), End::Signal(libc::SIGKILL));
        };
        kill_after(Duration::from_millis(200));
        settle();
        let before = live_objects(0);
        for step in 0..60 {
            // From before the first ioctl to well into the loop.
            kill_after(Duration::from_micros(step * 1500));
        }
        wait_until("every grant has ended", no_grants);
        wait_until("the model's counts are back", || live_objects(0) == before);
    });
}

/// N6: a file that was passed on, as by SCM_RIGHTS, to a process that is no child of its owner.
#[test]
fn a_file_that_was_passed_on_is_of_no_use_but_keeps_the_page() {
    alone(|| {
        let pair = Pair::new();
        let verbs = Verbs::open(pair.nic);
        let dmabuf = verbs.export(&verbs.alloc_uar());
        let mut owner = fork(|line| {
            let session = pair.session();
            let granted = session.import(&dmabuf, &verbs.uverbs()).expect("import");
            fs::write(
                REPORT,
                format!(
                    "{} {} {}",
                    session.as_raw_fd(),
                    granted.handle,
                    granted.mmap_offset
                ),
            )
            .expect("write the report");
            line.go();
            line.wait();
            0
        });
        owner.wait();
        let report = fs::read_to_string(REPORT).expect("read the report");
        fs::remove_file(REPORT).expect("remove the report");
        let numbers: Vec<u64> = report
            .split(' ')
            .map(|number| number.parse().expect("a number"))
            .collect();
        // SAFETY: new descriptors, checked and owned.
        let passed = unsafe {
            let process = libc::syscall(libc::SYS_pidfd_open, owner.pid, 0);
            assert!(process >= 0);
            let process = OwnedFd::from_raw_fd(process as i32);
            let number = numbers[0] as i32;
            let fd = libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0);
            assert!(fd >= 0, "{}", std::io::Error::last_os_error());
            Session(fs::File::from_raw_fd(fd as i32))
        };
        let granted = Granted {
            handle: numbers[1] as u32,
            mmap_offset: numbers[2],
            bar_offset: 0,
        };
        assert_eq!(passed.info().err(), Some(libc::EPERM));
        assert_eq!(passed.release(granted.handle), Err(libc::EPERM));
        assert_eq!(
            passed.import(&dmabuf, &verbs.uverbs()),
            Err(libc::EPERM),
            "for ourselves, by another's file"
        );
        assert_eq!(passed.map(granted, 4096).err(), Some(libc::EPERM));
        owner.go();
        assert_eq!(owner.end(), End::Exit(0));
        let own = pair.session();
        assert_eq!(
            own.import(&dmabuf, &verbs.uverbs()),
            Err(libc::EBUSY),
            "the owner is dead, its file is not released"
        );
        drop(passed);
        import_when_free(&own, &dmabuf, &verbs.uverbs());
    });
}

/// N8: whatever of a mapped doorbell is taken away or closed, its page is handed to nobody else, and nobody else's queue
/// pair sees what its owner stores there.
#[test]
fn a_mapped_page_is_handed_to_nobody_whichever_of_its_files_is_closed() {
    for what in [
        "the UAR",
        "the dma-buf",
        "the uverbs file",
        "the broker's file",
    ] {
        alone(|| {
            let pair = Pair::new();
            let mut owner = fork(|line| {
                let session = pair.session();
                let Doorbell {
                    verbs,
                    uar,
                    dmabuf,
                    granted,
                } = Doorbell::import(&session, pair.nic);
                let mapping = session.map(granted, 4096).expect("map");
                session
                    .populate(granted.handle, mapping.address)
                    .expect("populate");
                let page = uar.page_id.to_string();
                let (mut session, mut dmabuf) = (Some(session), Some(dmabuf));
                match what {
                    "the UAR" => verbs.destroy(uar),
                    "the dma-buf" => dmabuf = None,
                    // Its context, with all that is in it, is the kernel's to keep.
                    "the uverbs file" => drop(verbs),
                    _ => session = None,
                }
                fs::write(REPORT, page).expect("write the report");
                line.go();
                line.wait();
                // What the other process's queue pair would take for its own.
                let word = fs::read_to_string(REPORT).expect("read the word");
                let word = word.parse().expect("a number");
                for _ in 0..100 {
                    mapping.store(REGISTER, word);
                }
                line.go();
                line.wait();
                drop((session, dmabuf, mapping));
                0
            });
            owner.wait();
            let page = fs::read_to_string(REPORT).expect("read the report");
            let verbs = Verbs::open(pair.nic);
            let uars: Vec<_> = (0..8).map(|_| verbs.alloc_uar()).collect();
            assert!(
                !uars.iter().any(|uar| uar.page_id.to_string() == page),
                "{what}: page {page} was handed out"
            );
            let session = pair.session();
            let granted = session
                .import(&verbs.export(&uars[0]), &verbs.uverbs())
                .expect("import");
            let mapping = session.map(granted, 4096).expect("map");
            let mut qp = Loopback::new(&verbs, &uars[0]);
            fs::write(REPORT, qp.stray_doorbell().to_string()).expect("write the word");
            let rings = |qp: &mut Loopback<'_>, value| {
                let rung = qp.write_rings(value, Duration::from_secs(10), |word| {
                    mapping.store(REGISTER, word)
                });
                assert!(rung, "{what}: write {value}");
            };
            rings(&mut qp, 1);
            owner.go();
            owner.wait();
            rings(&mut qp, 2);
            fs::remove_file(REPORT).expect("remove the report");
            owner.go();
            assert_eq!(owner.end(), End::Exit(0));
            drop((qp, mapping, session));
            // This does see a page that is handed out.
            wait_for_page(&verbs, &page);
        });
    }
}
