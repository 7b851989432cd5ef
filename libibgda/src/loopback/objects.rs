// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queues and what they lie in.

use super::{Device, Model, Session, refused};
use crate::{
    error::{Error, Result, Source},
    ifc::Block,
};
use connectx::inproc::{self, Memory};
use std::sync::Arc;

/// Memory of a queue: a memfd that the model and a GPU can map.
#[derive(Debug)]
pub(crate) struct QueueMemory {
    memory: Memory,
    _model: Arc<Model>,
}

impl QueueMemory {
    pub(crate) fn alloc(session: &Session, bytes: usize) -> Result<Self> {
        let memory = session.model.fabric.alloc(bytes);
        let memory =
            memory.map_err(|error| refused(format!("{bytes} bytes for queues"), &error))?;
        Ok(Self {
            memory,
            _model: Arc::clone(&session.model),
        })
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }
}

/// A UAR page, which is a page of memory.
#[derive(Debug)]
pub(crate) struct Uar {
    device: Arc<Device>,
    number: u32,
    // After `drop` the model does not look at it any more.
    page: Memory,
}

impl Uar {
    pub(crate) fn alloc(device: &Arc<Device>) -> Result<Self> {
        let what = || "ALLOC_UAR".to_owned();
        let page = device.model.fabric.alloc(inproc::PAGE);
        let page = page.map_err(|error| refused(what(), &error))?;
        // SAFETY: the page is this UAR's, and is unmapped after the UAR is freed.
        let number = device.call(what, |nic| unsafe { nic.alloc_uar(page.as_ptr()) })?;
        Ok(Self {
            device: Arc::clone(device),
            number,
            page,
        })
    }

    pub(crate) fn page_id(&self) -> u32 {
        self.number
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.page.as_ptr()
    }
}

impl Drop for Uar {
    fn drop(&mut self) {
        self.device.end(|nic| nic.dealloc_uar(self.number));
    }
}

/// Memory that objects may lie in.
#[derive(Debug)]
pub(crate) struct Umem {
    device: Arc<Device>,
    id: u32,
}

impl Umem {
    pub(crate) fn register(device: &Arc<Device>, address: *mut u8, bytes: usize) -> Result<Self> {
        let address = address.expose_provenance() as u64;
        let what = || format!("CREATE_UMEM ({bytes} bytes)");
        let id = device.call(what, |nic| nic.create_umem(address, bytes as u64))?;
        Ok(Self {
            device: Arc::clone(device),
            id,
        })
    }

    pub(crate) fn id(&self) -> u32 {
        self.id
    }
}

impl Drop for Umem {
    fn drop(&mut self) {
        self.device.end(|nic| nic.destroy_umem(self.id));
    }
}

/// A CQ or a QP.
#[derive(Debug)]
pub(crate) struct Object {
    device: Arc<Device>,
    is_cq: bool,
    pub(crate) number: u32,
}

impl Object {
    pub(crate) fn create<const N: usize>(
        device: &Arc<Device>,
        what: &str,
        input: &Block<N>,
    ) -> Result<Self> {
        let output = execute(device, what, input)?;
        Ok(Self {
            device: Arc::clone(device),
            is_cq: input.get(crate::ifc::header::OPCODE)
                == u64::from(crate::ifc::opcode::CREATE_CQ),
            number: u32::from_be_bytes([0, output[9], output[10], output[11]]),
        })
    }

    pub(crate) fn modify<const N: usize>(&self, what: &str, input: &Block<N>) -> Result<()> {
        execute(&self.device, what, input).map(drop)
    }
}

impl Device {
    /// Executes a command that is about no object.
    pub(crate) fn general<const N: usize, const M: usize>(
        &self,
        what: &str,
        input: &Block<N>,
    ) -> Result<Block<M>> {
        let output = self.call(|| what.to_owned(), |nic| nic.execute(input.as_bytes(), M))?;
        let mut block = Block::new();
        let bytes = output.len().min(M);
        block.as_bytes_mut()[..bytes].copy_from_slice(&output[..bytes]);
        Ok(block)
    }
}

fn execute<const N: usize>(device: &Device, what: &str, input: &Block<N>) -> Result<[u8; 16]> {
    let output = device.call(|| what.to_owned(), |nic| nic.execute(input.as_bytes(), 16))?;
    output.try_into().map_err(|output: Vec<u8>| {
        let why = format!("the answer has {} bytes, not 16", output.len());
        Error::new(Source::Model, libc::EIO, what, why, "")
    })
}

impl Drop for Object {
    fn drop(&mut self) {
        self.device.end(|nic| match self.is_cq {
            true => nic.destroy_cq(self.number),
            false => nic.destroy_qp(self.number),
        });
    }
}
