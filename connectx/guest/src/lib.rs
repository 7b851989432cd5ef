// SPDX-License-Identifier: MIT OR Apache-2.0
//! A small driver of the model, with ordinary memory: what tests and fuzzers share. It does what mlx5_core and mlx5_ib do
//! with a device, in their order, and can be told to do it wrong.

// Names of the interface, which the specification explains.
#![allow(missing_docs)]

mod ledger;
mod notes;
mod paging;
mod ram;
mod shape;
mod watch;

pub use ledger::Ledger;
pub use notes::refusals_of;
pub use paging::{PageFault, Pager, READ, WRITE};
pub use ram::{BASE, Ram, SIZE};
pub use shape::{Shape, Srq, address_vector};
pub use watch::{Owner, Stray, Watch};

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use connectx::hca::{Hca, HcaConfig};
use connectx::ifc::command::{self, header, reply};
use connectx::ifc::context::{ads, cqc, eqc, mkc, qpc};
use connectx::ifc::opcode;
use connectx::log::Referee;
use connectx::platform::{Function, Interrupts};
use connectx::wire::Fabric;

/// Interrupts that have been raised, by vector.
#[derive(Default)]
pub struct Vectors([AtomicU32; 16]);

impl Vectors {
    /// How often a vector was raised.
    pub fn count(&self, vector: usize) -> u32 {
        self.0[vector].load(Ordering::Relaxed)
    }
}

impl Interrupts for Vectors {
    fn raise(&self, vector: u16) {
        self.0[usize::from(vector)].fetch_add(1, Ordering::Relaxed);
    }
}

/// A function and the driver's view of it.
pub struct Guest {
    pub hca: Hca,
    pub ram: Arc<Ram>,
    pub vectors: Arc<Vectors>,
    pub referee: Referee,
    commands: u64,
    mailboxes: AtomicU64,
    /// Objects that the guest has, and the memory that they name.
    pub ledger: Ledger,
    /// UAR page of the driver.
    pub uar: u32,
    /// Async and completion event queue.
    pub events: EventQueue,
    pub completions: EventQueue,
    /// User on whose behalf commands are sent.
    pub uid: u16,
    /// Commands that were sent, each with the length of its output, if they are to be recorded.
    pub record: Option<Vec<(Vec<u8>, usize)>>,
    _notes: notes::Notes,
}

/// An event queue.
#[derive(Default)]
pub struct EventQueue {
    pub eqn: u32,
    at: u64,
    consumer: u32,
}

const LOG_EQ: u32 = 8;
/// Mailboxes at the end of the memory.
const MAILBOXES: u64 = 4096;

/// A fabric with `n` functions, each with its own memory and brought up.
pub fn guests(n: usize) -> Vec<Guest> {
    guests_on(&Fabric::new(Referee::in_memory()), n)
}

/// The same on a fabric that may be one without a thread.
pub fn guests_on(fabric: &Arc<Fabric>, n: usize) -> Vec<Guest> {
    (0..n)
        .map(|index| {
            let hca = Hca::new(fabric, HcaConfig::numbered(index));
            let mut guest = Guest::cold(hca, fabric.referee());
            guest.bring_up();
            guest
        })
        .collect()
}

/// A command's input.
pub fn input(op: u16, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    header::opcode.set(&mut bytes, u64::from(op));
    bytes
}

/// Status of a command's output.
pub fn status(output: &[u8]) -> u8 {
    reply::status.get(output) as u8
}

impl Guest {
    /// A function that nobody has touched.
    pub fn cold(hca: Hca, referee: Referee) -> Self {
        let ram = Ram::new();
        let vectors = Arc::new(Vectors::default());
        hca.connect(ram.clone(), vectors.clone());
        hca.bus_master(true);
        let commands = ram.alloc(4096);
        let mailboxes = BASE + SIZE as u64 - MAILBOXES * 1024;
        ram.watch(|watch| {
            watch.name(Owner::Commands, commands, 4096);
            watch.name(Owner::Commands, mailboxes, MAILBOXES * 1024);
        });
        Self {
            hca,
            ram,
            vectors,
            _notes: notes::Notes(referee.clone()),
            referee,
            commands,
            mailboxes: AtomicU64::new(0),
            ledger: Ledger::default(),
            uar: 0,
            events: EventQueue::default(),
            completions: EventQueue::default(),
            uid: 0,
            record: None,
        }
    }

