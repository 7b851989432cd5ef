// SPDX-License-Identifier: MIT OR Apache-2.0
//! The config space of a modelled function: what the host may write, what a write does, what a reset undoes.
//!
//! [`build::Builder`] lays a space out from capabilities; [`reg`] names the registers. Section numbers are those of the
//! PCI Express Base Specification 6.0.

pub mod build;
pub mod reg;

pub use build::{Bar, Builder, Express, Identity};

use crate::platform::ResetKind;

/// Bytes of config space of a PCI Express function (7.2.2).
pub const SIZE: usize = 4096;

/// What a config write or a reset means to the function, in the order in which it happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The Bus Master Enable bit changed.
    BusMaster(bool),
    /// A BAR is decoded at another bus address than before, or (`None`) no longer.
    BarPlaced(usize, Option<u64>),
    /// The MSI-X Function Mask bit changed.
    InterruptMask(bool),
    /// The function is to reset itself; config space has been reset already.
    Reset(ResetKind),
}

/// Config space with its rules.
#[derive(Debug, Clone)]
pub struct ConfigSpace {
    now: Box<[u8; SIZE]>,
    /// Values after a reset.
    initial: Box<[u8; SIZE]>,
    /// Bits that software may set and clear (RW, RWS).
    writable: Box<[u8; SIZE]>,
    /// Bits that software clears by writing 1 (RW1C, RW1CS).
    write_1_clears: Box<[u8; SIZE]>,
    /// Bits that only a loss of power resets (7.4: ROS, RWS, RW1CS).
    sticky: Box<[u8; SIZE]>,
    /// Bits that a function-level reset leaves alone, besides the sticky ones (6.6.2).
    flr_keeps: Box<[u8; SIZE]>,
    bars: [Option<Bar>; 6],
    /// Offset of the PCI Express capability of a function that can do a function-level reset.
    flr: Option<usize>,
    /// Offsets of the PCI Express and AER capabilities of a function that reports errors.
    express: Option<usize>,
    aer: Option<usize>,
    /// Offset of the MSI-X capability.
    msix: Option<usize>,
}

/// What of config space the function is told about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Decoding {
    bus_master: bool,
    bars: [Option<u64>; 6],
    interrupt_mask: bool,
}

/// The two families of errors of AER (6.2.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// Corrected by hardware; only counted.
    Correctable,
    /// Fatal or not by the severity register.
    Uncorrectable,
}

impl ConfigSpace {
    /// Reads `data.len()` bytes; beyond the end of config space all ones, as from a missing register.
    pub fn read(&self, offset: usize, data: &mut [u8]) {
        for (i, byte) in data.iter_mut().enumerate() {
            *byte = offset
                .checked_add(i)
                .and_then(|at| self.now.get(at))
                .copied()
                .unwrap_or(0xff);
        }
    }

