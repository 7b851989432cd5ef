// SPDX-License-Identifier: MIT OR Apache-2.0
//! The address of a QP, as its peer needs it: 64 bytes to carry by any means (MPI, a socket, a file).
//!
//! | byte | field, little-endian |
//! |---|---|
//! | 0 | magic `IBGA` |
//! | 4 | version, 16 bits: 1 |
//! | 6 | length of the whole, 16 bits: 64 |
//! | 8 | QPN, 24 bits |
//! | 12 | first packet sequence number, 24 bits |
//! | 16 | LID, 16 bits; 0 on Ethernet |
//! | 18 | MTU the port can do: 1 = 256, 2 = 512, 3 = 1024, 4 = 2048, 5 = 4096 bytes |
//! | 19 | link layer: 1 = InfiniBand, 2 = Ethernet (RoCE v2), 3 = the loopback route's model |
//! | 20 | zero |
//! | 24 | GID, 16 bytes |
//! | 40 | zero |
//! | 60 | CRC-32 (IEEE) of bytes 0 to 59 |

use crate::error::{Error, Result, Source};
use std::fmt;

/// Bytes of an address.
pub const ADDRESS_BYTES: usize = 64;

const MAGIC: [u8; 4] = *b"IBGA";
const VERSION: u16 = 1;
/// Highest unicast LID.
const LID_MAX: u16 = 0xbfff;

/// What a port's packets travel on. Only QPs of the same one reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LinkLayer {
    /// InfiniBand: peers are found by LID, in other subnets by GID.
    InfiniBand = 1,
    /// Ethernet, as RoCE v2: peers are found by GID, which is an IP address.
    Ethernet = 2,
    /// None: the model of the loopback route, which reaches its own process only.
    Loopback = 3,
}

impl LinkLayer {
    const ALL: [Self; 3] = [Self::InfiniBand, Self::Ethernet, Self::Loopback];
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand",
            Self::Ethernet => "Ethernet",
            Self::Loopback => "the loopback route's model",
        })
    }
}

/// Where a QP is, and what its port can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpAddress {
    /// QP number.
    pub qpn: u32,
    /// First packet sequence number it sends.
    pub psn: u32,
    /// What its port is connected to.
    pub link_layer: LinkLayer,
    /// LID of its port; 0 on Ethernet.
    pub lid: u16,
    /// Largest MTU of its port (`ibv_mtu`, 1 to 5).
    pub mtu: u8,
    /// GID of its port: on Ethernet the IP address that RoCE v2 uses.
    pub gid: [u8; 16],
}

