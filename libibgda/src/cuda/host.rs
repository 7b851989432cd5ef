// SPDX-License-Identifier: MIT OR Apache-2.0
//! Host memory that a GPU reaches.

use super::{Gpu, doorbell, error::Explain};
use crate::{
    error::{Error, Result},
    processor::HostKind,
    worker::lock,
};
use cudarc::driver::sys::{
    self, CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_IOMEMORY, CU_MEMHOSTREGISTER_PORTABLE,
    CU_MEMHOSTREGISTER_READ_ONLY, CUdeviceptr,
};
use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard},
};

fn flags(kind: HostKind) -> u32 {
    let kind = match kind {
        HostKind::Memory => 0,
        HostKind::ReadOnly => CU_MEMHOSTREGISTER_READ_ONLY,
        HostKind::Doorbell => CU_MEMHOSTREGISTER_IOMEMORY,
    };
    // Portable: the table below is of the process, and a process may use several GPUs.
    CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_PORTABLE | kind
}

/// What this library has registered, by its first byte. CUDA takes a range once, and a status page is of many QPs.
static REGISTERED: Mutex<BTreeMap<usize, Entry>> = Mutex::new(BTreeMap::new());

#[derive(Clone, Copy, Debug)]
struct Entry {
    bytes: usize,
    kind: HostKind,
    users: usize,
}

fn registered() -> MutexGuard<'static, BTreeMap<usize, Entry>> {
    lock(&REGISTERED)
}

/// Host memory registered with CUDA. The last that drops it for a range ends the registration; no kernel may use it then.
#[derive(Debug)]
pub struct HostRegistration {
    gpu: Gpu,
    address: usize,
    bytes: usize,
    device: CUdeviceptr,
}

impl HostRegistration {
    /// Lets a GPU reach `bytes` bytes at `address`, by `cuMemHostRegister`. The same range may be registered several times.
    ///
    /// # Errors
    /// `EINVAL`: no range, or one that overlaps another; `EPERM`: MMIO, and NVIDIA's gate is shut; the driver's.
    ///
    /// # Safety
    /// The memory stays mapped as long as the registration lives, and bears access by a device.
    pub unsafe fn new(gpu: &Gpu, address: *const u8, bytes: usize, kind: HostKind) -> Result<Self> {
        let start = address.expose_provenance();
        let what = || format!("cuMemHostRegister of {bytes} bytes at {start:#x} ({kind:?})");
        if start == 0 || bytes == 0 || start.checked_add(bytes).is_none() {
            return Err(Error::argument(what(), "that is no range of memory", ""));
        }
        let pointer = address.cast_mut().cast();
        gpu.enter(|| {
            let mut table = registered();
            match table.get_mut(&start) {
                Some(entry) if (entry.bytes, entry.kind) == (bytes, kind) => entry.users += 1,
                Some(other) => {
                    return Err(Error::argument(
                        what(),
                        format!(
                            "{} bytes are registered there as {:?}",
                            other.bytes, other.kind
                        ),
                        "drop the other registration first",
                    ));
                }
                None => {
                    // SAFETY: by this function's contract.
                    unsafe { sys::cuMemHostRegister_v2(pointer, bytes, flags(kind)) }
                        .result()
                        .map_err(|error| match kind {
                            HostKind::Doorbell => doorbell::refused(what(), error, start),
                            _ => super::failed(what(), error),
                        })?;
                    let users = 1;
                    table.insert(start, Entry { bytes, kind, users });
                }
            }
            drop(table);
            // From here on dropping it undoes it.
            let mut registration = Self {
                gpu: gpu.clone(),
                address: start,
                bytes,
                device: 0,
            };
            // SAFETY: registered just now, with DEVICEMAP.
            unsafe { sys::cuMemHostGetDevicePointer_v2(&mut registration.device, pointer, 0) }
                .result()
                .explain(|| format!("cuMemHostGetDevicePointer of {start:#x}"))?;
            Ok(registration)
        })
    }

    /// The GPU that it was made for.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Where the GPU sees its first byte.
    pub fn device_pointer(&self) -> CUdeviceptr {
        self.device
    }

    /// Where the GPU sees what the host sees at `pointer`; `None` if that is not inside.
    pub fn translate<T>(&self, pointer: *const T) -> Option<CUdeviceptr> {
        let offset = pointer.addr().checked_sub(self.address)?;
        (offset < self.bytes).then(|| self.device + offset as u64)
    }
}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        // Fails when the context is gone, and the registration with it.
        let _ = self.gpu.enter(|| {
            let mut table = registered();
            let Some(entry) = table.get_mut(&self.address) else {
                return Ok(());
            };
            entry.users -= 1;
            if entry.users > 0 {
                return Ok(());
            }
            table.remove(&self.address);
            // SAFETY: registered by `new`, and this was its last user. Under the lock, so that the next one finds it gone.
            unsafe { sys::cuMemHostUnregister(std::ptr::with_exposed_provenance_mut(self.address)) }
                .result()
                .explain(|| "cuMemHostUnregister".to_owned())
        });
    }
}
