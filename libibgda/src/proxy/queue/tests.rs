// SPDX-License-Identifier: MIT OR Apache-2.0
//! Both queues of a QP against verbs that do as the test says, with kernels' own posters and pollers on the other side.

use super::{
    super::{
        receive::Receiver,
        wqe::{Operation, Payload, With},
    },
    *,
};
use ibgda_device::{
    Status,
    abi::{
        IBGDA_CPU_DOORBELL, IBGDA_CQE_RESP_SEND, IBGDA_FENCED, IBGDA_NO_DOORBELL, IBGDA_UNSIGNALED,
        ibgda_cq, ibgda_qp,
    },
};
use ibgda_test_kernels::{Poller, Poster, test_wqe_fetch_add32};
use std::cell::{Cell, RefCell};

const DEPTH: u32 = 16;
const QPN: u32 = 0x4a5b6c;
/// `ibgda_quiet` and the like are never waited for.
const NOW: u64 = 0;
const REFUSED: Fault = Fault {
    syndrome: 0x13,
    vendor: 0x88,
};

/// Verbs that keep what was posted, and complete what the test lets them.
struct Fake {
    phase: Cell<Phase>,
    sent: RefCell<Vec<(u64, Request)>>,
    received: RefCell<Vec<(u64, Data)>>,
    done: RefCell<VecDeque<Done>>,
    recv_done: RefCell<VecDeque<Done>>,
    refusal: Cell<Option<Refusal>>,
    stopped: Cell<u32>,
}

impl Fake {
    fn new() -> Self {
        Self {
            phase: Cell::new(Phase::Ready),
            sent: RefCell::default(),
            received: RefCell::default(),
            done: RefCell::default(),
            recv_done: RefCell::default(),
            refusal: Cell::default(),
            stopped: Cell::default(),
        }
    }

    fn completes(&self, index: u64, fault: Option<Fault>) {
        let done = Done {
            index,
            fault,
            ..Done::default()
        };
        self.done.borrow_mut().push_back(done);
    }

    fn posted(&self) -> Vec<u64> {
        self.sent.borrow().iter().map(|(index, _)| *index).collect()
    }
}

impl Verbs for Fake {
    fn phase(&self) -> Phase {
        self.phase.get()
    }

    fn post_send(&self, requests: &[(u64, Request)]) -> Result<(), Refusal> {
        let refusal = self.refusal.take();
        let taken = match refusal {
            None => requests.len(),
            Some(Refusal::Full(taken) | Refusal::Refused(taken)) => taken,
        };
        self.sent.borrow_mut().extend(&requests[..taken]);
        refusal.map_or(Ok(()), Err)
    }

    fn post_recv(&self, receives: &[(u64, Data)]) -> Result<(), Refusal> {
        self.received.borrow_mut().extend(receives);
        Ok(())
    }

    fn poll_send(&self, done: &mut [Done; BATCH]) -> usize {
        let mut all = self.done.borrow_mut();
        let count = all.len().min(BATCH);
        for (to, from) in done.iter_mut().zip(all.drain(..count)) {
            *to = from;
        }
        count
    }

    fn poll_recv(&self) -> Option<Done> {
        self.recv_done.borrow_mut().pop_front()
    }

    fn stop(&self) {
        self.stopped.set(self.stopped.get() + 1);
        self.phase.set(Phase::Error);
    }

    fn check_flush(&self, data: &Data) -> Result<(), Fault> {
        match data.lkey {
            7 => Ok(()),
            _ => Err(REFUSED),
        }
    }
}

/// Rings of one QP, the handles that kernels use, and the proxy's side.
struct Rig {
    fake: Fake,
    sender: Sender,
    receiver: Receiver,
    qp: *mut ibgda_qp,
    word: *mut u64,
    recv_cq: *mut ibgda_cq,
    send_cq: *mut ibgda_cq,
}

