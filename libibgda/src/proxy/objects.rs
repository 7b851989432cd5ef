// SPDX-License-Identifier: MIT OR Apache-2.0
//! What queues are made of, by the commands that a NIC's firmware would take: here they are carried out by verbs calls.

use super::{
    Device, Session,
    cqe::CqWriter,
    memory::pages,
    names::CqPlace,
    queue::{Phase, Ring, Sender},
    receive::Receiver,
    thread::Queue,
    verbs::{Depths, VerbsCq, VerbsQp},
};
use crate::{
    devx,
    error::{Error, Result},
    ifc::{self, Block, Field, ads, cqc, create_cq, ctx, header, opcode, path, qp, qpc},
    mapping::Mapping,
};
use ibgda_device::abi::{IBGDA_CQE_BYTES, IBGDA_RECV_WQE_BYTES, IBGDA_WQEBB_BYTES};
use ibgda_verbs_sys::{
    ibv_access_flags as access, ibv_ah_attr, ibv_global_route, ibv_qp_attr,
    ibv_qp_attr_mask as mask, ibv_qp_state as state,
};
use std::{
    ptr,
    sync::{Arc, atomic::AtomicU32},
};

/// Memory of queues.
#[derive(Debug)]
pub(crate) struct QueueMemory {
    memory: Mapping,
    // Kernels that use the queues read its status page.
    _session: Arc<Session>,
}

impl QueueMemory {
    pub(crate) fn alloc(session: &Arc<Session>, bytes: usize) -> Result<Self> {
        Ok(Self {
            memory: pages("queues", bytes)?,
            _session: Arc::clone(session),
        })
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.memory.address()
    }

    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }
}

/// Memory that commands name by a number.
#[derive(Debug)]
struct Named {
    device: Arc<Device>,
    number: u32,
}

impl Named {
    fn new(device: &Arc<Device>, address: *mut u8, bytes: usize) -> Self {
        Self {
            number: device.names.add(address, bytes),
            device: Arc::clone(device),
        }
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        if self.device.verbs.is_ours() {
            self.device.names.remove(self.number);
        }
    }
}

/// What stands for a page of doorbell registers: memory, at whose register the thread looks.
#[derive(Debug)]
pub(crate) struct Uar {
    name: Named,
    // After `name` nothing begins to look at it.
    page: Mapping,
}

impl Uar {
    pub(crate) fn alloc(device: &Arc<Device>) -> Result<Self> {
        let page = pages("a doorbell page", 1)?;
        Ok(Self {
            name: Named::new(device, page.address(), page.len()),
            page,
        })
    }

    pub(crate) fn page_id(&self) -> u32 {
        self.name.number
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.page.address()
    }
}

/// Memory that queues lie in.
#[derive(Debug)]
pub(crate) struct Umem(Named);

impl Umem {
    pub(crate) fn register(device: &Arc<Device>, address: *mut u8, bytes: usize) -> Self {
        Self(Named::new(device, address, bytes))
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.number
    }
}

#[derive(Debug)]
enum Kind {
    Cq,
    Qp(Arc<VerbsQp>),
}

/// A CQ or a QP.
#[derive(Debug)]
pub(crate) struct Object {
    device: Arc<Device>,
    kind: Kind,
    pub(crate) number: u32,
}

/// RNR NAK timer: 10.24 ms. A receive that a kernel has posted is the verbs' up to a millisecond later, and as much as it
/// takes to wake a thread: a peer of the fewest retries that are of use comes again after that.
const MIN_RNR_NAK: u8 = 20;

/// A command for which this route has nothing.
fn unknown(what: &str, why: impl Into<String>) -> Error {
    Error::new(
        crate::error::Source::Argument,
        libc::EOPNOTSUPP,
        format!("{what} on route proxy"),
        why,
        "use another route for it",
    )
}

impl Object {
    pub(crate) fn create<const N: usize>(
        device: &Arc<Device>,
        what: &str,
        input: &Block<N>,
    ) -> Result<Self> {
        device.verbs.check_ours(what)?;
        let (kind, number) = match input.get(header::OPCODE) as u16 {
            opcode::CREATE_CQ => (Kind::Cq, create_cq(device, what, input)?),
            opcode::CREATE_QP => {
                let qp = create_qp(device, what, input)?;
                let number = qp.number();
                (Kind::Qp(qp), number)
            }
            other => return Err(unknown(what, format!("there is no command {other:#x}"))),
        };
        Ok(Self {
            device: Arc::clone(device),
            kind,
            number,
        })
    }

