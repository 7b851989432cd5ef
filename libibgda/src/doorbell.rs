// SPDX-License-Identifier: MIT OR Apache-2.0
//! Doorbell pages of a context: UARs that the broker granted.
//!
//! The broker parks a page that is given back until this process is dead, and firmware cannot issue it again before. So a
//! page whose QP is gone waits here for the next one: a process needs as many as it has QPs at a time.

use crate::{
    broker::{Doorbell, Session},
    devx::{Device, Uar},
    error::Result,
};
use std::{
    os::fd::AsFd,
    sync::{Arc, Mutex, PoisonError},
};

/// UARs tried before giving up when pages turn out to be held by others.
const UARS_TRIED: usize = 64;

/// A page for one QP to ring.
#[derive(Debug)]
pub(crate) struct DoorbellPage {
    // The broker's mapping goes before the UAR.
    doorbell: Doorbell,
    uar: Uar,
}

impl DoorbellPage {
    /// The doorbell register, in this process.
    pub(crate) fn register(&self) -> *mut u64 {
        // SAFETY: the register lies inside the page, aligned.
        unsafe { self.doorbell.address().add(Uar::DOORBELL_OFFSET) }.cast()
    }

    /// Firmware's index of the page.
    pub(crate) fn page_id(&self) -> u32 {
        self.uar.page_id()
    }

    /// Offset of the page in the NIC's BAR 0, as the broker found it.
    pub(crate) fn bar_offset(&self) -> u64 {
        self.doorbell.bar_offset
    }
}

/// The pages of a context that no QP uses.
#[derive(Debug)]
pub(crate) struct DoorbellPool {
    session: Arc<Session>,
    device: Arc<Device>,
    free: Mutex<Vec<DoorbellPage>>,
}

impl DoorbellPool {
    pub(crate) fn new(session: &Arc<Session>, device: &Arc<Device>) -> Arc<Self> {
        Arc::new(Self {
            session: Arc::clone(session),
            device: Arc::clone(device),
            free: Mutex::default(),
        })
    }

    /// A page for one QP.
    pub(crate) fn take(self: &Arc<Self>) -> Result<PooledPage> {
        let free = self
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        let page = free.map_or_else(|| self.grant(), Ok)?;
        Ok(PooledPage {
            pool: Arc::clone(self),
            page: Some(page),
        })
    }

    /// A new page. After a reset of the NIC firmware may issue one that an old owner still holds: then another is tried.
    fn grant(&self) -> Result<DoorbellPage> {
        let mut held_by_others = Vec::new();
        loop {
            let uar = Uar::alloc(&self.device)?;
            let dmabuf = uar.export()?;
            match Doorbell::import(
                &self.session,
                dmabuf.as_fd(),
                self.device.uverbs(),
                uar.page_id(),
            ) {
                Ok(doorbell) => return Ok(DoorbellPage { doorbell, uar }),
                Err(error)
                    if error.errno() == libc::EBUSY && held_by_others.len() + 1 < UARS_TRIED =>
                {
                    held_by_others.push(uar)
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// A page on loan from its pool.
#[derive(Debug)]
pub(crate) struct PooledPage {
    pool: Arc<DoorbellPool>,
    page: Option<DoorbellPage>,
}

impl PooledPage {
    pub(crate) fn page(&self) -> &DoorbellPage {
        self.page.as_ref().expect("there until dropped")
    }
}

impl Drop for PooledPage {
    fn drop(&mut self) {
        self.pool
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(self.page.take());
    }
}
