// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every C call of ibgda.h with what it cannot take: null, zero, huge, misaligned, in a wrong state, of another context or
//! kind, after the end of its object, from two threads at once, and in a forked child. Each is an errno and a sentence,
//! and afterwards nothing is lost.
//!
//! vm: --nics 2 --gpus 1

use anyhow::{Context as _, Result, ensure};
use ibgda::{
    abi::{ibgda_error, ibgda_region},
    capi::*,
};
use ibgda_vmtests::{
    machine::{Allowed, Bdf, gpus, live_objects, nics, wait_until},
    process::{End, in_child},
};
use memmap2::MmapMut;
use std::{
    collections::BTreeMap,
    ffi::{CStr, CString, c_void},
    ptr::{self, null, null_mut},
    sync::{
        Barrier, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

const BYTES: usize = 16 << 10;

/// A call that must fail: its name, the errno, words of the sentence, and what it returned with which sentence.
type Case = (&'static str, i32, &'static str, (i32, String));

fn said(errno: i32) -> (i32, String) {
    // SAFETY: the sentence is this thread's, and terminated.
    let text = unsafe { CStr::from_ptr(ibgda_last_error()) };
    (errno, text.to_string_lossy().into_owned())
}

fn check(cases: &[Case]) -> Result<()> {
    for (name, errno, words, (returned, sentence)) in cases {
        ensure!(
            returned == errno,
            "{name}: errno {returned}, not {errno}: {sentence}"
        );
        ensure!(
            sentence.contains(words),
            "{name}: {words:?} is missing in {sentence:?}"
        );
    }
    Ok(())
}

fn worked(errno: i32) -> Result<()> {
    ensure!(errno == 0, "{:?}", said(errno));
    Ok(())
}

/// The machine, for one test at a time.
struct Machine {
    gpu: CString,
    nics: [CString; 2],
    _allowed: [Allowed; 2],
    _turn: MutexGuard<'static, ()>,
}

impl Machine {
    fn take() -> Result<Self> {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let (gpu, nics) = (gpus()[0], nics());
        let name = |function: Bdf| CString::new(function.to_string());
        let machine = Self {
            gpu: name(gpu)?,
            nics: [name(nics[0])?, name(nics[1])?],
            _allowed: [Allowed::pair(gpu, nics[0]), Allowed::pair(gpu, nics[1])],
            _turn: turn,
        };
        // The driver makes a few things once, with the first region.
        let mut memory = memory();
        ensure!(Objects::make(&machine, 0, &mut memory)?.end() == [0; 5]);
        Ok(machine)
    }

    fn attr(&self, nic: usize) -> ibgda_open_attr {
        ibgda_open_attr {
            size: size_of::<ibgda_open_attr>() as u32,
            port: 1,
            nic: self.nics[nic].as_ptr(),
            gpu: self.gpu.as_ptr(),
            route: IBGDA_ROUTE_DIRECT,
            reserved: 0,
        }
    }
}

fn qp_attr() -> ibgda_qp_attr {
    ibgda_qp_attr {
        send_depth: 16,
        access: IBGDA_ACCESS_WRITE,
        ..Default::default()
    }
}

fn cq_attr() -> ibgda_cq_attr {
    ibgda_cq_attr {
        entries: 16,
        flags: IBGDA_CQ_EVENTS,
        ..Default::default()
    }
}

/// A call, the object that it takes, and what it returned with which sentence.
type Call = (&'static str, &'static str, (i32, String));

/// One object of each kind.
#[derive(Clone, Copy)]
struct Objects {
    context: *mut ibgda_context,
    mr: *mut ibgda_mr,
    cq: *mut ibgda_host_cq,
    qp: *mut ibgda_host_qp,
    heap: *mut ibgda_heap,
}

impl Objects {
    fn make(machine: &Machine, nic: usize, memory: &mut MmapMut) -> Result<Self> {
        let mut all = Self {
            context: null_mut(),
            mr: null_mut(),
            cq: null_mut(),
            qp: null_mut(),
            heap: null_mut(),
        };
        // SAFETY: the arguments are valid, and the memory lives until the region has ended.
        unsafe {
            worked(ibgda_open(&machine.attr(nic), &mut all.context))?;
            let (address, bytes) = (memory.as_mut_ptr().cast(), memory.len());
            worked(ibgda_map_device(
                all.context,
                address,
                bytes,
                IBGDA_ACCESS_WRITE,
                &mut all.mr,
            ))?;
            worked(ibgda_create_cq(all.context, 16, &mut all.cq))?;
            worked(ibgda_create_qp(
                all.context,
                &qp_attr(),
                all.cq,
                null(),
                &mut all.qp,
            ))?;
            worked(ibgda_create_heap(
                all.context,
                null_mut(),
                BYTES,
                IBGDA_ACCESS_WRITE,
                &mut all.heap,
            ))?;
        }
        Ok(all)
    }

    /// The errnos of ending all.
    fn end(self) -> [i32; 5] {
        // SAFETY: objects, or what the library says of them.
        unsafe {
            [
                ibgda_destroy_qp(self.qp),
                ibgda_destroy_cq(self.cq),
                ibgda_destroy_heap(self.heap),
                ibgda_unmap_device(self.mr),
                ibgda_close(self.context),
            ]
        }
    }

    /// Every call that takes an object, with these; the objects' names of the errors, and what the calls returned.
    fn every_call(self) -> Vec<Call> {
        let mut state = ibgda_session_state {
            state: 0,
            generation: 0,
            reason: 0,
            reserved: 0,
            changed_ns: 0,
        };
        let mut memory = MmapMut::map_anon(4096).expect("a page");
        let (mut mr, mut cq, mut qp) = (null_mut(), null_mut(), null_mut());
        let (mut cq_with, mut heap, mut queue) = (null_mut(), null_mut(), null_mut());
        let (mut pointer, mut error) = (null_mut(), ibgda_error::default());
        let (mut qp_handle, mut cq_handle, mut route) = (null_mut(), null_mut(), 0);
        let (mut region, mut text) = (ibgda_region::default(), [0; 64]);
        let mut address = [0_u8; IBGDA_ADDRESS_BYTES];
        let mut counters = ibgda_qp_counters {
            size: size_of::<ibgda_qp_counters>() as u32,
            ..Default::default()
        };
        let page: *mut c_void = memory.as_mut_ptr().cast();
        macro_rules! calls {
            ($($object:literal: $call:ident $arguments:tt;)*) => {
                // SAFETY: whatever the objects are, the other arguments are valid.
                vec![$((stringify!($call), $object, unsafe { said($call $arguments) })),*]
            };
        }
        let calls = calls! {
            "context": ibgda_rebind(self.context, 0);
            "context": ibgda_get_state(self.context, &mut state);
            "context": ibgda_map_device(self.context, page, 4096, IBGDA_ACCESS_WRITE, &mut mr);
            "context": ibgda_create_cq(self.context, 16, &mut cq);
            "context": ibgda_create_qp(self.context, &qp_attr(), self.cq, null(), &mut qp);
            "context": ibgda_get_route(self.context, &mut route);
            "context": ibgda_route_report(self.context, text.as_mut_ptr(), text.len());
            "context": ibgda_set_error_callback(self.context, None, null_mut());
            "mr": ibgda_mr_region(self.mr, &mut region);
            "cq": ibgda_cq_device_handle(self.cq, &mut cq_handle);
            "qp": ibgda_qp_address(self.qp, address.as_mut_ptr());
            "qp": ibgda_qp_connect(self.qp, address.as_ptr().cast(), address.len());
            "qp": ibgda_qp_device_handle(self.qp, &mut qp_handle);
            "qp": ibgda_get_qp_counters(self.qp, &mut counters);
            "qp": ibgda_qp_stop(self.qp);
            "context": ibgda_create_cq_with(self.context, &cq_attr(), &mut cq_with);
            "context": ibgda_create_heap(self.context, null_mut(), 4096, IBGDA_ACCESS_WRITE, &mut heap);
            "cq": ibgda_cq_wait_event(self.cq, 0);
            "heap": ibgda_heap_alloc(self.heap, 64, 64, &mut region);
            "heap": ibgda_heap_free(self.heap, &region);
            "heap": ibgda_heap_region(self.heap, &mut region);
            "qp": ibgda_qp_device_handle_on(self.qp, null(), &mut qp_handle);
            "qp": ibgda_qp_error(self.qp, &mut error);
            "heap": ibgda_heap_device_pointer_on(self.heap, null(), &mut pointer);
            "context": ibgda_alloc_queue_memory(self.context, null(), 4096, &mut queue);
        };
        assert!(
            [
                mr.addr(),
                cq.addr(),
                qp.addr(),
                cq_with.addr(),
                heap.addr(),
                queue.addr()
            ] == [0; 6],
            "made of nothing"
        );
        calls
    }
}

/// What the first NIC has. Doorbell pages, and with them the contexts, are parked until this process has ended.
fn objects_there() -> BTreeMap<String, u64> {
    let mut counts = live_objects(0);
    counts.retain(|kind, _| ["pd", "mkey", "cq", "qp", "umem"].contains(&kind.as_str()));
    counts
}

/// That the first NIC has as many objects as before, once all of them have gone.
fn nothing_is_left(before: &BTreeMap<String, u64>) {
    let what = format!(
        "there is what there was before: {before:?}, not {:?}",
        objects_there()
    );
    wait_until(&what, || objects_there() == *before);
}

fn memory() -> MmapMut {
    MmapMut::map_anon(BYTES).expect("memory")
}

#[test]
fn opening_takes_nothing_that_is_wrong() -> Result<()> {
    let machine = Machine::take()?;
    let before = objects_there();
    let good = machine.attr(0);
    let long = CString::new("x".repeat(1 << 20))?;
    let mut context = null_mut();
    let mut open = |attr: ibgda_open_attr| {
        // SAFETY: the attribute is as long as it says, or says an impossible length.
        said(unsafe { ibgda_open(&attr, &mut context) })
    };
    let with = |nic: &'static CStr| ibgda_open_attr {
        nic: nic.as_ptr(),
        ..good
    };
    check(&[
        (
            "size 0",
            libc::EINVAL,
            "size of attr is 0",
            open(ibgda_open_attr { size: 0, ..good }),
        ),
        (
            "huge",
            libc::EINVAL,
            "size of attr",
            open(ibgda_open_attr {
                size: u32::MAX,
                ..good
            }),
        ),
        (
            "port 0",
            libc::EINVAL,
            "port 0",
            open(ibgda_open_attr { port: 0, ..good }),
        ),
        (
            "port 2",
            libc::EINVAL,
            "port 2",
            open(ibgda_open_attr { port: 2, ..good }),
        ),
        (
            "port 2^32-1",
            libc::EINVAL,
            "no port 4294967295",
            open(ibgda_open_attr {
                port: u32::MAX,
                ..good
            }),
        ),
        (
            "no NIC",
            libc::EINVAL,
            "nic is NULL",
            open(ibgda_open_attr {
                nic: null(),
                ..good
            }),
        ),
        (
            "no GPU",
            libc::EINVAL,
            "gpu is NULL",
            open(ibgda_open_attr {
                gpu: null(),
                ..good
            }),
        ),
        (
            "NIC \"\"",
            libc::EINVAL,
            "not the name of a verbs device",
            open(with(c"")),
        ),
        (
            "NIC ../..",
            libc::EINVAL,
            "not the name of a verbs device",
            open(with(c"../..")),
        ),
        (
            "NIC in Latin-1",
            libc::EINVAL,
            "nic is not UTF-8",
            open(with(c"mlx\xe4")),
        ),
        (
            "a long NIC",
            libc::EINVAL,
            "NIC",
            open(ibgda_open_attr {
                nic: long.as_ptr(),
                ..good
            }),
        ),
        (
            "a long GPU",
            libc::EINVAL,
            "PCI",
            open(ibgda_open_attr {
                gpu: long.as_ptr(),
                ..good
            }),
        ),
        (
            "no such GPU",
            libc::ENODEV,
            "IBGDA_IOC_BIND",
            open(ibgda_open_attr {
                gpu: c"ffff:ff:1f.7".as_ptr(),
                ..good
            }),
        ),
        (
            "a GPU for a NIC",
            libc::EINVAL,
            "no RDMA NIC",
            open(ibgda_open_attr {
                nic: good.gpu,
                ..good
            }),
        ),
        (
            "a NIC for a GPU",
            libc::EINVAL,
            "IBGDA_IOC_BIND",
            open(ibgda_open_attr {
                gpu: good.nic,
                ..good
            }),
        ),
        (
            "route 77",
            libc::EINVAL,
            "no route 77",
            open(ibgda_open_attr { route: 77, ..good }),
        ),
        (
            "reserved",
            libc::EINVAL,
            "reserved is 0x1",
            open(ibgda_open_attr {
                reserved: 1,
                ..good
            }),
        ),
    ])?;
    ensure!(context.is_null());
    // SAFETY: null is an argument that the call refuses.
    unsafe {
        check(&[
            (
                "no attr",
                libc::EINVAL,
                "attr is NULL",
                said(ibgda_open(null(), &mut context)),
            ),
            (
                "no context",
                libc::EINVAL,
                "context is NULL",
                said(ibgda_open(&good, null_mut())),
            ),
        ])?;
    }
    nothing_is_left(&before);
    Ok(())
}

#[test]
fn arguments_are_refused_by_name() -> Result<()> {
    let machine = Machine::take()?;
    let before = objects_there();
    let (mut one_memory, mut other_memory) = (memory(), memory());
    let one = Objects::make(&machine, 0, &mut one_memory)?;
    let other = Objects::make(&machine, 1, &mut other_memory)?;
    let (mut mr, mut cq, mut qp) = (null_mut(), null_mut(), null_mut());
    let page: *mut u8 = one_memory.as_mut_ptr();
    let mut map = |address: *mut u8, bytes: usize, access: u32| {
        // SAFETY: refused, or whole pages of the memory.
        said(unsafe { ibgda_map_device(one.context, address.cast(), bytes, access, &mut mr) })
    };
    let hole = ptr::without_provenance_mut(0x7000_0000_0000);
    check(&[
        (
            "map null",
            libc::EFAULT,
            "not mapped",
            map(null_mut(), 4096, 0),
        ),
        ("map 0 bytes", libc::EINVAL, "zero", map(page, 0, 0)),
        (
            "map a byte off",
            libc::EINVAL,
            "IBGDA_MAP_ROUND",
            map(page.wrapping_add(1), 4096, 0),
        ),
        (
            "map 100 bytes",
            libc::EINVAL,
            "IBGDA_MAP_ROUND",
            map(page, 100, 0),
        ),
        (
            "map all",
            libc::EINVAL,
            "address space",
            map(page, usize::MAX & !4095, 0),
        ),
        (
            "map all, rounded",
            libc::EINVAL,
            "address space",
            map(page, usize::MAX, IBGDA_MAP_ROUND),
        ),
        ("map a hole", libc::EFAULT, "not mapped", map(hole, 4096, 0)),
        (
            "map 2^46",
            libc::EINVAL,
            "takes no such value",
            map(page, 1 << 46, 0),
        ),
        ("access 8", libc::EINVAL, "access 0x8", map(page, 4096, 8)),
    ])?;

    let mut make_cq = |entries| {
        // SAFETY: the context lives.
        said(unsafe { ibgda_create_cq(one.context, entries, &mut cq) })
    };
    check(&[
        ("CQ of 0", libc::EINVAL, "0", make_cq(0)),
        ("CQ of 3", libc::EINVAL, "powers of two", make_cq(3)),
        ("CQ of 65536", libc::EINVAL, "65536", make_cq(1 << 16)),
        (
            "CQ of 2^32-1",
            libc::EINVAL,
            "4294967295",
            make_cq(u32::MAX),
        ),
    ])?;

    let mut small = null_mut();
    // SAFETY: the context lives.
    unsafe { worked(ibgda_create_cq(one.context, 4, &mut small))? };
    let mut make_qp = |change: &dyn Fn(&mut ibgda_qp_attr),
                       send: *mut ibgda_host_cq,
                       recv: *mut ibgda_host_cq| {
        let mut attr = qp_attr();
        change(&mut attr);
        // SAFETY: the objects live; the attribute is as long as it says, or says an impossible length.
        said(unsafe { ibgda_create_qp(one.context, &attr, send, recv, &mut qp) })
    };
    let none = null_mut();
    check(&[
        (
            "size 0",
            libc::EINVAL,
            "size of attr is 0",
            make_qp(&|attr| attr.size = 0, small, none),
        ),
        (
            "depth 3",
            libc::EINVAL,
            "powers of two",
            make_qp(&|attr| attr.send_depth = 3, small, none),
        ),
        (
            "depth 65536",
            libc::EINVAL,
            "65536",
            make_qp(&|attr| attr.send_depth = 1 << 16, small, none),
        ),
        (
            "receives 2",
            libc::EINVAL,
            "receive queue",
            make_qp(&|attr| attr.recv_depth = 2, small, small),
        ),
        (
            "no recv_cq",
            libc::EINVAL,
            "receive",
            make_qp(&|attr| attr.recv_depth = 4, small, none),
        ),
        (
            "a recv_cq too many",
            libc::EINVAL,
            "receive",
            make_qp(&|_| (), small, one.cq),
        ),
        (
            "access 8",
            libc::EINVAL,
            "access 0x8",
            make_qp(&|attr| attr.access = 8, small, none),
        ),
        (
            "mode 2^30",
            libc::EINVAL,
            "mode 0x40000000",
            make_qp(&|attr| attr.mode = 1 << 30, small, none),
        ),
        (
            "reserved",
            libc::EINVAL,
            "reserved is 0x1",
            make_qp(&|attr| attr.reserved = 1, small, none),
        ),
        (
            "a small CQ",
            libc::EINVAL,
            "overrun",
            make_qp(&|_| (), small, none),
        ),
        (
            "a used CQ",
            libc::EBUSY,
            "serves a work queue",
            make_qp(&|_| (), one.cq, none),
        ),
        (
            "another context's CQ",
            libc::EINVAL,
            "another context",
            make_qp(&|_| (), other.cq, none),
        ),
        (
            "no send_cq",
            libc::EINVAL,
            "send_cq is NULL",
            make_qp(&|_| (), none, none),
        ),
    ])?;
    ensure!(
        mr.is_null() && cq.is_null() && qp.is_null(),
        "made of nothing"
    );

    let mut address = [0_u8; IBGDA_ADDRESS_BYTES];
    let connect = |bytes: &[u8], length: usize| {
        // SAFETY: no more than 65 bytes are read, and so many are there.
        said(unsafe { ibgda_qp_connect(one.qp, bytes.as_ptr().cast(), length) })
    };
    // SAFETY: the objects live, and the buffers are as long as they say.
    unsafe {
        worked(ibgda_qp_address(other.qp, address.as_mut_ptr()))?;
        let longer = [&address[..], &[0; 8]].concat();
        let mut wrong = address;
        wrong[20] = 1;
        check(&[
            (
                "no address",
                libc::EINVAL,
                "address is NULL",
                said(ibgda_qp_connect(one.qp, null(), 64)),
            ),
            ("0 bytes", libc::EINVAL, "of 0 bytes", connect(&longer, 0)),
            (
                "63 bytes",
                libc::EINVAL,
                "of 63 bytes",
                connect(&longer, 63),
            ),
            (
                "2^64-1 bytes",
                libc::EINVAL,
                "of 65 bytes",
                connect(&longer, usize::MAX),
            ),
            (
                "a changed bit",
                libc::EINVAL,
                "checksum",
                connect(&wrong, 64),
            ),
            (
                "zeros",
                libc::EINVAL,
                "does not begin",
                connect(&[0; 65], 64),
            ),
        ])?;
        worked(ibgda_qp_connect(one.qp, address.as_ptr().cast(), 64))?;
        let mut counters = ibgda_qp_counters::default();
        let mut text = [0; 8];
        let last = text.as_mut_ptr();
        let mut count = |size| {
            counters.size = size;
            said(ibgda_get_qp_counters(one.qp, &mut counters))
        };
        check(&[
            (
                "connected before",
                libc::EISCONN,
                "connected before",
                connect(&address, 64),
            ),
            (
                "counters of 0",
                libc::EINVAL,
                "size of counters is 0",
                count(0),
            ),
            (
                "counters of 2^32-1",
                libc::EINVAL,
                "size of counters",
                count(u32::MAX),
            ),
            (
                "no counters",
                libc::EINVAL,
                "counters is NULL",
                said(ibgda_get_qp_counters(one.qp, null_mut())),
            ),
            (
                "no text",
                libc::EINVAL,
                "buffer is NULL",
                said(ibgda_status_text(0, null_mut(), 8)),
            ),
            (
                "text of 0",
                libc::EINVAL,
                "buffer is NULL",
                said(ibgda_status_text(0, last, 0)),
            ),
            (
                "no report",
                libc::EINVAL,
                "buffer is NULL",
                said(ibgda_route_report(one.context, null_mut(), 8)),
            ),
            (
                "no route",
                libc::EINVAL,
                "route is NULL",
                said(ibgda_get_route(one.context, null_mut())),
            ),
            (
                "no state",
                libc::EINVAL,
                "state is NULL",
                said(ibgda_get_state(one.context, null_mut())),
            ),
            (
                "no region",
                libc::EINVAL,
                "region is NULL",
                said(ibgda_mr_region(one.mr, null_mut())),
            ),
            (
                "no CQ handle",
                libc::EINVAL,
                "handle is NULL",
                said(ibgda_cq_device_handle(one.cq, null_mut())),
            ),
            (
                "no QP handle",
                libc::EINVAL,
                "handle is NULL",
                said(ibgda_qp_device_handle(one.qp, null_mut())),
            ),
            (
                "not lost",
                libc::EINVAL,
                "not lost",
                said(ibgda_rebind(one.context, 0)),
            ),
        ])?;
        // What is stopped stays so, and says it.
        worked(ibgda_qp_stop(other.qp))?;
        worked(ibgda_qp_address(one.qp, address.as_mut_ptr()))?;
        let stopped = said(ibgda_qp_connect(other.qp, address.as_ptr().cast(), 64));
        ensure!(
            stopped.0 != 0 && stopped.1.contains("INIT2RTR_QP"),
            "{stopped:?}"
        );
        worked(ibgda_destroy_cq(small))?;
    }
    ensure!(one.end() == [0; 5] && other.end() == [0; 5]);
    nothing_is_left(&before);
    Ok(())
}

#[test]
fn queues_with_events_and_heaps_take_nothing_that_is_wrong() -> Result<()> {
    let machine = Machine::take()?;
    let before = objects_there();
    let (mut memory, mut cq) = (memory(), null_mut());
    let one = Objects::make(&machine, 0, &mut memory)?;
    let mut create = |attr: ibgda_cq_attr| {
        // SAFETY: the attribute is as long as it says, or says an impossible length.
        said(unsafe { ibgda_create_cq_with(one.context, &attr, &mut cq) })
    };
    let good = cq_attr();
    check(&[
        (
            "size 0",
            libc::EINVAL,
            "size of attr is 0",
            create(ibgda_cq_attr { size: 0, ..good }),
        ),
        (
            "an unknown flag",
            libc::EINVAL,
            "unknown bits 0x4",
            create(ibgda_cq_attr { flags: 5, ..good }),
        ),
        (
            "something reserved",
            libc::EINVAL,
            "reserved is 0x7",
            create(ibgda_cq_attr {
                reserved: 7,
                ..good
            }),
        ),
        (
            "no power of two",
            libc::EINVAL,
            "CQ of depth 3",
            create(ibgda_cq_attr { entries: 3, ..good }),
        ),
        (
            "too many entries",
            libc::EINVAL,
            "CQ of depth 2147483648",
            create(ibgda_cq_attr {
                entries: 1 << 31,
                ..good
            }),
        ),
        (
            "collapsed with events",
            libc::EINVAL,
            "choose one of the two",
            create(ibgda_cq_attr {
                flags: IBGDA_CQ_EVENTS | IBGDA_CQ_COLLAPSED,
                ..good
            }),
        ),
    ])?;
    let (mut heap, mut with_events) = (null_mut(), null_mut());
    let page = memory.as_mut_ptr();
    // SAFETY: the arguments are valid, or what the library is to say of them.
    unsafe {
        let mut make = |memory: *mut u8, length, access| {
            said(ibgda_create_heap(
                one.context,
                memory.cast(),
                length,
                access,
                &raw mut heap,
            ))
        };
        let (write, whole) = (IBGDA_ACCESS_WRITE, usize::MAX & !4095);
        check(&[
            (
                "an empty heap",
                libc::EINVAL,
                "0 bytes",
                make(null_mut(), 0, write),
            ),
            (
                "a huge heap",
                libc::ENOMEM,
                "bytes",
                make(null_mut(), whole, write),
            ),
            (
                "memory beyond the end",
                libc::EINVAL,
                "beyond",
                make(page, whole, write),
            ),
            ("half a page", libc::EINVAL, "4096", make(page, 2048, write)),
            (
                "memory amid a page",
                libc::EINVAL,
                "4096",
                make(page.add(64), 4096, write),
            ),
            (
                "an unknown right",
                libc::EINVAL,
                "access",
                make(page, 4096, 1 << 30),
            ),
            (
                "no heap",
                libc::EINVAL,
                "heap is NULL",
                said(ibgda_create_heap(
                    one.context,
                    null_mut(),
                    4096,
                    write,
                    null_mut(),
                )),
            ),
            (
                "no attr",
                libc::EINVAL,
                "attr is NULL",
                said(ibgda_create_cq_with(one.context, null(), &mut with_events)),
            ),
            (
                "no CQ",
                libc::EINVAL,
                "cq is NULL",
                said(ibgda_create_cq_with(one.context, &good, null_mut())),
            ),
            (
                "a queue without events",
                libc::EOPNOTSUPP,
                "without events",
                said(ibgda_cq_wait_event(one.cq, 0)),
            ),
        ])?;
        worked(ibgda_create_cq_with(one.context, &good, &mut with_events))?;
        let (mut buffer, mut none) = (ibgda_region::default(), ibgda_region::default());
        worked(ibgda_heap_alloc(one.heap, 100, 4096, &mut buffer))?;
        let alloc = |bytes, align, buffer: *mut ibgda_region| {
            said(ibgda_heap_alloc(one.heap, bytes, align, buffer))
        };
        let of_another = ibgda_region {
            address: page.addr() as u64,
            ..buffer
        };
        let amid = ibgda_region {
            address: buffer.address + 64,
            ..buffer
        };
        let free = |buffer: *const ibgda_region| said(ibgda_heap_free(one.heap, buffer));
        check(&[
            (
                "nothing came",
                libc::ETIMEDOUT,
                "",
                said(ibgda_cq_wait_event(with_events, 0)),
            ),
            (
                "0 bytes",
                libc::EINVAL,
                "length is 0",
                alloc(0, 64, &mut none),
            ),
            (
                "aligned to 0",
                libc::EINVAL,
                "no power of two",
                alloc(64, 0, &mut none),
            ),
            (
                "aligned to 96",
                libc::EINVAL,
                "no power of two",
                alloc(64, 96, &mut none),
            ),
            (
                "too much",
                libc::ENOMEM,
                "longest free range",
                alloc(BYTES as u64, 64, &mut none),
            ),
            (
                "2^64-1 bytes",
                libc::ENOMEM,
                "longest free range",
                alloc(u64::MAX, 64, &mut none),
            ),
            (
                "aligned to 2^63",
                libc::ENOMEM,
                "longest free range",
                alloc(64, 1 << 63, &mut none),
            ),
            (
                "no buffer",
                libc::EINVAL,
                "buffer is NULL",
                alloc(64, 64, null_mut()),
            ),
            (
                "nothing given back",
                libc::EINVAL,
                "buffer is NULL",
                free(null()),
            ),
            (
                "another's",
                libc::EINVAL,
                "no buffer of this heap",
                free(&of_another),
            ),
            (
                "amid a buffer",
                libc::EINVAL,
                "no buffer of this heap",
                free(&amid),
            ),
            (
                "no region",
                libc::EINVAL,
                "region is NULL",
                said(ibgda_heap_region(one.heap, null_mut())),
            ),
            (
                "a buffer is out",
                libc::EBUSY,
                "1 buffers of 128 bytes",
                said(ibgda_destroy_heap(one.heap)),
            ),
        ])?;
        worked(ibgda_heap_free(one.heap, &buffer))?;
        check(&[(
            "given back twice",
            libc::EINVAL,
            "given back before",
            free(&buffer),
        )])?;
        worked(ibgda_destroy_cq(with_events))?;
    }
    ensure!(one.end() == [0; 5]);
    nothing_is_left(&before);
    Ok(())
}

#[test]
fn objects_that_are_none_are_told_by_every_call() -> Result<()> {
    let machine = Machine::take()?;
    let before = objects_there();
    let (mut memory, mut unused) = (memory(), memory());
    let gone = Objects::make(&machine, 0, &mut memory)?;
    ensure!(gone.end() == [0; 5]);
    // Others in their place.
    let others = Objects::make(&machine, 0, &mut unused)?;
    let none = Objects {
        context: null_mut(),
        mr: null_mut(),
        cq: null_mut(),
        qp: null_mut(),
        heap: null_mut(),
    };
    let number = 7_u64;
    let garbage: *mut u64 = (&raw const number).cast_mut();
    let garbage = Objects {
        context: garbage.cast(),
        mr: garbage.cast(),
        cq: garbage.cast(),
        qp: garbage.cast(),
        heap: garbage.cast(),
    };
    // Each is another's kind.
    let mixed = Objects {
        context: others.qp.cast(),
        mr: others.context.cast(),
        cq: others.mr.cast(),
        qp: others.cq.cast(),
        heap: others.cq.cast(),
    };
    for (which, objects, errno, words) in [
        ("null", none, libc::EINVAL, "is NULL"),
        ("destroyed", gone, libc::EBADF, "has been destroyed"),
        ("garbage", garbage, libc::EBADF, "of this library"),
        ("of another kind", mixed, libc::EBADF, ", not a "),
    ] {
        for (call, object, (returned, sentence)) in objects.every_call() {
            ensure!(
                returned == errno,
                "{call}, {which} {object}: errno {returned}: {sentence}"
            );
            ensure!(
                sentence.contains(&format!("{object} ")) && sentence.contains(words),
                "{call}, {which} {object}: {sentence}"
            );
        }
        ensure!(objects.end() == [errno; 5], "{which}: ended");
    }
    ensure!(others.end() == [0; 5], "what is alive is alive");
    nothing_is_left(&before);
    Ok(())
}

#[test]
fn two_threads_at_once_lose_nothing() -> Result<()> {
    const THREADS: usize = 4;
    let machine = Machine::take()?;
    let before = objects_there();
    let mut shared_memory = memory();
    let shared = Objects::make(&machine, 0, &mut shared_memory)?;
    let (context, qp) = (shared.context.addr(), shared.qp.addr());
    let (together, connected, ended) = (
        Barrier::new(THREADS),
        AtomicUsize::new(0),
        AtomicUsize::new(0),
    );
    let mut address = [0_u8; IBGDA_ADDRESS_BYTES];
    // SAFETY: the QP lives.
    unsafe { worked(ibgda_qp_address(shared.qp, address.as_mut_ptr()))? };
    let work = || -> Result<()> {
        let (context, qp) = (
            ptr::without_provenance_mut(context),
            ptr::without_provenance_mut::<ibgda_host_qp>(qp),
        );
        together.wait();
        // SAFETY: handles of objects that live, or have ended: the library says which.
        unsafe {
            // One of all connects, one ends it.
            match ibgda_qp_connect(qp, address.as_ptr().cast(), 64) {
                0 => drop(connected.fetch_add(1, Ordering::SeqCst)),
                errno => ensure!(
                    errno == libc::EISCONN || errno == libc::EBADF,
                    "{:?}",
                    said(errno)
                ),
            }
            for _ in 0..8 {
                let (mut cq, mut mine) = (null_mut(), null_mut());
                worked(ibgda_create_cq(context, 16, &mut cq))?;
                worked(ibgda_create_qp(context, &qp_attr(), cq, null(), &mut mine))?;
                worked(ibgda_destroy_cq(cq))?;
                worked(ibgda_destroy_qp(mine))?;
            }
            together.wait();
            match ibgda_destroy_qp(qp) {
                0 => drop(ended.fetch_add(1, Ordering::SeqCst)),
                errno => ensure!(errno == libc::EBADF, "{:?}", said(errno)),
            }
        }
        Ok(())
    };
    thread::scope(|scope| -> Result<()> {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            thread.join().ok().context("a thread panicked")??;
        }
        Ok(())
    })?;
    let once = (connected.into_inner(), ended.into_inner());
    ensure!(
        once == (1, 1),
        "connected {} times, ended {}",
        once.0,
        once.1
    );
    ensure!(shared.end() == [libc::EBADF, 0, 0, 0, 0]);
    nothing_is_left(&before);
    Ok(())
}

