// SPDX-License-Identifier: MIT OR Apache-2.0
//! libibgda and the device header in the virtual machine: real mlx5 driver, real broker, queues and doorbells as a kernel on a
//! GPU would use them, on CPU threads. Needs two NICs and a GPU: `./ci/vm --nics 2`.

mod support;

use anyhow::{Context as _, Result, bail, ensure};
use ibgda::{
    Access, Bdf, Context, MemoryRegion, OpenOptions, QpAddress, QpCounters, QueuePair,
    QueuePairOptions, Rounding, Route, Source, Status,
    abi::{IBGDA_CQE_REQ_ERR, IBGDA_NO_DOORBELL, IBGDA_UNSIGNALED, ibgda_qp, ibgda_region},
    capi,
};
use ibgda_hil::rig::{self, connect, make_qp, pattern};
use ibgda_test_kernels::{Poller, Poster, SharedPoster};
use ibgda_vmtests::{
    machine::wait_until,
    process::{End, in_child},
};
use memmap2::{MmapOptions, MmapRaw};
use std::{
    env,
    ffi::{CStr, CString},
    process::Command,
    ptr::{self, null, null_mut},
    thread,
    time::{Duration, Instant},
};
use support::{Machine, ask_model, contents, model_count, model_objects, poster};

/// For what must happen; much longer than it takes.
const PATIENCE: u64 = 60_000_000_000;
/// For what must not happen.
const A_MOMENT: u64 = 300_000_000;

/// Two contexts, a region on each, two QPs connected to each other.
struct Link {
    near: Context,
    far: Context,
    source: MemoryRegion,
    target: MemoryRegion,
    qp: QueuePair,
    peer: QueuePair,
}

fn open(machine: &Machine, nic: usize) -> Result<Context> {
    rig::open(machine, nic, Route::Auto)
}

impl Link {
    fn with(machine: &Machine, bytes: usize, options: &QueuePairOptions) -> Result<Self> {
        let (near, far) = (open(machine, 0)?, open(machine, 1)?);
        let source = near.alloc(bytes, Access::all())?;
        let target = far.alloc(bytes, Access::all())?;
        let (qp, peer) = (make_qp(&near, options)?, make_qp(&far, options)?);
        connect(&qp, &peer)?;
        Ok(Self {
            near,
            far,
            source,
            target,
            qp,
            peer,
        })
    }

    fn new(machine: &Machine, bytes: usize) -> Result<Self> {
        Self::with(machine, bytes, &QueuePairOptions::default())
    }

    fn poster(&mut self) -> Poster {
        poster(&mut self.qp)
    }

    fn put(&mut self, to: u64, from: u64, bytes: u32, flags: u32) -> Result<u64, Status> {
        let (remote, rkey) = (self.target.address() + to, self.target.rkey());
        let (local, lkey) = (self.source.address() + from, self.source.lkey());
        self.poster().put(remote, rkey, local, lkey, bytes, flags)
    }
}

#[test]
fn a_write_moves_every_byte_and_no_other() -> Result<()> {
    const ROOM: usize = (1 << 20) + 128;
    let machine = Machine::take();
    let mut link = Link::new(&machine, ROOM)?;
    for (seed, bytes) in [
        0_usize,
        1,
        3,
        8,
        28,
        29,
        64,
        4095,
        4096,
        4097,
        65_536,
        1 << 20,
    ]
    .into_iter()
    .enumerate()
    {
        let data = pattern(bytes, seed as u8);
        link.source.write(5, &data)?;
        link.target.write(0, &vec![0xee; ROOM])?;
        let request = link.put(64, 5, bytes as u32, 0)?;
        link.poster()
            .wait(request, PATIENCE)
            .with_context(|| format!("{bytes} bytes"))?;
        let arrived = contents(&link.target, ROOM)?;
        ensure!(
            arrived[64..64 + bytes] == data,
            "{bytes} bytes: the data differs"
        );
        ensure!(
            arrived[..64].iter().all(|&b| b == 0xee),
            "{bytes} bytes: written before the target"
        );
        ensure!(
            arrived[64 + bytes..].iter().all(|&b| b == 0xee),
            "{bytes} bytes: written behind the target"
        );
    }
    Ok(())
}

#[test]
fn inline_data_moves_for_every_length() -> Result<()> {
    let machine = Machine::take();
    let mut link = Link::new(&machine, 4096)?;
    for bytes in 1..=28 {
        let data = pattern(bytes, 9);
        link.target.write(0, &[0xee; 64])?;
        let (remote, rkey) = (link.target.address() + 3, link.target.rkey());
        let request = link.poster().put_inline(remote, rkey, &data, 0)?;
        link.poster().wait(request, PATIENCE)?;
        let arrived = contents(&link.target, 64)?;
        ensure!(
            arrived[3..3 + bytes] == data && arrived[3 + bytes] == 0xee && arrived[2] == 0xee,
            "{bytes} bytes"
        );
    }
    Ok(())
}

