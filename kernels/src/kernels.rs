// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels of `library/`, for examples and tests: on a GPU, or on CPU threads.

#[cfg(feature = "cpu-kernels")]
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod gpu;
#[cfg(feature = "cuda")]
pub mod nvrtc;

/// Their source, which includes the device header.
pub const SOURCE: &str = include_str!("../library/transfer.cu");
