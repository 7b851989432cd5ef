// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory: of queues, which no NIC reaches, and of users, which is registered with the verbs device.

use super::{
    Device,
    wqe::{Data, Fault, syndrome},
};
use crate::{
    devx,
    error::{Error, Result, Source},
    mapping::Mapping,
    memory::{Access, PAGE_BYTES},
    worker::lock,
};
use ibgda_device::proxy_fault;
use memmap2::{Advice, MmapOptions, MmapRaw};
use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex},
};

/// Zeroed pages of this process, which a forked child has no part of.
pub(super) fn pages(what: &str, bytes: usize) -> Result<Mapping> {
    let length = bytes.next_multiple_of(PAGE_BYTES as usize);
    let map = || {
        let map = MmapOptions::new()
            .len(length)
            .map_anon()
            .map(MmapRaw::from)?;
        map.advise(Advice::DontFork)?;
        Ok(Mapping::new(map))
    };
    map().map_err(|error: io::Error| {
        Error::errno_with(
            Source::Argument,
            format!("mmap of {length} bytes for {what}"),
            error.raw_os_error().unwrap_or(libc::ENOMEM),
            "",
            "",
        )
    })
}

/// What the keys of a device are of: no NIC looks at the requests that are complete by themselves.
#[derive(Debug, Default)]
pub(super) struct Regions(Mutex<HashMap<u32, Region>>);

#[derive(Clone, Copy, Debug)]
struct Region {
    address: u64,
    bytes: u64,
    on_gpu: bool,
}

impl Regions {
    /// What a flush of this memory comes to: nothing, if it is the host's.
    pub(super) fn check_flush(&self, data: &Data) -> std::result::Result<(), Fault> {
        let region = lock(&self.0).get(&data.lkey).copied();
        let inside = |region: &Region| {
            let offset = data.address.checked_sub(region.address);
            offset.is_some_and(|offset| {
                offset <= region.bytes && u64::from(data.bytes) <= region.bytes - offset
            })
        };
        match region.filter(inside) {
            None => Err(Fault {
                syndrome: syndrome::LOCAL_PROTECTION,
                vendor: 0,
            }),
            Some(region) if region.on_gpu => Err(Fault::local(proxy_fault::GPU_FLUSH)),
            Some(_) => Ok(()),
        }
    }
}

/// Memory registered with the verbs device.
#[derive(Debug)]
pub(crate) struct Registration {
    regions: Arc<Regions>,
    inner: devx::Registration,
}

impl Registration {
    /// # Safety
    /// As of [`devx::Registration::new`].
    pub(crate) unsafe fn new(
        device: &Arc<Device>,
        address: u64,
        bytes: usize,
        access: Access,
    ) -> Result<Self> {
        let (verbs, access) = (&device.verbs, access.verbs());
        // SAFETY: by this function's contract.
        let inner = unsafe { devx::Registration::new(verbs, address, bytes, access) }?;
        Ok(Self::listed(device, inner, address, bytes, false))
    }

    /// GPU memory, as a dma-buf.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_dmabuf(
        device: &Arc<Device>,
        dmabuf: &crate::cuda::DmaBuf,
        access: Access,
    ) -> Result<Self> {
        use std::os::fd::AsFd as _;
        let (address, bytes) = (dmabuf.address(), dmabuf.len());
        let (file, access) = (dmabuf.as_fd(), access.verbs());
        let inner = devx::Registration::of_dmabuf(&device.verbs, file, address, bytes, access)?;
        Ok(Self::listed(device, inner, address, bytes, true))
    }

    fn listed(
        device: &Arc<Device>,
        inner: devx::Registration,
        address: u64,
        bytes: usize,
        on_gpu: bool,
    ) -> Self {
        let bytes = bytes as u64;
        let region = Region {
            address,
            bytes,
            on_gpu,
        };
        lock(&device.regions.0).insert(inner.keys().0, region);
        Self {
            regions: Arc::clone(&device.regions),
            inner,
        }
    }

    pub(crate) fn keys(&self) -> (u32, u32) {
        self.inner.keys()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // Before the key is given back, and another region gets it.
        if self.inner.is_ours() {
            lock(&self.regions.0).remove(&self.inner.keys().0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_flush_inside_host_memory_is_complete_by_itself() {
        let regions = Regions::default();
        let region = Region {
            address: 0x1000,
            bytes: 0x100,
            on_gpu: false,
        };
        lock(&regions.0).insert(7, region);
        let on_gpu = Region {
            address: u64::MAX - 0xff,
            on_gpu: true,
            ..region
        };
        lock(&regions.0).insert(8, on_gpu);
        let protection = Err(Fault {
            syndrome: syndrome::LOCAL_PROTECTION,
            vendor: 0,
        });
        for (lkey, address, bytes, expected) in [
            (7, 0x1000, 0x100, Ok(())),
            (7, 0x10ff, 1, Ok(())),
            (7, 0x10ff, 2, protection),
            (7, 0x1100, 1, protection),
            (7, 0xfff, 1, protection),
            (6, 0x1000, 1, protection),
            (8, u64::MAX, 1, Err(Fault::local(proxy_fault::GPU_FLUSH))),
            (8, u64::MAX, 2, protection),
        ] {
            let data = Data {
                address,
                lkey,
                bytes,
            };
            assert_eq!(regions.check_flush(&data), expected, "{data:x?}");
        }
    }
}
