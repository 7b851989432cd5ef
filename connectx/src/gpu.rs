// SPDX-License-Identifier: MIT OR Apache-2.0
//! A stand-in GPU: a PCI function with a data-centre GPU's ids, class and BARs that does what a GPU does behind the
//! CPU's back. It keeps bus addresses, as a GPU's page table does, and stores there for as long as it is told to,
//! whatever became of the CPU's mapping or of the device that was mapped.
//!
//! BAR 0 (16 MiB, 32-bit) holds the registers of [`regs`], BAR 2 (256 MiB, 64-bit, prefetchable) is memory. Each of the
//! [`regs::ENGINES`] engines makes one stream of stores. A store is a posted write: it goes to the BAR of another function
//! that the host placed at its address, else to system memory. The streams end by command, by count, by a reset
//! of the GPU, never by a reset of the target.

pub mod regs;

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::log::{Referee, Refusal};
use crate::mem::SharedMemory;
use crate::pci::{Bar, Builder, ConfigSpace, Express, Identity};
use crate::platform::{Dma, Function, Interrupts, ResetKind};

/// Bytes of BAR 0, the registers.
pub const REGISTERS_SIZE: u64 = 16 << 20;
/// Bytes of BAR 2, the memory.
pub const MEMORY_SIZE: u64 = 256 << 20;
/// BAR index of the registers.
pub const REGISTERS_BAR: usize = 0;
/// BAR index of the memory.
pub const MEMORY_BAR: usize = 2;

/// What one engine is set to do and has done.
#[derive(Debug, Clone, Copy)]
struct Engine {
    address: u64,
    length: u32,
    period_us: u32,
    count: u32,
    data: [u8; regs::DATA_LEN],
    running: Option<Stream>,
    /// Number of the last start, so that a store is booked to the stream that it belongs to.
    start: u64,
    failed: bool,
    refused: bool,
    done: u64,
    failures: u64,
}

impl Default for Engine {
    fn default() -> Self {
        Self {
            address: 0,
            length: 0,
            period_us: 0,
            count: 0,
            data: [0; regs::DATA_LEN],
            running: None,
            start: 0,
            failed: false,
            refused: false,
            done: 0,
            failures: 0,
        }
    }
}

/// A stream of stores, as latched at its start.
#[derive(Debug, Clone, Copy)]
struct Stream {
    address: u64,
    length: usize,
    data: [u8; regs::DATA_LEN],
    period: Duration,
    /// Stores still to make, or `None` without end.
    left: Option<u32>,
    due: Instant,
}

struct State {
    engines: [Engine; regs::ENGINES],
    /// The engine whose store is under way.
    storing: Option<usize>,
    ended: bool,
}