#[test]
fn a_read_moves_every_byte() -> Result<()> {
    let machine = Machine::take();
    let mut link = Link::new(&machine, 1 << 17)?;
    for bytes in [1_usize, 8, 4097, 100_000] {
        let data = pattern(bytes, 77);
        link.target.write(11, &data)?;
        link.source.write(0, &vec![0xee; 1 << 17])?;
        let (local, lkey) = (link.source.address() + 7, link.source.lkey());
        let (remote, rkey) = (link.target.address() + 11, link.target.rkey());
        let request = link
            .poster()
            .get(local, lkey, remote, rkey, bytes as u32, 0)?;
        link.poster()
            .wait(request, PATIENCE)
            .with_context(|| format!("{bytes} bytes"))?;
        let arrived = contents(&link.source, 1 << 17)?;
        ensure!(
            arrived[7..7 + bytes] == data && arrived[7 + bytes] == 0xee && arrived[6] == 0xee,
            "{bytes} bytes"
        );
    }
    Ok(())
}

#[test]
fn atomics_change_the_peer_and_return_what_was_there() -> Result<()> {
    let machine = Machine::take();
    let mut link = Link::new(&machine, 4096)?;
    link.target.write(8, &100_u64.to_ne_bytes())?;
    let (remote, rkey) = (link.target.address() + 8, link.target.rkey());
    let (local, lkey) = (link.source.address(), link.source.lkey());
    let step = |link: &mut Link, swap: Option<(u64, u64)>, old: u64, new: u64| -> Result<()> {
        let request = match swap {
            Some((compare, swap)) => link
                .poster()
                .compare_swap(remote, rkey, local, lkey, compare, swap)?,
            None => link.poster().fetch_add(remote, rkey, local, lkey, 5)?,
        };
        link.poster().wait(request, PATIENCE)?;
        let mut word = [0; 8];
        link.source.read(0, &mut word)?;
        ensure!(
            u64::from_ne_bytes(word) == old,
            "returned {}, expected {old}",
            u64::from_ne_bytes(word)
        );
        link.target.read(8, &mut word)?;
        ensure!(
            u64::from_ne_bytes(word) == new,
            "left {}, expected {new}",
            u64::from_ne_bytes(word)
        );
        Ok(())
    };
    step(&mut link, None, 100, 105)?;
    step(&mut link, None, 105, 110)?;
    step(&mut link, Some((110, 7)), 110, 7)?;
    step(&mut link, Some((110, 9)), 7, 7)
}

#[test]
fn sends_land_in_receives_and_writes_with_immediate_tell_the_peer() -> Result<()> {
    let machine = Machine::take();
    let options = QueuePairOptions {
        recv_depth: 4,
        ..Default::default()
    };
    let mut link = Link::with(&machine, 8192, &options)?;
    let (landing, lkey) = (link.target.address() + 4096, link.target.lkey());
    // Several laps of the receive ring.
    for round in 0..11_u8 {
        poster(&mut link.peer).recv(landing, lkey, 256)?;
        let data = pattern(200, round);
        link.source.write(0, &data)?;
        let (local, local_key) = (link.source.address(), link.source.lkey());
        let (remote, rkey) = (link.target.address(), link.target.rkey());
        let (request, expected) = if round % 2 == 0 {
            (link.poster().send(local, local_key, 200, 0)?, (2, 0, 4096))
        } else {
            let immediate = 0xabcd_ef00 | u32::from(round);
            (
                link.poster()
                    .put_imm(remote, rkey, local, local_key, 200, immediate, 0)?,
                (1, immediate, 0),
            )
        };
        link.poster().wait(request, PATIENCE)?;
        let cq = link
            .peer
            .recv_cq()
            .context("made with a receive queue")?
            .device_handle();
        // SAFETY: the CQ lives in `link.peer`, and this thread alone uses it.
        let (status, cqe) = unsafe { Poller::new(cq) }.poll(PATIENCE);
        ensure!(status == Status::OK, "round {round}: {status}");
        let immediate = if expected.0 == 1 { cqe.immediate } else { 0 };
        ensure!(
            (u32::from(cqe.kind), immediate) == (expected.0, expected.1),
            "round {round}: {cqe:?}"
        );
        ensure!(
            (cqe.byte_count, cqe.wqe_index) == (200, u64::from(round)),
            "round {round}: {cqe:?}"
        );
        ensure!(
            contents(&link.target, 8192)?[expected.2..][..200] == data,
            "round {round}: the data differs"
        );
    }
    Ok(())
}

#[test]
fn a_ring_of_16_wraps_past_the_16_bit_counter() -> Result<()> {
    const SLOTS: u64 = 512;
    const COUNT: u64 = 70_000;
    let machine = Machine::take();
    let foreign = model_count("foreign_doorbells")?;
    let options = QueuePairOptions {
        send_depth: 16,
        post_timeout: Duration::from_secs(60),
        ..Default::default()
    };
    let mut link = Link::with(&machine, SLOTS as usize * 8, &options)?;
    let (remote, rkey) = (link.target.address(), link.target.rkey());
    link.poster()
        .storm(remote, rkey, SLOTS, 4_000, 1, 1, PATIENCE)?;
    link.poster()
        .storm(remote, rkey, SLOTS, COUNT - 4_000, 4, 4, PATIENCE)?;
    let words = contents(&link.target, SLOTS as usize * 8)?;
    for (slot, word) in words.chunks_exact(8).enumerate() {
        let value = u64::from_ne_bytes(word.try_into()?);
        // The last index that belongs to the slot.
        let expected = (COUNT - 1 - slot as u64) / SLOTS * SLOTS + slot as u64;
        ensure!(
            value == expected,
            "slot {slot} holds {value}, expected {expected}"
        );
    }
    ensure!(
        model_count("foreign_doorbells")? == foreign,
        "a doorbell went to another's page"
    );
    Ok(())
}

