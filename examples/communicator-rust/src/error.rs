// SPDX-License-Identifier: MIT OR Apache-2.0
//! What can go wrong between ranks.

use std::io;

/// An error of a communicator.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another rank has failed, or ended: its own words, or what was seen of it.
    #[error("rank {rank} is gone: {why}")]
    RankGone {
        /// Which.
        rank: u16,
        /// Why.
        why: String,
    },
    /// The ranks did not meet.
    #[error("{what}: {why}")]
    Meeting {
        /// What was being done.
        what: String,
        /// Why it failed, and what to do.
        why: String,
    },
    /// A kernel of this rank ended in an error.
    #[error("{kernel}, {act} rank {peer}: {status}")]
    Kernel {
        /// Its name.
        kernel: &'static str,
        /// What it was doing.
        act: &'static str,
        /// With which rank.
        peer: u32,
        /// The status, and the NIC's first error if there is one.
        status: String,
    },
    /// A value that makes no sense.
    #[error("{0}")]
    Argument(String),
    /// libibgda's.
    #[error(transparent)]
    Library(#[from] ibgda::Error),
    /// CUDA's, of loading or running a kernel.
    #[error("{0}")]
    Gpu(String),
}

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

pub(crate) fn meeting(what: impl Into<String>, error: &io::Error) -> Error {
    Error::Meeting {
        what: what.into(),
        why: error.to_string(),
    }
}
