// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs a program on two functions in this process, and checks what holds whatever a guest does: no panic, a bounded
//! amount of work for each access, no memory touched that no object names, nothing kept that cannot be given back,
//! bounded memory.

use std::sync::Arc;

use connectx::hca_config::BAR0_SIZE;
use connectx::ifc::opcode;
use connectx::log::Referee;
use connectx::objects::qp::Service;
use connectx::pci::{ConfigSpace, Event};
use connectx::platform::{Function, ResetKind};
use connectx::wire::Fabric;
use connectx::wire::fabric::Next;
use connectx_guest::{
    BASE, Cq, Guest, Owner, Qp, SIZE, Settings, Shape, Srq, guests_on, input, status,
};

use crate::bounds::{self, Held};
use crate::program::{Kind, Step, decode};

/// Turns that the engine gets in a step. What is left then waits for the next.
const TURNS: usize = 32;
/// Bytes of a command's input or output.
const LONGEST: u32 = 0x3000;
/// Bytes of a register access.
const WIDEST: usize = 64;

/// Two functions on one wire.
pub struct Machine {
    fabric: Arc<Fabric>,
    pub guests: Vec<Guest>,
    config: Vec<ConfigSpace>,
    /// Queue pairs of each guest, in the order of their making.
    pub queues: [Vec<Queue>; 2],
    pub srqs: [Vec<Srq>; 2],
    /// A region of each guest: key and address.
    pub regions: Vec<(u32, u64)>,
    /// There may be objects that the guests do not know.
    unsure: bool,
}

/// A queue pair and its completion queue.
pub struct Queue {
    pub qp: Qp,
    pub cq: Cq,
}

/// Machine with two functions that the driver has started.
pub fn started() -> Machine {
    let fabric = Fabric::polled(Referee::in_memory());
    let guests = guests_on(&fabric, 2);
    let config = guests.iter().map(|g| g.hca.config_space()).collect();
    Machine {
        fabric,
        guests,
        config,
        queues: [Vec::new(), Vec::new()],
        srqs: [Vec::new(), Vec::new()],
        regions: Vec::new(),
        unsure: false,
    }
}

/// Queue pairs that [`connected`] makes, in order.
pub const SERVICES: [Service; 6] = [
    Service::Rc,
    Service::Uc,
    Service::Ud,
    Service::Rc,
    Service::Xrc,
    Service::Rc,
];

/// Machine whose functions are connected by a queue pair of each service. The fourth receives from a pool, the fifth
/// into an XRC SRQ; the last is connected to itself.
pub fn connected() -> Machine {
    let mut machine = started();
    for side in 0..2 {
        let guest = &mut machine.guests[side];
        let pd = guest.alloc(opcode::ALLOC_PD);
        let xrcd = guest.alloc(opcode::ALLOC_XRCD);
        let region = guest.region(pd, 1 << 16);
        machine.regions.push(region);
        let window = guest.window(pd);
        debug_assert_ne!(window, 0);
        let events = Cq::new(guest, 5);
        machine.srqs[side].push(Srq::new(guest, pd, 3, None));
        machine.srqs[side].push(Srq::new(guest, pd, 3, Some((xrcd, &events))));
        let pool = machine.srqs[side][0].number;
        for (index, service) in SERVICES.into_iter().enumerate() {
            let shape = Shape {
                srqn: (index == 3).then_some(pool),
                xrcd: if service == Service::Xrc { xrcd } else { 0 },
                ..Shape::of(service)
            };
            let guest = &mut machine.guests[side];
            let cq = Cq::new(guest, 5);
            let qp = Qp::shaped(guest, pd, guest.uar, &cq, &cq, shape).expect("a queue pair");
            machine.queues[side].push(Queue { qp, cq });
        }
    }
    for side in 0..2 {
        for index in 0..SERVICES.len() {
            let peer = if index == 5 { side } else { 1 - side };
            let mut settings = Settings::to(peer as u16 + 1, machine.queues[peer][index].qp.qpn);
            // What is lost stays lost: nothing here waits for time to pass.
            settings.ack_timeout = 0;
            machine.queues[side][index]
                .qp
                .connect(&mut machine.guests[side], settings);
        }
    }
    machine
}

