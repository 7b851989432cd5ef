// SPDX-License-Identifier: MIT OR Apache-2.0
//! Raw bindings to rdma-core's libibverbs and libmlx5, generated at build time from the installed `infiniband/verbs.h` and
//! `infiniband/mlx5dv.h`, static inline functions included; and in [`uverbs`] the kernel calls that rdma-core does not wrap.
//!
//! The published `rdma-sys` 0.3 is not used: its bindgen (0.59) does not build with a current libclang, and it knows
//! nothing of mlx5dv.
//!
//! A few verbs are macros in C over functions of another name; here they have that other name: `ibv_query_port` is
//! [`___ibv_query_port`].

pub mod uverbs;

#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unsafe_op_in_unsafe_fn,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    rustdoc::all
)]
mod bindings {
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}
pub use bindings::*;
