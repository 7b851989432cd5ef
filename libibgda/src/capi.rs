// SPDX-License-Identifier: MIT OR Apache-2.0
//! The C ABI, declared by `include/ibgda.h`, which cbindgen makes from this file.
//!
//! Every function returns 0, or an errno; then [`ibgda_last_error`] has the sentence. Objects are opaque, and may be
//! destroyed in any order: each keeps what it needs. Unless a function says otherwise, an object may be used by several
//! threads at once. EBADF: an object that was destroyed, is of another kind or was never given out; one that is destroyed
//! while another thread is in a call with it ends with that call.
//!
//! Structures begin with their size, which the caller sets, so that later versions may have more members: one that ends
//! before a member has 0 there, and one that is longer than the library knows must be 0 behind (E2BIG).

mod events;
mod gpu;
mod handles;
mod heap;
mod routes;

pub use events::*;
pub use gpu::*;
pub use heap::*;
pub use routes::*;

use crate::{
    Access, Bdf, CompletionQueue, Context, Error, MemoryRegion, OpenOptions, QpAddress, QueuePair,
    QueuePairOptions, Result, Rounding, address::ADDRESS_BYTES,
};
use events::cq_options;
use gpu::{gpu_of, memory_of};
use handles::borrow;
use ibgda_device::{
    Status,
    abi::{IBGDA_BLUEFLAME, IBGDA_SHARED, ibgda_cq, ibgda_qp, ibgda_region},
};
use std::{
    cell::RefCell,
    ffi::{CStr, CString, c_char, c_int, c_void},
    mem::MaybeUninit,
    ptr, slice,
    sync::Arc,
    time::Duration,
};

/// Peers may read the memory.
pub const IBGDA_ACCESS_READ: u32 = 1;
/// Peers may write it.
pub const IBGDA_ACCESS_WRITE: u32 = 2;
/// Peers may use atomics on it.
pub const IBGDA_ACCESS_ATOMIC: u32 = 4;
/// Register whole pages around a range that is not aligned, and keep its address and length.
pub const IBGDA_MAP_ROUND: u32 = 256;
/// Bytes of a QP's address.
pub const IBGDA_ADDRESS_BYTES: usize = 64;

const _: () = assert!(IBGDA_ADDRESS_BYTES == ADDRESS_BYTES);

/// A NIC and a GPU that may drive it.
pub struct ibgda_context(Context);
/// Memory registered with a NIC.
pub struct ibgda_mr(MemoryRegion);
/// A completion queue, host side; kernels use its `struct ibgda_cq`.
pub struct ibgda_host_cq(Arc<CompletionQueue>);
/// A queue pair, host side; kernels use its `struct ibgda_qp`.
pub struct ibgda_host_qp(QueuePair, Bdf);

/// What to open.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibgda_open_attr {
    /// sizeof(struct ibgda_open_attr)
    pub size: u32,
    /// The NIC's port, from 1.
    pub port: u32,
    /// The NIC: "mlx5_0", or "0000:03:00.0".
    pub nic: *const c_char,
    /// The GPU: "0000:65:00.0".
    pub gpu: *const c_char,
    /// IBGDA_ROUTE_*: how doorbells reach the NIC; 0 for the best that works.
    pub route: u32,
    /// 0.
    pub reserved: u32,
}

/// What a queue pair is to be like. Zero in a field with a default means the default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibgda_qp_attr {
    /// sizeof(struct ibgda_qp_attr)
    pub size: u32,
    /// Send slots, a power of two up to 32768; default 128.
    pub send_depth: u32,
    /// Receive slots, a power of two from 4 to 32768; 0 for no receive queue.
    pub recv_depth: u32,
    /// IBGDA_ACCESS_*: what peers may do through this QP.
    pub access: u32,
    /// How long a kernel's post may wait for room, ns; default 2 s.
    pub post_timeout_ns: u64,
    /// How kernels use it: 0, or IBGDA_SHARED and IBGDA_BLUEFLAME of <ibgda/types.h>.
    pub mode: u32,
    /// 0.
    pub reserved: u32,
    /// How long the NIC waits for an acknowledgement: 4.096 us * 2^n, 1 to 31; default 14.
    pub ack_timeout: u32,
    /// Retries before a request fails, 1 to 7; default 7; IBGDA_NO_RETRIES.
    pub retry_count: u32,
    /// Retries when the peer has no receive posted, 1 to 6; default 6; IBGDA_NO_RETRIES.
    pub rnr_retry: u32,
    /// 0.
    pub reserved1: u32,
    /// Where its queues lie, ibgda_qp_memory_bytes long; NULL: in memory of the host. On route direct only.
    pub memory: *const ibgda_queue_memory,
}

