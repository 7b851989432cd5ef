// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queue pairs by plain verbs, as any program has them: rdma-core builds the WQEs, rings and takes completions apart.

use std::ffi::c_int;
use std::ptr::{self, NonNull};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ibgda_verbs_sys::{
    self as sys, ibv_event_type as event, ibv_qp_attr_mask as mask, ibv_qp_state as state,
    ibv_send_flags as flags, ibv_wr_opcode as op,
};

use crate::machine::Bdf;
use crate::verbs::Verbs;

/// For a completion or an event that must come; much longer than it takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// The last error of the system.
fn failed<T>(what: &str) -> Result<T> {
    Err(std::io::Error::last_os_error()).with_context(|| what.to_owned())
}

fn given<T>(what: &str, pointer: *mut T) -> Result<NonNull<T>> {
    NonNull::new(pointer).map_or_else(|| failed(what), Ok)
}

fn done(what: &str, errno: c_int) -> Result<()> {
    ensure!(
        errno == 0,
        "{what}: {}",
        std::io::Error::from_raw_os_error(errno)
    );
    Ok(())
}

/// Whether a descriptor can be read within the time.
fn readable(fd: c_int, time: Duration) -> Result<bool> {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one descriptor.
    let ready = unsafe { libc::poll(&mut poll, 1, time.as_millis() as c_int) };
    ensure!(ready >= 0, "poll: {}", std::io::Error::last_os_error());
    Ok(ready > 0)
}

/// An asynchronous event: its type, and the number of the object that it is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(pub event::Type, pub u32);

/// A NIC that is open.
pub struct Nic {
    verbs: Verbs,
    pub lid: u16,
}

impl Nic {
    pub fn open(bdf: Bdf) -> Result<Self> {
        let verbs = Verbs::open(bdf);
        let mut port = sys::ibv_port_attr::default();
        // SAFETY: the context is open; the attributes are written only.
        let errno = unsafe { sys::___ibv_query_port(verbs.context(), 1, &mut port) };
        done("ibv_query_port", errno)?;
        let lid = port.lid;
        Ok(Self { verbs, lid })
    }

    pub fn attributes(&self) -> Result<sys::ibv_device_attr> {
        let mut attributes = sys::ibv_device_attr::default();
        // SAFETY: as above.
        let errno = unsafe { sys::ibv_query_device(self.verbs.context(), &mut attributes) };
        done("ibv_query_device", errno)?;
        Ok(attributes)
    }

    /// The next asynchronous event, which must come.
    pub fn event(&self) -> Result<Event> {
        // SAFETY: the context is open.
        let fd = unsafe { (*self.verbs.context()).async_fd };
        ensure!(readable(fd, PATIENCE)?, "no event");
        // SAFETY: plain data of which all bits zero is a value; the union's member is that of the event's type, and the
        // object lives until the event is acknowledged.
        unsafe {
            let mut raw: sys::ibv_async_event = std::mem::zeroed();
            let errno = sys::ibv_get_async_event(self.verbs.context(), &mut raw);
            done("ibv_get_async_event", errno)?;
            let number = match raw.event_type {
                event::IBV_EVENT_CQ_ERR => (*raw.element.cq).handle,
                event::IBV_EVENT_SRQ_ERR | event::IBV_EVENT_SRQ_LIMIT_REACHED => {
                    (*raw.element.srq).handle
                }
                event::IBV_EVENT_PORT_ACTIVE | event::IBV_EVENT_PORT_ERR => {
                    raw.element.port_num as u32
                }
                event::IBV_EVENT_DEVICE_FATAL => 0,
                _ => (*raw.element.qp).qp_num,
            };
            sys::ibv_ack_async_event(&mut raw);
            Ok(Event(raw.event_type, number))
        }
    }

