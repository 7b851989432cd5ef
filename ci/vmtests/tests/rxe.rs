// SPDX-License-Identifier: MIT OR Apache-2.0
//! Route proxy on soft RoCE: the kernels of the other routes on a NIC that is not ours and not mlx5's, without the
//! broker, without a GPU on the bus, on Ethernet.
//!
//! vm: --nics 0 --gpus 0 --no-ibgda

#[allow(
    dead_code,
    reason = "without a NIC of the model, not all of it is of use"
)]
#[path = "routes/link.rs"]
mod link;
#[allow(dead_code, reason = "as above")]
mod support;

use anyhow::{Context as _, Result, ensure};
use ibgda::{
    Access, AsyncEventKind, Bdf, Context, LinkLayer, OpenOptions, QpAddress, QueuePairOptions,
    Route, Status,
};
use ibgda_test_kernels::Poller;
use ibgda_vmtests::rxe;
use link::{Link, PATIENCE, connect, make_qp};
use std::{
    env, fs,
    os::unix::process::CommandExt,
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError, mpsc::channel},
    thread,
    time::{Duration, Instant},
};

/// A GPU that is not there: on the proxy route nobody looks.
const NO_GPU: Bdf = Bdf {
    domain: 0,
    bus: 0xfe,
    device: 0,
    function: 0,
};

/// The two NICs, for one test at a time.
fn take() -> Result<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    rxe::set_up()?;
    Ok(turn)
}

fn open(index: usize, route: Route) -> ibgda::Result<Context> {
    Context::open(&OpenOptions {
        route,
        ..OpenOptions::new(rxe::NICS[index].0, NO_GPU)
    })
}

fn link(bytes: usize, change: impl FnOnce(&mut QueuePairOptions)) -> Result<Link> {
    let mut options = QueuePairOptions {
        post_timeout: Duration::from_secs(60),
        ..Default::default()
    };
    change(&mut options);
    let (near, far) = (open(0, Route::Proxy)?, open(1, Route::Proxy)?);
    Link::between(near, far, bytes, &options)
}

#[test]
fn auto_takes_it_and_says_why_no_other() -> Result<()> {
    let _turn = take()?;
    // A GPU that is not there may be a mistyped one, and is not taken for a wish for the slowest route.
    let error = open(0, Route::Auto).err().context("no such GPU")?;
    ensure!(
        error.errno() == libc::ENODEV && error.to_string().contains(&NO_GPU.to_string()),
        "{error}"
    );
    let function = fs::read_dir("/sys/bus/pci/devices")?
        .next()
        .context("a PCI function")??;
    let function = function.file_name().to_string_lossy().parse()?;
    let context = Context::open(&OpenOptions::new(rxe::NICS[0].0, function))?;
    let report = context.route_report();
    ensure!(
        context.route() == Route::Proxy && !report.is_forced(),
        "{report}"
    );
    ensure!(
        report.better().len() == 2 && report.to_string().contains("no mlx5 NIC"),
        "{report}"
    );
    ensure!(!report.is_refused_by_policy());
    for route in [Route::Direct, Route::CpuDoorbell] {
        let error = open(0, route).err().context("a NIC that nobody can ring")?;
        ensure!(error.to_string().contains("no mlx5 NIC"), "{error}");
    }
    let options = OpenOptions::new("rxe7", function);
    let error = Context::open(&options).err().context("no such NIC")?;
    ensure!(
        error.errno() == libc::EINVAL && error.to_string().contains("rxe7"),
        "{error}"
    );
    Ok(())
}

#[test]
fn writes_reads_atomics_and_sends_arrive() -> Result<()> {
    let _turn = take()?;
    let mut link = link(1 << 18, |options| options.recv_depth = 4)?;
    let address = link.qp.address();
    ensure!(
        (address.link_layer, address.lid) == (LinkLayer::Ethernet, 0),
        "{address:?}"
    );
    link.moves_data()?;
    // And between two QPs of one NIC.
    let (near, far) = (open(0, Route::Proxy)?, open(0, Route::Proxy)?);
    let options = QueuePairOptions {
        recv_depth: 4,
        ..Default::default()
    };
    Link::between(near, far, 1 << 18, &options)?.moves_data()
}

#[test]
fn a_ring_of_16_wraps_and_holds_the_last_of_each_word() -> Result<()> {
    const SLOTS: u64 = 64;
    const COUNT: u64 = 3_000;
    let _turn = take()?;
    let mut link = link(4096, |options| options.send_depth = 16)?;
    let (remote, rkey) = (link.target.address(), link.target.rkey());
    link.poster()
        .storm(remote, rkey, SLOTS, COUNT, 4, 1, PATIENCE)?;
    link.holds_the_last_of(COUNT, SLOTS)
}

#[test]
fn many_threads_post_to_a_shared_qp() -> Result<()> {
    let _turn = take()?;
    link(4096, |options| {
        (options.send_depth, options.shared) = (16, true)
    })?
    .adds_by_threads(4, 200)
}