/// Memory for the rest of the test program: the rings outlive all that names them.
fn leak<T>(value: T) -> *mut T {
    Box::leak(Box::new(value))
}

fn cq() -> (*mut ibgda_cq, CqWriter) {
    let ring = leak([0xf0f0_f0f0_f0f0_f0f0_u64; DEPTH as usize * 8]).cast::<u8>();
    let record = leak([0_u32; 2]).cast::<u32>();
    let cq = leak(ibgda_cq {
        ring,
        doorbell_record: record,
        depth: DEPTH,
        mode: IBGDA_CPU_DOORBELL,
        ..Default::default()
    });
    // SAFETY: neither is given back.
    (cq, unsafe { CqWriter::new(ring, DEPTH, record, QPN) })
}

impl Rig {
    fn new() -> Self {
        let (send_cq, sent) = cq();
        let (recv_cq, received) = cq();
        let send_ring = leak([0_u64; DEPTH as usize * 8]).cast::<u8>();
        let recv_ring = leak([0_u64; DEPTH as usize * 2]).cast::<u8>();
        let (record, word) = (leak([0_u32; 2]).cast::<u32>(), leak(0_u64));
        let qp = leak(ibgda_qp {
            send_ring,
            recv_ring,
            doorbell_record: record,
            doorbell: word,
            send_cq,
            recv_cq,
            number: QPN,
            send_depth: DEPTH,
            recv_depth: DEPTH,
            limit: DEPTH.into(),
            mode: IBGDA_CPU_DOORBELL,
            ..Default::default()
        });
        let ring = |slots: *mut u8, record: *mut u32, cq| Ring {
            slots,
            depth: DEPTH,
            record: record.cast(),
            cq,
        };
        // SAFETY: none of it is given back.
        let sender = unsafe { Sender::new(ring(send_ring, record.add(1), sent), word.cast(), QPN) };
        Self {
            fake: Fake::new(),
            sender,
            receiver: Receiver::new(ring(recv_ring, record, received)),
            qp,
            word,
            recv_cq,
            send_cq,
        }
    }

    fn poster(&mut self) -> Poster {
        // SAFETY: the handle is not given back, and this thread alone uses it.
        unsafe { Poster::new(self.qp) }
    }

    fn put(&mut self, flags: u32) -> u64 {
        let posted = self.poster().put(0x1000, 1, 0x2000, 7, 8, flags);
        posted.expect("there is room")
    }

    fn look(&mut self) -> bool {
        let received = self.receiver.look(&self.fake);
        self.sender.look(&self.fake) || received
    }

    fn poll(&mut self) -> (Status, ibgda_device::abi::ibgda_cqe) {
        // SAFETY: as for the poster.
        unsafe { Poller::new(self.send_cq) }.poll(NOW)
    }

    fn poll_recv(&mut self) -> (Status, ibgda_device::abi::ibgda_cqe) {
        // SAFETY: as for the poster.
        unsafe { Poller::new(self.recv_cq) }.poll(NOW)
    }

    /// The next completion is of this request, and such.
    fn expect(&mut self, index: u64, status: Status) {
        let (found, cqe) = self.poll();
        assert_eq!((found, cqe.wqe_index), (status, index));
    }
}

#[test]
fn requests_are_posted_in_order_and_those_that_ask_have_completions() {
    let mut rig = Rig::new();
    assert!(!rig.look(), "nothing was posted");
    let mut first = 0;
    for lap in 0..5_000_u64 {
        rig.put(IBGDA_UNSIGNALED | IBGDA_NO_DOORBELL);
        let last = rig.put(0);
        assert!(rig.look());
        assert_eq!(rig.fake.posted(), [first, last]);
        rig.fake.sent.borrow_mut().clear();
        rig.fake.completes(first, None);
        assert!(rig.look());
        // Half of a ring ends in one with a completion, whoever asked.
        if (first + 1) % u64::from(DEPTH / 2) == 0 {
            rig.expect(first, Status::OK);
        }
        assert_eq!(rig.poll().0, Status::TIMEOUT, "lap {lap}");
        rig.fake.completes(last, None);
        assert!(rig.look() && !rig.look());
        rig.expect(last, Status::OK);
        first = last + 1;
    }
    assert_eq!(rig.fake.stopped.get(), 0);
}