/// The broker's word on a NIC.
#[repr(C)]
pub struct ibgda_session_state {
    /// IBGDA_STATE_* of the ioctl ABI: 1 ready, 2 lost, 3 recovered.
    pub state: u32,
    /// Generation the state is of.
    pub generation: u32,
    /// IBGDA_REASON_* of the last loss.
    pub reason: u32,
    /// 0.
    pub reserved: u32,
    /// When it last changed, on CLOCK_MONOTONIC.
    pub changed_ns: u64,
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

fn finish(result: Result<()>) -> c_int {
    let Err(error) = result else { return 0 };
    // A message has no NUL, unless an argument had; then it ends there.
    let text: Vec<u8> = error.to_string().bytes().take_while(|&b| b != 0).collect();
    LAST_ERROR.with_borrow_mut(|last| *last = CString::new(text).unwrap_or_default());
    error.errno()
}

fn null(call: &str, argument: &str) -> Error {
    Error::argument(call, format!("{argument} is NULL"), "")
}

impl handles::Object for ibgda_context {
    const WHAT: &'static str = "context";
}
impl handles::Object for ibgda_mr {
    const WHAT: &'static str = "memory region";
}
impl handles::Object for ibgda_host_cq {
    const WHAT: &'static str = "completion queue";
}
impl handles::Object for ibgda_host_qp {
    const WHAT: &'static str = "queue pair";
}

/// # Safety
/// A pointer that is not null may be written.
unsafe fn put<T>(
    call: &str,
    argument: &str,
    pointer: *mut T,
    value: impl FnOnce() -> Result<T>,
) -> Result<()> {
    if pointer.is_null() {
        return Err(null(call, argument));
    }
    let value = value()?;
    // SAFETY: by this function's contract.
    unsafe { pointer.write(value) };
    Ok(())
}

/// # Safety
/// As for [`CStr::from_ptr`], unless it is null.
unsafe fn text<'a>(call: &str, argument: &str, pointer: *const c_char) -> Result<&'a str> {
    if pointer.is_null() {
        return Err(null(call, argument));
    }
    // SAFETY: by this function's contract.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str()
        .map_err(|_| Error::argument(call, format!("{argument} is not UTF-8"), ""))
}

/// A structure that begins with its size, and the bytes of its first version.
trait Sized32: Copy {
    const FIRST: usize;
}

impl Sized32 for ibgda_open_attr {
    const FIRST: usize = 24;
}

impl Default for ibgda_qp_attr {
    fn default() -> Self {
        Self {
            size: size_of::<Self>() as u32,
            send_depth: 0,
            recv_depth: 0,
            access: 0,
            post_timeout_ns: 0,
            mode: 0,
            reserved: 0,
            ack_timeout: 0,
            retry_count: 0,
            rnr_retry: 0,
            reserved1: 0,
            memory: ptr::null(),
        }
    }
}

impl Sized32 for ibgda_qp_attr {
    const FIRST: usize = 32;
}

/// The bytes that a structure of the caller's has, if they are enough for one of its kind.
///
/// # Safety
/// The pointer is null, or of a structure that begins with its size and has as many bytes.
unsafe fn size_of_given<T: Sized32>(
    call: &str,
    argument: &str,
    pointer: *const T,
) -> Result<usize> {
    /// No structure gets longer than that.
    const MOST: usize = 4096;
    // SAFETY: by this function's contract.
    let size = unsafe { pointer.cast::<u32>().as_ref() };
    let size = *size.ok_or_else(|| null(call, argument))? as usize;
    if (T::FIRST..=MOST).contains(&size) {
        return Ok(size);
    }
    Err(Error::argument(
        call,
        format!(
            "size of {argument} is {size}; it had {} bytes at first, and has {} in this library",
            T::FIRST,
            size_of::<T>()
        ),
        "set size to sizeof the struct",
    ))
}

/// The structure as this library knows it: what the caller's has not is 0.
///
/// # Safety
/// As for [`size_of_given`]. All bits zero is a value of the type.
unsafe fn given<T: Sized32>(call: &str, argument: &str, pointer: *const T) -> Result<T> {
    // SAFETY: by this function's contract.
    let size = unsafe { size_of_given(call, argument, pointer) }?;
    // SAFETY: as above: so many bytes can be read.
    let bytes = unsafe { slice::from_raw_parts(pointer.cast::<u8>(), size) };
    let (known, beyond) = bytes.split_at(size.min(size_of::<T>()));
    if let Some(at) = beyond.iter().position(|&byte| byte != 0) {
        return Err(Error::new(
            crate::Source::Argument,
            libc::E2BIG,
            call,
            format!(
                "byte {} of {argument} is not 0, and this library knows {} bytes",
                known.len() + at,
                known.len()
            ),
            "the program was built for a later libibgda: leave what is new at 0, or install that one",
        ));
    }
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: no more bytes than the value has, all of them set before it is read.
    Ok(unsafe {
        ptr::copy_nonoverlapping(known.as_ptr(), value.as_mut_ptr().cast(), known.len());
        value.assume_init()
    })
}

fn bdf(call: &str, text: &str) -> Result<Bdf> {
    text.parse()
        .map_err(|error: crate::ParseBdfError| Error::argument(call, error.to_string(), ""))
}

fn access(call: &str, bits: u32) -> Result<Access> {
    Access::from_bits(bits).ok_or_else(|| {
        let unknown = bits & !Access::all().bits();
        Error::argument(
            call,
            format!("access {bits:#x} has the unknown bits {unknown:#x}"),
            "use IBGDA_ACCESS_*",
        )
    })
}

fn destroy<T: handles::Object>(call: &str, argument: &str, handle: *mut T) -> c_int {
    finish(handles::take(call, argument, handle).map(drop))
}

/// The sentence of the calling thread's last error: what failed, why, what to do. Valid until its next error.
#[unsafe(no_mangle)]
pub extern "C" fn ibgda_last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|last| last.as_ptr())
}

