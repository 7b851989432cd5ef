// SPDX-License-Identifier: MIT OR Apache-2.0
//! The routes of libibgda: the same kernels where they ring the NIC themselves, where a thread of the library does, and
//! where one posts for them; how a route is chosen; callbacks; counters. Needs two NICs and a GPU: `./ci/vm --nics 2`.

#[path = "routes/carried.rs"]
mod carried;
#[path = "routes/heard.rs"]
mod heard;
#[path = "routes/link.rs"]
mod link;
#[path = "routes/proxied.rs"]
mod proxied;
#[path = "routes/queues.rs"]
mod queues;
mod support;
#[path = "routes/waits.rs"]
mod waits;

use anyhow::{Context as _, Result, ensure};
use ibgda::{
    Access, Context, OpenOptions, QpCounters, Route, Status,
    abi::{IBGDA_CPU_DOORBELL, IBGDA_NO_DOORBELL, IBGDA_SHARED, IBGDA_UNSIGNALED},
    capi,
};
use link::{Link, PATIENCE, ROUTES, open};
use std::{
    ffi::{CStr, CString},
    ptr::null_mut,
};
use support::Machine;

#[test]
fn the_best_route_is_taken_and_a_lesser_one_when_asked_for() -> Result<()> {
    let machine = Machine::take();
    let context = open(&machine, 0, Route::Auto)?;
    ensure!(context.route() == Route::Direct && !context.route_report().is_forced());
    ensure!(context.route_report().better().is_empty());
    let context = open(&machine, 0, Route::Direct)?;
    ensure!(context.route() == Route::Direct && context.route_report().is_forced());

    let context = open(&machine, 0, Route::CpuDoorbell)?;
    let report = context.route_report();
    ensure!(context.route() == Route::CpuDoorbell && report.is_forced());
    let text = report.to_string();
    ensure!(
        report.better().len() == 1
            && text.contains("direct: not used")
            && text.contains("was asked for"),
        "{text}"
    );

    let context = open(&machine, 0, Route::Proxy)?;
    let report = context.route_report();
    ensure!(context.route() == Route::Proxy && report.is_forced());
    ensure!(report.better().len() == 2, "{report}");
    Ok(())
}

#[test]
fn a_route_that_cannot_be_had_is_refused_with_the_reason() -> Result<()> {
    let mut machine = Machine::take();
    machine.withdraw();
    for route in [Route::Direct, Route::CpuDoorbell] {
        let error = open(&machine, 0, route)
            .err()
            .with_context(|| format!("{route} without permission"))?;
        let error: &ibgda::Error = error.downcast_ref().context("an error of the library")?;
        ensure!(
            error.errno() == libc::EACCES && error.to_string().contains("/config/ibgda/allow"),
            "{route}: {error}"
        );
    }
    // No GPU rings the NIC on the proxy route; what the policy says is told all the same, before all else.
    let context = open(&machine, 0, Route::Auto)?;
    let report = context.route_report();
    ensure!(context.route() == Route::Proxy && report.is_refused_by_policy());
    let text = report.to_string();
    ensure!(
        text.lines()
            .nth(1)
            .is_some_and(|line| line.starts_with("POLICY"))
            && text.matches("/config/ibgda/allow").count() == 2,
        "{text}"
    );
    let context = open(&machine, 0, Route::Proxy)?;
    ensure!(
        !context.route_report().is_refused_by_policy(),
        "nobody asked it"
    );
    Ok(())
}

#[test]
fn the_handle_says_which_route_its_kernels_are_for() -> Result<()> {
    let machine = Machine::take();
    for (route, bit) in [
        (Route::Direct, 0),
        (Route::CpuDoorbell, IBGDA_CPU_DOORBELL),
        (Route::Proxy, IBGDA_CPU_DOORBELL),
    ] {
        for (shared, other) in [(false, 0), (true, IBGDA_SHARED)] {
            let link = Link::with(&machine, route, 4096, |options| options.shared = shared)?;
            // SAFETY: the QP lives, and nobody else uses it.
            let mode = unsafe { (*link.qp.device_handle()).mode };
            ensure!(mode == bit | other, "{route}, shared {shared}: {mode:#x}");
        }
    }
    Ok(())
}

#[test]
fn writes_reads_atomics_and_sends_arrive_on_every_route() -> Result<()> {
    let machine = Machine::take();
    for route in ROUTES {
        let mut link = Link::with(&machine, route, 1 << 18, |options| options.recv_depth = 4)?;
        link.moves_data().with_context(|| route.to_string())?;
    }
    Ok(())
}

