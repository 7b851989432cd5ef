// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lists of device calls that a kernel runs: `library/steps.cu`.

#[cfg(feature = "cuda")]
use super::gpu::{Error, Origin, load_one};
#[cfg(feature = "cuda")]
use cudarc::driver::{CudaContext, CudaModule};
#[cfg(feature = "cuda")]
use std::sync::Arc;

/// The C types of `library/steps.h`, under their own names.
#[allow(
    missing_docs,
    non_camel_case_types,
    non_upper_case_globals,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]
pub mod abi {
    include!(concat!(env!("OUT_DIR"), "/steps.rs"));
}

/// The kernel.
pub const KERNEL: &str = "ibgda_kernel_steps";

/// The same without the device header's look at the status page, for CPU threads only: a fault that a test must see.
pub const BLIND_KERNEL: &str = "ibgda_kernel_steps_blind";

/// Its source with what it includes of its own.
pub const SOURCE: &str = concat!(
    include_str!("../../library/steps.h"),
    include_str!("../../library/steps.cu")
);

/// What nvcc made of it when this crate was built.
#[cfg(feature = "cuda")]
pub const IMAGE: Option<&[u8]> = include!(concat!(env!("OUT_DIR"), "/steps-image.rs"));

/// The module for a GPU: nvcc's code if this build has it, else NVRTC's.
///
/// # Errors
/// Neither can be had, or the driver refuses it.
#[cfg(feature = "cuda")]
pub fn load(context: &Arc<CudaContext>) -> Result<(Arc<CudaModule>, Origin), Error> {
    let origin = match IMAGE {
        Some(_) => Origin::Nvcc,
        None => Origin::Nvrtc,
    };
    Ok((load_one(context, origin, IMAGE, SOURCE)?, origin))
}
