// SPDX-License-Identifier: MIT OR Apache-2.0
//! The C ABI of routes, events and counters.

use super::{
    Sized32, borrow, finish, ibgda_context, ibgda_host_qp, put, size_of_given, write_text,
};
use crate::{AsyncEvent, AsyncEventKind, Error, QueuePairEvent, Result, Route};
use ibgda_device::abi::ibgda_error;
use std::{
    ffi::{CString, c_char, c_int, c_void},
    ptr,
};

/// The best route that works.
pub const IBGDA_ROUTE_AUTO: u32 = 0;
/// The GPU stores to the NIC's doorbell register.
pub const IBGDA_ROUTE_DIRECT: u32 = 1;
/// The GPU stores to a word in host memory, which a thread of the library carries to the register. Kernels need
/// IBGDA_CPU_DOORBELL.
pub const IBGDA_ROUTE_CPU_DOORBELL: u32 = 2;
/// The NIC is the ConnectX model in this process, in a library that was built with it: "loopback0" and on.
pub const IBGDA_ROUTE_LOOPBACK: u32 = 3;
/// A thread of the library posts by verbs what kernels write, on any NIC that has verbs, without the broker. Kernels need
/// IBGDA_CPU_DOORBELL.
pub const IBGDA_ROUTE_PROXY: u32 = 4;

/// The NIC was reset or taken away, or the right to it withdrawn: generation, reason.
pub const IBGDA_ASYNC_NIC_LOST: u32 = 1;
/// The NIC is back and waits for ibgda_rebind: generation.
pub const IBGDA_ASYNC_NIC_RECOVERED: u32 = 2;
/// A doorbell page was taken back: number is the broker's handle.
pub const IBGDA_ASYNC_DOORBELL_REVOKED: u32 = 3;
/// Records of the broker were dropped: number of them.
pub const IBGDA_ASYNC_EVENTS_DROPPED: u32 = 4;
/// A port went down: number is the port.
pub const IBGDA_ASYNC_PORT_DOWN: u32 = 5;
/// A port became active: number is the port.
pub const IBGDA_ASYNC_PORT_ACTIVE: u32 = 6;
/// Another asynchronous event of the verbs device: number is its ibv_event_type.
pub const IBGDA_ASYNC_VERBS: u32 = 7;
/// A QP failed: number is the CQN; error has the rest.
pub const IBGDA_ASYNC_QUEUE_ERROR: u32 = 8;

/// The NIC says that a QP failed, since it cannot read its queue or write its CQ: number is the QPN. This and the next
/// five are of QPs and CQs that are made while there is a callback.
pub const IBGDA_ASYNC_QP_CATASTROPHIC: u32 = 9;
/// The NIC says that a QP failed at a request of its peer that it cannot answer: number is the QPN.
pub const IBGDA_ASYNC_QP_REQUEST_ERROR: u32 = 10;
/// The NIC says that a QP failed at a request of its peer for memory that it may not use: number is the QPN.
pub const IBGDA_ASYNC_QP_ACCESS_ERROR: u32 = 11;
/// A QP uses its alternate path: number is the QPN.
pub const IBGDA_ASYNC_PATH_MIGRATED: u32 = 12;
/// A QP could not use its alternate path: number is the QPN.
pub const IBGDA_ASYNC_PATH_MIGRATION_FAILED: u32 = 13;
/// The NIC says that a CQ takes no more completions: number is the CQN.
pub const IBGDA_ASYNC_CQ_ERROR: u32 = 14;

/// Something that happened. A member that its kind does not name is 0.
#[repr(C)]
pub struct ibgda_async_event {
    /// sizeof(struct ibgda_async_event) of the library
    pub size: u32,
    /// IBGDA_ASYNC_*
    pub kind: u32,
    /// Generation of the NIC, of its loss or return.
    pub generation: u32,
    /// IBGDA_REASON_* of the ioctl ABI.
    pub reason: u32,
    /// What the kind says.
    pub number: u32,
    /// 0.
    pub reserved: u32,
    /// When, on CLOCK_MONOTONIC, ns.
    pub time_ns: u64,
    /// The first error of the CQ.
    pub error: ibgda_error,
    /// What happened, with its values.
    pub what: *const c_char,
    /// Why, as far as known; may be empty.
    pub why: *const c_char,
    /// What to do about it; may be empty.
    pub advice: *const c_char,
}

