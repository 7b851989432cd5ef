// SPDX-License-Identifier: MIT OR Apache-2.0
//! The programs of `examples/`, as a reader runs them, and what they say when one thing is wrong.
//!
//! vm: --nics 2 --gpus 1

#[path = "examples/all_reduce.rs"]
mod all_reduce;
#[path = "examples/communicator.rs"]
mod communicator;
#[path = "examples/mpi.rs"]
mod mpi;
#[path = "examples/program.rs"]
mod program;
#[path = "examples/python.rs"]
mod python;