    /// One counter of the model.
    pub fn count(&self, name: &str) -> u64 {
        let counts = self.hca.counts();
        counts.iter().find(|(n, _)| *n == name).unwrap().1
    }

    fn write32(&self, offset: u64, value: u32) {
        self.hca.bar_write(0, offset, &value.to_be_bytes());
    }

    /// What the driver does until objects can be made.
    pub fn start_up(&mut self) {
        self.write32(0x10, (self.commands >> 32) as u32);
        self.write32(0x14, self.commands as u32);
        self.ok(input(opcode::ENABLE_HCA, 16), 12);
        self.ok(input(opcode::SET_ISSI, 16), 16);
        let mut give = input(opcode::MANAGE_PAGES, 16);
        header::op_mod.set(&mut give, 1);
        command::manage_pages_in::input_num_entries.set(&mut give, 3);
        give.extend((1..=3u64).flat_map(|page| (page << 12).to_be_bytes()));
        self.ok(give, 16);
        self.ok(input(opcode::INIT_HCA, 32), 16);
    }

    /// A function with a UAR page and event queues.
    pub fn bring_up(&mut self) {
        self.start_up();
        self.uar = self.alloc(opcode::ALLOC_UAR);
        // Everything but command completions, which the tests poll for.
        self.events = self.event_queue(0, !(1 << 0x0a));
        self.completions = self.event_queue(1, 0);
    }

    fn event_queue(&mut self, vector: u64, mask: u64) -> EventQueue {
        let at = self.ram.alloc(64 << LOG_EQ);
        for slot in 0..1u64 << LOG_EQ {
            self.ram.set(at + slot * 64 + 63, &[1]);
        }
        let mut create = input(opcode::CREATE_EQ, 0x110);
        let context = command::create_eq_in::eqc.bytes_mut(&mut create);
        eqc::log_eq_size.set(context, u64::from(LOG_EQ));
        eqc::uar_page.set(context, u64::from(self.uar));
        eqc::intr.set(context, vector);
        command::create_eq_in::event_bitmask.bytes_mut(&mut create)[..8]
            .copy_from_slice(&mask.to_be_bytes());
        create.extend((0..(64u64 << LOG_EQ) / 4096).flat_map(|p| (at + p * 4096).to_be_bytes()));
        let out = self.ok(create, 16);
        let eqn = command::create_eq_out::eq_number.get32(&out);
        EventQueue {
            eqn,
            at,
            consumer: 0,
        }
    }

    /// The next asynchronous event: type and number of the queue or CQ.
    pub fn event(&mut self) -> Option<(u8, u32)> {
        let queue = &mut self.events;
        next_event(&self.ram, queue).map(|e| {
            let at = if e[1] == 0x04 { 0x20 } else { 0x38 };
            let number = u32::from_be_bytes(e[at..at + 4].try_into().unwrap());
            (e[1], number & 0xff_ffff)
        })
    }

    /// The next completion event: its CQ.
    pub fn completion_event(&mut self) -> Option<u32> {
        next_event(&self.ram, &mut self.completions)
            .map(|e| u32::from_be_bytes(e[0x38..0x3c].try_into().unwrap()))
    }

    /// Arms the interrupt of the completion event queue.
    pub fn arm_completions(&self) {
        let queue = &self.completions;
        let value = (queue.eqn << 24) | queue.consumer & 0xff_ffff;
        self.write32(u64::from(self.uar) * 4096 + 0x40, value);
    }

    /// Executes a command and gives its output. Input and output go through mailboxes as the driver makes them.
    pub fn command(&mut self, mut input: Vec<u8>, output_len: usize) -> Vec<u8> {
        if header::uid.get(&input) == 0 {
            header::uid.set(&mut input, u64::from(self.uid));
        }
        if let Some(record) = &mut self.record {
            record.push((input.clone(), output_len));
        }
        let (at, output) = self.submit(&input, output_len, input.len());
        let status = self.ram.get(at + 0x3f, 1)[0];
        assert_eq!(status, 0, "delivery status");
        let out = self.collect(&output, output_len);
        self.ledger.note(&self.ram, &input, &out);
        out
    }

    /// The output of the command in the first slot, from its mailboxes.
    pub fn collect(&self, output: &[u64], output_len: usize) -> Vec<u8> {
        let at = self.commands;
        let mut out = self.ram.get(at + 0x20, 16);
        let rest = output_len.saturating_sub(16);
        for (i, block) in output.iter().enumerate() {
            let len = (rest - i * 512).min(512);
            out.extend(self.ram.get(*block, len));
        }
        out.truncate(output_len);
        out
    }

