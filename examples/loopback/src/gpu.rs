// SPDX-License-Identifier: MIT OR Apache-2.0
//! What needs a GPU: the same transfers with code by nvcc and by NVRTC, and what the library does with CUDA's driver.

use crate::{BYTES, Steps, open, processor::Processor, transfers};
use anyhow::{Context as _, Result, ensure};
use ibgda::{
    Access, Rounding, Source,
    cuda::{
        DmaBuf, Gpu, HostKind, HostRegistration,
        cudarc::driver::{result, sys},
    },
};
use ibgda_device::kernels::gpu::{Error, IMAGE, Kernels, Origin, load, load_from};
use memmap2::{MmapOptions, MmapRaw};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::{
    fs::{self, File, OpenOptions},
    os::fd::{AsFd, AsRawFd},
};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;

pub fn run(steps: &mut Steps, gpu: &Gpu) -> Result<()> {
    let context = gpu.context();
    let (major, minor) = context.compute_capability()?;
    steps.say(format!(
        "GPU: {} at {}, compute capability {major}.{minor}",
        context.name()?,
        gpu.bdf()?
    ));
    ensure!(
        Gpu::open(gpu.bdf()?)? == *gpu,
        "the GPU by its address is another"
    );
    let nowhere = "ffff:ff:1f.7".parse()?;
    let error = Gpu::open(nowhere).err().context("there is no such GPU")?;
    ensure!(
        matches!(error.origin(), Source::Cuda { code } if code != 0),
        "{error}"
    );
    steps.say(format!("no such GPU: {error}"));

    let (_, preferred) = load(context)?;
    let expected = if IMAGE.is_some() {
        Origin::Nvcc
    } else {
        Origin::Nvrtc
    };
    ensure!(preferred == expected, "loaded code is by {preferred}");
    for origin in [Origin::Nvcc, Origin::Nvrtc] {
        let module = match load_from(context, origin) {
            Ok(module) => module,
            Err(Error::NoImage) => {
                steps.say(format!("code by {origin}: {}", Error::NoImage));
                continue;
            }
            Err(error) => return Err(error).context(format!("code by {origin}")),
        };
        let kernels = Kernels::new(context, &module)?;
        transfers(
            steps,
            &Processor::Gpu {
                gpu,
                kernels,
                origin,
            },
        )?;
    }
    regions(steps, gpu)?;
    memfd(steps, gpu)?;
    exports(steps, gpu)?;
    doorbells(steps, gpu)
}

/// Bytes that a GPU stores to a registered region are there for the host, and for the NIC.
fn regions(steps: &mut Steps, gpu: &Gpu) -> Result<()> {
    let context = open("loopback0")?;
    let region = context.alloc(BYTES, Access::all())?;
    let pointer = region.device_pointer_on(gpu)?;
    ensure!(
        pointer == region.device_pointer_on(gpu)?,
        "asked twice, another pointer"
    );
    fill(gpu, pointer, 0xa7, BYTES)?;
    let mut bytes = vec![0; BYTES];
    region.read(0, &mut bytes)?;
    ensure!(
        bytes.iter().all(|&byte| byte == 0xa7),
        "the GPU's bytes are not in the region"
    );
    context.check_gpu_doorbell(gpu)?;
    steps.say(format!(
        "{BYTES} bytes stored by the GPU into a region at {pointer:#x} are there"
    ));
    Ok(())
}

pub fn fill(gpu: &Gpu, to: sys::CUdeviceptr, byte: u8, bytes: usize) -> Result<()> {
    gpu.context().bind_to_thread()?;
    // SAFETY: the callers pass memory that the GPU may write, of at least that length.
    unsafe { result::memset_d8_sync(to, byte, bytes) }?;
    gpu.context().synchronize()?;
    Ok(())
}

fn fetch(gpu: &Gpu, from: sys::CUdeviceptr, bytes: usize) -> Result<Vec<u8>> {
    gpu.context().bind_to_thread()?;
    let mut copy = vec![0u8; bytes];
    // SAFETY: the callers pass memory that the GPU may read, of at least that length.
    unsafe { result::memcpy_dtoh_sync(&mut copy, from) }?;
    Ok(copy)
}

