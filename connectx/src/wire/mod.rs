// SPDX-License-Identifier: MIT OR Apache-2.0
//! What joins functions: packets, ports and the fabric between them.

pub mod fabric;
pub mod packet;
pub mod payload;
pub mod port;

pub use fabric::Fabric;
