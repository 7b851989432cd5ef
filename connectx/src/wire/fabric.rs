// SPDX-License-Identifier: MIT OR Apache-2.0
//! The fabric of one process: functions plugged into a switch that forwards by LID, and the thread that runs them.
//!
//! One lock guards all of it. What a doorbell starts is done by the caller at once as long as it is little, which keeps
//! latency low; the rest, and what timers start, is done by the engine thread.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::packet::{Deth, Kind, Nak, Packet, Verdict};
use super::payload::Payload;
use super::port::{PortState, SM_LID};
use crate::engine::compression;
use crate::engine::held;
use crate::engine::lent::{self, Located};
use crate::engine::memory::Denied;
use crate::engine::requester::Budget;
use crate::engine::{receive, responder};
use crate::log::Referee;
use crate::mad::sa::Administration;
use crate::objects::device::Device;

/// Work that a caller does itself.
const INLINE: Budget = Budget {
    packets: 256,
    bytes: 1 << 20,
};
/// Work of the engine thread between two chances for callers.
const ROUND: Budget = Budget {
    packets: 512,
    bytes: 4 << 20,
};
/// Work of one queue pair before the next has its turn.
const TURN: Budget = Budget {
    packets: 32,
    bytes: 256 << 10,
};
/// Longest sleep of the engine thread.
const IDLE: Duration = Duration::from_secs(1);
/// First multicast LID.
const MULTICAST_LID: u16 = 0xc000;

struct State {
    devices: Vec<Device>,
    /// What the subnet manager answers.
    administration: Administration,
    /// Where the data of the packet at hand is.
    located: Located,
    /// Packets on slow links, by the time of their arrival and the order of their sending.
    slow: BTreeMap<(Instant, u64), (usize, Packet)>,
    /// Packets sent over slow links.
    sent_slow: u64,
    /// Function whose packets are looked at first.
    sending: usize,
    /// Function that is looked at first for work.
    turn: usize,
    /// When the engine thread wakes by itself.
    wakes_at: Instant,
}

/// A switch and the functions plugged into it.
pub struct Fabric {
    state: Mutex<State>,
    wake: Condvar,
    /// Callers that wait for the lock: the engine thread lets them go first.
    waiting: AtomicU32,
    /// A caller left work behind, or a deadline earlier than the engine thread knows.
    attention: AtomicBool,
    referee: Referee,
}

/// When a [polled](Fabric::polled) fabric must be looked at again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// There is more to do.
    AtOnce,
    /// At the earliest deadline, if there is one.
    At(Option<Instant>),
}

impl Fabric {
    /// A fabric without functions. Its thread ends with it.
    pub fn new(referee: Referee) -> Arc<Self> {
        let fabric = Self::polled(referee);
        let weak = Arc::downgrade(&fabric);
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || run(&weak));
        if let Err(error) = thread {
            tracing::error!("no engine thread, timers will not run: {error}");
        }
        fabric
    }

    /// A fabric without functions and without a thread: its owner calls [`Fabric::poll`].
    pub fn polled(referee: Referee) -> Arc<Self> {
        let state = State {
            devices: Vec::new(),
            administration: Administration::default(),
            located: Located::default(),
            slow: BTreeMap::new(),
            sent_slow: 0,
            sending: 0,
            turn: 0,
            wakes_at: Instant::now(),
        };
        Arc::new(Self {
            state: Mutex::new(state),
            wake: Condvar::new(),
            waiting: AtomicU32::new(0),
            attention: AtomicBool::new(false),
            referee,
        })
    }

    /// Where refusals go.
    pub fn referee(&self) -> Referee {
        self.referee.clone()
    }

    /// Plugs a function in and gives its place.
    pub fn attach(&self, device: Device) -> usize {
        let mut state = self.lock();
        state.devices.push(device);
        state.devices.len() - 1
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something to a function and then a bounded amount of the work that came of it.
    pub fn drive<R>(&self, index: usize, f: impl FnOnce(&mut Device) -> R) -> R {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let mut state = self.lock();
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        let result = f(&mut state.devices[index]);
        let more = state.work(INLINE);
        let wakes_at = state.wakes_at;
        let earlier = state
            .next_deadline()
            .is_some_and(|deadline| deadline < wakes_at);
        drop(state);
        if more || earlier {
            self.attention.store(true, Ordering::Release);
            self.wake.notify_one();
        }
        result
    }

    /// Whether a [polled](Fabric::polled) fabric must be polled before the time it last said.
    pub fn needs_attention(&self) -> bool {
        self.attention.load(Ordering::Acquire)
    }

    /// Does something to all functions, and then a bounded amount of what is to be done.
    pub fn poll(&self, f: impl FnOnce(&mut [Device])) -> Next {
        // The lock is not fair: without this a caller could wait for long.
        while self.waiting.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        let mut state = self.lock();
        self.attention.store(false, Ordering::Relaxed);
        f(&mut state.devices);
        if state.work(ROUND) {
            return Next::AtOnce;
        }
        let deadline = state.next_deadline();
        state.wakes_at = deadline.unwrap_or_else(|| Instant::now() + IDLE);
        Next::At(deadline)
    }
}

