// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mappings of doorbells: what mmap, mremap, mprotect, POPULATE and RELEASE do, and what debuggers see.

use crate::fixture::{Doorbell, Pair, REPORT, alone};
use ibgda_uapi::*;
use ibgda_verbs_sys::uverbs::UarType;
use ibgda_vmtests::broker::{Mapping, Session, Status};
use ibgda_vmtests::machine::{bar0, model_counts, wait_until};
use ibgda_vmtests::process::{End, fork};
use ibgda_vmtests::verbs::{Loopback, REGISTER, Verbs};
use std::fs;
use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

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

/// N18: the type is the page's own, or EBUSY.
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

/// N1, N3, N4, N5: lengths, offsets, private and executable mappings, growing, moving, halving, MADV_DOFORK.
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

/// N1: the offset of another session's object.
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

/// N19: process_vm_readv, /proc/self/mem, and the flags of the mapping.
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

/// N8: the entry is gone before RELEASE returns.
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

/// N6: a second node of the device, also in another mount namespace.
#[test]
fn a_second_node_of_the_device_is_zapped_too() {
    alone(|| {
        let pair = Pair::new();
        let device = fs::metadata("/dev/ibgda").expect("stat /dev/ibgda");
        assert!(device.file_type().is_char_device());
        for elsewhere in [false, true] {
            if elsewhere {
                // SAFETY: of this process alone; nothing is mounted that others see.
                unsafe {
                    assert_eq!(libc::unshare(libc::CLONE_NEWNS), 0);
                    let private = libc::MS_REC | libc::MS_PRIVATE;
                    let (root, tmp, none) = (c"/".as_ptr(), c"/tmp".as_ptr(), std::ptr::null());
                    assert_eq!(libc::mount(none, root, none, private, none.cast()), 0);
                    let kind = c"tmpfs".as_ptr();
                    assert_eq!(libc::mount(kind, tmp, kind, 0, none.cast()), 0);
                }
            }
            let path = c"/tmp/ibgda-second-node";
            // SAFETY: a terminated path.
            let made = unsafe { libc::mknod(path.as_ptr(), libc::S_IFCHR | 0o600, device.rdev()) };
            assert_eq!(made, 0);
            let node = Path::new(path.to_str().expect("a path"));
            let session = Session::open_at(node);
            fs::remove_file(node).expect("remove the node");
            session.bind(pair.gpu, pair.nic).expect("bind");
            let doorbell = Doorbell::import(&session, pair.nic);
            let mapping = session.map(doorbell.granted, 4096).expect("map");
            assert!(mapping.is_there(0));
            session.release(doorbell.granted.handle).expect("release");
            assert!(!mapping.is_there(0), "the entry is there after RELEASE");
        }
    });
}

/// N3: what a file opened for reading only maps cannot become writable.
#[test]
fn a_file_opened_for_reading_maps_no_doorbell_and_no_queue() {
    alone(|| {
        let pair = Pair::new();
        let session = Session(File::open("/dev/ibgda").expect("open for reading"));
        session.bind(pair.gpu, pair.nic).expect("bind");
        let doorbell = Doorbell::import(&session, pair.nic);
        let queue = session
            .alloc_queue(4096, -1, IBGDA_MEM_WB)
            .expect("queue memory");
        for granted in [doorbell.granted, queue] {
            let mapped = session.map(granted, 4096).err();
            assert_eq!(mapped, Some(libc::EACCES), "for writing");
            let offset = granted.mmap_offset;
            let mapped = Mapping::new(&session, 4096, libc::PROT_READ, libc::MAP_SHARED, offset);
            assert_eq!(mapped.err(), Some(libc::EINVAL), "for reading");
        }
        let Status(status) = session.status();
        assert_eq!(
            status.protect(libc::PROT_READ | libc::PROT_WRITE),
            Err(libc::EACCES)
        );
    });
}

