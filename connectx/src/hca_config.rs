// SPDX-License-Identifier: MIT OR Apache-2.0
//! The config space of a ConnectX-6 InfiniBand function, as its Linux driver and `lspci` expect it.

use crate::pci::{Bar, Builder, ConfigSpace, Express, Identity};
use crate::wire::port::DEVICE_ID;

/// Bytes of BAR 0: the initialization segment, MSI-X tables and UAR pages.
pub const BAR0_SIZE: u64 = 32 << 20;
/// MSI-X vectors.
pub const MSIX_VECTORS: u16 = 16;
/// Offset of the MSI-X table in BAR 0. The host's interrupt emulation owns these pages, so no UAR may lie there.
pub const MSIX_TABLE: u32 = 0x2000;
/// Offset of the MSI-X pending bits in BAR 0.
pub const MSIX_PENDING: u32 = 0x3000;

/// Config space at power-on. `serial` becomes the Device Serial Number (an EUI-64, as the node GUID).
pub fn config_space(serial: u64) -> ConfigSpace {
    builder(serial).build()
}

/// As [`config_space`], with the Access Control Services that ConnectX functions have: none of them can be switched,
/// since requests between its functions never stay inside the device.
pub fn config_space_with_acs(serial: u64) -> ConfigSpace {
    builder(serial).access_control(0x1d0).build()
}

fn builder(serial: u64) -> Builder {
    // Class 0x0207 is an InfiniBand controller.
    Builder::new(Identity {
        vendor: 0x15b3,
        device: DEVICE_ID,
        subsystem_vendor: 0x15b3,
        subsystem: 0x0007,
        class: 0x02_0700,
        revision: 0,
    })
    .bar(
        0,
        Bar::Memory64 {
            size: BAR0_SIZE,
            prefetchable: true,
        },
    )
    .express(0x60, Express::gen4_x16())
    .msix(0x9c, MSIX_VECTORS, (0, MSIX_TABLE), (0, MSIX_PENDING))
    .power_management(0x40)
    .error_reporting(0x100)
    .serial_number(0x1c0, serial)
}
