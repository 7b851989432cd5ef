// SPDX-License-Identifier: MIT OR Apache-2.0
//! Registers of config space, by their names in the PCI Express Base Specification 6.0 (sections in brackets).
//!
//! Offsets of capability registers are relative to the capability.

/// Vendor ID [7.5.1.1.1]; Device ID follows.
pub const VENDOR_ID: usize = 0x00;
/// Device ID [7.5.1.1.2].
pub const DEVICE_ID: usize = 0x02;
/// Command [7.5.1.1.3].
pub const COMMAND: usize = 0x04;
/// Command: Memory Space Enable.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Command: Bus Master Enable.
pub const COMMAND_BUS_MASTER: u16 = 1 << 2;
/// Command: Parity Error Response.
pub const COMMAND_PARITY: u16 = 1 << 6;
/// Command: SERR# Enable.
pub const COMMAND_SERR: u16 = 1 << 8;
/// Command: Interrupt Disable.
pub const COMMAND_INTX_DISABLE: u16 = 1 << 10;
/// Status [7.5.1.1.4].
pub const STATUS: usize = 0x06;
/// Status: Capabilities List.
pub const STATUS_CAPABILITIES_LIST: u16 = 1 << 4;
/// Status: Master Data Parity Error, the aborts, Signaled System Error, Detected Parity Error: all RW1C.
pub const STATUS_ERRORS: u16 = 0xf900;
/// Revision ID [7.5.1.1.5]; the three bytes of Class Code [7.5.1.1.6] follow.
pub const REVISION_ID: usize = 0x08;
/// Class Code [7.5.1.1.6], three bytes: interface, sub-class, base class.
pub const CLASS_CODE: usize = 0x09;
/// Cache Line Size [7.5.1.1.7], writable and without effect.
pub const CACHE_LINE_SIZE: usize = 0x0c;
/// Subsystem Vendor ID [7.5.1.2.3].
pub const SUBSYSTEM_VENDOR_ID: usize = 0x2c;
/// Subsystem ID [7.5.1.2.3].
pub const SUBSYSTEM_ID: usize = 0x2e;
/// Capabilities Pointer [7.5.1.1.11].
pub const CAPABILITIES_POINTER: usize = 0x34;
/// Interrupt Line [7.5.1.1.12], writable and without effect.
pub const INTERRUPT_LINE: usize = 0x3c;
/// Where capabilities may begin: after the type 0 header.
pub const CAPABILITIES_START: usize = 0x40;
/// Where extended capabilities begin [7.6.1].
pub const EXTENDED_START: usize = 0x100;

/// Base Address Register [7.5.1.2.1] of an index from 0 to 5.
pub const fn bar(index: usize) -> usize {
    0x10 + 4 * index
}
/// BAR: the address bits of a memory BAR.
pub const BAR_ADDRESS_MASK: u32 = !0xf;
/// BAR: 64-bit memory type.
pub const BAR_64: u32 = 0x4;
/// BAR: prefetchable.
pub const BAR_PREFETCHABLE: u32 = 0x8;

/// Capability ID of PCI Power Management [7.5.2].
pub const ID_POWER_MANAGEMENT: u8 = 0x01;
/// Length of the power management capability.
pub const POWER_MANAGEMENT_LEN: usize = 8;
/// Power Management Capabilities [7.5.2.1].
pub const PM_CAPABILITIES: usize = 2;
/// Power Management Control/Status [7.5.2.2].
pub const PM_CONTROL: usize = 4;
/// PM control: power state.
pub const PM_CONTROL_STATE: u16 = 0x3;
/// PM control: No_Soft_Reset; config space outlives D3hot.
pub const PM_CONTROL_NO_SOFT_RESET: u16 = 1 << 3;

