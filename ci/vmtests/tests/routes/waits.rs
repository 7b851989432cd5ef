// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waiting for CQ events through the kernel's DevX event channel, and what the NIC says of queue pairs.

use crate::{
    Names, check, heard,
    link::{self, Link, PATIENCE, ROUTES, connect, open},
    support::{Machine, inject_fatal_error, model_objects},
};
use anyhow::{Context as _, Result, ensure};
use ibgda::{
    Access, AsyncEventKind, CompletionQueueOptions, Context, QueuePair, QueuePairEvent,
    QueuePairOptions, Route, Status, capi,
};
use ibgda_test_kernels::Poller;
use std::{
    ptr::{null_mut, with_exposed_provenance},
    thread,
    time::{Duration, Instant},
};

const MOMENT: Duration = Duration::from_millis(100);

fn patience() -> Duration {
    Duration::from_nanos(PATIENCE)
}

fn make_qp(context: &Context) -> Result<QueuePair> {
    let options = QueuePairOptions {
        send_depth: 16,
        ..Default::default()
    };
    let cq = context.create_cq_with(&CompletionQueueOptions {
        depth: 16,
        events: true,
        ..Default::default()
    })?;
    Ok(context.create_qp(&options, &cq, None)?)
}

/// As `Link::new`, with CQs that have events.
fn with_events(machine: &Machine, route: Route) -> Result<Link> {
    let (near, far) = (open(machine, 0, route)?, open(machine, 1, route)?);
    Link::made(near, far, 4096, make_qp)
}

fn poller(qp: &QueuePair) -> Poller {
    // SAFETY: the CQ lives in the QP, and each test uses it from one thread.
    unsafe { Poller::new(qp.send_cq().device_handle()) }
}

#[test]
fn a_wait_sleeps_until_a_completion_comes_on_every_route() -> Result<()> {
    let machine = Machine::take();
    for route in ROUTES {
        let mut link = with_events(&machine, route)?;
        ensure!(
            !link.qp.send_cq().wait_for_event(MOMENT)?,
            "{route}: nothing was posted"
        );
        ensure!(poller(&link.qp).wait_event(MOMENT.as_nanos() as u64) == Status::TIMEOUT);
        // More often than the serial number of an arming has values.
        for round in 0..10 {
            let cq = link.qp.send_cq().clone();
            let woken = thread::scope(|scope| -> Result<bool> {
                let waiter = scope.spawn(move || {
                    // SAFETY: this thread alone uses the CQ while it runs; its owner posts.
                    let mut poller = unsafe { Poller::new(cq.device_handle()) };
                    // The event of the round before can be late.
                    loop {
                        let woken = if round % 2 == 0 {
                            cq.wait_for_event(patience()).unwrap_or(false)
                        } else {
                            poller.wait_event(PATIENCE) == Status::OK
                        };
                        match poller.poll(0).0 {
                            Status::TIMEOUT if woken => {}
                            status => break woken && status == Status::OK,
                        }
                    }
                });
                thread::sleep(MOMENT * (round % 3) / 10);
                link.put(0, 0)?;
                Ok(waiter.join().expect("no panic"))
            })?;
            ensure!(woken, "{route}, round {round}");
            ensure!(poller(&link.qp).poll(0).0 == Status::TIMEOUT);
        }
        // Armed, and then nobody waits: the event comes, and is counted, all the same.
        // One of before can be late.
        let start = Instant::now();
        while link.qp.send_cq().wait_for_event(MOMENT)? {
            ensure!(start.elapsed() < patience(), "{route}: all was taken");
        }
        let cq = link.qp.send_cq().clone();
        // SAFETY: the queue lives, and its counter is only read.
        let counted = || unsafe { (*cq.device_handle()).events.read_volatile() };
        let before = counted();
        ensure!(before <= 10, "{route}: {before} events in 10 rounds");
        let start = Instant::now();
        link.put(0, 0)?;
        while counted() == before {
            ensure!(start.elapsed() < patience(), "{route}: no event");
            thread::sleep(Duration::from_millis(1));
        }
        println!(
            "{route}: {before} events in 10 rounds, the last after {:?}",
            start.elapsed()
        );
    }
    Ok(())
}

#[test]
fn events_are_of_their_queue_and_a_queue_without_them_says_so() -> Result<()> {
    let machine = Machine::take();
    for route in ROUTES {
        let (mut busy, quiet) = (with_events(&machine, route)?, with_events(&machine, route)?);
        let cq = quiet.qp.send_cq().clone();
        let other = thread::spawn(move || cq.wait_for_event(5 * MOMENT));
        busy.put(0, 0)?;
        ensure!(busy.qp.send_cq().wait_for_event(patience())?, "{route}");
        ensure!(
            !other.join().expect("no panic")?,
            "{route}: another queue's event"
        );

        let plain = busy.near.create_cq(16)?;
        let error = plain
            .wait_for_event(MOMENT)
            .err()
            .context("made without events")?;
        ensure!(error.errno() == libc::EOPNOTSUPP, "{error}");
    }
    Ok(())
}