#[test]
fn the_word_is_what_wakes_it_and_a_qp_that_is_not_connected_waits() {
    let mut rig = Rig::new();
    rig.fake.phase.set(Phase::Init);
    rig.put(0);
    // SAFETY: as for the poster.
    let word = || unsafe { AtomicU64::from_ptr(rig.word) }.load(Ordering::Acquire);
    assert_ne!(word(), 0);
    rig.sender.look(&rig.fake);
    assert_eq!(
        (word(), rig.fake.posted().len()),
        (0, 0),
        "it was taken, and is not lost"
    );
    rig.fake.phase.set(Phase::Ready);
    assert!(rig.look());
    assert_eq!(rig.fake.posted(), [0]);
}

#[test]
fn what_the_verbs_do_not_have_is_complete_when_all_before_it_is() {
    let mut rig = Rig::new();
    let get = rig.poster().get(0x2000, 7, 0x1000, 1, 64, IBGDA_UNSIGNALED);
    get.expect("there is room");
    // A read-back, then a NOP with a fence: both are the proxy's own.
    let flags = ibgda_device::abi::IBGDA_FLUSH;
    let flushed = rig
        .poster()
        .get(0x2000, 7, 0x1000, 1, 64, flags)
        .expect("room");
    let after = rig.put(IBGDA_UNSIGNALED);
    rig.look();
    assert_eq!(rig.fake.posted(), [0, 1, after]);
    let fences: Vec<bool> = rig
        .fake
        .sent
        .borrow()
        .iter()
        .map(|(_, it)| it.fenced)
        .collect();
    assert_eq!(
        fences,
        [false, false, true],
        "the DUMP's fence goes to the next"
    );
    rig.fake.completes(0, None);
    rig.look();
    assert_eq!(
        rig.poll().0,
        Status::TIMEOUT,
        "the second read is under way"
    );
    rig.fake.completes(1, None);
    rig.look();
    rig.expect(flushed, Status::OK);
    assert_eq!(rig.poll().0, Status::TIMEOUT);
}

#[test]
fn a_refused_request_waits_for_those_before_and_flushes_those_behind() {
    let mut rig = Rig::new();
    let before = rig.put(IBGDA_UNSIGNALED);
    // The verbs have no atomics on 4 bytes.
    let masked = rig.put(IBGDA_NO_DOORBELL);
    // SAFETY: the slot is the ring's, and 64 bytes.
    unsafe {
        let slot = (*rig.qp).send_ring.add(masked as usize * 64).cast();
        test_wqe_fetch_add32(masked, QPN, 0x1000, 1, 0x2000, 7, 1, 0, slot);
    }
    let behind = rig.put(IBGDA_UNSIGNALED);
    rig.look();
    assert_eq!(rig.fake.posted(), [before]);
    assert_eq!((rig.poll().0, rig.fake.stopped.get()), (Status::TIMEOUT, 0));
    rig.fake.completes(before, None);
    rig.look();
    assert_eq!(rig.fake.stopped.get(), 1, "receives are to be flushed too");
    let (status, cqe) = rig.poll();
    assert_eq!(status.name(), "IBGDA_ERR_LOCAL_QP_OPERATION");
    assert_eq!(
        (cqe.wqe_index, cqe.opcode, cqe.vendor_syndrome),
        (masked, 0x15, vendor::MASKED_ATOMIC)
    );
    rig.expect(behind, Status::WR_FLUSHED);
    // SAFETY: nobody else uses the queue.
    let error = unsafe { (*rig.send_cq).error };
    assert!(error.to_string().contains("8 bytes only"), "{error}");
}

