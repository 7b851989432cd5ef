// SPDX-License-Identifier: MIT OR Apache-2.0
//! The C ABI for kernels on a GPU: what they post with, where they see memory, what they have latched, and queues in
//! memory that is exported as a dma-buf, of a GPU above all.
//!
//! CUDA's driver is loaded by the first of these calls that needs it, and a GPU's primary context is used, which is that
//! of CUDA's run time.

use super::{
    borrow, destroy, finish, given, handles, ibgda_context, ibgda_cq_attr, ibgda_heap,
    ibgda_host_qp, ibgda_qp_attr, null, put, text, write_text,
};
use crate::{Bdf, Context, Error, ExportedMemory, Result, Source, processor::Processor};
use ibgda_device::abi::{ibgda_error, ibgda_qp};
use std::{
    ffi::{c_char, c_int, c_void},
    os::fd::BorrowedFd,
    ptr,
    sync::Arc,
};

/// In retry_count and rnr_retry of struct ibgda_qp_attr: none.
pub const IBGDA_NO_RETRIES: u32 = u32::MAX;

/// Memory for one queue, exported as a dma-buf.
pub struct ibgda_queue_memory(pub(super) Arc<ExportedMemory>);

impl handles::Object for ibgda_queue_memory {
    const WHAT: &'static str = "queue memory";
}

/// The GPU of that address, or `default`, of which a context was opened.
///
/// # Safety
/// As of [`text`], but it may be null.
unsafe fn which(call: &str, gpu: *const c_char, default: Bdf) -> Result<Bdf> {
    if gpu.is_null() {
        return Ok(default);
    }
    // SAFETY: by this function's contract.
    let name = unsafe { text(call, "gpu", gpu) }?;
    super::bdf(call, name)
}

#[cfg(feature = "cuda")]
fn processor(_call: &str, gpu: Bdf) -> Result<Arc<dyn Processor>> {
    Ok(Arc::new(crate::cuda::Gpu::open(gpu)?))
}

#[cfg(feature = "cuda")]
fn on_gpu(_call: &str, gpu: Bdf, length: usize) -> Result<Arc<ExportedMemory>> {
    ExportedMemory::on_gpu(&crate::cuda::Gpu::open(gpu)?, length)
}

#[cfg(not(feature = "cuda"))]
fn no_cuda<T>(call: &str, gpu: Bdf) -> Result<T> {
    Err(Error::new(
        Source::Argument,
        libc::ENODEV,
        format!("{call}, GPU {gpu}"),
        "this libibgda was built without CUDA",
        "build it with the feature cuda",
    ))
}

#[cfg(not(feature = "cuda"))]
fn processor(call: &str, gpu: Bdf) -> Result<Arc<dyn Processor>> {
    no_cuda(call, gpu)
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(call: &str, gpu: Bdf, _length: usize) -> Result<Arc<ExportedMemory>> {
    no_cuda(call, gpu)
}

/// What a kernel of a GPU posts with: a struct ibgda_qp in the GPU's memory, to be passed to kernels and not read by the
/// host. `gpu` is its PCI address, or NULL for the GPU that the context was opened with. The first call makes it, and
/// from then on kernels of that GPU alone use the QP; valid as long as the QP, which no kernel may outlast. ENODEV: no
/// CUDA, or no such GPU; EBUSY: another GPU has it; EPERM: NVIDIA's driver does not let this process have the doorbell,
/// and ibgda_last_error says what opens its gate; others of CUDA's.
///
/// # Safety
/// The arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_qp_device_handle_on(
    qp: *const ibgda_host_qp,
    gpu: *const c_char,
    handle: *mut *mut ibgda_qp,
) -> c_int {
    const CALL: &str = "ibgda_qp_device_handle_on";
    // SAFETY: by this function's contract.
    finish(unsafe {
        put(CALL, "handle", handle, || {
            let qp = borrow(CALL, "qp", qp)?;
            qp.0.check_ours(CALL)?;
            let there = qp.0.handle_of(&processor(CALL, which(CALL, gpu, qp.1)?)?)?;
            Ok(ptr::without_provenance_mut(there as usize))
        })
    })
}