/// Called on a thread of the context's, one call at a time. The event and its texts are valid until it returns.
pub type ibgda_error_callback =
    Option<unsafe extern "C" fn(event: *const ibgda_async_event, user: *mut c_void)>;

/// Numbers of a queue pair since it was made. Each is read by itself while kernels go on. Requests are counted in slots
/// of the send queue: one each, but two for those of two WQEs (ibgda_put_signal, IBGDA_FLUSH).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibgda_qp_counters {
    /// sizeof(struct ibgda_qp_counters), set by the caller.
    pub size: u32,
    /// 0.
    pub reserved: u32,
    /// Send slots that kernels have reserved.
    pub posted: u64,
    /// Of these, the NIC was told of.
    pub told: u64,
    /// Of these, known to have succeeded, as far as a kernel has looked at the CQ.
    pub completed: u64,
    /// The others, once one of them has failed: that one, and those flushed behind it.
    pub failed: u64,
    /// Receives posted.
    pub recv_posted: u64,
    /// Of these, known to have taken a message.
    pub recv_completed: u64,
    /// Doorbells that the library's thread has carried; 0 on other routes than cpu-doorbell.
    pub carried: u64,
}

impl Sized32 for ibgda_qp_counters {
    const FIRST: usize = 64;
}

pub(super) fn route(call: &str, number: u32) -> Result<Route> {
    match number {
        IBGDA_ROUTE_AUTO => Ok(Route::Auto),
        IBGDA_ROUTE_DIRECT => Ok(Route::Direct),
        IBGDA_ROUTE_CPU_DOORBELL => Ok(Route::CpuDoorbell),
        IBGDA_ROUTE_LOOPBACK => Ok(Route::Loopback),
        IBGDA_ROUTE_PROXY => Ok(Route::Proxy),
        other => Err(Error::argument(
            call,
            format!("there is no route {other}"),
            "use IBGDA_ROUTE_AUTO, _DIRECT, _CPU_DOORBELL, _PROXY or _LOOPBACK",
        )),
    }
}

/// The route in use, IBGDA_ROUTE_*; never IBGDA_ROUTE_AUTO.
///
/// # Safety
/// The arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_get_route(context: *const ibgda_context, route: *mut u32) -> c_int {
    const CALL: &str = "ibgda_get_route";
    let get = || {
        let context = borrow(CALL, "context", context)?;
        Ok(match context.0.route() {
            Route::Auto => IBGDA_ROUTE_AUTO,
            Route::Direct => IBGDA_ROUTE_DIRECT,
            Route::CpuDoorbell => IBGDA_ROUTE_CPU_DOORBELL,
            Route::Proxy => IBGDA_ROUTE_PROXY,
            Route::Loopback => IBGDA_ROUTE_LOOPBACK,
        })
    };
    // SAFETY: by this function's contract.
    finish(unsafe { put(CALL, "route", route, get) })
}

/// Which route is used, and of each better one why it is not: a line for each, written into `buffer` and terminated, cut to
/// `length`. EINVAL: no buffer.
///
/// # Safety
/// The context is null or valid; `buffer` is null or has `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_route_report(
    context: *const ibgda_context,
    buffer: *mut c_char,
    length: usize,
) -> c_int {
    const CALL: &str = "ibgda_route_report";
    // SAFETY: by this function's contract.
    finish(unsafe {
        borrow(CALL, "context", context).and_then(|context| {
            write_text(CALL, &context.0.route_report().to_string(), buffer, length)
        })
    })
}

/// What the application wants called, on its way to the context's thread.
struct Target {
    callback: unsafe extern "C" fn(event: *const ibgda_async_event, user: *mut c_void),
    user: *mut c_void,
}

