// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels on a CPU thread, which stands in for the GPU.

use super::requests::{ibgda_job, ibgda_stream};
use crate::{
    Status,
    abi::{ibgda_qp, ibgda_region},
};
use std::{ffi::c_void, thread, time::Duration};

unsafe extern "C" {
    fn ibgda_kernel_put_blocks(
        qp: *mut ibgda_qp,
        to: ibgda_region,
        from: ibgda_region,
        block_bytes: u32,
        timeout_ns: u64,
        result: *mut u32,
    );
    fn ibgda_kernel_wait(qp: *mut ibgda_qp, timeout_ns: u64, result: *mut u32);
    fn ibgda_kernel_jobs(jobs: *mut ibgda_job);
    fn ibgda_kernel_streams(streams: *mut ibgda_stream);
    fn ibgda_kernel_steps(task: *const c_void, block: u32);
    fn ibgda_kernel_steps_blind(task: *const c_void, block: u32);
}

/// A kernel of one argument, and the number of its block.
pub type Kernel = unsafe extern "C" fn(*const c_void, u32);

/// Those of [`steps`](super::steps), by name: the kernel, and the same with a header that does not look at the status page.
pub const STEPS: &[(&str, Kernel)] = &[
    ("ibgda_kernel_steps", ibgda_kernel_steps),
    ("ibgda_kernel_steps_blind", ibgda_kernel_steps_blind),
];

/// A QP on its way to the thread that stands in for the GPU.
struct Handle(*mut ibgda_qp);

// SAFETY: by the contract of the callers, the launch's thread alone uses the handle meanwhile.
unsafe impl Send for Handle {}

fn launch(qp: *mut ibgda_qp, kernel: impl FnOnce(*mut ibgda_qp, &mut u32) + Send) -> Status {
    let handle = Handle(qp);
    let mut result = 0;
    thread::scope(|scope| {
        scope.spawn(|| {
            let handle = handle;
            kernel(handle.0, &mut result);
        });
    });
    Status(result)
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Writes `from`, in blocks of `block_bytes`, to the same offsets of `to`, and waits for the last.
///
/// # Safety
/// `qp` is a device handle whose QP lives, and that nobody else uses meanwhile.
pub unsafe fn put_blocks(
    qp: *mut ibgda_qp,
    to: ibgda_region,
    from: ibgda_region,
    block_bytes: u32,
    timeout: Duration,
) -> Status {
    launch(qp, |qp, result| {
        // SAFETY: by this function's contract; what the NIC is asked to move, it checks itself.
        unsafe { ibgda_kernel_put_blocks(qp, to, from, block_bytes, nanoseconds(timeout), result) }
    })
}

/// Waits for a completion of the send queue.
///
/// # Safety
/// As of [`put_blocks`].
pub unsafe fn wait(qp: *mut ibgda_qp, timeout: Duration) -> Status {
    launch(qp, |qp, result| {
        // SAFETY: by this function's contract.
        unsafe { ibgda_kernel_wait(qp, nanoseconds(timeout), result) }
    })
}

/// One block's argument on its way to the thread that stands in for it.
struct Block<T>(*mut T);

// SAFETY: by the contract of the callers, the block's thread alone uses what it names meanwhile.
unsafe impl<T> Send for Block<T> {}

/// Runs a kernel that has a block for each element, each on a thread of its own.
fn launch_blocks<T>(arguments: &mut [T], kernel: impl Fn(*mut T) + Sync) {
    thread::scope(|scope| {
        for argument in arguments {
            let block = Block(argument);
            let kernel = &kernel;
            scope.spawn(move || {
                let block = block;
                kernel(block.0);
            });
        }
    });
}

/// Runs jobs at the same time, and waits for all.
///
/// # Safety
/// Of each, `qp` is a device handle whose QP lives and that nobody else uses meanwhile, and that no two jobs share;
/// `requests` are `count` requests.
pub unsafe fn jobs(jobs: &mut [ibgda_job]) {
    // SAFETY: by this function's contract; what the NIC is asked to move, it checks itself.
    launch_blocks(jobs, |job| unsafe { ibgda_kernel_jobs(job) });
}

/// Runs streams at the same time, and waits for all.
///
/// # Safety
/// As of [`jobs`].
pub unsafe fn streams(streams: &mut [ibgda_stream]) {
    // SAFETY: by this function's contract.
    launch_blocks(streams, |stream| unsafe { ibgda_kernel_streams(stream) });
}
