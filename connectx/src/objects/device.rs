// SPDX-License-Identifier: MIT OR Apache-2.0
//! Everything that one function holds.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vm_memory::VolatileSlice;

use super::memic;
use super::memory::{Mkey, Umem};
use super::pacing::{Element, Rate};
use super::qp::Qp;
use super::queue::{Cq, Eq, Srq};
use super::signature::{Psv, SignatureError};
use super::table::{Reuse, Table};
use super::{Owned, Uctx};
use crate::cmd::CommandQueue;
use crate::cmd::caps::Capabilities;
use crate::engine::blueflame::Copies;
use crate::engine::held::Held;
use crate::engine::odp::PageFaults;
use crate::engine::timer::Timers;
use crate::fault::Faults;
use crate::log::{Referee, Refusal};
use crate::platform::{Dma, DmaFault, Interrupts};
use crate::polling::mapped::Mapped;
use crate::wire::packet::Packet;
use crate::wire::port::{CAP_MASK, Port};

/// Pages of the BAR that device memory lies in.
pub const MEMIC_PAGES: std::ops::Range<u32> = 0x10..FIRST_UAR;
/// First UAR page given out: lower pages hold the init segment, the MSI-X tables and device memory.
pub const FIRST_UAR: u32 = 0x100;
/// UAR pages: the rest of a 32 MiB BAR.
pub const UARS: usize = 8192 - FIRST_UAR as usize;

/// Bytes of a node's description (IBA 14.2.5.2).
pub const NODE_DESCRIPTION_LEN: usize = 64;

/// Entries of page lists and key lists that a function has room for: 128 MiB of them, enough for 64 GiB in 4 KiB pages.
/// One list can be given to any number of objects, so without this a guest could have us hold far more than it has.
pub const TRANSLATIONS: usize = 1 << 24;

/// The host's side of the function: memory and interrupts.
#[derive(Default)]
pub struct Host {
    dma: Option<Arc<dyn Dma>>,
    /// Memory on the device, which needs no bus.
    pub memic: Arc<memic::Memory>,
    interrupts: Option<Arc<dyn Interrupts>>,
    /// Bus mastering is on.
    pub bus_master: bool,
    faults: AtomicU64,
}

impl Host {
    /// Gives the function its view of memory and its interrupts.
    pub fn connect(&mut self, dma: Arc<dyn Dma>, interrupts: Arc<dyn Interrupts>) {
        self.dma = Some(dma);
        self.interrupts = Some(interrupts);
    }

    #[inline]
    fn with_dma<T>(
        &self,
        addr: u64,
        len: usize,
        write: bool,
        access: impl FnOnce(&dyn Dma) -> Result<T, DmaFault>,
    ) -> Result<T, DmaFault> {
        let result = match &self.dma {
            _ if addr & memic::WINDOW != 0 => access(&*self.memic),
            Some(dma) if self.bus_master => access(&**dma),
            _ => Err(DmaFault { addr, len, write }),
        };
        if result.is_err() {
            self.faults.fetch_add(1, Ordering::Relaxed);
        }
        result
    }

    /// Reads memory.
    #[inline]
    pub fn read(&self, addr: u64, buf: &mut [u8]) -> Result<(), DmaFault> {
        let len = buf.len();
        self.with_dma(addr, len, false, |dma| dma.read(addr, buf))
    }

    /// Reads a big-endian 32-bit word.
    #[inline]
    pub fn read_be32(&self, addr: u64) -> Result<u32, DmaFault> {
        let mut word = [0; 4];
        self.read(addr, &mut word)?;
        Ok(u32::from_be_bytes(word))
    }

