// SPDX-License-Identifier: GPL-2.0
//! Decisions of `ibgda.ko` that need no kernel. Kbuild compiles these files into the module; here they are tested on the
//! host.
#![no_std]

#[cfg(test)]
extern crate std;

#[path = "mod.rs"]
mod decisions;
pub use decisions::*;
