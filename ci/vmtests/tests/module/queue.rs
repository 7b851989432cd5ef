// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queue memory.

use crate::fixture::{Pair, alone};
use ibgda_uapi::*;
use ibgda_vmtests::process::{End, in_child};
use ibgda_vmtests::verbs::Verbs;
use std::fs;

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

/// N16: the memory that one user may pin.
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
