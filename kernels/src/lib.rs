// SPDX-License-Identifier: MIT OR Apache-2.0
//! The device header of IBGDA as Rust sees it: the types that the host prepares for kernels, the status codes in words, and
//! the header's text for run-time compilers.
//!
//! Kernels include `ibgda_device.cuh`. A build script that compiles one finds its folder in `DEP_IBGDA_DEVICE_INCLUDE`.

pub mod kernels;
pub mod proxy_fault;
mod status;

pub use status::{Status, opcode_name};

/// The C types of `ibgda/types.h`, under their own names.
#[allow(
    missing_docs,
    non_camel_case_types,
    non_upper_case_globals,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]
pub mod abi {
    include!(concat!(env!("OUT_DIR"), "/types.rs"));
}

/// Every file of the header with the name it is included by, for NVRTC, which has no file system.
pub const HEADERS: [(&str, &str); 10] = [
    (
        "ibgda_device.cuh",
        include_str!("../include/ibgda_device.cuh"),
    ),
    ("ibgda/types.h", include_str!("../include/ibgda/types.h")),
    (
        "ibgda/platform.h",
        include_str!("../include/ibgda/platform.h"),
    ),
    ("ibgda/group.h", include_str!("../include/ibgda/group.h")),
    ("ibgda/wqe.h", include_str!("../include/ibgda/wqe.h")),
    ("ibgda/poll.h", include_str!("../include/ibgda/poll.h")),
    ("ibgda/post.h", include_str!("../include/ibgda/post.h")),
    ("ibgda/shared.h", include_str!("../include/ibgda/shared.h")),
    ("ibgda/checks.h", include_str!("../include/ibgda/checks.h")),
    ("ibgda/verbs.h", include_str!("../include/ibgda/verbs.h")),
];