#[test]
fn many_threads_post_to_a_shared_qp() -> Result<()> {
    const THREADS: u64 = 4;
    const COUNT: u64 = 2_000;
    let machine = Machine::take();
    let foreign = model_count("foreign_doorbells")?;
    for send_depth in [16, 256] {
        let options = QueuePairOptions {
            send_depth,
            shared: true,
            post_timeout: Duration::from_secs(60),
            ..Default::default()
        };
        let link = Link::with(&machine, 4096, &options)?;
        link.target.write(0, &[0; 8])?;
        // SAFETY: the QP is shared, and outlives the scope in which the threads are.
        let poster = unsafe { SharedPoster::new(link.qp.device_handle()) };
        let (poster, counter) = (&poster, (link.target.address(), link.target.rkey()));
        let statuses = thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS)
                .map(|me| {
                    let local = (link.source.address() + me * 8, link.source.lkey());
                    scope.spawn(move || poster.adds(counter, local, COUNT, PATIENCE))
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("a poster"))
                .collect::<Vec<_>>()
        });
        ensure!(
            statuses == vec![Ok(()); THREADS as usize],
            "depth {send_depth}: {statuses:?}"
        );
        let sum = u64::from_ne_bytes(contents(&link.target, 8)?[..].try_into()?);
        ensure!(
            sum == THREADS * COUNT,
            "depth {send_depth}: {sum} additions arrived"
        );
    }
    ensure!(
        model_count("foreign_doorbells")? == foreign,
        "a doorbell went to another's page"
    );
    Ok(())
}

#[test]
fn a_wrong_rkey_is_a_decoded_error_that_stays() -> Result<()> {
    let machine = Machine::take();
    let mut link = Link::new(&machine, 4096)?;
    link.target.write(0, &[0xee; 4096])?;
    let (remote, rkey) = (link.target.address(), link.target.rkey() ^ 0xff00);
    let (local, lkey) = (link.source.address(), link.source.lkey());

    let good = link.put(0, 0, 8, IBGDA_UNSIGNALED | IBGDA_NO_DOORBELL)?;
    let bad = link
        .poster()
        .put(remote + 8, rkey, local, lkey, 8, IBGDA_NO_DOORBELL)?;
    let behind = link.put(16, 0, 8, 0)?;
    ensure!(link.poster().wait(bad, PATIENCE) == Err(Status::REMOTE_ACCESS));
    ensure!(
        link.poster().wait(good, PATIENCE) == Ok(()),
        "the request before the refused one has succeeded"
    );
    ensure!(
        link.poster().wait(behind, PATIENCE) == Err(Status::REMOTE_ACCESS),
        "never success behind a failure"
    );
    ensure!(
        link.put(0, 0, 8, 0) == Err(Status::REMOTE_ACCESS),
        "a broken QP takes no more requests"
    );

    let error = link
        .qp
        .send_cq()
        .error()
        .context("the error is latched for the host")?;
    ensure!(
        (error.wqe_index, error.qpn, error.opcode, error.syndrome)
            == (bad, link.qp.number(), 8, 0x13),
        "{error:?}"
    );
    let text = error.to_string();
    ensure!(
        text.contains("RDMA_WRITE") && text.contains("rkey"),
        "{text}"
    );
    ensure!(
        contents(&link.target, 64)?[8..].iter().all(|&b| b == 0xee),
        "refused data has arrived"
    );
    Ok(())
}

#[test]
fn rights_and_bounds_of_a_region_hold() -> Result<()> {
    let machine = Machine::take();
    let read_only = |machine: &Machine| -> Result<(Link, MemoryRegion)> {
        let link = Link::new(machine, 4096)?;
        let region = link.far.alloc(4096, Access::READ)?;
        Ok((link, region))
    };
    let (mut link, region) = read_only(&machine)?;
    let (local, lkey) = (link.source.address(), link.source.lkey());
    let request = link
        .poster()
        .get(local, lkey, region.address(), region.rkey(), 64, 0)?;
    ensure!(
        link.poster().wait(request, PATIENCE) == Ok(()),
        "a read of a region that allows it"
    );
    let request = link
        .poster()
        .put(region.address(), region.rkey(), local, lkey, 64, 0)?;
    ensure!(
        link.poster().wait(request, PATIENCE) == Err(Status::REMOTE_ACCESS),
        "a write of a read-only region"
    );

    let (mut link, region) = read_only(&machine)?;
    let (local, lkey) = (link.source.address(), link.source.lkey());
    let request = link
        .poster()
        .get(local, lkey, region.address() + 4090, region.rkey(), 8, 0)?;
    ensure!(
        link.poster().wait(request, PATIENCE) == Err(Status::REMOTE_ACCESS),
        "a read past the end"
    );

    let (mut link, _region) = read_only(&machine)?;
    let (remote, rkey) = (link.target.address(), link.target.rkey());
    let (local, wrong) = (link.source.address(), link.source.lkey() ^ 0xff00);
    let request = link.poster().put(remote, rkey, local, wrong, 8, 0)?;
    let status = link.poster().wait(request, PATIENCE);
    ensure!(
        status == Err(Status(ibgda::abi::ibgda_status::IBGDA_ERR_LOCAL_PROTECTION)),
        "a wrong lkey: {status:?}"
    );
    Ok(())
}