/// Where a GPU sees the first byte of a heap whose memory the library has allocated, for kernels that read and write it
/// themselves; requests name it by the addresses of ibgda_heap_alloc all the same. `gpu` as of
/// ibgda_qp_device_handle_on. Valid as long as the heap. EINVAL: the memory is the caller's own, who registers it with
/// CUDA; EBUSY: it was asked for with another GPU; ENODEV, and CUDA's of registering it.
///
/// # Safety
/// The arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_heap_device_pointer_on(
    heap: *const ibgda_heap,
    gpu: *const c_char,
    pointer: *mut *mut c_void,
) -> c_int {
    const CALL: &str = "ibgda_heap_device_pointer_on";
    // SAFETY: by this function's contract.
    finish(unsafe {
        put(CALL, "pointer", pointer, || {
            let heap = borrow(CALL, "heap", heap)?;
            heap.0.check_ours(CALL)?;
            let processor = processor(CALL, which(CALL, gpu, heap.1)?)?;
            let there = heap.0.region().pointer_of(&processor)?;
            Ok(ptr::without_provenance_mut(there as usize))
        })
    })
}

/// The first error that kernels and threads have found of a QP: of its send queue, or else of its receive queue. Its
/// status is IBGDA_OK if there is none. Of a GPU's kernels it waits for those of the default stream.
///
/// # Safety
/// The arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_qp_error(
    qp: *const ibgda_host_qp,
    error: *mut ibgda_error,
) -> c_int {
    const CALL: &str = "ibgda_qp_error";
    // SAFETY: by this function's contract.
    finish(unsafe {
        put(CALL, "error", error, || {
            let qp = borrow(CALL, "qp", qp)?;
            qp.0.check_ours(CALL)?;
            let of_host = || {
                let recv = qp.0.recv_cq().and_then(|cq| cq.error());
                qp.0.send_cq().error().or(recv)
            };
            Ok(qp.0.error_on_gpu()?.or_else(of_host).unwrap_or_default())
        })
    })
}

/// An error in words, written into `buffer` and terminated, cut to `length`: which request of which QP failed, why, and
/// what to do. EINVAL: no error, or no buffer.
///
/// # Safety
/// The error is null or valid; `buffer` is null or has `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_error_text(
    error: *const ibgda_error,
    buffer: *mut c_char,
    length: usize,
) -> c_int {
    const CALL: &str = "ibgda_error_text";
    // SAFETY: by this function's contract.
    let error = unsafe { error.as_ref() }.ok_or_else(|| null(CALL, "error"));
    // SAFETY: as above.
    finish(error.and_then(|error| unsafe { write_text(CALL, &error.to_string(), buffer, length) }))
}

/// Bytes that the queues of a QP with such an attribute take, for its memory.
///
/// # Safety
/// The arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_qp_memory_bytes(
    attr: *const ibgda_qp_attr,
    bytes: *mut usize,
) -> c_int {
    const CALL: &str = "ibgda_qp_memory_bytes";
    // SAFETY: by this function's contract.
    finish(unsafe {
        put(CALL, "bytes", bytes, || {
            Ok(super::qp_options(CALL, &given(CALL, "attr", attr)?)?.memory_bytes())
        })
    })
}

/// Bytes that a CQ with such an attribute takes, for its memory.
///
/// # Safety
/// The arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_cq_memory_bytes(
    attr: *const ibgda_cq_attr,
    bytes: *mut usize,
) -> c_int {
    const CALL: &str = "ibgda_cq_memory_bytes";
    // SAFETY: by this function's contract.
    finish(unsafe {
        put(CALL, "bytes", bytes, || {
            Ok(super::cq_options(CALL, &given(CALL, "attr", attr)?)?.memory_bytes())
        })
    })
}

/// Allocates at least `length` bytes of a GPU's memory for one queue, and exports them as a dma-buf. `gpu` as of
/// ibgda_qp_device_handle_on. ENODEV: no CUDA, or no such GPU; EOPNOTSUPP: it exports none; others of CUDA's.
///
/// # Safety
/// The arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_alloc_queue_memory(
    context: *mut ibgda_context,
    gpu: *const c_char,
    length: usize,
    memory: *mut *mut ibgda_queue_memory,
) -> c_int {
    const CALL: &str = "ibgda_alloc_queue_memory";
    // SAFETY: by this function's contract.
    finish(unsafe {
        put(CALL, "memory", memory, || {
            let context = borrow(CALL, "context", context)?;
            context.0.check_usable("allocate queue memory")?;
            let gpu = which(CALL, gpu, gpu_of(&context.0))?;
            handles::give(CALL, ibgda_queue_memory(on_gpu(CALL, gpu, length)?))
        })
    })
}

