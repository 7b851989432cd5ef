// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels of `kernel.cu`, run on CPU threads.

use ibgda::{QueuePair, Status, abi};
use std::{thread, time::Duration};

unsafe extern "C" {
    fn write_blocks(
        qp: *mut abi::ibgda_qp,
        to: *const abi::ibgda_region,
        from: *const abi::ibgda_region,
        block_bytes: u32,
        timeout_ns: u64,
        result: *mut u32,
    );
    fn wait_for_completion(qp: *mut abi::ibgda_qp, timeout_ns: u64, result: *mut u32);
}

/// A QP on its way to the thread that stands in for the GPU.
struct Handle(*mut abi::ibgda_qp);

// SAFETY: the QP outlives the launch, and the launch's thread alone uses the handle meanwhile: see `launch`.
unsafe impl Send for Handle {}

fn launch(qp: &mut QueuePair, kernel: impl FnOnce(*mut abi::ibgda_qp, &mut u32) + Send) -> Status {
    let handle = Handle(qp.device_handle());
    let mut result = 0;
    thread::scope(|scope| {
        scope.spawn(|| {
            let handle = handle;
            kernel(handle.0, &mut result);
        });
    });
    Status(result)
}

/// Writes `from`, in blocks, to the same offsets of `to`, and waits for the last.
pub fn write(
    qp: &mut QueuePair,
    to: abi::ibgda_region,
    from: abi::ibgda_region,
    block_bytes: u32,
    timeout: Duration,
) -> Status {
    launch(qp, |qp, result| {
        // SAFETY: the handle is valid while the QP is borrowed, the regions and the result while the call runs.
        unsafe {
            write_blocks(
                qp,
                &to,
                &from,
                block_bytes,
                timeout.as_nanos() as u64,
                result,
            )
        }
    })
}

/// Waits for a completion.
pub fn wait(qp: &mut QueuePair, timeout: Duration) -> Status {
    launch(qp, |qp, result| {
        // SAFETY: as above.
        unsafe { wait_for_completion(qp, timeout.as_nanos() as u64, result) }
    })
}
