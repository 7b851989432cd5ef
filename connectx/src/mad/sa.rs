// SPDX-License-Identifier: MIT OR Apache-2.0
//! The subnet administration (IBA 15.2): what connection managers, IPoIB and tools ask the subnet manager for.

use super::{LEN, Refused, class, finish, method, sma};
use crate::ifc::Field;
use crate::ifc::mad::{
    class_port_info, mad, mc_member_record as group_record, node_record, path_record,
    port_info_record,
};
use crate::objects::device::Device;
use crate::wire::port::{DEFAULT_PKEY, Port, PortState};

const CLASS_PORT_INFO: u16 = 0x01;
const NODE_RECORD: u16 = 0x11;
const PORT_INFO_RECORD: u16 = 0x12;
const PATH_RECORD: u16 = 0x35;
const MC_MEMBER_RECORD: u16 = 0x38;

/// Multicast groups at one time.
const MAX_GROUPS: usize = 256;
/// First multicast LID.
const FIRST_MLID: u16 = 0xc000;
/// Segments of one answer: what a receiver takes without acknowledging any (`recv_q_size >> 3` in the kernel's ib_mad).
const MAX_SEGMENTS: usize = 64;
/// A segment's data, and the administration's header before it, which counts as payload (IBA 13.6.2.1).
const SEGMENT: usize = 200;
const HEADER: usize = 20;
/// RMPP (IBA 13.6.2): data; the segment is part of an answer, the first, the last.
const RMPP_DATA: u64 = 1;
const ACTIVE: u64 = 1;
const FIRST: u64 = 2;
const LAST: u64 = 4;

/// The selectors of MTU, rate and lifetime (IBA 15.2.5.16).
const GREATER: u64 = 0;
const LESS: u64 = 1;
const EXACTLY: u64 = 2;
const LARGEST: u64 = 3;
/// 4096 and 2048 bytes.
const MTU_4096: u64 = 5;
const MTU_2048: u64 = 4;
/// 200 Gb/s.
const RATE: u64 = 17;
/// 4.096 us times two to this.
const LIFE_TIME: u64 = 18;
/// The Q_Key and scope of IPoIB's broadcast group (RFC 4391, section 4), which a subnet manager makes.
const IPOIB_QKEY: u64 = 0x0b1b;
const IPOIB_MGID: [u8; 16] = [
    0xff, 0x12, 0x40, 0x1b, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff,
];
/// Full member, and one that only sends (IBA 15.2.5.17): either may make a group.
const FULL_MEMBER: u64 = 1;
const SEND_ONLY_FULL_MEMBER: u64 = 8;

/// The components that a query may name: bit of the mask, field.
type Components = &'static [(u32, Field)];

const NODE_COMPONENTS: Components = &[(0, node_record::lid)];
const PORT_COMPONENTS: Components = &[(0, port_info_record::lid), (1, port_info_record::port_num)];
const PATH_COMPONENTS: Components = &[
    (2, path_record::dgid),
    (3, path_record::sgid),
    (4, path_record::dlid),
    (5, path_record::slid),
    (13, path_record::pkey),
    (15, path_record::sl),
];
const GROUP_COMPONENTS: Components = &[
    (0, group_record::mgid),
    (3, group_record::mlid),
    (2, group_record::qkey),
    (7, group_record::pkey),
];
/// What makes a new group (IBA 15.2.5.17, o15-0.2.3): Q_Key, traffic class, P_Key, service level, flow label.
const CREATES: u64 = (1 << 2) | (1 << 6) | (1 << 7) | (1 << 12) | (1 << 13);
/// What every join and leave names: the group, the port, how.
const JOINS: u64 = (1 << 0) | (1 << 1) | (1 << 16);

/// A port in a group.
struct Member {
    gid: [u8; 16],
    /// How it has joined.
    state: u64,
    /// Resets of its function before that: one more, and it has forgotten that it is a member.
    resets: u64,
}

/// A multicast group.
struct Group {
    /// MCMemberRecord without a port.
    record: Vec<u8>,
    members: Vec<Member>,
    /// It stays without members.
    permanent: bool,
}

/// The administration's own state.
pub struct Administration {
    groups: Vec<Group>,
}