impl QpAddress {
    /// The address to hand to the peer.
    pub fn to_bytes(&self) -> [u8; ADDRESS_BYTES] {
        let mut bytes = [0; ADDRESS_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6..8].copy_from_slice(&(ADDRESS_BYTES as u16).to_le_bytes());
        bytes[8..12].copy_from_slice(&self.qpn.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.psn.to_le_bytes());
        bytes[16..18].copy_from_slice(&self.lid.to_le_bytes());
        bytes[18] = self.mtu;
        bytes[19] = self.link_layer as u8;
        bytes[24..40].copy_from_slice(&self.gid);
        let crc = crc32fast::hash(&bytes[..60]);
        bytes[60..64].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// The address that a peer handed over.
    ///
    /// # Errors
    /// `EINVAL`, saying which part of it is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let wrong = |why: String, advice: &str| {
            Err(Error::new(
                Source::Address,
                libc::EINVAL,
                format!("peer address of {} bytes", bytes.len()),
                why,
                advice,
            ))
        };
        let damaged = "was it carried whole and unchanged?";
        if bytes.len() < 8 || bytes[0..4] != MAGIC {
            return wrong("it does not begin as an ibgda QP address".into(), damaged);
        }
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        if u16_at(4) != VERSION {
            return wrong(
                format!(
                    "it is of version {}, this library speaks version {VERSION}",
                    u16_at(4)
                ),
                "use the same version of libibgda on both sides",
            );
        }
        if bytes.len() != ADDRESS_BYTES || usize::from(u16_at(6)) != ADDRESS_BYTES {
            return wrong(
                format!(
                    "it says {} bytes, version {VERSION} has {ADDRESS_BYTES}",
                    u16_at(6)
                ),
                damaged,
            );
        }
        let crc = crc32fast::hash(&bytes[..60]);
        if u32_at(60) != crc {
            return wrong(
                format!(
                    "its checksum is {:#010x}, should be {crc:#010x}",
                    u32_at(60)
                ),
                damaged,
            );
        }
        let known = |layer: &LinkLayer| *layer as u8 == bytes[19];
        let Some(link_layer) = LinkLayer::ALL.into_iter().find(known) else {
            return wrong(
                format!(
                    "its link layer is {}, which this library does not know",
                    bytes[19]
                ),
                "use the same version of libibgda on both sides",
            );
        };
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[24..40]);
        let address = Self {
            qpn: u32_at(8),
            psn: u32_at(12),
            link_layer,
            lid: u16_at(16),
            mtu: bytes[18],
            gid,
        };
        let faults = [
            (
                address.qpn == 0 || address.qpn > 0xff_ffff,
                format!("QPN {:#x} is not in 1..=0xffffff", address.qpn),
            ),
            (
                address.psn > 0xff_ffff,
                format!("PSN {:#x} has more than 24 bits", address.psn),
            ),
            (
                !(1..=5).contains(&address.mtu),
                format!("MTU code {} is not in 1..=5", address.mtu),
            ),
            (
                link_layer != LinkLayer::Ethernet && (address.lid == 0 || address.lid > LID_MAX),
                format!(
                    "LID {:#x} is not that of an active port (1..=0xbfff)",
                    address.lid
                ),
            ),
            (
                link_layer == LinkLayer::Ethernet && address.lid != 0,
                format!("LID {:#x}, but ports on Ethernet have none", address.lid),
            ),
            (
                link_layer == LinkLayer::Ethernet && address.gid == [0; 16],
                "the GID is zero, and on Ethernet peers are found by it".into(),
            ),
            (
                bytes[20..24].iter().chain(&bytes[40..60]).any(|&b| b != 0),
                "a reserved byte is not zero".into(),
            ),
        ];
        match faults.into_iter().find(|(fault, _)| *fault) {
            Some((_, why)) => wrong(why, "is the peer's port active, and its library this one?"),
            None => Ok(address),
        }
    }

    /// Whether a QP here can reach one there, as far as addresses say.
    pub(crate) fn check_reaches(&self, peer: &Self) -> Result<()> {
        let what = || format!("connect QP {:#x} to QP {:#x}", self.qpn, peer.qpn);
        let wrong = |why, advice: &str| {
            Err(Error::new(
                Source::Address,
                libc::EINVAL,
                what(),
                why,
                advice,
            ))
        };
        if self.link_layer != peer.link_layer {
            return wrong(
                format!(
                    "this QP is on {}, the peer on {}",
                    self.link_layer, peer.link_layer
                ),
                "both must be on one network, and both or neither on the loopback route",
            );
        }
        let version = |gid: &[u8; 16]| if is_ipv4(gid) { "IPv4" } else { "IPv6" };
        if self.link_layer == LinkLayer::Ethernet && is_ipv4(&self.gid) != is_ipv4(&peer.gid) {
            return wrong(
                format!(
                    "this QP's GID is an {} address, the peer's an {} address",
                    version(&self.gid),
                    version(&peer.gid)
                ),
                "give both network interfaces an IPv4 address, or neither",
            );
        }
        Ok(())
    }
}