    /// Puts a command of a claimed length in the first slot and rings. Gives the slot and the output's mailboxes.
    pub fn submit(&self, input: &[u8], output_len: usize, claimed: usize) -> (u64, Vec<u64>) {
        let (_, outs) = self.prepare(input, output_len, claimed);
        self.ring_commands(1);
        (self.commands, outs)
    }

    /// Address of a command slot.
    pub fn slot(&self, index: u64) -> u64 {
        self.commands + index * 64
    }

    /// The command doorbell: a bit for each slot.
    pub fn ring_commands(&self, slots: u32) {
        self.write32(0x18, slots);
    }

    /// Puts a command in the first slot. Gives the mailboxes of input and output.
    pub fn prepare(&self, input: &[u8], output_len: usize, claimed: usize) -> (Vec<u64>, Vec<u64>) {
        let chain = |len: usize, data: &[u8]| -> Vec<u64> {
            let count = len.saturating_sub(16).div_ceil(512);
            let at: Vec<u64> = (0..count).map(|_| self.scratch()).collect();
            for (i, block) in at.iter().enumerate() {
                let mut bytes = [0u8; 576];
                let from = data.len().min(16 + i * 512);
                let to = data.len().min(from + 512);
                bytes[..to - from].copy_from_slice(&data[from..to]);
                let next = at.get(i + 1).copied().unwrap_or(0);
                bytes[0x230..0x238].copy_from_slice(&next.to_be_bytes());
                bytes[0x238..0x23c].copy_from_slice(&(i as u32).to_be_bytes());
                bytes[0x23d] = 0x77;
                self.ram.set(*block, &bytes);
            }
            at
        };
        let ins = chain(input.len(), input);
        let outs = chain(output_len, &[]);
        let mut slot = [0u8; 64];
        slot[0] = 7;
        slot[4..8].copy_from_slice(&(claimed as u32).to_be_bytes());
        slot[8..16].copy_from_slice(&ins.first().copied().unwrap_or(0).to_be_bytes());
        let inline = input.len().min(16);
        slot[16..16 + inline].copy_from_slice(&input[..inline]);
        slot[0x30..0x38].copy_from_slice(&outs.first().copied().unwrap_or(0).to_be_bytes());
        slot[0x38..0x3c].copy_from_slice(&(output_len as u32).to_be_bytes());
        slot[0x3c] = 0x77;
        slot[0x3f] = 1;
        self.ram.set(self.commands, &slot);
        (ins, outs)
    }

    /// A mailbox; they are used in turn.
    fn scratch(&self) -> u64 {
        BASE + SIZE as u64 - MAILBOXES * 1024
            + self.mailboxes.fetch_add(1, Ordering::Relaxed) % MAILBOXES * 1024
    }

    /// A command that must succeed.
    pub fn ok(&mut self, input: Vec<u8>, output_len: usize) -> Vec<u8> {
        let op = header::opcode.get(&input) as u16;
        let out = self.command(input, output_len);
        let why = self.referee.recent(1);
        assert_eq!(status(&out), 0, "{:?}: {why:?}", opcode::name(op));
        out
    }

    /// An `ALLOC_…` command.
    pub fn alloc(&mut self, op: u16) -> u32 {
        let out = self.ok(input(op, 16), 16);
        reply::object.get32(&out)
    }

    /// A command with nothing but an object's number; gives the status.
    pub fn on_object(&mut self, op: u16, number: u32) -> u8 {
        let mut bytes = input(op, 16);
        header::object.set(&mut bytes, u64::from(number));
        status(&self.command(bytes, 16))
    }

    /// A memory key for fresh memory with all rights. Gives key and address; addresses are bus addresses.
    pub fn region(&mut self, pd: u32, len: u64) -> (u32, u64) {
        let at = self.ram.alloc(len);
        (self.key(pd, at, len, 0x1f), at)
    }

