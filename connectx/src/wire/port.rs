// SPDX-License-Identifier: MIT OR Apache-2.0
//! The InfiniBand port of a function.

/// Logical state of a port as the driver reads it (`hca_vport_context.vport_state`, `IB_PORT_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum PortState {
    /// No link.
    Down = 1,
    /// Configured by the subnet manager and usable.
    Active = 4,
}

/// Default subnet prefix of InfiniBand.
pub const SUBNET_PREFIX: u64 = 0xfe80_0000_0000_0000;
/// LID of the (built-in) subnet manager.
pub const SM_LID: u16 = 0x0001;
/// Entries in the GID table (encoding 0 in the capabilities).
pub const GIDS: usize = 8;
/// Entries in the P_Key table (encoding 0 in the capabilities).
pub const PKEYS: usize = 128;
/// The default partition, full member.
pub const DEFAULT_PKEY: u16 = 0xffff;

/// A port.
#[derive(Debug, Clone)]
pub struct Port {
    /// Local identifier, given by the subnet manager.
    pub lid: u16,
    /// GUID of the port; node and system image have the same.
    pub guid: u64,
    /// State.
    pub state: PortState,
}

impl Port {
    /// A port for tests of parts that do not care.
    #[cfg(test)]
    pub fn test() -> Self {
        Self {
            lid: 1,
            guid: 0x1122_3344_5566_7788,
            state: PortState::Active,
        }
    }

    /// The GID at `index`; only the first entry is set.
    pub fn gid(&self, index: usize) -> [u8; 16] {
        let mut gid = [0; 16];
        if index == 0 {
            gid[..8].copy_from_slice(&SUBNET_PREFIX.to_be_bytes());
            gid[8..].copy_from_slice(&self.guid.to_be_bytes());
        }
        gid
    }

    /// Bytes of the largest packet.
    pub fn mtu(&self) -> usize {
        4096
    }

    /// The P_Key at `index`.
    pub fn pkey(&self, index: usize) -> u16 {
        if index == 0 { DEFAULT_PKEY } else { 0 }
    }
}
