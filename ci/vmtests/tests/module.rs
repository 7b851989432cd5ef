// SPDX-License-Identifier: MIT OR Apache-2.0
//! The module against the real mlx5 driver: what it refuses, what it takes away, and whom it keeps a page from.
//!
//! The tests share the machine, so they run with `--test-threads=1`.

use ibgda_uapi::*;
use ibgda_verbs_sys::uverbs::{Uar, UarType, alloc_uar, export_dmabuf};
use ibgda_vmtests::{
    broker::{Granted, Mapping, Number, Session, Status, ioctl},
    machine::{
        self, Allowed, Bdf, StandInGpu, entry_path, gpus, live_objects, model_counts, nics,
        wait_until,
    },
    process::{End, Line, fork, in_child},
    verbs::{Loopback, REGISTER, Verbs},
};
use std::{
    ffi::CString,
    fs::{self, File},
    io::Read,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::Path,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

/// One GPU and one NIC that may meet.
struct Pair {
    gpu: Bdf,
    nic: Bdf,
    _allowed: Allowed,
}

impl Pair {
    fn new() -> Self {
        let (gpu, nic) = (gpus()[0], nics()[0]);
        Self {
            gpu,
            nic,
            _allowed: Allowed::pair(gpu, nic),
        }
    }

    fn session(&self) -> Session {
        Session::bound(self.gpu, self.nic)
    }
}

/// A doorbell and all that it came from.
struct Doorbell {
    verbs: Verbs,
    uar: Uar,
    dmabuf: OwnedFd,
    granted: Granted,
}

impl Doorbell {
    fn import(session: &Session, nic: Bdf) -> Self {
        let verbs = Verbs::open(nic);
        let uar = verbs.alloc_uar();
        let dmabuf = verbs.export(&uar);
        let granted = session
            .import(&dmabuf, &verbs.uverbs())
            .expect("import a UAR");
        Self {
            verbs,
            uar,
            dmabuf,
            granted,
        }
    }
}

/// Runs a test in a process of its own. A page is its process's until that is dead: in one process for all, each test would
/// find the pages of those before it.
fn alone(test: impl FnOnce()) {
    let end = in_child(|| {
        test();
        0
    });
    assert_eq!(end, End::Exit(0));
}

fn eventfd() -> File {
    // SAFETY: a new descriptor, which we own.
    unsafe { File::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) }
}

fn signals(mut eventfd: &File) -> u64 {
    let mut count = [0; 8];
    eventfd
        .read_exact(&mut count)
        .map_or(0, |()| u64::from_ne_bytes(count))
}

fn module_is_loaded() -> bool {
    Path::new("/sys/module/ibgda").exists()
}

fn run(program: &str, arguments: &[&str]) -> bool {
    let status = Command::new(program).args(arguments).status();
    status
        .unwrap_or_else(|error| panic!("{program}: {error}"))
        .success()
}

/// `EBUSY` while `condition` is being fulfilled by somebody else's clean-up.
fn import_when_free(session: &Session, dmabuf: &impl AsRawFd, uverbs: &impl AsRawFd) -> Granted {
    let mut granted = None;
    wait_until("the page is free", || {
        match session.import(dmabuf, uverbs) {
            Ok(new) => {
                granted = Some(new);
                true
            }
            Err(libc::EBUSY) => false,
            Err(error) => panic!("import: errno {error}"),
        }
    });
    granted.expect("imported")
}

// Arguments.

#[test]
fn info_tells_the_limits_and_only_features_that_work() {
    alone(|| {
        let session = Session::open();
        let info = session.info().expect("INFO needs no bind");
        assert_eq!(
            (info.abi_version, info.page_size),
            (IBGDA_ABI_VERSION, IBGDA_PAGE_SIZE)
        );
        assert_eq!(
            info.features & IBGDA_FEATURE_DOORBELL_UC,
            IBGDA_FEATURE_DOORBELL_UC
        );
        assert!(info.max_doorbells > 0 && info.max_queues > 0 && info.max_queue_bytes > 0);

        let pair = Pair::new();
        let session = pair.session();
        let verbs = Verbs::open(pair.nic);
        for (feature, mem_type, kind) in [
            (IBGDA_FEATURE_DOORBELL_UC, IBGDA_MEM_UC, UarType::NonCached),
            (IBGDA_FEATURE_DOORBELL_WC, IBGDA_MEM_WC, UarType::BlueFlame),
        ] {
            let uar = verbs.alloc_uar_of(kind).expect("allocate a UAR");
            let dmabuf = verbs.export(&uar);
            let works = session
                .import_as(&dmabuf, &verbs.uverbs(), mem_type)
                .map(|_| ());
            let expected = if info.features & feature != 0 {
                Ok(())
            } else {
                Err(libc::EOPNOTSUPP)
            };
            assert_eq!(works, expected, "doorbell of type {mem_type}");
        }
        for (feature, mem_type) in [
            (IBGDA_FEATURE_QUEUE_UC, IBGDA_MEM_UC),
            (IBGDA_FEATURE_QUEUE_WC, IBGDA_MEM_WC),
        ] {
            let works = session.alloc_queue(4096, -1, mem_type).map(|_| ());
            let expected = if info.features & feature != 0 {
                Ok(())
            } else {
                Err(libc::EOPNOTSUPP)
            };
            assert_eq!(works, expected, "queue memory of type {mem_type}");
        }
    });
}

