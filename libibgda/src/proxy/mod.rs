// SPDX-License-Identifier: MIT OR Apache-2.0
//! The proxy route: a thread of the library posts by verbs what kernels write as WQEs, on any NIC that has verbs.
//!
//! What a kernel writes is what it would write for an mlx5 NIC, into host memory, and it is answered in the same way: so
//! the same kernels and handles serve. The thread ([`thread`]) decodes each WQE ([`wqe`]), posts it ([`queue`],
//! [`verbs`]), and writes completions ([`cqe`]). Queues are made by the commands that they are made by elsewhere
//! ([`objects`]). Neither the broker nor a policy entry nor a GPU on the bus is needed: no GPU rings a NIC.

mod cqe;
mod memory;
mod names;
mod objects;
mod port;
mod queue;
mod receive;
mod status;
mod thread;
mod verbs;
mod wqe;

pub(crate) use memory::Registration;
pub(crate) use objects::{Object, QueueMemory, Uar, Umem};

use crate::{
    broker::{Pair, Path, SessionState},
    context::{OpenOptions, Port},
    devx,
    error::{Error, Result, Source},
    hub::Arrivals,
    monitor::Monitor,
    pci::Bdf,
};
use ibgda_uapi::{
    IBGDA_REASON_NIC_REMOVED, IBGDA_STATE_LOST, IBGDA_STATE_READY, IBGDA_STATE_RECOVERED,
};
use memory::Regions;
use names::{Cqs, Names};
use status::StatusPage;
use std::sync::{Arc, Mutex, Weak};
use thread::{Purpose, Thread};

/// A PCI function that is none.
const NOWHERE: Bdf = Bdf {
    domain: 0,
    bus: 0,
    device: 0,
    function: 0,
};

/// What a context of the proxy route has of a session: the status page, and which device it is about.
#[derive(Debug)]
pub(crate) struct Session {
    status: Arc<StatusPage>,
    /// What the device is called, by which it is found when it comes back; or its PCI function, which may get another name.
    nic: String,
    bdf: Option<Bdf>,
    gpu: Bdf,
    port: u8,
    monitor: Arc<Monitor>,
    /// Of the present generation.
    device: Mutex<Weak<Device>>,
}

fn name_of(nic: &str, bdf: Option<Bdf>) -> Result<String> {
    bdf.map_or_else(|| Ok(nic.to_owned()), devx::device_name)
}

impl Session {
    pub(crate) fn open(options: &OpenOptions, monitor: &Arc<Monitor>) -> Result<Arc<Self>> {
        let bdf = match options.nic.parse() {
            Ok(bdf) => Some(bdf),
            // A software NIC has none.
            Err(_) => devx::device_bdf(&options.nic).ok(),
        };
        Ok(Arc::new(Self {
            status: Arc::new(StatusPage::new()?),
            nic: options.nic.clone(),
            bdf,
            gpu: options.gpu,
            port: options.port,
            monitor: Arc::clone(monitor),
            device: Mutex::default(),
        }))
    }

    /// The device, opened, and its port. Where it was lost before, that there is none is that it is not back.
    fn find(&self, generation: u32) -> Result<(String, Arc<devx::Device>, Port)> {
        let find = || {
            let name = name_of(&self.nic, self.bdf)?;
            let verbs = devx::Device::open_plain(&name)?;
            let port = port::active(&verbs, self.port)?;
            Ok((name, verbs, port))
        };
        find().map_err(|error: Error| match error.errno() {
            libc::ENODEV | libc::ENXIO | libc::EIO | libc::EINVAL if generation > 1 => Error::new(
                Source::Verbs,
                libc::EAGAIN,
                format!("rebind {}", self.nic),
                format!("it is not back: {}: {}", error.what(), error.why()),
                "try again in a second",
            ),
            _ => error,
        })
    }

    /// Opens the device, for the generation that begins with it.
    pub(crate) fn join(self: &Arc<Self>, generation: u32) -> Result<(Arc<Device>, Port, Pair)> {
        let (name, verbs, port) = self.find(generation)?;
        let is_back = {
            let (nic, bdf, number) = (self.nic.clone(), self.bdf, self.port);
            move || {
                let opened = name_of(&nic, bdf).and_then(|name| devx::Device::open_plain(&name));
                opened.is_ok_and(|device| port::active(&device, number).is_ok())
            }
        };
        // Before the thread, which may find at once that it is over.
        self.status.begin(generation);
        let thread = Thread::start(Purpose {
            verbs: Arc::clone(&verbs),
            status: Arc::clone(&self.status),
            generation,
            monitor: Arc::clone(&self.monitor),
            is_back: Box::new(is_back),
        })
        .inspect_err(|_| self.status.lose(generation, IBGDA_REASON_NIC_REMOVED))?;
        let device = Arc::new(Device {
            thread,
            verbs,
            names: Names::default(),
            cqs: Cqs::default(),
            regions: Arc::default(),
        });
        *crate::worker::lock(&self.device) = Arc::downgrade(&device);
        let pair = Pair {
            gpu: self.gpu,
            nic: self.bdf.unwrap_or(NOWHERE),
            ibdev_name: name,
            path: Path::None,
            path_distance: -1,
            gpu_node: -1,
            nic_node: -1,
            gpu_link: Default::default(),
            nic_link: Default::default(),
            generation,
        };
        Ok((device, port, pair))
    }

    /// The generation to join after a loss.
    pub(crate) fn next(&self) -> Result<u32> {
        let what = || format!("rebind {}", self.nic);
        let now = self.state();
        let gone = || {
            let device = crate::worker::lock(&self.device).upgrade();
            device.is_none_or(|device| device.thread.is_gone())
        };
        match now.state {
            IBGDA_STATE_RECOVERED => Ok(now.generation),
            IBGDA_STATE_LOST if gone() => Ok(now.generation + 1),
            IBGDA_STATE_READY => Err(Error::argument(
                what(),
                "the session is not lost",
                "there is nothing to rebind",
            )),
            _ => Err(Error::new(
                Source::Verbs,
                libc::EAGAIN,
                what(),
                "the lost device is not gone yet",
                "try again in a second",
            )),
        }
    }

    pub(crate) fn status_page(&self) -> *const u64 {
        self.status.address()
    }

    pub(crate) fn state(&self) -> SessionState {
        self.status.state()
    }
}

/// A verbs device with the thread that posts to it.
#[derive(Debug)]
pub(crate) struct Device {
    // Ends before the device is closed.
    thread: Thread,
    verbs: Arc<devx::Device>,
    names: Names,
    cqs: Cqs,
    regions: Arc<Regions>,
}

impl Device {
    /// Has completions counted of a CQ that no QP has taken yet.
    pub(crate) fn count(&self, cqn: u32, arrivals: Arc<Arrivals>) {
        self.cqs.count(cqn, arrivals);
    }

    pub(crate) fn name(&self) -> &str {
        self.verbs.name()
    }
}
