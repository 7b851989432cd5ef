// SPDX-License-Identifier: MIT OR Apache-2.0
//! The same through the C ABI, as a program in C or C++ makes these calls.

use crate::{ANY_GPU, PATIENCE, Steps, processor::Processor};
use anyhow::{Result, ensure};
use ibgda::{
    Status,
    abi::{ibgda_error, ibgda_qp, ibgda_region},
    capi::*,
};
use ibgda_device::kernels::cpu;
use std::{
    ffi::{CStr, CString},
    ptr::{self, null, null_mut},
};

const BYTES: u64 = 1 << 16;

fn last_error() -> String {
    // SAFETY: terminated, and this thread's own.
    unsafe { CStr::from_ptr(ibgda_last_error()) }
        .to_string_lossy()
        .into_owned()
}

fn check(errno: i32) -> Result<()> {
    ensure!(errno == 0, "errno {errno}: {}", last_error());
    Ok(())
}

/// What a kernel posts with.
fn handle(processor: &Processor, qp: *mut ibgda_host_qp) -> Result<*mut ibgda_qp> {
    let mut handle = null_mut();
    // SAFETY: the arguments are valid.
    check(unsafe {
        match processor {
            Processor::Cpu => ibgda_qp_device_handle(qp, &mut handle),
            // The GPU that the context was opened with.
            Processor::Gpu { .. } => ibgda_qp_device_handle_on(qp, null(), &mut handle),
        }
    })?;
    Ok(handle)
}

fn put_blocks(
    processor: &Processor,
    handle: *mut ibgda_qp,
    to: ibgda_region,
    from: ibgda_region,
) -> Result<Status> {
    const BLOCK: u32 = 3000;
    Ok(match processor {
        // SAFETY: the QP lives, and one kernel at a time is run on it.
        Processor::Cpu => unsafe { cpu::put_blocks(handle, to, from, BLOCK, PATIENCE) },
        Processor::Gpu { kernels, .. } => {
            let handle = handle.addr() as u64;
            // SAFETY: as above; the handle is for this GPU.
            unsafe { kernels.put_blocks(handle, to, from, BLOCK, PATIENCE) }?
        }
    })
}

/// Memory of a heap, as the host sees it.
fn memory(region: &ibgda_region) -> *mut u8 {
    ptr::with_exposed_provenance_mut(region.address as usize)
}