#[test]
fn an_argument_of_wrong_size_or_with_unknown_bits_is_refused() {
    alone(|| {
        let session = Session::open();
        let mut bytes = [0_u8; 8192];
        let mut info = |size: u32, poison: Option<usize>| {
            bytes.fill(0);
            bytes[..4].copy_from_slice(&size.to_ne_bytes());
            if let Some(at) = poison {
                bytes[at] = 1;
            }
            // SAFETY: no command reads or writes beyond 4096 bytes.
            let result = unsafe { ioctl(&session, IBGDA_IOC_INFO, bytes.as_mut_ptr()) };
            result.map(|()| bytes)
        };
        assert_eq!(info(0, None), Err(libc::EINVAL));
        assert_eq!(
            info(39, None),
            Err(libc::EINVAL),
            "shorter than the first version"
        );
        assert_eq!(info(40, Some(4)), Err(libc::EINVAL), "a flag nobody knows");
        assert_eq!(info(48, Some(47)), Err(libc::E2BIG), "a field nobody knows");
        assert_eq!(info(4096, Some(4095)), Err(libc::E2BIG));
        assert_eq!(info(4097, None), Err(libc::E2BIG));
        assert_eq!(info(u32::MAX, None), Err(libc::E2BIG));
        let answer = info(4096, None).expect("zeros beyond what is known");
        assert_eq!(answer[8..12], IBGDA_ABI_VERSION.to_ne_bytes());
        assert!(
            answer[40..].iter().all(|&byte| byte == 0),
            "nothing is written beyond the structure"
        );

        for command in [0, 0xbd0a, 0xbdff, IBGDA_IOC_INFO | 0xc028_0000, 0x5401] {
            // SAFETY: as above.
            let result = unsafe { ioctl(&session, command, bytes.as_mut_ptr()) };
            assert_eq!(result, Err(libc::ENOTTY), "command {command:#x}");
        }
        // SAFETY: the kernel checks the address.
        let result = unsafe { ioctl(&session, IBGDA_IOC_INFO, 8 as *mut u8) };
        assert_eq!(result, Err(libc::EFAULT));
    });
}

#[test]
fn an_answer_that_cannot_be_written_leaves_nothing_behind() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        // Read-only: the argument can be fetched, the answer not stored.
        let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let page = Mapping::new(
            &Number(-1),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            anonymous,
            0,
        )
        .expect("a page");
        page.store(0, size_of::<ibgda_queue_alloc>() as u64);
        page.store(8, 4096);
        page.store(16, u64::from(u32::MAX));
        page.protect(libc::PROT_READ).expect("make it read-only");
        // SAFETY: a queue_alloc argument.
        let result = unsafe { ioctl(&session, IBGDA_IOC_QUEUE_ALLOC, page.address) };
        assert_eq!(result, Err(libc::EFAULT));
        assert!(
            session.fdinfo().contains("\nqueues:\t0\n"),
            "{}",
            session.fdinfo()
        );
    });
}

// Bind.

#[test]
fn bind_refuses_what_is_no_gpu_no_nic_or_not_there() {
    alone(|| {
        let pair = Pair::new();
        let session = Session::open();
        let absent = Bdf {
            bus: 0xee,
            ..pair.nic
        };
        let bridge = Bdf::parse("0000:00:00.0");
        assert_eq!(session.bind(absent, pair.nic).err(), Some(libc::ENODEV));
        assert_eq!(session.bind(pair.gpu, absent).err(), Some(libc::ENODEV));
        let far = Bdf {
            domain: u32::MAX,
            ..pair.nic
        };
        assert_eq!(session.bind(pair.gpu, far).err(), Some(libc::ENODEV));
        assert_eq!(
            session.bind(bridge, pair.nic).err(),
            Some(libc::EINVAL),
            "a bridge as GPU"
        );
        assert_eq!(
            session.bind(pair.gpu, bridge).err(),
            Some(libc::EINVAL),
            "a bridge as NIC"
        );
        assert_eq!(
            session.bind(pair.nic, pair.nic).err(),
            Some(libc::EINVAL),
            "a NIC as GPU"
        );
        assert_eq!(
            session.bind(pair.gpu, pair.gpu).err(),
            Some(libc::EINVAL),
            "a GPU as NIC"
        );
        let no_such = Bdf {
            device: 32,
            ..pair.nic
        };
        assert_eq!(
            session.bind(pair.gpu, no_such).err(),
            Some(libc::EINVAL),
            "device 32"
        );
        session
            .bind(pair.gpu, pair.nic)
            .expect("after all those the pair binds");
    });
}

#[test]
fn bind_tells_how_the_two_reach_each_other() {
    alone(|| {
        let pair = Pair::new();
        let session = Session::open();
        let bind = session.bind(pair.gpu, pair.nic).expect("bind");
        let name: Vec<u8> = bind
            .ibdev_name
            .iter()
            .map(|&c| c as u8)
            .take_while(|&c| c != 0)
            .collect();
        assert!(
            pair.nic
                .sysfs()
                .join("infiniband")
                .join(String::from_utf8(name).expect("a name"))
                .exists()
        );
        assert_eq!((bind.path, bind.path_distance), (IBGDA_PATH_SWITCH, 4));
        assert_eq!(bind.generation, 1);
        let sysfs = |file: &str| {
            fs::read_to_string(pair.nic.sysfs().join(file))
                .expect("read sysfs")
                .trim()
                .to_owned()
        };
        assert_eq!(bind.nic_node.to_string(), sysfs("numa_node"));
        assert_eq!(bind.nic_link.width.to_string(), sysfs("current_link_width"));
        let speed = f64::from(bind.nic_link.speed) / 1000.0;
        assert!(
            sysfs("current_link_speed").starts_with(&format!("{speed:.1} GT/s")),
            "{speed}"
        );
        assert_eq!(session.bind(pair.gpu, pair.nic).err(), Some(libc::EALREADY));
    });
}

#[test]
fn nothing_is_allowed_that_the_policy_does_not_name() {
    alone(|| {
        let (gpu, nics) = (gpus()[0], nics());
        let session = Session::open();
        assert_eq!(session.bind(gpu, nics[0]).err(), Some(libc::EACCES));
        let other = Allowed::pair(gpu, nics[1]);
        assert_eq!(session.bind(gpu, nics[0]).err(), Some(libc::EACCES));
        session.bind(gpu, nics[1]).expect("the pair that is named");
        drop(other);
        for name in [
            "*@*".to_owned(),
            format!("{gpu}@*"),
            format!("*@{}", nics[0]),
        ] {
            let _entry = Allowed::entry(&name);
            Session::open()
                .bind(gpu, nics[0])
                .unwrap_or_else(|error| panic!("{name}: errno {error}"));
        }
        for name in ["", "x", "*", "*@", "0000:00:00.0", "0000:0:00.0@*", "*@*@*"] {
            let made = fs::create_dir(entry_path(name));
            assert!(made.is_err(), "{name:?} is no pair");
        }
        assert!(fs::create_dir("/sys/kernel/config/ibgda/other").is_err());
    });
}

