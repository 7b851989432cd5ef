// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is special of the proxy route: peers on other routes, requests that verbs do not have, and what is left behind.

use crate::{
    link::{self, Link, PATIENCE, make_qp, open},
    support::{Machine, model_objects},
};
use anyhow::{Context as _, Result, ensure};
use ibgda::{
    QueuePairOptions, Route, Status,
    abi::{IBGDA_FENCED, IBGDA_FLUSH, IBGDA_NO_DOORBELL},
};
use ibgda_test_kernels::{Poller, test_wqe_fetch_add32};
use std::{
    fs, thread,
    time::{Duration, Instant},
};

/// The wire is the same.
#[test]
fn its_peers_may_be_on_any_route_of_a_nic() -> Result<()> {
    let machine = Machine::take();
    for (near, far) in [
        (Route::Proxy, Route::Direct),
        (Route::Direct, Route::Proxy),
        (Route::Proxy, Route::CpuDoorbell),
    ] {
        let options = QueuePairOptions {
            recv_depth: 4,
            post_timeout: Duration::from_secs(60),
            ..Default::default()
        };
        let contexts = (open(&machine, 0, near)?, open(&machine, 1, far)?);
        let mut link = Link::between(contexts.0, contexts.1, 1 << 18, &options)?;
        link.moves_data()
            .with_context(|| format!("{near} to {far}"))?;
    }
    Ok(())
}

#[test]
fn a_request_that_verbs_do_not_have_is_an_error_with_a_reason() -> Result<()> {
    let machine = Machine::take();
    let mut link = Link::new(&machine, Route::Proxy)?;
    let (remote, rkey) = (link.target.address(), link.target.rkey());
    let (local, lkey) = (link.source.address(), link.source.lkey());
    let before = link.put(0, IBGDA_NO_DOORBELL)?;
    let masked = link.put(0, IBGDA_NO_DOORBELL)?;
    let qpn = link.qp.number();
    // SAFETY: the slot is the ring's; the NIC is told of it by the next request.
    unsafe {
        let slot = (*link.qp.device_handle())
            .send_ring
            .add(masked as usize * 64);
        test_wqe_fetch_add32(masked, qpn, remote, rkey, local, lkey, 1, 0, slot.cast());
    }
    let behind = link.put(0, 0)?;
    ensure!(link.poster().wait(before, PATIENCE) == Ok(()));
    let failed = link.poster().wait(behind, PATIENCE);
    ensure!(
        failed.is_err_and(|status| status.name() == "IBGDA_ERR_LOCAL_QP_OPERATION"),
        "{failed:?}"
    );
    let error = link.qp.send_cq().error().context("latched for the host")?;
    for part in ["ATOMIC_MASKED_FA", "route proxy", "8 bytes only"] {
        ensure!(error.to_string().contains(part), "{part:?}: {error}");
    }
    Ok(())
}

#[test]
fn fences_and_read_backs_are_the_proxy_s_own() -> Result<()> {
    let machine = Machine::take();
    let mut link = Link::new(&machine, Route::Proxy)?;
    let (remote, rkey) = (link.target.address(), link.target.rkey());
    let (local, lkey) = (link.source.address(), link.source.lkey());
    for round in 0..40_u8 {
        link.target.write(0, &[round; 8])?;
        let request = link
            .poster()
            .get(local, lkey, remote, rkey, 8, IBGDA_FLUSH)?;
        link.poster().wait(request, PATIENCE)?;
        ensure!(link::contents(&link.source, 8)? == [round; 8]);
        // What was read goes back, behind the read.
        link.poster().get(local, lkey, remote, rkey, 8, 0)?;
        let request = link.put(64, IBGDA_FENCED)?;
        link.poster().wait(request, PATIENCE)?;
        ensure!(link::contents(&link.target, 72)?[64..] == [round; 8]);
    }
    let wrong = lkey ^ 0xff00;
    let request = link
        .poster()
        .get(local, wrong, remote, rkey, 8, IBGDA_FLUSH)?;
    let failed = link.poster().wait(request, PATIENCE);
    ensure!(failed.is_err(), "{failed:?}");
    Ok(())
}

/// A context may go while a kernel waits, and the wait ends with its QP's end.
#[test]
fn a_wait_goes_on_without_its_context_and_ends_when_the_qp_is_stopped() -> Result<()> {
    let machine = Machine::take();
    let link = Link::with(&machine, Route::Proxy, 4096, |options| {
        options.recv_depth = 4;
    })?;
    let Link {
        near,
        far,
        source,
        target,
        qp,
        mut peer,
    } = link;
    link::poster(&mut peer).recv(target.address(), target.lkey(), 64)?;
    let cq = peer.recv_cq().context("made with a receive queue")?;
    let status = thread::scope(|scope| -> Result<Status> {
        let waiter = scope.spawn(|| {
            // SAFETY: the CQ lives in the QP, and this thread alone uses it.
            unsafe { Poller::new(cq.device_handle()) }.poll(PATIENCE).0
        });
        thread::sleep(Duration::from_millis(50));
        drop((near, far, source));
        thread::sleep(Duration::from_millis(50));
        ensure!(!waiter.is_finished(), "nothing has come");
        peer.stop()?;
        Ok(waiter.join().expect("no panic"))
    })?;
    ensure!(status == Status::WR_FLUSHED, "{status}");
    drop(qp);
    Ok(())
}

fn count(folder: &str) -> Result<usize> {
    Ok(fs::read_dir(folder)?.count())
}

/// Descriptors, threads, and objects of the NIC are given back, whatever was under way.
#[test]
fn nothing_is_left_of_contexts_whose_requests_nobody_waited_for() -> Result<()> {
    let machine = Machine::take();
    let objects = || model_objects(&["uar", "uctx", "pd", "mkey", "cq", "qp", "umem"]);
    let round = || -> Result<()> {
        let mut link = Link::with(&machine, Route::Proxy, 1 << 16, |options| {
            options.recv_depth = 8;
        })?;
        let unconnected = make_qp(&link.near, &QueuePairOptions::default())?;
        for _ in 0..8 {
            let (target, lkey) = (link.target.address(), link.target.lkey());
            link::poster(&mut link.peer).recv(target, lkey, 64)?;
        }
        for _ in 0..64 {
            link.put(0, 0)?;
        }
        drop(unconnected);
        Ok(())
    };
    // The driver makes a few things once.
    round()?;
    let before = (
        count("/proc/self/fd")?,
        count("/proc/self/task")?,
        objects()?,
    );
    for _ in 0..10 {
        round()?;
    }
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        let now = (
            count("/proc/self/fd")?,
            count("/proc/self/task")?,
            objects()?,
        );
        if now == before {
            return Ok(());
        }
        ensure!(Instant::now() < end, "{now:?}, before {before:?}");
        thread::sleep(Duration::from_millis(50));
    }
}