/// Writes `text` into `buffer`, terminated and cut to `length`.
///
/// # Safety
/// `buffer` is null or has `length` bytes.
unsafe fn write_text(call: &str, text: &str, buffer: *mut c_char, length: usize) -> Result<()> {
    if buffer.is_null() || length == 0 {
        return Err(null(call, "buffer"));
    }
    let bytes = text.len().min(length - 1);
    // SAFETY: `bytes` + 1 is at most `length`.
    unsafe {
        ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, bytes);
        *buffer.add(bytes) = 0;
    }
    Ok(())
}

/// A device call's status in words, written into `buffer` and terminated, cut to `length`. EINVAL: no buffer.
///
/// # Safety
/// `buffer` has `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_status_text(
    status: u32,
    buffer: *mut c_char,
    length: usize,
) -> c_int {
    const CALL: &str = "ibgda_status_text";
    // SAFETY: by this function's contract.
    finish(unsafe { write_text(CALL, &Status(status).to_string(), buffer, length) })
}

/// Binds a NIC and a GPU at the broker, opens the NIC, and takes the route that is asked for or the best that works
/// (ibgda_route_report says why not a better one). Errors as IBGDA_IOC_BIND, if a route was asked for that needs the
/// broker; ENETDOWN: port not active; EINVAL: no such route; EAGAIN: no thread for route cpu-doorbell or proxy.
///
/// # Safety
/// The arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_open(
    attr: *const ibgda_open_attr,
    context: *mut *mut ibgda_context,
) -> c_int {
    const CALL: &str = "ibgda_open";
    let open = || {
        // SAFETY: by this function's contract.
        let attr = unsafe { given(CALL, "attr", attr) }?;
        if attr.reserved != 0 {
            return Err(Error::argument(
                CALL,
                format!("reserved is {:#x}", attr.reserved),
                "set it to 0",
            ));
        }
        // SAFETY: as above.
        let (nic, gpu) = unsafe { (text(CALL, "nic", attr.nic)?, text(CALL, "gpu", attr.gpu)?) };
        let gpu = bdf(CALL, gpu)?;
        let port = u8::try_from(attr.port).map_err(|_| {
            Error::argument(
                CALL,
                format!("there is no port {}", attr.port),
                "ports count from 1",
            )
        })?;
        let context = Context::open(&OpenOptions {
            nic: nic.to_owned(),
            gpu,
            port,
            route: route(CALL, attr.route)?,
        })?;
        handles::give(CALL, ibgda_context(context))
    };
    // SAFETY: by this function's contract.
    finish(unsafe { put(CALL, "context", context, open) })
}