#[test]
fn an_error_of_the_verbs_is_told_with_its_cause_and_the_rest_is_flushed() {
    let mut rig = Rig::new();
    for _ in 0..3 {
        rig.put(IBGDA_UNSIGNALED);
    }
    rig.look();
    rig.fake.completes(0, None);
    rig.fake.completes(1, Some(REFUSED));
    rig.fake.completes(2, Some(Fault::FLUSHED));
    rig.look();
    rig.expect(1, Status::REMOTE_ACCESS);
    rig.expect(2, Status::WR_FLUSHED);
    // SAFETY: nobody else uses the queue; a kernel that does not look at errors posts on.
    unsafe {
        (*rig.send_cq).error = Default::default();
        (*rig.qp).limit = 1_000;
    }
    let late = rig.put(0);
    rig.look();
    assert_eq!(
        rig.fake.posted(),
        [0, 1, 2],
        "nothing is posted behind an error"
    );
    rig.expect(late, Status::WR_FLUSHED);
}

#[test]
fn a_stopped_qp_flushes_what_a_kernel_posts() {
    let mut rig = Rig::new();
    rig.put(0);
    rig.look();
    rig.fake.stop();
    let late = rig.put(IBGDA_FENCED);
    rig.look();
    assert_eq!(
        rig.poll().0,
        Status::TIMEOUT,
        "the first is still the verbs'"
    );
    rig.fake.completes(0, Some(Fault::FLUSHED));
    rig.look();
    rig.expect(0, Status::WR_FLUSHED);
    rig.expect(late, Status::WR_FLUSHED);
}

#[test]
fn a_full_verbs_queue_is_tried_again_and_a_refusal_is_an_error() {
    let mut rig = Rig::new();
    rig.put(0);
    rig.look();
    rig.put(0);
    rig.put(0);
    rig.fake.refusal.set(Some(Refusal::Full(1)));
    rig.look();
    assert_eq!(rig.fake.posted(), [0, 1]);
    rig.look();
    assert_eq!(rig.fake.posted(), [0, 1, 2], "without another doorbell");
    (0..3).for_each(|index| rig.fake.completes(index, None));
    rig.look();
    (0..3).for_each(|index| rig.expect(index, Status::OK));

    rig.put(0);
    rig.put(0);
    // A queue of nothing that is full stays so.
    rig.fake.refusal.set(Some(Refusal::Full(0)));
    rig.look();
    let (status, cqe) = rig.poll();
    assert_eq!((status.0, cqe.vendor_syndrome), (0x102, vendor::POST));
    rig.expect(4, Status::WR_FLUSHED);
}

#[test]
fn more_than_the_ring_holds_is_an_error_and_not_a_wait() {
    let mut rig = Rig::new();
    rig.put(0);
    // SAFETY: nobody else uses the record; a kernel gone wild writes it.
    unsafe {
        (*rig.qp)
            .doorbell_record
            .add(1)
            .write((u32::from(DEPTH as u16) + 1).to_be())
    };
    rig.look();
    let (status, cqe) = rig.poll();
    assert_eq!((status.0, cqe.vendor_syndrome), (0x102, vendor::OVERRUN));
    assert!(!rig.look() && rig.fake.posted().is_empty(), "once");
}

#[test]
fn a_cq_that_nobody_polls_loses_nothing() {
    let mut rig = Rig::new();
    // SAFETY: nobody else uses the handles: a kernel that does not look at its limit.
    let unlimited = |rig: &Rig| unsafe { (*rig.qp).limit = 1_000 };
    unlimited(&rig);
    for index in 0..u64::from(DEPTH) + 4 {
        assert_eq!(rig.put(0), index);
        rig.look();
        rig.fake.completes(index, None);
        rig.look();
    }
    for index in 0..u64::from(DEPTH) + 4 {
        rig.expect(index, Status::OK);
        rig.look();
    }
    assert_eq!(rig.poll().0, Status::TIMEOUT);
}