    pub(crate) fn modify<const N: usize>(&self, what: &str, input: &Block<N>) -> Result<()> {
        let Kind::Qp(qp) = &self.kind else {
            return Err(unknown(what, "a CQ has nothing to modify"));
        };
        match input.get(header::OPCODE) as u16 {
            opcode::RST2INIT_QP => to_init(qp, what, input),
            opcode::INIT2RTR_QP => to_rtr(qp, what, input),
            opcode::RTR2RTS_QP => to_rts(qp, what, input),
            opcode::TO_ERR_QP => {
                let mut attr = attr(state::IBV_QPS_ERR);
                qp.enter(Phase::Error);
                qp.modify(what, &mut attr, mask::IBV_QP_STATE)
            }
            other => Err(unknown(what, format!("there is no command {other:#x}"))),
        }
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        if !self.device.verbs.is_ours() {
            return;
        }
        match &self.kind {
            Kind::Cq => self.device.cqs.remove(self.number),
            // The thread may be at it; after this it is not.
            Kind::Qp(_) => drop(self.device.thread.remove(self.number)),
        }
    }
}

fn create_cq<const N: usize>(device: &Arc<Device>, what: &str, input: &Block<N>) -> Result<u32> {
    let field = |field: Field| input.get(field.at(ifc::CREATE_CQ_CQC));
    let depth = 1_u32 << field(cqc::LOG_SIZE);
    let ring = device.names.find(
        what,
        input.get(create_cq::UMEM_ID) as u32,
        input.get(create_cq::UMEM_OFFSET),
        u64::from(depth * IBGDA_CQE_BYTES),
    )?;
    let (umem, record) = (field(cqc::DBR_UMEM_ID) as u32, field(cqc::DBR_ADDR));
    let record = device.names.find(what, umem, record, 8)?;
    let verbs = Arc::new(VerbsCq::create(&device.verbs, depth)?);
    let number = verbs.number();
    device.cqs.add(
        number,
        CqPlace {
            verbs,
            ring: ring.expose_provenance(),
            depth,
            record: record.expose_provenance(),
            collapsed: field(cqc::COLLAPSED) != 0,
            arrivals: None,
        },
    );
    Ok(number)
}

fn create_qp<const N: usize>(
    device: &Arc<Device>,
    what: &str,
    input: &Block<N>,
) -> Result<Arc<VerbsQp>> {
    let field = |field: Field| input.get(ctx(field));
    let send = 1_u32 << field(qpc::LOG_SQ_SIZE);
    // rq_type 0: a receive queue of its own.
    let recv = match field(qpc::RQ_TYPE) {
        0 => 1_u32 << field(qpc::LOG_RQ_SIZE),
        _ => 0,
    };
    let recv_bytes = u64::from(recv * IBGDA_RECV_WQE_BYTES);
    let bytes = recv_bytes + u64::from(send * IBGDA_WQEBB_BYTES);
    let (umem, offset) = (
        input.get(qp::WQ_UMEM_ID) as u32,
        input.get(qp::WQ_UMEM_OFFSET),
    );
    let queues = device.names.find(what, umem, offset, bytes)?;
    let (umem, record) = (field(qpc::DBR_UMEM_ID) as u32, field(qpc::DBR_ADDR));
    let record = device
        .names
        .find(what, umem, record, 8)?
        .cast::<AtomicU32>();
    let register = devx::Uar::DOORBELL_OFFSET as u64;
    let word = device
        .names
        .find(what, field(qpc::UAR_PAGE) as u32, register, 8)?;

    let send_cq = device.cqs.find(what, field(qpc::CQN_SND) as u32)?;
    let recv_cq = device.cqs.find(what, field(qpc::CQN_RCV) as u32)?;
    let made = Arc::new(VerbsQp::create(
        &device.verbs,
        &device.regions,
        Depths { send, recv },
        &send_cq.verbs,
        &recv_cq.verbs,
    )?);
    let ring = |slots: *mut u8, depth, record: *mut AtomicU32, cq: &CqPlace| Ring {
        slots: slots.cast_const(),
        depth,
        record: record.cast_const(),
        // SAFETY: they lie in the memory of the QP's CQ, which lives as long as the QP's object.
        cq: unsafe {
            CqWriter::new(
                ptr::with_exposed_provenance_mut(cq.ring),
                cq.depth,
                ptr::with_exposed_provenance(cq.record),
                made.number(),
            )
        }
        .collapsed(cq.collapsed)
        .counting(cq.arrivals.clone()),
    };
    // SAFETY: behind the receive queue, in the same memory, as was checked.
    let slots = unsafe { queues.add(recv_bytes as usize) };
    // SAFETY: as above: two words of a record.
    let send_record = unsafe { record.add(1) };
    let sent = ring(slots, send, send_record, &send_cq);
    // SAFETY: memory and page live as long as the QP's object, which takes the queue from the thread first.
    let sender = unsafe { Sender::new(sent, word.cast_const().cast(), made.number()) };
    let receiver = (recv != 0).then(|| Receiver::new(ring(queues, recv, record, &recv_cq)));
    device
        .thread
        .add(Queue::new(Arc::clone(&made), sender, receiver));
    Ok(made)
}