/// The syndrome is the mlx5 one; the vendor's is 0, since rxe has none.
#[test]
fn a_wrong_rkey_is_a_decoded_error_that_stays() -> Result<()> {
    let _turn = take()?;
    for shared in [false, true] {
        let mut link = link(4096, |options| options.shared = shared)?;
        link.fails_at_a_wrong_rkey(shared)?;
        let error = link.qp.send_cq().error().context("latched")?;
        ensure!(error.vendor_syndrome == 0, "{error}");
    }
    Ok(())
}

#[test]
fn a_full_ring_and_a_dead_peer_end_in_an_error() -> Result<()> {
    let _turn = take()?;
    link(4096, |options| {
        (options.send_depth, options.ack_timeout, options.retry_count) = (16, 10, 2);
    })?
    .runs_into_a_dead_peer()
}

#[test]
fn a_peer_on_another_network_is_refused_with_the_reason() -> Result<()> {
    let _turn = take()?;
    let context = open(0, Route::Proxy)?;
    let qp = make_qp(&context, &QueuePairOptions::default())?;
    let peer = QpAddress {
        link_layer: LinkLayer::InfiniBand,
        lid: 1,
        ..qp.address()
    };
    let error = qp.connect(&peer).err().context("connected to InfiniBand")?;
    for part in ["Ethernet", "InfiniBand"] {
        ensure!(error.to_string().contains(part), "{part:?}: {error}");
    }
    // Nothing was lost by it.
    qp.connect(&qp.address())?;
    Ok(())
}

/// A child of the next test, without any right.
#[test]
fn a_user_without_rights_moves_data() -> Result<()> {
    const CHILD: &str = "IBGDA_TEST_NOBODY";
    let _turn = take()?;
    if env::var_os(CHILD).is_some() {
        // SAFETY: no memory is involved.
        ensure!(unsafe { libc::geteuid() } != 0);
        return link(1 << 18, |options| options.recv_depth = 4)?.moves_data();
    }
    let done = Command::new(env::current_exe()?)
        .args(["--exact", "a_user_without_rights_moves_data"])
        .env(CHILD, "1")
        .uid(65_534)
        .gid(65_534)
        .output()?;
    ensure!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stdout)
    );
    Ok(())
}

#[test]
fn a_nic_that_is_deleted_ends_a_wait_and_one_that_is_added_again_is_joined() -> Result<()> {
    let _turn = take()?;
    let Link {
        mut near,
        far,
        source,
        target,
        qp,
        peer,
    } = link(4096, |_| {})?;
    let (told, heard) = channel();
    near.on_error(move |event| {
        let _ = told.send(event.kind());
    })?;
    let start = Instant::now();
    let status = thread::scope(|scope| -> Result<Status> {
        let waiter = scope.spawn(|| {
            // SAFETY: the CQ lives in the QP, and this thread alone uses it.
            unsafe { Poller::new(qp.send_cq().device_handle()) }
                .poll(PATIENCE)
                .0
        });
        thread::sleep(Duration::from_millis(50));
        rxe::delete(0)?;
        Ok(waiter.join().expect("no panic"))
    })?;
    ensure!(
        status == Status::NIC_LOST,
        "{status} after {:?}",
        start.elapsed()
    );
    ensure!(start.elapsed() < Duration::from_nanos(PATIENCE / 2));
    let hear = |wanted: fn(AsyncEventKind) -> bool| -> Result<()> {
        loop {
            if wanted(heard.recv_timeout(Duration::from_nanos(PATIENCE))?) {
                return Ok(());
            }
        }
    };
    hear(|kind| matches!(kind, AsyncEventKind::NicLost { generation: 1, .. }))?;
    let error = near.rebind(Duration::ZERO).err().context("there is none")?;
    println!("while it is away: {error}");
    rxe::add(0)?;
    hear(|kind| matches!(kind, AsyncEventKind::NicRecovered { generation: 2 }))?;
    near.rebind(Duration::from_nanos(PATIENCE))?;
    drop((qp, source));

    let options = QueuePairOptions::default();
    let (qp, fresh) = (make_qp(&near, &options)?, make_qp(&far, &options)?);
    connect(&qp, &fresh)?;
    let source = near.alloc(4096, Access::all())?;
    let mut link = Link {
        near,
        far,
        source,
        target,
        qp,
        peer: fresh,
    };
    drop(peer);
    let request = link.put(0, 0)?;
    link.poster().wait(request, PATIENCE)?;
    Ok(())
}

#[test]
fn nothing_is_left_in_the_kernel_or_the_process() -> Result<()> {
    let _turn = take()?;
    let now = || -> Result<_> {
        let count = |folder| Ok::<_, std::io::Error>(fs::read_dir(folder)?.count());
        let ours = (count("/proc/self/fd")?, count("/proc/self/task")?);
        Ok((ours, rxe::resources()?))
    };
    let round = || -> Result<()> {
        let mut link = link(4096, |options| options.recv_depth = 8)?;
        for _ in 0..8 {
            let (target, lkey) = (link.target.address(), link.target.lkey());
            link::poster(&mut link.peer).recv(target, lkey, 64)?;
        }
        for _ in 0..64 {
            link.put(0, 0)?;
        }
        Ok(())
    };
    round()?;
    let before = now()?;
    for _ in 0..5 {
        round()?;
    }
    let end = Instant::now() + Duration::from_secs(30);
    while now()? != before {
        ensure!(Instant::now() < end, "{:?}, before {before:?}", now()?);
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
