// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the tests of the checks share, and the command on whole machines.

use super::*;
use crate::fixture::{Fixture, PAIR};

/// The findings of one check.
#[derive(Debug)]
pub struct Found(Vec<Finding>);

impl Found {
    /// The one finding that is not ok, or the first.
    fn one(&self) -> &Finding {
        let bad = self.0.iter().find(|finding| finding.status != Outcome::Ok);
        bad.or(self.0.first()).expect("a check has a finding")
    }

    /// Its status and words of what was found.
    #[track_caller]
    pub fn is(&self, status: &str, found: &str) -> &Self {
        let line = self.one().to_string();
        assert!(
            line.starts_with(&format!("{status:4}  ")),
            "not {status}: {self:#?}"
        );
        assert!(
            self.one().found.contains(found),
            "{found:?} is missing: {line}"
        );
        self
    }

    /// Words of the fix.
    #[track_caller]
    pub fn fixed_by(&self, fix: &str) -> &Self {
        let said = self.one().fix.as_deref().unwrap_or_default();
        assert!(said.contains(fix), "{fix:?} is missing: {}", self.one());
        self
    }

    /// Those of one subject.
    pub fn about(mut self, subject: &str) -> Self {
        self.0
            .retain(|finding| finding.subject.as_deref() == Some(subject));
        self
    }
}

pub fn check(fixture: &Fixture, check: Check) -> Found {
    check_with(fixture, Broker::NotAsked, check)
}

pub fn check_with(fixture: &Fixture, broker: Broker, check: Check) -> Found {
    let machine = Machine::read(&fixture.root);
    let mut facts = Facts::read(&fixture.root, &machine, None, None).unwrap();
    facts.broker = broker;
    Found(check(&facts))
}

pub fn check_named(fixture: &Fixture, gpu: &str, nic: &str, check: Check) -> Found {
    let machine = Machine::read(&fixture.root);
    let facts = Facts::read(
        &fixture.root,
        &machine,
        Some(gpu.parse().unwrap()),
        Some(nic),
    )
    .unwrap();
    Found(check(&facts))
}

fn findings(fixture: &Fixture) -> Vec<Finding> {
    let machine = Machine::read(&fixture.root);
    examine(&Facts::read(&fixture.root, &machine, None, None).unwrap())
}

#[test]
fn a_healthy_machine_has_nothing_to_fix() {
    let findings = findings(&Fixture::healthy());
    for finding in &findings {
        assert!(
            !matches!(finding.status, Outcome::Warn | Outcome::Fail),
            "{finding}"
        );
        assert!(finding.fix.is_none(), "{finding}");
    }
    assert!(findings.len() >= CHECKS.len());
}

/// A container with nothing in it: no check panics, those that matter fail, and each says what to do.
#[test]
fn an_empty_machine_fails_with_fixes() {
    let findings = findings(&Fixture::empty());
    let failed: Vec<&str> = findings
        .iter()
        .filter(|finding| finding.status == Outcome::Fail)
        .map(|finding| finding.check)
        .collect();
    for name in ["module", "rdma-drivers", "device", "gpus", "nics", "policy"] {
        assert!(failed.contains(&name), "{name} is not among {failed:?}");
    }
    for finding in &findings {
        let must_have = matches!(finding.status, Outcome::Warn | Outcome::Fail);
        assert_eq!(finding.fix.is_some(), must_have, "{finding}");
    }
}

#[test]
fn the_line_and_the_json_have_their_documented_shape() {
    let finding = Finding::fail("policy", "not allowed", "allow it").of(PAIR);
    assert_eq!(
        finding.to_string(),
        format!("fail  policy {PAIR}: not allowed; fix: allow it")
    );
    assert_eq!(
        Finding::not_applicable("abi", "why").to_string(),
        "n/a   abi: why"
    );
    let findings = [finding, Finding::ok("kernel", "Linux")];
    assert_eq!(
        serde_json::to_value(document(&findings)).unwrap(),
        serde_json::json!({
            "version": 1,
            "summary": { "ok": 1, "warn": 0, "fail": 1, "n/a": 0 },
            "findings": [
                { "check": "policy", "subject": PAIR, "status": "fail", "found": "not allowed", "fix": "allow it" },
                { "check": "kernel", "subject": null, "status": "ok", "found": "Linux", "fix": null },
            ],
        })
    );
}

#[test]
fn a_device_that_is_not_there_is_an_error_that_names_those_that_are() {
    let fixture = Fixture::healthy();
    let machine = Machine::read(&fixture.root);
    let said = |gpu: Option<&str>, nic: Option<&str>| {
        let gpu = gpu.map(|gpu| gpu.parse().unwrap());
        Facts::read(&fixture.root, &machine, gpu, nic)
            .err()
            .expect("an error")
            .to_string()
    };
    assert!(
        said(Some("0000:77:00.0"), None)
            .contains("no PCI function 0000:77:00.0; GPUs here: 0000:04:00.0")
    );
    assert!(said(Some("0000:05:00.0"), None).contains("0000:05:00.0 is no GPU"));
    assert!(said(None, Some("mlx5_9")).contains("NICs here: mlx5_0 (0000:05:00.0)"));
}
