// SPDX-License-Identifier: MIT OR Apache-2.0
//! The C ABI of completion queues with options, and of waiting for their events.

use super::{
    Sized32, borrow, finish, given, gpu::memory_of, handles, ibgda_context, ibgda_host_cq,
    ibgda_queue_memory, put,
};
use crate::{CompletionQueueOptions, Error, Result, Source};
use nix::time::{ClockId, clock_gettime};
use std::{ffi::c_int, ptr, sync::Arc, time::Duration};

/// The queue can be waited for without polling: ibgda_cq_wait_event, ibgda_wait_for_cq_event.
pub const IBGDA_CQ_EVENTS: u32 = 1;

/// The NIC keeps one completion, the last: for send queues, whose kernels then need IBGDA_COLLAPSED.
pub const IBGDA_CQ_COLLAPSED: u32 = 2;

/// What a completion queue is to be like.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibgda_cq_attr {
    /// sizeof(struct ibgda_cq_attr)
    pub size: u32,
    /// Entries, a power of two up to 32768; 0 means 128.
    pub entries: u32,
    /// IBGDA_CQ_*
    pub flags: u32,
    /// 0.
    pub reserved: u32,
    /// Where it lies, ibgda_cq_memory_bytes long; NULL: in memory of the host. On route direct only, and not with
    /// IBGDA_CQ_EVENTS.
    pub memory: *const ibgda_queue_memory,
}

impl Default for ibgda_cq_attr {
    fn default() -> Self {
        Self {
            size: size_of::<Self>() as u32,
            entries: 0,
            flags: 0,
            reserved: 0,
            memory: ptr::null(),
        }
    }
}

impl Sized32 for ibgda_cq_attr {
    const FIRST: usize = 16;
}

pub(super) fn cq_options(call: &str, attr: &ibgda_cq_attr) -> Result<CompletionQueueOptions> {
    let unknown = attr.flags & !(IBGDA_CQ_EVENTS | IBGDA_CQ_COLLAPSED);
    if unknown != 0 || attr.reserved != 0 {
        return Err(Error::argument(
            call,
            format!(
                "flags {:#x} have the unknown bits {unknown:#x}, reserved is {:#x}",
                attr.flags, attr.reserved
            ),
            "use IBGDA_CQ_*, and set reserved to 0",
        ));
    }
    let defaults = CompletionQueueOptions::default();
    Ok(CompletionQueueOptions {
        depth: match attr.entries {
            0 => defaults.depth,
            entries => entries,
        },
        events: attr.flags & IBGDA_CQ_EVENTS != 0,
        collapsed: attr.flags & IBGDA_CQ_COLLAPSED != 0,
        memory: memory_of(call, attr.memory)?,
    })
}

/// Creates a completion queue that is as `attr` says. It serves one work queue. Errors as ibgda_create_cq; with
/// IBGDA_CQ_EVENTS also those of IBGDA_IOC_DOORBELL_IMPORT, and EAGAIN: no thread.
///
/// # Safety
/// The arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_create_cq_with(
    context: *mut ibgda_context,
    attr: *const ibgda_cq_attr,
    cq: *mut *mut ibgda_host_cq,
) -> c_int {
    const CALL: &str = "ibgda_create_cq_with";
    let create = || {
        let context = borrow(CALL, "context", context)?;
        // SAFETY: by this function's contract.
        let attr = unsafe { given(CALL, "attr", attr) }?;
        let queue = context.0.create_cq_with(&cq_options(CALL, &attr)?)?;
        handles::give(CALL, ibgda_host_cq(queue))
    };
    // SAFETY: by this function's contract.
    finish(unsafe { put(CALL, "cq", cq, create) })
}

/// Sleeps until there may be something to poll for in a queue made with IBGDA_CQ_EVENTS, at most until `deadline_ns` of
/// ibgda_clock_ns, and with 0 looks once. Arms the queue for completions behind those that its poller, a kernel or a
/// thread, has taken. ETIMEDOUT: nothing came; ENOLINK: the NIC was lost; ECANCELED: the queue is being destroyed;
/// EOPNOTSUPP: it was made without events.
///
/// # Safety
/// None: the queue may be destroyed meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_cq_wait_event(cq: *const ibgda_host_cq, deadline_ns: u64) -> c_int {
    const CALL: &str = "ibgda_cq_wait_event";
    let wait = || {
        // Its own, since the object may be destroyed meanwhile.
        let queue = Arc::clone(&borrow(CALL, "cq", cq)?.0);
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("every Linux has this clock");
        let now = Duration::new(now.tv_sec() as u64, now.tv_nsec() as u32);
        let timeout = Duration::from_nanos(deadline_ns).saturating_sub(now);
        if queue.wait_for_event(timeout)? {
            return Ok(());
        }
        Err(Error::new(
            Source::Argument,
            libc::ETIMEDOUT,
            format!("{CALL}, CQ {:#x}", queue.number()),
            "no event came before the deadline",
            "wait longer, or look whether the peer is alive",
        ))
    };
    finish(wait())
}

#[cfg(test)]
mod tests {
    use super::super::ibgda_last_error;
    use super::*;
    use std::{ffi::CStr, ptr};

    #[test]
    fn null_and_unknown_flags_are_refused_and_named() {
        let mut cq = ptr::null_mut();
        let attr = ibgda_cq_attr {
            entries: 16,
            ..Default::default()
        };
        // SAFETY: every argument is null or valid.
        let errnos = unsafe {
            [
                ibgda_create_cq_with(ptr::null_mut(), &attr, &mut cq),
                ibgda_create_cq_with(ptr::null_mut(), ptr::null(), ptr::null_mut()),
                ibgda_cq_wait_event(ptr::null(), 0),
            ]
        };
        assert_eq!(errnos, [libc::EINVAL; 3]);
        // SAFETY: the message is this thread's own, and no other error happens before it is read.
        let message = unsafe { CStr::from_ptr(ibgda_last_error()) };
        assert_eq!(message, c"ibgda_cq_wait_event: cq is NULL");

        assert!(
            cq_options("call", &attr).is_ok_and(|options| options.depth == 16 && !options.events)
        );
        for (flags, reserved, words) in [(0x11, 0, "unknown bits 0x10"), (0, 7, "reserved is 0x7")]
        {
            let attr = ibgda_cq_attr {
                flags,
                reserved,
                ..attr
            };
            let error = cq_options("call", &attr).expect_err("unknown");
            assert_eq!(error.errno(), libc::EINVAL);
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}
