// SPDX-License-Identifier: MIT OR Apache-2.0
//! A function, as its driver has it: everything here is a command that the function's command handlers execute.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::events::{self, Event, Queue};
use super::memory::{Memory, PAGE, RegisterError, Registry};
use super::{Events, Shared};
use crate::cmd::{self, Request};
use crate::hca::Hca;
use crate::ifc::cap::atomic_caps;
use crate::ifc::command::{
    create_cq_in, create_eq_in, create_eq_out, create_mkey_in, create_qp_in, create_umem_in,
    header, modify_qp_in, query_hca_cap_out, query_qp_out, reply, set_hca_cap_in, set_issi_in,
};
use crate::ifc::context::{ads, cqc, eqc, mkc, qpc, umem};
use crate::ifc::event::{eqe, kind};
use crate::ifc::opcode::{self, Status};
use crate::objects::qp::Service;
use crate::platform::{Function as _, ResetKind};
use crate::polling::Page;
use crate::wire::port::PortState;

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The function refused a command; the referee's record says why.
    #[error("{} failed: status {status:?}, syndrome {syndrome:#x}", opcode::name(*.opcode).unwrap_or("command"))]
    Command {
        /// The command.
        opcode: u16,
        /// Its status; `None` for a number that no status has.
        status: Option<Status>,
        /// What tells rules apart.
        syndrome: u32,
    },
    /// An argument that no command could carry.
    #[error("{0}")]
    Argument(&'static str),
    /// Memory cannot be registered.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// No memory, no thread.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// What a memory key or a QP permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct Access {
    pub local_write: bool,
    pub remote_read: bool,
    pub remote_write: bool,
    pub remote_atomic: bool,
}

impl Access {
    /// Everything.
    pub const ALL: Self = Self {
        local_write: true,
        remote_read: true,
        remote_write: true,
        remote_atomic: true,
    };
}

/// A completion queue of 64-byte entries.
#[derive(Debug, Clone, Copy)]
pub struct CqSpec {
    /// UAR page that it is armed through.
    pub uar: u32,
    /// First entry, aligned to a page.
    pub ring: u64,
    /// Doorbell record, 8 bytes.
    pub record: u64,
    /// Log2 of the entries.
    pub log_size: u32,
    /// Every entry overwrites the first.
    pub collapsed: bool,
    /// Entries may overwrite ones not consumed.
    pub overrun_ignore: bool,
}

/// A queue pair.
#[derive(Debug, Clone, Copy)]
pub struct WqSpec {
    /// Transport service.
    pub service: Service,
    /// Protection domain.
    pub pd: u32,
    /// UAR page that it is rung through.
    pub uar: u32,
    /// CQ of sends.
    pub send_cq: u32,
    /// CQ of receives.
    pub recv_cq: u32,
    /// Receive queue, and the send queue behind it at the next multiple of 64; aligned to a page.
    pub ring: u64,
    /// Doorbell record, 8 bytes.
    pub record: u64,
    /// Log2 of the send queue's basic blocks; `None` for no send queue.
    pub log_send: Option<u32>,
    /// Log2 of the receive queue's entries of 16 bytes; `None` for no receive queue.
    pub log_recv: Option<u32>,
    /// As in the QP's completions, 24 bits.
    pub user_index: u32,
}

/// The other side of a connection, and how it is treated.
#[derive(Debug, Clone, Copy)]
pub struct Peer {
    /// Its port.
    pub lid: u16,
    /// Its QP.
    pub qpn: u32,
    /// What it may do here.
    pub access: Access,
    /// IB MTU code, 1 to 5 for 256 to 4096 bytes.
    pub mtu: u8,
    /// Local ACK timeout code: 4.096 µs · 2^code; 0 waits for ever.
    pub ack_timeout: u8,
    /// Times that a packet is sent again, 0 to 7.
    pub retry_count: u8,
    /// Times that a receiver may be not ready, 7 for ever.
    pub rnr_retry: u8,
    /// Code of the time that a sender waits when no receive is posted.
    pub min_rnr_nak: u8,
}