    /// Runs the closure while there are `many` more protection domains.
    pub fn with_domains<R>(&self, many: usize, f: impl FnOnce() -> Result<R>) -> Result<R> {
        let mut domains = Vec::new();
        let result = (|| {
            for _ in 0..many {
                // SAFETY: the context is open.
                let pd = unsafe { sys::ibv_alloc_pd(self.verbs.context()) };
                domains.push(given("ibv_alloc_pd", pd)?);
            }
            f()
        })();
        for pd in domains {
            // SAFETY: made above, and used by nobody.
            done("ibv_dealloc_pd", unsafe {
                sys::ibv_dealloc_pd(pd.as_ptr())
            })?;
        }
        result
    }
}

/// Memory that is registered with all rights.
pub struct Memory {
    mr: NonNull<sys::ibv_mr>,
    bytes: Box<[u64]>,
}

impl Memory {
    pub fn new(nic: &Nic, len: usize) -> Result<Self> {
        let mut bytes = vec![0; len.div_ceil(8)].into_boxed_slice();
        // LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC.
        let all = 0xf;
        // SAFETY: the memory is ours, and is given back after its registration.
        let mr = unsafe {
            sys::ibv_reg_mr(
                nic.verbs.pd(),
                bytes.as_mut_ptr().cast(),
                bytes.len() * 8,
                all,
            )
        };
        let mr = given("ibv_reg_mr", mr)?;
        Ok(Self { mr, bytes })
    }

    pub fn at(&self, offset: usize) -> u64 {
        self.bytes.as_ptr() as u64 + offset as u64
    }

    pub fn keys(&self) -> (u32, u32) {
        // SAFETY: registered.
        let mr = unsafe { self.mr.as_ref() };
        (mr.lkey, mr.rkey)
    }

    /// Address and key for the other side.
    pub fn remote(&self, offset: usize) -> (u64, u32) {
        (self.at(offset), self.keys().1)
    }

    pub fn sge(&self, offset: usize, len: usize) -> sys::ibv_sge {
        sys::ibv_sge {
            addr: self.at(offset),
            length: len as u32,
            lkey: self.keys().0,
        }
    }

    /// A word, which the device may have written.
    pub fn word(&self, index: usize) -> u64 {
        // SAFETY: the reference is to one of our words.
        unsafe { ptr::read_volatile(&self.bytes[index]) }
    }

    pub fn set(&mut self, index: usize, value: u64) {
        // SAFETY: as above.
        unsafe { ptr::write_volatile(&mut self.bytes[index], value) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: registered. It fails when the NIC is gone, and the registration with it.
        unsafe { sys::ibv_dereg_mr(self.mr.as_ptr()) };
    }
}

/// A completion queue with a channel for its events.
pub struct Cq {
    cq: NonNull<sys::ibv_cq>,
    channel: NonNull<sys::ibv_comp_channel>,
}

/// A completion: which request, whether it succeeded, and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    pub id: u64,
    pub status: u32,
    pub len: u32,
}

impl Cq {
    pub fn new(nic: &Nic, entries: u32) -> Result<Self> {
        // SAFETY: the context is open; both are destroyed below.
        unsafe {
            let channel = sys::ibv_create_comp_channel(nic.verbs.context());
            let channel = given("ibv_create_comp_channel", channel)?;
            let cq = sys::ibv_create_cq(
                nic.verbs.context(),
                entries as c_int,
                ptr::null_mut(),
                channel.as_ptr(),
                0,
            );
            match given("ibv_create_cq", cq) {
                Ok(cq) => Ok(Self { cq, channel }),
                Err(error) => {
                    sys::ibv_destroy_comp_channel(channel.as_ptr());
                    Err(error)
                }
            }
        }
    }

    /// Entries that it has.
    pub fn entries(&self) -> u32 {
        // SAFETY: created.
        unsafe { self.cq.as_ref() }.cqe as u32
    }

    pub fn handle(&self) -> u32 {
        // SAFETY: created.
        unsafe { self.cq.as_ref() }.handle
    }