impl Default for Administration {
    fn default() -> Self {
        let mut record = vec![0; group_record::SIZE];
        group_record::mgid
            .bytes_mut(&mut record)
            .copy_from_slice(&IPOIB_MGID);
        complete(&mut record, FIRST_MLID, MTU_2048, RATE);
        group_record::qkey.set(&mut record, IPOIB_QKEY);
        group_record::pkey.set(&mut record, DEFAULT_PKEY.into());
        let broadcast = Group {
            record,
            members: Vec::new(),
            permanent: true,
        };
        Self {
            groups: vec![broadcast],
        }
    }
}

impl Administration {
    /// The datagrams that answer one of a function's.
    pub fn answer(&mut self, devices: &[Device], from: usize, request: &[u8]) -> Vec<Vec<u8>> {
        let mut answer = request.to_vec();
        answer.resize(LEN, 0);
        let asked = mad::method.get(&answer) as u8;
        // Acknowledgements of segments, among others, want no answer.
        let segment = mad::rmpp_type.get(&answer) > RMPP_DATA;
        if asked & method::RESPONSE != 0 || segment || devices.get(from).is_none() {
            return Vec::new();
        }
        self.sweep(devices);
        let records = match (
            mad::mgmt_class.get(&answer) as u8,
            mad::class_version.get(&answer),
        ) {
            (class::SUBN_ADM, 2) => self.records(devices, from, &answer),
            _ => Err(Refused::Class),
        };
        mad::rmpp_version.bytes_mut(&mut answer)[..].fill(0);
        answer[0x19..0x24].fill(0);
        let (len, mut records) = match records {
            Ok(found) => found,
            Err(refused) => {
                finish(&mut answer, Err(refused));
                return vec![answer];
            }
        };
        finish(&mut answer, Ok(()));
        // Records begin at multiples of eight bytes.
        let stride = len.next_multiple_of(8);
        records
            .iter_mut()
            .for_each(|record| record.resize(stride, 0));
        mad::sa_attribute_offset.set(&mut answer, stride as u64 / 8);
        let data = records.concat();
        if asked != method::GET_TABLE {
            let place = mad::sa_data.bytes_mut(&mut answer);
            place.fill(0);
            let len = data.len().min(place.len());
            place[..len].copy_from_slice(&data[..len]);
            return vec![answer];
        }
        segments(&answer, &data)
    }

    /// The records that answer a request, and how long each is.
    fn records(
        &mut self,
        devices: &[Device],
        from: usize,
        request: &[u8],
    ) -> Result<(usize, Vec<Vec<u8>>), Refused> {
        let (asked, attribute) = (
            mad::method.get(request) as u8,
            mad::attribute_id.get(request) as u16,
        );
        let mask = mad::sa_component_mask.get(request);
        let wanted = mad::sa_data.bytes(request);
        let own = &devices[from].port;
        let active = || {
            let all = devices.iter();
            all.filter(|device| device.port.state == PortState::Active)
        };
        let select = |components: Components, records: Vec<Vec<u8>>| -> Vec<Vec<u8>> {
            let chosen = |record: &Vec<u8>| matches(mask, wanted, record, components);
            records.into_iter().filter(chosen).collect()
        };
        let (len, mut found) = match (attribute, asked) {
            (CLASS_PORT_INFO, method::GET) => (class_port_info::SIZE, vec![class_info()]),
            (NODE_RECORD, method::GET | method::GET_TABLE) => {
                let records = active().map(node).collect();
                (node_record::SIZE, select(NODE_COMPONENTS, records))
            }
            (PORT_INFO_RECORD, method::GET | method::GET_TABLE) => {
                let records = active().map(|device| port(&device.port)).collect();
                (port_info_record::SIZE, select(PORT_COMPONENTS, records))
            }
            (PATH_RECORD, method::GET | method::GET_TABLE) => {
                let mut records = Vec::new();
                for source in active() {
                    for destination in active() {
                        let record = path(&source.port, &destination.port);
                        if matches(mask, wanted, &record, PATH_COMPONENTS) {
                            records.push(record);
                        }
                    }
                    if records.len() > MAX_SEGMENTS * SEGMENT / path_record::SIZE {
                        return Err(Refused::NoResources);
                    }
                }
                // Any path will do for one who wants one.
                if asked == method::GET {
                    records.truncate(1);
                }
                (path_record::SIZE, records)
            }
            (MC_MEMBER_RECORD, method::GET | method::GET_TABLE) => {
                let records = self.groups.iter().map(|group| group.record.clone());
                (
                    group_record::SIZE,
                    select(GROUP_COMPONENTS, records.collect()),
                )
            }
            (MC_MEMBER_RECORD, method::SET) => (
                group_record::SIZE,
                vec![self.join(&devices[from], mask, wanted)?],
            ),
            (MC_MEMBER_RECORD, method::DELETE) => {
                (group_record::SIZE, vec![self.leave(own, mask, wanted)?])
            }
            (_, method::GET | method::GET_TABLE | method::SET | method::DELETE) => {
                return Err(Refused::Attribute);
            }
            _ => return Err(Refused::Method),
        };
        if asked != method::GET_TABLE {
            match found.len() {
                0 => return Err(Refused::NoRecords),
                1 => {}
                _ => return Err(Refused::TooManyRecords),
            }
        }
        if found.len() * len.next_multiple_of(8) > MAX_SEGMENTS * SEGMENT {
            return Err(Refused::NoResources);
        }
        found.iter_mut().for_each(|record| record.truncate(len));
        Ok((len, found))
    }

