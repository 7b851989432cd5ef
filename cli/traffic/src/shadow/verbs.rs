// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CPU's path: an ordinary RC queue pair by libibverbs, as any program has it. rdma-core builds the WQEs, rings,
//! and takes the completions apart; nothing of libibgda is in it.

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use ibgda_verbs_sys::{
    self as sys, ibv_qp_attr_mask as mask, ibv_qp_state as state, ibv_send_flags as flags,
    ibv_wr_opcode as opcode,
};
use std::{
    ffi::{CStr, c_int},
    io,
    ptr::{self, NonNull},
    rc::Rc,
    thread,
    time::{Duration, Instant},
};

const PORT: u8 = 1;
/// LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC.
const ALL_RIGHTS: i32 = 0xf;
const DEPTH: u32 = 16;

fn given<T>(what: &str, pointer: *mut T) -> Result<NonNull<T>> {
    NonNull::new(pointer)
        .ok_or_else(io::Error::last_os_error)
        .with_context(|| what.to_owned())
}

fn done(what: &str, errno: c_int) -> Result<()> {
    match errno {
        0 => Ok(()),
        // Some calls give -1 and leave the number in errno.
        -1 => Err(io::Error::last_os_error()).with_context(|| what.to_owned()),
        errno => Err(io::Error::from_raw_os_error(errno)).with_context(|| what.to_owned()),
    }
}

/// A verbs device that is open, and its protection domain.
struct Device {
    context: NonNull<sys::ibv_context>,
    pd: NonNull<sys::ibv_pd>,
}

impl Device {
    fn open(name: &str) -> Result<Self> {
        let mut count = 0;
        // SAFETY: the list is freed below; the device is opened before that.
        let context = unsafe {
            let list = given("ibv_get_device_list", sys::ibv_get_device_list(&mut count))?;
            let device = (0..count as usize)
                .map(|index| *list.as_ptr().add(index))
                .find(|&device| {
                    CStr::from_ptr(sys::ibv_get_device_name(device)).to_bytes() == name.as_bytes()
                });
            let context = device.map(|device| sys::ibv_open_device(device));
            // A failure's errno is looked at first.
            let context = context
                .ok_or_else(|| anyhow!("there is no verbs device {name}"))
                .and_then(|context| given("ibv_open_device", context));
            sys::ibv_free_device_list(list.as_ptr());
            context?
        };
        // SAFETY: the context is open.
        match given("ibv_alloc_pd", unsafe {
            sys::ibv_alloc_pd(context.as_ptr())
        }) {
            Ok(pd) => Ok(Self { context, pd }),
            Err(error) => {
                // SAFETY: as above; nothing was made from it.
                unsafe { sys::ibv_close_device(context.as_ptr()) };
                Err(error)
            }
        }
    }

    fn port(&self) -> Result<(sys::ibv_port_attr, sys::ibv_gid)> {
        let (mut port, mut gid) = Default::default();
        // SAFETY: the context is open; both are written only.
        unsafe {
            let context = self.context.as_ptr();
            done(
                "ibv_query_port",
                sys::___ibv_query_port(context, PORT, &mut port),
            )?;
            done(
                "ibv_query_gid",
                sys::ibv_query_gid(context, PORT, 0, &mut gid),
            )?;
        }
        Ok((port, gid))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: whatever was made from them holds an `Rc` of `self`. They fail when the NIC is gone.
        unsafe {
            sys::ibv_dealloc_pd(self.pd.as_ptr());
            sys::ibv_close_device(self.context.as_ptr());
        }
    }
}

/// Memory that is registered with all rights.
struct Memory {
    mr: NonNull<sys::ibv_mr>,
    words: Box<[u64]>,
    _device: Rc<Device>,
}

impl Memory {
    fn new(device: &Rc<Device>, length: usize) -> Result<Self> {
        let mut words = vec![0; length.div_ceil(8)].into_boxed_slice();
        // SAFETY: the memory is this value's, and is given back after its registration.
        let mr = unsafe {
            sys::ibv_reg_mr(
                device.pd.as_ptr(),
                words.as_mut_ptr().cast(),
                words.len() * 8,
                ALL_RIGHTS,
            )
        };
        Ok(Self {
            mr: given(
                "ibv_reg_mr (see ulimit -l: RLIMIT_MEMLOCK may be too small)",
                mr,
            )?,
            words,
            _device: Rc::clone(device),
        })
    }

    fn base(&self) -> *mut u8 {
        self.words.as_ptr().cast_mut().cast()
    }

    fn inside(&self, offset: usize, length: usize) -> Result<*mut u8> {
        let end = offset.checked_add(length);
        ensure!(
            end.is_some_and(|end| end <= self.words.len() * 8),
            "{length} bytes at {offset} are not inside"
        );
        // SAFETY: inside the allocation, as just found.
        Ok(unsafe { self.base().add(offset) })
    }

    fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let to = self.inside(offset, bytes.len())?;
        // SAFETY: inside; no reference to the bytes exists. A NIC may write there too: then they come out mixed.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let from = self.inside(offset, bytes.len())?;
        // SAFETY: as in `write`.
        unsafe { ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: registered. It fails when the NIC is gone, and the registration with it.
        unsafe { sys::ibv_dereg_mr(self.mr.as_ptr()) };
    }
}

