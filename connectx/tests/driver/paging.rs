// SPDX-License-Identifier: MIT OR Apache-2.0
//! On-demand paging: whoever needs a page that is not there waits, the driver is told, and all goes on where it was once
//! the driver has answered.

use connectx::ifc::command::{header, query_hca_cap_out};
use connectx::ifc::wqe::{cqe_opcode, send, syndrome};
use connectx::ifc::{cap, opcode};
use connectx::objects::memory::NULL_MKEY;
use connectx::objects::qp::Service;
use connectx::platform::Function;

use crate::guest::{
    Guest, PageFault, Pager, Pair, Qp, READ, Settings, Shape, Side, Srq, WRITE, address_vector,
    eventually, guests, input, pointer, remote, status,
};

const PAGE: u64 = 4096;
/// Pages of a key.
const PAGES: u64 = 128;
const BOTH: u64 = READ | WRITE;

/// A key whose pages come and go, and who moves them.
struct Demand {
    pager: Pager,
    key: u32,
    at: u64,
}

impl Demand {
    /// Of the domain of a side of guest `lid`.
    fn new(guest: &mut Guest, side: &Side, lid: u16) -> Self {
        assert_eq!(guest.enable_paging(), 0);
        let mut pager = Pager::new(guest, side.pd, lid);
        let at = guest.ram.alloc(PAGES * PAGE);
        let key = pager.key(guest, 1, at, PAGES * PAGE, 12);
        Self { pager, key, at }
    }

    /// Makes eight pages from `first` on accessible, or takes them away.
    fn map(&mut self, guest: &Guest, first: u64, rights: u64) {
        let page = |i| {
            if rights == 0 {
                0
            } else {
                (self.at + i * PAGE) | rights
            }
        };
        let entries: Vec<u64> = (first..first + 8).map(page).collect();
        self.pager.pages(guest, self.key, first, &entries);
    }

    /// What the driver does with a fault: puts the pages there, and says so.
    fn serve(&mut self, guest: &mut Guest) -> PageFault {
        let fault = eventually(|| guest.page_fault());
        assert_eq!(fault.key, self.key);
        let first = (fault.address - self.at) / PAGE;
        let last = first + fault.pages - 1;
        for block in first / 8..=last / 8 {
            self.map(guest, block * 8, BOTH);
        }
        assert_eq!(guest.resume(fault.token, false), 0);
        fault
    }

    fn fail(&mut self, guest: &mut Guest) -> PageFault {
        let fault = eventually(|| guest.page_fault());
        assert_eq!(guest.resume(fault.token, true), 0);
        fault
    }
}

/// Two sides, each with pages of its own.
fn two() -> (Vec<Guest>, [Side; 2], [Demand; 2]) {
    // Whoever serves a fault may be slow.
    let Pair { mut guests, sides } = Pair::with(|s| (s.ack_timeout, s.retries) = (20, 7));
    let demands = [0, 1].map(|i: usize| Demand::new(&mut guests[i], &sides[i], i as u16 + 1));
    (guests, sides, demands)
}

/// Has a sender wait for what it is to read.
fn starved(guest: &mut Guest, side: &mut Side, demand: &Demand) -> PageFault {
    let from = pointer(8, demand.key, demand.at);
    side.qp.post(guest, send::SEND, 0, &[from]);
    eventually(|| guest.page_fault())
}

fn data(len: u64) -> Vec<u8> {
    (0..len).map(|i| (i / 7 % 251) as u8).collect()
}

/// Bytes of a message that lies in more than one page.
const LONG: u64 = 3 * PAGE;