/// A memfd, as queues of a model in another process are: registered twice, read-only too, and again when all is gone.
fn memfd(steps: &mut Steps, gpu: &Gpu) -> Result<()> {
    let file = File::from(memfd_create("ibgda-loopback", MFdFlags::MFD_CLOEXEC)?);
    file.set_len(4 * PAGE as u64)?;
    let map = MmapOptions::new().len(4 * PAGE).map_raw(&file)?;
    let register = |map: &MmapRaw, bytes, kind| {
        // SAFETY: both mappings outlive their registrations, and hold plain bytes.
        unsafe { HostRegistration::new(gpu, map.as_ptr(), bytes, kind) }
    };
    let first = register(&map, map.len(), HostKind::Memory)?;
    let second = register(&map, map.len(), HostKind::Memory)?;
    let overlap = register(&map, PAGE, HostKind::Memory)
        .err()
        .context("half of it again")?;
    ensure!(overlap.errno() == nix::libc::EINVAL, "{overlap}");
    drop(first);
    fill(gpu, second.device_pointer(), 0x42, map.len())?;
    let read_only = MmapOptions::new().len(PAGE).map_raw_read_only(&file)?;
    let status = register(&read_only, PAGE, HostKind::ReadOnly)?;
    let seen = fetch(gpu, status.device_pointer(), PAGE)?;
    ensure!(
        seen.iter().all(|&byte| byte == 0x42),
        "the read-only page has other bytes"
    );
    drop((second, status));
    drop(register(&map, PAGE, HostKind::Memory)?);
    steps.say(
        "memfd: registered, shared by two users, read-only, ended, registered again; bytes equal",
    );
    Ok(())
}

/// GPU memory that is freed with this value.
struct Allocation<'a> {
    gpu: &'a Gpu,
    address: sys::CUdeviceptr,
    /// Of cuMemCreate.
    handle: Option<(sys::CUmemGenericAllocationHandle, usize)>,
}

impl<'a> Allocation<'a> {
    fn malloc(gpu: &'a Gpu, bytes: usize) -> Result<Self> {
        gpu.context().bind_to_thread()?;
        Ok(Self {
            gpu,
            // SAFETY: nothing relies on its bytes.
            address: unsafe { result::malloc_sync(bytes) }?,
            handle: None,
        })
    }

    /// As CUDA's virtual memory management has it.
    fn vmm(gpu: &'a Gpu, bytes: usize, for_rdma: bool) -> Result<Self> {
        gpu.context().bind_to_thread()?;
        let location = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: gpu.context().ordinal() as i32,
        };
        // SAFETY: zeros are a valid value of this C struct, whose enums have one of 0.
        let mut kind: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        kind.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        kind.location = location;
        kind.allocFlags.gpuDirectRDMACapable = for_rdma.into();
        let access = sys::CUmemAccessDesc {
            location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let (mut handle, mut address) = (0, 0);
        // SAFETY: as CUDA's manual has it; a failure ends this program.
        unsafe {
            sys::cuMemCreate(&mut handle, bytes, &kind, 0).result()?;
            sys::cuMemAddressReserve(&mut address, bytes, 0, 0, 0).result()?;
            sys::cuMemMap(address, bytes, 0, handle, 0).result()?;
            sys::cuMemSetAccess(address, bytes, &access, 1).result()?;
        }
        Ok(Self {
            gpu,
            address,
            handle: Some((handle, bytes)),
        })
    }
}

impl Drop for Allocation<'_> {
    fn drop(&mut self) {
        let _ = self.gpu.context().bind_to_thread();
        // SAFETY: made by this type, and no kernel uses it.
        let ended = unsafe {
            match self.handle {
                None => result::free_sync(self.address),
                Some((handle, bytes)) => sys::cuMemUnmap(self.address, bytes)
                    .result()
                    .and_then(|()| sys::cuMemAddressFree(self.address, bytes).result())
                    .and_then(|()| sys::cuMemRelease(handle).result()),
            }
        };
        if let Err(error) = ended {
            eprintln!("GPU memory at {:#x} is not freed: {error:?}", self.address);
        }
    }
}