impl Peer {
    /// A peer with full access and the defaults of most libraries.
    pub fn new(lid: u16, qpn: u32) -> Self {
        Self {
            lid,
            qpn,
            access: Access::ALL,
            mtu: 5,
            ack_timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_nak: 12,
        }
    }
}

/// Why a function is lost, `IBGDA_REASON_*` of the status page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Loss {
    /// It was reset.
    Reset = 1,
    /// It was taken away.
    Removed = 2,
}

/// States in a status page's first word.
mod state {
    pub const READY: u64 = 1;
    pub const LOST: u64 = 2;
}

/// A function, brought up. It can be used from any thread.
pub struct Nic {
    shared: Arc<Shared>,
    index: usize,
    pub(super) hca: Arc<Hca>,
    /// The driver's own page: event queues are armed through it.
    driver_uar: AtomicU32,
    status: Memory,
}

impl Nic {
    pub(super) fn new(shared: &Arc<Shared>, index: usize, hca: Arc<Hca>) -> Result<Self, Error> {
        let nic = Self {
            shared: shared.clone(),
            index,
            hca,
            driver_uar: AtomicU32::new(0),
            status: Memory::new(&shared.registry, PAGE)?,
        };
        nic.bring_up()?;
        nic.set_status(1, state::READY, 0);
        Ok(nic)
    }

    fn events(&self) -> &Arc<Events> {
        &self.shared.events[self.index]
    }

    /// What the kernel's driver does before a function can be used.
    fn bring_up(&self) -> Result<(), Error> {
        self.simple(opcode::ENABLE_HCA, 0)?;
        let mut issi = command(opcode::SET_ISSI, 16);
        set_issi_in::current_issi.set(&mut issi, 1);
        self.execute(&issi, 16)?;
        let mut atomics = command(opcode::SET_HCA_CAP, set_hca_cap_in::SIZE);
        let atomic = cmd::caps::ATOMIC << 1;
        set_hca_cap_in::op_mod.set(&mut atomics, u64::from(atomic));
        let capability = set_hca_cap_in::capability.bytes_mut(&mut atomics);
        // The device header reads what atomics return in its own byte order, as libraries on mlx5_ib do.
        atomic_caps::atomic_req_8B_endianness_mode.set(capability, 1);
        self.execute(&atomics, 16)?;
        self.simple(opcode::INIT_HCA, 0)?;
        let uar = self.object(&command(opcode::ALLOC_UAR, 16))?;
        self.driver_uar.store(uar, Ordering::Relaxed);
        let ring = Memory::new(&self.shared.registry, eqe::SIZE << events::LOG_SIZE)?;
        let ring = Queue::ring(ring);
        let mut eq = command(opcode::CREATE_EQ, create_eq_in::SIZE);
        let context = create_eq_in::eqc.bytes_mut(&mut eq);
        eqc::log_eq_size.set(context, u64::from(events::LOG_SIZE));
        eqc::uar_page.set(context, u64::from(uar));
        let mask = create_eq_in::event_bitmask.bytes_mut(&mut eq);
        // All but completions, which go to the EQ that their CQ names, and commands, which are answered at once.
        let kinds = !((1u64 << kind::COMPLETION) | (1 << kind::COMMAND));
        mask[..8].copy_from_slice(&kinds.to_be_bytes());
        pages(&mut eq, ring.addr(), ring.len() as u64);
        let out = self.execute(&eq, 16)?;
        let queue = Queue::new(create_eq_out::eq_number.get32(&out), ring);
        let events = self.events().clone();
        self.hca
            .with_device(|device| events.attach(device, Some(queue)));
        Ok(())
    }

    /// Executes a command as the driver, and returns its output if its status is good.
    pub fn execute(&self, input: &[u8], output_len: usize) -> Result<Vec<u8>, Error> {
        let request = Request { input, output_len };
        let out = self
            .hca
            .with_device(|device| cmd::execute(device, &request));
        let status = reply::status.get(&out) as u8;
        if status == 0 {
            return Ok(out);
        }
        Err(Error::Command {
            opcode: request.opcode(),
            status: Status::from_number(status),
            syndrome: reply::syndrome.get32(&out),
        })
    }

