// SPDX-License-Identifier: MIT OR Apache-2.0
//! The loopback route: the NIC is the ConnectX model in this process, for machines without a NIC, and for tests.
//!
//! A process has one fabric of [`NICS`] NICs, `loopback0`, `loopback1` and so on, as long as anything made from it
//! lives. They reach each other, and themselves, and nothing else. Everything is the same as with a NIC but for two things:
//! doorbell pages are ordinary memory, which a thread of the model looks at, and so are the queues and buffers, which
//! the model reaches as a CPU does. GPU memory it does not reach.

mod listener;
mod memory;
mod objects;

pub(crate) use listener::{Listener, event_key};
pub(crate) use memory::Registration;
pub(crate) use objects::{Object, QueueMemory, Uar, Umem};

use crate::{
    address::LinkLayer,
    broker::{Pair, Path, SessionState},
    context::{OpenOptions, Port},
    error::{Error, Result, Source},
    hub::Hub,
    pci::Bdf,
};
use connectx::inproc::{self, Fabric, Loss, Nic};
use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError, RwLock, Weak,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

/// NICs of a process.
pub const NICS: usize = 4;

/// `IBV_MTU_4096`.
const MTU: u8 = 5;
/// The EQ that CQs name: the driver's, the model's first.
const EQN: u32 = 0;
/// `IBGDA_STATE_READY` and `_RECOVERED`.
const READY: u32 = 1;
const RECOVERED: u32 = 3;

/// The model, and what users' memory it reaches.
pub(crate) struct Model {
    fabric: Fabric,
    pieces: memory::Pieces,
    /// How often each NIC was lost. Numbers of objects are used again then, so what is of an earlier time is not to be named.
    losses: [RwLock<u32>; NICS],
    /// Of each NIC, who takes its events.
    hubs: [Mutex<Weak<Hub>>; NICS],
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").finish_non_exhaustive()
    }
}

/// The one fabric of the process.
fn model() -> Result<Arc<Model>> {
    static MODEL: Mutex<Weak<Model>> = Mutex::new(Weak::new());
    let mut last = crate::worker::lock(&MODEL);
    if let Some(model) = last.upgrade() {
        return Ok(model);
    }
    let options = inproc::Options {
        nics: NICS,
        ..inproc::Options::default()
    };
    let fabric = Fabric::new(&options).map_err(|error| refused("start the model", &error))?;
    let model = Arc::new(Model {
        fabric,
        pieces: Default::default(),
        losses: Default::default(),
        hubs: Default::default(),
    });
    *last = Arc::downgrade(&model);
    Ok(model)
}

fn index(name: &str) -> Result<usize> {
    let number = name.strip_prefix("loopback").map(str::parse);
    match number {
        Some(Ok(index)) if index < NICS => Ok(index),
        _ => Err(Error::argument(
            format!("NIC {name:?} of the loopback route"),
            "there is none of that name",
            format!("they are loopback0 to loopback{}", NICS - 1),
        )),
    }
}

/// Of the model's own errors.
fn refused(what: impl Into<String>, error: &inproc::Error) -> Error {
    match error {
        inproc::Error::Command {
            status: Some(status),
            syndrome,
            ..
        } => Error::firmware(what, *status as u8, *syndrome),
        other => Error::new(Source::Model, libc::EINVAL, what, other.to_string(), ""),
    }
}

/// Takes a NIC of the loopback route away from its users, as a reset does: the status page says so, and every object is gone.
/// Contexts can [`rebind`](crate::Context::rebind) after [`recover`].
///
/// # Errors
/// `EINVAL`: there is none of that name.
pub fn lose(nic: &str) -> Result<()> {
    let (index, model) = (index(nic)?, model()?);
    let mut losses = model.losses[index]
        .write()
        .unwrap_or_else(PoisonError::into_inner);
    *losses += 1;
    model.nic(index).lose(Loss::Reset);
    Ok(())
}

/// Brings a NIC back that [`lose`] took.
///
/// # Errors
/// `EINVAL`: it is not lost, or there is none of that name.
pub fn recover(nic: &str) -> Result<()> {
    let index = index(nic)?;
    let back = model()?.nic(index).recover();
    back.map_err(|error| refused(format!("recover {nic}"), &error))
}

impl Model {
    fn nic(&self, index: usize) -> &Nic {
        self.fabric
            .nic(index)
            .expect("the fabric has NICS functions, and `index` is less")
    }
}

/// What a context of the loopback route has of a session: the status page, and the generation it is of.
#[derive(Debug)]
pub(crate) struct Session {
    model: Arc<Model>,
    index: usize,
    bound: AtomicU32,
}