#[test]
fn a_sender_waits_for_what_it_reads() {
    let (mut guests, [mut a, mut b], mut demands) = two();
    let at = demands[0].at + 100;
    guests[0].ram.set(at, &data(LONG));
    b.qp.receive(&guests[1], b.key, b.at, LONG as u32);
    let from = pointer(LONG as u32, demands[0].key, at);
    a.qp.post(&guests[0], send::SEND, 0, &[from]);
    let fault = eventually(|| guests[0].page_fault());
    let expected = (demands[0].key, demands[0].at, 4);
    assert_eq!((fault.key, fault.address, fault.pages), expected);
    // Nothing has left, and nothing more is told, whatever else is posted.
    let inline = remote(b.at, b.key);
    a.qp.post(
        &guests[0],
        send::RDMA_WRITE,
        0,
        &[inline, pointer(8, a.key, a.at)],
    );
    assert_eq!(guests[0].page_fault(), None);
    assert!(a.send.poll(&guests[0]).is_none());
    assert!(b.receive.poll(&guests[1]).is_none());
    // Of what is there now half goes again: that is another fault.
    demands[0].map(&guests[0], 0, READ);
    demands[0]
        .pager
        .pages(&guests[0], demands[0].key, 0, &[(demands[0].at) | READ]);
    assert_eq!(guests[0].resume(fault.token, false), 0);
    let fault = demands[0].serve(&mut guests[0]);
    assert_eq!(fault.address, demands[0].at + PAGE);
    assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
    assert_eq!(b.receive.wait(&guests[1]).bytes, LONG as u32);
    assert_eq!(
        guests[1].ram.get(b.at + 8, LONG as usize - 8),
        data(LONG)[8..]
    );
    assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
    assert_eq!(guests[0].page_fault(), None);
}

#[test]
fn a_target_of_writes_makes_the_sender_wait() {
    let (mut guests, [mut a, mut b], mut demands) = two();
    guests[0].ram.set(a.at, &data(LONG));
    let to = &mut demands[1];
    b.qp.receive(&guests[1], b.key, b.at, 8);
    let write = [
        remote(to.at + PAGE, to.key),
        pointer(LONG as u32, a.key, a.at),
    ];
    a.qp.post(&guests[0], send::RDMA_WRITE_IMM, 5, &write);
    let fault = to.serve(&mut guests[1]);
    assert_eq!(fault.address, to.at + PAGE);
    assert_eq!(fault.pages, 3, "all of a packet over an ideal link");
    assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
    let cqe = b.receive.wait(&guests[1]);
    assert_eq!(
        (cqe.opcode, cqe.immediate, cqe.counter),
        (cqe_opcode::RESP_WR_IMM, 5, 0)
    );
    assert!(b.receive.poll(&guests[1]).is_none());
    assert_eq!(guests[1].ram.get(to.at + PAGE, LONG as usize), data(LONG));
    assert!(guests[0].count("rnr_naks") > 0);
    // Taken away under traffic, it comes again; what may only be read is not written.
    to.map(&guests[1], 0, 0);
    a.qp.post(&guests[0], send::RDMA_WRITE, 0, &write);
    to.serve(&mut guests[1]);
    assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
    to.map(&guests[1], 0, READ);
    let read = [remote(to.at, to.key), pointer(8, a.key, a.at)];
    a.qp.post(&guests[0], send::RDMA_READ, 0, &read);
    assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
    assert_eq!(guests[1].page_fault(), None);
    a.qp.post(&guests[0], send::RDMA_WRITE, 0, &write);
    to.serve(&mut guests[1]);
    assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
}

#[test]
fn a_read_waits_at_both_ends() {
    let (mut guests, [mut a, _], mut demands) = two();
    const LEN: u64 = 100 * PAGE;
    let [here, there] = &mut demands;
    guests[1].ram.set(there.at, &data(LEN));
    let read = [
        remote(there.at, there.key),
        pointer(LEN as u32, here.key, here.at),
    ];
    a.qp.post(&guests[0], send::RDMA_READ, 0, &read);
    // As much as goes in one packet over an ideal link, and what comes behind it is known.
    let fault = there.serve(&mut guests[1]);
    assert_eq!(
        (fault.address, fault.pages, fault.after),
        (there.at, 64, 36)
    );
    let fault = here.serve(&mut guests[0]);
    assert_eq!((fault.address, fault.pages), (here.at, 64));
    // The rest, for which there is no request of its own.
    let fault = there.serve(&mut guests[1]);
    assert_eq!((fault.address, fault.pages), (there.at + 64 * PAGE, 36));
    let fault = here.serve(&mut guests[0]);
    assert_eq!((fault.address, fault.pages), (here.at + 64 * PAGE, 36));
    let cqe = a.send.wait(&guests[0]);
    assert_eq!((cqe.opcode, cqe.bytes), (cqe_opcode::REQ, LEN as u32));
    assert_eq!(guests[0].ram.get(here.at, LEN as usize), data(LEN));
}