    /// A memory key; `rights` are the bits a, rw, rr, lw, lr from 0x10 down.
    pub fn key(&mut self, pd: u32, at: u64, len: u64, rights: u64) -> u32 {
        let mut create = input(opcode::CREATE_MKEY, 0x110);
        let context = command::create_mkey_in::mkc.bytes_mut(&mut create);
        for (bit, field) in [mkc::lr, mkc::lw, mkc::rr, mkc::rw, mkc::a]
            .iter()
            .enumerate()
        {
            field.set(context, (rights >> bit) & 1);
        }
        mkc::access_mode_1_0.set(context, 1);
        mkc::mkey_7_0.set(context, 0x5a);
        mkc::pd.set(context, u64::from(pd));
        mkc::start_addr.set(context, at);
        mkc::len.set(context, len);
        mkc::log_page_size.set(context, 12);
        let first = at & !0xfff;
        let pages = (at + len - first).div_ceil(4096);
        create.extend((0..pages).flat_map(|p| (first + p * 4096).to_be_bytes()));
        command::create_mkey_in::translations_octword_actual_size
            .set(&mut create, pages.div_ceil(2));
        let out = self.ok(create, 16);
        (reply::object.get32(&out) << 8) | 0x5a
    }
}

impl Guest {
    /// A key of the kind that memory windows are: free, indirect, to be bound by work requests.
    pub fn window(&mut self, pd: u32) -> u32 {
        self.window_with(pd, |_| {})
    }

    /// The same with more in its context.
    pub fn window_with(&mut self, pd: u32, f: impl FnOnce(&mut [u8])) -> u32 {
        let mut create = input(opcode::CREATE_MKEY, 0x110);
        let context = command::create_mkey_in::mkc.bytes_mut(&mut create);
        mkc::free.set(context, 1);
        mkc::umr_en.set(context, 1);
        mkc::en_rinval.set(context, 1);
        mkc::lr.set(context, 1);
        mkc::access_mode_1_0.set(context, 2);
        mkc::qpn.set(context, 0xff_ffff);
        mkc::pd.set(context, u64::from(pd));
        mkc::translations_octword_size.set(context, 4);
        f(context);
        let out = self.ok(create, 16);
        reply::object.get32(&out) << 8
    }
}

fn next_event(ram: &Ram, queue: &mut EventQueue) -> Option<Vec<u8>> {
    let at = queue.at + u64::from(queue.consumer & ((1 << LOG_EQ) - 1)) * 64;
    let entry = ram.get(at, 64);
    let owner = u32::from(entry[63] & 1);
    if owner != (queue.consumer >> LOG_EQ) & 1 {
        return None;
    }
    queue.consumer += 1;
    Some(entry)
}

/// Waits for something that the engine thread does.
pub fn eventually<T>(mut f: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(value) = f() {
            return value;
        }
        assert!(Instant::now() < end, "nothing happened for 10 s");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// A completion queue.
pub struct Cq {
    pub cqn: u32,
    at: u64,
    pub dbr: u64,
    log: u32,
    /// Bytes of an entry.
    entry: u64,
    pub consumer: u32,
    /// Memory and size that the queue moves to.
    next: Option<(u64, u32)>,
    /// Completions of a compressed session that have been read and not polled.
    unpacked: VecDeque<Cqe>,
    /// Its mini CQEs hold counters.
    strides: bool,
    /// Lengths of the sessions so far.
    pub sessions: Vec<usize>,
}

/// A completion, taken apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cqe {
    pub opcode: u8,
    pub syndrome: u8,
    pub vendor: u8,
    pub counter: u16,
    pub bytes: u32,
    pub immediate: u32,
    pub qpn: u32,
}

impl Cqe {
    /// The 64 bytes of an entry.
    fn of(e: &[u8]) -> Self {
        let word = |at: usize| u32::from_be_bytes(e[at..at + 4].try_into().unwrap());
        let opcode = e[63] >> 4;
        Self {
            opcode,
            syndrome: if opcode >= 13 { e[55] } else { 0 },
            vendor: if opcode >= 13 { e[54] } else { 0 },
            counter: u16::from_be_bytes([e[60], e[61]]),
            bytes: word(44),
            immediate: word(36),
            qpn: word(56) & 0xff_ffff,
        }
    }
}

impl Cq {
    pub fn new(guest: &mut Guest, log: u32) -> Self {
        Self::sized(guest, log, 64)
    }

    /// A queue with entries of 64 or 128 bytes.
    pub fn sized(guest: &mut Guest, log: u32, entry: u64) -> Self {
        Self::with(guest, log, |c| cqc::cqe_sz.set(c, u64::from(entry == 128)))
    }