    /// Drops the memberships of ports that have been reset since, as a subnet manager does that sees their links go down.
    fn sweep(&mut self, devices: &[Device]) {
        let remains = |member: &Member| {
            let of = |device: &&Device| device.port.gid(0) == member.gid;
            let device = devices.iter().find(of);
            device.is_some_and(|device| device.counters.resets == member.resets)
        };
        self.groups.retain_mut(|group| {
            group.members.retain(remains);
            group.permanent || !group.members.is_empty()
        });
    }

    fn group(&self, wanted: &[u8]) -> Option<usize> {
        let mgid = group_record::mgid.bytes(wanted);
        let mut groups = self.groups.iter();
        groups.position(|group| group_record::mgid.bytes(&group.record) == mgid)
    }

    /// Puts the port that asks into a group, which is made if enough is said of it.
    fn join(&mut self, device: &Device, mask: u64, wanted: &[u8]) -> Result<Vec<u8>, Refused> {
        let (gid, state) = member(&device.port, mask, wanted)?;
        let index = match self.group(wanted) {
            Some(index) => index,
            None => {
                if mask & CREATES != CREATES {
                    return Err(Refused::InsufficientComponents);
                }
                if group_record::mgid.bytes(wanted)[0] != 0xff
                    || state & (FULL_MEMBER | SEND_ONLY_FULL_MEMBER) == 0
                {
                    return Err(Refused::Invalid);
                }
                if self.groups.len() >= MAX_GROUPS {
                    return Err(Refused::NoResources);
                }
                self.groups.push(Group {
                    record: self.new_record(mask, wanted)?,
                    members: Vec::new(),
                    permanent: false,
                });
                self.groups.len() - 1
            }
        };
        let group = &mut self.groups[index];
        for (bit, field) in [(2, group_record::qkey), (7, group_record::pkey)] {
            let same = field.get(wanted) == field.get(&group.record);
            if mask & (1 << bit) != 0 && !same {
                return Err(Refused::Invalid);
            }
        }
        let joined = match group.members.iter_mut().find(|member| member.gid == gid) {
            Some(member) => {
                member.state |= state;
                member.state
            }
            None => {
                let resets = device.counters.resets;
                group.members.push(Member { gid, state, resets });
                state
            }
        };
        let mut record = group.record.clone();
        group_record::port_gid
            .bytes_mut(&mut record)
            .copy_from_slice(&gid);
        group_record::join_state.set(&mut record, joined);
        Ok(record)
    }