    /// A command that makes an object.
    fn object(&self, input: &[u8]) -> Result<u32, Error> {
        Ok(reply::object.get32(&self.execute(input, reply::SIZE)?))
    }

    /// A command that has an object's number, or nothing, for input.
    fn simple(&self, opcode: u16, object: u32) -> Result<(), Error> {
        let mut input = command(opcode, modify_qp_in::SIZE);
        header::object.set(&mut input, u64::from(object));
        self.execute(&input, query_hca_cap_out::SIZE).map(drop)
    }

    /// Its name, as in the referee's record.
    pub fn name(&self) -> &str {
        self.hca.name()
    }

    /// LID of its port.
    pub fn lid(&self) -> u16 {
        self.hca.with_device(|device| device.port.lid)
    }

    /// GID 0 of its port.
    pub fn gid(&self) -> [u8; 16] {
        self.hca.with_device(|device| device.port.gid(0))
    }

    /// Its status page: the words of `uapi/ibgda.h`, for kernels that wait. Generation 1, ready, until [`Nic::lose`].
    pub fn status_page(&self) -> u64 {
        self.status.addr()
    }

    fn set_status(&self, generation: u64, state: u64, reason: u32) {
        if let (Some(first), Some(second)) = (self.status.quad(0), self.status.quad(8)) {
            second.store(u64::from(reason) << 32, Ordering::Relaxed);
            first.store((generation << 32) | state, Ordering::Release);
        }
    }

    fn generation(&self) -> u64 {
        self.status
            .quad(0)
            .map_or(0, |word| word.load(Ordering::Relaxed) >> 32)
    }

    /// Takes the function away from its users, as a reset or a hot unplug does: the status page says so first, then every
    /// object is gone, and doorbells reach nothing.
    pub fn lose(&self, loss: Loss) {
        self.set_status(self.generation(), state::LOST, loss as u32);
        self.shared
            .pages
            .change()
            .retain(|page| page.nic != self.index);
        self.hca.reset(ResetKind::FunctionLevel);
        self.hca.bus_master(false);
        let events = self.events().clone();
        self.hca.with_device(|device| events.attach(device, None));
    }

    /// Brings a lost function up again, without objects and in a new generation.
    pub fn recover(&self) -> Result<(), Error> {
        if self.generation_is(state::READY) {
            return Err(Error::Argument("the function is not lost"));
        }
        self.hca.bus_master(true);
        self.bring_up()?;
        self.set_status(self.generation() + 1, state::READY, 0);
        Ok(())
    }

    fn generation_is(&self, state: u64) -> bool {
        let word = self.status.quad(0).map(|word| word.load(Ordering::Acquire));
        word.is_some_and(|word| word & 0xffff_ffff == state)
    }

    /// Whether the port is up.
    pub fn port_active(&self) -> bool {
        self.hca
            .with_device(|device| device.port.state == PortState::Active)
    }