#[test]
fn an_atomic_waits_at_both_ends_and_is_done_once() {
    let (mut guests, [mut a, _], mut demands) = two();
    let [here, there] = &mut demands;
    guests[1].ram.set(there.at, &40u64.to_be_bytes());
    let mut add = [0; 16];
    add[..8].copy_from_slice(&2u64.to_be_bytes());
    let atomic = [
        remote(there.at, there.key),
        add,
        pointer(8, here.key, here.at),
    ];
    a.qp.post(&guests[0], send::ATOMIC_FA, 0, &atomic);
    there.serve(&mut guests[1]);
    here.serve(&mut guests[0]);
    assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
    assert_eq!(guests[0].ram.get(here.at, 8), 40u64.to_be_bytes());
    assert_eq!(guests[1].ram.get(there.at, 8), 42u64.to_be_bytes());
}

#[test]
fn a_receive_waits_in_a_queue_of_its_own_or_shared() {
    for shared in [false, true] {
        let (mut guests, [mut a, mut b], mut demands) = two();
        let srq = shared.then(|| Srq::new(&mut guests[1], b.pd, 2, None));
        if let Some(srq) = &srq {
            let shape = Shape {
                srqn: Some(srq.number),
                ..Shape::default()
            };
            let uar = guests[1].uar;
            b.qp = Qp::shaped(&mut guests[1], b.pd, uar, &b.send, &b.receive, shape).unwrap();
            a.qp = Qp::new(&mut guests[0], a.pd, &a.send, &a.receive);
            a.qp.connect(&mut guests[0], Settings::to(2, b.qp.qpn));
            b.qp.connect(&mut guests[1], Settings::to(1, a.qp.qpn));
        }
        let to = &mut demands[1];
        let mut srq = srq;
        for i in 0..2 {
            let into = pointer(LONG as u32, to.key, to.at + i * 8 * PAGE);
            match &mut srq {
                Some(srq) => srq.post(&guests[1], &[into]),
                None => b.qp.receive_into(&guests[1], &[into]),
            }
        }
        guests[0].ram.set(a.at, &data(LONG));
        let from = [pointer(LONG as u32, a.key, a.at)];
        for i in 0..2u64 {
            a.qp.post(&guests[0], send::SEND, 0, &from);
            assert_eq!(to.serve(&mut guests[1]).address, to.at + i * 8 * PAGE);
            assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
            let cqe = b.receive.wait(&guests[1]);
            assert_eq!((cqe.bytes, u64::from(cqe.counter)), (LONG as u32, i));
            let landed = guests[1].ram.get(to.at + i * 8 * PAGE, LONG as usize);
            assert_eq!(landed, data(LONG));
        }
        assert!(b.receive.poll(&guests[1]).is_none(), "each once");
    }
}

#[test]
fn slow_links_lose_nothing_to_a_fault() {
    // Packets of one MTU, of which those behind the fault are on their way.
    let (mut guests, [mut a, mut b], mut demands) = two();
    guests[0].hca.steer("link", &["delay", "50"]).unwrap();
    const LEN: u64 = 16 * PAGE;
    let [here, there] = &mut demands;
    guests[0].ram.set(here.at, &data(LEN));
    b.qp.receive(&guests[1], there.key, there.at, LEN as u32);
    a.qp.post(
        &guests[0],
        send::SEND,
        0,
        &[pointer(LEN as u32, here.key, here.at)],
    );
    for _ in 0..2 {
        here.serve(&mut guests[0]);
        there.serve(&mut guests[1]);
    }
    assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
    assert_eq!(b.receive.wait(&guests[1]).bytes, LEN as u32);
    assert_eq!(guests[1].ram.get(there.at, LEN as usize), data(LEN));
}

