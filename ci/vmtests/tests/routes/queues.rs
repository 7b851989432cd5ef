// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queues of other kinds than the usual: collapsed CQs, BlueFlame doorbell pages.

use crate::{
    link::{self, Link, PATIENCE, connect, open},
    support::{Machine, model_count},
};
use anyhow::{Context as _, Result, ensure};
use ibgda::{
    Access, CompletionQueueOptions, Context, QueuePair, QueuePairOptions, Route, Status,
    abi::{
        IBGDA_BLUEFLAME, IBGDA_COLLAPSED, IBGDA_CPU_DOORBELL, IBGDA_SHARED, ibgda_error, ibgda_qp,
        ibgda_status,
    },
};
use ibgda_test_kernels::test_clock_ns;
use std::ptr::null_mut;

unsafe extern "C" {
    /// Of libibgda: by the handle's mode.
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
    fn ibgda_quiet(qp: *mut ibgda_qp, deadline_ns: u64) -> u32;
}

const COLLAPSED: CompletionQueueOptions = CompletionQueueOptions {
    depth: 16,
    events: false,
    collapsed: true,
};

fn options() -> QueuePairOptions {
    QueuePairOptions {
        send_depth: 16,
        post_timeout: std::time::Duration::from_nanos(PATIENCE),
        ..Default::default()
    }
}

fn collapsed_qp(context: &Context, options: &QueuePairOptions) -> Result<QueuePair> {
    let cq = context.create_cq_with(&COLLAPSED)?;
    Ok(context.create_qp(options, &cq, None)?)
}

/// A link between QPs that `make` makes.
fn link(
    machine: &Machine,
    route: Route,
    make: impl Fn(&Context) -> Result<QueuePair>,
) -> Result<Link> {
    let (near, far) = (open(machine, 0, route)?, open(machine, 1, route)?);
    let (source, target) = (
        near.alloc(4096, Access::all())?,
        far.alloc(4096, Access::all())?,
    );
    let (qp, peer) = (make(&near)?, make(&far)?);
    connect(&qp, &peer)?;
    Ok(Link {
        near,
        far,
        source,
        target,
        qp,
        peer,
    })
}

/// Puts 8 bytes of the source, by the handle's mode; `wrong` falsifies the rkey.
fn put(link: &Link, to: u64, wrong: u32) -> Status {
    let (source, target) = (&link.source, &link.target);
    // SAFETY: the QP lives, and one thread uses it.
    Status(unsafe {
        ibgda_put(
            link.qp.device_handle(),
            target.address() + to,
            target.rkey() ^ wrong,
            source.address(),
            source.lkey(),
            8,
            0,
            null_mut(),
        )
    })
}

fn quiet(link: &Link) -> Status {
    // SAFETY: as above.
    Status(unsafe { ibgda_quiet(link.qp.device_handle(), test_clock_ns() + PATIENCE) })
}

fn mode(qp: &QueuePair) -> u32 {
    // SAFETY: constant after creation.
    unsafe { (*qp.device_handle()).mode }
}

#[test]
fn a_collapsed_cq_serves_a_send_queue_on_every_route() -> Result<()> {
    let machine = Machine::take();
    for route in [Route::Direct, Route::CpuDoorbell] {
        for shared in [false, true] {
            let options = QueuePairOptions {
                shared,
                ..options()
            };
            let link = link(&machine, route, |context| collapsed_qp(context, &options))?;
            let bits = IBGDA_COLLAPSED
                | if shared { IBGDA_SHARED } else { 0 }
                | if route == Route::Direct {
                    0
                } else {
                    IBGDA_CPU_DOORBELL
                };
            ensure!(mode(&link.qp) == bits, "{route}: {:#x}", mode(&link.qp));
            let overruns = model_count("cq_overruns")?;
            // Many laps of the ring.
            for index in 0..500_u64 {
                link.source.write(0, &(index + 1).to_ne_bytes())?;
                ensure!(
                    put(&link, index % 8 * 8, 0) == Status::OK,
                    "{route}, {index}"
                );
                if index % 7 == 0 {
                    ensure!(quiet(&link) == Status::OK, "{route}, {index}");
                }
            }
            ensure!(quiet(&link) == Status::OK, "{route}");
            ensure!(
                link.qp.counters().completed >= 500,
                "{:?}",
                link.qp.counters()
            );
            let last = link::contents(&link.target, 64)?;
            ensure!(last[24..32] == 500_u64.to_ne_bytes(), "{route}: {last:?}");
            ensure!(model_count("cq_overruns")? == overruns, "{route}");

            ensure!(put(&link, 0, 0xff00) == Status::OK);
            let status = quiet(&link);
            let flushed = Status(ibgda_status::IBGDA_ERR_WR_FLUSHED);
            ensure!(
                [Status::REMOTE_ACCESS, flushed].contains(&status),
                "{route}: {status}"
            );
            let error: ibgda_error = link.qp.send_cq().error().context("latched")?;
            ensure!(error.qpn == link.qp.number(), "{route}: {error}");
        }
    }
    Ok(())
}

