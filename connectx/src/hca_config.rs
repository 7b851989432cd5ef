// SPDX-License-Identifier: MIT OR Apache-2.0
//! The config space of a ConnectX-6 InfiniBand function, physical or virtual, as its Linux driver and `lspci` expect it.

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

/// The virtual function of a ConnectX-6 (`mlx5_core_pci_table`, with `MLX5_PCI_DEV_IS_VF`).
const VF_DEVICE_ID: u16 = 0x101c;

/// Config space of a physical function at power-on. `serial` becomes the Device Serial Number (an EUI-64, as the node
/// GUID). With `acs` it has the Access Control Services that ConnectX functions have: none of them can be switched, since
/// requests between its functions never stay inside the device.
pub fn config_space(serial: u64, acs: bool) -> ConfigSpace {
    let builder = builder(DEVICE_ID, Express::gen4_x16())
        .power_management(0x40)
        .error_reporting(0x100)
        .serial_number(0x1c0, serial);
    match acs {
        true => builder.access_control(0x1d0).build(),
        false => builder.build(),
    }
}

/// Config space of a virtual function that a guest was given. The link, its power and its errors are its physical
/// function's: the link's status reads 0 (PCIe 9.3.5.8), and neither power management nor error reporting is there.
pub fn config_space_of_vf(acs: bool) -> ConfigSpace {
    let express = Express {
        link_status: 0,
        ..Express::gen4_x16()
    };
    let builder = builder(VF_DEVICE_ID, express);
    match acs {
        true => builder.access_control(0x100).build(),
        false => builder.build(),
    }
}

fn builder(device: u16, express: Express) -> Builder {
    // Class 0x0207 is an InfiniBand controller.
    Builder::new(Identity {
        vendor: 0x15b3,
        device,
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
    .express(0x60, express)
    .msix(0x9c, MSIX_VECTORS, (0, MSIX_TABLE), (0, MSIX_PENDING))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_virtual_function_has_neither_link_nor_power_nor_errors_of_its_own() {
        for acs in [false, true] {
            let (pf, vf) = (config_space(1, acs), config_space_of_vf(acs));
            let ids = |space: &ConfigSpace| space.dword(0);
            assert_eq!((ids(&pf), ids(&vf)), (0x101b_15b3, 0x101c_15b3));
            // Link status and control of the capability at 0x60.
            let link = |space: &ConfigSpace| space.dword(0x60 + 0x10) >> 16;
            assert_eq!((link(&pf), link(&vf)), (0x104, 0));
            // Capabilities at 0x40 and 0x100.
            assert_eq!((pf.dword(0x40) & 0xff, vf.dword(0x40)), (0x01, 0));
            let first = if acs { 0x000d } else { 0 };
            assert_eq!(
                (pf.dword(0x100) & 0xffff, vf.dword(0x100) & 0xffff),
                (0x0001, first)
            );
        }
    }
}