#[test]
fn a_lost_nic_ends_every_wait() -> Result<()> {
    let machine = Machine::take();
    for route in ROUTES {
        let mut link = with_events(&machine, route)?;
        let other = make_qp(&link.near)?;
        let start = Instant::now();
        let (host, kernel) = (link.qp.send_cq().clone(), other.send_cq().clone());
        let host = thread::spawn(move || host.wait_for_event(patience()));
        let kernel = thread::spawn(move || {
            // SAFETY: this thread alone uses the CQ, which it keeps.
            unsafe { Poller::new(kernel.device_handle()) }.wait_event(PATIENCE)
        });
        thread::sleep(MOMENT);
        inject_fatal_error(machine.nics[0])?;
        let error = host
            .join()
            .expect("no panic")
            .err()
            .context("the NIC is lost")?;
        ensure!(error.errno() == libc::ENOLINK, "{route}: {error}");
        ensure!(kernel.join().expect("no panic") == Status::NIC_LOST);
        ensure!(start.elapsed() < patience() / 2, "{:?}", start.elapsed());

        drop((other, link.qp, link.source));
        link.near.rebind(patience())?;
        let (qp, peer) = (make_qp(&link.near)?, make_qp(&link.far)?);
        connect(&qp, &peer)?;
        let source = link.near.alloc(4096, Access::all())?;
        link.peer = peer;
        let mut link = Link { qp, source, ..link };
        link.put(0, 0)?;
        ensure!(link.qp.send_cq().wait_for_event(patience())?, "{route}");
    }
    Ok(())
}

#[test]
fn what_the_nic_says_of_a_queue_pair_is_heard() -> Result<()> {
    let machine = Machine::take();
    for route in ROUTES {
        let (near, far) = (open(&machine, 0, route)?, open(&machine, 1, route)?);
        let heard = heard::listen(&far)?;
        let options = QueuePairOptions::default();
        let mut link = Link::between(near, far, 4096, &options)?;
        link.fails_at_a_wrong_rkey(false)?;
        let expected = AsyncEventKind::QueuePair {
            qpn: link.peer.number(),
            event: QueuePairEvent::AccessError,
        };
        let (event, _) = heard::hear(&heard, |event| {
            (event.kind() == expected).then(|| event.clone())
        })?;
        ensure!(event.to_string().contains("key"), "{route}: {event}");
    }
    Ok(())
}

/// A CQ that goes while a thread waits, by the C calls, and what is left of many that come and go.
#[test]
fn queues_with_events_come_and_go_while_a_thread_waits() -> Result<()> {
    let machine = Machine::take();
    let names = Names::of(&machine)?;
    let attr = names.attr(capi::IBGDA_ROUTE_CPU_DOORBELL);
    let cq_attr = capi::ibgda_cq_attr {
        entries: 16,
        flags: capi::IBGDA_CQ_EVENTS,
        ..Default::default()
    };
    let before = model_objects(&["cq", "umem"])?;
    let mut context = null_mut();
    // SAFETY: the arguments are valid.
    check(unsafe { capi::ibgda_open(&attr, &mut context) })?;
    let mut cancelled = 0;
    for _ in 0..8 {
        let mut cq = null_mut();
        // SAFETY: the arguments are valid.
        check(unsafe { capi::ibgda_create_cq_with(context, &cq_attr, &mut cq) })?;
        let address = cq.expose_provenance();
        let end = ibgda_test_kernels::test_clock_ns() + PATIENCE;
        let waiter = thread::spawn(move || {
            // SAFETY: it is destroyed after the call has begun.
            unsafe { capi::ibgda_cq_wait_event(with_exposed_provenance(address), end) }
        });
        thread::sleep(2 * MOMENT);
        // SAFETY: destroyed once.
        check(unsafe { capi::ibgda_destroy_cq(cq) })?;
        match waiter.join().expect("no panic") {
            libc::ECANCELED => cancelled += 1,
            // On a busy machine it can come after the end of the CQ.
            libc::EBADF => {}
            errno => anyhow::bail!("errno {errno}"),
        }
    }
    ensure!(cancelled > 0, "every thread came too late");
    // SAFETY: closed once.
    check(unsafe { capi::ibgda_close(context) })?;
    ensure!(model_objects(&["cq", "umem"])? == before);
    let link = with_events(&machine, Route::Direct)?;
    let error = {
        let cq = link.qp.send_cq().clone();
        let waiter = thread::spawn({
            let cq = cq.clone();
            move || cq.wait_for_event(patience())
        });
        thread::sleep(MOMENT);
        cq.cancel_waits();
        waiter.join().expect("no panic").err()
    };
    let error = error.context("ended")?;
    ensure!(error.errno() == libc::ECANCELED, "{error}");
    ensure!(link::contents(&link.target, 1)? == [0]);
    Ok(())
}
