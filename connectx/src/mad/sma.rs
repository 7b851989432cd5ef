// SPDX-License-Identifier: MIT OR Apache-2.0
//! The subnet management agent of a port (IBA 14.2). The subnet is managed from inside the model, so nobody may Set.

use super::{Refused, method};
use crate::ifc::mad::{mad, node_info, port_info};
use crate::objects::device::Device;
use crate::wire::port::{DEVICE_ID, GIDS, PKEYS, Port, SM_LID, SUBNET_PREFIX};

#[allow(missing_docs)]
pub const NODE_DESCRIPTION: u16 = 0x10;
#[allow(missing_docs)]
pub const NODE_INFO: u16 = 0x11;
#[allow(missing_docs)]
pub const GUID_INFO: u16 = 0x14;
#[allow(missing_docs)]
pub const PORT_INFO: u16 = 0x15;
#[allow(missing_docs)]
pub const P_KEY_TABLE: u16 = 0x16;

/// Entries of a block of GUIDInfo and of P_KeyTable.
const GUIDS_IN_BLOCK: usize = 8;
const PKEYS_IN_BLOCK: usize = 32;
/// Channel adapter.
const NODE_TYPE_CA: u64 = 1;
/// Mellanox' OUI.
const VENDOR: u64 = 0x2c9;
/// 4X.
const WIDTH: u64 = 2;
/// 2.5, 5 and 10 Gb/s, the classic speeds; and FDR, EDR and HDR.
const SPEEDS: u64 = 7;
const QDR: u64 = 4;
const SPEEDS_EXT: u64 = 7;
const HDR: u64 = 4;
/// 4096 bytes.
const MTU: u64 = 5;
/// VL0 to VL7.
const VLS: u64 = 4;
/// The answer comes within 4.096 us times two to this.
const RESP_TIME: u64 = 16;

/// Fills in the data of an answer.
pub(super) fn answer(device: &Device, smp: &mut [u8]) -> Result<(), Refused> {
    let (attribute, modifier) = (
        mad::attribute_id.get(smp) as u16,
        mad::attribute_modifier.get(smp),
    );
    match mad::method.get(smp) as u8 {
        method::GET => {}
        method::SET => return Err(Refused::Attribute),
        _ => return Err(Refused::Method),
    }
    let data = mad::data.bytes_mut(smp);
    // The block that the modifier's low half names.
    let block = (modifier & 0xffff) as usize;
    match attribute {
        NODE_DESCRIPTION => fill(data, &device.node_description()),
        NODE_INFO => fill(data, &node(&device.port)),
        PORT_INFO => match modifier & 0xff {
            // 0 is the port that the request came in by.
            0 | 1 => fill(data, &port(&device.port)),
            _ => return Err(Refused::Value),
        },
        GUID_INFO => {
            let first = block * GUIDS_IN_BLOCK;
            if first >= GIDS {
                return Err(Refused::Value);
            }
            let entries = first..first + GUIDS_IN_BLOCK;
            let guids = entries.flat_map(|index| {
                let gid = device.port.gid(index);
                <[u8; 8]>::try_from(&gid[8..]).expect("half of a GID")
            });
            fill(data, &guids.collect::<Vec<_>>());
        }
        P_KEY_TABLE => {
            let first = block * PKEYS_IN_BLOCK;
            if first >= PKEYS {
                return Err(Refused::Value);
            }
            let entries = first..first + PKEYS_IN_BLOCK;
            let keys = entries.flat_map(|index| device.port.pkey(index).to_be_bytes());
            fill(data, &keys.collect::<Vec<_>>());
        }
        _ => return Err(Refused::Attribute),
    }
    Ok(())
}

fn fill(data: &mut [u8], with: &[u8]) {
    data.fill(0);
    data[..with.len()].copy_from_slice(with);
}

/// NodeInfo of a function.
pub(super) fn node(port: &Port) -> Vec<u8> {
    let mut info = vec![0; node_info::SIZE];
    for (field, value) in [
        (node_info::base_version, 1),
        (node_info::class_version, 1),
        (node_info::node_type, NODE_TYPE_CA),
        (node_info::num_ports, 1),
        (node_info::system_image_guid, port.guid),
        (node_info::node_guid, port.guid),
        (node_info::port_guid, port.guid),
        (node_info::partition_cap, PKEYS as u64),
        (node_info::device_id, u64::from(DEVICE_ID)),
        (node_info::local_port_num, 1),
        (node_info::vendor_id, VENDOR),
    ] {
        field.set(&mut info, value);
    }
    info
}

/// PortInfo of a function's port.
pub(super) fn port(port: &Port) -> Vec<u8> {
    let mut info = vec![0; port_info::SIZE];
    for (field, value) in [
        (port_info::gid_prefix, SUBNET_PREFIX),
        (port_info::lid, u64::from(port.lid)),
        (port_info::master_sm_lid, u64::from(SM_LID)),
        (port_info::capability_mask, port.cap_mask.into()),
        (port_info::local_port_num, 1),
        (port_info::link_width_enabled, WIDTH),
        (port_info::link_width_supported, WIDTH),
        (port_info::link_width_active, WIDTH),
        (port_info::link_speed_supported, SPEEDS),
        (port_info::port_state, port.state as u64),
        (port_info::port_physical_state, port.physical_state()),
        // Polling.
        (port_info::link_down_default_state, 2),
        (port_info::link_speed_active, QDR),
        (port_info::link_speed_enabled, SPEEDS),
        (port_info::neighbor_mtu, MTU),
        (port_info::vl_cap, VLS),
        (port_info::mtu_cap, MTU),
        (port_info::operational_vls, VLS),
        (port_info::guid_cap, GIDS as u64),
        (port_info::subnet_timeout, 18),
        (port_info::resp_time_value, RESP_TIME),
        (port_info::link_speed_ext_active, HDR),
        (port_info::link_speed_ext_supported, SPEEDS_EXT),
        (port_info::link_speed_ext_enabled, SPEEDS_EXT),
    ] {
        field.set(&mut info, value);
    }
    info
}