/// The GPU that a context was opened with.
pub(super) fn gpu_of(context: &Context) -> Bdf {
    context.pair().gpu
}

/// Takes `length` bytes from byte `offset` of a dma-buf on, mapped at `address` for this process's processors, for one
/// queue whose requests threads of the host post; a GPU's kernels need memory of ibgda_alloc_queue_memory. The file may be
/// closed afterwards. EINVAL: offset, address or length are no multiples of 4096, address or length are zero, or the
/// address is of a GPU's memory; EBADF: no file.
///
/// # Safety
/// Those bytes are mapped there for reading and writing until the memory and the queue in it are destroyed, and nobody
/// else uses them; `memory` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_import_queue_memory(
    dmabuf: c_int,
    offset: u64,
    address: *mut c_void,
    length: usize,
    memory: *mut *mut ibgda_queue_memory,
) -> c_int {
    const CALL: &str = "ibgda_import_queue_memory";
    // SAFETY: by this function's contract.
    finish(unsafe {
        put(CALL, "memory", memory, || {
            let no_file = |errno: i32| {
                let what = format!("{CALL}, dma-buf {dmabuf}");
                Error::errno_with(Source::Argument, what, errno, "", "")
            };
            if dmabuf < 0 {
                return Err(no_file(libc::EBADF));
            }
            let file = BorrowedFd::borrow_raw(dmabuf).try_clone_to_owned();
            let file =
                file.map_err(|error| no_file(error.raw_os_error().unwrap_or(libc::EBADF)))?;
            let memory = ExportedMemory::mapped(file, offset, address.cast(), length)?;
            handles::give(CALL, ibgda_queue_memory(memory))
        })
    })
}

/// Lets go of queue memory. A queue in it keeps it.
///
/// # Safety
/// The memory is null or of this library, and not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_destroy_queue_memory(memory: *mut ibgda_queue_memory) -> c_int {
    destroy("ibgda_destroy_queue_memory", "memory", memory)
}

/// The memory of an attribute, which may have none.
pub(super) fn memory_of(
    call: &str,
    memory: *const ibgda_queue_memory,
) -> Result<Option<Arc<ExportedMemory>>> {
    if memory.is_null() {
        return Ok(None);
    }
    Ok(Some(Arc::clone(&borrow(call, "memory of attr", memory)?.0)))
}

#[cfg(test)]
mod tests {
    use super::super::ibgda_last_error;
    use super::*;
    use std::ffi::CStr;

    fn said(errno: c_int) -> (c_int, String) {
        // SAFETY: the message is this thread's own, and no other error happens before it is read.
        let text = unsafe { CStr::from_ptr(ibgda_last_error()) };
        (errno, text.to_string_lossy().into_owned())
    }

