// SPDX-License-Identifier: MIT OR Apache-2.0
//! PCI config space.

/// Config space.
#[derive(Debug, Clone)]
pub struct ConfigSpace {}