/// The engine thread.
fn run(fabric: &Weak<Fabric>) {
    loop {
        let Some(fabric) = fabric.upgrade() else {
            return;
        };
        let mut state = fabric.lock();
        let more = state.work(ROUND);
        let now = Instant::now();
        let due = state
            .next_deadline()
            .is_some_and(|deadline| deadline <= now);
        if more || due {
            drop(state);
            // The lock is not fair: without this a caller could wait for long.
            while fabric.waiting.load(Ordering::Relaxed) > 0 {
                std::thread::yield_now();
            }
            continue;
        }
        let sleep = state
            .next_deadline()
            .map_or(IDLE, |deadline| (deadline - now).min(IDLE));
        state.wakes_at = now + sleep;
        let woken = fabric.wake.wait_timeout(state, sleep);
        drop(woken);
    }
}

impl State {
    fn next_deadline(&self) -> Option<Instant> {
        let now = Instant::now();
        let link = |device: &Device| match device.runnable.is_empty() {
            true => None,
            false => device.port.link.blocked_until(now).or(Some(now)),
        };
        self.devices
            .iter()
            .flat_map(|device| [device.timers.next(), device.held.next(), link(device)])
            .flatten()
            .chain(self.slow.keys().next().map(|(arrival, _)| *arrival))
            .min()
    }

    /// Works until nothing is left or the budget is spent. Returns whether something is left.
    fn work(&mut self, mut budget: Budget) -> bool {
        let mut now = Instant::now();
        loop {
            if budget.is_spent() {
                self.devices.iter_mut().for_each(compression::close_all);
                self.devices.iter_mut().for_each(responder::send_acks);
                let left =
                    |device: &Device| !device.outbox.is_empty() || !device.runnable.is_empty();
                return self.devices.iter().any(left);
            }
            if let Some((from, packet)) = self.next_packet() {
                budget.spend(packet.payload.len());
                self.send(from, packet, now);
                continue;
            }
            // Who is told that a message has arrived finds that it has.
            self.devices.iter_mut().for_each(compression::close_all);
            if self.acknowledge() || self.run_one(now, &mut budget) {
                continue;
            }
            // Nothing is under way, so what has not been answered by now is lost.
            now = Instant::now();
            if !self.arrive(now, &mut budget) && !self.run_timer(now) {
                return false;
            }
        }
    }

    /// Has the requests acknowledged that have come. Returns whether there were any.
    fn acknowledge(&mut self) -> bool {
        let mut any = false;
        for device in &mut self.devices {
            if !device.acks.is_empty() {
                any = true;
                responder::send_acks(device);
            }
        }
        any
    }

    /// The next packet that a function has sent, and the function.
    fn next_packet(&mut self) -> Option<(usize, Packet)> {
        let count = self.devices.len();
        for _ in 0..count {
            let from = self.sending;
            if let Some(packet) = self.devices[from].outbox.pop_front() {
                return Some((from, packet));
            }
            self.sending = (from + 1) % count;
        }
        None
    }

    /// Gives the next queue pair with work its turn.
    fn run_one(&mut self, now: Instant, budget: &mut Budget) -> bool {
        let count = self.devices.len();
        for step in 0..count {
            let index = (self.turn + step) % count;
            let device = &mut self.devices[index];
            if device.port.link.blocked_until(now).is_some() {
                continue;
            }
            let Some(qpn) = device.runnable.pop_front() else {
                continue;
            };
            let mut turn = TURN;
            if receive::run(device, qpn, &mut turn, now) {
                device.schedule(qpn);
            }
            self.turn = (index + 1) % count;
            budget.spend(0);
            return true;
        }
        false
    }