struct Shared {
    state: Mutex<State>,
    /// Something was started or stopped, or a store has ended.
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The function.
pub struct Gpu {
    name: String,
    serial: u64,
    memory: Arc<SharedMemory>,
    shared: Arc<Shared>,
    dma: OnceLock<Arc<dyn Dma>>,
    referee: Referee,
}

impl Gpu {
    /// GPU number `index`.
    pub fn new(index: u16, referee: Referee) -> io::Result<Self> {
        let name = format!("gpu{index}");
        let memory = Arc::new(SharedMemory::new(&name, MEMORY_SIZE as usize)?);
        let state = State {
            engines: [Engine::default(); regs::ENGINES],
            storing: None,
            ended: false,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        // NVIDIA's EUI-64 prefix, so that it reads as what it stands for.
        let serial = 0x48b0_2d00_0000_0000 + u64::from(index);
        Ok(Self {
            name,
            serial,
            memory,
            shared,
            dma: OnceLock::new(),
            referee,
        })
    }

    fn refuse(&self, engine: usize, field: &str, value: String, rule: &str) {
        self.referee.refuse(Refusal {
            function: self.name.clone(),
            object: format!("engine {engine}"),
            field: field.into(),
            value,
            rule: rule.into(),
            source: "docs/standin-gpu.md".into(),
        });
    }

    fn command(&self, state: &mut State, index: usize, command: u32) {
        let engine = &mut state.engines[index];
        match command {
            regs::COMMAND_START => match engine.stream() {
                Ok(stream) => {
                    (engine.running, engine.failed, engine.refused) = (Some(stream), false, false);
                    (engine.done, engine.failures) = (0, 0);
                    engine.start += 1;
                }
                Err((field, value, rule)) => {
                    (engine.running, engine.refused) = (None, true);
                    self.refuse(index, field, value, rule);
                }
            },
            regs::COMMAND_STOP => engine.running = None,
            other => {
                let rule = "a command is 1 (start) or 2 (stop)";
                self.refuse(index, "COMMAND", format!("{other:#x}"), rule);
            }
        }
        self.shared.changed.notify_all();
    }

    fn write_register(&self, state: &mut State, at: u64, value: u32) {
        if at == regs::STOP_ALL {
            state
                .engines
                .iter_mut()
                .for_each(|engine| engine.running = None);
            self.shared.changed.notify_all();
            return;
        }
        let Some((index, register)) = regs::locate(at) else {
            return;
        };
        let engine = &mut state.engines[index];
        match register {
            regs::ADDRESS => engine.address = (engine.address & !0xffff_ffff) | u64::from(value),
            regs::ADDRESS_HIGH => {
                engine.address = (engine.address & 0xffff_ffff) | (u64::from(value) << 32);
            }
            regs::LENGTH => engine.length = value,
            regs::PERIOD_US => engine.period_us = value,
            regs::COUNT => engine.count = value,
            regs::COMMAND => self.command(state, index, value),
            regs::DATA.. => {
                let from = (register - regs::DATA) as usize;
                engine.data[from..from + 4].copy_from_slice(&value.to_le_bytes());
            }
            _ => {}
        }
    }
}

impl Engine {
    /// What the registers ask for, or the register, its value and the rule that it breaks.
    fn stream(&self) -> Result<Stream, (&'static str, String, &'static str)> {
        let length = self.length as usize;
        if !matches!(length, 4 | 8 | regs::DATA_LEN) {
            return Err((
                "LENGTH",
                length.to_string(),
                "a store is 4, 8 or 64 bytes long",
            ));
        }
        if self.address % length as u64 != 0 {
            let address = format!("{:#x}", self.address);
            return Err(("ADDRESS", address, "a store is aligned to its length"));
        }
        if self.period_us == 0 && self.count == 0 {
            return Err((
                "PERIOD_US",
                "0".into(),
                "a stream without end needs a period",
            ));
        }
        Ok(Stream {
            address: self.address,
            length,
            data: self.data,
            period: Duration::from_micros(self.period_us.into()),
            left: (self.count > 0).then_some(self.count),
            due: Instant::now(),
        })
    }
}

impl State {
    fn read_register(&self, at: u64) -> u32 {
        match at {
            regs::ID => return regs::ID_VALUE,
            regs::VERSION => return regs::VERSION_VALUE,
            regs::ENGINE_COUNT => return regs::ENGINES as u32,
            regs::RUNNING => return self.running(0),
            regs::RUNNING_HIGH => return self.running(32),
            _ => {}
        }
        let Some((index, register)) = regs::locate(at) else {
            return 0;
        };
        let engine = &self.engines[index];
        match register {
            regs::ADDRESS => engine.address as u32,
            regs::ADDRESS_HIGH => (engine.address >> 32) as u32,
            regs::LENGTH => engine.length,
            regs::PERIOD_US => engine.period_us,
            regs::COUNT => engine.count,
            regs::STATUS => {
                let flag = |on: bool, bit: u32| if on { bit } else { 0 };
                flag(self.busy(index), regs::STATUS_RUNNING)
                    | flag(engine.failed, regs::STATUS_FAILED)
                    | flag(engine.refused, regs::STATUS_REFUSED)
            }
            regs::DONE => engine.done as u32,
            regs::DONE_HIGH => (engine.done >> 32) as u32,
            regs::FAILURES => engine.failures as u32,
            regs::FAILURES_HIGH => (engine.failures >> 32) as u32,
            regs::DATA.. => {
                let from = (register - regs::DATA) as usize;
                let mut bytes = [0; 4];
                bytes.copy_from_slice(&engine.data[from..from + 4]);
                u32::from_le_bytes(bytes)
            }
            _ => 0,
        }
    }

    fn busy(&self, engine: usize) -> bool {
        self.engines[engine].running.is_some() || self.storing == Some(engine)
    }

    fn running(&self, from: usize) -> u32 {
        (0..32).fold(0, |bits, i| bits | (u32::from(self.busy(from + i)) << i))
    }

    /// The engine with the earliest store to make.
    fn next(&self) -> Option<(usize, Stream)> {
        let streams = self
            .engines
            .iter()
            .enumerate()
            .filter_map(|(i, e)| Some((i, e.running?)));
        streams.min_by_key(|(_, stream)| stream.due)
    }

