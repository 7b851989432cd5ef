// SPDX-License-Identifier: MIT OR Apache-2.0
//! The threads of the routes that have one: QPs that come and go, loss and return of the NIC, a process that is killed.

use crate::{
    link::{self, Link, PATIENCE, connect, make_qp, open},
    support::{Machine, inject_fatal_error, model_count, model_objects},
};
use anyhow::{Context as _, Result, ensure};
use ibgda::{Access, QueuePairOptions, Route, Status};
use ibgda_test_kernels::Poller;
use std::{
    env, fs,
    io::{BufRead, BufReader},
    os::unix::process::ExitStatusExt,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// The routes for which a thread works, and what that is called.
const THREADED: [(Route, &str); 2] = [
    (Route::CpuDoorbell, "ibgda-doorbell"),
    (Route::Proxy, "ibgda-proxy"),
];

/// Threads of this process of that name.
fn carriers(name: &str) -> Result<usize> {
    let mut found = 0;
    for task in fs::read_dir("/proc/self/task")? {
        // A thread may end meanwhile.
        let its = fs::read_to_string(task?.path().join("comm")).unwrap_or_default();
        found += usize::from(its.trim() == name);
    }
    Ok(found)
}

/// Waits until there are so many: a thread gives itself its name when it has begun.
fn carriers_become(name: &str, count: usize, why: &str) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(10);
    while carriers(name)? != count {
        ensure!(
            Instant::now() < end,
            "{why}: {} threads, not {count}",
            carriers(name)?
        );
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Rounds in which QPs come and go, in changing order, while another is busy all the time.
#[test]
fn qps_come_and_go_while_others_are_rung() -> Result<()> {
    let machine = Machine::take();
    for (route, _) in THREADED {
        come_and_go(&machine, route).with_context(|| route.to_string())?;
    }
    Ok(())
}

fn come_and_go(machine: &Machine, route: Route) -> Result<()> {
    const SLOTS: u64 = 64;
    const COUNT: u64 = 6_000;
    let strays = || -> Result<u64> {
        Ok(model_count("foreign_doorbells")?
            + model_count("lost_doorbells")?
            + model_count("stale_doorbells")?)
    };
    let before = strays()?;
    let mut busy = Link::new(machine, route)?;
    let (remote, rkey) = (busy.target.address(), busy.target.rkey());
    let mut poster = busy.poster();
    thread::scope(|scope| -> Result<()> {
        let storm = scope.spawn(move || poster.storm(remote, rkey, SLOTS, COUNT, 1, 1, PATIENCE));
        let mut round = 0;
        while round < 3 || !storm.is_finished() {
            let mut pairs = Vec::new();
            for _ in 0..3 {
                let options = QueuePairOptions::default();
                let (qp, peer) = (
                    make_qp(&busy.near, &options)?,
                    make_qp(&busy.far, &options)?,
                );
                connect(&qp, &peer)?;
                pairs.push((qp, peer));
            }
            for (qp, _) in &mut pairs {
                let (local, lkey) = (busy.source.address(), busy.source.lkey());
                let mut poster = link::poster(qp);
                let request = poster.put(remote + 2048, rkey, local, lkey, 8, 0)?;
                poster.wait(request, PATIENCE)?;
                // Nobody waits for this one: the QP goes with its doorbell in the word, or on its way.
                poster.put(remote + 2048, rkey, local, lkey, 8, 0)?;
            }
            match round % 3 {
                0 => pairs.rotate_left(1),
                1 => pairs.reverse(),
                _ => {}
            }
            drop(pairs);
            round += 1;
        }
        storm.join().expect("the storm does not panic")?;
        Ok(())
    })?;
    busy.holds_the_last_of(COUNT, SLOTS)?;
    ensure!(
        strays()? == before,
        "a doorbell went to a page that is not its QP's, or came for a QP that was gone"
    );
    Ok(())
}

#[test]
fn each_context_of_the_route_has_one_thread_while_it_or_a_qp_lives() -> Result<()> {
    let machine = Machine::take();
    for (route, name) in THREADED {
        carriers_become(name, 0, "of earlier tests")?;
        let direct = open(&machine, 0, Route::Direct)?;
        let _qp = make_qp(&direct, &QueuePairOptions::default())?;
        ensure!(carriers(name)? == 0, "the direct route needs none");
        let context = open(&machine, 0, route)?;
        let options = QueuePairOptions::default();
        let qps = [make_qp(&context, &options)?, make_qp(&context, &options)?];
        carriers_become(name, 1, "two QPs share one")?;
        drop(context);
        ensure!(carriers(name)? == 1, "its QPs need it");
        drop(qps);
        ensure!(carriers(name)? == 0, "nobody needs it");
    }
    Ok(())
}

#[test]
fn a_reset_ends_a_wait_and_the_thread_and_rebinding_starts_another() -> Result<()> {
    let machine = Machine::take();
    for (route, name) in THREADED {
        reset_and_rebind(&machine, route, name).with_context(|| route.to_string())?;
    }
    Ok(())
}

fn reset_and_rebind(machine: &Machine, route: Route, name: &str) -> Result<()> {
    let Link {
        mut near,
        far,
        mut source,
        target,
        mut qp,
        peer,
    } = Link::new(machine, route)?;
    for round in 1..=2 {
        let start = Instant::now();
        let status = thread::scope(|scope| -> Result<_> {
            let nic = machine.nics[0];
            let injector = scope.spawn(move || {
                thread::sleep(Duration::from_millis(100));
                inject_fatal_error(nic)
            });
            // SAFETY: the CQ lives in the QP; this thread alone uses it.
            let (status, _) = unsafe { Poller::new(qp.send_cq().device_handle()) }.poll(PATIENCE);
            injector.join().expect("the injector does not panic")?;
            Ok(status)
        })?;
        ensure!(status == Status::NIC_LOST, "{status}");
        ensure!(
            start.elapsed() < Duration::from_nanos(PATIENCE / 2),
            "the wait went on for {:?}",
            start.elapsed()
        );
        let (local, lkey) = (source.address(), source.lkey());
        let put = link::poster(&mut qp).put(target.address(), target.rkey(), local, lkey, 8, 0);
        ensure!(put == Err(Status::NIC_LOST), "{put:?}");
        // The proxy's thread goes on to see the device come back.
        let left = if route == Route::Proxy { 2 } else { 1 };
        carriers_become(name, left, "the other's goes on")?;

        near.rebind(Duration::from_nanos(PATIENCE))?;
        ensure!(near.route() == route && near.pair().generation > round);
        carriers_become(name, left + 1, "rebinding starts one")?;
        // The dead QP goes while the new ones are made.
        let options = QueuePairOptions::default();
        let fresh = make_qp(&near, &options)?;
        drop(std::mem::replace(&mut qp, fresh));
        drop(std::mem::replace(
            &mut source,
            near.alloc(4096, Access::all())?,
        ));
        carriers_become(name, 2, "the dead one's has ended with it")?;
        let peer = make_qp(&far, &options)?;
        connect(&qp, &peer)?;
        source.write(0, &link::pattern(4096, round as u8))?;
        let mut poster = link::poster(&mut qp);
        let (local, lkey) = (source.address(), source.lkey());
        let request = poster.put(target.address(), target.rkey(), local, lkey, 4096, 0)?;
        poster.wait(request, PATIENCE)?;
        ensure!(link::contents(&target, 4096)? == link::pattern(4096, round as u8));
    }
    drop(peer);
    Ok(())
}

/// The child of the next test: rings as fast as it can, and says when it has begun.
fn ring_until_killed(machine: &Machine, route: Route) -> Result<()> {
    let mut link = Link::new(machine, route)?;
    let (remote, rkey) = (link.target.address(), link.target.rkey());
    let mut poster = link.poster();
    poster.storm(remote, rkey, 64, 100, 1, 1, PATIENCE)?;
    println!("rings");
    loop {
        poster.storm(remote, rkey, 64, 100_000, 8, 1, PATIENCE)?;
    }
}

#[test]
fn a_process_that_is_killed_leaves_nothing_behind() -> Result<()> {
    const CHILD: &str = "IBGDA_TEST_RINGING_CHILD";
    let machine = Machine::take();
    if let Ok(route) = env::var(CHILD) {
        return ring_until_killed(&machine, route.parse()?);
    }
    let objects = || model_objects(&["uar", "uctx", "pd", "mkey", "cq", "qp", "umem"]);
    // Lines of the broker's sessions and grants; debugfs is there when the machine has mounted it.
    let sessions = || -> Result<String> {
        let read = |name: &str| fs::read_to_string(format!("/sys/kernel/debug/ibgda/{name}"));
        Ok(read("sessions")? + &read("grants")?)
    };
    if sessions().is_err() {
        let mount = Command::new("mount")
            .args(["-t", "debugfs", "none", "/sys/kernel/debug"])
            .status()?;
        ensure!(mount.success(), "mount debugfs");
    }
    let kill_one = |route: Route| -> Result<String> {
        let mut child = Command::new(env::current_exe()?)
            .args([
                "--exact",
                "carried::a_process_that_is_killed_leaves_nothing_behind",
                "--nocapture",
            ])
            .env(CHILD, route.name())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().context("piped")?;
        let rings = BufReader::new(stdout)
            .lines()
            .map_while(Result::ok)
            .any(|line| line.contains("rings"));
        child.kill()?;
        let status = child.wait()?;
        ensure!(rings && status.signal() == Some(libc::SIGKILL), "{status}");
        Ok(child.id().to_string())
    };
    // Sessions and grants are listed with their owner; this process has some of earlier tests.
    let is_listed =
        |pid: &str| -> Result<bool> { Ok(sessions()?.split_whitespace().any(|word| word == pid)) };
    let settled = |what: &str, is: &dyn Fn() -> Result<bool>| -> Result<()> {
        let end = Instant::now() + Duration::from_secs(30);
        while !is()? {
            ensure!(
                Instant::now() < end,
                "{what}: {}\n{}",
                objects()?,
                sessions()?
            );
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    };
    for (route, _) in THREADED {
        // The driver makes a few things once.
        let first = kill_one(route)?;
        settled("one was killed", &|| Ok(!is_listed(&first)?))?;
        // Its objects go one by one, and some after its session.
        let (mut before, mut since) = (objects()?, Instant::now());
        let end = since + Duration::from_secs(30);
        while since.elapsed() < Duration::from_secs(2) {
            ensure!(Instant::now() < end, "objects come and go: {before}");
            thread::sleep(Duration::from_millis(50));
            let now = objects()?;
            if now != before {
                (before, since) = (now, Instant::now());
            }
        }
        for _ in 0..3 {
            let pid = kill_one(route)?;
            settled("another was killed", &|| {
                Ok(!is_listed(&pid)? && objects()? == before)
            })?;
        }
    }
    Ok(())
}
