// SPDX-License-Identifier: MIT OR Apache-2.0
//! CQ events, what the NIC says of queues, and queues of other kinds, on the loopback route; `vm::routes` has the same with the mlx5 driver.

use ibgda::{
    Access, AsyncEvent, AsyncEventKind, CompletionQueue, CompletionQueueOptions, Context,
    MemoryRegion, OpenOptions, QpAddress, QueuePair, QueuePairEvent, QueuePairOptions, Route,
    Status,
    abi::{
        IBGDA_BLUEFLAME, IBGDA_COLLAPSED, IBGDA_SKIP, ibgda_cq, ibgda_cqe, ibgda_qp, ibgda_status,
    },
    capi, loopback,
};
use std::{
    ffi::{CStr, CString},
    ptr::null_mut,
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, channel},
    },
    thread,
    time::{Duration, Instant},
};

const PATIENCE: Duration = Duration::from_secs(60);
const MOMENT: Duration = Duration::from_millis(50);

/// The NICs are the process's: one test at a time.
static NICS: Mutex<()> = Mutex::new(());

unsafe extern "C" {
    fn ibgda_clock_ns() -> u64;
    fn ibgda_put(
        qp: *mut ibgda_qp,
        remote: u64,
        rkey: u32,
        local: u64,
        lkey: u32,
        bytes: u32,
        flags: u32,
        request: *mut u64,
    ) -> u32;
    fn ibgda_poll_cq(cq: *mut ibgda_cq, cqe: *mut ibgda_cqe, deadline_ns: u64) -> u32;
    fn ibgda_quiet(qp: *mut ibgda_qp, deadline_ns: u64) -> u32;
    fn ibgda_wait_for_cq_event(cq: *mut ibgda_cq, deadline_ns: u64) -> u32;
}

fn deadline(patience: Duration) -> u64 {
    // SAFETY: it takes nothing.
    unsafe { ibgda_clock_ns() + patience.as_nanos() as u64 }
}

/// Two QPs, of two NICs, that reach each other, and memory.
struct Link {
    near: Context,
    qp: QueuePair,
    memory: MemoryRegion,
    target: MemoryRegion,
    peer: QueuePair,
    _far: Context,
    heard: Mutex<Receiver<AsyncEvent>>,
}

fn open(nic: &str) -> Context {
    Context::open(&OpenOptions {
        route: Route::Loopback,
        ..OpenOptions::new(nic, "0000:00:00.0".parse().expect("an address"))
    })
    .expect("opens")
}

fn make_qp(context: &Context, cq: &Arc<CompletionQueue>) -> QueuePair {
    let options = QueuePairOptions {
        send_depth: 16,
        ..Default::default()
    };
    context.create_qp(&options, cq, None).expect("a QP")
}

fn cq(context: &Context) -> Arc<CompletionQueue> {
    let options = CompletionQueueOptions {
        depth: 16,
        events: true,
        ..Default::default()
    };
    context.create_cq_with(&options).expect("a CQ with events")
}

impl Link {
    fn new() -> Self {
        let (near, far) = (open("loopback0"), open("loopback1"));
        let (told, heard) = channel();
        far.on_error(move |event| {
            let _ = told.send(event.clone());
        })
        .expect("listens");
        let (qp, peer) = (make_qp(&near, &cq(&near)), make_qp(&far, &cq(&far)));
        let carried =
            |address: QpAddress| QpAddress::from_bytes(&address.to_bytes()).expect("an address");
        qp.connect(&carried(peer.address())).expect("connects");
        peer.connect(&carried(qp.address())).expect("connects");
        let alloc = |context: &Context| context.alloc(4096, Access::all()).expect("memory");
        let (memory, target) = (alloc(&near), alloc(&far));
        Self {
            near,
            qp,
            memory,
            target,
            peer,
            _far: far,
            heard: Mutex::new(heard),
        }
    }

    fn put(&self, wrong: u32) {
        assert_eq!(self.put_with(wrong, 0), Status::OK);
    }

    fn put_with(&self, wrong: u32, flags: u32) -> Status {
        let (local, remote) = (&self.memory, &self.target);
        // SAFETY: one thread at a time posts, to a QP that lives.
        Status(unsafe {
            ibgda_put(
                self.qp.device_handle(),
                remote.address(),
                remote.rkey() ^ wrong,
                local.address(),
                local.lkey(),
                8,
                flags,
                null_mut(),
            )
        })
    }

    fn poll(&self) -> Status {
        let mut cqe = ibgda_cqe::default();
        // SAFETY: one thread at a time polls a CQ that lives.
        Status(unsafe { ibgda_poll_cq(self.qp.send_cq().device_handle(), &mut cqe, 0) })
    }

    /// The device call.
    fn wait(&self, patience: Duration) -> Status {
        let cq = self.qp.send_cq().device_handle();
        // SAFETY: as above.
        Status(unsafe { ibgda_wait_for_cq_event(cq, deadline(patience)) })
    }
}