    /// Books a store of the stream that began with start number `start`, unless another has begun since.
    fn stored(&mut self, index: usize, start: u64, ok: bool) {
        let engine = &mut self.engines[index];
        if engine.start != start {
            return;
        }
        engine.failed = !ok;
        *(if ok {
            &mut engine.done
        } else {
            &mut engine.failures
        }) += 1;
    }
}

/// Makes the stores of every engine, in the order in which they fall due.
fn run_engines(shared: &Shared, dma: &dyn Dma) {
    let mut state = shared.lock();
    while !state.ended {
        let now = Instant::now();
        let Some((index, stream)) = state.next() else {
            state = shared
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        if let Some(wait) = stream
            .due
            .checked_duration_since(now)
            .filter(|wait| !wait.is_zero())
        {
            let (woken, _) = shared
                .changed
                .wait_timeout(state, wait)
                .unwrap_or_else(PoisonError::into_inner);
            state = woken;
            continue;
        }
        let left = stream.left.map(|left| left - 1);
        // A store that could not be made in time is not made up for: a GPU's loop would be late as well.
        let due = (stream.due + stream.period).max(now);
        state.engines[index].running = (left != Some(0)).then_some(Stream {
            left,
            due,
            ..stream
        });
        state.storing = Some(index);
        let start = state.engines[index].start;
        drop(state);
        // Not under the lock: the target may be another GPU's registers, whose engine may be storing into ours.
        let ok = dma
            .post(stream.address, &stream.data[..stream.length])
            .is_ok();
        state = shared.lock();
        // A reset meanwhile has cleared the books; this store belongs to the time before.
        if state.storing.take() == Some(index) {
            state.stored(index, start, ok);
        }
        shared.changed.notify_all();
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
    }
}

impl Function for Gpu {
    fn name(&self) -> &str {
        &self.name
    }

    fn config_space(&self) -> ConfigSpace {
        // Ids: the PCI ID repository's "GH100 [H200 SXM 141GB]". Class 0x0302 is a 3D controller.
        Builder::new(Identity {
            vendor: 0x10de,
            device: 0x2335,
            subsystem_vendor: 0x10de,
            subsystem: 0x18be,
            class: 0x03_0200,
            revision: 0xa1,
        })
        .bar(
            REGISTERS_BAR,
            Bar::Memory32 {
                size: REGISTERS_SIZE,
                prefetchable: false,
            },
        )
        .bar(
            MEMORY_BAR,
            Bar::Memory64 {
                size: MEMORY_SIZE,
                prefetchable: true,
            },
        )
        .power_management(0x40)
        .express(0x60, Express::gen5_x16())
        .error_reporting(0x100)
        .serial_number(0x1c0, self.serial)
        .build()
    }

    fn bar_sizes(&self) -> [u64; 6] {
        let mut sizes = [0; 6];
        sizes[REGISTERS_BAR] = REGISTERS_SIZE;
        sizes[MEMORY_BAR] = MEMORY_SIZE;
        sizes
    }

    fn msix_vectors(&self) -> u16 {
        0
    }

    fn connect(&self, dma: Arc<dyn Dma>, _interrupts: Arc<dyn Interrupts>) {
        if self.dma.set(Arc::clone(&dma)).is_err() {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name(format!("{}-engines", self.name));
        if let Err(error) = thread.spawn(move || run_engines(&shared, &*dma)) {
            tracing::error!("{}: no thread for its engines: {error}", self.name);
        }
    }

    fn bar_memory(&self, bar: usize) -> Option<Arc<SharedMemory>> {
        (bar == MEMORY_BAR).then(|| Arc::clone(&self.memory))
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        if bar == MEMORY_BAR {
            if self.memory.read(offset, data).is_err() {
                data.fill(0xff);
            }
            return;
        }
        let state = self.shared.lock();
        for (i, byte) in data.iter_mut().enumerate() {
            let at = offset + i as u64;
            *byte = state.read_register(at & !3).to_le_bytes()[(at & 3) as usize];
        }
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) {
        if bar == MEMORY_BAR {
            // The front end has checked the range, and the memory is writable.
            let _ = self.memory.write(offset, data);
            return;
        }
        if offset % 4 != 0 || data.len() % 4 != 0 {
            self.referee.refuse(Refusal {
                function: self.name.clone(),
                object: format!("register {offset:#x}"),
                field: "length".into(),
                value: data.len().to_string(),
                rule: "registers are written in aligned groups of 4 bytes".into(),
                source: "docs/standin-gpu.md".into(),
            });
            return;
        }
        let mut state = self.shared.lock();
        for (i, word) in data.chunks_exact(4).enumerate() {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(word);
            self.write_register(&mut state, offset + 4 * i as u64, u32::from_le_bytes(bytes));
        }
    }

    fn bus_master(&self, _enabled: bool) {
        // While off, the port lets no store out; the engines go on and count failures, as a GPU's would fault.
    }

    fn bar_placed(&self, _bar: usize, _address: Option<u64>) {}

    fn reset(&self, _kind: ResetKind) {
        let mut state = self.shared.lock();
        state.engines = [Engine::default(); regs::ENGINES];
        // After the reset nothing of before may reach the bus. A store takes microseconds; the bound is for the case
        // that its target hangs, which must not take this function with it.
        let deadline = Instant::now() + Duration::from_secs(1);
        while state.storing.is_some() && Instant::now() < deadline {
            let wait = deadline.saturating_duration_since(Instant::now());
            let (woken, _) = self
                .shared
                .changed
                .wait_timeout(state, wait)
                .unwrap_or_else(PoisonError::into_inner);
            state = woken;
        }
        state.storing = None;
        state.engines = [Engine::default(); regs::ENGINES];
        drop(state);
        if let Err(error) = self.memory.clear() {
            tracing::warn!("{}: memory not cleared by the reset: {error}", self.name);
        }
    }

    fn counts(&self) -> Vec<(&'static str, u64)> {
        let state = self.shared.lock();
        let running = (0..regs::ENGINES).filter(|&i| state.busy(i)).count() as u64;
        let sum = |of: fn(&Engine) -> u64| state.engines.iter().map(of).sum();
        vec![
            ("engines_running", running),
            ("stores", sum(|e| e.done)),
            ("stores_failed", sum(|e| e.failures)),
        ]
    }
}

#[cfg(test)]
mod tests;
