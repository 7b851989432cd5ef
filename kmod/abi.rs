// SPDX-License-Identifier: GPL-2.0

//! Definitions generated from `uapi/ibgda.h` and `glue.h`, and what the kernel's `kernel` crate wants to know of them.

/// The ioctl ABI.
#[allow(
    dead_code,
    missing_docs,
    non_camel_case_types,
    unreachable_pub,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]
pub(crate) mod uapi {
    use kernel::ffi;
    include!(concat!(env!("IBGDA_GENERATED"), "/uapi_abi.rs"));
}

/// Functions of `glue.c`.
#[allow(
    dead_code,
    improper_ctypes,
    missing_docs,
    non_camel_case_types,
    unreachable_pub,
    clippy::all
)]
pub(crate) mod glue {
    use kernel::{
        bindings::{
            dma_buf,
            file,
            page,
            pci_dev,
            pid, //
        },
        ffi, //
    };

    /// Opaque here: the rdma headers have no Rust definitions.
    #[repr(C)]
    pub struct ib_device([u8; 0]);

    include!(concat!(env!("IBGDA_GENERATED"), "/glue_abi.rs"));
}

use crate::decisions::{
    bdf::Bdf,
    life::NotReady, //
};
use kernel::{
    error::code::*,
    prelude::*,
    transmute::{
        AsBytes,
        FromBytes, //
    }, //
};

/// An argument of an ioctl.
///
/// # Safety
///
/// The type must begin with its `__u32 size`, have no padding, and be valid for any bytes.
pub(crate) unsafe trait Argument: Copy + Default + 'static {
    /// Bytes of the structure's first version.
    const FIRST: usize;
    /// The `flags` field, which must be 0; 0 for a structure without one.
    fn flags(&self) -> u32;
}

/// Implements what an argument needs, given its first size, and checks that it has no padding.
macro_rules! arguments {
    ($($name:ident: $first:literal, $flags:expr;)*) => {$(
        const _: () = assert!(size_of::<uapi::$name>() >= $first && size_of::<uapi::$name>() % 8 == 0);

        // SAFETY: Integers and arrays of integers, laid out without padding (the user-space crate asserts the same).
        unsafe impl FromBytes for uapi::$name {}
        // SAFETY: As above.
        unsafe impl AsBytes for uapi::$name {}
        // SAFETY: `size` comes first in each.
        unsafe impl Argument for uapi::$name {
            const FIRST: usize = $first;
            fn flags(&self) -> u32 {
                let flags: fn(&Self) -> u32 = $flags;
                flags(self)
            }
        }
    )*};
}

arguments! {
    ibgda_info: 40, |a| a.flags;
    ibgda_bind: 136, |a| a.flags | a.reserved;
    ibgda_doorbell_import: 40, |a| a.flags;
    ibgda_queue_alloc: 40, |a| a.flags | a.reserved;
    ibgda_populate: 16, |_| 0;
    ibgda_status_map: 16, |a| a.flags;
    ibgda_release: 8, |_| 0;
    ibgda_eventfd: 8, |_| 0;
    ibgda_events: 24, |a| a.flags;
}

// SAFETY: Integers without padding.
unsafe impl AsBytes for uapi::ibgda_event {}

impl kernel::fmt::Display for Bdf {
    fn fmt(&self, f: &mut kernel::fmt::Formatter<'_>) -> kernel::fmt::Result {
        core::fmt::Display::fmt(self, f)
    }
}

impl From<NotReady> for Error {
    fn from(why: NotReady) -> Error {
        match why {
            NotReady::Unbound => ENOTCONN,
            NotReady::Lost => ENOLINK,
        }
    }
}
