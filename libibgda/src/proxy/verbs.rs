// SPDX-License-Identifier: MIT OR Apache-2.0
//! The queues of the verbs library that the proxy's thread posts to.

use super::{
    cqe::syndrome_of,
    memory::Regions,
    queue::{BATCH, Done, Phase, Refusal, Verbs},
    wqe::{Action, Data, Fault, INLINE_BYTES, Operation, Payload, Remote, Request, With},
};
use crate::{
    devx,
    error::{Error, Result},
};
use ibgda_device::abi::{
    IBGDA_CQE_RESP_SEND, IBGDA_CQE_RESP_SEND_IMM, IBGDA_CQE_RESP_SEND_INV, IBGDA_CQE_RESP_WRITE_IMM,
};
use ibgda_verbs_sys::{self as sys, ibv_send_flags as flag, ibv_wr_opcode as op};
use std::{
    array, io,
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};

/// A CQ of the verbs library, for one work queue.
#[derive(Debug)]
pub(super) struct VerbsCq {
    device: Arc<devx::Device>,
    cq: NonNull<sys::ibv_cq>,
}

// SAFETY: libibverbs allows calls on a CQ from any thread.
unsafe impl Send for VerbsCq {}
// SAFETY: as above.
unsafe impl Sync for VerbsCq {}

impl VerbsCq {
    pub(super) fn create(device: &Arc<devx::Device>, entries: u32) -> Result<Self> {
        device.check_ours("create a CQ")?;
        let (context, none) = (device.context(), ptr::null_mut());
        // SAFETY: the context is open.
        let cq = unsafe { sys::ibv_create_cq(context, entries as i32, none, ptr::null_mut(), 0) };
        let cq = NonNull::new(cq).ok_or_else(|| {
            let failed = io::Error::last_os_error().raw_os_error();
            let most = device.limits().map_or(0, |limits| limits.max_cqe);
            let name = device.name();
            Error::verbs(
                format!("ibv_create_cq of {entries} entries ({name} has at most {most})"),
                failed.unwrap_or(libc::EIO),
            )
        })?;
        Ok(Self {
            device: Arc::clone(device),
            cq,
        })
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: created, and libibverbs does not change it.
        unsafe { self.cq.as_ref() }.handle
    }

    fn poll<const N: usize>(&self) -> ([sys::ibv_wc; N], usize) {
        let mut found = [sys::ibv_wc::default(); N];
        // SAFETY: the array has room for that many.
        let count = unsafe { sys::ibv_poll_cq(self.cq.as_ptr(), N as i32, found.as_mut_ptr()) };
        // It fails when the device is gone, which is heard of in another way.
        (found, usize::try_from(count).unwrap_or(0))
    }
}

impl Drop for VerbsCq {
    fn drop(&mut self) {
        if self.device.is_ours() {
            // SAFETY: created, and its QP is gone: that holds an `Arc` of this. It fails when the device is gone.
            unsafe { sys::ibv_destroy_cq(self.cq.as_ptr()) };
        }
    }
}

/// What a QP is to have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Depths {
    pub(super) send: u32,
    pub(super) recv: u32,
}

/// A reliable connection of the verbs library.
#[derive(Debug)]
pub(super) struct VerbsQp {
    device: Arc<devx::Device>,
    qp: NonNull<sys::ibv_qp>,
    send_cq: Arc<VerbsCq>,
    recv_cq: Arc<VerbsCq>,
    regions: Arc<Regions>,
    phase: AtomicU8,
}

// SAFETY: libibverbs allows calls on a QP from any thread.
unsafe impl Send for VerbsQp {}
// SAFETY: as above.
unsafe impl Sync for VerbsQp {}

impl VerbsQp {
    pub(super) fn create(
        device: &Arc<devx::Device>,
        regions: &Arc<Regions>,
        depths: Depths,
        send_cq: &Arc<VerbsCq>,
        recv_cq: &Arc<VerbsCq>,
    ) -> Result<Self> {
        device.check_ours("create a QP")?;
        let mut init = sys::ibv_qp_init_attr {
            send_cq: send_cq.cq.as_ptr(),
            recv_cq: recv_cq.cq.as_ptr(),
            cap: sys::ibv_qp_cap {
                max_send_wr: depths.send,
                max_recv_wr: depths.recv,
                max_send_sge: 1,
                max_recv_sge: depths.recv.min(1),
                max_inline_data: INLINE_BYTES as u32,
            },
            qp_type: sys::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 1,
            ..Default::default()
        };
        // SAFETY: protection domain and CQs live as long as `self`.
        let qp = unsafe { sys::ibv_create_qp(device.pd(), &mut init) };
        let qp = NonNull::new(qp).ok_or_else(|| {
            let failed = io::Error::last_os_error().raw_os_error();
            let most = device.limits().map_or(0, |limits| limits.max_qp_wr);
            let (Depths { send, recv }, name) = (depths, device.name());
            let what = format!(
                "ibv_create_qp of depths {send} and {recv} on {name} (at most {most}), {INLINE_BYTES} bytes inline"
            );
            Error::verbs(what, failed.unwrap_or(libc::EIO))
        })?;
        Ok(Self {
            device: Arc::clone(device),
            qp,
            send_cq: Arc::clone(send_cq),
            recv_cq: Arc::clone(recv_cq),
            regions: Arc::clone(regions),
            phase: AtomicU8::new(Phase::Init as u8),
        })
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: created, and libibverbs does not change it.
        unsafe { self.qp.as_ref() }.qp_num
    }