/// Runs a program and checks. A finding is a panic or an abort.
pub fn run(mut machine: Machine, bytes: &[u8], kinds: &[Kind]) {
    watch(&machine, true);
    let held = Held::watch();
    for step in decode(bytes, kinds) {
        bounds::begin();
        machine.step(&step);
        bounds::end();
        machine.no_strays(&step);
    }
    // Without instrumentation there is no bound, and no coverage either.
    assert_ne!(bounds::blocks(), 0, "build with the flags of ci/fuzz");
    let most = held.most();
    drop(held);
    assert!(
        most <= bounds::HELD,
        "{most} bytes held for {} bytes of input",
        bytes.len()
    );
    machine.take_apart();
}

/// Only what a program does is watched, not how its machine was made.
fn watch(machine: &Machine, on: bool) {
    for guest in &machine.guests {
        guest.ram.watch(|watch| watch.keep(on));
    }
}

impl Machine {
    fn step(&mut self, step: &Step) {
        let side = step.guest();
        match step.kind {
            Kind::Command => self.command(step),
            Kind::Memory => {
                let at = u64::from(step.a) % (SIZE - step.data.len().min(SIZE)) as u64;
                self.guests[side].ram.set(BASE + at, &step.data);
            }
            Kind::Write => {
                let data = &step.data[..step.data.len().min(WIDEST)];
                let (bar, offset) = (step.b as usize % 7, register(step.a));
                // Where the command queue is, the guest itself has to know.
                if bar != 0 || !(0x10..0x1c).contains(&offset) {
                    self.guests[side].hca.bar_write(bar, offset, data);
                } else if offset == 0x18 {
                    let slots = data
                        .first_chunk()
                        .map_or(0, |word| u32::from_be_bytes(*word));
                    self.guests[side].ring_commands(slots & !1);
                }
            }
            Kind::Read => {
                let mut data = vec![0; step.b as usize % 4097];
                self.guests[side].hca.bar_read(
                    step.flags as usize % 7,
                    register(step.a),
                    &mut data,
                );
            }
            Kind::Run => self.settle(),
            Kind::Config => self.configure(step),
            Kind::Post => self.post(step),
            Kind::Receive => self.receive(step),
            Kind::Consume => self.consume(),
            Kind::Reset => self.restart(side, ResetKind::Bus),
            Kind::Steer => self.steer(step),
        }
    }

    fn command(&mut self, step: &Step) {
        let guest = &mut self.guests[step.guest()];
        let mut bytes = step.data.clone();
        bytes.resize((step.a % LONGEST) as usize, 0);
        let output_len = (step.b % LONGEST) as usize;
        let (ins, outs) = guest.prepare(&bytes, output_len, bytes.len());
        let slot = guest.slot(0);
        // One of what can be wrong with a command entry and its mailboxes.
        let chain = [&ins[..], &outs[..]].concat();
        let pick = usize::from(step.flags >> 4);
        let block = chain.get(pick % chain.len().max(1)).copied();
        let elsewhere = [
            0,
            0x1234,
            BASE + 0x40,
            BASE - 4096,
            slot & !0x1ff,
            block.unwrap_or(0),
        ];
        let target = elsewhere[pick % elsewhere.len()];
        match ((step.flags >> 1) & 7, block) {
            (1, _) => guest.ram.set(slot + 0x3c, &[0x13]),
            (2, Some(block)) => guest.ram.set(block + 0x23b, &[0x55]),
            (3, Some(block)) => guest.ram.set(block + 0x230, &target.to_be_bytes()),
            (4, _) => guest.ram.set(slot, &[step.flags]),
            (5, _) => guest.ram.set(slot + 4, &step.b.to_be_bytes()),
            (6, _) => guest.ram.set(slot + 0x38, &u32::MAX.to_be_bytes()),
            _ => {}
        }
        if target != 0 {
            guest
                .ram
                .watch(|watch| watch.name(Owner::Command, target, 0x240));
        }
        guest.ring_commands(1);
        // The book-keeping from here on is the guest's work, not the model's.
        bounds::end();
        guest
            .ram
            .watch(|watch| watch.forget(|owner| owner == Owner::Command));
        let delivered = guest.ram.get(slot + 0x3f, 1)[0] == 0;
        // A chain of output mailboxes that leads to the command queue has its answer written over; a queue that was made
        // there writes over any.
        let overwritten = ((step.flags >> 1) & 7 == 3 && target == slot & !0x1ff)
            || guest.ram.watch(|watch| watch.shared_with_commands());
        if !delivered || overwritten {
            // It may have been executed, and its answer not have come.
            self.unsure = true;
        } else if output_len >= 8 {
            let out = guest.collect(&outs, output_len.max(16));
            guest.ledger.note(&guest.ram, &bytes, &out);
        }
    }

