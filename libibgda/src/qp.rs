// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queue pairs: reliable connections whose queues a kernel drives.

#[cfg(feature = "cuda")]
use crate::cuda::Gpu;
use crate::{
    address::{LinkLayer, QpAddress},
    carrier::Carried,
    context::Context,
    counters::{self, QpCounters},
    cq::CompletionQueue,
    doorbell::PooledPage,
    error::{Error, Result, Source},
    exported::{ExportedMemory, Place},
    hub::Subscription,
    ifc::{self, Block, ads, ctx, opcode, path, qp, qpc},
    memory::{Access, PAGE_BYTES},
    nic::Object,
    pci::Bdf,
    processor::{self, HostKind, HostQueues, HostRange, Processor, ProcessorQueues},
    queue::{Handle, depth},
    route::Route,
    worker::Home,
};
use ibgda_device::abi::{
    IBGDA_BLUEFLAME, IBGDA_COLLAPSED, IBGDA_CPU_DOORBELL, IBGDA_ON_GPU, IBGDA_READY_FIRST,
    IBGDA_READY_MOST, IBGDA_RECV_WQE_BYTES, IBGDA_SHARED, IBGDA_WQEBB_BYTES, ibgda_error, ibgda_qp,
};
use ibgda_verbs_sys::uverbs::UarType;
use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

/// `qpc` values by the kernel's names.
const SERVICE_RC: u64 = 0;
const PM_STATE_MIGRATED: u64 = 3;
const RQ_TYPE_REGULAR: u64 = 0;
const RQ_TYPE_NONE: u64 = 3;
const ATOMIC_MODE_IB_COMPATIBLE: u64 = 1;
/// `MLX5_QP_OPTPAR_RRE | RAE | RWE`.
const OPT_ACCESS: u64 = 0b1110;
/// Messages of up to 2^30 bytes.
const LOG_MSG_MAX: u64 = 30;
/// Reads and atomics under way, as requester and as responder: 2^4.
const LOG_READS: u64 = 4;
/// RNR NAK timer: 0.64 ms.
const MIN_RNR_NAK: u64 = 12;

/// What a queue pair is to be like.
#[derive(Clone, Debug)]
pub struct QueuePairOptions {
    /// Send queue slots, a power of two, 1 to 32768.
    pub send_depth: u32,
    /// Receive queue slots, a power of two, 4 to 32768; or 0 for none.
    pub recv_depth: u32,
    /// What peers may do through this QP, within what each region allows.
    pub access: Access,
    /// Many threads of a kernel post and wait at the same time (`IBGDA_SHARED` of the device header); else one at a time.
    pub shared: bool,
    /// The doorbell page is write-combining, so that a kernel may send a request along with its doorbell
    /// (`IBGDA_BLUEFLAME`); it need not. Where the NIC and the platform can, and on route direct.
    pub blueflame: bool,
    /// Where send queue, receive queue and doorbell record lie: in the memory of the GPU that posts, whose kernels then
    /// need `IBGDA_ON_GPU`, and whose fences cost less; else in memory of the host that the broker gives. On route
    /// direct only. The host does not read it: [`QpCounters::told`] is then what is known to be complete.
    pub memory: Option<Arc<ExportedMemory>>,
    /// How long a kernel's post may wait for a slot of a full ring.
    pub post_timeout: Duration,
    /// Transport timeout: 4.096 µs × 2^n before a retry, 1 to 31.
    pub ack_timeout: u8,
    /// Retries before a request fails with TRANSPORT_RETRY_EXCEEDED, 0 to 7.
    pub retry_count: u8,
    /// Retries when the peer has no receive posted, 0 to 6. 7 would mean for ever, and is refused.
    pub rnr_retry: u8,
}

