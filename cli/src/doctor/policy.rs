// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which of the pairs are allowed.

use super::{Facts, Finding};

pub fn pairs(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "policy";
    let entries = match &facts.policy {
        Ok(entries) => entries,
        Err((why, fix)) => return vec![Finding::fail(NAME, why, fix)],
    };
    let findings: Vec<Finding> = facts
        .pairs()
        .map(|(gpu, nic)| {
            let pair = format!("{}@{}", gpu.bdf, nic.function.bdf);
            let entry = entries
                .iter()
                .find(|entry| entry.covers(gpu.bdf, nic.function.bdf));
            let is_meant = facts.named || !facts.nics.iter().any(|nic| facts.is_allowed(gpu, nic));
            let finding = match entry {
                Some(entry) => {
                    let any_path = if entry.any_path {
                        ", with any-path"
                    } else {
                        ""
                    };
                    Finding::ok(NAME, format!("allowed by {}{any_path}", entry.pair))
                }
                None if is_meant => Finding::fail(
                    NAME,
                    "not allowed, as nothing is by default",
                    format!(
                        "as root: ibgda policy add {pair}, and the same line in /etc/ibgda/policy"
                    ),
                ),
                None => {
                    Finding::not_applicable(NAME, "not allowed; the GPU has another NIC that is")
                }
            };
            finding.of(pair)
        })
        .collect();
    if findings.is_empty() {
        return vec![Finding::not_applicable(
            NAME,
            "there is no pair of a GPU and a NIC",
        )];
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        doctor::tests::{check, check_named},
        fixture::{Fixture, PAIR},
    };

    #[test]
    fn allowed_or_not() {
        let fixture = Fixture::healthy();
        check(&fixture, pairs).is("ok", &format!("allowed by {PAIR}"));
        fixture.remove(&format!("sys/kernel/config/ibgda/allow/{PAIR}"));
        check(&fixture, pairs)
            .is("fail", "not allowed")
            .fixed_by(&format!("ibgda policy add {PAIR}"));
        fixture.write("sys/kernel/config/ibgda/allow/*@*/any_path", "1\n");
        check(&fixture, pairs).is("ok", "allowed by *@*, with any-path");
    }

    #[test]
    fn a_second_nic_that_nobody_means_is_no_failure() {
        let fixture = Fixture::healthy();
        fixture.nic(
            "0000:06:00.0",
            "mlx5_1",
            &["0000:00:01.0", "0000:01:00.0", "0000:02:02.0"],
        );
        let other = check(&fixture, pairs).about("0000:04:00.0@0000:06:00.0");
        other.is("n/a", "another NIC");
        check_named(&fixture, "0000:04:00.0", "mlx5_1", pairs)
            .is("fail", "not allowed")
            .fixed_by("ibgda policy add");
    }

    #[test]
    fn a_policy_that_cannot_be_seen() {
        let fixture = Fixture::healthy();
        fixture.remove("sys/kernel/config");
        check(&fixture, pairs)
            .is("fail", "configfs is not mounted")
            .fixed_by("mount -t configfs");
    }
}