#[test]
fn a_wait_sleeps_until_a_completion_comes_and_no_longer() {
    let _alone = NICS.lock();
    let link = Link::new();
    let cq = link.qp.send_cq();
    let none = cq.wait_for_event(MOMENT).expect("waits");
    assert!(!none, "nothing was posted");
    assert_eq!(link.wait(MOMENT), Status::TIMEOUT);
    for unknown in [IBGDA_SKIP, 0x40, 1 << 31] {
        let refused = Status(ibgda_status::IBGDA_ERR_FLAGS);
        assert_eq!(link.put_with(0, unknown), refused, "flags {unknown:#x}");
    }
    // More often than the serial number of an arming has values.
    for round in 0..20 {
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(round % 3));
                link.put(0);
            });
            loop {
                if round % 2 == 0 {
                    assert!(cq.wait_for_event(PATIENCE).expect("waits"), "round {round}");
                } else {
                    assert_eq!(link.wait(PATIENCE), Status::OK, "round {round}");
                }
                // The event of the round before can be late.
                match link.poll() {
                    Status::OK => break,
                    other => assert_eq!(other, Status::TIMEOUT, "round {round}"),
                }
            }
        });
        assert_eq!(link.poll(), Status::TIMEOUT, "round {round}");
    }
    // One that is there already needs no event.
    link.put(0);
    let end = Instant::now() + PATIENCE;
    while !cq.wait_for_event(Duration::ZERO).expect("looks") {
        assert!(Instant::now() < end);
    }
    assert_eq!(link.poll(), Status::OK);
    // Armed, and then nobody waits: the event comes, and is counted, all the same.
    // An event of before can be late.
    let end = Instant::now() + PATIENCE;
    while cq.wait_for_event(MOMENT).expect("waits") {
        assert!(Instant::now() < end);
    }
    // SAFETY: the queue lives, and its counter is only read.
    let counted = || unsafe { (*cq.device_handle()).events.read_volatile() };
    let before = counted();
    assert!(before <= 22, "{before} events");
    link.put(0);
    let end = Instant::now() + PATIENCE;
    while counted() == before {
        assert!(Instant::now() < end, "no event");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_queue_without_events_says_so_and_two_with_them_are_two() {
    let _alone = NICS.lock();
    let (link, other) = (Link::new(), Link::new());
    let plain = link.near.create_cq(16).expect("a CQ");
    let error = plain.wait_for_event(PATIENCE).expect_err("has no events");
    assert_eq!(error.errno(), libc::EOPNOTSUPP);
    assert!(error.to_string().contains("IBGDA_CQ_EVENTS"), "{error}");
    // SAFETY: a CQ that lives.
    let status = unsafe { ibgda_wait_for_cq_event(plain.device_handle(), deadline(PATIENCE)) };
    assert_eq!(status, ibgda_status::IBGDA_ERR_NO_QUEUE);
    thread::scope(|scope| {
        let quiet = scope.spawn(|| other.qp.send_cq().wait_for_event(10 * MOMENT));
        let busy = scope.spawn(|| link.qp.send_cq().wait_for_event(PATIENCE));
        link.put(0);
        assert!(busy.join().expect("no panic").expect("waits"));
        assert!(
            !quiet.join().expect("no panic").expect("waits"),
            "another's"
        );
    });
    other.put(0);
    assert!(other.qp.send_cq().wait_for_event(PATIENCE).expect("waits"));
}

#[test]
fn a_lost_nic_and_an_end_of_waits_end_a_wait() {
    let _alone = NICS.lock();
    let link = Link::new();
    let start = Instant::now();
    thread::scope(|scope| {
        let host = scope.spawn(|| link.qp.send_cq().wait_for_event(PATIENCE));
        let device = scope.spawn(|| link.peer.send_cq().wait_for_event(PATIENCE));
        thread::sleep(MOMENT);
        link.peer.send_cq().cancel_waits();
        let ended = device.join().expect("no panic").expect_err("cancelled");
        assert_eq!(ended.errno(), libc::ECANCELED);
        loopback::lose("loopback0").expect("lost");
        let lost = host.join().expect("no panic").expect_err("lost");
        assert_eq!(lost.errno(), libc::ENOLINK);
        assert!(lost.to_string().contains("rebind"), "{lost}");
    });
    assert_eq!(link.wait(PATIENCE), Status::NIC_LOST);
    assert!(start.elapsed() < PATIENCE / 2);
    loopback::recover("loopback0").expect("back");
    drop(link);
    // Of the same numbers, and its events come.
    let link = Link::new();
    link.put(0);
    assert!(link.qp.send_cq().wait_for_event(PATIENCE).expect("waits"));
}

#[test]
fn what_the_nic_says_of_a_queue_pair_is_told() {
    let _alone = NICS.lock();
    let link = Link::new();
    link.put(0xff00);
    let event = link
        .heard
        .lock()
        .expect("no panic")
        .recv_timeout(PATIENCE)
        .expect("told");
    let expected = AsyncEventKind::QueuePair {
        qpn: link.peer.number(),
        event: QueuePairEvent::AccessError,
    };
    assert_eq!(event.kind(), expected, "{event}");
    assert!(
        link.qp
            .send_cq()
            .wait_for_event(PATIENCE)
            .expect("an error is an event")
    );
    assert_eq!(link.poll(), Status::REMOTE_ACCESS);
    assert_eq!(link.wait(PATIENCE), Status::REMOTE_ACCESS, "it stays");
}

#[test]
fn a_collapsed_cq_serves_many_laps_and_keeps_the_first_error() {
    let _alone = NICS.lock();
    let mut link = Link::new();
    let collapsed = CompletionQueueOptions {
        depth: 16,
        collapsed: true,
        ..Default::default()
    };
    let cq = link.near.create_cq_with(&collapsed).expect("a CQ");
    let far = link._far.create_cq(16).expect("a CQ");
    (link.qp, link.peer) = (make_qp(&link.near, &cq), make_qp(&link._far, &far));
    link.qp.connect(&link.peer.address()).expect("connects");
    link.peer.connect(&link.qp.address()).expect("connects");
    let handle = link.qp.device_handle();
    // SAFETY: constant after creation.
    assert_eq!(unsafe { (*handle).mode }, IBGDA_COLLAPSED);
    // SAFETY: one thread uses a QP that lives.
    let quiet = || Status(unsafe { ibgda_quiet(handle, deadline(PATIENCE)) });
    for round in 0..200 {
        link.put(0);
        if round % 5 == 0 {
            assert_eq!(quiet(), Status::OK, "round {round}");
        }
    }
    assert_eq!(quiet(), Status::OK);
    assert_eq!(link.qp.counters().completed, 200);
    link.put(0xff00);
    assert_eq!(quiet(), Status::REMOTE_ACCESS);
    assert_eq!(cq.error().expect("latched").wqe_index, 200);
    let both = CompletionQueueOptions {
        events: true,
        ..collapsed
    };
    let error = link.near.create_cq_with(&both).expect_err("both");
    assert_eq!(error.errno(), libc::EINVAL, "{error}");
}

#[test]
fn a_blueflame_page_has_buffers_and_a_handle_that_says_so() {
    let _alone = NICS.lock();
    let context = open("loopback0");
    let cq = context.create_cq(16).expect("a CQ");
    let options = QueuePairOptions {
        send_depth: 16,
        blueflame: true,
        ..Default::default()
    };
    let qp = context.create_qp(&options, &cq, None).expect("a QP");
    // SAFETY: constant after creation.
    let (mode, bytes) = unsafe {
        let handle = qp.device_handle();
        ((*handle).mode, (*handle).blueflame_bytes)
    };
    assert_eq!((mode, bytes), (IBGDA_BLUEFLAME, 256));
}

#[test]
fn c_programs_wait_and_destroy_while_another_thread_waits() {
    let _alone = NICS.lock();
    let nic = CString::new("loopback3").expect("no NUL");
    let attr = capi::ibgda_open_attr {
        size: size_of::<capi::ibgda_open_attr>() as u32,
        port: 1,
        nic: nic.as_ptr(),
        gpu: c"0000:00:00.0".as_ptr(),
        route: capi::IBGDA_ROUTE_LOOPBACK,
        reserved: 0,
    };
    let cq_attr = capi::ibgda_cq_attr {
        flags: capi::IBGDA_CQ_EVENTS,
        ..Default::default()
    };
    let (mut context, mut cq) = (null_mut(), null_mut());
    // SAFETY: the arguments are valid.
    unsafe {
        assert_eq!(capi::ibgda_open(&attr, &mut context), 0);
        let errno = capi::ibgda_create_cq_with(context, &cq_attr, &mut cq);
        assert_eq!(errno, 0, "{:?}", CStr::from_ptr(capi::ibgda_last_error()));
        assert_eq!(capi::ibgda_cq_wait_event(cq, 0), libc::ETIMEDOUT);
    }
    let address = cq.expose_provenance();
    let waiter = thread::spawn(move || {
        let cq = std::ptr::with_exposed_provenance(address);
        // SAFETY: destroyed after the call has begun.
        unsafe { capi::ibgda_cq_wait_event(cq, deadline(PATIENCE)) }
    });
    thread::sleep(4 * MOMENT);
    // SAFETY: destroyed once; the thread has long begun to wait.
    unsafe {
        assert_eq!(capi::ibgda_destroy_cq(cq), 0);
        assert_eq!(waiter.join().expect("no panic"), libc::ECANCELED);
        assert_eq!(capi::ibgda_close(context), 0);
    }
}