    fn new_record(&self, mask: u64, wanted: &[u8]) -> Result<Vec<u8>, Refused> {
        let used = |mlid: u16| {
            let mut groups = self.groups.iter();
            groups.any(|group| group_record::mlid.get(&group.record) == u64::from(mlid))
        };
        let mtu = chosen(
            mask,
            wanted,
            (4, group_record::mtu_selector),
            (5, group_record::mtu),
            MTU_4096,
        )?;
        let rate = chosen(
            mask,
            wanted,
            (8, group_record::rate_selector),
            (9, group_record::rate),
            RATE,
        )?;
        // There are fewer groups than LIDs.
        let mlid = (FIRST_MLID..0xfffe).find(|&mlid| !used(mlid));
        let mut record = wanted[..group_record::SIZE].to_vec();
        group_record::port_gid.bytes_mut(&mut record).fill(0);
        group_record::join_state.set(&mut record, 0);
        complete(&mut record, mlid.unwrap_or(FIRST_MLID), mtu, rate);
        Ok(record)
    }

    /// Takes the port that asks out of a group.
    fn leave(&mut self, own: &Port, mask: u64, wanted: &[u8]) -> Result<Vec<u8>, Refused> {
        let (gid, state) = member(own, mask, wanted)?;
        let index = self.group(wanted).ok_or(Refused::NoRecords)?;
        let group = &mut self.groups[index];
        let mut members = group.members.iter();
        let place = members.position(|member| member.gid == gid && member.state & state != 0);
        let place = place.ok_or(Refused::Invalid)?;
        let mut record = group.record.clone();
        group_record::port_gid
            .bytes_mut(&mut record)
            .copy_from_slice(&gid);
        let joined = &mut group.members[place].state;
        group_record::join_state.set(&mut record, *joined);
        *joined &= !state;
        if *joined == 0 {
            group.members.swap_remove(place);
        }
        if group.members.is_empty() && !group.permanent {
            self.groups.swap_remove(index);
        }
        Ok(record)
    }
}

/// The port that joins or leaves, and how. A port does so for itself.
fn member(own: &Port, mask: u64, wanted: &[u8]) -> Result<([u8; 16], u64), Refused> {
    if mask & JOINS != JOINS {
        return Err(Refused::InsufficientComponents);
    }
    let gid = own.gid(0);
    let state = group_record::join_state.get(wanted);
    if group_record::port_gid.bytes(wanted) != gid || state == 0 {
        return Err(Refused::Invalid);
    }
    Ok((gid, state))
}

/// The MTU or rate of a new group: the most that all ports can do, or what the request's selector leaves of it (IBA
/// 15.2.5.17). IPoIB wants those of its broadcast group exactly, and the kernel compares.
fn chosen(
    mask: u64,
    wanted: &[u8],
    (selector_bit, selector): (u32, Field),
    (value_bit, value): (u32, Field),
    most: u64,
) -> Result<u64, Refused> {
    let named = (1 << selector_bit) | (1 << value_bit);
    if mask & named != named {
        return Ok(most);
    }
    let value = value.get(wanted);
    match selector.get(wanted) {
        GREATER if value < most => Ok(most),
        LESS if value > 1 => Ok(most.min(value - 1)),
        EXACTLY if (1..=most).contains(&value) => Ok(value),
        LARGEST => Ok(most),
        _ => Err(Refused::Invalid),
    }
}

/// What the subnet manager decides about a group.
fn complete(record: &mut [u8], mlid: u16, mtu: u64, rate: u64) {
    for (field, value) in [
        (group_record::mlid, mlid.into()),
        (group_record::mtu_selector, EXACTLY),
        (group_record::mtu, mtu),
        (group_record::rate_selector, EXACTLY),
        (group_record::rate, rate),
        (group_record::packet_life_time_selector, EXACTLY),
        (group_record::packet_life_time, LIFE_TIME),
    ] {
        field.set(record, value);
    }
}

/// Whether a record has every component that the mask names.
fn matches(mask: u64, wanted: &[u8], record: &[u8], components: Components) -> bool {
    let named = |(bit, _): &&(u32, Field)| mask & (1 << bit) != 0;
    components.iter().filter(named).all(|(_, field)| {
        if field.width() > 64 {
            field.bytes(wanted) == field.bytes(record)
        } else {
            field.get(wanted) == field.get(record)
        }
    })
}

