// SPDX-License-Identifier: MIT OR Apache-2.0
//! Management datagrams: the agents of a port (`sma`, `pma`), which the driver reaches by MAD_IFC, and the subnet
//! administration (`sa`) at the subnet manager's LID.

pub mod pma;
pub mod sa;
pub mod sma;

use crate::ifc::mad::mad;
use crate::objects::device::Device;

/// Methods (IBA 13.4.5, 15.2.2).
pub mod method {
    #![allow(missing_docs)]
    pub const GET: u8 = 0x01;
    pub const SET: u8 = 0x02;
    pub const GET_TABLE: u8 = 0x12;
    pub const DELETE: u8 = 0x15;
    pub const RESPONSE: u8 = 0x80;
}

/// Management classes (IBA 13.4.4).
pub mod class {
    #![allow(missing_docs)]
    pub const SUBN_LID_ROUTED: u8 = 0x01;
    pub const SUBN_ADM: u8 = 0x03;
    pub const PERF: u8 = 0x04;
    pub const SUBN_DIRECTED_ROUTE: u8 = 0x81;
}

/// Why a request is not done, as the answer's status says (IBA 13.4.7; 15.2.3 for those of the subnet administration).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Refused {
    /// The class is not there, or not in this version.
    Class = 0x04,
    /// The method is not.
    Method = 0x08,
    /// The attribute is not, or not with this method.
    Attribute = 0x0c,
    /// A field of the attribute or its modifier has a wrong value.
    Value = 0x1c,
    /// The subnet administration has no room.
    NoResources = 0x0100,
    /// The request makes no sense.
    Invalid = 0x0200,
    /// There is nothing such.
    NoRecords = 0x0300,
    /// More than one, though one was asked for.
    TooManyRecords = 0x0400,
    /// More components must be given.
    InsufficientComponents = 0x0600,
}

/// Bytes of a datagram.
pub const LEN: usize = mad::SIZE;

/// Answers a datagram to the agents of a function's port, or nothing if it wants no answer.
pub fn agent(device: &mut Device, request: &[u8]) -> Option<Vec<u8>> {
    if mad::method.get(request) as u8 & method::RESPONSE != 0 {
        return None;
    }
    let mut answer = request.to_vec();
    answer.resize(LEN, 0);
    let done = match (
        mad::mgmt_class.get(request) as u8,
        mad::class_version.get(request),
    ) {
        (class::SUBN_LID_ROUTED | class::SUBN_DIRECTED_ROUTE, 1) => {
            sma::answer(device, &mut answer)
        }
        (class::PERF, 1) => pma::answer(device, &mut answer),
        _ => Err(Refused::Class),
    };
    finish(&mut answer, done);
    Some(answer)
}