/// A local page, the target of a WRITE, of a READ and of an atomic, and a receive that the driver cannot provide.
#[test]
pub fn a_page_that_cannot_be_provided_fails_the_access() {
    let (mut guests, [mut a, mut b], mut demands) = two();
    let (key, at) = (demands[0].key, demands[0].at);
    b.qp.receive(&guests[1], b.key, b.at, 64);
    a.qp.post(&guests[0], send::SEND, 0, &[pointer(8, key, at)]);
    demands[0].fail(&mut guests[0]);
    assert_eq!(a.send.wait(&guests[0]).syndrome, syndrome::LOCAL_PROT);
    assert!(b.receive.poll(&guests[1]).is_none());

    for op in [send::RDMA_WRITE, send::RDMA_READ, send::ATOMIC_FA] {
        let (mut guests, [mut a, _], mut demands) = two();
        let mut segments = vec![remote(demands[1].at, demands[1].key)];
        if op == send::ATOMIC_FA {
            segments.push([0; 16]);
        }
        segments.push(pointer(8, a.key, a.at));
        a.qp.post(&guests[0], op, 0, &segments);
        demands[1].fail(&mut guests[1]);
        let cqe = a.send.wait(&guests[0]);
        assert_eq!(cqe.syndrome, syndrome::REMOTE_ACCESS, "{op:#x}");
        assert_eq!(guests[1].page_fault(), None);
    }

    let (mut guests, [mut a, mut b], mut demands) = two();
    b.qp.receive(&guests[1], demands[1].key, demands[1].at, 64);
    a.qp.post(&guests[0], send::SEND, 0, &[pointer(8, a.key, a.at)]);
    demands[1].fail(&mut guests[1]);
    assert_eq!(a.send.wait(&guests[0]).syndrome, syndrome::REMOTE_OP);
    assert_eq!(b.receive.wait(&guests[1]).syndrome, syndrome::LOCAL_PROT);
}

#[test]
fn faults_end_with_what_they_are_of() {
    // The queue pair is destroyed: a late answer is taken once.
    let (mut guests, [mut a, _], demands) = two();
    let fault = starved(&mut guests[0], &mut a, &demands[0]);
    assert_eq!(guests[0].on_object(opcode::DESTROY_QP, a.qp.qpn), 0);
    assert_eq!(guests[0].resume(fault.token, false), 0);
    assert_ne!(guests[0].resume(fault.token, false), 0);

    // It is put in error: the WQE is flushed at once.
    let (mut guests, [mut a, _], demands) = two();
    let fault = starved(&mut guests[0], &mut a, &demands[0]);
    assert_eq!(a.qp.modify(&mut guests[0], opcode::TO_ERR_QP, |_| {}), 0);
    assert_eq!(a.send.wait(&guests[0]).syndrome, syndrome::WR_FLUSH);
    assert_eq!(guests[0].resume(fault.token, true), 0);

    // The key is destroyed: the driver knows no page for it, and without one the access has no key.
    for error in [false, true] {
        let (mut guests, [mut a, _], demands) = two();
        let fault = starved(&mut guests[0], &mut a, &demands[0]);
        let key = demands[0].key >> 8;
        assert_eq!(guests[0].on_object(opcode::DESTROY_MKEY, key), 0);
        assert_eq!(guests[0].resume(fault.token, error), 0);
        assert_eq!(a.send.wait(&guests[0]).syndrome, syndrome::LOCAL_PROT);
    }
}

#[test]
pub fn after_a_reset_nothing_waits() {
    let (mut guests, [mut a, _], demands) = two();
    let fault = starved(&mut guests[0], &mut a, &demands[0]);
    guests[0].ok(input(opcode::TEARDOWN_HCA, 16), 16);
    guests[0].ok(input(opcode::INIT_HCA, 32), 16);
    assert_ne!(
        guests[0].resume(fault.token, false),
        0,
        "the token of another life"
    );
    assert_ne!(guests[0].resume(u64::MAX >> 16, true), 0);
}

/// A driver that takes no events, and answers none: there is a fault at most for each half of a queue pair, and when
/// nobody can be told there is none.
#[test]
fn who_never_answers_holds_nothing_but_itself() {
    let (mut guests, [mut a, _], demands) = two();
    let post = |a: &mut Side, guest: &Guest| {
        let from = pointer(8, demands[0].key, demands[0].at);
        a.qp.post(guest, send::SEND, 0, &[from]);
    };
    let again = |a: &mut Side, guest: &mut Guest| {
        assert_eq!(a.qp.modify(guest, opcode::TO_RST_QP, |_| {}), 0);
        (a.qp.producer, a.qp.posted) = (0, 0);
        guest.ram.set(a.qp.dbr, &[0; 8]);
        a.qp.connect(guest, Settings::to(2, a.qp.qpn));
    };
    post(&mut a, &guests[0]);
    post(&mut a, &guests[0]);
    let first = eventually(|| guests[0].page_fault());
    let mut told = 1;
    let refused = loop {
        again(&mut a, &mut guests[0]);
        post(&mut a, &guests[0]);
        let outcome = eventually(|| match a.send.poll(&guests[0]) {
            Some(cqe) => Some(Err(cqe)),
            None => {
                let now = guests[0].count("page_faults");
                (now > told).then_some(Ok(now))
            }
        });
        match outcome {
            Err(cqe) => break cqe,
            Ok(now) => assert_eq!(now, told + 1, "one for each"),
        }
        told += 1;
        assert!(told < 1000);
    };
    assert_eq!(refused.syndrome, syndrome::LOCAL_PROT);
    assert_eq!(guests[0].count("page_faults"), told);
    assert!(guests[0].count("eq_overruns") > 0);
    assert_eq!(guests[0].resume(first.token, false), 0, "still expected");
}