/// Closes a context. What was made from it lives on until it is destroyed itself.
///
/// # Safety
/// The context is null or of this library, and not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_close(context: *mut ibgda_context) -> c_int {
    destroy("ibgda_close", "context", context)
}

/// Joins the NIC again after it was lost, waiting for it for at most `patience_ms`. No other thread may use the context.
/// EAGAIN, EHOSTDOWN: not back; ENETDOWN: back, but its port is not active yet; EACCES: no longer allowed; EINVAL: not
/// lost; EPERM: a forked child. If it fails, it may be called again.
///
/// # Safety
/// The context is null or of this library, and no other thread uses it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_rebind(context: *mut ibgda_context, patience_ms: u64) -> c_int {
    let patience = Duration::from_millis(patience_ms);
    finish(handles::alone(
        "ibgda_rebind",
        "context",
        context,
        |context| context.0.rebind(patience),
    ))
}

/// Reads the broker's status page.
///
/// # Safety
/// The arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_get_state(
    context: *const ibgda_context,
    state: *mut ibgda_session_state,
) -> c_int {
    const CALL: &str = "ibgda_get_state";
    let get = || {
        let state = borrow(CALL, "context", context)?.0.state();
        if state.state == 0 {
            return Err(crate::worker::of_the_parent(CALL));
        }
        Ok(ibgda_session_state {
            state: state.state,
            generation: state.generation,
            reason: state.reason,
            reserved: 0,
            changed_ns: state.changed_ns,
        })
    };
    // SAFETY: by this function's contract.
    finish(unsafe { put(CALL, "state", state, get) })
}

/// Makes memory usable by the NIC. `access`: IBGDA_ACCESS_*, and IBGDA_MAP_ROUND. EINVAL: zero, or not 4 KiB-aligned (the
/// error says how to round); EFAULT: not mapped; ENOMEM: RLIMIT_MEMLOCK.
///
/// # Safety
/// The memory stays mapped until ibgda_unmap_device; the other arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_map_device(
    context: *mut ibgda_context,
    ptr: *mut c_void,
    length: usize,
    access: u32,
    mr: *mut *mut ibgda_mr,
) -> c_int {
    const CALL: &str = "ibgda_map_device";
    let map = || {
        let context = borrow(CALL, "context", context)?;
        let rounding = if access & IBGDA_MAP_ROUND == 0 {
            Rounding::Exact
        } else {
            Rounding::Outward
        };
        let access = self::access(CALL, access & !IBGDA_MAP_ROUND)?;
        // SAFETY: by this function's contract.
        let region = unsafe { context.0.map_device(ptr.cast(), length, access, rounding) }?;
        handles::give(CALL, ibgda_mr(region))
    };
    // SAFETY: by this function's contract.
    finish(unsafe { put(CALL, "mr", mr, map) })
}

/// Takes the NIC's right to the memory back.
///
/// # Safety
/// The region is null or of this library, and not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_unmap_device(mr: *mut ibgda_mr) -> c_int {
    destroy("ibgda_unmap_device", "mr", mr)
}

/// Address, length and keys, for kernels and peers.
///
/// # Safety
/// The arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_mr_region(mr: *const ibgda_mr, region: *mut ibgda_region) -> c_int {
    const CALL: &str = "ibgda_mr_region";
    // SAFETY: by this function's contract.
    finish(unsafe {
        put(CALL, "region", region, || {
            Ok(borrow(CALL, "mr", mr)?.0.region())
        })
    })
}

/// Creates a completion queue of `entries` entries, a power of two up to 32768. It serves one work queue.
///
/// # Safety
/// The arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_create_cq(
    context: *mut ibgda_context,
    entries: u32,
    cq: *mut *mut ibgda_host_cq,
) -> c_int {
    const CALL: &str = "ibgda_create_cq";
    let create = || {
        let queue = borrow(CALL, "context", context)?.0.create_cq(entries)?;
        handles::give(CALL, ibgda_host_cq(queue))
    };
    // SAFETY: by this function's contract.
    finish(unsafe { put(CALL, "cq", cq, create) })
}

