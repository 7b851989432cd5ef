// SPDX-License-Identifier: MIT OR Apache-2.0
//! Doorbell pages of a context: UARs that the broker granted, for QPs, and for CQs with events.
//!
//! The broker parks a page that is given back until this process is dead, and firmware cannot issue it again before. So a
//! page whose QP is gone waits here for the next one: a process needs as many as it has QPs at a time.

#[cfg(feature = "loopback")]
use crate::loopback;
use crate::{
    broker::{self, Doorbell},
    devx::{self, Uar},
    error::Result,
    nic::{Device, Session},
    processor::HostKind,
    proxy,
    worker::{Home, lock},
};
use ibgda_verbs_sys::uverbs::UarType;
use std::{
    os::fd::AsFd,
    sync::{Arc, Mutex},
};

/// UARs tried before giving up when pages turn out to be held by others.
const UARS_TRIED: usize = 64;

/// A page for one QP to ring, or to arm one CQ by.
#[derive(Debug)]
pub(crate) enum DoorbellPage {
    /// Of the NIC, granted by the broker, whose mapping goes before the UAR.
    Granted { doorbell: Doorbell, uar: Uar },
    /// Memory that the proxy's thread looks at.
    Proxy(proxy::Uar),
    /// Of the model.
    #[cfg(feature = "loopback")]
    Loopback(loopback::Uar),
}

impl DoorbellPage {
    /// The page, in this process.
    pub(crate) fn address(&self) -> *mut u8 {
        match self {
            Self::Granted { doorbell, .. } => doorbell.address(),
            Self::Proxy(uar) => uar.address(),
            #[cfg(feature = "loopback")]
            Self::Loopback(uar) => uar.address(),
        }
    }

    /// What it is to a processor.
    pub(crate) fn kind(&self) -> HostKind {
        match self {
            Self::Granted { .. } => HostKind::Doorbell,
            Self::Proxy(_) => HostKind::Memory,
            #[cfg(feature = "loopback")]
            Self::Loopback(_) => HostKind::Memory,
        }
    }

    /// The doorbell register, in this process.
    pub(crate) fn register(&self) -> *mut u64 {
        // SAFETY: the register lies inside the page, aligned.
        unsafe { self.address().add(Uar::DOORBELL_OFFSET) }.cast()
    }

    /// The register that arms CQs, in this process.
    pub(crate) fn arm_register(&self) -> *mut u64 {
        // SAFETY: as above.
        unsafe { self.address().add(Uar::ARM_OFFSET) }.cast()
    }

    /// Firmware's index of the page.
    pub(crate) fn page_id(&self) -> u32 {
        match self {
            Self::Granted { uar, .. } => uar.page_id(),
            Self::Proxy(uar) => uar.page_id(),
            #[cfg(feature = "loopback")]
            Self::Loopback(uar) => uar.page_id(),
        }
    }

    /// Offset of the page in the NIC's BAR 0, as the broker found it.
    pub(crate) fn bar_offset(&self) -> u64 {
        match self {
            Self::Granted { doorbell, .. } => doorbell.bar_offset,
            // In no BAR.
            Self::Proxy(_) => 0,
            // The model's BAR 0 has its pages by their index, and no memory.
            #[cfg(feature = "loopback")]
            Self::Loopback(uar) => u64::from(uar.page_id()) << 12,
        }
    }
}

/// The pages of a context that no QP uses.
#[derive(Debug)]
pub(crate) struct DoorbellPool {
    session: Session,
    device: Device,
    home: Home,
    free: Mutex<Vec<(UarType, DoorbellPage)>>,
}

impl DoorbellPool {
    pub(crate) fn new(session: &Session, device: &Device) -> Arc<Self> {
        Arc::new(Self {
            session: session.clone(),
            device: device.clone(),
            home: Home::here(),
            free: Mutex::default(),
        })
    }

    /// A page for one QP or CQ.
    pub(crate) fn take(self: &Arc<Self>, kind: UarType) -> Result<PooledPage> {
        let free = {
            let mut free = lock(&self.free);
            let at = free.iter().rposition(|(of, _)| *of == kind);
            at.map(|at| free.swap_remove(at).1)
        };
        let page = free.map_or_else(|| self.new_page(kind), Ok)?;
        Ok(PooledPage {
            pool: Arc::clone(self),
            kind,
            page: Some(page),
        })
    }

    fn new_page(&self, kind: UarType) -> Result<DoorbellPage> {
        match (&self.session, &self.device) {
            (Session::Verbs(session), Device::Verbs(device)) => grant(session, device, kind),
            #[cfg(feature = "loopback")]
            (_, Device::Loopback(device)) => {
                loopback::Uar::alloc(device).map(DoorbellPage::Loopback)
            }
            (_, Device::Proxy(device)) => proxy::Uar::alloc(device).map(DoorbellPage::Proxy),
            (_, Device::Verbs(_)) => unreachable!("a context has one side"),
        }
    }
}

/// A new page. After a reset of the NIC firmware may issue one that an old owner still holds: then another is tried.
fn grant(
    session: &Arc<broker::Session>,
    device: &Arc<devx::Device>,
    kind: UarType,
) -> Result<DoorbellPage> {
    let mut held_by_others = Vec::new();
    loop {
        let uar = Uar::alloc(device, kind)?;
        let dmabuf = uar.export()?;
        let (file, uverbs) = (dmabuf.as_fd(), device.uverbs());
        match Doorbell::import(session, file, uverbs, uar.page_id(), kind) {
            Ok(doorbell) => return Ok(DoorbellPage::Granted { doorbell, uar }),
            Err(error) if error.errno() == libc::EBUSY && held_by_others.len() + 1 < UARS_TRIED => {
                held_by_others.push(uar)
            }
            Err(error) => return Err(error),
        }
    }
}

/// A page on loan from its pool.
#[derive(Debug)]
pub(crate) struct PooledPage {
    pool: Arc<DoorbellPool>,
    kind: UarType,
    page: Option<DoorbellPage>,
}

impl PooledPage {
    pub(crate) fn page(&self) -> &DoorbellPage {
        self.page.as_ref().expect("there until dropped")
    }
}

impl Drop for PooledPage {
    fn drop(&mut self) {
        let page = self.page.take().map(|page| (self.kind, page));
        // A forked child's copy may be locked for ever.
        if self.pool.home.is_here() {
            lock(&self.pool.free).extend(page);
        }
    }
}