impl Default for QueuePairOptions {
    fn default() -> Self {
        Self {
            send_depth: 128,
            recv_depth: 0,
            access: Access::all(),
            shared: false,
            blueflame: false,
            memory: None,
            post_timeout: Duration::from_secs(2),
            ack_timeout: 14,
            retry_count: 7,
            rnr_retry: 6,
        }
    }
}

impl QueuePairOptions {
    /// Bytes that the queues of such a QP take: the receive queue, the send queue, and two lines of 64 bytes behind them.
    pub fn memory_bytes(&self) -> usize {
        self.record() + 128
    }

    /// Where the doorbell record begins.
    fn record(&self) -> usize {
        let (recv, send) = (self.recv_depth as usize, self.send_depth as usize);
        recv * IBGDA_RECV_WQE_BYTES as usize + send * IBGDA_WQEBB_BYTES as usize
    }

    /// As the handles say it, of a context on this route, but for what is of its CQ.
    fn mode(&self, route: Route) -> u32 {
        [
            (self.shared, IBGDA_SHARED),
            (self.blueflame, IBGDA_BLUEFLAME),
            (self.memory.is_some(), IBGDA_ON_GPU),
            (route.is_by_word(), IBGDA_CPU_DOORBELL),
        ]
        .into_iter()
        .filter(|(is, _)| *is)
        .fold(0, |mode, (_, bit)| mode | bit)
    }

    fn check(&self) -> Result<()> {
        let faults = [
            (
                !(1..=31).contains(&self.ack_timeout),
                format!("ack_timeout is {}, not 1 to 31", self.ack_timeout),
            ),
            (
                self.retry_count > 7,
                format!("retry_count is {}, not 0 to 7", self.retry_count),
            ),
            (
                self.rnr_retry > 6,
                format!("rnr_retry is {}, not 0 to 6", self.rnr_retry),
            ),
        ];
        match faults.into_iter().find(|(fault, _)| *fault) {
            Some((_, why)) => Err(Error::argument(
                "create_qp",
                why,
                "no wait of a QP is without end",
            )),
            None => Ok(()),
        }
    }
}

/// A reliable connection.
#[derive(Debug)]
pub struct QueuePair {
    // Dropped in this order: what a processor has of it, what rings for it, the object, then what that lies in and is rung by.
    processor: Mutex<Option<ProcessorQueues>>,
    carried: Option<Carried>,
    _subscription: Option<Subscription>,
    object: Object,
    memory: Place,
    doorbell: PooledPage,
    send_cq: Arc<CompletionQueue>,
    recv_cq: Option<Arc<CompletionQueue>>,
    handle: Handle<ibgda_qp>,
    /// Of a shared QP, the words in which its posters say which slots are written.
    ready: Box<[AtomicU64]>,
    options: QueuePairOptions,
    port: u8,
    gid_index: u8,
    // The address of the broker's status page, or the model's. It lives as long as the queue memory.
    status: (usize, HostKind),
    nic: Bdf,
    address: QpAddress,
    connected: AtomicBool,
    /// The most that `told` of its counters was.
    told: AtomicU64,
    home: Home,
}

/// `ibgda_qp::ready` of a ring that nobody has posted to: `IBGDA_READY_WORDS` words, of which the first may be told of.
fn ready_words(send_depth: u32) -> Box<[AtomicU64]> {
    // IBGDA_READY_SLOTS, which bindgen does not translate.
    let slots = (send_depth / 4).clamp(1, IBGDA_READY_MOST);
    (0..send_depth / slots)
        .map(|word| AtomicU64::new(if word == 0 { IBGDA_READY_FIRST } else { 0 }))
        .collect()
}

/// What a collapsed CQ adds to the mode of its QP.
fn collapsed(send_cq: &CompletionQueue) -> u32 {
    match send_cq.is_collapsed() {
        true => IBGDA_COLLAPSED,
        false => 0,
    }
}

fn random_psn() -> u32 {
    RandomState::new().build_hasher().finish() as u32 & 0xff_ffff
}

type Command = Block<{ ifc::QP_BYTES }>;

