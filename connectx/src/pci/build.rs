// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lays out a config space from a header, BARs and capabilities.
//!
//! A wrong layout is a bug of the model, found at its first start: it panics.

use super::reg;
use super::{ConfigSpace, SIZE};

/// The fixed part of a type 0 header.
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Subsystem Vendor ID.
    pub subsystem_vendor: u16,
    /// Subsystem ID.
    pub subsystem: u16,
    /// Class code, 24 bits: base class, sub-class, interface.
    pub class: u32,
    /// Revision ID.
    pub revision: u8,
}

/// A memory BAR; the size in bytes is a power of two of at least 16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bar {
    /// Placed below 4 GiB.
    Memory32 {
        /// Bytes.
        size: u64,
        /// Reads have no side effects.
        prefetchable: bool,
    },
    /// Placed anywhere; takes the next BAR too.
    Memory64 {
        /// Bytes.
        size: u64,
        /// Reads have no side effects.
        prefetchable: bool,
    },
}

impl Bar {
    /// Size in bytes.
    pub fn size(self) -> u64 {
        match self {
            Bar::Memory32 { size, .. } | Bar::Memory64 { size, .. } => size,
        }
    }
}

/// Values of the PCI Express capability of an endpoint, version 2.
#[derive(Debug, Clone, Copy)]
pub struct Express {
    /// Device Capabilities (7.5.3.3).
    pub device_capabilities: u32,
    /// Device Control (7.5.3.4) after a reset.
    pub device_control: u16,
    /// Link Capabilities (7.5.3.6).
    pub link_capabilities: u32,
    /// Link Status (7.5.3.8).
    pub link_status: u16,
    /// Device Capabilities 2 (7.5.3.15).
    pub device_capabilities_2: u32,
    /// Link Capabilities 2 (7.5.3.18).
    pub link_capabilities_2: u32,
}

impl Express {
    /// An endpoint on a 16 GT/s x16 link: payloads of 512 bytes, extended tags, role-based error reporting, FLR;
    /// every completion timeout range.
    pub const fn gen4_x16() -> Self {
        Self {
            device_capabilities: 0x1000_8fe2,
            device_control: 0x2810,
            link_capabilities: 0x0104,
            link_status: 0x0104,
            device_capabilities_2: 0x1f,
            link_capabilities_2: 0x1e,
        }
    }

    /// As [`Express::gen4_x16`], on a 32 GT/s link.
    pub const fn gen5_x16() -> Self {
        Self {
            link_capabilities: 0x0105,
            link_status: 0x0105,
            link_capabilities_2: 0x3e,
            ..Self::gen4_x16()
        }
    }
}

/// Builds a [`ConfigSpace`]; capabilities are chained in the order in which they are added.
#[derive(Debug)]
pub struct Builder {
    space: ConfigSpace,
    /// Where the offset of the next capability is to be written.
    link: usize,
    /// The last extended capability so far.
    extended: Option<usize>,
    /// Ranges taken by the header and capabilities.
    taken: Vec<std::ops::Range<usize>>,
}

impl Builder {
    /// Starts with a type 0 header.
    pub fn new(id: Identity) -> Self {
        let zero = || Box::new([0; SIZE]);
        let space = ConfigSpace {
            now: zero(),
            initial: zero(),
            writable: zero(),
            write_1_clears: zero(),
            sticky: zero(),
            flr_keeps: zero(),
            bars: [None; 6],
            flr: None,
            express: None,
            aer: None,
            msix: None,
        };
        let mut builder = Self {
            space,
            link: reg::CAPABILITIES_POINTER,
            extended: None,
            taken: vec![],
        };
        builder.take(0, reg::CAPABILITIES_START);
        builder.set16(reg::VENDOR_ID, id.vendor);
        builder.set16(reg::DEVICE_ID, id.device);
        builder.set16(reg::SUBSYSTEM_VENDOR_ID, id.subsystem_vendor);
        builder.set16(reg::SUBSYSTEM_ID, id.subsystem);
        builder.set32(reg::REVISION_ID, (id.class << 8) | u32::from(id.revision));
        builder.writable16(
            reg::COMMAND,
            reg::COMMAND_MEMORY
                | reg::COMMAND_BUS_MASTER
                | reg::COMMAND_PARITY
                | reg::COMMAND_SERR
                | reg::COMMAND_INTX_DISABLE,
        );
        builder.clears16(reg::STATUS, reg::STATUS_ERRORS);
        builder.space.writable[reg::CACHE_LINE_SIZE] = 0xff;
        builder.space.writable[reg::INTERRUPT_LINE] = 0xff;
        builder
    }