#[test]
fn only_root_of_the_machine_changes_the_policy() {
    alone(|| {
        let end = in_child(|| {
            // SAFETY: gives up everything in this process.
            assert_eq!(unsafe { libc::setuid(65534) }, 0);
            let error = fs::create_dir(entry_path("*@*")).expect_err("nobody may not");
            error.raw_os_error().unwrap_or(0)
        });
        assert!(
            matches!(end, End::Exit(libc::EACCES | libc::EPERM)),
            "{end:?}"
        );

        let end = in_child(|| {
            // SAFETY: this process alone moves, and keeps its user id: the owner of the directory, without power over it.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWUSER) }, 0);
            fs::write("/proc/self/setgroups", "deny").expect("setgroups");
            fs::write("/proc/self/uid_map", "0 0 1").expect("uid_map");
            fs::write("/proc/self/gid_map", "0 0 1").expect("gid_map");
            let error =
                fs::create_dir(entry_path("*@*")).expect_err("root of a user namespace may not");
            error.raw_os_error().unwrap_or(0)
        });
        assert_eq!(end, End::Exit(libc::EPERM));
    });
}

#[test]
fn the_any_path_attribute_is_a_bool() {
    alone(|| {
        let entry = Allowed::entry("*@*");
        assert_eq!(entry.any_path(), "0\n");
        entry.set_any_path("1\n").expect("set");
        assert_eq!(entry.any_path(), "1\n");
        assert!(entry.set_any_path("perhaps").is_err());
        entry.set_any_path("0").expect("reset");
        assert_eq!(entry.any_path(), "0\n");
    });
}

#[test]
fn removing_an_entry_revokes_what_relied_on_it_and_nothing_else() {
    alone(|| {
        let pair = Pair::new();
        let wide = Allowed::entry(&format!("*@{}", pair.nic));
        let session = pair.session();
        let status = session.status();
        drop(wide);
        assert_eq!(
            status.state(),
            IBGDA_STATE_READY,
            "the other entry still allows it"
        );

        let Pair { gpu, nic, _allowed } = pair;
        let doorbell = Doorbell::import(&session, nic);
        let mapping = session.map(doorbell.granted, 4096).expect("map");
        // An attribute held open does not hold the permission.
        let _held = File::open(entry_path(&format!("{gpu}@{nic}")).join("any_path"))
            .expect("open any_path");
        drop(_allowed);
        assert_eq!(
            (status.state(), status.reason()),
            (IBGDA_STATE_LOST, IBGDA_REASON_POLICY)
        );
        assert_eq!(
            session.populate(doorbell.granted.handle, mapping.address),
            Err(libc::ENOLINK)
        );
        assert_eq!(
            session.import(&doorbell.dmabuf, &doorbell.verbs.uverbs()),
            Err(libc::ENOLINK)
        );
        assert_eq!(session.rebind().err(), Some(libc::EACCES));

        let _allowed = Allowed::pair(gpu, nic);
        assert_eq!(session.rebind().map(|bind| bind.generation), Ok(2));
        assert_eq!(
            (status.state(), status.generation()),
            (IBGDA_STATE_READY, 2)
        );
        session
            .import(&doorbell.dmabuf, &doorbell.verbs.uverbs())
            .expect("its own page again");
    });
}

// Import.

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

#[test]
fn import_refuses_the_dmabuf_of_another_exporter() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let verbs = Verbs::open(pair.nic);
        let dmabuf = udmabuf();
        assert_eq!(session.import(&dmabuf, &verbs.uverbs()), Err(libc::EINVAL));
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

// Mappings.

#[test]
fn a_doorbell_rings_the_queue_pair_of_its_page() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let doorbell = Doorbell::import(&session, pair.nic);
        let mapping = session.map(doorbell.granted, 4096).expect("map");
        session
            .populate(doorbell.granted.handle, mapping.address)
            .expect("populate");
        let mut qp = Loopback::new(&doorbell.verbs, &doorbell.uar);
        let foreign = model_counts(0)["foreign_doorbells"];
        for value in 1..40 {
            let rung = qp.write_rings(value, Duration::from_secs(10), |word| {
                mapping.store(REGISTER, word)
            });
            assert!(rung, "write {value} did not complete");
        }
        assert_eq!(model_counts(0)["foreign_doorbells"], foreign);

        // What counts foreign doorbells does count one.
        let other = Doorbell::import(&session, pair.nic);
        let elsewhere = session.map(other.granted, 4096).expect("map");
        elsewhere.store(REGISTER, qp.stray_doorbell());
        wait_until("the model counts a foreign doorbell", || {
            model_counts(0)["foreign_doorbells"] == foreign + 1
        });
    });
}

/// What the kernel says the memory type of a physical page is.
fn memory_type(page: u64) -> Option<String> {
    let list = fs::read_to_string("/sys/kernel/debug/x86/pat_memtype_list").expect("PAT's list");
    let start = format!("[mem {page:#018x}-");
    let line = list.lines().find(|line| line.contains(&start))?;
    Some(line.rsplit(' ').next()?.to_string())
}