impl Session {
    pub(crate) fn open(options: &OpenOptions) -> Result<(Arc<Self>, Pair)> {
        let session = Arc::new(Self {
            index: index(&options.nic)?,
            model: model()?,
            bound: AtomicU32::new(0),
        });
        let pair = session.bind(options.gpu)?;
        Ok((session, pair))
    }

    fn bind(&self, gpu: Bdf) -> Result<Pair> {
        let (state, generation) = self.now();
        let name = format!("loopback{}", self.index);
        if state != READY {
            return Err(Error::new(
                Source::Model,
                libc::EAGAIN,
                format!("bind {name}"),
                "the NIC is lost, and not back yet",
                "loopback::recover brings it back",
            ));
        }
        self.bound.store(generation, Ordering::Relaxed);
        let nowhere = Bdf {
            domain: 0,
            bus: 0,
            device: 0,
            function: 0,
        };
        Ok(Pair {
            gpu,
            nic: nowhere,
            ibdev_name: name,
            path: Path::None,
            path_distance: -1,
            gpu_node: -1,
            nic_node: -1,
            gpu_link: Default::default(),
            nic_link: Default::default(),
            generation,
        })
    }

    pub(crate) fn rebind(&self, gpu: Bdf) -> Result<Pair> {
        if self.now() == (READY, self.bound.load(Ordering::Relaxed)) {
            return Err(Error::argument(
                format!("rebind loopback{}", self.index),
                "the session is not lost",
                "there is nothing to rebind",
            ));
        }
        self.bind(gpu)
    }

    pub(crate) fn status_page(&self) -> *const u64 {
        std::ptr::with_exposed_provenance(self.model.nic(self.index).status_page() as usize)
    }

    fn word(&self, index: usize) -> u64 {
        // SAFETY: the page is the model's, which lives as long as `self`, and is only written by atomic stores.
        unsafe { AtomicU64::from_ptr(self.status_page().cast_mut().add(index)) }
            .load(Ordering::Acquire)
    }

    /// State and generation.
    fn now(&self) -> (u32, u32) {
        let word = self.word(0);
        (word as u32, (word >> 32) as u32)
    }

    pub(crate) fn state(&self) -> SessionState {
        let (state, generation) = self.now();
        SessionState {
            // A page of the broker's belongs to a session: it is not ready again before that is rebound.
            state: if state == READY && generation != self.bound.load(Ordering::Relaxed) {
                RECOVERED
            } else {
                state
            },
            generation,
            reason: (self.word(1) >> 32) as u32,
            changed_ns: self.word(3),
        }
    }
}

/// A NIC of the model with a protection domain.
#[derive(Debug)]
pub(crate) struct Device {
    model: Arc<Model>,
    index: usize,
    losses: u32,
    pd: u32,
    name: String,
}

impl Device {
    pub(crate) fn open(session: &Session) -> Result<Arc<Self>> {
        let (model, index) = (Arc::clone(&session.model), session.index);
        let losses = *model.losses[index]
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let mut device = Self {
            model,
            index,
            losses,
            pd: 0,
            name: format!("loopback{index}"),
        };
        device.pd = device.call(|| "ALLOC_PD".to_owned(), Nic::alloc_pd)?;
        Ok(Arc::new(device))
    }

    /// Has the NIC do something, unless it was lost since this was opened.
    fn call<T>(
        &self,
        what: impl FnOnce() -> String,
        call: impl FnOnce(&Nic) -> std::result::Result<T, inproc::Error>,
    ) -> Result<T> {
        let losses = self.model.losses[self.index]
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        if *losses != self.losses {
            return Err(Error::new(
                Source::Model,
                libc::EIO,
                format!("{} on {}", what(), self.name),
                "the NIC was lost, and all objects with it",
                "rebind the context, and make new queues and regions",
            ));
        }
        call(self.model.nic(self.index))
            .map_err(|error| refused(format!("{} on {}", what(), self.name), &error))
    }

    /// As `call`, to end an object. Fails only when that is gone with the NIC.
    fn end(&self, call: impl FnOnce(&Nic) -> std::result::Result<(), inproc::Error>) {
        let _ = self.call(String::new, call);
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn pdn(&self) -> u32 {
        self.pd
    }

    pub(crate) fn eqn(&self) -> Result<u32> {
        Ok(EQN)
    }

    pub(crate) fn port(&self, number: u8) -> Result<Port> {
        if number != 1 {
            return Err(Error::argument(
                format!("port {number} of {}", self.name),
                "it has one port",
                "pass 1",
            ));
        }
        Ok(Port {
            number,
            link_layer: LinkLayer::Loopback,
            lid: self.model.nic(self.index).lid(),
            mtu: MTU,
            gid: self.model.nic(self.index).gid(),
            gid_index: 0,
        })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Whatever is in it holds an `Arc` of `self`.
        if self.pd != 0 {
            self.end(|nic| nic.dealloc_pd(self.pd));
        }
    }
}
