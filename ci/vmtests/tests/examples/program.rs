// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the examples' tests have in common.

use ibgda_vmtests::machine::{Allowed, gpus, nics};

/// The policy's entries for the GPU with each NIC, as long as this lasts.
pub fn allow_all() -> Vec<Allowed> {
    let gpu = gpus()[0];
    nics()
        .into_iter()
        .map(|nic| Allowed::pair(gpu, nic))
        .collect()
}