fn attr(to: state::Type) -> ibv_qp_attr {
    ibv_qp_attr {
        qp_state: to,
        ..Default::default()
    }
}

/// What peers may do, in the flags of the verbs.
fn access_flags<const N: usize>(input: &Block<N>) -> u32 {
    [
        (qpc::RRE, access::IBV_ACCESS_REMOTE_READ),
        (qpc::RWE, access::IBV_ACCESS_REMOTE_WRITE),
        (qpc::RAE, access::IBV_ACCESS_REMOTE_ATOMIC),
    ]
    .into_iter()
    .filter(|(field, _)| input.get(ctx(*field)) != 0)
    .fold(0, |flags, (_, flag)| flags | flag.0)
}

fn to_init<const N: usize>(qp: &VerbsQp, what: &str, input: &Block<N>) -> Result<()> {
    let mut attr = ibv_qp_attr {
        pkey_index: input.get(ads(path::PKEY_INDEX)) as u16,
        port_num: input.get(ads(path::PORT)) as u8,
        qp_access_flags: access_flags(input),
        ..attr(state::IBV_QPS_INIT)
    };
    let mask = mask::IBV_QP_STATE
        | mask::IBV_QP_PKEY_INDEX
        | mask::IBV_QP_PORT
        | mask::IBV_QP_ACCESS_FLAGS;
    qp.modify(what, &mut attr, mask)
}

fn to_rtr<const N: usize>(qp: &VerbsQp, what: &str, input: &Block<N>) -> Result<()> {
    let field = |field: Field| input.get(ctx(field));
    let by_path = |field: Field| input.get(ads(field));
    let most = qp.device().limits()?.max_qp_rd_atom;
    let mut dgid = [0; 16];
    dgid[..8].copy_from_slice(&by_path(path::RGID_HIGH).to_be_bytes());
    dgid[8..].copy_from_slice(&by_path(path::RGID_LOW).to_be_bytes());
    let mut attr = ibv_qp_attr {
        path_mtu: field(qpc::MTU) as u32,
        dest_qp_num: field(qpc::REMOTE_QPN) as u32,
        rq_psn: field(qpc::NEXT_RCV_PSN) as u32,
        max_dest_rd_atomic: reads(field(qpc::LOG_RRA_MAX), most),
        min_rnr_timer: (field(qpc::MIN_RNR_NAK) as u8).max(MIN_RNR_NAK),
        ah_attr: ibv_ah_attr {
            dlid: by_path(path::RLID) as u16,
            is_global: by_path(path::GRH) as u8,
            port_num: by_path(path::PORT) as u8,
            grh: ibv_global_route {
                dgid: ibgda_verbs_sys::ibv_gid { raw: dgid },
                sgid_index: by_path(path::SRC_ADDR_INDEX) as u8,
                hop_limit: by_path(path::HOP_LIMIT) as u8,
                ..Default::default()
            },
            ..Default::default()
        },
        ..attr(state::IBV_QPS_RTR)
    };
    let mask = mask::IBV_QP_STATE
        | mask::IBV_QP_AV
        | mask::IBV_QP_PATH_MTU
        | mask::IBV_QP_DEST_QPN
        | mask::IBV_QP_RQ_PSN
        | mask::IBV_QP_MAX_DEST_RD_ATOMIC
        | mask::IBV_QP_MIN_RNR_TIMER;
    qp.modify(what, &mut attr, mask)
}

/// Reads and atomics under way at a time: what was asked for, if the device can.
fn reads(log: u64, most: i32) -> u8 {
    (1 << log).min(most.clamp(0, 255)) as u8
}

fn to_rts<const N: usize>(qp: &VerbsQp, what: &str, input: &Block<N>) -> Result<()> {
    let field = |field: Field| input.get(ctx(field));
    let most = qp.device().limits()?.max_qp_init_rd_atom;
    let mut attr = ibv_qp_attr {
        sq_psn: field(qpc::NEXT_SEND_PSN) as u32,
        max_rd_atomic: reads(field(qpc::LOG_SRA_MAX), most),
        retry_cnt: field(qpc::RETRY_COUNT) as u8,
        rnr_retry: field(qpc::RNR_RETRY) as u8,
        timeout: input.get(ads(path::ACK_TIMEOUT)) as u8,
        ..attr(state::IBV_QPS_RTS)
    };
    let mask = mask::IBV_QP_STATE
        | mask::IBV_QP_SQ_PSN
        | mask::IBV_QP_MAX_QP_RD_ATOMIC
        | mask::IBV_QP_RETRY_CNT
        | mask::IBV_QP_RNR_RETRY
        | mask::IBV_QP_TIMEOUT;
    qp.modify(what, &mut attr, mask)?;
    // From here on the thread posts what kernels have told of.
    qp.enter(Phase::Ready);
    Ok(())
}