    /// A queue with a context that `f` changes.
    pub fn with(guest: &mut Guest, log: u32, f: impl FnOnce(&mut [u8])) -> Self {
        Self::try_with(guest, log, f).unwrap()
    }

    /// The same, or the status that refuses it.
    pub fn try_with(guest: &mut Guest, log: u32, f: impl FnOnce(&mut [u8])) -> Result<Self, u8> {
        let mut create = input(opcode::CREATE_CQ, 0x110);
        let context = command::create_cq_in::cqc.bytes_mut(&mut create);
        f(context);
        let entry = if cqc::cqe_sz.get(context) == 0 {
            64
        } else {
            128
        };
        let strides = cqc::mini_cqe_res_format.get(context) == 3;
        let len = entry << log;
        let at = guest.ram.alloc(len);
        guest.ram.set(at, &vec![0xff; len as usize]);
        let dbr = guest.ram.alloc(8);
        let context = command::create_cq_in::cqc.bytes_mut(&mut create);
        cqc::log_cq_size.set(context, u64::from(log));
        cqc::uar_page.set(context, u64::from(guest.uar));
        cqc::c_eqn.set(context, u64::from(guest.completions.eqn));
        cqc::dbr_addr.set(context, dbr);
        create.extend((0..len.div_ceil(4096)).flat_map(|p| (at + p * 4096).to_be_bytes()));
        let out = guest.command(create, 16);
        match status(&out) {
            0 => Ok(Self {
                cqn: reply::object.get32(&out),
                at,
                dbr,
                log,
                entry,
                consumer: 0,
                next: None,
                unpacked: VecDeque::new(),
                strides,
                sessions: Vec::new(),
            }),
            refused => Err(refused),
        }
    }

    /// The next completion, if there is one.
    pub fn poll(&mut self, guest: &Guest) -> Option<Cqe> {
        if self.unpacked.is_empty() {
            let e = self.completion(guest, self.consumer);
            let valid = e[63] >> 4 != 15 && u32::from(e[63] & 1) == (self.consumer >> self.log) & 1;
            if !valid {
                return None;
            }
            match (e[63] >> 2) & 3 {
                3 => self.unpack(guest, &e),
                _ => self.unpacked.push_back(Cqe::of(&e)),
            }
        }
        let next = self.unpacked.pop_front()?;
        self.consumer += 1;
        guest.ram.set(self.dbr, &self.consumer.to_be_bytes());
        Some(next)
    }

    /// Reads a compressed session, as the kernel's driver does: arrays of eight lie in the second slot and in every eighth.
    /// What the title and the arrays say is all there is; the slots are then the device's again in the next lap.
    fn unpack(&mut self, guest: &Guest, title: &[u8]) {
        let mut title = Cqe::of(title);
        // Memory may hold anything where a guest is wild.
        title.bytes = title.bytes.min(1 << self.log);
        let mut array = Vec::new();
        for index in 0..title.bytes {
            if index % 8 == 0 {
                array = self.completion(guest, self.consumer + index.max(1));
            }
            let mini = &array[index as usize % 8 * 8..][..8];
            let counter = match self.strides {
                true => u16::from_be_bytes([mini[2], mini[3]]),
                false => title.counter.wrapping_add(index as u16),
            };
            self.unpacked.push_back(Cqe {
                counter,
                bytes: u32::from_be_bytes(mini[4..].try_into().unwrap()),
                ..title
            });
        }
        for index in self.consumer..self.consumer + title.bytes {
            let owner = (index >> self.log) as u8 & 1;
            let (at, last) = (self.place(index), self.entry - 1);
            guest.ram.set(at + last, &[owner]);
        }
        self.sessions.push(title.bytes as usize);
    }

    /// The 64 bytes of a completion.
    fn completion(&self, guest: &Guest, index: u32) -> Vec<u8> {
        self.slot(guest, index).split_off(self.entry as usize - 64)
    }

    fn place(&self, index: u32) -> u64 {
        self.at + u64::from(index & ((1 << self.log) - 1)) * self.entry
    }

    /// All bytes of an entry.
    pub fn slot(&self, guest: &Guest, index: u32) -> Vec<u8> {
        guest.ram.get(self.place(index), self.entry as usize)
    }

    /// All bytes of the entry that was polled last.
    pub fn last(&self, guest: &Guest) -> Vec<u8> {
        self.slot(guest, self.consumer - 1)
    }

