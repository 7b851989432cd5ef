// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a function holds: numbered objects with owners, references and states.

pub mod dc;
pub mod device;
pub mod memic;
pub mod memory;
pub mod pacing;
pub mod qp;
pub mod queue;
pub mod signature;
pub mod table;
pub mod transition;

/// A user context: what a DevX user may name as its uid is the context's number.
#[derive(Debug, Clone, Copy)]
pub struct Uctx {
    /// Capabilities that were asked for.
    pub cap: u32,
}

/// An object that others refer to and that has nothing but an owner: UAR page, PD, XRC domain, transport domain.
#[derive(Debug, Clone, Copy)]
pub struct Owned {
    /// Owner; 0 is the driver.
    pub uid: u16,
    /// Objects that refer to this one.
    pub refs: u32,
}

impl Owned {
    /// An object that nothing refers to yet.
    pub fn new(uid: u16) -> Self {
        Self { uid, refs: 0 }
    }
}

impl table::Weigh for Uctx {}

impl table::Weigh for Owned {}
