// SPDX-License-Identifier: MIT OR Apache-2.0
//! The performance management agent of a port (IBA 16.1).

use super::{Refused, method};
use crate::ifc::mad::{class_port_info, mad, port_counters, port_counters_extended};
use crate::objects::device::{Counters, Device};

#[allow(missing_docs)]
pub const CLASS_PORT_INFO: u16 = 0x01;
#[allow(missing_docs)]
pub const PORT_COUNTERS: u16 = 0x12;
#[allow(missing_docs)]
pub const PORT_COUNTERS_EXTENDED: u16 = 0x1d;

/// All ports.
const ALL_PORTS: u64 = 0xff;
/// The port that was asked: `perfquery LID` selects none. mlx5_ib, where it answers itself, does not look at the selection
/// at all (mad.c, `process_pma_cmd`).
const THIS_PORT: u64 = 0;
/// PortCountersExtended is there, without those that tell unicast from multicast packets (IBA 16.1.3.1).
const CAPABILITIES: u64 = 1 << 10;
/// Data is counted in words.
const WORD: u64 = 4;

/// What a port has counted since it was told to begin anew.
#[derive(Debug, Default, Clone, Copy)]
pub struct Traffic {
    xmit_data: u64,
    rcv_data: u64,
    xmit_pkts: u64,
    rcv_pkts: u64,
    discards: u64,
}

impl Traffic {
    fn total(counters: &Counters) -> Self {
        Self {
            xmit_data: counters.bytes_sent / WORD,
            rcv_data: counters.bytes_received / WORD,
            xmit_pkts: counters.packets_sent,
            rcv_pkts: counters.packets_received,
            discards: counters.packets_dropped,
        }
    }

    fn since(self, start: Self) -> Self {
        Self {
            xmit_data: self.xmit_data.saturating_sub(start.xmit_data),
            rcv_data: self.rcv_data.saturating_sub(start.rcv_data),
            xmit_pkts: self.xmit_pkts.saturating_sub(start.xmit_pkts),
            rcv_pkts: self.rcv_pkts.saturating_sub(start.rcv_pkts),
            discards: self.discards.saturating_sub(start.discards),
        }
    }
}

/// Fills in the data of an answer. Set clears the counters, all of them.
pub(super) fn answer(device: &mut Device, request: &mut [u8]) -> Result<(), Refused> {
    let set = match mad::method.get(request) as u8 {
        method::GET => false,
        method::SET => true,
        _ => return Err(Refused::Method),
    };
    let attribute = mad::attribute_id.get(request) as u16;
    let data = mad::data.bytes_mut(request);
    match (attribute, set) {
        (CLASS_PORT_INFO, false) => {
            data.fill(0);
            for (field, value) in [
                (class_port_info::base_version, 1),
                (class_port_info::class_version, 1),
                (class_port_info::capability_mask, CAPABILITIES),
                (class_port_info::resp_time_value, 16),
            ] {
                field.set(data, value);
            }
            return Ok(());
        }
        (PORT_COUNTERS | PORT_COUNTERS_EXTENDED, _) => {}
        _ => return Err(Refused::Attribute),
    }
    // At the same place in both.
    let (port, select) = (
        port_counters::port_select.get(data),
        port_counters::counter_select.get(data),
    );
    if !matches!(port, 1 | THIS_PORT | ALL_PORTS) {
        return Err(Refused::Value);
    }
    let total = Traffic::total(&device.counters);
    if set && select != 0 {
        device.port.counted_from = total;
    }
    let now = total.since(device.port.counted_from);
    data.fill(0);
    // Counters of 32 bits and less stop at their highest value (IBA 16.1.3.5).
    let sticky = |value: u64, width: u32| value.min((1 << width) - 1);
    if attribute == PORT_COUNTERS {
        for (field, value) in [
            (port_counters::port_select, port),
            (port_counters::counter_select, select),
            (port_counters::port_xmit_discards, sticky(now.discards, 16)),
            (port_counters::port_xmit_data, sticky(now.xmit_data, 32)),
            (port_counters::port_rcv_data, sticky(now.rcv_data, 32)),
            (port_counters::port_xmit_pkts, sticky(now.xmit_pkts, 32)),
            (port_counters::port_rcv_pkts, sticky(now.rcv_pkts, 32)),
        ] {
            field.set(data, value);
        }
        return Ok(());
    }
    for (field, value) in [
        (port_counters_extended::port_select, port),
        (port_counters_extended::counter_select, select),
        (port_counters_extended::port_xmit_data, now.xmit_data),
        (port_counters_extended::port_rcv_data, now.rcv_data),
        (port_counters_extended::port_xmit_pkts, now.xmit_pkts),
        (port_counters_extended::port_rcv_pkts, now.rcv_pkts),
    ] {
        field.set(data, value);
    }
    Ok(())
}
