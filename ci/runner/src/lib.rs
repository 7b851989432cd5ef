// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the two ends of `ci/vm` share: the supervisor on the host (`ibgda-vm-run`) and the guest's first process
//! (`ibgda-vm-agent`).

pub mod guest;
pub mod host;
pub mod protocol;
