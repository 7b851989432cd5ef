// SPDX-License-Identifier: MIT OR Apache-2.0
//! The NICs' ports: state, addresses, MTU.

use super::{Facts, Finding};
use crate::machine::Nic;

/// One port of a NIC.
struct Port<'a> {
    nic: &'a Nic,
    /// As `mlx5_0/1`.
    name: String,
    folder: String,
}

impl Port<'_> {
    fn text(&self, facts: &Facts<'_>, file: &str) -> String {
        facts
            .root
            .text(&format!("{}/{file}", self.folder))
            .unwrap_or_default()
    }

    fn is_ethernet(&self, facts: &Facts<'_>) -> bool {
        self.text(facts, "link_layer") == "Ethernet"
    }

    /// The network interface of an Ethernet port.
    fn interface(&self, facts: &Facts<'_>) -> Option<String> {
        let of_gid = self.text(facts, "gid_attrs/ndevs/0");
        if of_gid.is_empty() {
            self.nic.interfaces.first().cloned()
        } else {
            Some(of_gid)
        }
    }
}

fn each_port(
    facts: &Facts<'_>,
    name: &'static str,
    look: impl Fn(&Port<'_>) -> Finding,
) -> Vec<Finding> {
    let findings = facts.nics.iter().flat_map(|nic| {
        let folder = nic.ports();
        let numbers = folder
            .as_deref()
            .map(|folder| facts.root.names(folder))
            .unwrap_or_default();
        let ports: Vec<Port<'_>> = numbers
            .into_iter()
            .map(|number| Port {
                nic,
                name: format!("{}/{number}", nic.rdma.as_deref().unwrap_or_default()),
                folder: format!("{}/{number}", folder.as_deref().unwrap_or_default()),
            })
            .collect();
        ports
            .iter()
            .map(|port| look(port).of(&port.name))
            .collect::<Vec<_>>()
    });
    let findings: Vec<Finding> = findings.collect();
    if findings.is_empty() {
        return vec![Finding::not_applicable(name, "there is no port")];
    }
    findings
}

/// What a line as "4: ACTIVE" says.
fn word(text: &str) -> &str {
    text.split_once(": ").map_or(text, |(_, word)| word)
}

pub fn state(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "port";
    each_port(facts, NAME, |port| {
        let (state, physical) = (port.text(facts, "state"), port.text(facts, "phys_state"));
        let (state, physical) = (word(&state), word(&physical));
        let found = format!(
            "{state}, {physical}, {}, {}",
            port.text(facts, "link_layer"),
            port.text(facts, "rate")
        );
        if state == "ACTIVE" {
            Finding::ok(NAME, found)
        } else if physical == "LinkUp" {
            let fix = if port.is_ethernet(facts) {
                "ip link set up on its interface"
            } else {
                "a subnet manager: opensm on one host of the fabric"
            };
            Finding::fail(NAME, found, fix)
        } else {
            Finding::fail(
                NAME,
                found,
                "cable, transceiver and the other end's port; for Ethernet: ip link set up",
            )
        }
    })
}

pub fn addresses(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "address";
    each_port(facts, NAME, |port| {
        let gids: Vec<(String, String)> = facts
            .root
            .names(&format!("{}/gids", port.folder))
            .into_iter()
            .map(|index| (port.text(facts, &format!("gids/{index}")), index))
            .filter(|(gid, _)| gid.chars().any(|c| !"0:".contains(c)))
            .collect();
        if port.is_ethernet(facts) {
            let version_2 = gids.iter().find(|(_, index)| {
                port.text(facts, &format!("gid_attrs/types/{index}")) == "RoCE v2"
            });
            return match version_2 {
                Some((gid, index)) => Finding::ok(
                    NAME,
                    format!("{} GIDs, RoCE v2 at index {index}: {gid}", gids.len()),
                ),
                None => Finding::fail(
                    NAME,
                    format!("{} GIDs, none of RoCE v2", gids.len()),
                    "an IP address on the port's interface, and ip link set up",
                ),
            };
        }
        let lid = port.text(facts, "lid");
        match (lid.as_str(), gids.first()) {
            ("0x0" | "0xffff" | "", _) => Finding::fail(
                NAME,
                "no LID: no subnet manager has seen the port",
                "a subnet manager: opensm on one host of the fabric",
            ),
            (_, None) => Finding::fail(
                NAME,
                format!("LID {lid}, but no GID"),
                "see dmesg: mlx5_ib could not read them",
            ),
            (_, Some((gid, index))) => Finding::ok(
                NAME,
                format!(
                    "LID {lid}, subnet manager {}, GID {index}: {gid}",
                    port.text(facts, "sm_lid")
                ),
            ),
        }
    })
}

/// What RoCE adds to a payload (the kernel's `iboe_get_mtu`): the interface's MTU is to have room for both.
const ROCE_HEADERS: u64 = 96;

pub fn mtu(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "mtu";
    each_port(facts, NAME, |port| {
        if !port.is_ethernet(facts) {
            return Finding::not_applicable(
                NAME,
                "the kernel's files do not have the MTU of an InfiniBand port: see ibv_devinfo",
            );
        }
        let interface = port.interface(facts);
        let Some(interface) = interface else {
            return Finding::not_applicable(
                NAME,
                "the port's interface is not in this network namespace",
            );
        };
        let Some(mtu) = facts
            .root
            .number(&port.nic.function.file(&format!("net/{interface}/mtu")))
        else {
            return Finding::not_applicable(
                NAME,
                format!("{interface} is not in this network namespace"),
            );
        };
        let payload = [4096, 2048, 1024, 512, 256]
            .into_iter()
            .find(|payload| payload + ROCE_HEADERS <= mtu);
        let found = format!(
            "{interface} has MTU {mtu}, for RDMA {}",
            payload.unwrap_or(256)
        );
        if payload == Some(4096) {
            Finding::ok(NAME, found)
        } else {
            Finding::warn(
                NAME,
                format!("{found} of 4096"),
                format!(
                    "ip link set {interface} mtu 9000, on every host and switch of the network alike"
                ),
            )
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{doctor::tests::check, fixture::Fixture};

    fn port(fixture: &Fixture) -> String {
        format!(
            "{}/infiniband/mlx5_0/ports/1",
            fixture.device("0000:05:00.0")
        )
    }

    #[test]
    fn a_port_that_is_not_active() {
        let fixture = Fixture::healthy();
        check(&fixture, state).is("ok", "ACTIVE, LinkUp, InfiniBand, 400 Gb/sec (4X NDR)");
        fixture.write(&format!("{}/state", port(&fixture)), "2: INIT\n");
        check(&fixture, state).is("fail", "INIT").fixed_by("opensm");
        fixture.write(&format!("{}/link_layer", port(&fixture)), "Ethernet\n");
        check(&fixture, state)
            .is("fail", "INIT")
            .fixed_by("ip link set up");
        fixture.write(&format!("{}/phys_state", port(&fixture)), "2: Polling\n");
        check(&fixture, state)
            .is("fail", "Polling")
            .fixed_by("cable");
    }

    #[test]
    fn a_port_without_addresses() {
        let fixture = Fixture::healthy();
        check(&fixture, addresses).is("ok", "LID 0x1, subnet manager 0x2, GID 0: fe80:");
        fixture.write(&format!("{}/lid", port(&fixture)), "0x0\n");
        check(&fixture, addresses)
            .is("fail", "no LID")
            .fixed_by("opensm");
        fixture.write(&format!("{}/lid", port(&fixture)), "0x1\n");
        fixture.write(
            &format!("{}/gids/0", port(&fixture)),
            "0000:0000:0000:0000:0000:0000:0000:0000\n",
        );
        check(&fixture, addresses)
            .is("fail", "no GID")
            .fixed_by("dmesg");
        fixture.ethernet("mlx5_0", "0000:05:00.0", 9000);
        check(&fixture, addresses).is("ok", "RoCE v2 at index 1");
        fixture.write(
            &format!("{}/gid_attrs/types/1", port(&fixture)),
            "IB/RoCE v1\n",
        );
        check(&fixture, addresses)
            .is("fail", "none of RoCE v2")
            .fixed_by("IP address");
    }

    #[test]
    fn the_mtu_of_roce() {
        let fixture = Fixture::healthy();
        check(&fixture, mtu).is("n/a", "ibv_devinfo");
        for (value, status, found) in [
            (9000, "ok", "for RDMA 4096"),
            (4192, "ok", "4096"),
            (4191, "warn", "for RDMA 2048 of 4096"),
            (1500, "warn", "for RDMA 1024 of 4096"),
        ] {
            fixture.ethernet("mlx5_0", "0000:05:00.0", value);
            check(&fixture, mtu).is(status, found);
        }
        check(&fixture, mtu).fixed_by("ip link set eth0 mtu 9000");
        fixture.remove(&format!("{}/net", fixture.device("0000:05:00.0")));
        check(&fixture, mtu).is("n/a", "network namespace");
    }
}