/// N4: a part of a mapping is not changed apart, and no second one grows out of it; the whole may give way to another.
#[test]
fn half_a_mapping_is_not_changed_and_a_whole_one_gives_way() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let doorbell = Doorbell::import(&session, pair.nic);
        let queue = session
            .alloc_queue(8192, -1, IBGDA_MEM_WB)
            .expect("queue memory");
        let fixed = |mapping: &Mapping, offset: usize, length: usize| {
            // SAFETY: our mapping, to which nothing refers.
            let mapped = unsafe {
                libc::mmap(
                    mapping.address.add(offset).cast(),
                    length,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                    -1,
                    0,
                )
            };
            mapped != libc::MAP_FAILED
        };
        let mapping = session.map(queue, 8192).expect("map");
        mapping.store(0, 7);
        for half in [0, 4096] {
            let part = mapping.address.wrapping_add(half);
            // SAFETY: our mapping; the calls must fail.
            unsafe {
                assert_eq!(
                    libc::mprotect(part.cast(), 4096, libc::PROT_READ),
                    -1,
                    "half {half} made read-only"
                );
                assert_eq!(
                    libc::madvise(part.cast(), 4096, libc::MADV_DODUMP),
                    -1,
                    "half {half} made part of core dumps"
                );
            }
            assert!(!fixed(&mapping, half, 4096), "half {half} replaced");
        }
        assert_eq!(mapping.load(0), 7, "it is as it was");

        let whole = session.map(doorbell.granted, 4096).expect("map");
        // SAFETY: our mappings; the calls must fail.
        unsafe {
            for from in [&mapping, &whole] {
                // Of a shared mapping, an old length of 0 asks for a second one.
                let second = libc::mremap(from.address.cast(), 0, 4096, libc::MREMAP_MAYMOVE);
                assert_eq!(second, libc::MAP_FAILED, "a second mapping");
            }
            let next = (queue.mmap_offset / 4096) as usize;
            assert_eq!(
                libc::remap_file_pages(whole.address.cast(), 4096, 0, next, 0),
                -1,
                "led elsewhere"
            );
        }
        assert!(fixed(&whole, 0, 4096), "the whole is replaced");
        assert_eq!(whole.load(0), 0);
        assert_eq!(
            session.populate(doorbell.granted.handle, whole.address),
            Err(libc::EFAULT),
            "another mapping is there"
        );
        session.release(doorbell.granted.handle).expect("release");
        assert!(whole.is_there(0), "not the doorbell's any more");
    });
}

/// N16: RELEASE finds every mapping of a doorbell.
#[test]
fn a_thousand_mappings_of_a_doorbell_go_with_it() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let doorbell = Doorbell::import(&session, pair.nic);
        let mappings: Vec<_> = (0..1000)
            .map(|_| session.map(doorbell.granted, 4096).expect("map"))
            .collect();
        for mapping in &mappings {
            session
                .populate(doorbell.granted.handle, mapping.address)
                .expect("populate");
        }
        session.release(doorbell.granted.handle).expect("release");
        assert!(!mappings.iter().any(|mapping| mapping.is_there(0)));
    });
}

/// N18: whoever maps a page first, there is one memory type for it, and the other follows.
#[test]
fn a_page_has_one_memory_type_whoever_maps_it_first() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let verbs = Verbs::open(pair.nic);
        for (kind, mem_type, name) in [
            (UarType::NonCached, IBGDA_MEM_WC, "write-combining"),
            (UarType::BlueFlame, IBGDA_MEM_UC, "uncached-minus"),
        ] {
            // Nobody has mapped it, so nothing contradicts.
            let uar = verbs.alloc_uar_of(kind).expect("allocate a UAR");
            let dmabuf = verbs.export(&uar);
            let granted = session
                .import_as(&dmabuf, &verbs.uverbs(), mem_type)
                .expect("import");
            let page = bar0(pair.nic) + granted.bar_offset;
            assert_eq!(memory_type(page).as_deref(), Some(name), "{kind:?}");
            let _mapped = verbs.map(&uar);
            assert_eq!(memory_type(page).as_deref(), Some(name), "{kind:?}");
            // It holds as long as the grant, whatever is mapped and released.
            session.release(granted.handle).expect("release");
            assert_eq!(memory_type(page).as_deref(), Some(name), "{kind:?}");
        }
    });
}