#[test]
fn a_blueflame_page_is_write_combining_and_takes_wqes() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let resource = fs::read_to_string(pair.nic.sysfs().join("resource")).expect("BARs");
        let bar = resource.split_whitespace().next().expect("BAR 0");
        let bar = u64::from_str_radix(bar.trim_start_matches("0x"), 16).expect("an address");
        let verbs = Verbs::open(pair.nic);
        for (kind, right, wrong, name) in [
            (
                UarType::BlueFlame,
                IBGDA_MEM_WC,
                IBGDA_MEM_UC,
                "write-combining",
            ),
            (
                UarType::NonCached,
                IBGDA_MEM_UC,
                IBGDA_MEM_WC,
                "uncached-minus",
            ),
        ] {
            // The driver gives BlueFlame pages only when its own test has seen that writes are combined.
            let uar = verbs
                .alloc_uar_of(kind)
                .unwrap_or_else(|error| panic!("allocate a UAR, {kind:?}: {error}"));
            let _mapped = verbs.map(&uar);
            let dmabuf = verbs.export(&uar);
            let import = |mem_type| session.import_as(&dmabuf, &verbs.uverbs(), mem_type);
            assert_eq!(import(wrong), Err(libc::EBUSY), "{kind:?}");
            let granted = import(right).expect("the page's own type");
            let mapping = session.map(granted, 4096).expect("map");
            session
                .populate(granted.handle, mapping.address)
                .expect("populate");
            let page = bar + granted.bar_offset;
            assert_eq!(memory_type(page).as_deref(), Some(name), "{kind:?}");

            let mut qp = Loopback::new(&verbs, &uar);
            assert!(qp.write_rings(7, Duration::from_secs(10), |word| {
                mapping.store(REGISTER, word);
            }));
            if kind != UarType::BlueFlame {
                continue;
            }
            let taken = model_counts(0)["blueflame_wqes"];
            // Of the first nobody knows yet that it is more than a doorbell, and on a busy host others may come too late.
            wait_until("the model takes WQEs from the page", || {
                // Longer than the model waits for the rest of a copy: the queue has few entries.
                std::thread::sleep(Duration::from_millis(60));
                for (i, word) in qp.silent_nop().into_iter().enumerate() {
                    mapping.store(REGISTER + i * 8, word);
                }
                model_counts(0)["blueflame_wqes"] > taken
            });
        }
    });
}

#[test]
fn mmap_gives_one_whole_object_shared_and_never_executable() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let doorbell = Doorbell::import(&session, pair.nic);
        let queue = session
            .alloc_queue(8192, -1, IBGDA_MEM_WB)
            .expect("queue memory");
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        let (db, q) = (doorbell.granted.mmap_offset, queue.mmap_offset);
        let try_map =
            |length, prot, flags, offset| Mapping::new(&session, length, prot, flags, offset).err();

        assert_eq!(
            try_map(8192, rw, libc::MAP_SHARED, db),
            Some(libc::EINVAL),
            "two pages of a doorbell"
        );
        assert_eq!(
            try_map(1 << 30, rw, libc::MAP_SHARED, db),
            Some(libc::EINVAL),
            "a gigabyte"
        );
        assert_eq!(
            try_map(4096, rw, libc::MAP_SHARED, q),
            Some(libc::EINVAL),
            "half a queue"
        );
        assert_eq!(
            try_map(4096, rw, libc::MAP_SHARED, q + 4096),
            Some(libc::EINVAL),
            "its second half"
        );
        assert_eq!(
            try_map(12288, rw, libc::MAP_SHARED, q),
            Some(libc::EINVAL),
            "more than the queue"
        );
        for offset in [0, db + (1 << 30), (1 << 63) - 8192, u64::MAX & !0xfff] {
            assert!(
                try_map(4096, rw, libc::MAP_SHARED, offset).is_some(),
                "offset {offset:#x}"
            );
        }
        assert_eq!(
            try_map(4096, rw, libc::MAP_PRIVATE, db),
            Some(libc::EINVAL),
            "private"
        );
        assert_eq!(
            try_map(8192, rw, libc::MAP_PRIVATE, q),
            Some(libc::EINVAL),
            "a private queue"
        );
        assert_eq!(
            try_map(4096, rw | libc::PROT_EXEC, libc::MAP_SHARED, db),
            Some(libc::EINVAL),
            "executable"
        );
        assert_eq!(
            try_map(8192, rw | libc::PROT_EXEC, libc::MAP_SHARED, q),
            Some(libc::EINVAL),
            "an executable queue"
        );

        for (granted, length) in [(doorbell.granted, 4096), (queue, 8192)] {
            let mapping = session.map(granted, length).expect("map");
            assert_eq!(
                mapping.protect(libc::PROT_READ | libc::PROT_EXEC),
                Err(libc::EACCES)
            );
            // SAFETY: our mapping; both calls must fail.
            unsafe {
                let grown = libc::mremap(
                    mapping.address.cast(),
                    length,
                    2 * length,
                    libc::MREMAP_MAYMOVE,
                );
                assert_eq!(grown, libc::MAP_FAILED, "grown");
                let elsewhere = libc::mmap(
                    std::ptr::null_mut(),
                    length,
                    libc::PROT_NONE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                    -1,
                    0,
                );
                let moved = libc::mremap(
                    mapping.address.cast(),
                    length,
                    length,
                    libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED,
                    elsewhere,
                );
                assert_eq!(moved, libc::MAP_FAILED, "moved");
                libc::munmap(elsewhere, length);
                assert_eq!(
                    libc::madvise(mapping.address.cast(), length, libc::MADV_DOFORK),
                    -1,
                    "made inheritable"
                );
            }
            assert!(mapping.is_there(0), "it is where it was");
        }
        let mapping = session.map(queue, 8192).expect("map");
        // SAFETY: our mapping; the call must fail.
        let torn = unsafe { libc::munmap(mapping.address.cast(), 4096) };
        assert_eq!(torn, -1, "half a mapping was unmapped");
    });
}

#[test]
fn another_sessions_place_in_the_file_is_not_mapped() {
    alone(|| {
        let pair = Pair::new();
        let (session, other) = (pair.session(), pair.session());
        let doorbell = Doorbell::import(&session, pair.nic);
        let mapped = other.map(doorbell.granted, 4096);
        assert_eq!(mapped.err(), Some(libc::EINVAL));
        let status = session.status_offset().expect("STATUS");
        let mapped = Mapping::new(&other, 4096, libc::PROT_READ, libc::MAP_SHARED, status);
        assert_eq!(mapped.err(), Some(libc::EINVAL));
    });
}

#[test]
fn populate_fills_only_the_doorbells_own_mapping() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let doorbell = Doorbell::import(&session, pair.nic);
        let other = Doorbell::import(&session, pair.nic);
        let mapping = session.map(doorbell.granted, 4096).expect("map");
        let elsewhere = session.map(other.granted, 4096).expect("map");
        let handle = doorbell.granted.handle;
        let local = 0_u64;
        assert_eq!(
            session.populate(handle, (&raw const local).cast()),
            Err(libc::EFAULT),
            "the stack"
        );
        assert_eq!(
            session.populate(handle, elsewhere.address),
            Err(libc::EFAULT),
            "another doorbell's"
        );
        assert_eq!(
            session.populate(handle, std::ptr::null()),
            Err(libc::EFAULT)
        );
        assert_eq!(
            session.populate(handle + 100, mapping.address),
            Err(libc::ENOENT)
        );
        session.populate(handle, mapping.address).expect("populate");
        session.populate(handle, mapping.address).expect("again");
        assert_eq!(
            faults_of(|| mapping.store(8, 0)),
            0,
            "the entry is there before any access"
        );
        assert_eq!(
            faults_of(|| elsewhere.store(8, 0)),
            1,
            "and not where it was not asked for"
        );
    });
}