/// Destroys a completion queue, or lets its QP be the last to hold it. A thread in ibgda_cq_wait_event gets ECANCELED.
///
/// # Safety
/// The queue is null or of this library, and not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_destroy_cq(cq: *mut ibgda_host_cq) -> c_int {
    finish(handles::take("ibgda_destroy_cq", "cq", cq).map(|cq| cq.0.cancel_waits()))
}

/// What a kernel polls. Valid as long as the queue, or a QP that uses it.
///
/// # Safety
/// The arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_cq_device_handle(
    cq: *const ibgda_host_cq,
    handle: *mut *mut ibgda_cq,
) -> c_int {
    const CALL: &str = "ibgda_cq_device_handle";
    // SAFETY: by this function's contract.
    finish(unsafe {
        put(CALL, "handle", handle, || {
            Ok(borrow(CALL, "cq", cq)?.0.device_handle())
        })
    })
}

fn qp_options(call: &str, attr: &ibgda_qp_attr) -> Result<QueuePairOptions> {
    let unknown = attr.mode & !(IBGDA_SHARED | IBGDA_BLUEFLAME);
    let reserved = attr.reserved | attr.reserved1;
    if unknown != 0 || reserved != 0 {
        return Err(Error::argument(
            call,
            format!(
                "mode {:#x} has the bits {unknown:#x}, which are not the caller's, and reserved is {reserved:#x}",
                attr.mode
            ),
            "mode is 0, or IBGDA_SHARED and IBGDA_BLUEFLAME, reserved 0; route and CQ add their own bits",
        ));
    }
    let defaults = QueuePairOptions::default();
    let small = |name: &str, value: u32, default: u8, most: u8| match value {
        0 => Ok(default),
        IBGDA_NO_RETRIES if name != "ack_timeout" => Ok(0),
        value => u8::try_from(value)
            .ok()
            .filter(|value| *value <= most)
            .ok_or_else(|| {
                let at_most = format!("it is {most} at the most");
                Error::argument(call, format!("{name} is {value}"), at_most)
            }),
    };
    Ok(QueuePairOptions {
        send_depth: match attr.send_depth {
            0 => defaults.send_depth,
            depth => depth,
        },
        recv_depth: attr.recv_depth,
        access: access(call, attr.access)?,
        shared: attr.mode & IBGDA_SHARED != 0,
        blueflame: attr.mode & IBGDA_BLUEFLAME != 0,
        post_timeout: match attr.post_timeout_ns {
            0 => defaults.post_timeout,
            ns => Duration::from_nanos(ns),
        },
        memory: memory_of(call, attr.memory)?,
        ack_timeout: small("ack_timeout", attr.ack_timeout, defaults.ack_timeout, 31)?,
        retry_count: small("retry_count", attr.retry_count, defaults.retry_count, 7)?,
        rnr_retry: small("rnr_retry", attr.rnr_retry, defaults.rnr_retry, 6)?,
    })
}

/// Creates a queue pair with a doorbell page of its own. `recv_cq` is null exactly when attr's recv_depth is 0. EINVAL:
/// depths, or a CQ that is too small; EBUSY: a CQ that serves another queue; EOPNOTSUPP: IBGDA_BLUEFLAME, where writes do
/// not combine; also those of IBGDA_IOC_DOORBELL_IMPORT and IBGDA_IOC_QUEUE_ALLOC, and firmware's.
///
/// # Safety
/// The arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_create_qp(
    context: *mut ibgda_context,
    attr: *const ibgda_qp_attr,
    send_cq: *const ibgda_host_cq,
    recv_cq: *const ibgda_host_cq,
    qp: *mut *mut ibgda_host_qp,
) -> c_int {
    const CALL: &str = "ibgda_create_qp";
    let create = || {
        let context = borrow(CALL, "context", context)?;
        // SAFETY: by this function's contract.
        let attr = unsafe { given(CALL, "attr", attr) }?;
        let send_cq = borrow(CALL, "send_cq", send_cq)?;
        let recv_cq = match recv_cq.is_null() {
            true => None,
            false => Some(borrow(CALL, "recv_cq", recv_cq)?),
        };
        let options = qp_options(CALL, &attr)?;
        let pair = context
            .0
            .create_qp(&options, &send_cq.0, recv_cq.as_ref().map(|cq| &cq.0))?;
        handles::give(CALL, ibgda_host_qp(pair, gpu_of(&context.0)))
    };
    // SAFETY: by this function's contract.
    finish(unsafe { put(CALL, "qp", qp, create) })
}