    /// Takes up to as many completions as there is room for.
    pub fn poll(&self, into: &mut Vec<Done>, most: usize) -> Result<()> {
        const BATCH: usize = 32;
        // SAFETY: plain data of which all bits zero is a value.
        let mut wc: [sys::ibv_wc; BATCH] = unsafe { std::mem::zeroed() };
        // SAFETY: the array has room for that many.
        let found = unsafe {
            sys::ibv_poll_cq(self.cq.as_ptr(), most.min(BATCH) as c_int, wc.as_mut_ptr())
        };
        ensure!(found >= 0, "ibv_poll_cq: {found}");
        into.extend(wc[..found as usize].iter().map(|wc| Done {
            id: wc.wr_id,
            status: wc.status,
            len: wc.byte_len,
        }));
        Ok(())
    }

    /// The next completion, which must come and be a success.
    pub fn next(&self) -> Result<Done> {
        let done = self.any()?;
        ensure!(done.status == 0, "{done:?}");
        Ok(done)
    }

    /// The next completion, which must come.
    pub fn any(&self) -> Result<Done> {
        let end = Instant::now() + PATIENCE;
        let mut found = Vec::with_capacity(1);
        while found.is_empty() {
            self.poll(&mut found, 1)?;
            ensure!(Instant::now() < end, "no completion");
        }
        Ok(found[0])
    }

    /// Asks for an event.
    pub fn arm(&self, solicited: bool) -> Result<()> {
        // SAFETY: created.
        let errno = unsafe { sys::ibv_req_notify_cq(self.cq.as_ptr(), solicited.into()) };
        done("ibv_req_notify_cq", errno)
    }

    /// Whether an event comes within the time. It is taken.
    pub fn event(&self, time: Duration) -> Result<bool> {
        // SAFETY: created.
        let fd = unsafe { self.channel.as_ref() }.fd;
        if !readable(fd, time)? {
            return Ok(false);
        }
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: both are written; the event is given back at once.
        unsafe {
            let errno = sys::ibv_get_cq_event(self.channel.as_ptr(), &mut cq, &mut context);
            done("ibv_get_cq_event", errno)?;
            ensure!(cq == self.cq.as_ptr(), "an event of another CQ");
            sys::ibv_ack_cq_events(cq, 1);
        }
        Ok(true)
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: created; what completes to it is gone before.
        unsafe {
            sys::ibv_destroy_cq(self.cq.as_ptr());
            sys::ibv_destroy_comp_channel(self.channel.as_ptr());
        }
    }
}

/// A shared receive queue.
pub struct Srq(NonNull<sys::ibv_srq>);

impl Srq {
    pub fn new(nic: &Nic, entries: u32) -> Result<Self> {
        let mut init = sys::ibv_srq_init_attr {
            srq_context: ptr::null_mut(),
            attr: sys::ibv_srq_attr {
                max_wr: entries,
                max_sge: 1,
                srq_limit: 0,
            },
        };
        // SAFETY: the protection domain is alive.
        let srq = unsafe { sys::ibv_create_srq(nic.verbs.pd(), &mut init) };
        given("ibv_create_srq", srq).map(Self)
    }

    pub fn post(&self, id: u64, mut sge: sys::ibv_sge) -> Result<()> {
        let mut wr = receive(id, &mut sge);
        let mut bad = ptr::null_mut();
        // SAFETY: the request and its piece outlive the call.
        let errno = unsafe { sys::ibv_post_srq_recv(self.0.as_ptr(), &mut wr, &mut bad) };
        done("ibv_post_srq_recv", errno)
    }

    pub fn handle(&self) -> u32 {
        // SAFETY: created.
        unsafe { self.0.as_ref() }.handle
    }

    /// Asks for the event that comes when fewer receives are left.
    pub fn arm(&self, limit: u32) -> Result<()> {
        let mut attributes = sys::ibv_srq_attr {
            max_wr: 0,
            max_sge: 0,
            srq_limit: limit,
        };
        let mask = sys::ibv_srq_attr_mask::IBV_SRQ_LIMIT as c_int;
        // SAFETY: created.
        let errno = unsafe { sys::ibv_modify_srq(self.0.as_ptr(), &mut attributes, mask) };
        done("ibv_modify_srq", errno)
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // SAFETY: created; its queue pairs are gone before.
        unsafe { sys::ibv_destroy_srq(self.0.as_ptr()) };
    }
}