#[test]
fn a_ring_of_16_wraps_past_the_16_bit_counter_on_every_route() -> Result<()> {
    const SLOTS: u64 = 512;
    const COUNT: u64 = 70_000;
    let machine = Machine::take();
    for route in ROUTES {
        let mut link = Link::with(&machine, route, SLOTS as usize * 8, |options| {
            options.send_depth = 16;
        })?;
        let (remote, rkey) = (link.target.address(), link.target.rkey());
        let mut poster = link.poster();
        poster.storm(remote, rkey, SLOTS, 2_000, 1, 1, PATIENCE)?;
        poster.storm(remote, rkey, SLOTS, COUNT - 2_000, 4, 4, PATIENCE)?;
        link.holds_the_last_of(COUNT, SLOTS)
            .with_context(|| route.to_string())?;
        let counters = link.qp.counters();
        ensure!(
            (counters.posted, counters.told, counters.completed) == (COUNT, COUNT, COUNT),
            "{route}: {counters:?}"
        );
        // A doorbell may cover several, but 2,000 requests were waited for in rounds of a ring at most.
        let carried = (COUNT / 16..=COUNT).contains(&counters.carried);
        ensure!(
            carried == (route == Route::CpuDoorbell),
            "{route}: {counters:?}"
        );
    }
    Ok(())
}

#[test]
fn many_threads_post_to_a_shared_qp_on_every_route() -> Result<()> {
    let machine = Machine::take();
    for route in ROUTES {
        for send_depth in [16, 256] {
            link::shared_adds(&machine, route, send_depth, 4, 1_000)
                .with_context(|| format!("{route}, depth {send_depth}"))?;
        }
    }
    Ok(())
}

#[test]
fn a_wrong_rkey_is_a_decoded_error_that_stays_on_every_route() -> Result<()> {
    let machine = Machine::take();
    for route in ROUTES {
        for shared in [false, true] {
            let mut link = Link::with(&machine, route, 4096, |options| options.shared = shared)?;
            link.fails_at_a_wrong_rkey(shared)
                .with_context(|| format!("{route}, shared {shared}"))?;
        }
    }
    Ok(())
}

#[test]
fn counters_follow_what_a_kernel_does() -> Result<()> {
    let machine = Machine::take();
    for route in ROUTES {
        let mut link = Link::with(&machine, route, 4096, |options| options.recv_depth = 4)?;
        let is = |link: &Link, posted, told, completed, failed| -> Result<()> {
            let counters = link.qp.counters();
            let expected = QpCounters {
                posted,
                told,
                completed,
                failed,
                carried: counters.carried,
                ..Default::default()
            };
            ensure!(
                counters == expected,
                "{route}: {counters:?}, not {expected:?}"
            );
            Ok(())
        };
        is(&link, 0, 0, 0, 0)?;
        link.put(0, IBGDA_UNSIGNALED | IBGDA_NO_DOORBELL)?;
        link.put(8, IBGDA_NO_DOORBELL)?;
        is(&link, 2, 0, 0, 0)?;
        let last = link.put(16, 0)?;
        is(&link, 3, 3, 0, 0)?;
        link.poster().wait(last, PATIENCE)?;
        is(&link, 3, 3, 3, 0)?;
        ensure!(
            (link.qp.counters().carried == 1) == (route == Route::CpuDoorbell),
            "{route}: {:?}",
            link.qp.counters()
        );

        let (target, lkey) = (link.target.address(), link.target.lkey());
        link::poster(&mut link.peer).recv(target, lkey, 64)?;
        ensure!(link.peer.counters().recv_posted == 1);

        let (local, lkey) = (link.source.address(), link.source.lkey());
        let (remote, wrong) = (link.target.address(), link.target.rkey() ^ 0xff00);
        let bad = link.poster().put(remote, wrong, local, lkey, 8, 0)?;
        link.put(0, 0)?;
        ensure!(link.poster().wait(bad, PATIENCE) == Err(Status::REMOTE_ACCESS));
        is(&link, 5, 5, 3, 2)?;
    }
    Ok(())
}

fn check(errno: i32) -> Result<()> {
    // SAFETY: the message is this thread's and terminated.
    let message = unsafe { CStr::from_ptr(capi::ibgda_last_error()) };
    ensure!(errno == 0, "errno {errno}: {message:?}");
    Ok(())
}