    /// The next completion, which must come.
    pub fn wait(&mut self, guest: &Guest) -> Cqe {
        eventually(|| self.poll(guest))
    }

    /// Has the device move the queue to fresh memory; gives the status.
    pub fn resize(&mut self, guest: &mut Guest, log: u32) -> u8 {
        let len = 64u64 << log;
        let at = guest.ram.alloc(len);
        guest.ram.set(at, &vec![0xff; len as usize]);
        let mut modify = input(opcode::MODIFY_CQ, 0x110);
        header::op_mod.set(&mut modify, 1);
        header::object.set(&mut modify, u64::from(self.cqn));
        let context = command::modify_cq_in::cqc.bytes_mut(&mut modify);
        cqc::log_cq_size.set(context, u64::from(log));
        modify.extend((0..len.div_ceil(4096)).flat_map(|p| (at + p * 4096).to_be_bytes()));
        let status = status(&guest.command(modify, 16));
        if status == 0 {
            self.next = Some((at, log));
        }
        status
    }

    /// Goes on in the memory that the queue moved to.
    pub fn switch(&mut self) {
        (self.at, self.log) = self.next.take().unwrap();
    }

    /// Asks for an event.
    pub fn arm(&self, guest: &Guest) {
        let mut doorbell = [0u8; 8];
        doorbell[..4].copy_from_slice(&(self.consumer & 0xff_ffff).to_be_bytes());
        doorbell[4..].copy_from_slice(&self.cqn.to_be_bytes());
        guest
            .hca
            .bar_write(0, u64::from(guest.uar) * 4096 + 0x20, &doorbell);
    }
}

/// Send WQEs and receive WQEs of a test queue pair.
pub const LOG_SQ: u32 = 4;
pub const LOG_RQ: u32 = 3;

/// A queue pair.
pub struct Qp {
    pub qpn: u32,
    pub rq: u64,
    pub sq: u64,
    pub dbr: u64,
    pub producer: u16,
    pub posted: u16,
    pub shape: Shape,
}

/// What a connection is made with.
#[derive(Clone, Copy)]
pub struct Settings {
    pub lid: u16,
    pub qpn: u32,
    pub ack_timeout: u64,
    pub retries: u64,
    pub rnr_retries: u64,
    pub rights: u64,
    /// Code of the MTU: 128 << mtu bytes.
    pub mtu: u64,
    /// Of datagrams.
    pub qkey: u64,
    pub atomic_mode: u64,
}

impl Settings {
    pub fn to(lid: u16, qpn: u32) -> Self {
        Self {
            lid,
            qpn,
            ack_timeout: 10,
            retries: 2,
            rnr_retries: 7,
            rights: 7,
            mtu: 3,
            qkey: 0x1111_1111,
            // What mlx5_ib chooses: extended, up to 8 bytes.
            atomic_mode: 3,
        }
    }
}

impl Qp {
    pub fn new(guest: &mut Guest, pd: u32, send: &Cq, receive: &Cq) -> Self {
        Self::try_new(guest, pd, guest.uar, send, receive).unwrap()
    }

    /// A queue pair, or the status that refuses it.
    pub fn try_new(
        guest: &mut Guest,
        pd: u32,
        uar: u32,
        send: &Cq,
        receive: &Cq,
    ) -> Result<Self, u8> {
        Self::shaped(guest, pd, uar, send, receive, Shape::default())
    }

    /// A queue pair of any service and size, or the status that refuses it.
    pub fn shaped(
        guest: &mut Guest,
        pd: u32,
        uar: u32,
        send: &Cq,
        receive: &Cq,
        shape: Shape,
    ) -> Result<Self, u8> {
        let receive_len = shape.receive_len();
        let len = receive_len + (64 << shape.log_sq);
        let at = guest.ram.alloc(len);
        let dbr = guest.ram.alloc(8);
        let mut create = input(opcode::CREATE_QP, 0x110);
        let context = command::create_qp_in::qpc.bytes_mut(&mut create);
        qpc::pm_state.set(context, 3);
        qpc::pd.set(context, u64::from(pd));
        qpc::log_rq_size.set(context, u64::from(shape.log_rq));
        qpc::log_rq_stride.set(context, u64::from(shape.log_stride) - 4);
        qpc::log_sq_size.set(context, u64::from(shape.log_sq));
        shape.describe(context);
        qpc::uar_page.set(context, u64::from(uar));
        qpc::cqn_snd.set(context, u64::from(send.cqn));
        qpc::cqn_rcv.set(context, u64::from(receive.cqn));
        qpc::dbr_addr.set(context, dbr);
        create.extend((0..len.div_ceil(4096)).flat_map(|p| (at + p * 4096).to_be_bytes()));
        let out = guest.command(create, 16);
        match status(&out) {
            0 => Ok(Self {
                qpn: reply::object.get32(&out),
                rq: at,
                sq: at + receive_len,
                dbr,
                producer: 0,
                posted: 0,
                shape,
            }),
            refused => Err(refused),
        }
    }