    fn configure(&mut self, step: &Step) {
        let side = step.guest();
        let mut data = vec![0; step.b as usize % 257];
        self.config[side].read(step.a as usize, &mut data);
        for event in self.config[side].write(step.a as usize, &step.data) {
            match event {
                Event::BusMaster(on) => self.guests[side].hca.bus_master(on),
                Event::BarPlaced(bar, address) => {
                    self.guests[side].hca.bar_placed(bar, address);
                }
                Event::Reset(kind) => self.restart(side, kind),
                // The interrupt vectors are those of the vfio-user front end, which is not here.
                Event::InterruptMask(_) => {}
            }
        }
    }

    /// A reset, after which the driver starts again.
    fn restart(&mut self, side: usize, kind: ResetKind) {
        let guest = &mut self.guests[side];
        guest.hca.reset(kind);
        guest.ledger.clear(&guest.ram);
        for (name, count) in objects(guest) {
            assert_eq!(count, 0, "{name} after a reset");
        }
        guest.hca.bus_master(true);
        guest.bring_up();
    }

    fn post(&mut self, step: &Step) {
        let side = step.guest();
        let count = self.queues[side].len();
        if count == 0 || step.data.len() < 16 {
            return;
        }
        // Three bytes at once are not found by chance.
        #[cfg(feature = "planted")]
        assert!(
            step.data[3] != 0x14 || step.data[12..15] != *b"bug",
            "the planted bug"
        );
        let guest = &self.guests[side];
        let qp = &mut self.queues[side][step.a as usize % count].qp;
        let mut wqe = step.data.clone();
        wqe.resize(wqe.len().next_multiple_of(64).min(16 * 64), 0);
        if step.b & 2 == 0 {
            wqe[1..3].copy_from_slice(&qp.producer.to_be_bytes());
            wqe[4..7].copy_from_slice(&qp.qpn.to_be_bytes()[1..]);
        }
        if step.b & 4 == 0 {
            wqe[7] = step.data.len().div_ceil(16) as u8;
        }
        for block in wqe.chunks(64) {
            let slot = u64::from(qp.producer) & ((1 << qp.shape.log_sq) - 1);
            guest.ram.set(qp.sq + slot * 64, block);
            qp.producer = qp.producer.wrapping_add(1);
        }
        guest
            .ram
            .set(qp.dbr + 4, &u32::from(qp.producer).to_be_bytes());
        if step.b & 1 == 0 {
            qp.ring(guest, guest.uar);
        }
    }

    fn receive(&mut self, step: &Step) {
        let side = step.guest();
        let pointers: Vec<[u8; 16]> = step
            .data
            .chunks_exact(16)
            .map(|c| c.try_into().expect("16"))
            .collect();
        let guest = &self.guests[side];
        let (queues, srqs) = (&mut self.queues[side], &mut self.srqs[side]);
        let all = queues.len() + srqs.len();
        if all == 0 {
            return;
        }
        let index = step.a as usize % all;
        if let Some(queue) = queues.get_mut(index) {
            queue
                .qp
                .receive_into(guest, &pointers[..pointers.len().min(2)]);
        } else {
            srqs[index - queues.len()].post(guest, &pointers[..pointers.len().min(3)]);
        }
    }