    /// Adds a BAR.
    pub fn bar(mut self, index: usize, bar: Bar) -> Self {
        let size = bar.size();
        assert!(
            size.is_power_of_two() && size >= 16,
            "BAR {index}: size {size:#x}"
        );
        let upper = index
            .checked_sub(1)
            .and_then(|below| self.space.bars[below]);
        assert!(
            !matches!(upper, Some(Bar::Memory64 { .. })),
            "BAR {index} is the upper half of another"
        );
        let mask = !(size - 1);
        let (kind, prefetchable) = match bar {
            Bar::Memory32 { prefetchable, .. } => {
                assert!(size <= 1 << 31, "BAR {index}: too large for 32 bits");
                (0, prefetchable)
            }
            Bar::Memory64 { prefetchable, .. } => {
                assert!(index < 5, "BAR {index} has no upper half");
                self.writable32(reg::bar(index + 1), (mask >> 32) as u32);
                (reg::BAR_64, prefetchable)
            }
        };
        self.set32(
            reg::bar(index),
            kind | if prefetchable {
                reg::BAR_PREFETCHABLE
            } else {
                0
            },
        );
        self.writable32(reg::bar(index), mask as u32 & reg::BAR_ADDRESS_MASK);
        self.space.bars[index] = Some(bar);
        self
    }

    /// Adds the power management capability: D0 and D3hot, no PME, config space kept in D3hot.
    pub fn power_management(mut self, at: usize) -> Self {
        self.capability(at, reg::ID_POWER_MANAGEMENT, reg::POWER_MANAGEMENT_LEN);
        self.set16(at + reg::PM_CAPABILITIES, 3);
        self.set16(at + reg::PM_CONTROL, reg::PM_CONTROL_NO_SOFT_RESET);
        self.writable16(at + reg::PM_CONTROL, reg::PM_CONTROL_STATE);
        self
    }

    /// Adds the PCI Express capability of an endpoint.
    pub fn express(mut self, at: usize, values: Express) -> Self {
        self.capability(at, reg::ID_EXPRESS, reg::EXPRESS_LEN);
        self.set16(at + reg::EXPRESS_CAPABILITIES, 2);
        self.set32(
            at + reg::EXPRESS_DEVICE_CAPABILITIES,
            values.device_capabilities,
        );
        let control = at + reg::EXPRESS_DEVICE_CONTROL;
        self.set16(control, values.device_control);
        self.writable16(control, reg::DEVICE_CONTROL_WRITABLE);
        self.flr_keeps16(control, reg::DEVICE_CONTROL_PAYLOAD);
        self.clears16(at + reg::EXPRESS_DEVICE_STATUS, reg::DEVICE_STATUS_ERRORS);
        self.set32(
            at + reg::EXPRESS_LINK_CAPABILITIES,
            values.link_capabilities,
        );
        let link = at + reg::EXPRESS_LINK_CONTROL;
        self.writable16(link, reg::LINK_CONTROL_WRITABLE);
        self.flr_keeps16(link, reg::LINK_CONTROL_WRITABLE);
        self.set16(at + reg::EXPRESS_LINK_STATUS, values.link_status);
        self.set32(
            at + reg::EXPRESS_DEVICE_CAPABILITIES_2,
            values.device_capabilities_2,
        );
        self.writable16(
            at + reg::EXPRESS_DEVICE_CONTROL_2,
            reg::DEVICE_CONTROL_2_WRITABLE,
        );
        self.set32(
            at + reg::EXPRESS_LINK_CAPABILITIES_2,
            values.link_capabilities_2,
        );
        let link2 = at + reg::EXPRESS_LINK_CONTROL_2;
        self.set16(link2, values.link_status & reg::LINK_CONTROL_2_SPEED);
        self.writable16(link2, reg::LINK_CONTROL_2_SPEED);
        self.sticky32(link2, u32::from(reg::LINK_CONTROL_2_SPEED));
        self.space.express = Some(at);
        if values.device_capabilities & reg::DEVICE_CAPABILITIES_FLR != 0 {
            self.space.flr = Some(at);
        }
        self
    }

    /// Adds MSI-X with `vectors` vectors; table and pending bits lie at a (BAR, offset).
    pub fn msix(mut self, at: usize, vectors: u16, table: (u32, u32), pending: (u32, u32)) -> Self {
        assert!((1..=2048).contains(&vectors), "{vectors} MSI-X vectors");
        assert!(
            table.1 % 8 == 0 && pending.1 % 8 == 0,
            "MSI-X table and PBA are quadword aligned"
        );
        self.capability(at, reg::ID_MSIX, reg::MSIX_LEN);
        self.set16(at + reg::MSIX_CONTROL, vectors - 1);
        self.writable16(at + reg::MSIX_CONTROL, reg::MSIX_CONTROL_WRITABLE);
        self.set32(at + reg::MSIX_TABLE, table.1 | table.0);
        self.set32(at + reg::MSIX_PBA, pending.1 | pending.0);
        self.space.msix = Some(at);
        self
    }

