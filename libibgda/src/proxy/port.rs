// SPDX-License-Identifier: MIT OR Apache-2.0
//! A port of a verbs device, on InfiniBand or on Ethernet with RoCE v2.

use crate::{
    address::{LinkLayer, is_ipv4},
    context::Port,
    devx,
    error::{Error, Result, Source},
};
use ibgda_verbs_sys::{ibv_gid_type, ibv_port_state};

/// `IBV_LINK_LAYER_*`.
const UNSPECIFIED: u8 = 0;
const INFINIBAND: u8 = 1;
const ETHERNET: u8 = 2;

/// An active port, by the number from 1.
pub(super) fn active(device: &devx::Device, number: u8) -> Result<Port> {
    let attr = device.port(number)?;
    let what = format!("port {number} of {}", device.name());
    if attr.state != ibv_port_state::IBV_PORT_ACTIVE {
        return Err(devx::not_active(what, attr.state));
    }
    let mtu = attr.active_mtu as u8;
    match attr.link_layer {
        UNSPECIFIED | INFINIBAND => Ok(Port {
            number,
            link_layer: LinkLayer::InfiniBand,
            lid: attr.lid,
            mtu,
            gid: device.gid(number)?,
            gid_index: 0,
        }),
        ETHERNET => {
            let (gid_index, gid) = roce_gid(device, number, what)?;
            Ok(Port {
                number,
                link_layer: LinkLayer::Ethernet,
                lid: 0,
                mtu,
                gid,
                gid_index,
            })
        }
        other => Err(Error::new(
            Source::Verbs,
            libc::EOPNOTSUPP,
            what,
            format!("its link layer is {other}, neither InfiniBand nor Ethernet"),
            "use a NIC of InfiniBand or RoCE",
        )),
    }
}

/// The GID to use: of RoCE v2, which routers know, an IPv4 address before an IPv6 one, and that before a link-local one.
fn roce_gid(device: &devx::Device, port: u8, what: String) -> Result<(u8, [u8; 16])> {
    let table = device.gids()?;
    let candidates = table.iter().filter(|entry| {
        entry.port_num == u32::from(port) && entry.gid_type == ibv_gid_type::IBV_GID_TYPE_ROCE_V2
    });
    // SAFETY: both members of the union are these 16 bytes.
    let candidates = candidates.map(|entry| (entry.gid_index, unsafe { entry.gid.raw }));
    best(candidates).ok_or_else(|| {
        Error::new(
            Source::Verbs,
            libc::EADDRNOTAVAIL,
            what,
            format!("none of its {} GIDs is of RoCE v2", table.len()),
            "give its network interface an IP address (ip addr add); see rdma link, and ibv_devinfo -v",
        )
    })
}

fn best(candidates: impl Iterator<Item = (u32, [u8; 16])>) -> Option<(u8, [u8; 16])> {
    let rank = |gid: &[u8; 16]| match gid {
        gid if is_ipv4(gid) => 0,
        [0xfe, second, ..] if second & 0xc0 == 0x80 => 2,
        _ => 1,
    };
    candidates
        .filter(|(_, gid)| *gid != [0; 16])
        .filter_map(|(index, gid)| Some((u8::try_from(index).ok()?, gid)))
        .min_by_key(|(index, gid)| (rank(gid), *index))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv6Addr;

    fn gid(text: &str) -> [u8; 16] {
        text.parse::<Ipv6Addr>().expect("an address").octets()
    }

    #[test]
    fn an_ipv4_address_is_best_and_a_link_local_one_better_than_none() {
        let local = (0, gid("fe80::1"));
        let global = (3, gid("2001:db8::1"));
        let (ipv4, later) = ((2, gid("::ffff:10.0.0.1")), (4, gid("::ffff:10.0.0.2")));
        let choose =
            |table: &[(u32, [u8; 16])]| best(table.iter().copied()).map(|(index, _)| index);
        assert_eq!(choose(&[local, global, later, ipv4]), Some(2));
        assert_eq!(choose(&[local, global]), Some(3));
        assert_eq!(choose(&[local]), Some(0));
        assert_eq!(choose(&[(1, [0; 16])]), None);
        assert_eq!(
            choose(&[(256, gid("2001:db8::1"))]),
            None,
            "qpc has 8 bits for it"
        );
    }
}
