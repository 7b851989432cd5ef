// SPDX-License-Identifier: MIT OR Apache-2.0
//! Hardware in the loop (docs/hil.md): a GPU outside the virtual machine posts and polls on queues that the stock mlx5 driver
//! made inside, by a doorbell page that `ibgda.ko` granted. Everything here goes through libibgda's public calls; only where
//! kernels run differs from any program of the library's users.

pub mod errors;
pub mod latency;
mod list;
pub mod loss;
pub mod machine;
pub mod many;
pub mod rig;
pub mod verbs;

pub use list::List;
pub use rig::{Link, Where, connect};