#[test]
fn a_stopped_qp_flushes_what_is_posted() -> Result<()> {
    let machine = Machine::take();
    let mut link = Link::new(&machine, 4096)?;
    for _ in 0..3 {
        link.put(0, 0, 8, IBGDA_NO_DOORBELL)?;
    }
    link.qp.stop()?;
    link.poster().write_doorbell(3)?;
    for index in 0..3 {
        // SAFETY: the CQ lives in the QP, and this thread alone uses it.
        let mut poller = unsafe { Poller::new(link.qp.send_cq().device_handle()) };
        let (status, cqe) = poller.poll(PATIENCE);
        ensure!(
            status == Status::WR_FLUSHED && u32::from(cqe.kind) == IBGDA_CQE_REQ_ERR,
            "{index}: {status}, {cqe:?}"
        );
        ensure!(cqe.wqe_index == index, "{index}: {cqe:?}");
    }
    Ok(())
}

#[test]
fn a_dead_peer_and_a_full_ring_end_in_an_error_in_bounded_time() -> Result<()> {
    let machine = Machine::take();
    let options = QueuePairOptions {
        send_depth: 16,
        post_timeout: Duration::from_secs(5),
        ..Default::default()
    };
    let Link {
        near: _near,
        far: _far,
        source,
        target,
        mut qp,
        peer,
    } = Link::with(&machine, 4096, &options)?;
    drop(peer);
    let start = Instant::now();
    let mut post = || {
        poster(&mut qp).put(
            target.address(),
            target.rkey(),
            source.address(),
            source.lkey(),
            8,
            0,
        )
    };
    let status = loop {
        match post() {
            Ok(index) => ensure!(index < 1_000, "posts to a dead peer succeed for ever"),
            Err(status) => break status,
        }
    };
    let retry = Status(ibgda::abi::ibgda_status::IBGDA_ERR_TRANSPORT_RETRY_EXCEEDED);
    ensure!(status == retry || status == Status::QUEUE_FULL, "{status}");
    ensure!(
        start.elapsed() < Duration::from_secs(30),
        "{:?}",
        start.elapsed()
    );
    Ok(())
}

#[test]
fn a_doorbell_on_anothers_page_is_noticed_and_does_nothing() -> Result<()> {
    let machine = Machine::take();
    let link = Link::new(&machine, 4096)?;
    let other = make_qp(&link.near, &QueuePairOptions::default())?;
    ensure!(
        link.qp.doorbell_page() != other.doorbell_page(),
        "each QP has a page of its own"
    );
    let before = model_count("foreign_doorbells")?;

    // SAFETY: both QPs live, and this thread alone uses their handles.
    let mut mixed: ibgda_qp = unsafe { *link.qp.device_handle() };
    // SAFETY: as above.
    mixed.doorbell = unsafe { (*other.device_handle()).doorbell };
    // SAFETY: `mixed` names the same live queues.
    let mut mixed_poster = unsafe { Poster::new(&raw mut mixed) };
    let (remote, rkey) = (link.target.address(), link.target.rkey());
    let request = mixed_poster.put(
        remote,
        rkey,
        link.source.address(),
        link.source.lkey(),
        8,
        0,
    )?;
    ensure!(
        mixed_poster.wait(request, A_MOMENT) == Err(Status::TIMEOUT),
        "another's doorbell page rang this QP"
    );
    ensure!(
        model_count("foreign_doorbells")? == before + 1,
        "the model saw no foreign doorbell"
    );
    Ok(())
}

#[test]
fn map_device_refuses_what_has_no_pages_and_rounds_when_asked() -> Result<()> {
    let machine = Machine::take();
    let link = Link::new(&machine, 4096)?;
    let memory = MmapRaw::from(MmapOptions::new().len(4 * 4096).map_anon()?);
    let map = |offset: usize, length: usize, rounding| {
        // SAFETY: the mapping outlives every region here; nothing else uses its contents. `offset` may point behind it, for
        // the sake of the refusal.
        unsafe {
            link.far.map_device(
                memory.as_mut_ptr().wrapping_add(offset),
                length,
                Access::all(),
                rounding,
            )
        }
    };
    for (offset, length) in [(1, 4096), (0, 100), (0, 0), (4096, 0)] {
        let error = map(offset, length, Rounding::Exact)
            .err()
            .with_context(|| format!("{offset}, {length} was taken"))?;
        ensure!(
            error.errno() == libc::EINVAL && error.origin() == Source::Argument,
            "{error}"
        );
        ensure!(!error.advice().is_empty(), "{error}: what to do?");
    }
    ensure!(
        map(0, 0, Rounding::Outward).is_err(),
        "nothing stays nothing when rounded"
    );
    ensure!(map(0, 4096, Rounding::Exact)?.length() == 4096);

    let error = map(1 << 40, 4096, Rounding::Exact)
        .err()
        .context("memory that is not there was taken")?;
    ensure!(
        error.origin() == Source::Verbs && error.errno() == libc::EFAULT,
        "{error}"
    );

    // Rounded, its own bytes arrive where they should.
    let region = map(4090, 20, Rounding::Outward)?;
    let mut link = link;
    link.source.write(0, &[0x5a; 20])?;
    let (local, lkey) = (link.source.address(), link.source.lkey());
    let request = link
        .poster()
        .put(region.address(), region.rkey(), local, lkey, 20, 0)?;
    link.poster().wait(request, PATIENCE)?;
    // SAFETY: inside the mapping, and the write has completed.
    let arrived = unsafe { std::slice::from_raw_parts(memory.as_ptr(), 2 * 4096) };
    ensure!(arrived[4090..4110] == [0x5a; 20] && arrived[4089] == 0 && arrived[4110] == 0);
    Ok(())
}

