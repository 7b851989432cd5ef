// SPDX-License-Identifier: MIT OR Apache-2.0
//! The C ABI of heaps.

use super::{
    IBGDA_MAP_ROUND, access, borrow, destroy, finish, gpu::gpu_of, handles, ibgda_context, null,
    put,
};
use crate::{Bdf, Error, Heap, Rounding, Source};
use ibgda_device::abi::ibgda_region;
use std::ffi::{c_int, c_void};

/// One registered region, from which buffers are taken.
pub struct ibgda_heap(pub(super) Heap, pub(super) Bdf);

impl handles::Object for ibgda_heap {
    const WHAT: &'static str = "heap";
}

/// Registers `length` bytes, from which buffers are taken afterwards: of the caller's memory at `memory`, as
/// ibgda_map_device does, or with NULL of memory that the library allocates. `access`: IBGDA_ACCESS_*, which all buffers
/// have. Errors as ibgda_map_device.
///
/// # Safety
/// The memory is NULL, or stays mapped until ibgda_destroy_heap; the other arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_create_heap(
    context: *mut ibgda_context,
    memory: *mut c_void,
    length: usize,
    access: u32,
    heap: *mut *mut ibgda_heap,
) -> c_int {
    const CALL: &str = "ibgda_create_heap";
    let create = || {
        let context = borrow(CALL, "context", context)?;
        let rounding = match access & IBGDA_MAP_ROUND {
            0 => Rounding::Exact,
            _ => Rounding::Outward,
        };
        let access = self::access(CALL, access & !IBGDA_MAP_ROUND)?;
        let region = if memory.is_null() {
            context.0.alloc(length, access)
        } else {
            // SAFETY: by this function's contract.
            unsafe {
                context
                    .0
                    .map_device(memory.cast(), length, access, rounding)
            }
        }?;
        handles::give(CALL, ibgda_heap(Heap::new(region), gpu_of(&context.0)))
    };
    // SAFETY: by this function's contract.
    finish(unsafe { put(CALL, "heap", heap, create) })
}

/// Ends a heap. EBUSY: buffers of it were not given back, and it is as before.
///
/// # Safety
/// The heap is null or of this library, and not used again unless this fails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_destroy_heap(heap: *mut ibgda_heap) -> c_int {
    const CALL: &str = "ibgda_destroy_heap";
    let usage = borrow(CALL, "heap", heap).map(|heap| heap.0.usage());
    match usage {
        Ok(usage) if usage.buffers > 0 => finish(Err(Error::new(
            Source::Argument,
            libc::EBUSY,
            CALL,
            format!(
                "{} buffers of {} bytes are not given back",
                usage.buffers, usage.used
            ),
            "give them back with ibgda_heap_free first, when no request names them any more",
        ))),
        Ok(_) => destroy(CALL, "heap", heap),
        Err(error) => finish(Err(error)),
    }
}

/// Takes `bytes` bytes at an address that is a multiple of `align`, a power of two; both are at least 64 in effect. Any
/// number of threads may do so. EINVAL: zero, or no power of two; ENOMEM: there is no such room, and how much there is.
///
/// # Safety
/// The arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_heap_alloc(
    heap: *mut ibgda_heap,
    bytes: u64,
    align: u64,
    buffer: *mut ibgda_region,
) -> c_int {
    const CALL: &str = "ibgda_heap_alloc";
    // SAFETY: by this function's contract.
    finish(unsafe {
        put(CALL, "buffer", buffer, || {
            borrow(CALL, "heap", heap)?.0.take(bytes, align)
        })
    })
}

/// Gives a buffer back, when no request names it any more. EINVAL: no buffer of this heap begins there: it is another's,
/// or was given back before.
///
/// # Safety
/// The arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_heap_free(
    heap: *mut ibgda_heap,
    buffer: *const ibgda_region,
) -> c_int {
    const CALL: &str = "ibgda_heap_free";
    // SAFETY: by this function's contract.
    let buffer = unsafe { buffer.as_ref() };
    finish(match (borrow(CALL, "heap", heap), buffer) {
        (Err(error), _) => Err(error),
        (_, None) => Err(null(CALL, "buffer")),
        (Ok(heap), Some(buffer)) => heap.0.free(buffer.address),
    })
}

/// Address, length and keys of the whole heap.
///
/// # Safety
/// The arguments are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibgda_heap_region(
    heap: *const ibgda_heap,
    region: *mut ibgda_region,
) -> c_int {
    const CALL: &str = "ibgda_heap_region";
    // SAFETY: by this function's contract.
    finish(unsafe {
        put(CALL, "region", region, || {
            Ok(borrow(CALL, "heap", heap)?.0.region().region())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr;

    #[test]
    fn null_is_refused() {
        let mut region = ibgda_region::default();
        let mut heap = ptr::null_mut();
        // SAFETY: every argument is null or valid.
        let errnos = unsafe {
            [
                ibgda_create_heap(ptr::null_mut(), ptr::null_mut(), 4096, 0, &mut heap),
                ibgda_create_heap(ptr::null_mut(), ptr::null_mut(), 4096, 0, ptr::null_mut()),
                ibgda_destroy_heap(ptr::null_mut()),
                ibgda_heap_alloc(ptr::null_mut(), 64, 64, &mut region),
                ibgda_heap_alloc(ptr::null_mut(), 64, 64, ptr::null_mut()),
                ibgda_heap_free(ptr::null_mut(), &region),
                ibgda_heap_region(ptr::null(), &mut region),
            ]
        };
        assert_eq!(errnos, [libc::EINVAL; 7]);
        assert!(heap.is_null());
    }
}