/// Whether a GID is an IPv4 address in IPv6's clothes (`::ffff:a.b.c.d`).
pub(crate) fn is_ipv4(gid: &[u8; 16]) -> bool {
    gid[..10] == [0; 10] && gid[10..12] == [0xff; 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address() -> QpAddress {
        QpAddress {
            qpn: 0x4a5b6c,
            psn: 0x12_3456,
            link_layer: LinkLayer::InfiniBand,
            lid: 2,
            mtu: 5,
            gid: *b"0123456789abcdef",
        }
    }

    fn with(change: impl FnOnce(&mut [u8; ADDRESS_BYTES])) -> [u8; ADDRESS_BYTES] {
        let mut bytes = address().to_bytes();
        change(&mut bytes);
        let crc = crc32fast::hash(&bytes[..60]);
        bytes[60..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    #[test]
    fn layout_is_the_documented_one() {
        let mut expected = Vec::from(*b"IBGA");
        expected.extend([
            1, 0, 64, 0, 0x6c, 0x5b, 0x4a, 0, 0x56, 0x34, 0x12, 0, 2, 0, 5, 1, 0, 0, 0, 0,
        ]);
        expected.extend(b"0123456789abcdef");
        expected.extend([0; 20]);
        assert_eq!(address().to_bytes()[..60], expected[..]);
    }

    fn on_ethernet(last: [u8; 4]) -> QpAddress {
        let mut gid = [0; 16];
        gid[10..12].fill(0xff);
        gid[12..].copy_from_slice(&last);
        QpAddress {
            link_layer: LinkLayer::Ethernet,
            lid: 0,
            gid,
            ..address()
        }
    }

    #[test]
    fn round_trip() {
        let loopback = QpAddress {
            link_layer: LinkLayer::Loopback,
            ..address()
        };
        for address in [address(), on_ethernet([10, 0, 0, 1]), loopback] {
            assert_eq!(
                QpAddress::from_bytes(&address.to_bytes()).expect("its own bytes"),
                address
            );
        }
    }

    #[test]
    fn peers_on_other_networks_are_refused() {
        let (here, there) = (on_ethernet([10, 0, 0, 1]), on_ethernet([10, 0, 0, 2]));
        here.check_reaches(&there).expect("the same network");
        address().check_reaches(&address()).expect("the same");
        let ipv6 = QpAddress {
            gid: *b"\xfe\x80abcdefghijklmn",
            ..here
        };
        let loopback = QpAddress {
            link_layer: LinkLayer::Loopback,
            ..address()
        };
        for (peer, words) in [
            (address(), ["Ethernet", "InfiniBand"]),
            (loopback, ["Ethernet", "loopback"]),
            (ipv6, ["IPv4", "IPv6"]),
        ] {
            let error = here.check_reaches(&peer).expect_err("unreachable");
            assert_eq!(
                (error.errno(), error.origin()),
                (libc::EINVAL, Source::Address)
            );
            for word in words {
                assert!(error.to_string().contains(word), "{word:?}: {error}");
            }
        }
    }

    #[test]
    fn every_wrong_part_is_named() {
        let ethernet = |change: fn(&mut QpAddress)| {
            let mut address = on_ethernet([10, 0, 0, 1]);
            change(&mut address);
            address.to_bytes().to_vec()
        };
        let cases: [(&str, Vec<u8>); 15] = [
            ("does not begin", vec![]),
            ("does not begin", with(|b| b[0] = b'X').to_vec()),
            ("version 2", with(|b| b[4] = 2).to_vec()),
            ("version 1 has 64", address().to_bytes()[..63].to_vec()),
            (
                "version 1 has 64",
                [&address().to_bytes()[..], &[0]].concat(),
            ),
            ("says 65", with(|b| b[6] = 65).to_vec()),
            ("link layer is 4", with(|b| b[19] = 4).to_vec()),
            ("Ethernet have none", ethernet(|address| address.lid = 1)),
            ("GID is zero", ethernet(|address| address.gid = [0; 16])),
            ("QPN 0x0", with(|b| b[8..11].fill(0)).to_vec()),
            ("QPN 0x14a5b6c", with(|b| b[11] = 1).to_vec()),
            ("PSN", with(|b| b[15] = 1).to_vec()),
            ("MTU code 6", with(|b| b[18] = 6).to_vec()),
            ("LID 0x0", with(|b| b[16] = 0).to_vec()),
            ("reserved", with(|b| b[59] = 1).to_vec()),
        ];
        for (part, bytes) in cases {
            let error = QpAddress::from_bytes(&bytes).expect_err(part);
            assert_eq!(
                (error.errno(), error.origin()),
                (libc::EINVAL, Source::Address)
            );
            assert!(
                error.to_string().contains(part),
                "{part:?} is missing in {error}"
            );
        }
    }

    /// xorshift64*: the same numbers in each run.
    struct Numbers(u64);

    impl Numbers {
        fn next(&mut self, below: usize) -> usize {
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % below
        }
    }

    /// Whatever comes is an address that obeys every rule, or refused with a reason.
    fn taken_or_refused(bytes: &[u8]) -> bool {
        match QpAddress::from_bytes(bytes) {
            Ok(address) => {
                assert_eq!(
                    address.to_bytes()[..],
                    *bytes,
                    "read as it would be written"
                );
                let in_range = (1..=0xff_ffff).contains(&address.qpn)
                    && address.psn <= 0xff_ffff
                    && (1..=5).contains(&address.mtu)
                    && (1..=LID_MAX).contains(&address.lid);
                assert!(in_range, "{address:?}");
                true
            }
            Err(error) => {
                assert_eq!(
                    (error.errno(), error.origin()),
                    (libc::EINVAL, Source::Address),
                    "{bytes:x?}"
                );
                assert!(!error.why().is_empty() && !error.advice().is_empty());
                assert!(error.what().contains(&bytes.len().to_string()), "{error}");
                false
            }
        }
    }

    #[test]
    fn hostile_bytes_are_refused_with_a_reason_or_obey_every_rule() {
        let mut numbers = Numbers(0x1b9d_a05e_ed00_0001);
        let (mut taken, mut refused) = (0, 0);
        for round in 0..400_000 {
            let mut bytes = address().to_bytes().to_vec();
            for _ in 0..1 + numbers.next(4) {
                let at = numbers.next(bytes.len());
                match numbers.next(4) {
                    0 => bytes[at] ^= 1 << numbers.next(8),
                    1 => bytes[at] = numbers.next(256) as u8,
                    2 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][numbers.next(5)],
                    _ => {
                        let from = numbers.next(bytes.len());
                        bytes[at] = bytes[from];
                    }
                }
            }
            // Half of them by somebody who knows how to make a checksum.
            if numbers.next(2) == 0 {
                let crc = crc32fast::hash(&bytes[..60]);
                bytes[60..].copy_from_slice(&crc.to_le_bytes());
            }
            match round % 8 {
                0 => bytes.truncate(numbers.next(ADDRESS_BYTES)),
                1 => bytes.extend((0..numbers.next(200)).map(|byte| byte as u8)),
                _ => {}
            }
            match taken_or_refused(&bytes) {
                true => taken += 1,
                false => refused += 1,
            }
        }
        assert!(taken > 10_000 && refused > 100_000, "{taken}, {refused}");
        for length in 0..300 {
            for _ in 0..300 {
                let noise: Vec<u8> = (0..length).map(|_| numbers.next(256) as u8).collect();
                assert!(!taken_or_refused(&noise), "noise has a checksum of 32 bits");
            }
        }
    }

    #[test]
    fn any_single_changed_bit_is_noticed() {
        for bit in 0..ADDRESS_BYTES * 8 {
            let mut bytes = address().to_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(
                QpAddress::from_bytes(&bytes).is_err(),
                "bit {bit} changed and nobody noticed"
            );
        }
    }
}