    /// Writes memory.
    #[inline]
    pub fn write(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault> {
        self.with_dma(addr, buf.len(), true, |dma| dma.write(addr, buf))
    }

    /// Stores 1, 4 or 8 bytes at once, after every earlier write.
    #[inline]
    pub fn publish(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault> {
        self.with_dma(addr, buf.len(), true, |dma| dma.publish(addr, buf))
    }

    /// Writes a queue's entry, its last 8 bytes in one store after all others.
    #[inline]
    pub fn write_entry(&self, addr: u64, entry: &[u8]) -> Result<(), DmaFault> {
        self.with_dma(addr, entry.len(), true, |dma| dma.write_entry(addr, entry))
    }

    /// Changes an aligned quadword atomically.
    pub fn atomic64(
        &self,
        addr: u64,
        change: &mut dyn FnMut(u64) -> Option<u64>,
    ) -> Result<u64, DmaFault> {
        self.with_dma(addr, 8, true, |dma| dma.atomic64(addr, change))
    }

    /// Lends memory; see [`Dma::lend`].
    pub fn lend(
        &self,
        addr: u64,
        len: usize,
        write: bool,
        f: &mut dyn FnMut(VolatileSlice<'_>),
    ) -> Result<(), DmaFault> {
        self.with_dma(addr, len, write, |dma| dma.lend(addr, len, write, f))
    }

    /// Copies other memory to `addr`.
    pub fn fill(&self, addr: u64, from: VolatileSlice<'_>) -> Result<(), DmaFault> {
        let mut rest = from;
        self.lend(addr, from.len(), true, &mut |to| {
            // A piece is never longer than what was asked for and not given yet.
            if let Ok((head, tail)) = rest.split_at(to.len()) {
                head.copy_to_volatile_slice(to);
                rest = tail;
            }
        })
    }

    /// The memory, if it may be reached now.
    pub fn reach(&self) -> Option<Reach> {
        let bus = self.dma.clone().filter(|_| self.bus_master)?;
        Some(Reach {
            bus,
            memic: self.memic.clone(),
        })
    }

    /// Raises an interrupt.
    pub fn interrupt(&self, vector: u16) {
        if let Some(interrupts) = &self.interrupts {
            interrupts.raise(vector);
        }
    }

    /// Accesses that reached no memory.
    pub fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }
}

/// The memory that a function reaches: behind the bus, and its own.
#[derive(Clone)]
pub struct Reach {
    bus: Arc<dyn Dma>,
    memic: Arc<memic::Memory>,
}

impl Reach {
    /// The one of the two that an address lies in.
    pub fn at(&self, addr: u64) -> &dyn Dma {
        if addr & memic::WINDOW != 0 {
            &*self.memic
        } else {
            &*self.bus
        }
    }
}

/// How far the driver has brought the function up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// After reset, before ENABLE_HCA.
    Disabled,
    /// ENABLE_HCA done.
    Enabled,
    /// INIT_HCA done: objects may be made.
    Initialised,
}

/// Events that have no other trace.
#[derive(Debug, Default, Clone, Copy)]
#[allow(missing_docs)]
pub struct Counters {
    pub commands: u64,
    pub commands_refused: u64,
    /// Times that the function was reset, by whomever.
    pub resets: u64,
    /// Objects that were still there when the driver tore the HCA down.
    pub never_reclaimed: u64,
    /// Doorbells for an object through a page that is not the object's.
    pub foreign_doorbells: u64,
    /// Doorbells on a page that is not allocated.
    pub stale_doorbells: u64,
    /// Doorbells that name no object.
    pub lost_doorbells: u64,
    /// Send doorbells that claim more than the doorbell record.
    pub doorbells_ahead: u64,
    /// WQEs whose control segment did not belong to their place: fetched before complete, or overwritten.
    pub torn_wqes: u64,
    pub cq_overruns: u64,
    pub eq_overruns: u64,
    pub error_cqes: u64,
    pub flush_cqes: u64,
    pub packets_sent: u64,
    pub packets_received: u64,
    pub packets_dropped: u64,
    /// Packets that the link lost because it was told to.
    pub packets_lost: u64,
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub retransmissions: u64,
    pub rnr_naks: u64,
    pub access_naks: u64,
    /// WQEs taken from a UAR page and not from memory.
    pub blueflame_wqes: u64,
    /// Doorbells found in the memory of a mapped page, and of these the ones that may have waited for longer than 5 us.
    pub found_doorbells: u64,
    pub late_doorbells: u64,
    /// Wrong signatures that completions told of.
    pub signature_errors: u64,
    /// Page faults that the driver was told of.
    pub page_faults: u64,
}

/// Memory that the driver lends the device.
#[derive(Debug, Default)]
pub struct Pages {
    /// Bus addresses of the pages.
    pub lent: Vec<u64>,
    /// As many as the few objects of a device at rest need.
    pub at_rest: usize,
    /// The driver has been asked for pages, or told of some to take back, and has done neither yet.
    pub asked: bool,
}

/// One function.
pub struct Device {
    /// Name in logs.
    pub name: String,
    /// Host's side.
    pub host: Host,
    /// Where refusals go.
    pub referee: Referee,
    /// InfiniBand port.
    pub port: Port,
    /// Start-up phase.
    pub phase: Phase,
    /// Interface step sequence id that the driver chose.
    pub issi: u16,
    /// Capabilities.
    pub caps: Capabilities,
    /// What they are after a reset.
    pub power_on_caps: Capabilities,
    /// It is an SR-IOV virtual function.
    pub virtual_function: bool,
    /// Command queue.
    pub commands: CommandQueue,
    /// Pages that the driver lent us.
    pub pages: Pages,
    /// User contexts.
    pub uctxs: Table<Uctx>,
    /// UAR pages.
    pub uars: Table<Owned>,
    /// Doorbells on them that were foreign or lost, since each was allocated.
    pub strays: BTreeMap<u32, u64>,
    /// Which of them are mapped into the guest, if any are.
    pub mapped: Option<Arc<Mapped>>,
    /// What is being written to them.
    pub copies: Copies,
    /// Protection domains.
    pub pds: Table<Owned>,
    /// XRC domains.
    pub xrcds: Table<Owned>,
    /// Device memory in use.
    pub memic: memic::Blocks,
    /// UMEMs.
    pub umems: Table<Umem>,
    /// Memory keys, by index (the key without its low byte).
    pub mkeys: Table<Mkey>,
    /// Prediction signature values.
    pub psvs: Table<Psv>,
    /// Wrong signatures that the access at hand has met.
    pub signature_errors: RefCell<Vec<SignatureError>>,
    /// Event queues.
    pub eqs: Table<Eq>,
    /// Completion queues.
    pub cqs: Table<Cq>,
    /// Queue pairs.
    pub qps: Table<Box<Qp>>,
    /// Shared receive queues.
    pub srqs: Table<Srq>,
    /// Rates of packet pacing.
    pub rates: BTreeMap<u16, Rate>,
    /// Scheduling elements.
    pub elements: Table<Element>,
    /// Blocks of reserved numbers of queue pairs.
    pub reserved_qpns: Table<Owned>,
    /// Destinations that are mapped to queue pairs.
    pub av_mappings: Table<Owned>,
    /// Page faults that wait for the driver.
    pub page_faults: PageFaults,
    /// Multicast groups and the queue pairs in them.
    pub multicast: Vec<([u8; 16], u32)>,
    /// Queue pairs with work to do.
    pub runnable: VecDeque<u32>,
    /// Deadlines of queue pairs.
    pub timers: Timers,
    /// Send WQEs fetched so far, which numbers them.
    pub fetched: u64,
    /// Dynamic connections made so far, which numbers them. Resets do not start it again: peers may remember.
    pub dc_sessions: u64,
    /// Queue pairs that have requests to acknowledge.
    pub acks: Vec<u32>,
    /// Completion queues with a compressed session that is not yet written.
    pub compressing: Vec<u32>,
    /// Completions that a fault holds back.
    pub held: Held,
    /// Packets to be sent.
    pub outbox: VecDeque<Packet>,
    /// Event counters.
    pub counters: Counters,
    /// Faults that wait to strike.
    pub faults: Faults,
    /// The device has reset itself since this was last looked at.
    pub rebooted: bool,
}

impl Device {
    /// A function after power-on.
    pub fn new(name: String, port: Port, referee: Referee) -> Self {
        let mut device = Self {
            name,
            host: Host::default(),
            referee,
            port,
            phase: Phase::Disabled,
            issi: 0,
            caps: Capabilities::new(),
            power_on_caps: Capabilities::new(),
            virtual_function: false,
            commands: CommandQueue::default(),
            pages: Pages::default(),
            uctxs: Table::new(1, (1 << Capabilities::LOG_MAX_UCTX) - 1),
            uars: Table::new(FIRST_UAR, UARS),
            strays: BTreeMap::new(),
            mapped: None,
            copies: Copies::default(),
            pds: Table::new(1, (1 << Capabilities::LOG_MAX_PD) - 1),
            xrcds: Table::new(1, (1 << Capabilities::LOG_MAX_XRCD) - 1),
            memic: memic::Blocks::default(),
            umems: Table::new(1, (1 << Capabilities::LOG_MAX_UMEM) - 1),
            // Not from 4: 0x400 in the place of a key marks a pattern of entries (engine::indirect).
            mkeys: Table::new(8, (1 << Capabilities::LOG_MAX_MKEY) - 8),
            psvs: Table::new(1, (1 << Capabilities::LOG_MAX_PSV) - 1),
            signature_errors: RefCell::default(),
            eqs: Table::new(0, 1 << Capabilities::LOG_MAX_EQ),
            cqs: Table::new(0x40, (1 << Capabilities::LOG_MAX_CQ) - 0x40),
            qps: Table::new(0x40, (1 << Capabilities::LOG_MAX_QP) - 0x40),
            srqs: Table::new(0x10, (1 << Capabilities::LOG_MAX_SRQ) - 0x10),
            rates: BTreeMap::new(),
            elements: Table::new(1, (1 << Capabilities::LOG_MAX_ELEMENTS) - 1),
            reserved_qpns: Table::new(0, 1 << Capabilities::LOG_MAX_RESERVED_BLOCKS),
            av_mappings: Table::new(1, (1 << Capabilities::LOG_MAX_QP) - 1),
            page_faults: PageFaults::default(),
            multicast: Vec::new(),
            runnable: VecDeque::new(),
            timers: Timers::default(),
            fetched: 0,
            dc_sessions: 0,
            acks: Vec::new(),
            compressing: Vec::new(),
            held: Held::default(),
            outbox: VecDeque::new(),
            counters: Counters::default(),
            faults: Faults::default(),
            rebooted: false,
        };
        device.set_reuse();
        device
    }