    /// `ibv_modify_qp`; `what` names it in errors.
    pub(super) fn modify(&self, what: &str, attr: &mut sys::ibv_qp_attr, mask: u32) -> Result<()> {
        self.device.check_ours(what)?;
        // SAFETY: the QP lives; the attributes are read.
        match unsafe { sys::ibv_modify_qp(self.qp.as_ptr(), attr, mask as i32) } {
            0 => Ok(()),
            errno => Err(Error::verbs(
                format!("ibv_modify_qp: {what}, on {}", self.device.name()),
                errno,
            )),
        }
    }

    pub(super) fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Release);
    }

    pub(super) fn device(&self) -> &Arc<devx::Device> {
        &self.device
    }
}

impl Drop for VerbsQp {
    fn drop(&mut self) {
        if self.device.is_ours() {
            // SAFETY: created, and not in the thread's list any more. It fails when the device is gone.
            unsafe { sys::ibv_destroy_qp(self.qp.as_ptr()) };
        }
    }
}

fn element(data: &Data) -> sys::ibv_sge {
    sys::ibv_sge {
        addr: data.address,
        length: data.bytes,
        lkey: data.lkey,
    }
}

/// A request of the verbs but for its scatter list: that, and whether it is inline.
fn translate(index: u64, request: &Request) -> (sys::ibv_send_wr, Option<sys::ibv_sge>) {
    let mut wr = sys::ibv_send_wr {
        wr_id: index,
        ..Default::default()
    };
    for (asked, flag) in [
        (request.solicited, flag::IBV_SEND_SOLICITED),
        (request.fenced, flag::IBV_SEND_FENCE),
    ] {
        wr.send_flags |= if asked { flag } else { 0 };
    }
    let sent = |wr: &mut sys::ibv_send_wr, payload: &Payload| match payload {
        Payload::Nothing => None,
        Payload::Memory(data) => Some(element(data)),
        Payload::Inline { data, bytes } => {
            wr.send_flags |= flag::IBV_SEND_INLINE;
            Some(sys::ibv_sge {
                addr: data.as_ptr().expose_provenance() as u64,
                length: *bytes,
                lkey: 0,
            })
        }
    };
    let with =
        |wr: &mut sys::ibv_send_wr, with: &With, [alone, immediate, invalidating]: [u32; 3]| {
            match with {
                With::Nothing => wr.opcode = alone,
                With::Immediate(value) => {
                    wr.opcode = immediate;
                    wr.__bindgen_anon_1.imm_data = u32::from_ne_bytes(*value);
                }
                With::Invalidate(key) => {
                    wr.opcode = invalidating;
                    wr.__bindgen_anon_1.invalidate_rkey = *key;
                }
            }
        };
    let rdma = |wr: &mut sys::ibv_send_wr, remote: &Remote| {
        wr.wr.rdma = sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
            remote_addr: remote.address,
            rkey: remote.rkey,
        };
    };
    let element = match &request.action {
        Action::Write(remote, payload, along) => {
            // No write invalidates: the decoder has none.
            let writes = [
                op::IBV_WR_RDMA_WRITE,
                op::IBV_WR_RDMA_WRITE_WITH_IMM,
                op::IBV_WR_RDMA_WRITE,
            ];
            with(&mut wr, along, writes);
            rdma(&mut wr, remote);
            sent(&mut wr, payload)
        }
        Action::Read(remote, data) => {
            wr.opcode = op::IBV_WR_RDMA_READ;
            rdma(&mut wr, remote);
            data.as_ref().map(element)
        }
        Action::Send(payload, along) => {
            let sends = [
                op::IBV_WR_SEND,
                op::IBV_WR_SEND_WITH_IMM,
                op::IBV_WR_SEND_WITH_INV,
            ];
            with(&mut wr, along, sends);
            sent(&mut wr, payload)
        }
        Action::Atomic(remote, data, operation) => {
            let (opcode, compare_add, swap) = match *operation {
                Operation::CompareSwap { compare, swap } => {
                    (op::IBV_WR_ATOMIC_CMP_AND_SWP, compare, swap)
                }
                Operation::FetchAdd(add) => (op::IBV_WR_ATOMIC_FETCH_AND_ADD, add, 0),
            };
            wr.opcode = opcode;
            wr.wr.atomic = sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_2 {
                remote_addr: remote.address,
                compare_add,
                swap,
                rkey: remote.rkey,
            };
            Some(element(data))
        }
        Action::Nop | Action::Flush(_) => unreachable!("these are not posted"),
    };
    (wr, element)
}