impl Drop for QueuePair {
    fn drop(&mut self) {
        // The CQ may live longer than the handle that its errors are to stop.
        self.send_cq.stop_at_errors(ptr::null_mut());
    }
}

impl QueuePair {
    pub(crate) fn create(
        context: &Context,
        options: &QueuePairOptions,
        send_cq: &Arc<CompletionQueue>,
        recv_cq: Option<&Arc<CompletionQueue>>,
    ) -> Result<Self> {
        options.check()?;
        depth("send queue", options.send_depth, 1)?;
        if options.recv_depth != 0 {
            depth("receive queue", options.recv_depth, 4)?;
        }
        if (options.recv_depth != 0) != recv_cq.is_some() {
            return Err(Error::argument(
                format!("create_qp with receive depth {}", options.recv_depth),
                "a receive queue and its CQ go together",
                "pass a CQ for receives if and only if the receive depth is not 0",
            ));
        }
        if options.blueflame && context.route().is_by_word() {
            return Err(Error::argument(
                format!("create_qp with BlueFlame on route {}", context.route()),
                "a thread carries its doorbells, and requests do not go along with them",
                "leave blueflame (IBGDA_BLUEFLAME) out, or take route direct",
            ));
        }
        if options.memory.is_some() && context.route().is_by_word() {
            return Err(Error::argument(
                format!("create_qp in exported memory on route {}", context.route()),
                "a thread looks for its doorbells in the queue's memory, which the host does not read",
                "leave memory out, or take route direct",
            ));
        }
        if let Some(cq) = recv_cq.filter(|cq| cq.is_collapsed()) {
            return Err(Error::argument(
                format!("create_qp with CQ {:#x} for receives", cq.number()),
                "it is collapsed: the lengths of all messages but the last would be lost",
                "make a CQ that is not collapsed for the receive queue",
            ));
        }
        let mode = options.mode(context.route());
        let device = context.device();
        let of_send = mode | collapsed(send_cq);
        send_cq.take(device, "send queue", options.send_depth, of_send)?;
        let taken = recv_cq.map_or(Ok(()), |cq| {
            cq.take(device, "receive queue", options.recv_depth, mode)
        });
        let created = taken.and_then(|()| {
            Self::build(context, options, send_cq, recv_cq).inspect_err(|_| {
                recv_cq.inspect(|cq| cq.give_back());
            })
        });
        created.inspect_err(|_| send_cq.give_back())
    }