/// An answer in as many datagrams as it needs.
fn segments(head: &[u8], data: &[u8]) -> Vec<Vec<u8>> {
    let count = data.len().div_ceil(SEGMENT).max(1);
    let mut segments = Vec::with_capacity(count);
    for index in 0..count {
        let part = data.chunks(SEGMENT).nth(index).unwrap_or_default();
        let mut segment = head.to_vec();
        let (first, last) = (index == 0, index + 1 == count);
        let flags = ACTIVE | if first { FIRST } else { 0 } | if last { LAST } else { 0 };
        // The first says how long all of it is, the last how much of it is used (IBA 13.6.2.1).
        let length = match (first, last) {
            (_, true) => part.len() + HEADER,
            (true, false) => data.len() + count * HEADER,
            _ => 0,
        };
        for (field, value) in [
            (mad::rmpp_version, 1),
            (mad::rmpp_type, RMPP_DATA),
            (mad::rmpp_flags, flags),
            (mad::rmpp_segment, index as u64 + 1),
            (mad::rmpp_payload_length, length as u64),
        ] {
            field.set(&mut segment, value);
        }
        let place = mad::sa_data.bytes_mut(&mut segment);
        place.fill(0);
        place[..part.len()].copy_from_slice(part);
        segments.push(segment);
    }
    segments
}

fn class_info() -> Vec<u8> {
    let mut info = vec![0; class_port_info::SIZE];
    for (field, value) in [
        (class_port_info::base_version, 1),
        (class_port_info::class_version, 2),
        (class_port_info::resp_time_value, 16),
    ] {
        field.set(&mut info, value);
    }
    info
}

fn node(device: &Device) -> Vec<u8> {
    let mut record = vec![0; node_record::SIZE];
    node_record::lid.set(&mut record, device.port.lid.into());
    let info = sma::node(&device.port);
    node_record::node_info
        .bytes_mut(&mut record)
        .copy_from_slice(&info);
    let description = node_record::node_description.bytes_mut(&mut record);
    description.copy_from_slice(&device.node_description());
    record
}

fn port(port: &Port) -> Vec<u8> {
    let mut record = vec![0; port_info_record::SIZE];
    port_info_record::lid.set(&mut record, port.lid.into());
    port_info_record::port_num.set(&mut record, 1);
    let info = sma::port(port);
    port_info_record::port_info
        .bytes_mut(&mut record)
        .copy_from_slice(&info);
    record
}

