// SPDX-License-Identifier: MIT OR Apache-2.0
//! What runs by itself: a doorbell leads to a WQE, that to memory and packets, these to CQEs, EQEs and interrupts.

mod answers;
mod atomic;
pub mod blueflame;
mod completing;
pub mod completion;
pub mod compression;
mod datagram;
pub mod dc;
pub mod doorbell;
pub mod event;
pub mod held;
mod indirect;
mod keys;
pub mod lent;
pub mod memory;
pub mod odp;
mod pace;
pub mod receive;
mod receive_queue;
pub mod requester;
pub mod responder;
mod signature;
pub mod timer;
mod window;
pub mod wqe;

pub use completing::to_error;