#[test]
fn queues_refuse_arguments_that_cannot_work() -> Result<()> {
    let machine = Machine::take();
    let context = open(&machine, 0)?;
    for entries in [0, 3, 65_536, u32::MAX] {
        let error = context
            .create_cq(entries)
            .err()
            .with_context(|| format!("a CQ of {entries} was made"))?;
        ensure!(error.errno() == libc::EINVAL, "{error}");
    }
    let cq = context.create_cq(16)?;
    let refuse = |options: QueuePairOptions, recv: bool, errno| -> Result<()> {
        let error = context
            .create_qp(&options, &cq, recv.then_some(&cq))
            .err()
            .context("a QP was made")?;
        ensure!(error.errno() == errno, "{error}");
        Ok(())
    };
    let fits = QueuePairOptions {
        send_depth: 16,
        ..Default::default()
    };
    refuse(
        QueuePairOptions {
            send_depth: 17,
            ..fits.clone()
        },
        false,
        libc::EINVAL,
    )?;
    refuse(
        QueuePairOptions {
            send_depth: 32,
            ..fits.clone()
        },
        false,
        libc::EINVAL,
    )?;
    refuse(
        QueuePairOptions {
            recv_depth: 2,
            ..fits.clone()
        },
        true,
        libc::EINVAL,
    )?;
    refuse(
        QueuePairOptions {
            recv_depth: 4,
            ..fits.clone()
        },
        false,
        libc::EINVAL,
    )?;
    refuse(
        QueuePairOptions {
            rnr_retry: 7,
            ..fits.clone()
        },
        false,
        libc::EINVAL,
    )?;
    refuse(
        QueuePairOptions {
            recv_depth: 4,
            ..fits.clone()
        },
        true,
        libc::EBUSY,
    )?;
    // None of that has used the CQ up; a QP does.
    let _qp = context.create_qp(&fits, &cq, None)?;
    refuse(fits, false, libc::EBUSY)
}

#[test]
fn a_bad_address_is_refused_and_a_second_connect_too() -> Result<()> {
    let machine = Machine::take();
    let link = Link::new(&machine, 4096)?;
    let error = link
        .qp
        .connect(&link.peer.address())
        .err()
        .context("connected twice")?;
    ensure!(error.errno() == libc::EISCONN, "{error}");
    let mut address = link.peer.address().to_bytes();
    address[9] ^= 1;
    let error = QpAddress::from_bytes(&address)
        .err()
        .context("a damaged address was taken")?;
    ensure!(
        error.origin() == Source::Address && error.to_string().contains("checksum"),
        "{error}"
    );
    // Also as a struct, which no checksum guards.
    let qp = make_qp(&link.near, &QueuePairOptions::default())?;
    let error = qp
        .connect(&QpAddress {
            lid: 0,
            ..link.peer.address()
        })
        .err()
        .context("LID 0 was taken")?;
    ensure!(error.to_string().contains("LID 0x0"), "{error}");
    Ok(())
}

#[test]
fn a_cq_of_another_context_is_refused_and_stays_its_own_context_s() -> Result<()> {
    let machine = Machine::take();
    let options = QueuePairOptions::default();
    let (near, far) = (open(&machine, 0)?, open(&machine, 1)?);
    let again = open(&machine, 1)?;
    let cq = far.create_cq(options.send_depth)?;
    for context in [&near, &again] {
        let error = context.create_qp(&options, &cq, None).err();
        let error = error.context("a QP on another context's CQ")?;
        ensure!(
            error.errno() == libc::EINVAL && error.to_string().contains("another context"),
            "{error}"
        );
    }
    far.create_qp(&options, &cq, None)?;
    Ok(())
}

/// Memory at an address where nothing is mapped.
fn map_at(address: usize, bytes: usize) -> *mut u8 {
    // SAFETY: nothing that is mapped is replaced.
    let memory = unsafe {
        libc::mmap(
            ptr::without_provenance_mut(address),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
            -1,
            0,
        )
    };
    assert_eq!(memory.addr(), address, "something is mapped there");
    memory.cast()
}