    /// Live objects and events by name, as `connectx ctl counts` shows them, and `refusals`.
    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        let mut counts = self.hca.counts();
        counts.push(("refusals", self.shared.fabric.referee().count(self.name())));
        counts
    }

    /// One of [`Nic::counts`]; 0 for a name that there is not.
    pub fn count(&self, name: &str) -> u64 {
        let counts = self.counts();
        counts.iter().find(|(n, _)| *n == name).map_or(0, |c| c.1)
    }

    /// Injects a fault as `connectx ctl fault` and `connectx ctl link` do: `steer("fault", "wqe 0x41 0x13")`.
    pub fn steer(&self, command: &str, words: &str) -> Result<serde_json::Value, String> {
        let words: Vec<&str> = words.split_whitespace().collect();
        self.hca.steer(command, &words)
    }

    /// The oldest event that nobody has taken; waits for one, for at most `patience`.
    pub fn next_event(&self, patience: Duration) -> Option<Event> {
        self.events().next(patience)
    }

    /// Allocates a UAR page of the function and makes the page of memory at `base` its place.
    ///
    /// # Safety
    /// `base` is aligned to a page, and the page stays mapped for reading and writing until [`Nic::dealloc_uar`] or
    /// [`Nic::lose`] returns or the fabric is dropped.
    pub unsafe fn alloc_uar(&self, base: *mut u8) -> Result<u32, Error> {
        if base.is_null() || base.addr() % PAGE != 0 {
            return Err(Error::Argument("a UAR page is aligned to 4096 bytes"));
        }
        let number = self.object(&command(opcode::ALLOC_UAR, 16))?;
        // SAFETY: as required of the caller; pages leave the list before it may unmap them.
        let page = unsafe { Page::new(self.index, number, base) };
        self.shared.pages.change().push(page);
        Ok(number)
    }

    /// Frees a UAR page that nothing refers to. When this returns it is not looked at any more.
    pub fn dealloc_uar(&self, number: u32) -> Result<(), Error> {
        self.simple(opcode::DEALLOC_UAR, number)?;
        let mut pages = self.shared.pages.change();
        pages.retain(|page| (page.nic, page.number) != (self.index, number));
        Ok(())
    }

    /// Makes a protection domain.
    pub fn alloc_pd(&self) -> Result<u32, Error> {
        self.object(&command(opcode::ALLOC_PD, 16))
    }

    /// Frees a protection domain.
    pub fn dealloc_pd(&self, pd: u32) -> Result<(), Error> {
        self.simple(opcode::DEALLOC_PD, pd)
    }

    /// Makes a memory key for registered memory; it is lkey and rkey. The memory may be registered later, or not: then
    /// accesses are DMA faults.
    pub fn create_mkey(&self, pd: u32, addr: u64, len: u64, access: Access) -> Result<u32, Error> {
        if len == 0 || addr.checked_add(len).is_none() {
            return Err(Error::Argument("a memory key is for a range of memory"));
        }
        let mut input = command(opcode::CREATE_MKEY, create_mkey_in::SIZE);
        let context = create_mkey_in::mkc.bytes_mut(&mut input);
        mkc::access_mode_1_0.set(context, 1);
        mkc::lr.set(context, 1);
        mkc::lw.set(context, u64::from(access.local_write));
        mkc::rr.set(context, u64::from(access.remote_read));
        mkc::rw.set(context, u64::from(access.remote_write));
        mkc::a.set(context, u64::from(access.remote_atomic));
        mkc::qpn.set(context, 0xff_ffff);
        mkc::mkey_7_0.set(context, VARIANT);
        mkc::pd.set(context, u64::from(pd));
        mkc::start_addr.set(context, addr);
        mkc::len.set(context, len);
        // Bus addresses are contiguous here, so the largest pages will do: the driver picks them likewise.
        let log_page: u32 = 30;
        mkc::log_page_size.set(context, u64::from(log_page));
        let first = addr >> log_page;
        let list: Vec<u8> = (first..=(addr + len - 1) >> log_page)
            .flat_map(|page| (page << log_page).to_be_bytes())
            .collect();
        let octowords = (list.len() as u64).div_ceil(16);
        mkc::translations_octword_size.set(context, octowords);
        create_mkey_in::translations_octword_actual_size.set(&mut input, octowords);
        input.extend(list);
        Ok((self.object(&input)? << 8) | VARIANT as u32)
    }

    /// Ends a memory key.
    pub fn destroy_mkey(&self, key: u32) -> Result<(), Error> {
        self.simple(opcode::DESTROY_MKEY, key >> 8)
    }

    /// Makes a UMEM of registered memory, whole pages, in which queues of commands that are [executed](Nic::execute) can lie.
    pub fn create_umem(&self, addr: u64, len: u64) -> Result<u32, Error> {
        if len == 0 || addr % PAGE as u64 != 0 || len % PAGE as u64 != 0 {
            return Err(Error::Argument("a UMEM is of whole pages"));
        }
        let mut input = command(opcode::CREATE_UMEM, create_umem_in::SIZE);
        let context = create_umem_in::umem.bytes_mut(&mut input);
        umem::num_of_mtt.set(context, len / PAGE as u64);
        list(&mut input, addr, len)?;
        self.object(&input)
    }

    /// Ends a UMEM that no queue lies in.
    pub fn destroy_umem(&self, id: u32) -> Result<(), Error> {
        self.simple(opcode::DESTROY_UMEM, id)
    }

    /// Makes a completion queue. Its entries must be invalid already.
    pub fn create_cq(&self, spec: &CqSpec) -> Result<u32, Error> {
        let mut input = command(opcode::CREATE_CQ, create_cq_in::SIZE);
        let context = create_cq_in::cqc.bytes_mut(&mut input);
        cqc::cc.set(context, u64::from(spec.collapsed));
        cqc::oi.set(context, u64::from(spec.overrun_ignore));
        cqc::log_cq_size.set(context, u64::from(spec.log_size));
        cqc::uar_page.set(context, u64::from(spec.uar));
        cqc::dbr_addr.set(context, spec.record);
        list(&mut input, spec.ring, 64 << spec.log_size.min(31))?;
        self.object(&input)
    }

    /// Ends a completion queue.
    pub fn destroy_cq(&self, cqn: u32) -> Result<(), Error> {
        self.simple(opcode::DESTROY_CQ, cqn)
    }

    /// Makes a queue pair in RESET.
    pub fn create_qp(&self, spec: &WqSpec) -> Result<u32, Error> {
        let mut input = command(opcode::CREATE_QP, create_qp_in::SIZE);
        let context = create_qp_in::qpc.bytes_mut(&mut input);
        qpc::st.set(context, spec.service as u64);
        qpc::pm_state.set(context, PM_MIGRATED);
        qpc::pd.set(context, u64::from(spec.pd));
        qpc::uar_page.set(context, u64::from(spec.uar));
        qpc::user_index.set(context, u64::from(spec.user_index));
        qpc::cqn_snd.set(context, u64::from(spec.send_cq));
        qpc::cqn_rcv.set(context, u64::from(spec.recv_cq));
        qpc::dbr_addr.set(context, spec.record);
        qpc::rq_type.set(context, if spec.log_recv.is_some() { 0 } else { NO_RQ });
        qpc::log_rq_size.set(context, u64::from(spec.log_recv.unwrap_or(0)));
        qpc::no_sq.set(context, u64::from(spec.log_send.is_none()));
        qpc::log_sq_size.set(context, u64::from(spec.log_send.unwrap_or(0)));
        let receive = spec.log_recv.map_or(0, |log| 16u64 << log.min(31));
        let send = spec.log_send.map_or(0, |log| 64u64 << log.min(31));
        list(&mut input, spec.ring, receive.next_multiple_of(64) + send)?;
        let qpn = self.object(&input)?;
        for page in self.shared.pages.change().iter_mut() {
            if (page.nic, page.number) == (self.index, spec.uar) {
                page.queue_pairs.push(qpn);
            }
        }
        Ok(qpn)
    }

    /// Ends a queue pair.
    pub fn destroy_qp(&self, qpn: u32) -> Result<(), Error> {
        self.simple(opcode::DESTROY_QP, qpn)?;
        for page in self.shared.pages.change().iter_mut() {
            if page.nic == self.index {
                page.queue_pairs.retain(|other| *other != qpn);
            }
        }
        Ok(())
    }

    /// Connects a queue pair: RESET to INIT to RTR to RTS.
    pub fn connect(&self, qpn: u32, peer: &Peer) -> Result<(), Error> {
        let mut input = command(0, modify_qp_in::SIZE);
        header::object.set(&mut input, u64::from(qpn));
        let context = modify_qp_in::qpc.bytes_mut(&mut input);
        qpc::pm_state.set(context, PM_MIGRATED);
        qpc::rre.set(context, u64::from(peer.access.remote_read));
        qpc::rwe.set(context, u64::from(peer.access.remote_write));
        qpc::rae.set(context, u64::from(peer.access.remote_atomic));
        qpc::atomic_mode.set(context, ATOMIC_8B);
        qpc::mtu.set(context, u64::from(peer.mtu));
        qpc::log_msg_max.set(context, 30);
        qpc::remote_qpn.set(context, u64::from(peer.qpn));
        qpc::log_sra_max.set(context, 4);
        qpc::log_rra_max.set(context, 4);
        qpc::retry_count.set(context, u64::from(peer.retry_count));
        qpc::rnr_retry.set(context, u64::from(peer.rnr_retry));
        qpc::min_rnr_nak.set(context, u64::from(peer.min_rnr_nak));
        let path = qpc::primary_address_path.bytes_mut(context);
        ads::rlid.set(path, u64::from(peer.lid));
        ads::ack_timeout.set(path, u64::from(peer.ack_timeout));
        ads::vhca_port_num.set(path, 1);
        for step in [opcode::RST2INIT_QP, opcode::INIT2RTR_QP, opcode::RTR2RTS_QP] {
            header::opcode.set(&mut input, u64::from(step));
            self.execute(&input, 16)?;
        }
        Ok(())
    }

    /// Puts a queue pair in error: what is posted is flushed.
    pub fn to_error(&self, qpn: u32) -> Result<(), Error> {
        self.simple(opcode::TO_ERR_QP, qpn)
    }

    /// Puts a queue pair back to RESET, its queues at their first entries.
    pub fn to_reset(&self, qpn: u32) -> Result<(), Error> {
        self.simple(opcode::TO_RST_QP, qpn)
    }

    /// State of a queue pair, `MLX5_QP_STATE_*`.
    pub fn qp_state(&self, qpn: u32) -> Result<u8, Error> {
        let mut input = command(opcode::QUERY_QP, 16);
        header::object.set(&mut input, u64::from(qpn));
        let out = self.execute(&input, query_qp_out::SIZE)?;
        Ok(qpc::state.get(query_qp_out::qpc.bytes(&out)) as u8)
    }

    /// Keeps memory until a UAR page in it is freed.
    pub(super) fn keep(&self, uar: u32, memory: &Arc<Memory>) {
        for page in self.shared.pages.change().iter_mut() {
            if (page.nic, page.number) == (self.index, uar) {
                page.memory = Some(memory.clone());
            }
        }
    }

    pub(super) fn registry(&self) -> &Arc<Registry> {
        &self.shared.registry
    }
}

/// Low byte of the keys made here.
const VARIANT: u64 = 0x5a;
/// `MLX5_QP_PM_MIGRATED`.
const PM_MIGRATED: u64 = 3;
/// `MLX5_ZERO_LEN_RQ`.
const NO_RQ: u64 = 3;
/// `MLX5_ATOMIC_MODE_8B`.
const ATOMIC_8B: u64 = 3;

/// An empty command.
fn command(opcode: u16, len: usize) -> Vec<u8> {
    let mut input = vec![0; len];
    header::opcode.set(&mut input, u64::from(opcode));
    input
}

/// Appends the pages of a queue.
fn pages(input: &mut Vec<u8>, start: u64, len: u64) {
    for page in (start..start + len).step_by(PAGE) {
        input.extend(page.to_be_bytes());
    }
}

/// As [`pages`], of a queue that the caller placed.
fn list(input: &mut Vec<u8>, start: u64, len: u64) -> Result<(), Error> {
    if start % PAGE as u64 != 0 || start.checked_add(len).is_none() {
        return Err(Error::Argument("a queue starts on a page"));
    }
    if len > 1 << 30 {
        return Err(Error::Argument("a queue has at most 1 GiB"));
    }
    pages(input, start, len);
    Ok(())
}