/// Makes an answer of a datagram in which only the data is one yet.
fn finish(answer: &mut [u8], done: Result<(), Refused>) {
    let method = mad::method.get(answer) as u8;
    // The answer to a Set is a GetResp too.
    let method = match method {
        method::SET => method::GET,
        other => other,
    };
    mad::method.set(answer, u64::from(method | method::RESPONSE));
    mad::status.set(answer, done.err().map_or(0, |refused| refused as u64));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ifc::mad::{node_info, port_counters, port_info};
    use crate::log::Referee;
    use crate::wire::port::Port;

    fn ask(device: &mut Device, class: u8, method: u8, attribute: u16, modifier: u32) -> Vec<u8> {
        let mut request = vec![0; LEN];
        mad::base_version.set(&mut request, 1);
        mad::mgmt_class.set(&mut request, class.into());
        mad::class_version.set(&mut request, 1);
        mad::method.set(&mut request, method.into());
        mad::transaction_id.set(&mut request, 0x1234_5678_9abc_def0);
        mad::attribute_id.set(&mut request, attribute.into());
        mad::attribute_modifier.set(&mut request, modifier.into());
        let answer = agent(device, &request).expect("an answer");
        assert_eq!(mad::transaction_id.get(&answer), 0x1234_5678_9abc_def0);
        answer
    }

    fn device() -> Device {
        Device::new("nic0".into(), Port::test(), Referee::in_memory())
    }

    #[test]
    fn a_port_says_what_it_is() {
        let mut device = device();
        for class in [class::SUBN_LID_ROUTED, class::SUBN_DIRECTED_ROUTE] {
            let answer = ask(&mut device, class, method::GET, sma::NODE_INFO, 0);
            assert_eq!(mad::method.get(&answer), 0x81);
            assert_eq!(mad::status.get(&answer), 0);
            let info = mad::data.bytes(&answer);
            assert_eq!(node_info::node_guid.get(info), 0x1122_3344_5566_7788);
            assert_eq!(node_info::vendor_id.get(info), 0x2c9);
        }
        let answer = ask(
            &mut device,
            class::SUBN_LID_ROUTED,
            method::GET,
            sma::PORT_INFO,
            1,
        );
        let info = mad::data.bytes(&answer);
        assert_eq!(port_info::lid.get(info), 1);
        assert_eq!(port_info::port_state.get(info), 4);
        let keys = ask(
            &mut device,
            class::SUBN_LID_ROUTED,
            method::GET,
            sma::P_KEY_TABLE,
            0,
        );
        assert_eq!(mad::data.bytes(&keys)[..4], [0xff, 0xff, 0, 0]);
    }

    #[test]
    fn what_is_not_there_has_its_status() {
        let mut device = device();
        for (class, method, attribute, modifier, status) in [
            (
                class::SUBN_LID_ROUTED,
                method::GET,
                0x7777,
                0,
                Refused::Attribute,
            ),
            (
                class::SUBN_LID_ROUTED,
                method::SET,
                sma::PORT_INFO,
                1,
                Refused::Attribute,
            ),
            (
                class::SUBN_LID_ROUTED,
                method::DELETE,
                sma::PORT_INFO,
                1,
                Refused::Method,
            ),
            (
                class::SUBN_LID_ROUTED,
                method::GET,
                sma::PORT_INFO,
                2,
                Refused::Value,
            ),
            (
                class::SUBN_LID_ROUTED,
                method::GET,
                sma::P_KEY_TABLE,
                4,
                Refused::Value,
            ),
            (
                class::SUBN_LID_ROUTED,
                method::GET,
                sma::GUID_INFO,
                1,
                Refused::Value,
            ),
            (class::PERF, method::GET, 0x7777, 0, Refused::Attribute),
            (0x07, method::GET, 1, 0, Refused::Class),
        ] {
            let answer = ask(&mut device, class, method, attribute, modifier);
            assert_eq!(
                mad::status.get(&answer),
                status as u64,
                "class {class:#x} method {method:#x} attribute {attribute:#x}"
            );
        }
        let mut response = vec![0; LEN];
        mad::method.set(&mut response, 0x81);
        assert_eq!(agent(&mut device, &response), None);
        // A datagram that was cut.
        assert_eq!(
            agent(&mut device, &[]).map(|answer| answer.len()),
            Some(LEN)
        );
    }

    #[test]
    fn counters_count_and_can_be_cleared() {
        let mut device = device();
        device.counters.packets_sent = 7;
        device.counters.bytes_sent = 40;
        let sent = |device: &mut Device, method| {
            let mut request = vec![0; LEN];
            mad::mgmt_class.set(&mut request, class::PERF.into());
            mad::class_version.set(&mut request, 1);
            mad::method.set(&mut request, u64::from(method));
            mad::attribute_id.set(&mut request, pma::PORT_COUNTERS.into());
            let data = mad::data.bytes_mut(&mut request);
            port_counters::counter_select.set(data, 0xffff);
            for (port, status) in [(2, Refused::Value as u64), (0xff, 0), (0, 0), (1, 0)] {
                let mut request = request.clone();
                // Clearing comes last.
                if port != 1 {
                    mad::method.set(&mut request, method::GET.into());
                }
                let data = mad::data.bytes_mut(&mut request);
                port_counters::port_select.set(data, port);
                for attribute in [pma::PORT_COUNTERS, pma::PORT_COUNTERS_EXTENDED] {
                    mad::attribute_id.set(&mut request, attribute.into());
                    let answer = agent(device, &request).unwrap();
                    assert_eq!(mad::status.get(&answer), status, "port {port}");
                }
            }
            let data = mad::data.bytes_mut(&mut request);
            port_counters::port_select.set(data, 1);
            let answer = agent(device, &request).unwrap();
            assert_eq!(mad::status.get(&answer), 0);
            let data = mad::data.bytes(&answer);
            (
                port_counters::port_xmit_pkts.get(data),
                port_counters::port_xmit_data.get(data),
            )
        };
        // Data is counted in words of four bytes.
        assert_eq!(sent(&mut device, method::GET), (7, 10));
        assert_eq!(sent(&mut device, method::SET), (0, 0));
        device.counters.packets_sent = 9;
        assert_eq!(sent(&mut device, method::GET), (2, 0));
    }
}
