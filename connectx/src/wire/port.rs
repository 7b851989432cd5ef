// SPDX-License-Identifier: MIT OR Apache-2.0
//! The InfiniBand port of a function.

use std::time::{Duration, Instant};

use crate::mad::pma::Traffic;

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
/// LID of the subnet manager, which is in the switch; beyond those of functions.
pub const SM_LID: u16 = 0x0800;
/// PCI device id, which is in NodeInfo too: the PCI ID repository's "MT28908 Family [ConnectX-6]".
pub const DEVICE_ID: u16 = 0x101b;
/// CapabilityMask of a port that a subnet manager has configured: automatic migration, LED, traps, SL mapping, extended
/// speeds, client reregistration, system image GUID, communication management, notices. Bit 1, "is SM", is clear.
pub const CAP_MASK: u32 = 0x0251_4a68;
/// What of it says which agents the driver's side has (IBA 14.2.5.6): a subnet manager, communication management, SNMP
/// tunneling, device management, a vendor class. `ib_cm` does not take a device that refuses the second of them.
pub const CHANGEABLE_CAPS: u32 = (1 << 1) | (1 << 16) | (1 << 17) | (1 << 19) | (1 << 20);
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
    /// CapabilityMask, of which drivers may change [`CHANGEABLE_CAPS`].
    pub cap_mask: u32,
    /// What the link does to packets that the port sends.
    pub link: Link,
    /// Where the port's counters began when they were last cleared.
    pub counted_from: Traffic,
}

/// Bytes of the headers and check sums of a packet without extended headers: LRH, BTH, ICRC and VCRC.
const HEADERS: u64 = 8 + 12 + 4 + 2;

/// How far a port's work is ahead of its link. More than it takes to wake the engine, so that the link is always busy.
const AHEAD: Duration = Duration::from_millis(1);

/// How good a link is.
#[derive(Debug, Clone, Default)]
pub struct Link {
    /// Packets lost of a million.
    pub loss: u32,
    /// Time that a packet takes.
    pub delay: Duration,
    /// Megabits a second; 0 for as many as there are.
    rate: u32,
    /// When the link will have sent what it was given.
    free: Option<Instant>,
    /// State of the generator that decides which packets are lost: the same ones in each run.
    random: u64,
}

impl Link {
    /// Whether every packet that is sent is there at once.
    pub fn is_ideal(&self) -> bool {
        self.loss == 0 && self.is_immediate()
    }

    /// Megabits a second; 0 for as many as there are.
    pub fn rate(&self) -> u32 {
        self.rate
    }

    /// Sets the rate, from now on: what is on the way arrives when it would have.
    pub fn set_rate(&mut self, megabits: u32) {
        self.rate = megabits;
        self.free = None;
    }

    /// Whether a packet that is not lost is at the other end at once.
    pub fn is_immediate(&self) -> bool {
        self.delay.is_zero() && self.rate == 0
    }

    /// Sends so many bytes in so many packets of the MTU; when they are at the other end.
    pub fn sends(&mut self, bytes: usize, packets: u32, now: Instant) -> Instant {
        let mut gone = now;
        if self.rate != 0 {
            let bytes = bytes as u64 + u64::from(packets) * HEADERS;
            let start = self.free.map_or(now, |free| free.max(now));
            gone = start + Duration::from_nanos(bytes * 8 * 1000 / u64::from(self.rate));
            self.free = Some(gone);
        }
        gone + self.delay
    }

    /// When the port takes the next work, if not now: it does not run ahead of its link, else what is on the way would be
    /// without bounds.
    pub fn blocked_until(&self, now: Instant) -> Option<Instant> {
        let until = self.free?.checked_sub(AHEAD)?;
        (self.rate != 0 && until > now).then_some(until)
    }

    /// Whether the next packet is lost.
    pub fn loses(&mut self) -> bool {
        if self.loss == 0 {
            return false;
        }
        // A linear congruential generator with Knuth's constants; its high bits are good enough to drop packets by.
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % 1_000_000 < u64::from(self.loss)
    }
}

impl Port {
    /// An active port.
    pub fn new(lid: u16, guid: u64) -> Self {
        Self {
            lid,
            guid,
            state: PortState::Active,
            cap_mask: CAP_MASK,
            link: Link::default(),
            counted_from: Traffic::default(),
        }
    }

    /// A port for tests of parts that do not care.
    #[cfg(test)]
    pub fn test() -> Self {
        Self::new(1, 0x1122_3344_5566_7788)
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

    /// Physical state (IBA 14.2.5.6): 5 is LinkUp, 2 Polling.
    pub fn physical_state(&self) -> u64 {
        match self.state {
            PortState::Active => 5,
            PortState::Down => 2,
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_link_sends_one_after_the_other_and_is_not_run_ahead_of() {
        let mut link = Link::default();
        assert!(link.is_immediate() && link.is_ideal());
        let begin = Instant::now();
        let after = |microseconds| begin + Duration::from_micros(microseconds);

        link.set_rate(8);
        link.delay = Duration::from_micros(100);
        assert!(!link.is_immediate());
        assert_eq!(link.blocked_until(begin), None);
        assert_eq!(link.sends(974, 1, begin), after(1100));
        assert_eq!(link.blocked_until(begin), None);
        assert_eq!(link.sends(948, 2, after(400)), after(2100));
        assert_eq!(link.blocked_until(after(400)), Some(after(1000)));
        assert_eq!(link.blocked_until(after(1000)), None);
        // Nothing is saved up for later while it is idle.
        assert_eq!(link.sends(974, 1, after(5000)), after(6100));

        link.sends(1 << 30, 1, after(5000));
        link.set_rate(0);
        assert_eq!(link.blocked_until(after(5000)), None);
        assert_eq!(link.sends(1 << 30, 1, after(5000)), after(5100));
    }
}