    /// Numbers that packets or keys in flight may still name come back late; the others early, so that a stale use shows.
    fn set_reuse(&mut self) {
        self.qps.set_reuse(Reuse::OldestFirst);
        self.mkeys.set_reuse(Reuse::OldestFirst);
        self.cqs.set_reuse(Reuse::OldestFirst);
    }

    /// Live objects that the driver makes and destroys, by kind.
    pub fn objects(&self) -> [(&'static str, u64); 12] {
        [
            ("uctx", self.uctxs.len() as u64),
            ("uar", self.uars.len() as u64),
            ("pd", self.pds.len() as u64),
            ("mkey", self.mkeys.len() as u64),
            ("psv", self.psvs.len() as u64),
            ("memic", self.memic.len() as u64),
            ("umem", self.umems.len() as u64),
            ("eq", self.eqs.len() as u64),
            ("cq", self.cqs.len() as u64),
            ("qp", self.qps.len() as u64),
            ("srq", self.srqs.len() as u64),
            ("xrcd", self.xrcds.len() as u64),
        ]
    }

    /// Drops every object and the driver's pages. Those are not given back: their owner has forgotten them too.
    pub fn drop_everything(&mut self) {
        self.phase = Phase::Disabled;
        self.issi = 0;
        self.caps = self.power_on_caps.clone();
        self.port.cap_mask = CAP_MASK;
        self.pages = Pages::default();
        self.uctxs.clear();
        self.uars.clear();
        if let Some(mapped) = &self.mapped {
            mapped.freed(None);
        }
        self.strays.clear();
        self.copies = Copies::default();
        self.pds.clear();
        self.xrcds.clear();
        self.memic.clear();
        self.host.memic.clear();
        self.umems.clear();
        self.mkeys.clear();
        self.psvs.clear();
        self.signature_errors.take();
        self.eqs.clear();
        self.cqs.clear();
        self.qps.clear();
        self.srqs.clear();
        self.rates.clear();
        self.elements.clear();
        self.reserved_qpns.clear();
        self.av_mappings.clear();
        self.page_faults.clear();
        self.multicast.clear();
        self.runnable.clear();
        self.timers = Timers::default();
        self.acks.clear();
        self.compressing.clear();
        self.held = Held::default();
        self.faults.swallowed_slots = 0;
        self.outbox.clear();
    }

    /// As a reset of the PCI function leaves it.
    pub fn reset(&mut self) {
        self.drop_everything();
        self.commands = CommandQueue::default();
        self.counters.resets += 1;
    }

    /// The node's description.
    pub fn node_description(&self) -> [u8; NODE_DESCRIPTION_LEN] {
        let text = format!("ConnectX model {}", self.name);
        let mut description = [0; NODE_DESCRIPTION_LEN];
        let len = text.len().min(description.len());
        description[..len].copy_from_slice(&text.as_bytes()[..len]);
        description
    }

    /// Records a refusal that is no command's.
    #[track_caller]
    pub fn refuse(
        &self,
        object: impl Into<String>,
        field: &str,
        value: impl std::fmt::LowerHex,
        rule: &str,
        source: &str,
    ) {
        self.referee.refuse(Refusal {
            function: self.name.clone(),
            object: object.into(),
            field: field.into(),
            value: format!("{value:#x}"),
            rule: rule.into(),
            source: source.into(),
        });
    }

    /// Puts a queue pair in the list of those with work, once.
    pub fn schedule(&mut self, qpn: u32) {
        if let Some(qp) = self.qps.get_mut(qpn) {
            if !std::mem::replace(&mut qp.scheduled, true) {
                self.runnable.push_back(qpn);
            }
        }
    }

    /// Entries of page lists and key lists that objects hold.
    pub fn translations(&self) -> usize {
        self.umems.weight()
            + self.mkeys.weight()
            + self.eqs.weight()
            + self.cqs.weight()
            + self.qps.weight()
            + self.srqs.weight()
    }

    /// Live objects and events by name.
    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        let c = &self.counters;
        let mut counts = self.objects().to_vec();
        counts.extend([
            (
                "mkey_free",
                self.mkeys.iter().filter(|(_, k)| k.free).count() as u64,
            ),
            ("pages", self.pages.lent.len() as u64),
            ("translations", self.translations() as u64),
            ("timers", self.timers.len() as u64),
            ("commands", c.commands),
            ("commands_refused", c.commands_refused),
            ("resets", c.resets),
            ("never_reclaimed", c.never_reclaimed),
            ("foreign_doorbells", c.foreign_doorbells),
            ("stale_doorbells", c.stale_doorbells),
            ("lost_doorbells", c.lost_doorbells),
            ("doorbells_ahead", c.doorbells_ahead),
            ("torn_wqes", c.torn_wqes),
            ("found_doorbells", c.found_doorbells),
            ("late_doorbells", c.late_doorbells),
            ("dma_faults", self.host.faults()),
            ("cq_overruns", c.cq_overruns),
            ("eq_overruns", c.eq_overruns),
            ("error_cqes", c.error_cqes),
            ("flush_cqes", c.flush_cqes),
            ("packets_sent", c.packets_sent),
            ("packets_received", c.packets_received),
            ("packets_dropped", c.packets_dropped),
            ("packets_lost", c.packets_lost),
            ("bytes_sent", c.bytes_sent),
            ("bytes_received", c.bytes_received),
            ("retransmissions", c.retransmissions),
            ("rnr_naks", c.rnr_naks),
            ("access_naks", c.access_naks),
            ("blueflame_wqes", c.blueflame_wqes),
            ("signature_errors", c.signature_errors),
            ("page_faults", c.page_faults),
        ]);
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counter_is_explained() {
        let device = Device::new("nic0".into(), Port::test(), Referee::in_memory());
        let text = include_str!("../../../docs/connectx-control.md");
        for (name, _) in device.counts() {
            assert!(text.contains(&format!("`{name}`")), "{name} is not in docs");
        }
    }
}
