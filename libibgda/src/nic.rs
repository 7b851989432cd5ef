// SPDX-License-Identifier: MIT OR Apache-2.0
//! What queues and regions are made of, on each side: a NIC through the broker and DevX, a thread that posts by verbs, or
//! the model in this process.
//!
//! All take the same commands. Which side it is, a context decides when it is opened.

#[cfg(feature = "loopback")]
use crate::loopback;
use crate::{
    broker, devx,
    error::Result,
    ifc::{self, Block},
    memory::Access,
    processor::HostKind,
    proxy,
};
use ibgda_verbs_sys::uverbs::UarType;
#[cfg(feature = "cuda")]
use std::os::fd::AsFd as _;
use std::{os::fd::BorrowedFd, sync::Arc};

macro_rules! sides {
    ($($(#[$attribute:meta])* $name:ident = $verbs:ty, $proxy:ty, $loopback:ty;)*) => {
        $(
            $(#[$attribute])*
            #[derive(Debug)]
            pub(crate) enum $name {
                Verbs($verbs),
                Proxy($proxy),
                #[cfg(feature = "loopback")]
                Loopback($loopback),
            }
        )*
    };
}

sides! {
    /// The session that grants.
    #[derive(Clone)]
    Session = Arc<broker::Session>, Arc<proxy::Session>, Arc<loopback::Session>;
    /// The NIC, opened, with a protection domain.
    #[derive(Clone)]
    Device = Arc<devx::Device>, Arc<proxy::Device>, Arc<loopback::Device>;
    /// Zeroed memory for queues.
    QueueMemory = broker::QueueMemory, proxy::QueueMemory, loopback::QueueMemory;
    /// A UAR page.
    Uar = devx::Uar, proxy::Uar, loopback::Uar;
    /// Memory that firmware objects may lie in.
    Umem = devx::Umem, proxy::Umem, loopback::Umem;
    /// A firmware object.
    Object = devx::Object, proxy::Object, loopback::Object;
    /// Memory registered with the NIC.
    Registration = devx::Registration, proxy::Registration, loopback::Registration;
}

/// The same expression for whichever side a value is of.
macro_rules! either {
    ($value:expr, $side:ident => $does:expr) => {
        match $value {
            Self::Verbs($side) => $does,
            Self::Proxy($side) => $does,
            #[cfg(feature = "loopback")]
            Self::Loopback($side) => $does,
        }
    };
}

impl Session {
    /// The broker's, if it is.
    pub(crate) fn verbs(&self) -> Option<&Arc<broker::Session>> {
        match self {
            Self::Verbs(session) => Some(session),
            Self::Proxy(_) => None,
            #[cfg(feature = "loopback")]
            Self::Loopback(_) => None,
        }
    }

    pub(crate) fn status_page(&self) -> *const u64 {
        either!(self, session => session.status_page())
    }

    /// How the status page is mapped.
    pub(crate) fn status_kind(&self) -> HostKind {
        match self {
            Self::Verbs(_) => HostKind::ReadOnly,
            Self::Proxy(_) => HostKind::Memory,
            #[cfg(feature = "loopback")]
            Self::Loopback(_) => HostKind::Memory,
        }
    }

    pub(crate) fn state(&self) -> broker::SessionState {
        either!(self, session => session.state())
    }
}

impl Device {
    /// The verbs device whose events nobody else listens to, if it is one.
    pub(crate) fn verbs(&self) -> Option<Arc<devx::Device>> {
        match self {
            Self::Verbs(device) => Some(Arc::clone(device)),
            Self::Proxy(_) => None,
            #[cfg(feature = "loopback")]
            Self::Loopback(_) => None,
        }
    }

    /// Whether it is the same device, opened by the same context and since the same loss.
    pub(crate) fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Verbs(one), Self::Verbs(other)) => Arc::ptr_eq(one, other),
            (Self::Proxy(one), Self::Proxy(other)) => Arc::ptr_eq(one, other),
            #[cfg(feature = "loopback")]
            (Self::Loopback(one), Self::Loopback(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }

    pub(crate) fn name(&self) -> &str {
        either!(self, device => device.name())
    }

    /// 0 on the proxy route, which takes its own.
    pub(crate) fn pdn(&self) -> u32 {
        match self {
            Self::Verbs(device) => device.pdn(),
            Self::Proxy(_) => 0,
            #[cfg(feature = "loopback")]
            Self::Loopback(device) => device.pdn(),
        }
    }

    /// The EQ of completion vector 0; 0 on the proxy route, which has none.
    pub(crate) fn eqn(&self) -> Result<u32> {
        match self {
            Self::Verbs(device) => device.eqn(),
            Self::Proxy(_) => Ok(0),
            #[cfg(feature = "loopback")]
            Self::Loopback(device) => device.eqn(),
        }
    }
}

impl Device {
    /// Bytes of one of the two BlueFlame buffers of a doorbell register; 0: there are none.
    pub(crate) fn blueflame_bytes(&self) -> Result<u32> {
        let what = "QUERY_HCA_CAP";
        let input = Block::<16>::command(ifc::opcode::QUERY_HCA_CAP)
            .set(ifc::hca_cap::OP_MOD, ifc::GENERAL_NOW);
        let caps: Block<{ ifc::QUERY_HCA_CAP_OUT_BYTES }> = match self {
            Self::Verbs(device) => device.general(what, &input)?,
            Self::Proxy(_) => return Ok(0),
            #[cfg(feature = "loopback")]
            Self::Loopback(device) => device.general(what, &input)?,
        };
        Ok(1 << caps.get(ifc::hca_cap::LOG_BF_REG_SIZE) >> 1)
    }
}

impl QueueMemory {
    /// At least `bytes` bytes.
    pub(crate) fn alloc(session: &Session, bytes: usize) -> Result<Self> {
        match session {
            Session::Verbs(session) => broker::QueueMemory::alloc(session, bytes).map(Self::Verbs),
            Session::Proxy(session) => proxy::QueueMemory::alloc(session, bytes).map(Self::Proxy),
            #[cfg(feature = "loopback")]
            Session::Loopback(session) => {
                loopback::QueueMemory::alloc(session, bytes).map(Self::Loopback)
            }
        }
    }

    pub(crate) fn address(&self) -> *mut u8 {
        either!(self, memory => memory.address())
    }

    pub(crate) fn len(&self) -> usize {
        either!(self, memory => memory.len())
    }
}

impl Uar {
    pub(crate) fn alloc(device: &Device) -> Result<Self> {
        match device {
            Device::Verbs(device) => devx::Uar::alloc(device, UarType::NonCached).map(Self::Verbs),
            Device::Proxy(device) => proxy::Uar::alloc(device).map(Self::Proxy),
            #[cfg(feature = "loopback")]
            Device::Loopback(device) => loopback::Uar::alloc(device).map(Self::Loopback),
        }
    }

    /// Firmware's index of the page.
    pub(crate) fn page_id(&self) -> u32 {
        either!(self, uar => uar.page_id())
    }
}

impl Umem {
    /// # Safety
    /// As of [`devx::Umem::register`].
    pub(crate) unsafe fn register(device: &Device, address: *mut u8, bytes: usize) -> Result<Self> {
        match device {
            Device::Verbs(device) => {
                // SAFETY: by this function's contract.
                unsafe { devx::Umem::register(device, address, bytes) }.map(Self::Verbs)
            }
            Device::Proxy(device) => Ok(Self::Proxy(proxy::Umem::register(device, address, bytes))),
            #[cfg(feature = "loopback")]
            Device::Loopback(device) => {
                loopback::Umem::register(device, address, bytes).map(Self::Loopback)
            }
        }
    }

    /// Part of a dma-buf, which only a NIC reaches by itself.
    pub(crate) fn of_dmabuf(
        device: &Device,
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
    ) -> Result<Self> {
        let Device::Verbs(device) = device else {
            return Err(crate::Error::new(
                crate::Source::Argument,
                libc::EOPNOTSUPP,
                format!("a queue in a dma-buf with {}", device.name()),
                "on routes loopback and proxy a thread reads the queue, in the process's own memory",
                "leave the queue where the library puts it",
            ));
        };
        devx::Umem::of_dmabuf(device, file, offset, bytes).map(Self::Verbs)
    }

    pub(crate) fn id(&self) -> u32 {
        either!(self, umem => umem.id())
    }
}

impl Object {
    /// Creates an object; `what` names it in errors.
    pub(crate) fn create<const N: usize>(
        device: &Device,
        what: &str,
        input: &Block<N>,
    ) -> Result<Self> {
        match device {
            Device::Verbs(device) => devx::Object::create(device, what, input).map(Self::Verbs),
            Device::Proxy(device) => proxy::Object::create(device, what, input).map(Self::Proxy),
            #[cfg(feature = "loopback")]
            Device::Loopback(device) => {
                loopback::Object::create(device, what, input).map(Self::Loopback)
            }
        }
    }

    /// Its number: a CQN, a QPN.
    pub(crate) fn number(&self) -> u32 {
        either!(self, object => object.number)
    }

    /// Changes the object's state.
    pub(crate) fn modify<const N: usize>(&self, what: &str, input: &Block<N>) -> Result<()> {
        either!(self, object => object.modify(what, input))
    }
}

impl Registration {
    /// # Safety
    /// As of [`devx::Registration::new`].
    pub(crate) unsafe fn new(
        device: &Device,
        address: u64,
        bytes: usize,
        access: Access,
    ) -> Result<Self> {
        match device {
            Device::Verbs(device) => {
                // SAFETY: by this function's contract.
                unsafe { devx::Registration::new(device, address, bytes, access.verbs()) }
                    .map(Self::Verbs)
            }
            Device::Proxy(device) => {
                // SAFETY: by this function's contract.
                unsafe { proxy::Registration::new(device, address, bytes, access) }.map(Self::Proxy)
            }
            #[cfg(feature = "loopback")]
            Device::Loopback(device) => {
                // SAFETY: by this function's contract.
                unsafe { loopback::Registration::new(device, address, bytes, access) }
                    .map(Self::Loopback)
            }
        }
    }

    /// GPU memory, as a dma-buf.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_dmabuf(
        device: &Device,
        dmabuf: &crate::cuda::DmaBuf,
        access: Access,
    ) -> Result<Self> {
        let (address, bytes) = (dmabuf.address(), dmabuf.len());
        match device {
            Device::Verbs(device) => {
                let (file, access) = (dmabuf.as_fd(), access.verbs());
                devx::Registration::of_dmabuf(device, file, address, bytes, access).map(Self::Verbs)
            }
            Device::Proxy(device) => {
                proxy::Registration::of_dmabuf(device, dmabuf, access).map(Self::Proxy)
            }
            #[cfg(feature = "loopback")]
            Device::Loopback(device) => Err(crate::Error::new(
                crate::Source::Model,
                libc::EOPNOTSUPP,
                format!(
                    "map {bytes} bytes of GPU memory at {address:#x} with {}",
                    device.name()
                ),
                "the NIC of the loopback route is a CPU thread, which does not reach GPU memory",
                "use host memory, which a GPU reaches too: Context::alloc",
            )),
        }
    }

    /// lkey and rkey.
    pub(crate) fn keys(&self) -> (u32, u32) {
        either!(self, registration => registration.keys())
    }
}

/// Why there is no loopback route in this build.
#[cfg(not(feature = "loopback"))]
pub(crate) fn no_loopback() -> crate::Error {
    crate::Error::new(
        crate::Source::Argument,
        libc::EOPNOTSUPP,
        "open on the loopback route",
        "this libibgda was built without it",
        "build it with the feature \"loopback\"",
    )
}