/// A queue pair with a CQ of its own.
struct Qp {
    qp: NonNull<sys::ibv_qp>,
    cq: NonNull<sys::ibv_cq>,
    _device: Rc<Device>,
}

impl Qp {
    fn new(device: &Rc<Device>, inline: u32) -> Result<Self> {
        // SAFETY: the context is open.
        let cq = unsafe {
            sys::ibv_create_cq(
                device.context.as_ptr(),
                DEPTH as c_int,
                ptr::null_mut(),
                ptr::null_mut(),
                0,
            )
        };
        let cq = given("ibv_create_cq", cq)?;
        let mut init = sys::ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: cq.as_ptr(),
            recv_cq: cq.as_ptr(),
            srq: ptr::null_mut(),
            cap: sys::ibv_qp_cap {
                max_send_wr: DEPTH,
                max_recv_wr: 1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline,
            },
            qp_type: sys::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 1,
        };
        // SAFETY: what it refers to is alive.
        let qp = unsafe { sys::ibv_create_qp(device.pd.as_ptr(), &mut init) };
        match given("ibv_create_qp", qp) {
            Ok(qp) => Ok(Self {
                qp,
                cq,
                _device: Rc::clone(device),
            }),
            Err(error) => {
                // SAFETY: created, and used by nobody.
                unsafe { sys::ibv_destroy_cq(cq.as_ptr()) };
                Err(error)
            }
        }
    }

    fn number(&self) -> u32 {
        // SAFETY: created.
        unsafe { self.qp.as_ref() }.qp_num
    }

    fn modify(&self, what: &str, mut attributes: sys::ibv_qp_attr, mask: mask::Type) -> Result<()> {
        // SAFETY: created.
        let errno = unsafe { sys::ibv_modify_qp(self.qp.as_ptr(), &mut attributes, mask as c_int) };
        done(what, errno)
    }

    /// The way to ready-to-send, with what the two ports can both do.
    fn connect(
        &self,
        own: &(sys::ibv_port_attr, sys::ibv_gid),
        peer: &(sys::ibv_port_attr, sys::ibv_gid),
        number: u32,
    ) -> Result<()> {
        self.modify(
            "ibv_modify_qp to INIT",
            sys::ibv_qp_attr {
                qp_state: state::IBV_QPS_INIT,
                port_num: PORT,
                qp_access_flags: ALL_RIGHTS as u32,
                ..Default::default()
            },
            mask::IBV_QP_STATE
                | mask::IBV_QP_PKEY_INDEX
                | mask::IBV_QP_PORT
                | mask::IBV_QP_ACCESS_FLAGS,
        )?;
        let mut ready = sys::ibv_qp_attr {
            qp_state: state::IBV_QPS_RTR,
            path_mtu: own.0.active_mtu.min(peer.0.active_mtu),
            dest_qp_num: number,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 12,
            ..Default::default()
        };
        ready.ah_attr.dlid = peer.0.lid;
        ready.ah_attr.port_num = PORT;
        // SAFETY: any bytes are both a raw GID and its halves.
        let (own_prefix, peer_prefix) =
            unsafe { (own.1.global.subnet_prefix, peer.1.global.subnet_prefix) };
        // Without a LID the port is Ethernet's; another subnet is reached through a router.
        if peer.0.lid == 0 || own_prefix != peer_prefix {
            ready.ah_attr.is_global = 1;
            ready.ah_attr.grh.dgid = peer.1;
            ready.ah_attr.grh.hop_limit = 64;
        }
        self.modify(
            "ibv_modify_qp to RTR",
            ready,
            mask::IBV_QP_STATE
                | mask::IBV_QP_AV
                | mask::IBV_QP_PATH_MTU
                | mask::IBV_QP_DEST_QPN
                | mask::IBV_QP_RQ_PSN
                | mask::IBV_QP_MAX_DEST_RD_ATOMIC
                | mask::IBV_QP_MIN_RNR_TIMER,
        )?;
        self.modify(
            "ibv_modify_qp to RTS",
            sys::ibv_qp_attr {
                qp_state: state::IBV_QPS_RTS,
                timeout: 14,
                retry_cnt: 7,
                rnr_retry: 6,
                max_rd_atomic: 4,
                ..Default::default()
            },
            mask::IBV_QP_STATE
                | mask::IBV_QP_TIMEOUT
                | mask::IBV_QP_RETRY_CNT
                | mask::IBV_QP_RNR_RETRY
                | mask::IBV_QP_SQ_PSN
                | mask::IBV_QP_MAX_QP_RD_ATOMIC,
        )
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: created. They fail when the NIC is gone, and the objects with it.
        unsafe {
            sys::ibv_destroy_qp(self.qp.as_ptr());
            sys::ibv_destroy_cq(self.cq.as_ptr());
        }
    }
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Write,
    WriteInline,
    Read,
    FetchAdd { add: u64 },
    CompareSwap { compare: u64, swap: u64 },
}