/// A child's copies are its own to drop, and what they stand for is not.
#[test]
fn a_forked_child_that_drops_everything_takes_nothing_from_its_parent() -> Result<()> {
    let machine = Machine::take();
    let mut link = Link::new(&machine, 4096)?;
    let objects = || model_objects(&["pd", "mkey", "cq", "qp", "umem", "uar"]);
    let before = objects()?;
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let of_broker: Vec<_> = maps
        .lines()
        .filter(|line| line.ends_with("/dev/ibgda"))
        .filter_map(|line| line.split_once(' ')?.0.split_once('-'))
        .filter_map(|(from, to)| {
            let number = |digits| usize::from_str_radix(digits, 16).ok();
            Some((number(from)?, number(to)?))
        })
        .collect();
    ensure!(of_broker.len() >= 3, "status, queues, doorbells: {maps}");
    let end = in_child(|| {
        // SAFETY: a copy for this process alone, which ends without dropping the other.
        let mut copy = unsafe { ptr::read(&link) };
        let refused = |errno: Option<i32>| errno == Some(libc::EPERM);
        // What the child maps where the parent's mappings are, which it has not inherited. Before anything else of its
        // could be mapped there.
        let own: Vec<_> = of_broker
            .iter()
            .map(|&(from, to)| map_at(from, to - from))
            .collect();
        let start = Instant::now();
        let again = copy.near.rebind(Duration::from_secs(3600));
        let at_once = start.elapsed() < Duration::from_secs(60);
        let rebound = refused(again.err().map(|error| error.errno())) && at_once;
        let stopped = refused(copy.qp.stop().err().map(|error| error.errno()));
        let memory = copy.near.alloc(4096, Access::all());
        let allocated = refused(memory.err().map(|error| error.errno()));
        let nothing = copy.near.state().state == 0 && copy.qp.counters() == QpCounters::default();
        drop(copy);
        for memory in &own {
            // SAFETY: mapped above for this process, if the drop has left it; if not, a signal ends the child.
            unsafe { memory.write_volatile(1) };
        }
        [stopped, allocated, nothing, rebound]
            .iter()
            .position(|right| !right)
            .map_or(0, |which| 1 + which as i32)
    });
    ensure!(end == End::Exit(0), "the child ended by {end:?}");
    ensure!(objects()? == before, "objects of the parent are gone");
    let data = pattern(4096, 9);
    link.source.write(0, &data)?;
    let request = link.put(0, 0, 4096, 0)?;
    link.poster().wait(request, PATIENCE)?;
    ensure!(contents(&link.target, 4096)? == data, "the data differs");
    Ok(())
}

#[test]
fn opening_says_what_is_wrong() -> Result<()> {
    let mut machine = Machine::take();
    let refuse = |nic: &str, gpu: Bdf, errno: i32, words: &str| -> Result<()> {
        // With any other route, auto would find one that needs neither GPU nor permission.
        let options = OpenOptions {
            route: Route::Direct,
            ..OpenOptions::new(nic, gpu)
        };
        match Context::open(&options) {
            Ok(_) => bail!("{nic}, {gpu} was opened"),
            Err(error) => ensure!(
                error.errno() == errno && error.to_string().contains(words),
                "{error}"
            ),
        }
        Ok(())
    };
    let (nic, gpu) = (machine.nics[0], machine.gpu);
    let absent = Bdf {
        domain: 0,
        bus: 0xfe,
        device: 0,
        function: 0,
    };
    refuse("mlx5_77", gpu, libc::EINVAL, "ibv_devices")?;
    refuse("../mlx5_0", gpu, libc::EINVAL, "not the name")?;
    refuse(&absent.to_string(), gpu, libc::ENODEV, "lspci")?;
    refuse(&nic.to_string(), absent, libc::ENODEV, "lspci")?;
    refuse(&nic.to_string(), machine.nics[1], libc::EINVAL, "GPU")?;
    refuse(&gpu.to_string(), gpu, libc::EINVAL, "RDMA NIC")?;
    let error = Context::open(&OpenOptions {
        port: 9,
        ..OpenOptions::new(nic.to_string(), gpu)
    })
    .err()
    .context("port 9 was opened")?;
    ensure!(error.to_string().contains("port 9"), "{error}");

    machine.withdraw();
    refuse(
        &nic.to_string(),
        gpu,
        libc::EACCES,
        "/sys/kernel/config/ibgda/allow",
    )
}

/// Uses everything once, then drops it in one of several orders; and fails half-way once.
fn use_and_drop(machine: &Machine, order: usize) -> Result<()> {
    let options = QueuePairOptions {
        recv_depth: 8,
        ..Default::default()
    };
    let mut link = Link::with(machine, 65_536, &options)?;
    let request = link.put(0, 0, 4096, 0)?;
    link.poster().wait(request, PATIENCE)?;
    let Link {
        near,
        far,
        source,
        target,
        qp,
        peer,
    } = link;
    match order % 3 {
        0 => drop((near, far, source, target, qp, peer)),
        1 => drop((qp, peer, source, target, near, far)),
        _ => drop((source, near, qp, target, far, peer)),
    }
    let context = open(machine, 0)?;
    let cq = context.create_cq(16)?;
    let too_small = context.create_qp(&QueuePairOptions::default(), &cq, None);
    ensure!(too_small.is_err(), "a QP with a CQ that is too small");
    Ok(())
}

#[test]
fn objects_are_gone_when_all_is_dropped_in_any_order() -> Result<()> {
    let machine = Machine::take();
    // The driver makes a few things once. UARs stay with this process, as the broker promises.
    let objects = || model_objects(&["pd", "mkey", "cq", "qp", "umem"]);
    use_and_drop(&machine, 0)?;
    let before = objects()?;
    for order in 0..6 {
        use_and_drop(&machine, order)?;
        ensure!(
            objects()? == before,
            "order {order}: {before} before, {} after",
            objects()?
        );
    }
    Ok(())
}