    /// Takes a packet off a slow link.
    fn arrive(&mut self, now: Instant, budget: &mut Budget) -> bool {
        match self.slow.first_entry() {
            Some(first) if first.key().0 <= now => {
                let (to, packet) = first.remove();
                budget.spend(packet.payload.len());
                // It is on its way: nothing of it is lent.
                if let Payload::Bytes(bytes) = &packet.payload {
                    let data = bytes.as_slice().into();
                    receive::packet(&mut self.devices[to], &packet, data, now);
                }
                true
            }
            _ => false,
        }
    }

    fn run_timer(&mut self, now: Instant) -> bool {
        for device in &mut self.devices {
            if held::release(device, now) {
                return true;
            }
            if let Some(qpn) = device.timers.pop_due(now) {
                receive::timer(device, qpn, now);
                return true;
            }
        }
        false
    }

    /// The port of the sender, and the switch: to the port with the LID, or to all for a multicast LID.
    fn send(&mut self, from: usize, packet: Packet, now: Instant) {
        let device = &mut self.devices[from];
        if device.port.state != PortState::Active {
            device.counters.packets_dropped += u64::from(packet.span);
            return;
        }
        if device.port.link.loses() {
            device.counters.packets_lost += u64::from(packet.span);
            return;
        }
        // The time of the engine's round would have it that nothing has left since.
        let link = &mut device.port.link;
        let arrival = match link.is_immediate() {
            true => None,
            false => Some(link.sends(packet.payload.len(), packet.span, Instant::now())),
        };
        if packet.destination_lid >= MULTICAST_LID {
            for to in 0..self.devices.len() {
                self.forward(from, to, packet.clone(), arrival, now);
            }
            return;
        }
        let lid = packet.destination_lid;
        if lid == SM_LID {
            return self.administer(from, packet, arrival, now);
        }
        match self
            .devices
            .iter()
            .position(|device| device.port.lid == lid)
        {
            Some(to) => self.forward(from, to, packet, arrival, now),
            None => self.devices[from].counters.packets_dropped += u64::from(packet.span),
        }
    }

    /// A datagram to the subnet manager, and its answer.
    fn administer(
        &mut self,
        from: usize,
        mut packet: Packet,
        arrival: Option<Instant>,
        now: Instant,
    ) {
        let taken = lent::take(&mut self.devices[from], &mut packet.payload);
        let (true, Payload::Bytes(request), 1, Some(deth)) =
            (taken, &packet.payload, packet.qpn, packet.deth)
        else {
            self.devices[from].counters.packets_dropped += u64::from(packet.span);
            return;
        };
        for answer in self.administration.answer(&self.devices, from, request) {
            let answer = Packet {
                source_lid: SM_LID,
                destination_lid: packet.source_lid,
                qpn: deth.source_qpn,
                deth: Some(Deth {
                    source_qpn: 1,
                    ..deth
                }),
                grh: None,
                payload: Payload::Bytes(answer),
                ..packet.clone()
            };
            self.forward(from, from, answer, arrival, now);
        }
    }

    /// The link. A packet that is not there at once has a time of arrival.
    fn forward(
        &mut self,
        from: usize,
        to: usize,
        mut packet: Packet,
        arrival: Option<Instant>,
        now: Instant,
    ) {
        let Some(arrival) = arrival else {
            return self.deliver(from, to, packet, now);
        };
        // The link may have become slow since the packet was made.
        match lent::take(&mut self.devices[from], &mut packet.payload) {
            true => {
                self.sent_slow += 1;
                self.slow.insert((arrival, self.sent_slow), (to, packet));
            }
            false => self.devices[from].counters.packets_dropped += u64::from(packet.span),
        }
    }

    /// A packet arrives at a function at once.
    fn deliver(&mut self, from: usize, to: usize, mut packet: Packet, now: Instant) {
        let located = &mut self.located;
        let denied = match lent::locate(&self.devices[from], &packet.payload, located) {
            Ok(Some(data)) => {
                receive::packet(&mut self.devices[to], &packet, data, now);
                if !self.located.take_broken() {
                    return;
                }
                Denied::Dma
            }
            Ok(None) => {
                self.devices[from].counters.packets_dropped += u64::from(packet.span);
                return;
            }
            Err(denied) => denied,
        };
        let Payload::Lent { lender, .. } = packet.payload else {
            return;
        };
        if lent::failed(&mut self.devices[from], lender, denied) {
            packet.span = 1;
            packet.kind = Kind::Acknowledge(Verdict::Nak(Nak::RemoteAccess));
            let nothing: &[u8] = &[];
            receive::packet(&mut self.devices[to], &packet, nothing.into(), now);
        }
    }
}