    fn build(
        context: &Context,
        options: &QueuePairOptions,
        send_cq: &Arc<CompletionQueue>,
        recv_cq: Option<&Arc<CompletionQueue>>,
    ) -> Result<Self> {
        let (kind, blueflame_bytes) = match options.blueflame {
            true => (UarType::BlueFlame, context.device().blueflame_bytes()?),
            false => (UarType::NonCached, 0),
        };
        let doorbell = context.doorbells().take(kind)?;
        // Receive queue, send queue, then the doorbell record in a cache line of its own, and a word for doorbells that
        // a thread carries in another.
        let recv_bytes = (options.recv_depth * IBGDA_RECV_WQE_BYTES) as usize;
        let record = options.record();
        let memory = Place::take(context, options.memory.as_ref(), options.memory_bytes(), 0)?;
        let base = memory.address();

        let (rq_type, log_rq) = match options.recv_depth {
            0 => (RQ_TYPE_NONE, 0),
            depth => (RQ_TYPE_REGULAR, depth.ilog2()),
        };
        let command = Command::command(opcode::CREATE_QP)
            .set(qp::WQ_UMEM_ID, memory.umem_id().into())
            .set(qp::WQ_UMEM_OFFSET, memory.umem_offset())
            .set(qp::WQ_UMEM_VALID, 1)
            .set(ctx(qpc::SERVICE), SERVICE_RC)
            .set(ctx(qpc::PM_STATE), PM_STATE_MIGRATED)
            .set(ctx(qpc::PD), context.device().pdn().into())
            .set(ctx(qpc::RQ_TYPE), rq_type)
            .set(ctx(qpc::LOG_RQ_SIZE), log_rq.into())
            .set(ctx(qpc::LOG_RQ_STRIDE), 0)
            .set(ctx(qpc::NO_SQ), 0)
            .set(ctx(qpc::LOG_SQ_SIZE), options.send_depth.ilog2().into())
            .set(ctx(qpc::UAR_PAGE), doorbell.page().page_id().into())
            .set(ctx(qpc::USER_INDEX), 0)
            .set(ctx(qpc::LOG_PAGE_SIZE), 0)
            .set(ctx(qpc::CQN_SND), send_cq.number().into())
            .set(
                ctx(qpc::CQN_RCV),
                recv_cq.unwrap_or(send_cq).number().into(),
            )
            .set(ctx(qpc::DBR_UMEM_VALID), 1)
            .set(ctx(qpc::DBR_UMEM_ID), memory.umem_id().into())
            .set(ctx(qpc::DBR_ADDR), memory.umem_offset() + record as u64);
        let what = format!(
            "CREATE_QP (send depth {}, receive depth {})",
            options.send_depth, options.recv_depth
        );
        let object = Object::create(context.device(), &what, &command)?;

        let monitor = context.monitor();
        let hub = if monitor.listens() {
            context.hub()?
        } else {
            None
        };
        let subscription = hub
            .map(|hub| hub.subscribe_qp(&object, monitor))
            .transpose()?;

        let port = context.port();
        let address = QpAddress {
            qpn: object.number(),
            psn: random_psn(),
            link_layer: port.link_layer,
            lid: port.lid,
            mtu: port.mtu,
            gid: port.gid,
        };
        let ready = if options.shared {
            ready_words(options.send_depth)
        } else {
            Box::default()
        };
        let register = doorbell.page().register();
        let carried = context.carrier().map(|carrier| {
            // SAFETY: inside the memory, as computed above, aligned to 64 and zeroed; only doorbells are stored there.
            // Memory and page are dropped after what carries them (field order).
            let word = unsafe { base.add(record + 64) }.cast::<u64>();
            // SAFETY: as above.
            (unsafe { carrier.add(word, register) }, word)
        });
        let (carried, doorbell_word) = match carried {
            Some((carried, word)) => (Some(carried), word),
            None => (None, register),
        };
        let handle = Handle::new(ibgda_qp {
            ready: if options.shared {
                ready.as_ptr().cast::<u64>().cast_mut()
            } else {
                ptr::null_mut()
            },
            mode: options.mode(context.route()) | collapsed(send_cq),
            blueflame_bytes,
            // SAFETY: queues and record lie inside the memory, as computed above.
            send_ring: unsafe { base.add(recv_bytes) },
            recv_ring: if options.recv_depth == 0 {
                ptr::null_mut()
            } else {
                base
            },
            // SAFETY: as above.
            doorbell_record: unsafe { base.add(record) }.cast(),
            doorbell: doorbell_word,
            send_cq: send_cq.handle_ptr(),
            recv_cq: recv_cq.map_or(ptr::null_mut(), |cq| cq.handle_ptr()),
            number: object.number(),
            send_depth: options.send_depth,
            limit: options.send_depth.into(),
            recv_depth: options.recv_depth,
            post_timeout_ns: u64::try_from(options.post_timeout.as_nanos()).unwrap_or(u64::MAX),
            ..Default::default()
        });
        // SAFETY: the handle was made just now, and what it points to is not read through this.
        send_cq.stop_at_errors(unsafe { &raw mut (*handle.as_ptr()).limit });
        let pair = Self {
            processor: Mutex::default(),
            status: (
                context.session().status_page().expose_provenance(),
                context.session().status_kind(),
            ),
            nic: context.pair().nic,
            carried,
            _subscription: subscription,
            object,
            memory,
            doorbell,
            send_cq: Arc::clone(send_cq),
            recv_cq: recv_cq.map(Arc::clone),
            handle,
            ready,
            options: options.clone(),
            port: port.number,
            gid_index: port.gid_index,
            address,
            connected: AtomicBool::new(false),
            told: AtomicU64::new(0),
            home: Home::here(),
        };
        pair.reset_to_init()?;
        Ok(pair)
    }