/// N19: the page is not read by a tracer, and is in no core dump; nor is anything else that the broker maps.
#[test]
fn a_tracer_and_a_core_dump_get_nothing_of_what_the_broker_maps() {
    const CORE: &str = "/tmp/ibgda-core";
    // Not as constants: the dump must not have them from the program itself.
    let pattern = |n: u64| (0x5ca1_ab1e_0000_0000 | n).rotate_left(17);
    alone(|| {
        let pair = Pair::new();
        let before = fs::read_to_string("/proc/sys/kernel/core_pattern").expect("core_pattern");
        fs::write("/proc/sys/kernel/core_pattern", CORE).expect("set core_pattern");
        let mut child = fork(|line| {
            let session = pair.session();
            let _status = session.status();
            let doorbell = Doorbell::import(&session, pair.nic);
            let mapping = session.map(doorbell.granted, 4096).expect("map");
            session
                .populate(doorbell.granted.handle, mapping.address)
                .expect("populate");
            let queue = session
                .alloc_queue(4096, -1, IBGDA_MEM_WB)
                .expect("queue memory");
            let memory = session.map(queue, 4096).expect("map");
            let own = vec![pattern(1); 512];
            for offset in (0..4096).step_by(8) {
                memory.store(offset, pattern(2));
            }
            fs::write(
                REPORT,
                format!("{} {}", mapping.address as u64, own.as_ptr() as u64),
            )
            .expect("write the report");
            let limit = libc::rlimit {
                rlim_cur: libc::RLIM_INFINITY,
                rlim_max: libc::RLIM_INFINITY,
            };
            // SAFETY: of this process.
            unsafe { libc::setrlimit(libc::RLIMIT_CORE, &limit) };
            // Shared mappings of files too.
            fs::write("/proc/self/coredump_filter", "0xff").expect("have everything dumped");
            line.go();
            line.wait();
            // SAFETY: ends the process.
            unsafe { libc::abort() }
        });
        child.wait();
        let report = fs::read_to_string(REPORT).expect("read the report");
        fs::remove_file(REPORT).expect("remove the report");
        let addresses: Vec<usize> = report
            .split(' ')
            .map(|number| number.parse().expect("an address"))
            .collect();
        // SAFETY: our child; results are checked, and the kernel checks the addresses.
        unsafe {
            let attached = libc::ptrace(libc::PTRACE_ATTACH, child.pid, 0, 0);
            assert_eq!(attached, 0);
            let mut status = 0;
            assert_eq!(libc::waitpid(child.pid, &mut status, 0), child.pid);
            let peek = |address: usize| {
                *libc::__errno_location() = 0;
                let word = libc::ptrace(libc::PTRACE_PEEKDATA, child.pid, address, 0);
                (word as u64, *libc::__errno_location())
            };
            assert_eq!(peek(addresses[1]), (pattern(1), 0), "its own memory");
            assert_eq!(peek(addresses[0]).1, libc::EIO, "PTRACE_PEEKDATA");
            let poke = libc::ptrace(libc::PTRACE_POKEDATA, child.pid, addresses[0], 1);
            assert_eq!(poke, -1, "PTRACE_POKEDATA");
            assert_eq!(libc::ptrace(libc::PTRACE_DETACH, child.pid, 0, 0), 0);
        }
        child.go();
        assert_eq!(child.end(), End::Signal(libc::SIGABRT));
        fs::write("/proc/sys/kernel/core_pattern", before).expect("reset core_pattern");
        let core = fs::read_dir("/tmp")
            .expect("list /tmp")
            .flatten()
            .map(|entry| entry.path())
            .find(|path| path.to_string_lossy().starts_with(CORE))
            .expect("a core dump");
        let dump = fs::read(&core).expect("read the core dump");
        fs::remove_file(core).expect("remove the core dump");
        let has = |n| {
            let bytes = pattern(n).to_ne_bytes().repeat(8);
            dump.windows(bytes.len()).any(|window| window == bytes)
        };
        assert!(has(1), "a dump has the process's own memory");
        assert!(!has(2), "queue memory is in the core dump");
    });
}