/// Two queue pairs that are connected, with memory at both ends.
pub struct Path {
    near_qp: Qp,
    _far_qp: Qp,
    near: Memory,
    far: Memory,
    timeout: Duration,
}

/// Which end of a path.
#[derive(Clone, Copy, Debug)]
pub enum Side {
    Near,
    Far,
}

impl Path {
    /// Between two verbs devices, with so many bytes at each end.
    pub fn open(
        names: [&str; 2],
        lengths: [usize; 2],
        inline: u32,
        timeout: Duration,
    ) -> Result<Self> {
        let open = |name: &str| Device::open(name).map(Rc::new).context(name.to_owned());
        let devices = [open(names[0])?, open(names[1])?];
        let near_qp = Qp::new(&devices[0], inline)?;
        let far_qp = Qp::new(&devices[1], 0)?;
        let ports = [devices[0].port()?, devices[1].port()?];
        near_qp.connect(&ports[0], &ports[1], far_qp.number())?;
        far_qp.connect(&ports[1], &ports[0], near_qp.number())?;
        Ok(Self {
            near: Memory::new(&devices[0], lengths[0])?,
            far: Memory::new(&devices[1], lengths[1])?,
            near_qp,
            _far_qp: far_qp,
            timeout,
        })
    }

    fn memory(&self, side: Side) -> &Memory {
        match side {
            Side::Near => &self.near,
            Side::Far => &self.far,
        }
    }

    /// Where the memory of a side is.
    pub fn address(&self, side: Side) -> u64 {
        self.memory(side).base() as u64
    }

    /// Copies bytes into it.
    pub fn write(&self, side: Side, offset: usize, bytes: &[u8]) -> Result<()> {
        self.memory(side).write(offset, bytes)
    }

    /// Copies bytes out of it.
    pub fn read(&self, side: Side, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.memory(side).read(offset, bytes)
    }

    /// Posts one request between offsets of the two memories, and polls until it is complete; how long that took.
    pub fn send(&mut self, verb: Verb, near: u64, far: u64, length: u32) -> Result<Duration> {
        // SAFETY: both are registered.
        let (lkey, rkey) = unsafe { (self.near.mr.as_ref().lkey, self.far.mr.as_ref().rkey) };
        let mut piece = sys::ibv_sge {
            addr: self.address(Side::Near) + near,
            length,
            lkey,
        };
        let mut request = sys::ibv_send_wr {
            sg_list: &mut piece,
            num_sge: 1,
            send_flags: flags::IBV_SEND_SIGNALED,
            ..Default::default()
        };
        let remote = self.address(Side::Far) + far;
        request.wr.rdma.remote_addr = remote;
        request.wr.rdma.rkey = rkey;
        request.opcode = match verb {
            Verb::Write => opcode::IBV_WR_RDMA_WRITE,
            Verb::WriteInline => {
                request.send_flags |= flags::IBV_SEND_INLINE;
                opcode::IBV_WR_RDMA_WRITE
            }
            Verb::Read => opcode::IBV_WR_RDMA_READ,
            Verb::FetchAdd { add } => {
                request.wr.atomic.remote_addr = remote;
                request.wr.atomic.compare_add = add;
                request.wr.atomic.rkey = rkey;
                opcode::IBV_WR_ATOMIC_FETCH_AND_ADD
            }
            Verb::CompareSwap { compare, swap } => {
                request.wr.atomic.remote_addr = remote;
                request.wr.atomic.compare_add = compare;
                request.wr.atomic.swap = swap;
                request.wr.atomic.rkey = rkey;
                opcode::IBV_WR_ATOMIC_CMP_AND_SWP
            }
        };
        let begun = Instant::now();
        let mut bad = ptr::null_mut();
        // SAFETY: the request and its piece outlive the call; the NIC checks itself what it is asked to move.
        let errno = unsafe { sys::ibv_post_send(self.near_qp.qp.as_ptr(), &mut request, &mut bad) };
        done("ibv_post_send", errno)?;
        self.complete(begun)?;
        Ok(begun.elapsed())
    }

    fn complete(&self, begun: Instant) -> Result<()> {
        let mut completion = sys::ibv_wc::default();
        loop {
            // SAFETY: created; there is room for one.
            match unsafe { sys::ibv_poll_cq(self.near_qp.cq.as_ptr(), 1, &mut completion) } {
                0 => {}
                1 if completion.status == 0 => return Ok(()),
                1 => {
                    // SAFETY: a string that is never freed.
                    let words =
                        unsafe { CStr::from_ptr(sys::ibv_wc_status_str(completion.status)) };
                    bail!(
                        "QP {:#x}: {} (ibv_wc_status {}, vendor {:#x})",
                        completion.qp_num,
                        words.to_string_lossy(),
                        completion.status,
                        completion.vendor_err
                    );
                }
                error => bail!("ibv_poll_cq: {error}"),
            }
            ensure!(
                begun.elapsed() < self.timeout,
                "QP {:#x}: no completion within {} s",
                self.near_qp.number(),
                self.timeout.as_secs()
            );
            // As the device header's CPU threads do: there can be more threads than processors.
            thread::yield_now();
        }
    }
}