/// How many were posted when this one was not, and why.
fn refusal(errno: i32, posted: Option<usize>) -> Refusal {
    let posted = posted.unwrap_or(0);
    match errno {
        libc::ENOMEM => Refusal::Full(posted),
        _ => Refusal::Refused(posted),
    }
}

impl Verbs for VerbsQp {
    fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            phase if phase == Phase::Init as u8 => Phase::Init,
            phase if phase == Phase::Ready as u8 => Phase::Ready,
            _ => Phase::Error,
        }
    }

    fn post_send(&self, requests: &[(u64, Request)]) -> std::result::Result<(), Refusal> {
        let mut elements = [sys::ibv_sge::default(); BATCH];
        let mut list: [sys::ibv_send_wr; BATCH] = array::from_fn(|_| Default::default());
        // In place: the scatter lists and inline data are named by address.
        for (at, (index, request)) in requests.iter().enumerate() {
            let (wr, element) = translate(*index, request);
            list[at] = wr;
            if let Some(element) = element {
                elements[at] = element;
                (list[at].sg_list, list[at].num_sge) = (&raw mut elements[at], 1);
            }
        }
        for at in 1..requests.len() {
            list[at - 1].next = &raw mut list[at];
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the list ends with `requests`, and lives, with what it names, until the call has returned.
        match unsafe { sys::ibv_post_send(self.qp.as_ptr(), list.as_mut_ptr(), &mut bad) } {
            0 => Ok(()),
            errno => Err(refusal(
                errno.abs(),
                list.iter().position(|wr| ptr::eq(wr, bad)),
            )),
        }
    }

    fn post_recv(&self, receives: &[(u64, Data)]) -> std::result::Result<(), Refusal> {
        let mut elements = [sys::ibv_sge::default(); BATCH];
        let mut list: [sys::ibv_recv_wr; BATCH] = array::from_fn(|_| Default::default());
        for (at, (index, data)) in receives.iter().enumerate() {
            elements[at] = element(data);
            list[at].wr_id = *index;
            (list[at].sg_list, list[at].num_sge) = (&raw mut elements[at], 1);
        }
        for at in 1..receives.len() {
            list[at - 1].next = &raw mut list[at];
        }
        let mut bad = ptr::null_mut();
        // SAFETY: as for `post_send`.
        match unsafe { sys::ibv_post_recv(self.qp.as_ptr(), list.as_mut_ptr(), &mut bad) } {
            0 => Ok(()),
            errno => Err(refusal(
                errno.abs(),
                list.iter().position(|wr| ptr::eq(wr, bad)),
            )),
        }
    }

    fn poll_send(&self, done: &mut [Done; BATCH]) -> usize {
        let (found, count) = self.send_cq.poll::<BATCH>();
        for (done, wc) in done.iter_mut().zip(&found[..count]) {
            *done = Done {
                index: wc.wr_id,
                fault: fault(wc),
                ..Done::default()
            };
        }
        count
    }

    fn poll_recv(&self) -> Option<Done> {
        let ([wc], count) = self.recv_cq.poll::<1>();
        (count > 0).then(|| received(&wc))
    }

    fn stop(&self) {
        self.enter(Phase::Error);
        let mut attr = sys::ibv_qp_attr {
            qp_state: sys::ibv_qp_state::IBV_QPS_ERR,
            ..Default::default()
        };
        let mask = sys::ibv_qp_attr_mask::IBV_QP_STATE;
        // It fails when the device is gone, and all of it with that.
        let _ = self.modify("to error", &mut attr, mask);
    }

    fn check_flush(&self, data: &Data) -> std::result::Result<(), Fault> {
        self.regions.check_flush(data)
    }
}

fn fault(wc: &sys::ibv_wc) -> Option<Fault> {
    syndrome_of(wc.status).map(|syndrome| Fault {
        syndrome,
        vendor: wc.vendor_err as u8,
    })
}

fn received(wc: &sys::ibv_wc) -> Done {
    use sys::{ibv_wc_flags as flags, ibv_wc_opcode as opcode};
    let has = |flag| wc.wc_flags & flag != 0;
    // SAFETY: both members of the union are these 4 bytes.
    let word = unsafe { wc.__bindgen_anon_1.imm_data };
    let (kind, immediate) = match wc.opcode {
        opcode::IBV_WC_RECV_RDMA_WITH_IMM => (IBGDA_CQE_RESP_WRITE_IMM, word.to_ne_bytes()),
        _ if has(flags::IBV_WC_WITH_IMM) => (IBGDA_CQE_RESP_SEND_IMM, word.to_ne_bytes()),
        // The key is in the host's order.
        _ if has(flags::IBV_WC_WITH_INV) => (IBGDA_CQE_RESP_SEND_INV, word.to_be_bytes()),
        _ => (IBGDA_CQE_RESP_SEND, [0; 4]),
    };
    Done {
        index: wc.wr_id,
        fault: fault(wc),
        kind: kind as u8,
        bytes: wc.byte_len,
        immediate,
    }
}