pub fn run(steps: &mut Steps, processor: &Processor) -> Result<()> {
    let gpu = match processor {
        Processor::Cpu => ANY_GPU.to_owned(),
        Processor::Gpu { gpu, .. } => gpu.bdf()?.to_string(),
    };
    let gpu = CString::new(gpu)?;
    let open = ibgda_open_attr {
        size: size_of::<ibgda_open_attr>() as u32,
        port: 1,
        nic: c"loopback2".as_ptr(),
        gpu: gpu.as_ptr(),
        route: IBGDA_ROUTE_LOOPBACK,
        reserved: 0,
    };
    let mut qp_attr = ibgda_qp_attr {
        send_depth: 16,
        access: IBGDA_ACCESS_WRITE,
        ..Default::default()
    };
    let (mut context, mut heap) = (null_mut(), null_mut());
    let (mut cqs, mut qps) = ([null_mut(); 2], [null_mut(); 2]);
    let (mut from, mut to) = (ibgda_region::default(), ibgda_region::default());
    let mut addresses = [[0_u8; IBGDA_ADDRESS_BYTES]; 2];
    // SAFETY: the arguments are valid.
    unsafe {
        check(ibgda_open(&open, &mut context))?;
        check(ibgda_create_heap(
            context,
            null_mut(),
            2 * BYTES as usize,
            IBGDA_ACCESS_WRITE,
            &mut heap,
        ))?;
        check(ibgda_heap_alloc(heap, BYTES, 4096, &mut from))?;
        check(ibgda_heap_alloc(heap, BYTES, 4096, &mut to))?;
        for i in 0..2 {
            check(ibgda_create_cq(context, 16, &mut cqs[i]))?;
            let made = ibgda_create_qp(context, &qp_attr, cqs[i], null(), &mut qps[i]);
            check(made)?;
            check(ibgda_qp_address(qps[i], addresses[i].as_mut_ptr()))?;
        }
        for i in 0..2 {
            let peer = &addresses[1 - i];
            check(ibgda_qp_connect(qps[i], peer.as_ptr().cast(), peer.len()))?;
        }
    }
    let qp = qps[0];
    let handle = handle(processor, qp)?;
    for seed in [0x5a_u8, 0xc3] {
        for at in 0..BYTES as usize {
            // SAFETY: inside the heap, and no request is under way.
            unsafe { memory(&from).add(at).write_volatile(at as u8 ^ seed) };
        }
        let status = put_blocks(processor, handle, to, from)?;
        ensure!(status == Status::OK, "the kernel returned: {status}");
        for at in 0..BYTES as usize {
            // SAFETY: as above.
            let byte = unsafe { memory(&to).add(at).read_volatile() };
            ensure!(byte == at as u8 ^ seed, "byte {at} is {byte:#x}");
        }
    }
    let (mut error, mut text) = (ibgda_error::default(), [0_u8; 512]);
    // SAFETY: the arguments are valid.
    check(unsafe { ibgda_qp_error(qp, &mut error) })?;
    ensure!(error.status == 0, "{error:?}");
    let wrong = ibgda_region {
        rkey: to.rkey ^ 0xff00,
        ..to
    };
    let status = put_blocks(processor, handle, wrong, from)?;
    ensure!(status == Status::REMOTE_ACCESS, "a wrong rkey: {status}");
    // SAFETY: as above.
    unsafe {
        check(ibgda_qp_error(qp, &mut error))?;
        check(ibgda_error_text(
            &error,
            text.as_mut_ptr().cast(),
            text.len(),
        ))?;
    }
    let text = CStr::from_bytes_until_nul(&text)?.to_string_lossy();
    ensure!(
        Status(error.status) == status && text.contains("REMOTE_ACCESS"),
        "{error:?}: {text}"
    );
    if let Processor::Gpu { gpu, .. } = processor {
        let mut there = null_mut();
        // SAFETY: the arguments are valid.
        check(unsafe { ibgda_heap_device_pointer_on(heap, null(), &mut there) })?;
        crate::gpu::fill(gpu, there.addr() as u64, 0xa7, 2 * BYTES as usize)?;
        // SAFETY: inside the heap, and the GPU has stored.
        let (first, last) = unsafe {
            let last = memory(&to).add(BYTES as usize - 1);
            (memory(&from).read_volatile(), last.read_volatile())
        };
        ensure!((first, last) == (0xa7, 0xa7), "{first:#x}, {last:#x}");
        let (mut bytes, mut queue) = (0, null_mut());
        // SAFETY: as above. The model takes no dma-buf; a queue that cannot be made in the memory leaves it.
        unsafe {
            check(ibgda_qp_memory_bytes(&qp_attr, &mut bytes))?;
            check(ibgda_alloc_queue_memory(
                context,
                gpu_name(&gpu.bdf()?)?.as_ptr(),
                bytes,
                &mut queue,
            ))?;
            qp_attr.memory = queue;
            let mut fresh = null_mut();
            check(ibgda_create_cq(context, 16, &mut fresh))?;
            let refused = ibgda_create_qp(context, &qp_attr, fresh, null(), &mut null_mut());
            ensure!(refused != 0, "the model took a dma-buf");
            steps.say(format!(
                "C ABI: queue memory of {bytes} bytes on the GPU, exported; the model's NIC refuses it: {}",
                last_error()
            ));
            check(ibgda_destroy_cq(fresh))?;
            check(ibgda_destroy_queue_memory(queue))?;
        }
    }
    // SAFETY: each object is destroyed once, and no kernel runs.
    unsafe {
        for i in 0..2 {
            check(ibgda_destroy_qp(qps[i]))?;
            check(ibgda_destroy_cq(cqs[i]))?;
        }
        for buffer in [&from, &to] {
            check(ibgda_heap_free(heap, buffer))?;
        }
        check(ibgda_destroy_heap(heap))?;
        check(ibgda_close(context))?;
    }
    steps.say(format!(
        "C ABI: {BYTES} bytes twice, posted and polled {processor}; wrong rkey: {text}"
    ));
    Ok(())
}

fn gpu_name(bdf: &ibgda::Bdf) -> Result<CString> {
    Ok(CString::new(bdf.to_string())?)
}