/// How many page faults an action makes.
fn faults_of(action: impl FnOnce()) -> i64 {
    let count = || {
        // SAFETY: zeros are a value, and it is written only.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let answer = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) };
        assert_eq!(answer, 0);
        usage.ru_minflt + usage.ru_majflt
    };
    // Whatever the counting itself touches is there afterwards.
    count();
    let before = count();
    action();
    count() - before
}

#[test]
fn debuggers_and_core_dumps_do_not_read_registers() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let doorbell = Doorbell::import(&session, pair.nic);
        let mapping = session.map(doorbell.granted, 4096).expect("map");
        session
            .populate(doorbell.granted.handle, mapping.address)
            .expect("populate");
        let mut word = [0_u8; 8];
        let (local, remote) = (
            libc::iovec {
                iov_base: word.as_mut_ptr().cast(),
                iov_len: 8,
            },
            libc::iovec {
                iov_base: mapping.address.cast(),
                iov_len: 8,
            },
        );
        // SAFETY: the local part is ours, the kernel checks the remote one.
        let read = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
        assert_eq!(read, -1, "process_vm_readv");
        use std::os::unix::fs::FileExt;
        let memory = File::open("/proc/self/mem").expect("open mem");
        assert!(
            memory
                .read_exact_at(&mut word, mapping.address as u64)
                .is_err(),
            "/proc/self/mem"
        );
        let smaps = fs::read_to_string("/proc/self/smaps").expect("read smaps");
        let start = format!("{:x}-", mapping.address as u64);
        let flags = smaps
            .lines()
            .skip_while(|line| !line.starts_with(&start))
            .find(|line| line.starts_with("VmFlags:"))
            .expect("the mapping has flags");
        for flag in ["io", "pf", "dc", "de", "dd"] {
            assert!(flags.contains(&format!(" {flag}")), "{flag} in {flags}");
        }
        assert!(!flags.contains(" ex") && !flags.contains(" me"), "{flags}");
    });
}

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

fn monotonic() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: written only.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[test]
fn queue_memory_is_zeroed_counted_and_as_long_as_asked() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let max = session.info().expect("INFO").max_queue_bytes;
        for length in [0, 1, 4095, 4097, max + 4096, u64::MAX, u64::MAX & !0xfff] {
            assert_eq!(
                session.alloc_queue(length, -1, IBGDA_MEM_WB),
                Err(libc::EINVAL),
                "length {length:#x}"
            );
        }
        for node in [-2, 63, 1 << 20, i32::MAX, i32::MIN] {
            assert_eq!(
                session.alloc_queue(4096, node, IBGDA_MEM_WB),
                Err(libc::EINVAL),
                "node {node}"
            );
        }
        assert_eq!(session.alloc_queue(4096, -1, 9), Err(libc::EINVAL));
        let locked = vm_locked();
        let length = 1 << 20;
        for (node, mem_type) in [
            (-1, IBGDA_MEM_WB),
            (0, IBGDA_MEM_WB),
            (-1, IBGDA_MEM_UC),
            (0, IBGDA_MEM_WC),
            // What was uncacheable is like any other memory again.
            (-1, IBGDA_MEM_WB),
        ] {
            let queue = session
                .alloc_queue(length, node, mem_type)
                .expect("queue memory");
            let mapping = session.map(queue, length as usize).expect("map");
            for offset in (0..length as usize).step_by(8) {
                assert_eq!(mapping.load(offset), 0, "at {offset:#x}");
            }
            mapping.store(length as usize - 8, u64::MAX);
            assert_eq!(vm_locked() - locked, length / 1024);
            session.release(queue.handle).expect("release");
            assert!(!mapping.is_there(0), "released, and still mapped");
            assert_eq!(vm_locked(), locked);
            assert_eq!(session.release(queue.handle), Err(libc::ENOENT));
        }
    });
}

#[test]
fn uncacheable_queue_memory_is_memory_for_uverbs_even_when_it_is_given_back() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let verbs = Verbs::open(pair.nic);
        for mem_type in [IBGDA_MEM_WB, IBGDA_MEM_UC, IBGDA_MEM_WC] {
            let queue = session
                .alloc_queue(8192, -1, mem_type)
                .expect("queue memory");
            let mapping = session.map(queue, 8192).expect("map");
            // Its pages are pinned, and outlive our handle.
            let registered = verbs.register(mapping.address, 8192);
            session.release(queue.handle).expect("release");
            assert!(!mapping.is_there(0), "released, and still mapped");
            drop(registered);
        }
        let line = session.fdinfo();
        assert!(line.contains("\nqueues:\t0\n"), "{line}");
    });
}

/// Kilobytes of this process's locked memory.
fn vm_locked() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("read status");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmLck:"))
        .expect("VmLck");
    line.trim()
        .trim_end_matches(" kB")
        .parse()
        .expect("a number")
}

#[test]
fn queue_memory_counts_against_the_memlock_limit() {
    alone(|| {
        let pair = Pair::new();
        let end = in_child(|| {
            let session = pair.session();
            let limit = libc::rlimit {
                rlim_cur: 64 << 10,
                rlim_max: 64 << 10,
            };
            // SAFETY: of this process.
            unsafe {
                assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit), 0);
                assert_eq!(libc::setuid(65534), 0);
            }
            let first = session
                .alloc_queue(64 << 10, -1, IBGDA_MEM_WB)
                .expect("within the limit");
            assert_eq!(
                session.alloc_queue(4096, -1, IBGDA_MEM_WB),
                Err(libc::EDQUOT)
            );
            session.release(first.handle).expect("release");
            session
                .alloc_queue(4096, -1, IBGDA_MEM_WB)
                .expect("there is room again");
            0
        });
        assert_eq!(end, End::Exit(0));
    });
}