/// Destroys a queue pair.
///
/// # Safety
/// The QP is null or of this library, and not used again, by a kernel neither.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_destroy_qp(qp: *mut ibgda_host_qp) -> c_int {
    destroy("ibgda_destroy_qp", "qp", qp)
}

/// What the peer needs to connect to this QP: IBGDA_ADDRESS_BYTES bytes, to carry by any means.
///
/// # Safety
/// The QP is null or valid, the address null or of IBGDA_ADDRESS_BYTES bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_qp_address(qp: *const ibgda_host_qp, address: *mut u8) -> c_int {
    const CALL: &str = "ibgda_qp_address";
    // SAFETY: by this function's contract.
    finish(unsafe {
        put(
            CALL,
            "address",
            address.cast::<[u8; ADDRESS_BYTES]>(),
            || Ok(borrow(CALL, "qp", qp)?.0.address().to_bytes()),
        )
    })
}

/// Joins a QP to the peer whose address this is. EINVAL: not an address, and why; EISCONN: connected before.
///
/// # Safety
/// The QP is null or valid, the address null or of `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_qp_connect(
    qp: *mut ibgda_host_qp,
    address: *const c_void,
    length: usize,
) -> c_int {
    const CALL: &str = "ibgda_qp_connect";
    let connect = || {
        let qp = borrow(CALL, "qp", qp)?;
        if address.is_null() {
            return Err(null(CALL, "address"));
        }
        // An address has 64 bytes: no more of a longer one needs to be readable.
        // SAFETY: by this function's contract.
        let bytes =
            unsafe { slice::from_raw_parts(address.cast::<u8>(), length.min(ADDRESS_BYTES + 1)) };
        qp.0.connect(&QpAddress::from_bytes(bytes)?)
    };
    finish(connect())
}

/// Stops a QP: requests under way and later ones are flushed, each with an error completion.
///
/// # Safety
/// The QP is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_qp_stop(qp: *mut ibgda_host_qp) -> c_int {
    finish(borrow("ibgda_qp_stop", "qp", qp).and_then(|qp| qp.0.stop()))
}