    fn access_fields(&self, command: Command) -> Command {
        let allowed = |right| self.options.access.contains(right).into();
        command
            .set(ctx(qpc::RRE), allowed(Access::READ))
            .set(ctx(qpc::RWE), allowed(Access::WRITE))
            .set(ctx(qpc::RAE), allowed(Access::ATOMIC))
    }

    fn reset_to_init(&self) -> Result<()> {
        let command = Command::command(opcode::RST2INIT_QP)
            .set(qp::QPN, self.number().into())
            .set(ctx(qpc::PM_STATE), PM_STATE_MIGRATED)
            .set(ads(path::PKEY_INDEX), 0)
            .set(ads(path::PORT), self.port.into());
        self.object.modify(
            &format!("RST2INIT_QP {:#x}", self.number()),
            &self.access_fields(command),
        )
    }

    /// Joins this QP to the peer whose address this is; the peer must do the same with this one's.
    ///
    /// The MTU is the smaller of both ports'. Requests may be posted when both sides have returned.
    ///
    /// # Errors
    /// `EISCONN`: connected before; `EINVAL` and firmware's refusals.
    pub fn connect(&self, peer: &QpAddress) -> Result<()> {
        let name = format!(
            "QP {:#x} to QP {:#x} at LID {:#x}",
            self.number(),
            peer.qpn,
            peer.lid
        );
        // Round trip: the same rules for addresses that came as a struct.
        QpAddress::from_bytes(&peer.to_bytes())?;
        self.address.check_reaches(peer)?;
        if self.connected.swap(true, Ordering::Relaxed) {
            return Err(Error::new(
                Source::Argument,
                libc::EISCONN,
                format!("connect {name}"),
                "this QP was connected before",
                "create another QP for another peer",
            ));
        }
        let to_rtr = Command::command(opcode::INIT2RTR_QP)
            .set(qp::QPN, self.number().into())
            .set(qp::OPT_PARAM_MASK, OPT_ACCESS)
            .set(ctx(qpc::PM_STATE), PM_STATE_MIGRATED)
            .set(ctx(qpc::MTU), self.address.mtu.min(peer.mtu).into())
            .set(ctx(qpc::LOG_MSG_MAX), LOG_MSG_MAX)
            .set(ctx(qpc::REMOTE_QPN), peer.qpn.into())
            .set(ctx(qpc::NEXT_RCV_PSN), peer.psn.into())
            .set(ctx(qpc::LOG_RRA_MAX), LOG_READS)
            .set(ctx(qpc::MIN_RNR_NAK), MIN_RNR_NAK)
            .set(ctx(qpc::ATOMIC_MODE), ATOMIC_MODE_IB_COMPATIBLE)
            .set(ads(path::RLID), peer.lid.into())
            .set(ads(path::PORT), self.port.into());
        // Another subnet is reached through a router, which needs the global header. On Ethernet that is all there is.
        let near = peer.gid[..8] == self.address.gid[..8];
        let to_rtr = if near && peer.link_layer != LinkLayer::Ethernet {
            to_rtr
        } else {
            let gid = u128::from_be_bytes(peer.gid);
            to_rtr
                .set(ads(path::GRH), 1)
                .set(ads(path::SRC_ADDR_INDEX), self.gid_index.into())
                .set(ads(path::HOP_LIMIT), 64)
                .set(ads(path::RGID_HIGH), (gid >> 64) as u64)
                .set(ads(path::RGID_LOW), gid as u64)
        };
        self.object
            .modify(&format!("INIT2RTR_QP, {name}"), &self.access_fields(to_rtr))?;

        let to_rts = Command::command(opcode::RTR2RTS_QP)
            .set(qp::QPN, self.number().into())
            .set(ctx(qpc::PM_STATE), PM_STATE_MIGRATED)
            .set(ctx(qpc::NEXT_SEND_PSN), self.address.psn.into())
            .set(ctx(qpc::LOG_SRA_MAX), LOG_READS)
            .set(ctx(qpc::RETRY_COUNT), self.options.retry_count.into())
            .set(ctx(qpc::RNR_RETRY), self.options.rnr_retry.into())
            .set(ads(path::ACK_TIMEOUT), self.options.ack_timeout.into());
        self.object.modify(&format!("RTR2RTS_QP, {name}"), &to_rts)
    }

