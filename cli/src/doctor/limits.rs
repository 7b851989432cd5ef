// SPDX-License-Identifier: MIT OR Apache-2.0
//! What this process may do: locked memory, the container it is in, the devices that it was given.

use super::{
    Facts, Finding,
    nvidia::{is_administrator, is_initial_namespace},
};
use crate::machine::list;

/// `CAP_IPC_LOCK`, with which RLIMIT_MEMLOCK does not count.
const IPC_LOCK: u32 = 14;
/// Less than this is soon too little for communication buffers.
const ENOUGH: u64 = 1 << 30;

pub fn memlock(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "memlock";
    let limits = facts.root.text("proc/self/limits").unwrap_or_default();
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"));
    let Some(soft) = line.and_then(|line| line.split_whitespace().next()) else {
        return vec![Finding::not_applicable(
            NAME,
            "/proc/self/limits does not say",
        )];
    };
    let status = facts.root.text("proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective
        .and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok())
        .unwrap_or(0);
    let is_exempt = effective & (1 << IPC_LOCK) != 0 && is_initial_namespace(facts);
    vec![match soft.parse::<u64>() {
        Err(_) => Finding::ok(NAME, soft),
        Ok(bytes) if bytes >= ENOUGH => Finding::ok(NAME, format!("{} MiB", bytes >> 20)),
        Ok(bytes) if is_exempt => Finding::ok(
            NAME,
            format!(
                "{} KiB, which does not bind this process, having CAP_IPC_LOCK",
                bytes >> 10
            ),
        ),
        Ok(bytes) => Finding::warn(
            NAME,
            format!(
                "{} KiB: queues and memory regions beyond that are refused",
                bytes >> 10
            ),
            "\"* - memlock unlimited\" in /etc/security/limits.d; LimitMEMLOCK=infinity for a service; --ulimit \
             memlock=-1 for a container",
        ),
    }]
}

pub fn container(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "container";
    let signs = ["run/.containerenv", ".dockerenv", "run/systemd/container"];
    let is_container = signs.iter().any(|sign| facts.root.has(sign));
    let group = facts.root.text("proc/self/cgroup").unwrap_or_default();
    let group = group
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .unwrap_or("/")
        .to_owned();
    let limits = facts
        .root
        .text(&format!("sys/fs/cgroup{group}/rdma.max"))
        .unwrap_or_default();
    let limited: Vec<&str> = limits
        .lines()
        .filter(|line| {
            line.split_whitespace()
                .skip(1)
                .any(|limit| !limit.ends_with("=max"))
        })
        .collect();
    vec![if !limited.is_empty() {
        Finding::warn(
            NAME,
            format!(
                "the control group limits RDMA objects: {}",
                limited.join("; ")
            ),
            format!(
                "echo \"DEVICE hca_handle=max hca_object=max\" >/sys/fs/cgroup{group}/rdma.max"
            ),
        )
    } else if !facts.root.has("proc/self/uid_map") {
        Finding::not_applicable(NAME, "/proc/self/uid_map cannot be read")
    } else if !is_initial_namespace(facts) {
        Finding::ok(
            NAME,
            "a user namespace of its own: its root is not the machine's, and the policy is changed outside",
        )
    } else if is_container {
        let may = if is_administrator(facts) {
            "with"
        } else {
            "without"
        };
        Finding::ok(
            NAME,
            format!("a container {may} CAP_SYS_ADMIN, in the initial user namespace"),
        )
    } else {
        Finding::ok(NAME, "none")
    }]
}

/// The verbs devices that a process opens.
pub fn nodes(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "uverbs";
    let with_rdma: Vec<_> = facts.nics.iter().filter(|nic| nic.rdma.is_some()).collect();
    if with_rdma.is_empty() {
        return vec![Finding::not_applicable(NAME, "there is no verbs device")];
    }
    let missing: Vec<String> = with_rdma
        .iter()
        .filter_map(|nic| match &nic.uverbs {
            Some(uverbs) if facts.root.has(&format!("dev/infiniband/{uverbs}")) => None,
            Some(uverbs) => Some(format!("/dev/infiniband/{uverbs} of {}", nic.title())),
            None => Some(format!("a uverbs device of {}", nic.title())),
        })
        .collect();
    vec![if missing.is_empty() {
        let all = with_rdma.iter().filter_map(|nic| nic.uverbs.clone());
        Finding::ok(
            NAME,
            list(all.map(|uverbs| format!("/dev/infiniband/{uverbs}"))),
        )
    } else {
        Finding::fail(
            NAME,
            format!("missing: {}", missing.join(", ")),
            "modprobe ib_uverbs; in a container: --device /dev/infiniband/uverbsN",
        )
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{doctor::tests::check, fixture::Fixture};

    const LIMITS: &str = "proc/self/limits";

    #[test]
    fn locked_memory() {
        let fixture = Fixture::healthy();
        check(&fixture, memlock).is("ok", "unlimited");
        fixture.write(
            LIMITS,
            "Limit  Soft Limit  Hard Limit  Units\nMax locked memory  8388608  8388608  bytes\n",
        );
        check(&fixture, memlock)
            .is("warn", "8192 KiB")
            .fixed_by("memlock unlimited");
        // Every capability but that one.
        fixture.write("proc/self/status", "CapEff:\t000001ffffffbfff\n");
        check(&fixture, memlock).is("warn", "8192 KiB");
        fixture.write("proc/self/status", "CapEff:\t0000000000004000\n");
        check(&fixture, memlock).is("ok", "CAP_IPC_LOCK");
        fixture.write("proc/self/uid_map", "0 1000 1\n");
        check(&fixture, memlock).is("warn", "8192 KiB");
        fixture.write(LIMITS, "Max locked memory  2147483648  unlimited  bytes\n");
        check(&fixture, memlock).is("ok", "2048 MiB");
        fixture.remove(LIMITS);
        check(&fixture, memlock).is("n/a", "does not say");
    }

    #[test]
    fn containers_and_their_limits() {
        let fixture = Fixture::healthy();
        check(&fixture, container).is("ok", "none");
        fixture.write(".dockerenv", "");
        check(&fixture, container).is("ok", "a container without CAP_SYS_ADMIN");
        fixture.write("proc/self/uid_map", "0 100000 65536\n");
        check(&fixture, container).is("ok", "user namespace of its own");
        fixture.write("proc/self/cgroup", "0::/job\n");
        fixture.write(
            "sys/fs/cgroup/job/rdma.max",
            "mlx5_0 hca_handle=max hca_object=max\n",
        );
        check(&fixture, container).is("ok", "");
        fixture.write(
            "sys/fs/cgroup/job/rdma.max",
            "mlx5_0 hca_handle=2 hca_object=max\n",
        );
        check(&fixture, container)
            .is("warn", "mlx5_0 hca_handle=2")
            .fixed_by("/sys/fs/cgroup/job/rdma.max");
    }

    #[test]
    fn nodes_that_were_not_given() {
        let fixture = Fixture::healthy();
        check(&fixture, nodes).is("ok", "/dev/infiniband/uverbs0");
        fixture.remove("dev/infiniband/uverbs0");
        check(&fixture, nodes)
            .is("fail", "/dev/infiniband/uverbs0 of mlx5_0")
            .fixed_by("--device");
        fixture.remove(&format!(
            "{}/infiniband_verbs",
            fixture.device("0000:05:00.0")
        ));
        check(&fixture, nodes)
            .is("fail", "a uverbs device of mlx5_0")
            .fixed_by("modprobe ib_uverbs");
    }
}