/// What C programs open the first NIC by.
struct Names {
    nic: CString,
    gpu: CString,
}

impl Names {
    fn of(machine: &Machine) -> Result<Self> {
        Ok(Self {
            nic: CString::new(machine.nics[0].to_string())?,
            gpu: CString::new(machine.gpu.to_string())?,
        })
    }

    /// Valid as long as the names.
    fn attr(&self, route: u32) -> capi::ibgda_open_attr {
        capi::ibgda_open_attr {
            size: size_of::<capi::ibgda_open_attr>() as u32,
            port: 1,
            nic: self.nic.as_ptr(),
            gpu: self.gpu.as_ptr(),
            route,
            reserved: 0,
        }
    }
}

#[test]
fn c_programs_choose_routes_and_older_ones_need_not_know_of_them() -> Result<()> {
    let machine = Machine::take();
    let names = Names::of(&machine)?;
    let attr = names.attr(capi::IBGDA_ROUTE_CPU_DOORBELL);
    for (attr, route, words) in [
        (attr, capi::IBGDA_ROUTE_CPU_DOORBELL, c"direct: not used"),
        // A program that was built when the struct ended before the route; what is behind it there is not read.
        (
            capi::ibgda_open_attr {
                size: 24,
                route: 77,
                reserved: 77,
                ..attr
            },
            capi::IBGDA_ROUTE_DIRECT,
            c"direct: in use",
        ),
    ] {
        let (mut context, mut found, mut text) = (null_mut(), 0, [0; 512]);
        // SAFETY: the arguments are valid; the context is closed once.
        unsafe {
            check(capi::ibgda_open(&attr, &mut context))?;
            check(capi::ibgda_get_route(context, &mut found))?;
            check(capi::ibgda_route_report(
                context,
                text.as_mut_ptr(),
                text.len(),
            ))?;
            check(capi::ibgda_close(context))?;
        }
        // SAFETY: terminated by the call.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) };
        ensure!(found == route, "route {found}");
        ensure!(
            text.to_str()?.contains(words.to_str()?),
            "{words:?} is missing in {text:?}"
        );
    }
    let mut context = null_mut();
    let unknown = capi::ibgda_open_attr { route: 9, ..attr };
    // SAFETY: the arguments are valid.
    let errno = unsafe { capi::ibgda_open(&unknown, &mut context) };
    // SAFETY: as in `check`.
    let message = unsafe { CStr::from_ptr(capi::ibgda_last_error()) };
    ensure!(errno == libc::EINVAL && context.is_null());
    ensure!(
        message.to_str()?.contains("there is no route 9"),
        "{message:?}"
    );
    Ok(())
}

#[test]
fn a_context_of_another_port_or_name_says_so_on_every_route() -> Result<()> {
    let machine = Machine::take();
    for route in ROUTES {
        let error = Context::open(&OpenOptions {
            port: 9,
            route,
            ..OpenOptions::new(machine.nics[0].to_string(), machine.gpu)
        })
        .err()
        .context("port 9 was opened")?;
        ensure!(error.to_string().contains("port 9"), "{error}");
    }
    Ok(())
}

#[test]
fn a_full_ring_and_a_dead_peer_end_in_an_error_on_every_route() -> Result<()> {
    let machine = Machine::take();
    for route in ROUTES {
        let link = Link::with(&machine, route, 4096, |options| {
            (options.send_depth, options.ack_timeout, options.retry_count) = (16, 10, 2);
        })?;
        link.runs_into_a_dead_peer()
            .with_context(|| route.to_string())?;
    }
    Ok(())
}

#[test]
fn regions_outlive_their_context_on_every_route() -> Result<()> {
    let machine = Machine::take();
    for route in ROUTES {
        let Link {
            near,
            far,
            source,
            target,
            mut qp,
            peer,
        } = Link::new(&machine, route)?;
        // Whoever rings for the QP lives as long as the QP.
        drop((near, far));
        source.write(0, &[0x5a; 64])?;
        let mut poster = link::poster(&mut qp);
        let request = poster.put(
            target.address(),
            target.rkey(),
            source.address(),
            source.lkey(),
            64,
            0,
        )?;
        poster.wait(request, PATIENCE)?;
        ensure!(link::contents(&target, 64)? == [0x5a; 64], "{route}");
        drop(peer);
    }
    let context = open(&machine, 0, Route::CpuDoorbell)?;
    let region = context.alloc(4096, Access::all())?;
    drop(context);
    region.write(0, &[1])?;
    Ok(())
}