    /// A transition with fields set by `f`; gives the status.
    pub fn modify(&self, guest: &mut Guest, op: u16, f: impl FnOnce(&mut [u8])) -> u8 {
        let mut bytes = input(op, 0x110);
        header::object.set(&mut bytes, u64::from(self.qpn));
        f(command::modify_qp_in::qpc.bytes_mut(&mut bytes));
        status(&guest.command(bytes, 16))
    }

    pub fn to_init(&self, guest: &mut Guest, s: Settings) {
        let status = self.modify(guest, opcode::RST2INIT_QP, |c| {
            qpc::rre.set(c, s.rights & 1);
            qpc::rwe.set(c, (s.rights >> 1) & 1);
            qpc::rae.set(c, (s.rights >> 2) & 1);
            qpc::q_key.set(c, s.qkey);
            qpc::atomic_mode.set(c, s.atomic_mode);
        });
        assert_eq!(status, 0);
    }

    pub fn to_ready_to_receive(&self, guest: &mut Guest, s: Settings) {
        let status = self.modify(guest, opcode::INIT2RTR_QP, |c| {
            qpc::mtu.set(c, s.mtu);
            qpc::log_msg_max.set(c, 30);
            qpc::remote_qpn.set(c, u64::from(s.qpn));
            qpc::next_rcv_psn.set(c, 0xff_fffe);
            qpc::log_rra_max.set(c, 2);
            qpc::min_rnr_nak.set(c, 1);
            ads::rlid.set(qpc::primary_address_path.bytes_mut(c), u64::from(s.lid));
        });
        assert_eq!(status, 0);
    }

    pub fn to_ready_to_send(&self, guest: &mut Guest, s: Settings) {
        let status = self.modify(guest, opcode::RTR2RTS_QP, |c| {
            qpc::retry_count.set(c, s.retries);
            qpc::rnr_retry.set(c, s.rnr_retries);
            // Sequence numbers wrap in the first messages.
            qpc::next_send_psn.set(c, 0xff_fffe);
            qpc::log_sra_max.set(c, 2);
            let path = qpc::primary_address_path.bytes_mut(c);
            ads::ack_timeout.set(path, s.ack_timeout);
        });
        assert_eq!(status, 0);
    }

    pub fn connect(&self, guest: &mut Guest, s: Settings) {
        self.to_init(guest, s);
        self.to_ready_to_receive(guest, s);
        self.to_ready_to_send(guest, s);
    }

    /// State as QUERY_QP tells it.
    pub fn state(&self, guest: &mut Guest) -> u64 {
        let mut bytes = input(opcode::QUERY_QP, 16);
        header::object.set(&mut bytes, u64::from(self.qpn));
        let out = guest.ok(bytes, 0x110);
        qpc::state.get(command::query_qp_out::qpc.bytes(&out))
    }

    /// Puts a WQE in the queue without ringing.
    pub fn put(&mut self, guest: &Guest, op: u8, flags: u8, immediate: u32, segments: &[[u8; 16]]) {
        self.put_modified(guest, (op, 0), flags, immediate, segments);
    }

    /// The same for an opcode with its modifier.
    pub fn put_modified(
        &mut self,
        guest: &Guest,
        (op, opmod): (u8, u8),
        flags: u8,
        immediate: u32,
        segments: &[[u8; 16]],
    ) {
        let mut wqe = vec![0u8; (16 + segments.len() * 16).next_multiple_of(64)];
        let index = self.producer.to_be_bytes();
        wqe[..4].copy_from_slice(&[opmod, index[0], index[1], op]);
        let count = 1 + segments.len() as u32;
        wqe[4..8].copy_from_slice(&((self.qpn << 8) | count).to_be_bytes());
        wqe[11] = flags;
        wqe[12..16].copy_from_slice(&immediate.to_be_bytes());
        wqe[16..16 + segments.len() * 16].copy_from_slice(&segments.concat());
        for block in wqe.chunks(64) {
            let slot = u64::from(self.producer) & ((1 << self.shape.log_sq) - 1);
            guest.ram.set(self.sq + slot * 64, block);
            self.producer = self.producer.wrapping_add(1);
        }
        let producer = u32::from(self.producer);
        guest.ram.set(self.dbr + 4, &producer.to_be_bytes());
    }