    /// Stops the QP: requests under way and later ones are flushed, each with an error completion.
    ///
    /// # Errors
    /// Firmware's refusal.
    pub fn stop(&self) -> Result<()> {
        let command = Block::<{ ifc::QP_2ERR_BYTES }>::command(opcode::TO_ERR_QP)
            .set(qp::QPN, self.number().into());
        self.object
            .modify(&format!("2ERR_QP {:#x}", self.number()), &command)
    }

    /// QP number.
    pub fn number(&self) -> u32 {
        self.object.number()
    }

    /// What the peer needs to connect to this QP.
    pub fn address(&self) -> QpAddress {
        self.address
    }

    /// `EPERM` in a forked child.
    pub(crate) fn check_ours(&self, what: &str) -> Result<()> {
        let number = self.number();
        self.home.check(|| format!("{what}, QP {number:#x}"))
    }

    /// Whether this is the process that made it, and not a child of it.
    fn is_ours(&self) -> bool {
        self.home.is_here()
    }

    /// Firmware's index of the doorbell's UAR page, and the page's offset in the NIC's BAR 0 as the broker found it.
    pub fn doorbell_page(&self) -> (u32, u64) {
        (
            self.doorbell.page().page_id(),
            self.doorbell.page().bar_offset(),
        )
    }

    /// What it has done so far; no system call. All 0 in a forked child, in which its queues are not mapped.
    pub fn counters(&self) -> QpCounters {
        if !self.is_ours() {
            return QpCounters::default();
        }
        // SAFETY: the handle and all that it names live as long as `self`.
        let mut counters = unsafe {
            let reads_record = self.options.memory.is_none();
            counters::read(self.handle.as_ptr(), self.options.shared, reads_record)
        };
        // While tellers of a shared QP relieve each other, only what was told for certain is known.
        counters.told = counters
            .told
            .max(self.told.fetch_max(counters.told, Ordering::Relaxed));
        counters.carried = self.carried.as_ref().map_or(0, Carried::count);
        counters
    }

    /// What a kernel posts with. Valid as long as the QP lives; one thread at a time may use it, unless it is shared. Its
    /// `mode` says how: the template argument of the device calls, or what `IBGDA_BY_ROUTE` takes it from.
    pub fn device_handle(&self) -> *mut ibgda_qp {
        self.handle.as_ptr()
    }

    /// What a kernel of `gpu` posts with: a `struct ibgda_qp` in the GPU's memory. The first call makes it, and from then
    /// on kernels use it, and not [`QueuePair::device_handle`]; valid as long as the QP lives, which no kernel may outlast.
    /// What a kernel's wait finds is latched in it: see [`QueuePair::error_on_gpu`].
    ///
    /// # Errors
    /// `EBUSY`: another GPU has it; CUDA's, among them `EPERM` when NVIDIA's driver does not let this process have the
    /// doorbell: the text says what opens its gate.
    #[cfg(feature = "cuda")]
    pub fn device_handle_on(&self, gpu: &Gpu) -> Result<u64> {
        let processor: Arc<dyn Processor> = Arc::new(gpu.clone());
        self.handle_of(&processor)
    }