#[test]
fn a_collapsed_cq_is_refused_where_it_cannot_be() -> Result<()> {
    let machine = Machine::take();
    let context = open(&machine, 0, Route::Direct)?;
    let error = context
        .create_cq_with(&CompletionQueueOptions {
            events: true,
            ..COLLAPSED
        })
        .err()
        .context("with events")?;
    ensure!(error.errno() == libc::EINVAL, "{error}");
    let (send, recv) = (context.create_cq(16)?, context.create_cq_with(&COLLAPSED)?);
    let receiving = QueuePairOptions {
        recv_depth: 16,
        ..options()
    };
    let error = context
        .create_qp(&receiving, &send, Some(&recv))
        .err()
        .context("for receives")?;
    ensure!(
        error.errno() == libc::EINVAL && error.to_string().contains("collapsed"),
        "{error}"
    );
    // Neither was taken.
    context.create_qp(&options(), &recv, None)?;
    context.create_qp(&options(), &send, None)?;
    Ok(())
}

#[test]
fn a_request_goes_along_with_its_doorbell_through_a_blueflame_page() -> Result<()> {
    let machine = Machine::take();
    let blueflame = QueuePairOptions {
        blueflame: true,
        ..options()
    };
    let qp = |context: &Context| -> Result<QueuePair> {
        let cq = context.create_cq(16)?;
        Ok(context.create_qp(&blueflame, &cq, None)?)
    };
    let mut link = link(&machine, Route::Direct, qp)?;
    ensure!(mode(&link.qp) == IBGDA_BLUEFLAME, "{:#x}", mode(&link.qp));
    // SAFETY: constant after creation.
    let bytes = unsafe { (*link.qp.device_handle()).blueflame_bytes };
    ensure!(bytes == 256, "{bytes}");
    let before = model_count("blueflame_wqes")?;
    for round in 0..100_u64 {
        link.source.write(0, &(round + 1).to_ne_bytes())?;
        let (local, lkey) = (link.source.address(), link.source.lkey());
        let (remote, rkey) = (link.target.address(), link.target.rkey());
        let mut poster = link.poster();
        let request = poster.put_blueflame(remote, rkey, local, lkey, 8)?;
        poster.wait(request, PATIENCE)?;
        ensure!(link::contents(&link.target, 8)? == (round + 1).to_ne_bytes());
    }
    let along = model_count("blueflame_wqes")? - before;
    println!("{along} of 100 requests went along with their doorbells");
    ensure!(along > 0, "none went along");
    // A kernel that knows nothing of it may use the page too.
    link.put(0, 0)?;
    link.poster().quiet(PATIENCE)?;

    let context = open(&machine, 0, Route::CpuDoorbell)?;
    let error = qp(&context).err().context("on cpu-doorbell")?;
    let error: &ibgda::Error = error.downcast_ref().context("of the library")?;
    ensure!(
        error.errno() == libc::EINVAL && error.to_string().contains("carries"),
        "{error}"
    );
    Ok(())
}

/// Pages of both kinds come and go in one context: each QP gets one of its kind.
#[test]
fn pages_of_both_kinds_are_used_again() -> Result<()> {
    let machine = Machine::take();
    let context = open(&machine, 0, Route::Direct)?;
    let mut pages = [Vec::new(), Vec::new()];
    for round in 0..4 {
        for (kind, blueflame) in [false, true].into_iter().enumerate() {
            let cq = context.create_cq(16)?;
            let options = QueuePairOptions {
                blueflame,
                ..options()
            };
            let page = context.create_qp(&options, &cq, None)?.doorbell_page();
            if round == 0 {
                pages[kind].push(page);
            }
            ensure!(pages[kind][0] == page, "round {round}: another page");
        }
    }
    ensure!(pages[0] != pages[1], "one page for both");
    Ok(())
}