/// Without the driver's word for the scheme, and at what cannot wait, the access is denied.
#[test]
fn what_nobody_is_asked_for_is_denied() {
    let Pair { mut guests, sides } = Pair::new();
    let [mut a, _] = sides;
    let mut pager = Pager::new(&mut guests[0], a.pd, 1);
    let at = guests[0].ram.alloc(PAGE);
    let key = pager.key(&mut guests[0], 1, at, PAGE, 12);
    a.qp.post(&guests[0], send::SEND, 0, &[pointer(8, key, at)]);
    assert_eq!(a.send.wait(&guests[0]).syndrome, syndrome::LOCAL_PROT);
    assert_eq!(guests[0].page_fault(), None);
}

#[test]
fn datagrams_wait_to_be_sent_and_are_not_received_into_nothing() {
    let mut guest = guests(1).pop().unwrap();
    let mut side = Side::new(&mut guest);
    let mut demand = Demand::new(&mut guest, &side, 1);
    let (pd, uar) = (side.pd, guest.uar);
    let shape = Shape::of(Service::Ud);
    let mut qp = Qp::shaped(&mut guest, pd, uar, &side.send, &side.receive, shape).unwrap();
    qp.connect(&mut guest, Settings::to(1, qp.qpn));
    qp.receive(&guest, side.key, side.at, 4096);
    guest.ram.set(demand.at, &data(500));
    let mut segments = address_vector(1, qp.qpn, 0x1111_1111).to_vec();
    segments.push(pointer(500, demand.key, demand.at));
    qp.post(&guest, send::SEND, 0, &segments);
    demand.serve(&mut guest);
    assert_eq!(side.send.wait(&guest).opcode, cqe_opcode::REQ);
    assert_eq!(side.receive.wait(&guest).bytes, 540);
    assert_eq!(guest.ram.get(side.at + 40, 500), data(500));
    qp.receive(&guest, demand.key, demand.at + 8 * PAGE, 4096);
    qp.post(&guest, send::SEND, 0, &segments);
    assert_eq!(side.receive.wait(&guest).syndrome, syndrome::LOCAL_PROT);
    assert_eq!(guest.page_fault(), None);
}

#[test]
fn an_unreliable_message_that_meets_a_fault_is_lost_and_its_receive_is_not() {
    let (mut guests, mut sides, mut demands) = two();
    let qps: Vec<Qp> = (0..2)
        .map(|i| {
            let (side, uar) = (&sides[i], guests[i].uar);
            let shape = Shape::of(Service::Uc);
            Qp::shaped(
                &mut guests[i],
                side.pd,
                uar,
                &side.send,
                &side.receive,
                shape,
            )
            .unwrap()
        })
        .collect();
    for i in 0..2 {
        qps[i].connect(&mut guests[i], Settings::to(2 - i as u16, qps[1 - i].qpn));
    }
    for (side, qp) in sides.iter_mut().zip(qps) {
        side.qp = qp;
    }
    let [a, b] = &mut sides;
    let to = &mut demands[1];
    b.qp.receive(&guests[1], to.key, to.at, LONG as u32);
    guests[0].ram.set(a.at, &data(LONG));
    let from = [pointer(LONG as u32, a.key, a.at)];
    a.qp.post(&guests[0], send::SEND, 0, &from);
    assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
    to.serve(&mut guests[1]);
    a.qp.post(&guests[0], send::SEND, 0, &from);
    let cqe = b.receive.wait(&guests[1]);
    assert_eq!((cqe.counter, cqe.bytes), (0, LONG as u32));
    assert_eq!(guests[1].ram.get(to.at, LONG as usize), data(LONG));
}