fn receive(rig: &mut Rig) {
    rig.poster().recv(0x3000, 7, 256).expect("room");
}

#[test]
fn receives_are_posted_without_a_doorbell_and_come_with_kind_length_and_immediate() {
    let mut rig = Rig::new();
    for round in 0..3_000_u64 {
        receive(&mut rig);
        assert!(rig.look());
        let posted = std::mem::take(&mut *rig.fake.received.borrow_mut());
        let data = Data {
            address: 0x3000,
            lkey: 7,
            bytes: 256,
        };
        assert_eq!(posted, [(round, data)]);
        rig.fake.recv_done.borrow_mut().push_back(Done {
            index: round,
            fault: None,
            kind: IBGDA_CQE_RESP_SEND as u8,
            bytes: 200,
            immediate: [1, 2, 3, 4],
        });
        assert!(rig.look());
        let (status, cqe) = rig.poll_recv();
        assert_eq!(
            (status, cqe.wqe_index, cqe.byte_count, cqe.immediate),
            (Status::OK, round, 200, 0x0102_0304)
        );
    }
}

#[test]
fn a_refused_receive_waits_for_its_turn_and_later_ones_are_flushed() {
    let mut rig = Rig::new();
    receive(&mut rig);
    receive(&mut rig);
    // SAFETY: nobody else uses the ring: the second gets no length.
    unsafe { (*rig.qp).recv_ring.add(16).cast::<u32>().write(0) };
    rig.look();
    assert_eq!(rig.fake.received.borrow().len(), 1);
    assert_eq!(
        rig.poll_recv().0,
        Status::TIMEOUT,
        "no message needs it yet"
    );
    rig.fake.recv_done.borrow_mut().push_back(Done {
        kind: IBGDA_CQE_RESP_SEND as u8,
        ..Done::default()
    });
    rig.look();
    assert_eq!(rig.poll_recv().0, Status::OK);
    let (status, cqe) = rig.poll_recv();
    assert_eq!(
        (status.0, cqe.wqe_index, cqe.vendor_syndrome),
        (0x102, 1, vendor::RECEIVE)
    );
    assert_eq!(rig.fake.phase(), Phase::Error);
    // SAFETY: as above: a kernel that does not look at errors.
    unsafe { (*rig.recv_cq).error = Default::default() };
    receive(&mut rig);
    rig.look();
    let (status, cqe) = rig.poll_recv();
    assert_eq!((status, cqe.wqe_index), (Status::WR_FLUSHED, 2));
    // SAFETY: as above: a record gone wild is an error, once.
    unsafe { (*rig.recv_cq).error = Default::default() };
    // SAFETY: as above.
    unsafe { (*rig.qp).doorbell_record.write(0x1000_u32.to_be()) };
    rig.look();
    let (status, cqe) = rig.poll_recv();
    assert_eq!((status.0, cqe.vendor_syndrome), (0x102, vendor::OVERRUN));
    assert!(!rig.look());
    assert_eq!(rig.poll_recv().1.kind, 15, "nothing more");
}

#[test]
fn an_atomic_s_operands_and_a_send_s_key_reach_the_verbs() {
    let mut rig = Rig::new();
    rig.poster()
        .compare_swap(0x1000, 1, 0x2000, 7, 5, 6)
        .expect("room");
    rig.poster().send(0x2000, 7, 9, 0).expect("room");
    rig.look();
    let sent = rig.fake.sent.borrow();
    let swap = Operation::CompareSwap {
        compare: 5,
        swap: 6,
    };
    assert!(matches!(sent[0].1.action, Action::Atomic(_, _, operation) if operation == swap));
    assert!(matches!(
        sent[1].1.action,
        Action::Send(Payload::Memory(Data { bytes: 9, .. }), With::Nothing)
    ));
}