#[test]
fn nothing_is_left_of_a_process_that_ended() -> Result<()> {
    const CHILD: &str = "IBGDA_TEST_CHILD";
    let machine = Machine::take();
    if let Ok(order) = env::var(CHILD) {
        return use_and_drop(&machine, order.parse()?);
    }
    let objects = || {
        model_objects(&[
            "uar", "uctx", "pd", "mkey", "cq", "qp", "eq", "umem", "srq", "xrcd",
        ])
    };
    let child = |order: usize| -> Result<()> {
        let output = Command::new(env::current_exe()?)
            .args(["--exact", "nothing_is_left_of_a_process_that_ended"])
            .env(CHILD, order.to_string())
            .output()?;
        ensure!(
            output.status.success(),
            "the child failed: {}",
            String::from_utf8_lossy(&output.stdout)
        );
        Ok(())
    };
    child(0)?;
    let before = objects()?;
    for order in 0..4 {
        child(order)?;
    }
    // The broker frees pages when it has seen their owner's death.
    let deadline = Instant::now() + Duration::from_secs(20);
    while objects()? != before {
        ensure!(
            Instant::now() < deadline,
            "{before} before, {} after",
            objects()?
        );
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

#[test]
fn the_c_abi_moves_data_and_its_errors_have_words() -> Result<()> {
    /// One side of a connection, made by C calls alone.
    struct Side {
        context: *mut capi::ibgda_context,
        mr: *mut capi::ibgda_mr,
        cq: *mut capi::ibgda_host_cq,
        qp: *mut capi::ibgda_host_qp,
    }
    fn check(errno: i32) -> Result<()> {
        // SAFETY: the message is this thread's and terminated.
        let message = unsafe { CStr::from_ptr(capi::ibgda_last_error()) };
        ensure!(errno == 0, "errno {errno}: {message:?}");
        Ok(())
    }
    let machine = Machine::take();
    let memory: [MmapRaw; 2] = [
        MmapOptions::new().len(4096).map_anon()?.into(),
        MmapOptions::new().len(4096).map_anon()?.into(),
    ];
    let gpu = CString::new(machine.gpu.to_string())?;
    let side = |index: usize| -> Result<Side> {
        let nic = CString::new(machine.nics[index].to_string())?;
        let attr = capi::ibgda_open_attr {
            size: size_of::<capi::ibgda_open_attr>() as u32,
            port: 1,
            nic: nic.as_ptr(),
            gpu: gpu.as_ptr(),
            route: capi::IBGDA_ROUTE_AUTO,
            reserved: 0,
        };
        let access = capi::IBGDA_ACCESS_READ | capi::IBGDA_ACCESS_WRITE;
        let qp_attr = capi::ibgda_qp_attr {
            access,
            ..Default::default()
        };
        let mut side = Side {
            context: null_mut(),
            mr: null_mut(),
            cq: null_mut(),
            qp: null_mut(),
        };
        let start = memory[index].as_mut_ptr();
        // SAFETY: all arguments are valid, and the memory outlives the region.
        unsafe {
            check(capi::ibgda_open(&attr, &mut side.context))?;
            let unaligned = capi::ibgda_map_device(
                side.context,
                start.wrapping_add(1).cast(),
                4096,
                access,
                &mut side.mr,
            );
            ensure!(unaligned == libc::EINVAL && side.mr.is_null());
            ensure!(
                CStr::from_ptr(capi::ibgda_last_error())
                    .to_str()?
                    .contains("IBGDA_MAP_ROUND")
            );
            check(capi::ibgda_map_device(
                side.context,
                start.cast(),
                4096,
                access,
                &mut side.mr,
            ))?;
            check(capi::ibgda_create_cq(side.context, 128, &mut side.cq))?;
            check(capi::ibgda_create_qp(
                side.context,
                &qp_attr,
                side.cq,
                null(),
                &mut side.qp,
            ))?;
        }
        Ok(side)
    };
    let sides = [side(0)?, side(1)?];
    let mut addresses = [[0; capi::IBGDA_ADDRESS_BYTES]; 2];
    let mut regions = [ibgda_region::default(); 2];
    let mut handle = null_mut();
    // SAFETY: all arguments are valid; each object is destroyed once, the contexts first; the kernel's call ends before.
    unsafe {
        for i in 0..2 {
            check(capi::ibgda_qp_address(
                sides[i].qp,
                addresses[i].as_mut_ptr(),
            ))?;
            check(capi::ibgda_mr_region(sides[i].mr, &mut regions[i]))?;
        }
        ensure!(
            capi::ibgda_qp_connect(sides[0].qp, addresses[1].as_ptr().cast(), 63) == libc::EINVAL,
            "63 bytes were taken"
        );
        for i in 0..2 {
            check(capi::ibgda_qp_connect(
                sides[i].qp,
                addresses[1 - i].as_ptr().cast(),
                capi::IBGDA_ADDRESS_BYTES,
            ))?;
        }
        memory[0].as_mut_ptr().write_bytes(0x3c, 4096);
        check(capi::ibgda_qp_device_handle(sides[0].qp, &mut handle))?;
        let mut poster = Poster::new(handle);
        poster.put_region(&regions[1], 0, &regions[0], 0, 4096)?;
        poster.quiet(PATIENCE)?;
        // As long as in the first version, and as in a later one, whose members this library does not know.
        for later in [0, 16] {
            let mut counters = [capi::ibgda_qp_counters::default(); 2];
            counters[0].size = size_of::<capi::ibgda_qp_counters>() as u32 + later;
            counters[1].posted = 7;
            check(capi::ibgda_get_qp_counters(sides[0].qp, &mut counters[0]))?;
            let now = counters[0];
            ensure!(
                (now.posted, now.told, now.completed, now.failed) == (1, 1, 1, 0),
                "{now:?}"
            );
            ensure!(
                counters[1].posted == if later == 0 { 7 } else { 0 },
                "what is not known is 0, and nothing is written behind: {counters:?}"
            );
        }
        ensure!(
            std::slice::from_raw_parts(memory[1].as_ptr(), 4096)
                .iter()
                .all(|&b| b == 0x3c),
            "the data differs"
        );
        for side in sides {
            check(capi::ibgda_close(side.context))?;
            check(capi::ibgda_destroy_cq(side.cq))?;
            check(capi::ibgda_unmap_device(side.mr))?;
            check(capi::ibgda_destroy_qp(side.qp))?;
        }
    }
    Ok(())
}

#[test]
fn a_reset_of_the_nic_ends_a_wait_and_the_session_comes_back() -> Result<()> {
    let machine = Machine::take();
    let Link {
        mut near,
        far,
        source,
        target,
        mut qp,
        peer,
    } = Link::new(&machine, 4096)?;
    let start = Instant::now();
    let (status, waited) = thread::scope(|scope| -> Result<_> {
        let nic = machine.nics[0];
        let injector = scope.spawn(move || {
            thread::sleep(Duration::from_millis(100));
            support::inject_fatal_error(nic)
        });
        // SAFETY: the CQ lives in the QP; this thread alone uses it.
        let (status, _) = unsafe { Poller::new(qp.send_cq().device_handle()) }.poll(PATIENCE);
        let waited = start.elapsed();
        injector.join().expect("the injector does not panic")?;
        Ok((status, waited))
    })?;
    ensure!(status == Status::NIC_LOST, "{status}");
    ensure!(
        waited < Duration::from_nanos(PATIENCE / 2),
        "the wait went on for {waited:?}"
    );
    let state = near.state();
    ensure!(
        state.state != 1 && state.reason_text() == "NIC reset",
        "{state:?}"
    );
    let put = poster(&mut qp).put(
        target.address(),
        target.rkey(),
        source.address(),
        source.lkey(),
        8,
        0,
    );
    ensure!(put == Err(Status::NIC_LOST), "{put:?}");
    let error = near
        .create_cq(16)
        .err()
        .context("a lost session made a CQ")?;
    ensure!(
        matches!(error.errno(), libc::ENOLINK | libc::EIO),
        "{error}"
    );

    drop((qp, peer, source));
    near.rebind(Duration::from_nanos(PATIENCE))?;
    ensure!(near.pair().generation > 1, "{:?}", near.pair());
    let source = near.alloc(4096, Access::all())?;
    let (qp, peer) = (
        make_qp(&near, &QueuePairOptions::default())?,
        make_qp(&far, &QueuePairOptions::default())?,
    );
    connect(&qp, &peer)?;
    let mut link = Link {
        near,
        far,
        source,
        target,
        qp,
        peer,
    };
    link.source.write(0, &pattern(4096, 3))?;
    let request = link.put(0, 0, 4096, 0)?;
    link.poster().wait(request, PATIENCE)?;
    ensure!(contents(&link.target, 4096)? == pattern(4096, 3));
    Ok(())
}

/// A port that is down as long as this lives.
struct Down(&'static str);

impl Down {
    fn new(nic: &'static str) -> Result<Self> {
        ask_model("link", &[nic, "down"])?;
        Ok(Self(nic))
    }
}

impl Drop for Down {
    fn drop(&mut self) {
        if let Err(error) = ask_model("link", &[self.0, "up"]) {
            eprintln!("link {} up: {error:#}", self.0);
        }
    }
}

/// The broker grants another generation as soon as the NIC is back, whether its port is or not: what has been granted is kept
/// until the NIC can be opened.
#[test]
fn rebinding_a_nic_whose_port_is_down_fails_until_it_is_up() -> Result<()> {
    let machine = Machine::take();
    for route in [Route::Direct, Route::Proxy] {
        let mut near = rig::open(&machine, 0, route)?;
        let down = Down::new("nic0")?;
        support::inject_fatal_error(machine.nics[0])?;
        wait_until("it is lost", || near.state().state != 1);
        let mut rebind = || near.rebind(Duration::from_millis(200)).err();
        let fails = |error: &ibgda::Error| {
            error.errno() == libc::ENETDOWN && error.to_string().contains("port 1")
        };
        // Until then it is not back at all.
        wait_until("only its port is down", || {
            rebind().as_ref().is_some_and(fails)
        });
        // The same once more, and not that it is not lost.
        let again = rebind().context("the port is down")?;
        ensure!(fails(&again), "{route}: {again}");
        drop(down);
        near.rebind(Duration::from_nanos(PATIENCE))?;
        near.create_cq(16).with_context(|| route.to_string())?;
    }
    Ok(())
}
