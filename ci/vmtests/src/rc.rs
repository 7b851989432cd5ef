// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reliable connections of a port with itself, by libibverbs, and the events that they have.

use std::cell::RefCell;
use std::ffi::CStr;
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ibgda_verbs_sys::{
    self as sys, ibv_access_flags as access, ibv_event_type as event, ibv_qp_attr_mask as mask,
    ibv_qp_state as state, ibv_qp_type, ibv_wr_opcode as opcode,
};

use crate::machine::Bdf;
use crate::pair::rdma;

const PATIENCE: Duration = Duration::from_secs(60);

/// A verbs device with a domain and a registered buffer; what is made on it lives as long.
pub struct Device {
    context: *mut sys::ibv_context,
    pd: *mut sys::ibv_pd,
    mr: *mut sys::ibv_mr,
    lid: u16,
    buffer: Box<[u64; 512]>,
    qps: RefCell<Vec<*mut sys::ibv_qp>>,
    srqs: RefCell<Vec<*mut sys::ibv_srq>>,
    cqs: RefCell<Vec<*mut sys::ibv_cq>>,
}

/// What is made on a device, which destroys it when it is closed itself.
#[derive(Debug)]
pub struct Made<'d, T>(*mut T, PhantomData<&'d Device>);

impl<T> Clone for Made<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Made<'_, T> {}

pub type Cq<'d> = Made<'d, sys::ibv_cq>;
pub type Qp<'d> = Made<'d, sys::ibv_qp>;
pub type Srq<'d> = Made<'d, sys::ibv_srq>;

/// An event: its type, and the number of the object that it is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(pub event::Type, pub u32);

fn made<T>(object: *mut T, what: &str) -> Result<*mut T> {
    ensure!(
        !object.is_null(),
        "{what}: {}",
        std::io::Error::last_os_error()
    );
    Ok(object)
}

fn done(status: i32, what: &str) -> Result<()> {
    ensure!(
        status == 0,
        "{what}: {}",
        std::io::Error::from_raw_os_error(status)
    );
    Ok(())
}

impl Device {
    pub fn open(nic: Bdf) -> Result<Self> {
        let name = rdma(nic).context("no RDMA device")?;
        let mut number = 0;
        // SAFETY: the list is freed after the device has been opened, and names are strings.
        let context = unsafe {
            let list = made(sys::ibv_get_device_list(&mut number), "list")?;
            let named = (0..number as usize).map(|i| *list.add(i)).find(|&device| {
                CStr::from_ptr(sys::ibv_get_device_name(device)).to_bytes() == name.as_bytes()
            });
            let context = named.map_or(null_mut(), |device| sys::ibv_open_device(device));
            sys::ibv_free_device_list(list);
            made(context, "open")?
        };
        let mut buffer = Box::new([0; 512]);
        let rights = access::IBV_ACCESS_LOCAL_WRITE.0
            | access::IBV_ACCESS_REMOTE_WRITE.0
            | access::IBV_ACCESS_REMOTE_ATOMIC.0;
        // SAFETY: the context is open; the buffer lives as long as the device; the port's attributes are of the size
        // that the function fills.
        unsafe {
            let flags = libc::fcntl((*context).async_fd, libc::F_GETFL);
            libc::fcntl((*context).async_fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
            let pd = made(sys::ibv_alloc_pd(context), "PD")?;
            let mr = sys::ibv_reg_mr(pd, buffer.as_mut_ptr().cast(), 4096, rights as i32);
            let mut port: sys::ibv_port_attr = std::mem::zeroed();
            done(
                sys::___ibv_query_port(context, 1, (&raw mut port).cast()),
                "query port",
            )?;
            Ok(Self {
                context,
                pd,
                mr: made(mr, "MR")?,
                lid: port.lid,
                buffer,
                qps: RefCell::default(),
                srqs: RefCell::default(),
                cqs: RefCell::default(),
            })
        }
    }

    pub fn lkey(&self) -> u32 {
        // SAFETY: the MR lives as long as the device.
        unsafe { (*self.mr).lkey }
    }

    pub fn rkey(&self) -> u32 {
        // SAFETY: the MR lives as long as the device.
        unsafe { (*self.mr).rkey }
    }

    pub fn cq(&self, entries: i32) -> Result<Cq<'_>> {
        // SAFETY: the context is open.
        let cq = unsafe { sys::ibv_create_cq(self.context, entries, null_mut(), null_mut(), 0) };
        self.cqs.borrow_mut().push(made(cq, "CQ")?);
        Ok(Made(cq, PhantomData))
    }