// SAFETY: by the contract of ibgda_set_error_callback, the function may be called with the pointer on another thread.
unsafe impl Send for Target {}

fn qp_event(event: QueuePairEvent) -> u32 {
    match event {
        QueuePairEvent::LocalCatastrophic => IBGDA_ASYNC_QP_CATASTROPHIC,
        QueuePairEvent::RequestError => IBGDA_ASYNC_QP_REQUEST_ERROR,
        QueuePairEvent::AccessError => IBGDA_ASYNC_QP_ACCESS_ERROR,
        QueuePairEvent::PathMigrated => IBGDA_ASYNC_PATH_MIGRATED,
        QueuePairEvent::PathMigrationFailed => IBGDA_ASYNC_PATH_MIGRATION_FAILED,
    }
}

impl Target {
    fn call(&self, event: &AsyncEvent) {
        let text = |text: &str| CString::new(text.replace('\0', " ")).unwrap_or_default();
        let (what, why, advice) = (text(event.what()), text(event.why()), text(event.advice()));
        let mut c = ibgda_async_event {
            size: size_of::<ibgda_async_event>() as u32,
            kind: 0,
            generation: 0,
            reason: 0,
            number: 0,
            reserved: 0,
            time_ns: event.time_ns(),
            error: ibgda_error::default(),
            what: what.as_ptr(),
            why: why.as_ptr(),
            advice: advice.as_ptr(),
        };
        (c.kind, c.number) = match event.kind() {
            AsyncEventKind::NicLost { generation, reason } => {
                (c.generation, c.reason) = (generation, reason);
                (IBGDA_ASYNC_NIC_LOST, 0)
            }
            AsyncEventKind::NicRecovered { generation } => {
                c.generation = generation;
                (IBGDA_ASYNC_NIC_RECOVERED, 0)
            }
            AsyncEventKind::DoorbellRevoked { handle } => (IBGDA_ASYNC_DOORBELL_REVOKED, handle),
            AsyncEventKind::EventsDropped { count } => (IBGDA_ASYNC_EVENTS_DROPPED, count),
            AsyncEventKind::Port { port, active: true } => (IBGDA_ASYNC_PORT_ACTIVE, port.into()),
            AsyncEventKind::Port { port, .. } => (IBGDA_ASYNC_PORT_DOWN, port.into()),
            AsyncEventKind::Verbs { event } => (IBGDA_ASYNC_VERBS, event),
            AsyncEventKind::QueuePair { qpn, event } => (qp_event(event), qpn),
            AsyncEventKind::CompletionQueue { cqn, .. } => (IBGDA_ASYNC_CQ_ERROR, cqn),
            AsyncEventKind::QueueError { cqn, error } => {
                c.error = error;
                (IBGDA_ASYNC_QUEUE_ERROR, cqn)
            }
        };
        // SAFETY: by the contract of ibgda_set_error_callback; the event and its texts live until the call returns.
        unsafe { (self.callback)(&c, self.user) };
    }
}

/// Has `callback` called with `user` for what happens without being asked for: loss and return of the NIC, changes of
/// the port's state and other asynchronous events of the verbs device, the first error of each CQ once a kernel has
/// found it, and what the NIC says of QPs and CQs that are made while there is a callback; within 10 ms. NULL ends it.
/// What the broker has told before and nobody has heard comes first.
///
/// The callback may call everything of this library, set another callback, and close the context, after which it is not
/// called again. It may not wait for a thread that closes the context or sets a callback: these wait until a call under
/// way has returned. It may not leave by an exception or longjmp. ibgda_last_error is the calling thread's own.
///
/// When this returns, the former callback is not running and will not be called again, unless it is the caller.
///
/// # Safety
/// The context is null or valid; the callback may be called with `user` on any thread until it is replaced or the
/// context closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_set_error_callback(
    context: *mut ibgda_context,
    callback: ibgda_error_callback,
    user: *mut c_void,
) -> c_int {
    const CALL: &str = "ibgda_set_error_callback";
    let set = borrow(CALL, "context", context).and_then(|context| match callback {
        Some(callback) => {
            let target = Target { callback, user };
            context.0.on_error(move |event| target.call(event))
        }
        None => {
            context.0.ignore_errors();
            Ok(())
        }
    });
    finish(set)
}

