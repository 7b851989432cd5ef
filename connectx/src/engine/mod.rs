// SPDX-License-Identifier: MIT OR Apache-2.0
//! What runs by itself: a doorbell leads to a WQE, that to memory and packets, these to CQEs, EQEs and interrupts.

pub mod completion;
pub mod doorbell;
pub mod event;
pub mod memory;
pub mod receive;
pub mod requester;
pub mod responder;
pub mod timer;
pub mod wqe;

pub use requester::to_error;