fn path(source: &Port, destination: &Port) -> Vec<u8> {
    let mut record = vec![0; path_record::SIZE];
    path_record::dgid
        .bytes_mut(&mut record)
        .copy_from_slice(&destination.gid(0));
    path_record::sgid
        .bytes_mut(&mut record)
        .copy_from_slice(&source.gid(0));
    for (field, value) in [
        (path_record::dlid, destination.lid.into()),
        (path_record::slid, source.lid.into()),
        (path_record::reversible, 1),
        (path_record::numb_path, 1),
        (path_record::pkey, DEFAULT_PKEY.into()),
        (path_record::mtu_selector, EXACTLY),
        (path_record::mtu, MTU_4096),
        (path_record::rate_selector, EXACTLY),
        (path_record::rate, RATE),
        (path_record::packet_life_time_selector, EXACTLY),
        (path_record::packet_life_time, LIFE_TIME),
    ] {
        field.set(&mut record, value);
    }
    record
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::Referee;

    fn devices(count: usize) -> Vec<Device> {
        (0..count)
            .map(|index| {
                let mut port = Port::test();
                port.lid = index as u16 + 1;
                port.guid += index as u64;
                Device::new(format!("nic{index}"), port, Referee::in_memory())
            })
            .collect()
    }

    fn request(method: u8, attribute: u16, mask: u64, fill: impl FnOnce(&mut [u8])) -> Vec<u8> {
        let mut request = vec![0; LEN];
        mad::mgmt_class.set(&mut request, class::SUBN_ADM.into());
        mad::class_version.set(&mut request, 2);
        mad::method.set(&mut request, method.into());
        mad::attribute_id.set(&mut request, attribute.into());
        mad::sa_component_mask.set(&mut request, mask);
        fill(mad::sa_data.bytes_mut(&mut request));
        request
    }

    fn status(answer: &[u8]) -> u64 {
        mad::status.get(answer)
    }

    #[test]
    fn a_path_leads_from_one_gid_to_another() {
        let devices = devices(3);
        let mut sa = Administration::default();
        let [source, destination] = [0, 2].map(|index: usize| devices[index].port.gid(0));
        let ask = request(method::GET, PATH_RECORD, (1 << 2) | (1 << 3), |data| {
            path_record::dgid
                .bytes_mut(data)
                .copy_from_slice(&destination);
            path_record::sgid.bytes_mut(data).copy_from_slice(&source);
        });
        let answers = sa.answer(&devices, 0, &ask);
        assert_eq!(answers.len(), 1);
        assert_eq!(status(&answers[0]), 0);
        let record = mad::sa_data.bytes(&answers[0]);
        assert_eq!(path_record::slid.get(record), 1);
        assert_eq!(path_record::dlid.get(record), 3);
        // No port, no path.
        let ask = request(method::GET, PATH_RECORD, 1 << 4, |data| {
            path_record::dlid.set(data, 77);
        });
        let answers = sa.answer(&devices, 0, &ask);
        assert_eq!(status(&answers[0]), Refused::NoRecords as u64);
    }

    #[test]
    fn a_table_comes_in_segments() {
        let devices = devices(5);
        let mut sa = Administration::default();
        let ask = request(method::GET_TABLE, NODE_RECORD, 0, |_| {});
        let answers = sa.answer(&devices, 0, &ask);
        // Five records of 112 bytes in segments of 200.
        assert_eq!(answers.len(), 3);
        let flags: Vec<u64> = answers.iter().map(|a| mad::rmpp_flags.get(a)).collect();
        assert_eq!(flags, [ACTIVE | FIRST, ACTIVE, ACTIVE | LAST]);
        let lengths: Vec<u64> = answers
            .iter()
            .map(|a| mad::rmpp_payload_length.get(a))
            .collect();
        assert_eq!(lengths, [5 * 112 + 3 * 20, 0, 160 + 20]);
        let data: Vec<u8> = answers
            .iter()
            .flat_map(|a| mad::sa_data.bytes(a).to_vec())
            .collect();
        let lids: Vec<u64> = data
            .chunks(112)
            .take(5)
            .map(|r| node_record::lid.get(r))
            .collect();
        assert_eq!(lids, [1, 2, 3, 4, 5]);
        // An acknowledgement of it is not answered.
        let mut ack = answers[0].clone();
        mad::rmpp_type.set(&mut ack, 2);
        assert!(sa.answer(&devices, 0, &ack).is_empty());
    }

    #[test]
    fn groups_are_made_joined_left_and_bounded() {
        let devices = devices(2);
        let mut sa = Administration::default();
        let join = |method: u8, mask: u64, index: u8, from: usize| {
            let gid = devices[from].port.gid(0);
            request(method, MC_MEMBER_RECORD, mask, |data| {
                group_record::mgid.bytes_mut(data)[..3].copy_from_slice(&[0xff, 0x12, index]);
                group_record::port_gid.bytes_mut(data).copy_from_slice(&gid);
                group_record::join_state.set(data, 1);
            })
        };
        let mut ask = |from: usize, request: &[u8]| sa.answer(&devices, from, request).remove(0);
        let absent = ask(0, &join(method::SET, JOINS, 1, 0));
        assert_eq!(status(&absent), Refused::InsufficientComponents as u64);
        let made = ask(0, &join(method::SET, JOINS | CREATES, 1, 0));
        assert_eq!((status(&made), mad::method.get(&made)), (0, 0x81));
        assert_eq!(group_record::mlid.get(mad::sa_data.bytes(&made)), 0xc001);
        let joined = ask(1, &join(method::SET, JOINS, 1, 1));
        assert_eq!(status(&joined), 0);
        let other = ask(1, &join(method::SET, JOINS, 1, 0));
        assert_eq!(status(&other), Refused::Invalid as u64, "for another port");
        for from in [0, 1] {
            let left = ask(from, &join(method::DELETE, JOINS, 1, from));
            assert_eq!((status(&left), mad::method.get(&left)), (0, 0x95));
        }
        let gone = ask(0, &join(method::DELETE, JOINS, 1, 0));
        assert_eq!(status(&gone), Refused::NoRecords as u64);
        for index in 0..=255 {
            let made = ask(0, &join(method::SET, JOINS | CREATES, index, 0));
            // One is IPoIB's.
            let wanted = if index < 255 {
                0
            } else {
                Refused::NoResources as u64
            };
            assert_eq!(status(&made), wanted, "group {index}");
        }
    }

    #[test]
    fn a_new_group_has_the_mtu_and_the_rate_that_its_maker_asks_for() {
        let devices = devices(1);
        let mut sa = Administration::default();
        let gid = devices[0].port.gid(0);
        let mtu = MTU_4096;
        for (index, (selector, wanted, made)) in [
            (EXACTLY, MTU_2048, Some(MTU_2048)),
            (EXACTLY, mtu + 1, None),
            (LESS, mtu, Some(MTU_2048)),
            (LESS, 1, None),
            (GREATER, MTU_2048, Some(mtu)),
            (GREATER, mtu, None),
            (LARGEST, 0, Some(mtu)),
        ]
        .into_iter()
        .enumerate()
        {
            let mask = JOINS | CREATES | (1 << 4) | (1 << 5) | (1 << 8) | (1 << 9);
            let request = request(method::SET, MC_MEMBER_RECORD, mask, |data| {
                let mgid = [0xff, 0x12, index as u8];
                group_record::mgid.bytes_mut(data)[..3].copy_from_slice(&mgid);
                group_record::port_gid.bytes_mut(data).copy_from_slice(&gid);
                group_record::join_state.set(data, 1);
                group_record::mtu_selector.set(data, selector);
                group_record::mtu.set(data, wanted);
                group_record::rate_selector.set(data, EXACTLY);
                group_record::rate.set(data, 3);
            });
            let answer = sa.answer(&devices, 0, &request).remove(0);
            let record = mad::sa_data.bytes(&answer);
            match made {
                Some(made) => {
                    assert_eq!(status(&answer), 0, "{selector} {wanted}");
                    assert_eq!(group_record::mtu.get(record), made, "{selector} {wanted}");
                    assert_eq!(group_record::rate.get(record), 3);
                }
                None => assert_eq!(status(&answer), Refused::Invalid as u64),
            }
        }
    }

    #[test]
    fn a_reset_ends_memberships() {
        let mut devices = devices(2);
        let mut sa = Administration::default();
        let mgid = |data: &mut [u8]| {
            group_record::mgid.bytes_mut(data)[..2].copy_from_slice(&[0xff, 0x12]);
        };
        let join = |devices: &[Device], from: usize| {
            let gid = devices[from].port.gid(0);
            request(method::SET, MC_MEMBER_RECORD, JOINS | CREATES, |data| {
                mgid(data);
                group_record::port_gid.bytes_mut(data).copy_from_slice(&gid);
                group_record::join_state.set(data, 1);
            })
        };
        let groups = |sa: &mut Administration, devices: &[Device]| {
            let ask = request(method::GET, MC_MEMBER_RECORD, 1, mgid);
            status(&sa.answer(devices, 0, &ask)[0])
        };
        for from in [0, 1] {
            let joined = sa.answer(&devices, from, &join(&devices, from));
            assert_eq!(status(&joined[0]), 0);
        }
        devices[1].reset();
        assert_eq!(groups(&mut sa, &devices), 0, "there is still a member");
        devices[0].reset();
        assert_eq!(groups(&mut sa, &devices), Refused::NoRecords as u64);
        let again = sa.answer(&devices, 1, &join(&devices, 1));
        assert_eq!(status(&again[0]), 0);
        assert_eq!(groups(&mut sa, &devices), 0);
    }

    #[test]
    fn nonsense_has_a_status_and_cut_datagrams_are_none() {
        let devices = devices(1);
        let mut sa = Administration::default();
        for (method, attribute, refused) in [
            (method::GET, 0x7777, Refused::Attribute),
            (method::SET, PATH_RECORD, Refused::Attribute),
            (0x44, PATH_RECORD, Refused::Method),
        ] {
            let answers = sa.answer(&devices, 0, &request(method, attribute, 0, |_| {}));
            assert_eq!(status(&answers[0]), refused as u64);
        }
        assert_eq!(
            status(&sa.answer(&devices, 0, &[1])[0]),
            Refused::Class as u64
        );
    }
}