#[test]
fn a_key_of_keys_for_all_memory() {
    let (mut guests, [mut a, b], mut demands) = two();
    let there = &mut demands[1];
    let guest = &mut guests[1];
    // Entries of 32 KiB, of which those that stand for nothing name a key that does; no reads or writes reach the third.
    const SPAN: u64 = 8 * PAGE;
    let base = there.at;
    let nothing = {
        let mut create = input(opcode::CREATE_MKEY, 0x110);
        use connectx::ifc::command::{create_mkey_in, reply};
        use connectx::ifc::context::mkc;
        create_mkey_in::pg_access.set(&mut create, 1);
        create_mkey_in::translations_octword_actual_size.set(&mut create, 4);
        let context = create_mkey_in::mkc.bytes_mut(&mut create);
        for right in [mkc::lr, mkc::lw, mkc::rr, mkc::rw, mkc::a] {
            right.set(context, 1);
        }
        mkc::access_mode_1_0.set(context, 1);
        mkc::qpn.set(context, 0xff_ffff);
        mkc::pd.set(context, u64::from(b.pd));
        mkc::length64.set(context, 1);
        mkc::log_page_size.set(context, 61);
        create.extend([0; 64]);
        reply::object.get32(&guest.ok(create, 16)) << 8
    };
    let all = there.pager.key(guest, 3, base, 4 * SPAN, 15);
    let list = [
        (nothing, base),
        (there.key, base + SPAN),
        (NULL_MKEY, 0),
        (nothing, base + 3 * SPAN),
    ];
    there.pager.keys(guest, all, 0, &list);
    let write = |at| [remote(at, all), pointer(LONG as u32, a.key, a.at)];
    guests[0].ram.set(a.at, &data(LONG));
    // In the first entry, where there is nothing: the driver puts a key there.
    a.qp.post(&guests[0], send::RDMA_WRITE, 0, &write(base + SPAN - PAGE));
    let fault = eventually(|| guests[1].page_fault());
    assert_eq!(
        (fault.key, fault.address, fault.pages),
        (nothing, base + SPAN - PAGE, 1)
    );
    let mut filled = list;
    filled[0] = (there.key, base);
    there.pager.keys(&guests[1], all, 0, &filled);
    assert_eq!(guests[1].resume(fault.token, false), 0);
    // Now it is that key's page that is missing, and then the next entry's.
    assert_eq!(there.serve(&mut guests[1]).address, base + SPAN - PAGE);
    assert_eq!(there.serve(&mut guests[1]).address, base + SPAN);
    assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
    assert_eq!(
        guests[1].ram.get(base + SPAN - PAGE, LONG as usize),
        data(LONG)
    );
    // What no driver can provide.
    a.qp.post(&guests[0], send::RDMA_WRITE, 0, &write(base + 2 * SPAN));
    let fault = there.fail(&mut guests[1]);
    assert_eq!(fault.key, NULL_MKEY);
    assert_eq!(a.send.wait(&guests[0]).syndrome, syndrome::REMOTE_ACCESS);
}

#[test]
pub fn only_the_scheme_that_there_is_can_be_turned_on() {
    let mut guest = guests(1).pop().unwrap();
    let scheme = |guest: &mut Guest, current: u64| {
        let mut query = input(opcode::QUERY_HCA_CAP, 16);
        header::op_mod.set(&mut query, (2 << 1) | current);
        let out = guest.ok(query, query_hca_cap_out::SIZE);
        let caps = query_hca_cap_out::capability.bytes(&out);
        cap::odp_cap::mem_page_fault.get(caps)
    };
    assert_eq!((scheme(&mut guest, 0), scheme(&mut guest, 1)), (1, 0));
    let mut set = input(opcode::SET_HCA_CAP, 16);
    header::op_mod.set(&mut set, 2 << 1);
    // SENDs over RC by the scheme of transports.
    let mut caps = vec![0; 0x100];
    caps[0x10] = 0x80;
    set.extend(caps);
    assert_ne!(status(&guest.command(set, 16)), 0);
    assert_eq!(scheme(&mut guest, 1), 0);
    assert_eq!(guest.enable_paging(), 0);
    assert_eq!(scheme(&mut guest, 1), 1);
}