fn receive(id: u64, sge: &mut sys::ibv_sge) -> sys::ibv_recv_wr {
    sys::ibv_recv_wr {
        wr_id: id,
        next: ptr::null_mut(),
        sg_list: sge,
        num_sge: 1,
    }
}

/// A send request.
#[derive(Clone, Copy)]
pub struct Work {
    pub id: u64,
    pub opcode: op::Type,
    pub flags: flags::Type,
    pub local: sys::ibv_sge,
    /// Address and key on the other side.
    pub remote: (u64, u32),
}

impl Work {
    pub fn write(id: u64, local: sys::ibv_sge, remote: (u64, u32)) -> Self {
        Self {
            id,
            opcode: op::IBV_WR_RDMA_WRITE,
            flags: flags::IBV_SEND_SIGNALED,
            local,
            remote,
        }
    }

    pub fn read(id: u64, local: sys::ibv_sge, remote: (u64, u32)) -> Self {
        Self {
            opcode: op::IBV_WR_RDMA_READ,
            ..Self::write(id, local, remote)
        }
    }

    pub fn send(id: u64, local: sys::ibv_sge) -> Self {
        Self {
            opcode: op::IBV_WR_SEND,
            ..Self::write(id, local, (0, 0))
        }
    }

    /// Adds 0 to a word.
    pub fn fetch_add(id: u64, local: sys::ibv_sge, remote: (u64, u32)) -> Self {
        Self {
            opcode: op::IBV_WR_ATOMIC_FETCH_AND_ADD,
            ..Self::write(id, local, remote)
        }
    }

    /// With further flags.
    pub fn and(self, more: flags::Type) -> Self {
        Self {
            flags: self.flags | more,
            ..self
        }
    }

    /// Without a completion.
    pub fn silent(self) -> Self {
        Self {
            flags: self.flags & !flags::IBV_SEND_SIGNALED,
            ..self
        }
    }
}

/// Sizes of a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub send: u32,
    pub receive: u32,
}

/// A reliable queue pair.
pub struct Qp {
    qp: NonNull<sys::ibv_qp>,
    pub number: u32,
    /// What it was given, which may be more than was asked for.
    pub sizes: Sizes,
}

impl Qp {
    pub fn new(
        nic: &Nic,
        send: &Cq,
        receive: &Cq,
        srq: Option<&Srq>,
        sizes: Sizes,
    ) -> Result<Self> {
        Self::with_inline(nic, send, receive, srq, sizes, 0)
    }

    /// One that takes so many bytes of data inline.
    pub fn with_inline(
        nic: &Nic,
        send: &Cq,
        receive: &Cq,
        srq: Option<&Srq>,
        sizes: Sizes,
        inline: u32,
    ) -> Result<Self> {
        let mut init = sys::ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: send.cq.as_ptr(),
            recv_cq: receive.cq.as_ptr(),
            srq: srq.map_or(ptr::null_mut(), |srq| srq.0.as_ptr()),
            cap: sys::ibv_qp_cap {
                max_send_wr: sizes.send,
                max_recv_wr: sizes.receive,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline,
            },
            qp_type: sys::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: what it refers to is alive.
        let qp = unsafe { sys::ibv_create_qp(nic.verbs.pd(), &mut init) };
        let qp = given("ibv_create_qp", qp)?;
        Ok(Self {
            qp,
            // SAFETY: created.
            number: unsafe { qp.as_ref() }.qp_num,
            sizes: Sizes {
                send: init.cap.max_send_wr,
                receive: init.cap.max_recv_wr,
            },
        })
    }

    fn modify(&self, mut attributes: sys::ibv_qp_attr, mask: mask::Type) -> Result<()> {
        // SAFETY: created.
        let errno = unsafe { sys::ibv_modify_qp(self.qp.as_ptr(), &mut attributes, mask as c_int) };
        done("ibv_modify_qp", errno)
    }