    /// Rings through a UAR page.
    pub fn ring(&self, guest: &Guest, uar: u32) {
        let mut doorbell = [0u8; 8];
        let last = u32::from(self.producer.wrapping_sub(1));
        doorbell[..4].copy_from_slice(&(last << 8).to_be_bytes());
        doorbell[4..].copy_from_slice(&(self.qpn << 8).to_be_bytes());
        guest
            .hca
            .bar_write(0, u64::from(uar) * 4096 + 0x800, &doorbell);
    }

    /// Posts a signalled WQE.
    pub fn post(&mut self, guest: &Guest, op: u8, immediate: u32, segments: &[[u8; 16]]) {
        self.put(guest, op, 0x08, immediate, segments);
        self.ring(guest, guest.uar);
    }

    /// Posts a receive WQE with one pointer. There is no doorbell for it.
    pub fn receive(&mut self, guest: &Guest, key: u32, at: u64, len: u32) {
        self.receive_into(guest, &[pointer(len, key, at)]);
    }

    /// Posts a receive WQE with as many pointers as fit.
    pub fn receive_into(&mut self, guest: &Guest, pointers: &[[u8; 16]]) {
        let slot = u64::from(self.posted) & ((1 << self.shape.log_rq) - 1);
        let mut wqe = pointers.concat();
        if wqe.len() < 1 << self.shape.log_stride {
            wqe.extend(pointer(0, 0x100, 0));
        }
        guest
            .ram
            .set(self.rq + (slot << self.shape.log_stride), &wqe);
        self.posted = self.posted.wrapping_add(1);
        guest
            .ram
            .set(self.dbr, &u32::from(self.posted).to_be_bytes());
    }
}

/// A data segment.
pub fn pointer(len: u32, key: u32, at: u64) -> [u8; 16] {
    let mut s = [0; 16];
    s[..4].copy_from_slice(&len.to_be_bytes());
    s[4..8].copy_from_slice(&key.to_be_bytes());
    s[8..].copy_from_slice(&at.to_be_bytes());
    s
}

/// A remote address segment.
pub fn remote(at: u64, key: u32) -> [u8; 16] {
    let mut s = [0; 16];
    s[..8].copy_from_slice(&at.to_be_bytes());
    s[8..12].copy_from_slice(&key.to_be_bytes());
    s
}

/// Two guests, each with a connected queue pair and a region.
pub struct Pair {
    pub guests: Vec<Guest>,
    pub sides: [Side; 2],
}

pub struct Side {
    pub pd: u32,
    pub send: Cq,
    pub receive: Cq,
    pub qp: Qp,
    pub key: u32,
    pub at: u64,
}

pub const REGION: u64 = 1 << 20;

impl Side {
    pub fn new(guest: &mut Guest) -> Self {
        let pd = guest.alloc(opcode::ALLOC_PD);
        let send = Cq::new(guest, 6);
        let receive = Cq::new(guest, 6);
        let qp = Qp::new(guest, pd, &send, &receive);
        let (key, at) = guest.region(pd, REGION);
        Self {
            pd,
            send,
            receive,
            qp,
            key,
            at,
        }
    }
}

impl Default for Pair {
    fn default() -> Self {
        Self::new()
    }
}

impl Pair {
    /// A pair whose settings `f` may change.
    pub fn with(f: impl Fn(&mut Settings)) -> Self {
        Self::of(guests(2), f)
    }

    /// The same of guests that are there.
    pub fn of(mut guests: Vec<Guest>, f: impl Fn(&mut Settings)) -> Self {
        let sides = [Side::new(&mut guests[0]), Side::new(&mut guests[1])];
        for i in 0..2 {
            let mut settings = Settings::to(2 - i as u16, sides[1 - i].qp.qpn);
            f(&mut settings);
            sides[i].qp.connect(&mut guests[i], settings);
        }
        Self { guests, sides }
    }

    pub fn new() -> Self {
        Self::with(|_| {})
    }
}