#[test]
fn release_takes_the_mapping_before_it_returns() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let doorbell = Doorbell::import(&session, pair.nic);
        let mapping = session.map(doorbell.granted, 4096).expect("map");
        mapping.store(8, 0);
        assert!(mapping.is_there(0));
        session.release(doorbell.granted.handle).expect("release");
        assert!(!mapping.is_there(0), "the entry is there after RELEASE");
        assert_eq!(session.release(doorbell.granted.handle), Err(libc::ENOENT));
        assert!(
            session.map(doorbell.granted, 4096).is_err(),
            "released, and mapped anew"
        );
        assert_eq!(
            session.populate(doorbell.granted.handle, mapping.address),
            Err(libc::ENOENT)
        );
    });
}

#[test]
fn a_second_node_of_the_device_is_zapped_too() {
    alone(|| {
        let pair = Pair::new();
        let device = fs::metadata("/dev/ibgda").expect("stat /dev/ibgda");
        assert!(device.file_type().is_char_device());
        let node = Path::new("/tmp/ibgda-second-node");
        let path = CString::new(node.to_str().expect("a path")).expect("a path");
        // SAFETY: a terminated path.
        let made = unsafe { libc::mknod(path.as_ptr(), libc::S_IFCHR | 0o600, device.rdev()) };
        assert_eq!(made, 0);
        let session = Session::open_at(node);
        fs::remove_file(node).expect("remove the node");
        session.bind(pair.gpu, pair.nic).expect("bind");
        let doorbell = Doorbell::import(&session, pair.nic);
        let mapping = session.map(doorbell.granted, 4096).expect("map");
        assert!(mapping.is_there(0));
        session.release(doorbell.granted.handle).expect("release");
        assert!(!mapping.is_there(0), "the entry is there after RELEASE");
    });
}

// Processes.

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

const REPORT: &str = "/tmp/ibgda-report";

/// Tells the test that a process it is not the parent of got to its end.
fn report(text: &str) {
    fs::write(REPORT, text).expect("write the report");
}

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

/// Waits until the model's counts stay the same.
fn settle() {
    let mut last = live_objects(0);
    let mut same = 0;
    wait_until("the model's counts are steady", || {
        std::thread::sleep(Duration::from_millis(50));
        let now = live_objects(0);
        same = if now == last { same + 1 } else { 0 };
        last = now;
        same == 10
    });
}

// Loss and return.

#[test]
fn destroying_the_uar_revokes_its_doorbell_alone() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let events = eventfd();
        session
            .set_eventfd(events.as_raw_fd())
            .expect("set the eventfd");
        let doorbell = Doorbell::import(&session, pair.nic);
        let other = Doorbell::import(&session, pair.nic);
        let mapping = session.map(doorbell.granted, 4096).expect("map");
        let still = session.map(other.granted, 4096).expect("map");
        let handle = doorbell.granted.handle;
        session.populate(handle, mapping.address).expect("populate");
        doorbell.verbs.destroy(doorbell.uar);
        mapping.store(REGISTER, 1);
        assert_eq!(mapping.load(REGISTER), 1, "a store lands in the sink page");
        assert_eq!(
            session.populate(handle, mapping.address),
            Err(libc::ENOLINK)
        );
        session
            .populate(other.granted.handle, still.address)
            .expect("the other one is untouched");
        assert_eq!(session.status().state(), IBGDA_STATE_READY);
        assert_eq!(signals(&events), 1);
        let records = session.events(8).expect("a record");
        assert_eq!(records.len(), 1);
        assert_eq!(
            (records[0].type_, records[0].reason, records[0].handle),
            (IBGDA_EVENT_DOORBELL, IBGDA_REASON_UAR_DESTROYED, handle)
        );
    });
}

/// A loss, and what a session with a mapped doorbell must see of it.
fn lose_and_return(reason: u32, lose: impl FnOnce(Bdf) -> Box<dyn FnOnce()>) {
    let pair = Pair::new();
    let session = pair.session();
    let events = eventfd();
    session
        .set_eventfd(events.as_raw_fd())
        .expect("set the eventfd");
    let status = session.status();
    let doorbell = Doorbell::import(&session, pair.nic);
    let mapping = session.map(doorbell.granted, 4096).expect("map");
    let handle = doorbell.granted.handle;
    session.populate(handle, mapping.address).expect("populate");
    mapping.store(8, 0);

    let come_back = lose(pair.nic);
    wait_until("the session is lost", || {
        status.state() != IBGDA_STATE_READY
    });
    assert_eq!(status.reason(), reason);
    mapping.store(REGISTER, 77);
    assert_eq!(mapping.load(REGISTER), 77, "a store lands in the sink page");
    assert_eq!(
        session.populate(handle, mapping.address),
        Err(libc::ENOLINK)
    );
    assert_eq!(
        session.import(&doorbell.dmabuf, &doorbell.verbs.uverbs()),
        Err(libc::ENOLINK)
    );
    if status.state() == IBGDA_STATE_LOST {
        assert!(
            matches!(
                session.rebind().err(),
                Some(libc::EAGAIN | libc::EINVAL | libc::ENODEV)
            ) || status.state() != IBGDA_STATE_LOST
        );
    }
    come_back();
    wait_until("the session is recovered", || {
        status.state() == IBGDA_STATE_RECOVERED
    });
    assert_eq!((status.generation(), status.reason()), (2, reason));
    assert_eq!(
        session.populate(handle, mapping.address),
        Err(libc::ENOLINK),
        "not before REBIND"
    );

    let bind = session.rebind().expect("rebind");
    assert_eq!(bind.generation, 2);
    assert_eq!(
        (status.state(), status.generation()),
        (IBGDA_STATE_READY, 2)
    );
    assert_eq!(session.rebind().err(), Some(libc::EINVAL), "not lost");
    assert_eq!(
        session.populate(handle, mapping.address),
        Err(libc::ENOLINK),
        "the old doorbell stays lost"
    );
    assert_eq!(mapping.load(REGISTER), 77, "and its mapping at the sink");

    assert!(signals(&events) >= 2);
    let records = session.events(16).expect("records");
    let kinds: Vec<u32> = records
        .iter()
        .map(|record| record.type_)
        .filter(|&kind| kind != IBGDA_EVENT_DOORBELL)
        .collect();
    assert_eq!(kinds, [IBGDA_EVENT_LOST, IBGDA_EVENT_RECOVERED]);
    assert_eq!(session.events(16).err(), Some(libc::EAGAIN));

    machine::wait_for_rdma(pair.nic);
    let new = Doorbell::import(&session, pair.nic);
    let rung = session.map(new.granted, 4096).expect("map");
    let mut qp = Loopback::new(&new.verbs, &new.uar);
    assert!(qp.write_rings(5, Duration::from_secs(10), |word| {
        rung.store(REGISTER, word)
    }));
}

