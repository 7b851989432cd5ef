// SPDX-License-Identifier: MIT OR Apache-2.0
//! A small communicator on libibgda, in the shape of a library: what an author of one has to write besides the data path.
//!
//! - [`Team`]: ranks, in one process or many, on one host or several, meet by TCP and hand each other what they have to say
//!   (region keys, QP addresses). The connection stays: by it a rank hears at once which rank is gone, and why.
//! - [`Communicator`]: a window of memory that peers write into, and a QP to each of them. [`Communicator::all_to_all`] and
//!   [`Communicator::barrier`] are kernels; others are run by [`Communicator::run`] (`examples/all-reduce`).
//! - [`Processor`]: kernels run on a GPU, loaded at run time, or on CPU threads, from one source.
//!
//! Every wait has an end, and looks meanwhile at the NIC's state, at errors of what was sent, and at whether a rank is gone.
//!
//! ```text
//! ibgda-communicator --gpu 0000:65:00.0 --nics "mlx5_0 mlx5_1" --ranks 4              # four processes here
//! ibgda-communicator --gpu … --nics mlx5_0 --ranks 2 --rank 0 --meet 10.0.0.1:7000    # on one host
//! ibgda-communicator --gpu … --nics mlx5_0 --ranks 2 --rank 1 --meet 10.0.0.1:7000    # on another
//! ```

mod communicator;
mod coordinator;
mod error;
mod frame;
pub mod launch;
mod processor;
mod team;
mod view;

pub use communicator::{Communicator, Options};
pub use coordinator::Coordinator;
pub use error::{Error, Result};
pub use processor::{Kernel, Loaded, Processor};
pub use team::Team;
pub use view::{HEADER_BYTES, MOST_RANKS, View};

/// The text of `kernels/team.cuh`, for sources that NVRTC compiles.
pub const TEAM_HEADER: &str = include_str!("../kernels/team.cuh");