    /// The little-endian 16-bit register at `offset`.
    pub fn word(&self, offset: usize) -> u16 {
        let mut bytes = [0; 2];
        self.read(offset, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    /// The little-endian 32-bit register at `offset`.
    pub fn dword(&self, offset: usize) -> u32 {
        let mut bytes = [0; 4];
        self.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Writes as software does, and tells what follows from it.
    pub fn write(&mut self, offset: usize, data: &[u8]) -> Vec<Event> {
        if self.initiates_flr(offset, data) {
            return self.reset(ResetKind::FunctionLevel);
        }
        let before = self.decoding();
        for (i, &byte) in data.iter().enumerate() {
            let Some(at) = offset.checked_add(i).filter(|&at| at < SIZE) else {
                break;
            };
            let writable = self.writable[at];
            self.now[at] = (self.now[at] & !writable) | (byte & writable);
            self.now[at] &= !(byte & self.write_1_clears[at]);
        }
        self.changes_since(before)
    }

    /// Records that the device found errors (bits of the AER status register of their kind), as 6.2.4 has it: in
    /// Device Status always, in the AER status too, and the first uncorrectable one that is not masked in the First
    /// Error Pointer. Returns the bits that the device has; none of a function without AER.
    pub fn report_errors(&mut self, kind: ErrorKind, bits: u32) -> u32 {
        let (Some(express), Some(aer)) = (self.express, self.aer) else {
            return 0;
        };
        let (status, mask, implemented) = match kind {
            ErrorKind::Correctable => (
                reg::AER_CORRECTABLE_STATUS,
                reg::AER_CORRECTABLE_MASK,
                reg::AER_CORRECTABLE_ERRORS,
            ),
            ErrorKind::Uncorrectable => (
                reg::AER_UNCORRECTABLE_STATUS,
                reg::AER_UNCORRECTABLE_MASK,
                reg::AER_UNCORRECTABLE_ERRORS,
            ),
        };
        let bits = bits & implemented;
        if bits == 0 {
            return 0;
        }
        let fatal = bits & self.dword(aer + reg::AER_UNCORRECTABLE_SEVERITY);
        let device_status = match kind {
            ErrorKind::Correctable => reg::DEVICE_STATUS_CORRECTABLE,
            ErrorKind::Uncorrectable if fatal != 0 => reg::DEVICE_STATUS_FATAL,
            ErrorKind::Uncorrectable => reg::DEVICE_STATUS_NONFATAL,
        };
        let unmasked = |space: &Self| space.dword(aer + status) & !space.dword(aer + mask);
        let first = unmasked(self) == 0;
        self.raise(
            express + reg::EXPRESS_DEVICE_STATUS,
            u32::from(device_status),
        );
        self.raise(aer + status, bits);
        if kind == ErrorKind::Uncorrectable && first && unmasked(self) != 0 {
            let at = aer + reg::AER_CONTROL;
            self.now[at] = (self.now[at] & !reg::AER_CONTROL_FIRST_ERROR)
                | unmasked(self).trailing_zeros() as u8;
        }
        bits
    }

    fn raise(&mut self, offset: usize, bits: u32) {
        for (i, byte) in bits.to_le_bytes().into_iter().enumerate() {
            self.now[offset + i] |= byte & self.write_1_clears[offset + i];
        }
    }

    /// Resets every register that this kind of reset reaches.
    pub fn reset(&mut self, kind: ResetKind) -> Vec<Event> {
        let before = self.decoding();
        for at in 0..SIZE {
            let keep = match kind {
                ResetKind::Bus => self.sticky[at],
                ResetKind::FunctionLevel => self.sticky[at] | self.flr_keeps[at],
            };
            self.now[at] = (self.now[at] & keep) | (self.initial[at] & !keep);
        }
        let mut events = self.changes_since(before);
        // What is pending under the mask is forgotten, not delivered.
        events.retain(|event| !matches!(event, Event::InterruptMask(_)));
        events.push(Event::Reset(kind));
        events
    }

    /// True while Bus Master Enable is set.
    pub fn bus_master(&self) -> bool {
        self.word(reg::COMMAND) & reg::COMMAND_BUS_MASTER != 0
    }

    /// Where a BAR is decoded. Address 0 counts as not placed, as the host's own decoder has it.
    pub fn placed(&self, bar: usize) -> Option<u64> {
        let kind = self.bars.get(bar).copied().flatten()?;
        if self.word(reg::COMMAND) & reg::COMMAND_MEMORY == 0 {
            return None;
        }
        let at = reg::bar(bar);
        let low = u64::from(self.dword(at) & reg::BAR_ADDRESS_MASK);
        let address = match kind {
            Bar::Memory32 { .. } => low,
            Bar::Memory64 { .. } => low | (u64::from(self.dword(at + 4)) << 32),
        };
        (address != 0).then_some(address)
    }

    /// Size of a BAR in bytes, 0 for none.
    pub fn bar_size(&self, bar: usize) -> u64 {
        self.bars
            .get(bar)
            .copied()
            .flatten()
            .map_or(0, |bar| bar.size())
    }

    /// BAR and offset of the MSI-X pending bits.
    pub fn msix_pending(&self) -> Option<(usize, u64)> {
        let place = self.dword(self.msix? + reg::MSIX_PBA);
        Some(((place & 7) as usize, u64::from(place & !7)))
    }

    fn decoding(&self) -> Decoding {
        let masked = |at| self.word(at + reg::MSIX_CONTROL) & reg::MSIX_CONTROL_MASK != 0;
        Decoding {
            bus_master: self.bus_master(),
            bars: std::array::from_fn(|bar| self.placed(bar)),
            interrupt_mask: self.msix.is_some_and(masked),
        }
    }

    fn changes_since(&self, before: Decoding) -> Vec<Event> {
        let after = self.decoding();
        let mut events = Vec::new();
        if before.bus_master != after.bus_master {
            events.push(Event::BusMaster(after.bus_master));
        }
        let moved = (0..6).filter(|&bar| before.bars[bar] != after.bars[bar]);
        events.extend(moved.map(|bar| Event::BarPlaced(bar, after.bars[bar])));
        if before.interrupt_mask != after.interrupt_mask {
            events.push(Event::InterruptMask(after.interrupt_mask));
        }
        events
    }

    /// Initiate Function Level Reset is bit 15 of Device Control (7.5.3.4); it reads as 0.
    fn initiates_flr(&self, offset: usize, data: &[u8]) -> bool {
        let Some(express) = self.flr else {
            return false;
        };
        let at = express + reg::EXPRESS_DEVICE_CONTROL + 1;
        let high = reg::DEVICE_CONTROL_FLR.to_le_bytes()[1];
        at.checked_sub(offset)
            .and_then(|i| data.get(i))
            .is_some_and(|byte| byte & high != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPRESS: usize = 0x60;
    const AER: usize = 0x100;

    fn space() -> ConfigSpace {
        Builder::new(Identity {
            vendor: 0x15b3,
            device: 0x101b,
            subsystem_vendor: 0x15b3,
            subsystem: 7,
            class: 0x02_0700,
            revision: 0,
        })
        .bar(
            0,
            Bar::Memory64 {
                size: 32 << 20,
                prefetchable: true,
            },
        )
        .bar(
            2,
            Bar::Memory32 {
                size: 1 << 20,
                prefetchable: false,
            },
        )
        .express(
            EXPRESS,
            Express {
                device_capabilities: 0x1000_8fe2,
                ..Express::gen4_x16()
            },
        )
        .msix(0x9c, 16, (0, 0x2000), (0, 0x3000))
        .power_management(0x40)
        .error_reporting(AER)
        .serial_number(0x1c0, 0x0123_4567_89ab_cdef)
        .build()
    }

    #[test]
    fn capabilities_are_chained_in_order() {
        let s = space();
        let mut next = [0];
        s.read(reg::CAPABILITIES_POINTER, &mut next);
        let mut chain = vec![];
        while next[0] != 0 {
            let mut head = [0; 2];
            s.read(usize::from(next[0]), &mut head);
            chain.push((next[0], head[0]));
            next[0] = head[1];
        }
        assert_eq!(chain, [(0x60, 0x10), (0x9c, 0x11), (0x40, 0x01)]);
        assert_eq!(s.dword(AER), 0x1c02_0001);
        assert_eq!(s.dword(0x1c0), 0x0001_0003);
        assert_eq!(s.dword(0x1c4), 0x89ab_cdef);
        assert_ne!(s.word(reg::STATUS) & reg::STATUS_CAPABILITIES_LIST, 0);
    }

    #[test]
    fn bars_size_and_place() {
        let mut s = space();
        for at in [0x10, 0x14, 0x18, 0x1c] {
            assert_eq!(s.write(at, &[0xff; 4]), []);
        }
        assert_eq!(s.dword(0x10), 0xfe00_000c);
        assert_eq!(s.dword(0x14), 0xffff_ffff);
        assert_eq!(s.dword(0x18), 0xfff0_0000);
        assert_eq!(s.dword(0x1c), 0);
        s.write(0x10, &0x0600_0000u32.to_le_bytes());
        s.write(0x14, &0x38u32.to_le_bytes());
        s.write(0x18, &0u32.to_le_bytes());
        let on = reg::COMMAND_MEMORY | reg::COMMAND_BUS_MASTER;
        assert_eq!(
            s.write(reg::COMMAND, &on.to_le_bytes()),
            [
                Event::BusMaster(true),
                Event::BarPlaced(0, Some(0x38_0600_0000))
            ]
        );
        assert_eq!(
            s.write(reg::COMMAND, &[0]),
            [Event::BusMaster(false), Event::BarPlaced(0, None)]
        );
    }

    #[test]
    fn read_only_bits_stay() {
        let mut s = space();
        let before: Vec<u32> = (0..SIZE).step_by(4).map(|at| s.dword(at)).collect();
        for at in (0..SIZE).step_by(4) {
            if at != EXPRESS + reg::EXPRESS_DEVICE_CONTROL {
                s.write(at, &[0xff; 4]);
            }
        }
        for (i, &was) in before.iter().enumerate() {
            let at = i * 4;
            let may_change = (0..4).fold(0, |m, b| m | (u32::from(s.writable[at + b]) << (8 * b)));
            assert_eq!((s.dword(at) ^ was) & !may_change, 0, "register {at:#x}");
        }
        assert_eq!(s.dword(0), 0x101b_15b3);
        assert_eq!(s.write(SIZE - 2, &[0; 8]), []);
        assert_eq!(s.dword(SIZE), !0);
    }

    #[test]
    fn error_status_is_cleared_by_ones_and_survives_resets() {
        let mut s = space();
        let status = AER + reg::AER_UNCORRECTABLE_STATUS;
        s.raise(status, 0x4010);
        s.raise(AER + reg::AER_CORRECTABLE_STATUS, 1);
        s.write(status, &0u32.to_le_bytes());
        assert_eq!(s.dword(status), 0x4010);
        s.write(status, &0x10u32.to_le_bytes());
        assert_eq!(s.dword(status), 0x4000);
        s.reset(ResetKind::Bus);
        s.reset(ResetKind::FunctionLevel);
        assert_eq!(s.dword(status), 0x4000);
        assert_eq!(s.dword(AER + reg::AER_CORRECTABLE_STATUS), 1);
        s.raise(status, 0xffff_ffff);
        assert_eq!(
            s.dword(status) & !reg::AER_UNCORRECTABLE_ERRORS,
            0,
            "reserved bits cannot be raised"
        );
    }

    #[test]
    fn errors_are_reported_where_a_driver_looks() {
        let mut s = space();
        assert_eq!(
            s.report_errors(ErrorKind::Uncorrectable, 0x8000_4000),
            0x4000
        );
        let device_status = EXPRESS + reg::EXPRESS_DEVICE_STATUS;
        assert_eq!(s.word(device_status), reg::DEVICE_STATUS_NONFATAL);
        assert_eq!(s.dword(AER + reg::AER_CONTROL), 14);
        s.report_errors(ErrorKind::Uncorrectable, 0x10);
        s.report_errors(ErrorKind::Correctable, 1);
        assert_eq!(s.word(device_status), 0x7);
        assert_eq!(s.dword(AER + reg::AER_UNCORRECTABLE_STATUS), 0x4010);
        assert_eq!(s.dword(AER + reg::AER_CONTROL), 14, "the first error stays");
        s.write(device_status, &[0x2]);
        assert_eq!(s.word(device_status), 0x5);
        s.write(AER + reg::AER_UNCORRECTABLE_STATUS, &[0xff; 4]);
        s.write(AER + reg::AER_UNCORRECTABLE_MASK, &0x4000u32.to_le_bytes());
        s.report_errors(ErrorKind::Uncorrectable, 0x4000);
        s.report_errors(ErrorKind::Uncorrectable, 0x1000);
        assert_eq!(
            s.dword(AER + reg::AER_CONTROL),
            12,
            "masked errors are not first"
        );
    }

    #[test]
    fn function_level_reset() {
        let mut s = space();
        let control = EXPRESS + reg::EXPRESS_DEVICE_CONTROL;
        s.write(0x10, &0x0600_0000u32.to_le_bytes());
        s.write(reg::COMMAND, &[0x06]);
        s.write(control, &[0x4f]);
        assert_eq!(
            s.write(control + 1, &[0x80]),
            [
                Event::BusMaster(false),
                Event::BarPlaced(0, None),
                Event::Reset(ResetKind::FunctionLevel)
            ]
        );
        assert_eq!(
            s.word(control),
            0x2850,
            "payload size kept, error enables cleared, the bit reads 0"
        );
        assert_eq!(s.dword(0x10), 0xc);
        let whole = (s.word(control) | reg::DEVICE_CONTROL_FLR).to_le_bytes();
        assert_eq!(
            s.write(control, &whole),
            [Event::Reset(ResetKind::FunctionLevel)]
        );
        s.reset(ResetKind::Bus);
        assert_eq!(s.word(control), 0x2810);
    }

    #[test]
    fn no_function_level_reset_without_the_capability() {
        let mut s = Builder::new(Identity {
            vendor: 0x15b3,
            device: 1,
            subsystem_vendor: 0,
            subsystem: 0,
            class: 0,
            revision: 0,
        })
        .express(
            EXPRESS,
            Express {
                device_capabilities: 0x8fe2,
                ..Express::gen4_x16()
            },
        )
        .build();
        assert_eq!(
            s.write(EXPRESS + reg::EXPRESS_DEVICE_CONTROL, &[0x10, 0xa8]),
            []
        );
        assert_eq!(s.word(EXPRESS + reg::EXPRESS_DEVICE_CONTROL), 0x2810);
    }

    #[test]
    #[should_panic(expected = "overlap")]
    fn overlapping_capabilities_are_a_bug() {
        Builder::new(Identity {
            vendor: 1,
            device: 1,
            subsystem_vendor: 0,
            subsystem: 0,
            class: 0,
            revision: 0,
        })
        .power_management(0x60)
        .express(0x64, Express::gen4_x16());
    }
}