#[test]
fn unbinding_the_rdma_driver_loses_the_session_and_binding_returns_it() {
    alone(|| {
        lose_and_return(IBGDA_REASON_NIC_REMOVED, |nic| {
            Box::new(machine::unbind_mlx5_ib(nic))
        });
    });
}

#[test]
fn a_fatal_error_of_the_nic_loses_the_session_and_its_recovery_returns_it() {
    alone(|| {
        lose_and_return(IBGDA_REASON_NIC_RESET, |nic| {
            machine::inject_error(nic, machine::FATAL);
            Box::new(move || machine::wait_for_rdma(nic))
        });
    });
}

#[test]
fn a_non_fatal_error_of_the_nic_loses_the_session_and_its_recovery_returns_it() {
    alone(|| {
        lose_and_return(IBGDA_REASON_NIC_RESET, |nic| {
            machine::inject_error(nic, machine::NON_FATAL);
            Box::new(move || machine::wait_for_rdma(nic))
        });
    });
}

#[test]
fn a_page_stays_its_owners_across_a_reset_of_the_nic() {
    alone(|| {
        let pair = Pair::new();
        // The first page that firmware hands out after a reset is the one it handed out first before.
        let mut owner = fork(|line| {
            let session = pair.session();
            let verbs = Verbs::open(pair.nic);
            let uars: Vec<_> = (0..4).map(|_| verbs.alloc_uar()).collect();
            for uar in &uars {
                session
                    .import(&verbs.export(uar), &verbs.uverbs())
                    .expect("import");
            }
            fs::write(
                REPORT,
                uars.iter()
                    .map(|uar| uar.page_id.to_string())
                    .collect::<Vec<_>>()
                    .join(" "),
            )
            .expect("write the report");
            line.go();
            line.wait();
            0
        });
        owner.wait();
        let held: Vec<u32> = fs::read_to_string(REPORT)
            .expect("read the report")
            .split(' ')
            .map(|page| page.parse().expect("a page"))
            .collect();
        fs::remove_file(REPORT).expect("remove the report");
        let session = pair.session();
        let status = session.status();
        machine::inject_error(pair.nic, machine::FATAL);
        wait_until("the session is recovered", || {
            status.state() == IBGDA_STATE_RECOVERED
        });
        machine::wait_for_rdma(pair.nic);
        session.rebind().expect("rebind");
        let verbs = Verbs::open(pair.nic);
        let mut refused = 0;
        let mut taken = Vec::new();
        for _ in 0..16 {
            let uar = verbs.alloc_uar();
            let dmabuf = verbs.export(&uar);
            let result = session.import(&dmabuf, &verbs.uverbs());
            if held.contains(&uar.page_id) {
                assert_eq!(
                    result,
                    Err(libc::EBUSY),
                    "page {} is the owner's",
                    uar.page_id
                );
                refused += 1;
                taken.push(dmabuf);
            } else {
                result.expect("a page of nobody's");
            }
        }
        assert!(
            refused > 0,
            "firmware handed out none of {held:?} again, so nothing was tested"
        );
        owner.go();
        assert_eq!(owner.end(), End::Exit(0));
        for dmabuf in taken {
            import_when_free(&session, &dmabuf, &verbs.uverbs());
        }
    });
}

#[test]
fn removing_the_gpu_loses_the_session() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let status = session.status();
        let doorbell = Doorbell::import(&session, pair.nic);
        let mapping = session.map(doorbell.granted, 4096).expect("map");
        mapping.store(8, 0);
        fs::write(pair.gpu.sysfs().join("remove"), "1").expect("remove the GPU");
        assert_eq!(
            (status.state(), status.reason()),
            (IBGDA_STATE_LOST, IBGDA_REASON_GPU_REMOVED)
        );
        mapping.store(REGISTER, 77);
        assert_eq!(mapping.load(REGISTER), 77, "a store lands in the sink page");
        assert_eq!(session.rebind().err(), Some(libc::ENODEV));
        fs::write("/sys/bus/pci/rescan", "1").expect("rescan");
        wait_until("the GPU is back", || pair.gpu.sysfs().exists());
        assert_eq!(session.rebind().map(|bind| bind.generation), Ok(2));
        assert_eq!(status.state(), IBGDA_STATE_READY);
    });
}

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
        wait_until("the page is handed out again", || {
            has_page(&Verbs::open(pair.nic))
        });
    });
}

/// Imports, maps, rings and releases, whatever happens to the NIC meanwhile; how many doorbells were rung.
fn use_doorbells(session: &Session, nic: Bdf, mut go_on: impl FnMut() -> bool) -> u32 {
    let expected = |error: i32| {
        let fine = [
            libc::ENOLINK,
            libc::EAGAIN,
            libc::EHOSTDOWN,
            libc::EACCES,
            libc::EINVAL,
            libc::EBUSY,
            libc::ENOENT,
            libc::EDQUOT,
        ];
        assert!(fine.contains(&error), "errno {error}");
    };
    let mut rung = 0;
    while go_on() {
        let Some(verbs) = Verbs::try_open(nic) else {
            continue;
        };
        let Ok(uar) = alloc_uar(verbs.uverbs(), UarType::NonCached) else {
            continue;
        };
        let Ok(dmabuf) = export_dmabuf(verbs.uverbs(), uar.mmap_offset) else {
            continue;
        };
        for _ in 0..4 {
            let granted = match session.import(&dmabuf, &verbs.uverbs()) {
                Ok(granted) => granted,
                Err(error) => {
                    expected(error);
                    let _ = session.rebind().map_err(expected);
                    continue;
                }
            };
            let mapping = session
                .map(granted, 4096)
                .expect("map what was just granted");
            let _ = session
                .populate(granted.handle, mapping.address)
                .map_err(expected);
            mapping.store(8, 0);
            let _ = session.events(64).map_err(expected);
            session.release(granted.handle).expect("release");
            rung += 1;
        }
    }
    rung
}

