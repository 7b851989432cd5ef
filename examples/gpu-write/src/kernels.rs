// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels of `kernels/library/transfer.cu`, run on CPU threads.

use ibgda::{QueuePair, Status, abi};
use ibgda_device::kernels::cpu;
use std::time::Duration;

/// Writes `from`, in blocks, to the same offsets of `to`, and waits for the last.
pub fn write(
    qp: &mut QueuePair,
    to: abi::ibgda_region,
    from: abi::ibgda_region,
    block_bytes: u32,
    timeout: Duration,
) -> Status {
    // SAFETY: the handle is the QP's, which is borrowed for the kernel alone.
    unsafe { cpu::put_blocks(qp.device_handle(), to, from, block_bytes, timeout) }
}

/// Waits for a completion.
pub fn wait(qp: &mut QueuePair, timeout: Duration) -> Status {
    // SAFETY: as above.
    unsafe { cpu::wait(qp.device_handle(), timeout) }
}