    pub fn srq(&self, entries: u32) -> Result<Srq<'_>> {
        // SAFETY: the attributes are plain numbers and null pointers; the domain lives.
        unsafe {
            let mut init: sys::ibv_srq_init_attr = std::mem::zeroed();
            init.attr.max_wr = entries;
            init.attr.max_sge = 1;
            let srq = made(sys::ibv_create_srq(self.pd, &mut init), "SRQ")?;
            self.srqs.borrow_mut().push(srq);
            Ok(Made(srq, PhantomData))
        }
    }

    fn qp(&self, cq: Cq<'_>, srq: Option<Srq<'_>>) -> Result<Qp<'_>> {
        // SAFETY: the attributes are plain numbers and pointers to what lives as long as the device.
        unsafe {
            let mut init: sys::ibv_qp_init_attr = std::mem::zeroed();
            (init.send_cq, init.recv_cq) = (cq.0, cq.0);
            init.srq = srq.map_or(null_mut(), |srq| srq.0);
            init.qp_type = ibv_qp_type::IBV_QPT_RC;
            init.sq_sig_all = 1;
            init.cap.max_send_wr = 32;
            init.cap.max_send_sge = 1;
            init.cap.max_recv_wr = if srq.is_none() { 32 } else { 0 };
            init.cap.max_recv_sge = 1;
            let qp = made(sys::ibv_create_qp(self.pd, &mut init), "QP")?;
            self.qps.borrow_mut().push(qp);
            Ok(Made(qp, PhantomData))
        }
    }

    /// Connects a queue pair to another of the same port.
    fn connect(&self, qp: Qp<'_>, to: Qp<'_>) -> Result<()> {
        // SAFETY: zeroes are attributes; both queue pairs live.
        unsafe {
            let mut attr: sys::ibv_qp_attr = std::mem::zeroed();
            attr.port_num = 1;
            attr.qp_access_flags =
                access::IBV_ACCESS_REMOTE_WRITE.0 | access::IBV_ACCESS_REMOTE_ATOMIC.0;
            attr.path_mtu = sys::ibv_mtu::IBV_MTU_1024;
            attr.dest_qp_num = to.number();
            attr.ah_attr.dlid = self.lid;
            attr.ah_attr.port_num = 1;
            (attr.max_dest_rd_atomic, attr.max_rd_atomic) = (1, 1);
            (attr.timeout, attr.retry_cnt, attr.rnr_retry) = (14, 7, 7);
            let common = mask::IBV_QP_STATE;
            for (next, more) in [
                (
                    state::IBV_QPS_INIT,
                    mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS,
                ),
                (
                    state::IBV_QPS_RTR,
                    mask::IBV_QP_AV
                        | mask::IBV_QP_PATH_MTU
                        | mask::IBV_QP_DEST_QPN
                        | mask::IBV_QP_RQ_PSN
                        | mask::IBV_QP_MAX_DEST_RD_ATOMIC
                        | mask::IBV_QP_MIN_RNR_TIMER,
                ),
                (
                    state::IBV_QPS_RTS,
                    mask::IBV_QP_TIMEOUT
                        | mask::IBV_QP_RETRY_CNT
                        | mask::IBV_QP_RNR_RETRY
                        | mask::IBV_QP_SQ_PSN
                        | mask::IBV_QP_MAX_QP_RD_ATOMIC,
                ),
            ] {
                attr.qp_state = next;
                done(
                    sys::ibv_modify_qp(qp.0, &mut attr, (common | more) as i32),
                    "modify QP",
                )?;
            }
        }
        Ok(())
    }

    /// Two queue pairs that send to each other; the second takes its receives from `srq`, if there is one.
    pub fn pair(&self, cq: Cq<'_>, srq: Option<Srq<'_>>) -> Result<[Qp<'_>; 2]> {
        let qps = [self.qp(cq, None)?, self.qp(cq, srq)?];
        self.connect(qps[0], qps[1])?;
        self.connect(qps[1], qps[0])?;
        Ok(qps)
    }

    fn sge(&self) -> sys::ibv_sge {
        sys::ibv_sge {
            addr: self.buffer.as_ptr() as u64,
            length: 8,
            lkey: self.lkey(),
        }
    }

    /// Posts a request of 8 bytes, for what is remote to an offset in the buffer with a key.
    pub fn post(&self, qp: Qp<'_>, opcode: opcode::Type, offset: u64, rkey: u32) -> Result<()> {
        let mut sge = self.sge();
        // SAFETY: the request and its list live during the call.
        unsafe {
            let mut wr: sys::ibv_send_wr = std::mem::zeroed();
            (wr.sg_list, wr.num_sge, wr.opcode) = (&mut sge, 1, opcode);
            let remote = self.sge().addr + offset;
            if opcode == opcode::IBV_WR_ATOMIC_FETCH_AND_ADD {
                (wr.wr.atomic.remote_addr, wr.wr.atomic.rkey) = (remote, rkey);
            } else {
                (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey) = (remote, rkey);
            }
            done(sys::ibv_post_send(qp.0, &mut wr, &mut null_mut()), "post")
        }
    }

    /// The next event; an error if none comes.
    pub fn event(&self) -> Result<Event> {
        let end = Instant::now() + PATIENCE;
        // SAFETY: the union's member is that of the event's type; the object lives until the event is acknowledged.
        unsafe {
            let mut raw: sys::ibv_async_event = std::mem::zeroed();
            while sys::ibv_get_async_event(self.context, &mut raw) != 0 {
                ensure!(Instant::now() < end, "no event came");
                std::thread::sleep(Duration::from_millis(5));
            }
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

    /// The status of the next completion; an error if none comes.
    pub fn completion(&self, cq: Cq<'_>) -> Result<sys::ibv_wc_status::Type> {
        let end = Instant::now() + PATIENCE;
        // SAFETY: the CQ lives; zeroes are a completion.
        unsafe {
            let mut wc: sys::ibv_wc = std::mem::zeroed();
            while sys::ibv_poll_cq(cq.0, 1, &mut wc) == 0 {
                ensure!(Instant::now() < end, "no completion came");
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(wc.status)
        }
    }

    /// Runs the closure while there are `many` more domains.
    pub fn with_domains<R>(&self, many: usize, f: impl FnOnce() -> Result<R>) -> Result<R> {
        let mut domains = Vec::new();
        let result = (|| {
            for _ in 0..many {
                // SAFETY: the context is open.
                let pd = unsafe { sys::ibv_alloc_pd(self.context) };
                domains.push(made(pd, "PD")?);
            }
            f()
        })();
        for pd in domains {
            // SAFETY: made above, and used by nobody.
            done(unsafe { sys::ibv_dealloc_pd(pd) }, "PD")?;
        }
        result
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: all were made above, and nothing is left that uses them; users go before what they use.
        unsafe {
            for qp in self.qps.take() {
                sys::ibv_destroy_qp(qp);
            }
            for srq in self.srqs.take() {
                sys::ibv_destroy_srq(srq);
            }
            for cq in self.cqs.take() {
                sys::ibv_destroy_cq(cq);
            }
            sys::ibv_dereg_mr(self.mr);
            sys::ibv_dealloc_pd(self.pd);
            sys::ibv_close_device(self.context);
        }
    }
}

impl Qp<'_> {
    pub fn number(self) -> u32 {
        // SAFETY: it lives as long as the device.
        unsafe { (*self.0).qp_num }
    }

    pub fn to_error(self) -> Result<()> {
        // SAFETY: zeroes are attributes; the queue pair lives.
        unsafe {
            let mut attr: sys::ibv_qp_attr = std::mem::zeroed();
            attr.qp_state = state::IBV_QPS_ERR;
            done(
                sys::ibv_modify_qp(self.0, &mut attr, mask::IBV_QP_STATE as i32),
                "to error",
            )
        }
    }
}

impl Cq<'_> {
    pub fn handle(self) -> u32 {
        // SAFETY: it lives as long as the device.
        unsafe { (*self.0).handle }
    }
}

impl Srq<'_> {
    pub fn handle(self) -> u32 {
        // SAFETY: it lives as long as the device.
        unsafe { (*self.0).handle }
    }

    /// Posts receives of 8 bytes.
    pub fn post(self, device: &Device, many: usize) -> Result<()> {
        let mut sge = device.sge();
        for _ in 0..many {
            // SAFETY: the request and its list live during the call; the SRQ lives.
            unsafe {
                let mut wr: sys::ibv_recv_wr = std::mem::zeroed();
                (wr.sg_list, wr.num_sge) = (&mut sge, 1);
                let posted = sys::ibv_post_srq_recv(self.0, &mut wr, &mut null_mut());
                done(posted, "receive")?;
            }
        }
        Ok(())
    }

    /// Asks for the event that comes when fewer receives are left.
    pub fn arm(self, limit: u32) -> Result<()> {
        // SAFETY: zeroes are attributes; the SRQ lives.
        unsafe {
            let mut attr: sys::ibv_srq_attr = std::mem::zeroed();
            attr.srq_limit = limit;
            let mask = sys::ibv_srq_attr_mask::IBV_SRQ_LIMIT as i32;
            done(sys::ibv_modify_srq(self.0, &mut attr, mask), "limit")
        }
    }
}