    /// The same of any processor: what its kernels post with, in its memory.
    ///
    /// # Errors
    /// As of `device_handle_on`, with the processor's errors.
    pub fn handle_of(&self, processor: &Arc<dyn Processor>) -> Result<u64> {
        self.check_ours("a handle for a processor")?;
        let mut slot = crate::worker::lock(&self.processor);
        match &*slot {
            Some(there) if there.processor().name() == processor.name() => return Ok(there.qp()),
            Some(_) => {
                return Err(processor::used_by_another(format!(
                    "QP {:#x}",
                    self.number()
                )));
            }
            None => {}
        }
        let mut ranges = vec![HostRange {
            address: ptr::with_exposed_provenance(self.status.0),
            bytes: PAGE_BYTES as usize,
            kind: self.status.1,
            bar: None,
        }];
        let mut there = Vec::new();
        let name = processor.name();
        let cqs = [Some(&self.send_cq), self.recv_cq.as_ref()];
        let cqs = cqs.into_iter().flatten();
        for place in cqs.map(|cq| cq.memory()).chain([&self.memory]) {
            there.extend(place.of_processor(&name)?);
            ranges.extend(place.of_host().map(|memory| HostRange {
                address: memory.address(),
                bytes: memory.len(),
                kind: HostKind::Memory,
                bar: None,
            }));
        }
        // Where a thread carries the doorbells, their word lies in the queues' memory, and the page is not the GPU's.
        let own = self.carried.is_none().then(|| self.doorbell.page());
        let cqs = [Some(&self.send_cq), self.recv_cq.as_ref()];
        let arming = cqs.into_iter().flatten().filter_map(|cq| cq.arm_page());
        ranges.extend(own.into_iter().chain(arming).map(|page| HostRange {
            address: page.address(),
            bytes: PAGE_BYTES as usize,
            kind: page.kind(),
            bar: Some((self.nic, page.bar_offset())),
        }));
        // SAFETY: the handles live as long as `self` and its CQs; no kernel uses them while another handle is asked for.
        let (qp, send_cq, recv_cq) = unsafe {
            let recv_cq = self.recv_cq.as_ref().map(|cq| *cq.handle_ptr());
            (*self.handle.as_ptr(), *self.send_cq.handle_ptr(), recv_cq)
        };
        let ready = self.ready.iter().map(|word| word.load(Ordering::Relaxed));
        let host = HostQueues {
            qp,
            send_cq,
            recv_cq,
            ready: ready.collect(),
            ranges,
            there,
        };
        // SAFETY: all ranges are of this QP, its CQs and what these keep, and outlive `self.processor` (field order).
        let new = unsafe { ProcessorQueues::new(processor, &host) }?;
        let handle = new.qp();
        *slot = Some(new);
        Ok(handle)
    }

    /// The first error that a kernel on the GPU, or another processor, latched, of the send queue or else of the receive
    /// queue; `None` as long as there is none, or no handle there. Waits for kernels of the default stream, as copies from
    /// a GPU do.
    ///
    /// # Errors
    /// The processor's.
    pub fn error_on_gpu(&self) -> Result<Option<ibgda_error>> {
        self.check_ours("the first error")?;
        let slot = crate::worker::lock(&self.processor);
        let Some(there) = &*slot else { return Ok(None) };
        match there.error(false)? {
            Some(error) => Ok(Some(error)),
            None => there.error(true),
        }
    }

    /// The CQ of its send queue.
    pub fn send_cq(&self) -> &Arc<CompletionQueue> {
        &self.send_cq
    }

    /// The CQ of its receive queue.
    pub fn recv_cq(&self) -> Option<&Arc<CompletionQueue>> {
        self.recv_cq.as_ref()
    }
}
