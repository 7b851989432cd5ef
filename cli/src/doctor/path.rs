// SPDX-License-Identifier: MIT OR Apache-2.0
//! The way from a GPU to a NIC.

use super::{Broker, Facts, Finding};
use crate::{
    broker::{Bound, path_in_words, why_not_bound},
    topology::Relation,
};
use ibgda_uapi::{IBGDA_PATH_HOST_BRIDGE, IBGDA_PATH_SWITCH};

const NO_PAIR: &str = "there is no pair of a GPU and a NIC";

/// How near the two are, and whether the kernel lets one reach the other, which only a bind tells.
pub fn reach(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "path";
    let findings: Vec<Finding> = facts
        .meant()
        .map(|(gpu, nic)| {
            let pair = (gpu.bdf, nic.function.bdf);
            let near = Relation::of(facts.machine, gpu, &nic.function);
            let found = format!("{near}, {}", near.meaning());
            let nearer = facts
                .machine
                .nics
                .iter()
                .find(|other| other.rdma.is_some() && Relation::of(facts.machine, gpu, &other.function) < near);
            let answer = match &facts.broker {
                Broker::Open { binds, .. } => binds.get(&pair),
                _ => None,
            };
            let reaches = |bound: &Bound| [IBGDA_PATH_SWITCH, IBGDA_PATH_HOST_BRIDGE].contains(&bound.path);
            let finding = match (answer, nearer) {
                (Some(Err(error)), _) => {
                    let (why, fix) = why_not_bound(pair.0, pair.1, error);
                    Finding::fail(NAME, format!("{found}; {why}"), fix)
                }
                (Some(Ok(bound)), _) if !reaches(bound) => Finding::warn(
                    NAME,
                    format!("{found}; the broker binds it only because of any-path: the kernel knows no way"),
                    "a NIC below the GPU's PCIe switch; or try a doorbell, and keep any-path if it arrives",
                ),
                (_, Some(nearer)) => Finding::warn(
                    NAME,
                    format!("{found}, while {} is nearer", nearer.title()),
                    format!("ibgda policy add {}@{}", gpu.bdf, nearer.function.bdf),
                ),
                (Some(Ok(bound)), None) => Finding::ok(
                    NAME,
                    format!("{found}; the broker binds it: {}, distance {}", path_in_words(bound.path), bound.distance),
                ),
                (None, None) if near > Relation::Pxb => Finding::warn(
                    NAME,
                    format!("{found}: whether that works depends on the host bridge, and it is slower"),
                    "a NIC below the GPU's PCIe switch; once the pair is allowed, the broker says whether it binds",
                ),
                (None, None) => Finding::ok(NAME, found),
            };
            finding.of(format!("{}@{}", pair.0, pair.1))
        })
        .collect();
    or_no_pair(NAME, findings)
}

fn or_no_pair(name: &'static str, findings: Vec<Finding>) -> Vec<Finding> {
    if findings.is_empty() {
        return vec![Finding::not_applicable(name, NO_PAIR)];
    }
    findings
}

/// NUMA nodes and CPUs.
pub fn affinity(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "numa";
    let findings = facts.meant().map(|(gpu, nic)| {
        let finding = match (gpu.node, nic.function.node) {
            (Some(one), Some(other)) if one != other => Finding::warn(
                NAME,
                format!("the GPU is on node {one}, the NIC on node {other}"),
                format!("a NIC of node {one} (ibgda topo)"),
            ),
            (Some(node), Some(_)) => Finding::ok(NAME, format!("both on node {node}, CPUs {}", gpu.cpus)),
            _ if facts.machine.nodes == 1 => Finding::ok(NAME, "the machine has one node"),
            _ => Finding::warn(
                NAME,
                "the firmware does not say on which node the GPU or the NIC is: nothing can be placed near",
                "a newer firmware, or numactl by hand",
            ),
        };
        finding.of(format!("{}@{}", gpu.bdf, nic.function.bdf))
    });
    or_no_pair(NAME, findings.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        bdf::Bdf,
        broker::Bound,
        doctor::tests::{check, check_named, check_with},
        fixture::{Fixture, PAIR},
    };
    use std::{collections::BTreeMap, io};

    fn answers(answer: io::Result<Bound>) -> Broker {
        let bdf = |text: &str| text.parse::<Bdf>().unwrap();
        Broker::Open {
            info: Ok(Default::default()),
            binds: BTreeMap::from([((bdf("0000:04:00.0"), bdf("0000:05:00.0")), answer)]),
        }
    }

    fn bound(path: u32) -> io::Result<Bound> {
        Ok(Bound {
            rdma: "mlx5_0".into(),
            path,
            distance: 4,
            generation: 1,
        })
    }

    #[test]
    fn the_broker_has_the_last_word() {
        let fixture = Fixture::healthy();
        check(&fixture, reach)
            .about(PAIR)
            .is("ok", "PIX, below one PCIe switch");
        check_with(&fixture, answers(bound(1)), reach)
            .is("ok", "binds it: below one PCIe switch, distance 4");
        check_with(&fixture, answers(bound(3)), reach)
            .is("warn", "only because of any-path")
            .fixed_by("any-path");
        for (errno, word, fix) in [
            (libc::EXDEV, "cannot reach", "--any-path"),
            (libc::EHOSTDOWN, "being reset", "try again"),
            (libc::EINVAL, "no RDMA NIC", "ibgda topo"),
        ] {
            let error = io::Error::from_raw_os_error(errno);
            check_with(&fixture, answers(Err(error)), reach)
                .is("fail", word)
                .fixed_by(fix);
        }
    }

    #[test]
    fn far_and_nearer_nics() {
        let fixture = Fixture::healthy();
        fixture.nic("0000:81:00.0", "mlx5_1", &["pci0000:80", "0000:80:01.0"]);
        fixture.write(
            &format!("{}/numa_node", fixture.device("0000:81:00.0")),
            "1\n",
        );
        fixture.write("sys/devices/system/node/node1/cpulist", "");
        let far = check_named(&fixture, "0000:04:00.0", "mlx5_1", reach);
        far.is("warn", "SYS")
            .fixed_by(&format!("ibgda policy add {PAIR}"));
        check_named(&fixture, "0000:04:00.0", "mlx5_1", affinity)
            .is("warn", "the GPU is on node 0, the NIC on node 1")
            .fixed_by("node 0");
        // Nothing nearer, and nobody has been asked.
        fixture.remove(&format!("{}/infiniband", fixture.device("0000:05:00.0")));
        check_named(&fixture, "0000:04:00.0", "mlx5_1", reach)
            .is("warn", "depends on the host bridge")
            .fixed_by("switch");
    }

    #[test]
    fn nodes_that_nobody_knows() {
        let fixture = Fixture::healthy();
        check(&fixture, affinity).is("ok", "both on node 0, CPUs 0-15");
        fixture.write(
            &format!("{}/numa_node", fixture.device("0000:04:00.0")),
            "-1\n",
        );
        check(&fixture, affinity).is("ok", "one node");
        fixture.write("sys/devices/system/node/node1/cpulist", "");
        check(&fixture, affinity)
            .is("warn", "does not say")
            .fixed_by("numactl");
    }
}