#[test]
fn losses_in_the_midst_of_everything_leave_nothing_behind() {
    alone(|| {
        let (gpu, nic) = (gpus()[0], nics()[0]);
        let mut allowed = Some(Allowed::pair(gpu, nic));
        let session = Session::bound(gpu, nic);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let users: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| use_doorbells(&session, nic, || !stop.load(Ordering::Relaxed)))
                })
                .collect();
            let pause = || std::thread::sleep(Duration::from_millis(150));
            // Without PCI errors: mlx5_core has a race between those and a command that starts (docs/mlx5-races.md).
            for _ in 0..4 {
                pause();
                drop(allowed.take());
                pause();
                allowed = Some(Allowed::pair(gpu, nic));
                pause();
                machine::unbind_mlx5_ib(nic)();
            }
            pause();
            stop.store(true, Ordering::Relaxed);
            for user in users {
                assert!(user.join().expect("the thread ends well") > 0);
            }
        });
        drop(allowed);
    });
    wait_until("every grant has ended", no_grants);
}

fn no_grants() -> bool {
    fs::read_to_string("/sys/kernel/debug/ibgda/grants")
        .expect("read debugfs")
        .lines()
        .count()
        == 1
}

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

// From outside.

#[test]
fn debugfs_lists_sessions_and_grants_until_they_end() {
    alone(|| {
        let read = |file: &str| {
            fs::read_to_string(Path::new("/sys/kernel/debug/ibgda").join(file))
                .expect("read debugfs")
        };
        let counter = |name: &str| -> u64 {
            let counters = read("counters");
            let line = counters.lines().find_map(|line| line.strip_prefix(name));
            line.expect("the counter").trim().parse().expect("a number")
        };
        let pair = Pair::new();
        wait_until("no grant is left of earlier tests", || {
            read("grants").lines().count() == 1
        });
        let (granted, ended) = (counter("grants"), counter("ended"));
        let mut owner = fork(|line| {
            let session = pair.session();
            let _doorbell = Doorbell::import(&session, pair.nic);
            line.go();
            line.wait();
            drop(session);
            line.go();
            line.wait();
            0
        });
        owner.wait();
        let pid = owner.pid.to_string();
        let sessions = read("sessions");
        let line = sessions
            .lines()
            .find(|line| line.split('\t').nth(1) == Some(&pid))
            .expect("the session");
        let (gpu, nic) = (pair.gpu.to_string(), pair.nic.to_string());
        assert_eq!(
            line.split('\t').skip(2).collect::<Vec<_>>(),
            ["ready", "1", &gpu, &nic, "1", "0", "1"]
        );
        assert!(
            read("grants").contains(&format!("\t{pid}\theld\tvalid\n")),
            "{}",
            read("grants")
        );
        owner.go();
        owner.wait();
        assert!(
            read("grants").contains(&format!("\t{pid}\torphan\tvalid\n")),
            "{}",
            read("grants")
        );
        assert_eq!(counter("grants"), granted + 1);
        owner.go();
        assert_eq!(owner.end(), End::Exit(0));
        wait_until("the grant has ended", || {
            read("grants").lines().count() == 1
        });
        assert_eq!(counter("ended"), ended + 1);
    });
}

#[test]
fn fdinfo_tells_the_state_and_no_address() {
    alone(|| {
        let pair = Pair::new();
        let session = Session::open();
        assert!(session.fdinfo().contains("\nstate:\tunbound\n"));
        session.bind(pair.gpu, pair.nic).expect("bind");
        let _doorbell = Doorbell::import(&session, pair.nic);
        session
            .alloc_queue(8192, -1, IBGDA_MEM_WB)
            .expect("queue memory");
        let info = session.fdinfo();
        for line in [
            format!("owner:\t{}", std::process::id()),
            "state:\tready".to_owned(),
            "generation:\t1".to_owned(),
            format!("gpu:\t{}", pair.gpu),
            format!("nic:\t{}", pair.nic),
            "path:\tswitch".to_owned(),
            "doorbells:\t1".to_owned(),
            "queues:\t1".to_owned(),
            "queue-bytes:\t8192".to_owned(),
            "grants:\t1".to_owned(),
        ] {
            assert!(info.lines().any(|got| got == line), "{line:?} in:\n{info}");
        }
        let resource =
            fs::read_to_string(pair.nic.sysfs().join("resource")).expect("read resource");
        let bar = resource
            .split(' ')
            .next()
            .expect("BAR0")
            .trim_start_matches("0x")
            .trim_start_matches('0');
        assert!(
            !info.contains(&bar[..bar.len() - 4]),
            "an address of the NIC in:\n{info}"
        );
    });
}

#[test]
fn the_module_stays_while_it_is_used_and_goes_when_it_is_not() {
    alone(|| {
        let pair = Pair::new();
        let verbs = Verbs::open(pair.nic);
        let dmabuf = verbs.export(&verbs.alloc_uar());
        let mut owner = fork(|line| {
            let session = pair.session();
            session.import(&dmabuf, &verbs.uverbs()).expect("import");
            line.go();
            line.wait();
            drop(session);
            line.go();
            line.wait();
            0
        });
        owner.wait();
        drop(pair);
        assert!(
            !run("rmmod", &["ibgda"]) && module_is_loaded(),
            "a file is open"
        );
        owner.go();
        owner.wait();
        assert!(
            !run("rmmod", &["ibgda"]) && module_is_loaded(),
            "the owner of a page lives"
        );
        owner.go();
        assert_eq!(owner.end(), End::Exit(0));
        wait_until("the module can go", || {
            run("rmmod", &["ibgda"]) && !module_is_loaded()
        });
        assert!(run("insmod", &["/opt/ibgda/ibgda.ko"]) && module_is_loaded());
        wait_until("the device is there", || Path::new("/dev/ibgda").exists());
        Pair::new().session();
    });
}
