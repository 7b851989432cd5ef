// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels of `library/`, for the `ibgda` command, examples and tests: on a GPU, or on CPU threads.

#[cfg(feature = "cpu-kernels")]
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod gpu;
#[cfg(feature = "cuda")]
pub mod nvrtc;
pub mod steps;

/// Their source, which includes the device header.
pub const SOURCE: &str = concat!(
    include_str!("../library/requests.h"),
    include_str!("../library/transfer.cu")
);

/// What the kernels of jobs and streams are given, by the names of `library/requests.h`.
#[allow(
    missing_docs,
    non_camel_case_types,
    non_upper_case_globals,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]
pub mod requests {
    include!(concat!(env!("OUT_DIR"), "/requests.rs"));
}