    fn consume(&mut self) {
        for (guest, queues) in self.guests.iter_mut().zip(&mut self.queues) {
            for queue in queues {
                while queue.cq.poll(guest).is_some() {}
            }
            while guest.event().is_some() || guest.completion_event().is_some() {}
        }
    }

    fn steer(&mut self, step: &Step) {
        const COMMANDS: &[&[&str]] = &[
            &["link", "down"],
            &["link", "up"],
            &["link", "loss", "200000"],
            &["link", "loss", "0"],
            &["fault", "health", "freeze"],
            &["fault", "syndrome", "1"],
            &["fault", "wqe", "0x40", "0x15"],
            &["fault", "pages", "4"],
            &["fault", "pages", "-4"],
            &["fault", "uars", "oldest-first"],
            &["fault", "clear"],
        ];
        let words = COMMANDS[step.a as usize % COMMANDS.len()];
        let _ = self.guests[step.guest()].hca.steer(words[0], &words[1..]);
    }

    /// Lets the engine run until it has nothing to do at once, or has had its turns.
    fn settle(&self) {
        for _ in 0..TURNS {
            bounds::begin();
            if matches!(self.fabric.poll(|_| {}), Next::At(_)) {
                return;
            }
        }
    }

    /// What no guest knows of has memory that no guest knows of.
    fn no_strays(&self, step: &Step) {
        if self.unsure {
            return;
        }
        for (side, guest) in self.guests.iter().enumerate() {
            guest.ram.watch(|watch| {
                assert!(
                    watch.strays().is_empty(),
                    "guest {side}: memory that nothing names was touched in {step:x?}: {:x?}",
                    watch.strays()
                );
            });
        }
    }

    /// Destroys every object in an order that their references permit. All must go, and nothing be left.
    fn take_apart(mut self) {
        self.settle();
        for guest in &mut self.guests {
            // The program may have taken away what commands need.
            guest.hca.bus_master(true);
            let _ = guest.hca.steer("fault", &["clear"]);
            guest.uid = 0;
            loop {
                let endings = guest.ledger.endings();
                let ended = endings
                    .into_iter()
                    .filter(|ending| status(&guest.command(ending.clone(), 16)) == 0)
                    .count();
                if ended == 0 {
                    break;
                }
            }
            let why = guest.referee.recent(1);
            for (name, count) in objects(guest) {
                let gone = count == 0 || self.unsure;
                assert!(gone, "{count} {name} cannot be destroyed: {why:?}");
            }
            // The program may have been here before.
            guest.command(input(opcode::TEARDOWN_HCA, 16), 16);
            guest.ok(input(opcode::DISABLE_HCA, 16), 16);
            for (name, count) in objects(guest) {
                assert_eq!(count, 0, "{name} after DISABLE_HCA");
            }
            assert_eq!(guest.count("pages"), 0);
        }
        self.settle();
        self.no_strays(&Step::new(Kind::Run, 0, 0, &[]));
    }
}

/// The guest's live objects by kind.
fn objects(guest: &Guest) -> Vec<(&'static str, u64)> {
    const KINDS: &[&str] = &[
        "uctx", "uar", "pd", "mkey", "umem", "eq", "cq", "qp", "srq", "xrcd",
    ];
    let counts = guest.hca.counts();
    counts
        .into_iter()
        .filter(|(name, _)| KINDS.contains(name))
        .collect()
}

/// An offset in BAR 0 or a little beyond: most of it is UAR pages, of which few are in use.
fn register(a: u32) -> u64 {
    let offset = u64::from(a) % (BAR0_SIZE + 0x1000);
    // Three of four accesses go to the first pages: init segment, device memory, UAR pages in use.
    if a & 0x3000_0000 == 0 {
        offset
    } else {
        offset % 0x12_0000
    }
}