/// What a kernel posts with. Valid as long as the QP; one thread at a time may use it, unless it is shared. Its `mode`
/// says what template argument the device calls need.
///
/// # Safety
/// The arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_qp_device_handle(
    qp: *const ibgda_host_qp,
    handle: *mut *mut ibgda_qp,
) -> c_int {
    const CALL: &str = "ibgda_qp_device_handle";
    // SAFETY: by this function's contract.
    finish(unsafe {
        put(CALL, "handle", handle, || {
            Ok(borrow(CALL, "qp", qp)?.0.device_handle())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> String {
        // SAFETY: the message is this thread's own, and no other error happens before it is copied.
        unsafe { CStr::from_ptr(ibgda_last_error()) }
            .to_string_lossy()
            .into_owned()
    }

    #[test]
    fn null_is_refused_by_every_function_and_named() {
        let (mut context, mut mr, mut cq, mut qp) = (
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
        );
        // SAFETY: every argument is null or valid.
        let results = unsafe {
            [
                ("attr", ibgda_open(ptr::null(), &mut context)),
                ("context", ibgda_open(ptr::null(), ptr::null_mut())),
                ("context", ibgda_close(ptr::null_mut())),
                ("context", ibgda_rebind(ptr::null_mut(), 0)),
                (
                    "context",
                    ibgda_map_device(ptr::null_mut(), ptr::null_mut(), 4096, 0, &mut mr),
                ),
                ("mr", ibgda_unmap_device(ptr::null_mut())),
                ("context", ibgda_create_cq(ptr::null_mut(), 16, &mut cq)),
                ("cq", ibgda_destroy_cq(ptr::null_mut())),
                (
                    "context",
                    ibgda_create_qp(
                        ptr::null_mut(),
                        ptr::null(),
                        ptr::null(),
                        ptr::null(),
                        &mut qp,
                    ),
                ),
                ("qp", ibgda_destroy_qp(ptr::null_mut())),
                ("qp", ibgda_qp_connect(ptr::null_mut(), ptr::null(), 64)),
                ("qp", ibgda_qp_stop(ptr::null_mut())),
                ("address", ibgda_qp_address(ptr::null(), ptr::null_mut())),
                (
                    "handle",
                    ibgda_qp_device_handle(ptr::null(), ptr::null_mut()),
                ),
                (
                    "handle",
                    ibgda_cq_device_handle(ptr::null(), ptr::null_mut()),
                ),
                ("region", ibgda_mr_region(ptr::null(), ptr::null_mut())),
                ("state", ibgda_get_state(ptr::null(), ptr::null_mut())),
            ]
        };
        for (argument, errno) in results {
            assert_eq!(errno, libc::EINVAL, "{argument}");
        }
        assert!(context.is_null() && mr.is_null() && cq.is_null() && qp.is_null());
        // SAFETY: as above.
        unsafe { ibgda_qp_stop(ptr::null_mut()) };
        assert_eq!(message(), "ibgda_qp_stop: qp is NULL");
    }

    #[test]
    fn a_struct_of_no_possible_size_is_refused() {
        let attr = ibgda_open_attr {
            size: 8,
            port: 1,
            nic: c"mlx5_0".as_ptr(),
            gpu: c"0000:65:00.0".as_ptr(),
            route: IBGDA_ROUTE_AUTO,
            reserved: 0,
        };
        let mut context = ptr::null_mut();
        // SAFETY: the arguments are valid.
        assert_eq!(unsafe { ibgda_open(&attr, &mut context) }, libc::EINVAL);
        assert!(message().contains("size of attr is 8"), "{}", message());
        let attr = ibgda_open_attr { size: 4097, ..attr };
        // SAFETY: as above; nothing is read behind the size.
        assert_eq!(unsafe { ibgda_open(&attr, &mut context) }, libc::EINVAL);
        let attr = ibgda_open_attr {
            size: size_of::<ibgda_open_attr>() as u32,
            gpu: c"gpu0".as_ptr(),
            ..attr
        };
        // SAFETY: as above.
        assert_eq!(unsafe { ibgda_open(&attr, &mut context) }, libc::EINVAL);
        assert!(
            message().contains("\"gpu0\" is not a PCI function"),
            "{}",
            message()
        );
    }

    /// A struct of the first version, one of this, and longer ones.
    #[test]
    fn structs_of_other_versions_are_taken_if_they_ask_nothing_unknown() {
        #[repr(C)]
        struct Later {
            attr: ibgda_open_attr,
            more: [u8; 8],
        }
        let mut later = Later {
            attr: ibgda_open_attr {
                size: ibgda_open_attr::FIRST as u32,
                port: 1,
                nic: c"mlx5_0".as_ptr(),
                gpu: c"0000:65:00.0".as_ptr(),
                route: u32::MAX,
                reserved: u32::MAX,
            },
            more: [0; 8],
        };
        let read = |later: &Later| {
            // SAFETY: the struct has as many bytes as its size says.
            unsafe {
                given(
                    "open",
                    "attr",
                    (&raw const *later).cast::<ibgda_open_attr>(),
                )
            }
        };
        let first = read(&later).expect("of the first version");
        assert_eq!((first.port, first.route, first.reserved), (1, 0, 0));
        later.attr.size = size_of::<ibgda_open_attr>() as u32;
        assert_eq!(read(&later).expect("of this version").route, u32::MAX);
        later.attr.size = size_of::<Later>() as u32;
        assert_eq!(read(&later).expect("longer, and 0").route, u32::MAX);
        later.more[3] = 1;
        let error = read(&later).err().expect("asks for more than is known");
        assert_eq!(error.errno(), libc::E2BIG);
        assert!(error.to_string().contains("byte 35 of attr"), "{error}");
    }

    #[test]
    fn unknown_bits_are_named() {
        assert!(access("call", 7).is_ok());
        let error = access("call", 0x31).expect_err("unknown");
        assert_eq!(error.errno(), libc::EINVAL);
        assert!(error.to_string().contains("unknown bits 0x30"), "{error}");
    }

    #[test]
    fn status_text_is_cut_to_the_buffer() {
        let mut buffer = [1 as c_char; 8];
        // SAFETY: the buffer has 8 bytes.
        assert_eq!(unsafe { ibgda_status_text(0, buffer.as_mut_ptr(), 8) }, 0);
        // SAFETY: terminated by the call.
        assert_eq!(unsafe { CStr::from_ptr(buffer.as_ptr()) }, c"success");
    }
}