    #[test]
    fn null_is_refused_by_every_function_and_named() {
        let (mut handle, mut pointer, mut memory) =
            (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let (mut error, mut bytes, mut text) = (ibgda_error::default(), 0, [0; 8]);
        let (qp, cq) = (ibgda_qp_attr::default(), ibgda_cq_attr::default());
        let buffer = text.as_mut_ptr();
        // SAFETY: every argument is null or valid.
        let results = unsafe {
            [
                (
                    "qp",
                    said(ibgda_qp_device_handle_on(
                        ptr::null(),
                        ptr::null(),
                        &mut handle,
                    )),
                ),
                (
                    "handle",
                    said(ibgda_qp_device_handle_on(
                        ptr::null(),
                        ptr::null(),
                        ptr::null_mut(),
                    )),
                ),
                (
                    "heap",
                    said(ibgda_heap_device_pointer_on(
                        ptr::null(),
                        ptr::null(),
                        &mut pointer,
                    )),
                ),
                (
                    "pointer",
                    said(ibgda_heap_device_pointer_on(
                        ptr::null(),
                        ptr::null(),
                        ptr::null_mut(),
                    )),
                ),
                ("qp", said(ibgda_qp_error(ptr::null(), &mut error))),
                ("error", said(ibgda_qp_error(ptr::null(), ptr::null_mut()))),
                ("error", said(ibgda_error_text(ptr::null(), buffer, 8))),
                ("buffer", said(ibgda_error_text(&error, ptr::null_mut(), 8))),
                ("buffer", said(ibgda_error_text(&error, buffer, 0))),
                ("attr", said(ibgda_qp_memory_bytes(ptr::null(), &mut bytes))),
                ("bytes", said(ibgda_qp_memory_bytes(&qp, ptr::null_mut()))),
                ("attr", said(ibgda_cq_memory_bytes(ptr::null(), &mut bytes))),
                ("bytes", said(ibgda_cq_memory_bytes(&cq, ptr::null_mut()))),
                (
                    "context",
                    said(ibgda_alloc_queue_memory(
                        ptr::null_mut(),
                        ptr::null(),
                        1,
                        &mut memory,
                    )),
                ),
                (
                    "memory",
                    said(ibgda_alloc_queue_memory(
                        ptr::null_mut(),
                        ptr::null(),
                        1,
                        ptr::null_mut(),
                    )),
                ),
                (
                    "memory",
                    said(ibgda_import_queue_memory(
                        0,
                        0,
                        ptr::null_mut(),
                        1,
                        ptr::null_mut(),
                    )),
                ),
                ("memory", said(ibgda_destroy_queue_memory(ptr::null_mut()))),
            ]
        };
        for (argument, (errno, text)) in results {
            assert_eq!(errno, libc::EINVAL, "{text}");
            assert!(
                text.ends_with(&format!("{argument} is NULL")),
                "{argument}: {text}"
            );
        }
    }

    #[test]
    fn sizes_are_those_of_the_options_and_wrong_attributes_have_none() {
        let (mut bytes, mut other) = (0, 0);
        let qp = ibgda_qp_attr {
            send_depth: 16,
            recv_depth: 4,
            ..Default::default()
        };
        let cq = ibgda_cq_attr {
            entries: 16,
            ..Default::default()
        };
        // SAFETY: the arguments are valid.
        unsafe {
            assert_eq!(ibgda_qp_memory_bytes(&qp, &mut bytes), 0);
            assert_eq!(ibgda_cq_memory_bytes(&cq, &mut other), 0);
        }
        assert_eq!(bytes, 16 * 64 + 4 * 16 + 128);
        assert!(other > 16 * 64, "{other}");
        let number = 7_u64;
        for (attr, errno, words) in [
            (
                ibgda_qp_attr {
                    ack_timeout: 256,
                    ..qp
                },
                libc::EINVAL,
                "ack_timeout is 256",
            ),
            (
                ibgda_qp_attr {
                    ack_timeout: IBGDA_NO_RETRIES,
                    ..qp
                },
                libc::EINVAL,
                "ack_timeout",
            ),
            (
                ibgda_qp_attr {
                    retry_count: 300,
                    ..qp
                },
                libc::EINVAL,
                "retry_count is 300",
            ),
            (
                ibgda_qp_attr {
                    rnr_retry: 1 << 31,
                    ..qp
                },
                libc::EINVAL,
                "rnr_retry",
            ),
            (
                ibgda_qp_attr { reserved1: 9, ..qp },
                libc::EINVAL,
                "reserved is 0x9",
            ),
            (
                ibgda_qp_attr {
                    memory: (&raw const number).cast(),
                    ..qp
                },
                libc::EBADF,
                "memory of attr",
            ),
        ] {
            // SAFETY: as above; the memory is none, which the library is to say.
            let (found, text) = said(unsafe { ibgda_qp_memory_bytes(&attr, &mut bytes) });
            assert_eq!(found, errno, "{text}");
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn memory_that_is_none_is_refused() {
        let mut memory = ptr::null_mut();
        let page: *mut c_void = ptr::without_provenance_mut(0x10000);
        for (file, offset, address, length, errno) in [
            (-1, 0, page, 4096, libc::EBADF),
            (1 << 30, 0, page, 4096, libc::EBADF),
            (0, 0, ptr::null_mut(), 4096, libc::EINVAL),
            (0, 8, page, 4096, libc::EINVAL),
            (0, 0, page, 0, libc::EINVAL),
            (0, 0, page, 100, libc::EINVAL),
        ] {
            // SAFETY: nothing is made in it.
            let (found, text) = said(unsafe {
                ibgda_import_queue_memory(file, offset, address, length, &mut memory)
            });
            assert_eq!(found, errno, "{file}, {offset}, {length}: {text}");
        }
        assert!(memory.is_null());
    }
}
