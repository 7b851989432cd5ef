// SPDX-License-Identifier: MIT OR Apache-2.0
//! The whole way of a GPU-initiated RDMA WRITE in one program.

fn main() {}