/// What a QP has done so far; no system call. Set counters->size first. EINVAL: a size that the struct never had.
///
/// # Safety
/// The QP is null or valid; the counters are null or have `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_get_qp_counters(
    qp: *const ibgda_host_qp,
    counters: *mut ibgda_qp_counters,
) -> c_int {
    const CALL: &str = "ibgda_get_qp_counters";
    let get = || {
        // SAFETY: by this function's contract.
        let size = unsafe { size_of_given(CALL, "counters", counters) }?;
        let qp = borrow(CALL, "qp", qp)?;
        qp.0.check_ours(CALL)?;
        let now = qp.0.counters();
        let known = ibgda_qp_counters {
            size: size as u32,
            reserved: 0,
            posted: now.posted,
            told: now.told,
            completed: now.completed,
            failed: now.failed,
            recv_posted: now.recv_posted,
            recv_completed: now.recv_completed,
            carried: now.carried,
        };
        let both = size.min(size_of::<ibgda_qp_counters>());
        // SAFETY: the caller's has `size` bytes; what is behind what this library knows becomes 0.
        unsafe {
            ptr::copy_nonoverlapping((&raw const known).cast::<u8>(), counters.cast(), both);
            counters.cast::<u8>().add(both).write_bytes(0, size - both);
        }
        Ok(())
    };
    finish(get())
}

#[cfg(test)]
mod tests {
    use super::super::ibgda_last_error;
    use super::*;
    use std::ffi::CStr;

    fn message() -> String {
        // SAFETY: the message is this thread's own, and no other error happens before it is copied.
        unsafe { CStr::from_ptr(ibgda_last_error()) }
            .to_string_lossy()
            .into_owned()
    }

    #[test]
    fn null_is_refused_and_named() {
        let mut number = 0;
        let mut counters = ibgda_qp_counters {
            size: 64,
            ..Default::default()
        };
        let mut buffer = [0; 8];
        // SAFETY: every argument is null or valid.
        let results = unsafe {
            [
                ("route", ibgda_get_route(ptr::null(), ptr::null_mut())),
                ("context", ibgda_get_route(ptr::null(), &mut number)),
                (
                    "context",
                    ibgda_route_report(ptr::null(), buffer.as_mut_ptr(), 8),
                ),
                (
                    "context",
                    ibgda_set_error_callback(ptr::null_mut(), None, ptr::null_mut()),
                ),
                (
                    "counters",
                    ibgda_get_qp_counters(ptr::null(), ptr::null_mut()),
                ),
                ("qp", ibgda_get_qp_counters(ptr::null(), &mut counters)),
            ]
        };
        for (argument, errno) in results {
            assert_eq!(errno, libc::EINVAL, "{argument}");
        }
        counters.size = 63;
        // SAFETY: as above.
        let errno = unsafe { ibgda_get_qp_counters(ptr::null(), &mut counters) };
        assert_eq!(errno, libc::EINVAL);
        assert!(
            message().contains("size of counters is 63"),
            "{}",
            message()
        );
    }

    #[test]
    fn routes_have_numbers_and_others_are_refused_with_the_choice() {
        for (number, expected) in [
            (IBGDA_ROUTE_AUTO, Route::Auto),
            (IBGDA_ROUTE_DIRECT, Route::Direct),
            (IBGDA_ROUTE_CPU_DOORBELL, Route::CpuDoorbell),
            (IBGDA_ROUTE_LOOPBACK, Route::Loopback),
            (IBGDA_ROUTE_PROXY, Route::Proxy),
        ] {
            assert_eq!(route("open", number).expect("a route"), expected);
        }
        let error = route("open", 5).expect_err("no route");
        assert!(error.to_string().contains("IBGDA_ROUTE_AUTO"), "{error}");
    }
}