/// A child has its parent's objects only to let go of them, which changes nothing for the parent.
#[test]
fn a_forked_child_is_told_and_takes_nothing() -> Result<()> {
    let machine = Machine::take()?;
    let before = objects_there();
    let mut parents = memory();
    let objects = Objects::make(&machine, 0, &mut parents)?;
    let with_them = objects_there();
    let end = in_child(|| {
        // What is only read of memory that the child has too is no error.
        let harmless = [
            "ibgda_get_route",
            "ibgda_route_report",
            "ibgda_mr_region",
            "ibgda_heap_region",
            "ibgda_cq_device_handle",
            "ibgda_qp_device_handle",
            "ibgda_qp_address",
            "ibgda_set_error_callback",
        ];
        let calls = objects.every_call();
        let is_right = |(call, _, (errno, _)): &&Call| match *errno {
            0 => harmless.contains(call),
            errno => errno == libc::EPERM,
        };
        let wrong: Vec<_> = calls.iter().filter(|call| !is_right(call)).collect();
        for call in &wrong {
            eprintln!("in a child: {call:?}");
        }
        let ended = objects.end() == [0; 5];
        i32::from(!wrong.is_empty()) | (i32::from(!ended) << 1)
    });
    ensure!(end == End::Exit(0), "{end:?}");
    ensure!(
        objects_there() == with_them,
        "the child has taken something"
    );
    let mut address = [0_u8; IBGDA_ADDRESS_BYTES];
    // SAFETY: the QP lives.
    unsafe {
        worked(ibgda_qp_address(objects.qp, address.as_mut_ptr()))?;
        worked(ibgda_qp_connect(objects.qp, address.as_ptr().cast(), 64))?;
    }
    ensure!(objects.end() == [0; 5]);
    nothing_is_left(&before);
    Ok(())
}