/// dma-bufs of GPU memory, and what is refused.
fn exports(steps: &mut Steps, gpu: &Gpu) -> Result<()> {
    let malloc = Allocation::malloc(gpu, 2 * MIB)?;
    let vmm = Allocation::vmm(gpu, 4 * MIB, true)?;
    for (name, address, bytes) in [
        ("cudaMalloc", malloc.address, 2 * MIB),
        ("a page within it", malloc.address + PAGE as u64, PAGE),
        ("cuMemCreate, gpuDirectRDMACapable", vmm.address, 4 * MIB),
    ] {
        let dmabuf = DmaBuf::export(address, bytes).context(name)?;
        let link = fs::read_link(format!("/proc/self/fd/{}", dmabuf.as_fd().as_raw_fd()))?;
        ensure!(
            link.to_string_lossy().contains("dmabuf"),
            "{name}: the file is {}",
            link.display()
        );
        steps.say(format!(
            "dma-buf of {name}: {bytes} bytes at {address:#x}, {}",
            link.display()
        ));
    }
    let plain = Allocation::vmm(gpu, 2 * MIB, false)?;
    match DmaBuf::export(plain.address, 2 * MIB) {
        Ok(_) => steps.say("dma-buf of cuMemCreate without gpuDirectRDMACapable: exported too"),
        Err(error) => {
            ensure!(
                error.to_string().contains("gpuDirectRDMACapable"),
                "{error}"
            );
            steps.say(format!("cuMemCreate without gpuDirectRDMACapable: {error}"));
        }
    }
    let beyond = DmaBuf::export(malloc.address + MIB as u64, 2 * MIB);
    let beyond = beyond
        .err()
        .context("beyond the allocation, and exported")?;
    ensure!(
        beyond.to_string().contains("the allocation there has"),
        "{beyond}"
    );
    steps.say(format!("beyond the allocation: {beyond}"));
    let here = 0u64;
    let host = DmaBuf::export((&raw const here).addr() as u64 / 4096 * 4096, PAGE);
    let host = host.err().context("host memory was exported")?;
    steps.say(format!("host memory: {host}"));

    // The way of Context::map_device as far as a NIC that reaches no GPU lets it go.
    let context = open("loopback0")?;
    let pointer = std::ptr::without_provenance_mut(malloc.address as usize);
    // SAFETY: the memory outlives the call, after which no region is left.
    let mapped = unsafe { context.map_device(pointer, 2 * MIB, Access::all(), Rounding::Exact) };
    let error = mapped.err().context("the model reaches GPU memory")?;
    ensure!(
        error.errno() == nix::libc::EOPNOTSUPP && error.to_string().contains("GPU memory"),
        "{error}"
    );
    steps.say(format!("map_device knows it for GPU memory: {error}"));
    Ok(())
}

/// MMIO to CUDA: a page that is none, then the first PCI resource that this process may map, which is not touched.
fn doorbells(steps: &mut Steps, gpu: &Gpu) -> Result<()> {
    let file = File::from(memfd_create("no-doorbell", MFdFlags::MFD_CLOEXEC)?);
    file.set_len(PAGE as u64)?;
    let memory = MmapOptions::new().len(PAGE).map_raw(&file)?;
    // SAFETY: the mapping outlives the registration.
    let refused = unsafe { HostRegistration::new(gpu, memory.as_ptr(), PAGE, HostKind::Doorbell) };
    let error = refused
        .err()
        .context("ordinary memory was registered as MMIO")?;
    // "ordinary memory" where /proc says so.
    let text = error.to_string();
    ensure!(
        text.contains("ordinary memory") || text.contains("found no page of MMIO"),
        "{text}"
    );
    steps.say(format!("a doorbell page that is none: {error}"));

    let (path, page) = match pci_resource() {
        Ok(found) => found,
        Err(why) => {
            steps.say(format!("MMIO as a doorbell page: not tried, {why}"));
            return Ok(());
        }
    };
    // SAFETY: as above; no kernel is given the pointer.
    match unsafe { HostRegistration::new(gpu, page.as_ptr(), PAGE, HostKind::Doorbell) } {
        Ok(registered) => steps.say(format!(
            "MMIO as a doorbell page ({path}): registered at {:#x}",
            registered.device_pointer()
        )),
        Err(error) => {
            let text = error.to_string();
            ensure!(
                text.contains("PeerMappingOverride") || text.contains("registers no MMIO"),
                "the gate is not explained: {text}"
            );
            steps.say(format!("MMIO as a doorbell page ({path}): {error}"));
        }
    }
    Ok(())
}

/// A page of a PCI function's memory that is no GPU's.
fn pci_resource() -> std::result::Result<(String, MmapRaw), String> {
    let mut last = "there is no PCI function with a memory BAR but GPUs".to_owned();
    let devices = fs::read_dir("/sys/bus/pci/devices").map_err(|error| error.to_string())?;
    for device in devices.flatten() {
        let folder = device.path();
        let class = fs::read_to_string(folder.join("class")).unwrap_or_default();
        if class.starts_with("0x03") || !folder.join("resource0").exists() {
            continue;
        }
        let path = folder.join("resource0");
        let mapped = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .and_then(|file| MmapOptions::new().len(PAGE).map_raw(&file));
        match mapped {
            Ok(page) => return Ok((path.display().to_string(), page)),
            Err(error) => last = format!("{}: {error}", path.display()),
        }
    }
    Err(last)
}