    /// Adds Advanced Error Reporting, version 2. All its error registers are sticky.
    pub fn error_reporting(mut self, at: usize) -> Self {
        self.extended(at, reg::ID_AER, 2, reg::AER_LEN);
        self.space.aer = Some(at);
        self.sticky32(
            at + reg::AER_CONTROL,
            u32::from(reg::AER_CONTROL_FIRST_ERROR),
        );
        for (status, errors) in [
            (reg::AER_UNCORRECTABLE_STATUS, reg::AER_UNCORRECTABLE_ERRORS),
            (reg::AER_CORRECTABLE_STATUS, reg::AER_CORRECTABLE_ERRORS),
        ] {
            self.clears32(at + status, errors);
            self.sticky32(at + status, errors);
        }
        for (control, errors, initial) in [
            (
                reg::AER_UNCORRECTABLE_MASK,
                reg::AER_UNCORRECTABLE_ERRORS,
                0,
            ),
            (
                reg::AER_UNCORRECTABLE_SEVERITY,
                reg::AER_UNCORRECTABLE_ERRORS,
                reg::AER_SEVERITY_DEFAULT,
            ),
            (
                reg::AER_CORRECTABLE_MASK,
                reg::AER_CORRECTABLE_ERRORS,
                reg::AER_CORRECTABLE_MASK_DEFAULT,
            ),
        ] {
            self.set32(at + control, initial);
            self.writable32(at + control, errors);
            self.sticky32(at + control, errors);
        }
        self
    }

    /// Adds the Device Serial Number.
    pub fn serial_number(mut self, at: usize, serial: u64) -> Self {
        self.extended(at, reg::ID_SERIAL_NUMBER, 1, reg::SERIAL_NUMBER_LEN);
        self.set32(at + 4, serial as u32);
        self.set32(at + 8, (serial >> 32) as u32);
        self
    }

    /// Adds Access Control Services without any of them: the capability and control registers are hardwired to 0.
    pub fn access_control(mut self, at: usize) -> Self {
        self.extended(at, reg::ID_ACS, 1, reg::ACS_LEN);
        self
    }

    /// The finished space, as after power-on.
    pub fn build(self) -> ConfigSpace {
        let mut space = self.space;
        space.now = space.initial.clone();
        space
    }

    fn take(&mut self, at: usize, len: usize) {
        assert!(at % 4 == 0 && at + len <= SIZE, "capability at {at:#x}");
        let clash = self.taken.iter().find(|r| r.start < at + len && at < r.end);
        assert!(clash.is_none(), "capabilities overlap at {at:#x}");
        self.taken.push(at..at + len);
    }

    fn capability(&mut self, at: usize, id: u8, len: usize) {
        self.take(at, len);
        assert!(
            at + len <= reg::EXTENDED_START,
            "capability at {at:#x} is not in the first 256 bytes"
        );
        self.space.initial[self.link] = at as u8;
        self.space.initial[at] = id;
        self.link = at + 1;
        let status = u16::from_le_bytes([
            self.space.initial[reg::STATUS],
            self.space.initial[reg::STATUS + 1],
        ]);
        self.set16(reg::STATUS, status | reg::STATUS_CAPABILITIES_LIST);
    }

    /// The header of an extended capability is ID, version and the next offset in its top 12 bits (7.6.3).
    fn extended(&mut self, at: usize, id: u16, version: u32, len: usize) {
        self.take(at, len);
        match self.extended {
            None => assert_eq!(at, reg::EXTENDED_START, "the first extended capability"),
            Some(last) => {
                let mut header = [0; 4];
                header.copy_from_slice(&self.space.initial[last..last + 4]);
                self.set32(last, u32::from_le_bytes(header) | ((at as u32) << 20));
            }
        }
        self.set32(at, u32::from(id) | (version << 16));
        self.extended = Some(at);
    }

    fn set16(&mut self, at: usize, value: u16) {
        self.space.initial[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }

    fn set32(&mut self, at: usize, value: u32) {
        self.space.initial[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn writable16(&mut self, at: usize, bits: u16) {
        self.space.writable[at..at + 2].copy_from_slice(&bits.to_le_bytes());
    }

    fn writable32(&mut self, at: usize, bits: u32) {
        self.space.writable[at..at + 4].copy_from_slice(&bits.to_le_bytes());
    }

    fn clears16(&mut self, at: usize, bits: u16) {
        self.space.write_1_clears[at..at + 2].copy_from_slice(&bits.to_le_bytes());
    }

    fn clears32(&mut self, at: usize, bits: u32) {
        self.space.write_1_clears[at..at + 4].copy_from_slice(&bits.to_le_bytes());
    }

    fn sticky32(&mut self, at: usize, bits: u32) {
        self.space.sticky[at..at + 4].copy_from_slice(&bits.to_le_bytes());
    }

    fn flr_keeps16(&mut self, at: usize, bits: u16) {
        self.space.flr_keeps[at..at + 2].copy_from_slice(&bits.to_le_bytes());
    }
}