    /// Connects it to another, with the longest timeout that a test can wait for.
    pub fn connect(&self, lid: u16, number: u32) -> Result<()> {
        self.modify(
            sys::ibv_qp_attr {
                qp_state: state::IBV_QPS_INIT,
                port_num: 1,
                qp_access_flags: 0xf,
                ..Default::default()
            },
            mask::IBV_QP_STATE
                | mask::IBV_QP_PKEY_INDEX
                | mask::IBV_QP_PORT
                | mask::IBV_QP_ACCESS_FLAGS,
        )?;
        let mut ready = sys::ibv_qp_attr {
            qp_state: state::IBV_QPS_RTR,
            path_mtu: sys::ibv_mtu::IBV_MTU_4096,
            dest_qp_num: number,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 12,
            ..Default::default()
        };
        ready.ah_attr.dlid = lid;
        ready.ah_attr.port_num = 1;
        self.modify(
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
            sys::ibv_qp_attr {
                qp_state: state::IBV_QPS_RTS,
                timeout: 18,
                retry_cnt: 7,
                rnr_retry: 7,
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

    /// Two of one port that send to each other; the second takes its receives from `srq`, if there is one.
    pub fn pair(nic: &Nic, cq: &Cq, srq: Option<&Srq>) -> Result<[Self; 2]> {
        let make = |srq: Option<&Srq>| {
            let receive = if srq.is_none() { 32 } else { 0 };
            Self::new(nic, cq, cq, srq, Sizes { send: 32, receive })
        };
        let pair = [make(None)?, make(srq)?];
        pair[0].connect(nic.lid, pair[1].number)?;
        pair[1].connect(nic.lid, pair[0].number)?;
        Ok(pair)
    }

    pub fn to_error(&self) -> Result<()> {
        let attributes = sys::ibv_qp_attr {
            qp_state: state::IBV_QPS_ERR,
            ..Default::default()
        };
        self.modify(attributes, mask::IBV_QP_STATE)
    }

    /// Posts requests with one doorbell.
    pub fn post(&self, work: &[Work]) -> Result<()> {
        let mut pieces: Vec<sys::ibv_sge> = work.iter().map(|work| work.local).collect();
        let mut requests: Vec<sys::ibv_send_wr> = work
            .iter()
            .zip(&mut pieces)
            .map(|(work, piece)| {
                // SAFETY: plain data of which all bits zero is a value.
                let mut wr: sys::ibv_send_wr = unsafe { std::mem::zeroed() };
                wr.wr_id = work.id;
                wr.sg_list = piece;
                wr.num_sge = 1;
                wr.opcode = work.opcode;
                wr.send_flags = work.flags;
                if work.opcode == op::IBV_WR_ATOMIC_FETCH_AND_ADD {
                    wr.wr.atomic.remote_addr = work.remote.0;
                    wr.wr.atomic.rkey = work.remote.1;
                } else {
                    wr.wr.rdma.remote_addr = work.remote.0;
                    wr.wr.rdma.rkey = work.remote.1;
                }
                wr
            })
            .collect();
        for index in 1..requests.len() {
            let next: *mut sys::ibv_send_wr = &mut requests[index];
            requests[index - 1].next = next;
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the list and the pieces outlive the call.
        let errno =
            unsafe { sys::ibv_post_send(self.qp.as_ptr(), requests.as_mut_ptr(), &mut bad) };
        done("ibv_post_send", errno)
    }

    pub fn receive(&self, id: u64, mut sge: sys::ibv_sge) -> Result<()> {
        let mut wr = receive(id, &mut sge);
        let mut bad = ptr::null_mut();
        // SAFETY: the request and its piece outlive the call.
        let errno = unsafe { sys::ibv_post_recv(self.qp.as_ptr(), &mut wr, &mut bad) };
        done("ibv_post_recv", errno)
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: created. It fails when the NIC is gone, and the queue pair with it.
        unsafe { sys::ibv_destroy_qp(self.qp.as_ptr()) };
    }
}
