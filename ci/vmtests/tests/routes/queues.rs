// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queues of other kinds than the usual: collapsed CQs, BlueFlame doorbell pages, queues in a dma-buf.

use crate::{
    Names, check,
    link::{self, Link, PATIENCE, connect, open},
    support::{Machine, model_count},
};
use anyhow::{Context as _, Result, ensure};
use ibgda::{
    Access, CompletionQueueOptions, Context, ExportedMemory, QueuePair, QueuePairOptions, Route,
    Status,
    abi::{
        IBGDA_BLUEFLAME, IBGDA_COLLAPSED, IBGDA_CPU_DOORBELL, IBGDA_ON_GPU, IBGDA_SHARED,
        ibgda_error, ibgda_qp, ibgda_region, ibgda_status,
    },
    capi,
};
use ibgda_test_kernels::test_clock_ns;
use ibgda_vmtests::{
    machine::{self, wait_for_rdma},
    pair::driver,
};
use memmap2::{MmapOptions, MmapRaw};
use std::{
    ffi::CStr,
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    ptr::{self, null, null_mut},
    sync::Arc,
};

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
    memory: None,
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
    Link::made(near, far, 4096, make)
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

/// mlx5_core tries out once, for a tenth of a second, whether writes combine, and an emulated machine that has other work
/// can be too slow for it. Bound anew it tries again.
fn combining<T>(make: impl Fn() -> Result<T>) -> Result<T> {
    for _ in 0..8 {
        match make() {
            Err(error) if error.to_string().contains("does not combine writes") => {
                println!("{error}");
                for nic in machine::nics() {
                    driver("unbind", nic)?;
                    driver("bind", nic)?;
                    wait_for_rdma(nic);
                }
            }
            made => return made,
        }
    }
    make()
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
    let mut link = combining(|| link(&machine, Route::Direct, qp))?;
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

/// Pages of a memfd, mapped here and exported by udmabuf: what a GPU's memory is to the NIC and to who posts.
struct Udmabuf {
    map: MmapRaw,
    file: OwnedFd,
}

impl Udmabuf {
    fn new(bytes: usize) -> Result<Self> {
        let bytes = bytes.next_multiple_of(4096);
        // SAFETY: a new descriptor, owned at once.
        let memfd = unsafe {
            let memfd = libc::memfd_create(c"queue".as_ptr(), libc::MFD_ALLOW_SEALING);
            ensure!(memfd >= 0, "memfd: {}", io::Error::last_os_error());
            File::from(OwnedFd::from_raw_fd(memfd))
        };
        memfd.set_len(bytes as u64)?;
        // SAFETY: takes no pointer.
        let sealed =
            unsafe { libc::fcntl(memfd.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) };
        ensure!(sealed == 0, "seal: {}", io::Error::last_os_error());
        /// `struct udmabuf_create` and `UDMABUF_CREATE`.
        #[repr(C)]
        struct Create {
            memfd: u32,
            flags: u32,
            offset: u64,
            size: u64,
        }
        const CREATE: libc::Ioctl = 0x4018_7542;
        let device = File::options()
            .read(true)
            .write(true)
            .open("/dev/udmabuf")?;
        let create = Create {
            memfd: memfd.as_raw_fd() as u32,
            flags: 0,
            offset: 0,
            size: bytes as u64,
        };
        // SAFETY: the argument is udmabuf's.
        let file = unsafe { libc::ioctl(device.as_raw_fd(), CREATE, &create) };
        ensure!(file >= 0, "udmabuf: {}", io::Error::last_os_error());
        Ok(Self {
            map: MmapOptions::new().len(bytes).map_raw(&memfd)?,
            // SAFETY: new, and owned by nobody else.
            file: unsafe { OwnedFd::from_raw_fd(file) },
        })
    }

    fn memory(&self, offset: u64) -> Result<Arc<ExportedMemory>> {
        // SAFETY: the tests keep the mapping until all queues are gone, and use each part of it for one queue.
        Ok(unsafe {
            ExportedMemory::mapped(
                self.file.try_clone()?,
                offset,
                self.map.as_mut_ptr().add(offset as usize),
                self.map.len() - offset as usize,
            )
        }?)
    }
}

#[test]
fn queues_lie_in_a_dma_buf() -> Result<()> {
    let machine = Machine::take();
    for depth in [16, 1024] {
        let mut qp_options = QueuePairOptions {
            send_depth: depth,
            recv_depth: 4,
            ..options()
        };
        let mut cq_options = CompletionQueueOptions {
            depth,
            ..Default::default()
        };
        // A page before them, so that an offset counts.
        let queues = Udmabuf::new(4096 + qp_options.memory_bytes())?;
        let completions = Udmabuf::new(cq_options.memory_bytes())?;
        // What is there before must not matter.
        for dmabuf in [&queues, &completions] {
            // SAFETY: no queue is there yet.
            unsafe { dmabuf.map.as_mut_ptr().write_bytes(0x11, dmabuf.map.len()) };
        }
        qp_options.memory = Some(queues.memory(4096)?);
        cq_options.memory = Some(completions.memory(0)?);

        let (near, far) = (
            open(&machine, 0, Route::Direct)?,
            open(&machine, 1, Route::Direct)?,
        );
        let source = near.alloc(1 << 18, Access::all())?;
        let target = far.alloc(1 << 18, Access::all())?;
        let send_cq = near.create_cq_with(&cq_options)?;
        let recv_cq = near.create_cq(4)?;
        let qp = near.create_qp(&qp_options, &send_cq, Some(&recv_cq))?;
        ensure!(mode(&qp) == IBGDA_ON_GPU, "{:#x}", mode(&qp));
        let peer = link::make_qp(
            &far,
            &QueuePairOptions {
                recv_depth: 4,
                ..options()
            },
        )?;
        connect(&qp, &peer)?;
        // SAFETY: constant after creation.
        let ring = unsafe { (*qp.device_handle()).send_ring };
        let from = queues.map.as_mut_ptr().wrapping_add(4096);
        ensure!((from..from.wrapping_add(4096)).contains(&ring), "{ring:p}");
        let mut link = Link {
            near,
            far,
            source,
            target,
            qp,
            peer,
        };
        link.moves_data()?;
        let counters = link.qp.counters();
        ensure!(counters.told == counters.completed, "{counters:?}");
        link.fails_at_a_wrong_rkey(false)?;

        // Neither is used twice at a time.
        let again = link
            .near
            .create_cq_with(&cq_options)
            .err()
            .context("twice")?;
        ensure!(again.errno() == libc::EBUSY, "{again}");
        let near = link.near;
        drop((link.qp, link.peer, link.source, link.target, link.far));
        drop((send_cq, recv_cq));
        // SAFETY: the queues are gone; so nobody writes there.
        let first = unsafe { queues.map.as_ptr().read() };
        ensure!(first == 0x11, "the page before the queue was written");
        // It is free again when its queue is gone, and when one could not be made: the second QP's CQ is of another context.
        let cq = near.create_cq_with(&cq_options)?;
        let stranger = open(&machine, 1, Route::Direct)?;
        ensure!(stranger.create_qp(&qp_options, &cq, None).is_err());
        let recv_cq = near.create_cq(4)?;
        near.create_qp(&qp_options, &cq, Some(&recv_cq))?;
    }
    Ok(())
}

/// The same through the C ABI.
#[test]
fn queues_of_the_c_abi_lie_in_a_dma_buf() -> Result<()> {
    let machine = Machine::take();
    let names = Names::of(&machine)?;
    let attr = names.attr(capi::IBGDA_ROUTE_DIRECT);
    let (mut context, mut heap, mut cq, mut qp) = (null_mut(), null_mut(), null_mut(), null_mut());
    let (mut peer_cq, mut peer) = (null_mut(), null_mut());
    let mut qp_attr = capi::ibgda_qp_attr {
        send_depth: 16,
        access: capi::IBGDA_ACCESS_WRITE,
        retry_count: 1,
        rnr_retry: capi::IBGDA_NO_RETRIES,
        ack_timeout: 10,
        ..Default::default()
    };
    let mut cq_attr = capi::ibgda_cq_attr {
        entries: 16,
        ..Default::default()
    };
    let (mut queues, mut completions) = (0, 0);
    // SAFETY: the arguments are valid.
    unsafe {
        check(capi::ibgda_open(&attr, &mut context))?;
        check(capi::ibgda_qp_memory_bytes(&qp_attr, &mut queues))?;
        check(capi::ibgda_cq_memory_bytes(&cq_attr, &mut completions))?;
    }
    let (queues, completions) = (Udmabuf::new(queues)?, Udmabuf::new(completions)?);
    let import = |dmabuf: &Udmabuf| -> Result<*mut capi::ibgda_queue_memory> {
        let (mut memory, file) = (null_mut(), dmabuf.file.try_clone()?);
        let map = &dmabuf.map;
        // SAFETY: mapped until after the queues have ended, and used for one queue. The file may be closed after it.
        check(unsafe {
            capi::ibgda_import_queue_memory(
                file.as_raw_fd(),
                0,
                map.as_mut_ptr().cast(),
                map.len(),
                &mut memory,
            )
        })?;
        Ok(memory)
    };
    let memories = [import(&queues)?, import(&completions)?];
    (qp_attr.memory, cq_attr.memory) = (memories[0], memories[1]);
    let mut addresses = [[0_u8; capi::IBGDA_ADDRESS_BYTES]; 2];
    let mut region = ibgda_region::default();
    let (mut error, mut text, mut handle) = (ibgda_error::default(), [0_u8; 512], null_mut());
    // SAFETY: as above; each object is destroyed once, and the kernel's calls have ended before.
    unsafe {
        check(capi::ibgda_create_cq_with(context, &cq_attr, &mut cq))?;
        check(capi::ibgda_create_qp(
            context,
            &qp_attr,
            cq,
            null(),
            &mut qp,
        ))?;
        let twice = capi::ibgda_create_cq_with(context, &cq_attr, &mut null_mut());
        ensure!(twice == libc::EBUSY, "errno {twice}");
        check(capi::ibgda_create_heap(
            context,
            null_mut(),
            4096,
            capi::IBGDA_ACCESS_WRITE,
            &mut heap,
        ))?;
        check(capi::ibgda_heap_region(heap, &mut region))?;
        // A peer of the usual kind.
        (qp_attr.memory, cq_attr.memory) = (null(), null());
        check(capi::ibgda_create_cq_with(context, &cq_attr, &mut peer_cq))?;
        check(capi::ibgda_create_qp(
            context,
            &qp_attr,
            peer_cq,
            null(),
            &mut peer,
        ))?;
        for (qp, address) in [qp, peer].into_iter().zip(&mut addresses) {
            check(capi::ibgda_qp_address(qp, address.as_mut_ptr()))?;
        }
        for (qp, address) in [peer, qp].into_iter().zip(&addresses) {
            check(capi::ibgda_qp_connect(
                qp,
                address.as_ptr().cast(),
                address.len(),
            ))?;
        }
        check(capi::ibgda_qp_device_handle(qp, &mut handle))?;
        ensure!((*handle).mode & IBGDA_ON_GPU != 0, "{:#x}", (*handle).mode);
        let ring = (*handle).send_ring.addr();
        let start = queues.map.as_ptr().addr();
        ensure!(
            (start..start + queues.map.len()).contains(&ring),
            "{ring:#x}"
        );
        let from: *mut u64 = ptr::with_exposed_provenance_mut(region.address as usize);
        let put = |index: u64, rkey: u32| {
            from.write(index + 1);
            let to = region.address + 8 * (1 + index % 64);
            let posted = ibgda_put(
                handle,
                to,
                rkey,
                region.address,
                region.lkey,
                8,
                0,
                null_mut(),
            );
            let ended = ibgda_quiet(handle, test_clock_ns() + PATIENCE);
            (Status(posted), Status(ended))
        };
        // Several laps of the ring.
        for index in 0..100 {
            let (posted, ended) = put(index, region.rkey);
            ensure!(
                (posted, ended) == (Status::OK, Status::OK),
                "{posted}, {ended}"
            );
            let there = from.add(1 + index as usize % 64).read_volatile();
            ensure!(there == index + 1, "{there} at {index}");
        }
        check(capi::ibgda_qp_error(qp, &mut error))?;
        ensure!(error.status == 0, "{error:?}");
        let (_, ended) = put(100, region.rkey ^ 0xff00);
        ensure!(ended != Status::OK, "a wrong rkey was taken");
        check(capi::ibgda_qp_error(qp, &mut error))?;
        ensure!(
            Status(error.status) == ended && error.wqe_index == 100,
            "{error:?}"
        );
        check(capi::ibgda_error_text(
            &error,
            text.as_mut_ptr().cast(),
            text.len(),
        ))?;
        let words = CStr::from_bytes_until_nul(&text)?.to_string_lossy();
        ensure!(
            words.contains("WQE 100") && words.contains("rkey"),
            "{words}"
        );
        // Without CUDA, it says so.
        for gpu in [null(), attr.gpu] {
            let mut there = null_mut();
            let none = capi::ibgda_qp_device_handle_on(qp, gpu, &mut there);
            let words = CStr::from_ptr(capi::ibgda_last_error()).to_string_lossy();
            ensure!(
                none == libc::ENODEV && words.contains("libcuda.so.1"),
                "{none}: {words}"
            );
        }
        for qp in [qp, peer] {
            check(capi::ibgda_destroy_qp(qp))?;
        }
        for cq in [cq, peer_cq] {
            check(capi::ibgda_destroy_cq(cq))?;
        }
        for memory in memories {
            check(capi::ibgda_destroy_queue_memory(memory))?;
        }
        check(capi::ibgda_destroy_heap(heap))?;
        check(capi::ibgda_close(context))?;
    }
    Ok(())
}

#[test]
fn exported_memory_is_refused_where_it_cannot_be() -> Result<()> {
    let machine = Machine::take();
    let context = open(&machine, 0, Route::Direct)?;
    let dmabuf = Udmabuf::new(8192)?;
    // SAFETY: nothing is made in it.
    let unaligned = unsafe {
        ExportedMemory::mapped(dmabuf.file.try_clone()?, 8, dmabuf.map.as_mut_ptr(), 4096)
    };
    ensure!(unaligned.err().context("offset 8")?.errno() == libc::EINVAL);
    let of = |depth, events, memory: &Arc<ExportedMemory>| CompletionQueueOptions {
        depth,
        events,
        collapsed: false,
        memory: Some(Arc::clone(memory)),
    };
    let memory = dmabuf.memory(0)?;
    for (options, words) in [
        (of(1024, false, &memory), "does not fit"),
        (of(16, true, &memory), "with events"),
    ] {
        let error = context.create_cq_with(&options).err().context(words)?;
        ensure!(
            error.errno() == libc::EINVAL && error.to_string().contains(words),
            "{error}"
        );
    }
    // A file that is no dma-buf.
    let null = OwnedFd::from(File::open("/dev/null")?);
    // SAFETY: the NIC is given no such memory.
    let memory = unsafe { ExportedMemory::mapped(null, 0, dmabuf.map.as_mut_ptr(), 8192) }?;
    let error = context
        .create_cq_with(&of(16, false, &memory))
        .err()
        .context("/dev/null")?;
    ensure!(error.to_string().contains("umem_reg_ex"), "{error}");

    let carried = open(&machine, 0, Route::CpuDoorbell)?;
    let options = QueuePairOptions {
        memory: Some(dmabuf.memory(0)?),
        ..options()
    };
    let cq = carried.create_cq(16)?;
    let error = carried
        .create_qp(&options, &cq, None)
        .err()
        .context("carried")?;
    ensure!(
        error.errno() == libc::EINVAL && error.to_string().contains("cpu-doorbell"),
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