/// Capability ID of PCI Express [7.5.3].
pub const ID_EXPRESS: u8 = 0x10;
/// Length of a version 2 PCI Express capability.
pub const EXPRESS_LEN: usize = 0x3c;
/// PCI Express Capabilities [7.5.3.2]: version, port type.
pub const EXPRESS_CAPABILITIES: usize = 0x02;
/// Device Capabilities [7.5.3.3].
pub const EXPRESS_DEVICE_CAPABILITIES: usize = 0x04;
/// Device Capabilities: Function Level Reset Capability.
pub const DEVICE_CAPABILITIES_FLR: u32 = 1 << 28;
/// Device Control [7.5.3.4].
pub const EXPRESS_DEVICE_CONTROL: usize = 0x08;
/// Device Control: all but Initiate Function Level Reset.
pub const DEVICE_CONTROL_WRITABLE: u16 = 0x7fff;
/// Device Control: Max_Payload_Size.
pub const DEVICE_CONTROL_PAYLOAD: u16 = 0x00e0;
/// Device Control: Initiate Function Level Reset.
pub const DEVICE_CONTROL_FLR: u16 = 1 << 15;
/// Device Status [7.5.3.5].
pub const EXPRESS_DEVICE_STATUS: usize = 0x0a;
/// Device Status: Correctable Error Detected.
pub const DEVICE_STATUS_CORRECTABLE: u16 = 1 << 0;
/// Device Status: Non-Fatal Error Detected.
pub const DEVICE_STATUS_NONFATAL: u16 = 1 << 1;
/// Device Status: Fatal Error Detected.
pub const DEVICE_STATUS_FATAL: u16 = 1 << 2;
/// Device Status: correctable, non-fatal, fatal, unsupported request: RW1C.
pub const DEVICE_STATUS_ERRORS: u16 = 0x000f;
/// Link Capabilities [7.5.3.6].
pub const EXPRESS_LINK_CAPABILITIES: usize = 0x0c;
/// Link Control [7.5.3.7].
pub const EXPRESS_LINK_CONTROL: usize = 0x10;
/// Link Control of an endpoint: ASPM, RCB, common clock, extended synch, clock power management.
pub const LINK_CONTROL_WRITABLE: u16 = 0x01cb;
/// Link Status [7.5.3.8].
pub const EXPRESS_LINK_STATUS: usize = 0x12;
/// Device Capabilities 2 [7.5.3.15].
pub const EXPRESS_DEVICE_CAPABILITIES_2: usize = 0x24;
/// Device Control 2 [7.5.3.16].
pub const EXPRESS_DEVICE_CONTROL_2: usize = 0x28;
/// Device Control 2: completion timeout value and disable.
pub const DEVICE_CONTROL_2_WRITABLE: u16 = 0x001f;
/// Link Capabilities 2 [7.5.3.18].
pub const EXPRESS_LINK_CAPABILITIES_2: usize = 0x2c;
/// Link Control 2 [7.5.3.19].
pub const EXPRESS_LINK_CONTROL_2: usize = 0x30;
/// Link Control 2: target link speed.
pub const LINK_CONTROL_2_SPEED: u16 = 0x000f;

/// Capability ID of MSI-X [7.7.2].
pub const ID_MSIX: u8 = 0x11;
/// Length of the MSI-X capability.
pub const MSIX_LEN: usize = 12;
/// MSI-X Message Control [7.7.2.2].
pub const MSIX_CONTROL: usize = 2;
/// MSI-X Message Control: Function Mask and MSI-X Enable.
pub const MSIX_CONTROL_WRITABLE: u16 = 0xc000;
/// MSI-X Message Control: Function Mask.
pub const MSIX_CONTROL_MASK: u16 = 0x4000;
/// MSI-X Table Offset and BIR [7.7.2.3].
pub const MSIX_TABLE: usize = 4;
/// MSI-X PBA Offset and BIR [7.7.2.4].
pub const MSIX_PBA: usize = 8;

/// Extended capability ID of Access Control Services [7.7.11].
pub const ID_ACS: u16 = 0x000d;
/// Length of the capability without an egress control vector.
pub const ACS_LEN: usize = 8;

/// Extended capability ID of Advanced Error Reporting [7.8.4].
pub const ID_AER: u16 = 0x0001;
/// Length of a version 2 AER capability, with the TLP prefix log.
pub const AER_LEN: usize = 0x48;
/// Uncorrectable Error Status [7.8.4.2].
pub const AER_UNCORRECTABLE_STATUS: usize = 0x04;
/// Uncorrectable Error Mask [7.8.4.3].
pub const AER_UNCORRECTABLE_MASK: usize = 0x08;
/// Uncorrectable Error Severity [7.8.4.4].
pub const AER_UNCORRECTABLE_SEVERITY: usize = 0x0c;
/// The uncorrectable errors an endpoint has: all that 7.8.4.2 defines but Surprise Down, which is a downstream port's.
pub const AER_UNCORRECTABLE_ERRORS: u32 = 0x07ff_f010;
/// Severity at power-on: Data Link Protocol, Flow Control, Receiver Overflow, Malformed TLP and Uncorrectable Internal
/// are fatal.
pub const AER_SEVERITY_DEFAULT: u32 = 0x0046_2010;
/// Correctable Error Status [7.8.4.5].
pub const AER_CORRECTABLE_STATUS: usize = 0x10;
/// Correctable Error Mask [7.8.4.6].
pub const AER_CORRECTABLE_MASK: usize = 0x14;
/// The correctable errors that have a bit, up to Header Log Overflow.
pub const AER_CORRECTABLE_ERRORS: u32 = 0x0000_f1c1;
/// Correctable mask at power-on: Advisory Non-Fatal.
pub const AER_CORRECTABLE_MASK_DEFAULT: u32 = 0x2000;
/// Advanced Error Capabilities and Control [7.8.4.7].
pub const AER_CONTROL: usize = 0x18;
/// AER control, lowest byte: First Error Pointer.
pub const AER_CONTROL_FIRST_ERROR: u8 = 0x1f;

/// Extended capability ID of Device Serial Number [7.9.3].
pub const ID_SERIAL_NUMBER: u16 = 0x0003;
/// Length of the serial number capability.
pub const SERIAL_NUMBER_LEN: usize = 12;
