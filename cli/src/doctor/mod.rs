// SPDX-License-Identifier: MIT OR Apache-2.0
//! `ibgda doctor`: what a machine has and lacks, each with the fix. Every check is a function of the files below a root
//! and of what the broker answers.

mod aer;
mod devices;
mod iommu;
mod kernel;
mod limits;
mod link;
mod module;
mod nvidia;
mod path;
mod policy;
mod port;

use crate::{
    bdf::Bdf,
    broker::{Bound, Session},
    machine::{Function, Machine, Nic},
    output::print,
    policy::Entry,
    root::Root,
};
use anyhow::Result;
use ibgda_uapi::ibgda_info;
use serde::Serialize;
use std::{collections::BTreeMap, fmt, io, process::ExitCode};

/// Say what this machine has and lacks for GPU-driven RDMA, each with the fix.
///
/// Changes nothing, but reads more as root: PCI configuration space, and what only an owner of /dev/ibgda is told. Exit
/// status 1 if a check fails.
#[derive(clap::Args)]
pub struct Arguments {
    /// Look at this GPU only, by its PCI address.
    #[arg(long, value_name = "BDF")]
    gpu: Option<Bdf>,
    /// Look at this NIC only, by its name, as mlx5_0, or its PCI address.
    #[arg(long, value_name = "NAME|BDF")]
    nic: Option<String>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    Ok,
    Warn,
    Fail,
    /// It does not apply here, or cannot be looked at.
    #[serde(rename = "n/a")]
    NotApplicable,
}

/// What one check found.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Its name; stable.
    check: &'static str,
    /// What was looked at: a PCI address, a pair, a verbs device; `None` for the machine.
    subject: Option<String>,
    status: Outcome,
    found: String,
    /// What to do; `None` if there is nothing to do.
    fix: Option<String>,
}

impl Finding {
    fn new(check: &'static str, status: Outcome, found: impl Into<String>) -> Self {
        Self {
            check,
            subject: None,
            status,
            found: found.into(),
            fix: None,
        }
    }

    fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Outcome::Ok, found)
    }

    fn warn(check: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self {
            fix: Some(fix.into()),
            ..Self::new(check, Outcome::Warn, found)
        }
    }

    fn fail(check: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self {
            fix: Some(fix.into()),
            ..Self::new(check, Outcome::Fail, found)
        }
    }

    fn not_applicable(check: &'static str, why: impl Into<String>) -> Self {
        Self::new(check, Outcome::NotApplicable, why)
    }

    fn of(self, subject: impl fmt::Display) -> Self {
        Self {
            subject: Some(subject.to_string()),
            ..self
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = match self.status {
            Outcome::Ok => "ok",
            Outcome::Warn => "warn",
            Outcome::Fail => "fail",
            Outcome::NotApplicable => "n/a",
        };
        write!(f, "{status:4}  {}", self.check)?;
        if let Some(subject) = &self.subject {
            write!(f, " {subject}")?;
        }
        write!(f, ": {}", self.found)?;
        match &self.fix {
            Some(fix) => write!(f, "; fix: {fix}"),
            None => Ok(()),
        }
    }
}

/// What the broker answers, which no file says.
pub enum Broker {
    /// It was not asked: the files are a copy of another machine's.
    NotAsked,
    /// Why it cannot be opened.
    Closed(io::Error),
    /// It was opened.
    Open {
        info: io::Result<ibgda_info>,
        /// A bind of each pair that the policy allows.
        binds: BTreeMap<(Bdf, Bdf), io::Result<Bound>>,
    },
}

/// All that the checks look at.
pub struct Facts<'a> {
    root: &'a Root,
    machine: &'a Machine,
    /// Those asked for, or all.
    gpus: Vec<&'a Function>,
    nics: Vec<&'a Nic>,
    /// Whether one GPU and one NIC were asked for.
    named: bool,
    /// The policy's entries, or why they are not known, and the fix.
    policy: Result<Vec<Entry>, (String, String)>,
    broker: Broker,
}

impl<'a> Facts<'a> {
    fn read(
        root: &'a Root,
        machine: &'a Machine,
        gpu: Option<Bdf>,
        nic: Option<&str>,
    ) -> Result<Self> {
        let mut facts = Self {
            root,
            machine,
            gpus: match gpu {
                Some(bdf) => vec![machine.gpu(bdf)?],
                None => machine.gpus.iter().collect(),
            },
            nics: match nic {
                Some(name) => vec![machine.nic(name)?],
                None => machine.nics.iter().collect(),
            },
            named: gpu.is_some() && nic.is_some(),
            policy: crate::policy::entries(root),
            broker: Broker::NotAsked,
        };
        if root.is_real() {
            facts.broker = facts.ask();
        }
        Ok(facts)
    }

    fn ask(&self) -> Broker {
        let info = match Session::open(self.root) {
            Ok(session) => session.info(),
            Err(error) => return Broker::Closed(error),
        };
        let binds = self.pairs().filter(|&(gpu, nic)| self.is_allowed(gpu, nic));
        let binds = binds.map(|(gpu, nic)| {
            let pair = (gpu.bdf, nic.function.bdf);
            // A session binds once, so each pair has its own. It is gone at the end of the line.
            let bound = Session::open(self.root).and_then(|session| session.bind(pair.0, pair.1));
            (pair, bound)
        });
        Broker::Open {
            info,
            binds: binds.collect(),
        }
    }

    fn pairs(&self) -> impl Iterator<Item = (&'a Function, &'a Nic)> {
        self.gpus
            .iter()
            .flat_map(|&gpu| self.nics.iter().map(move |&nic| (gpu, nic)))
            .filter(|(_, nic)| !nic.is_foreign())
    }

    fn is_allowed(&self, gpu: &Function, nic: &Nic) -> bool {
        let entries = self.policy.iter().flatten();
        entries
            .into_iter()
            .any(|entry| entry.covers(gpu.bdf, nic.function.bdf))
    }

    /// The pairs that somebody means to use: those that the policy allows, and for a GPU without one, or if it was
    /// asked for, any. A machine of eight GPUs and eight NICs has 64 pairs, of which most are of no interest.
    fn meant(&self) -> impl Iterator<Item = (&'a Function, &'a Nic)> {
        self.pairs().filter(|&(gpu, nic)| {
            self.named
                || self.is_allowed(gpu, nic)
                || !self.nics.iter().any(|nic| self.is_allowed(gpu, nic))
        })
    }

    /// The functions whose PCIe matters.
    fn functions(&self) -> impl Iterator<Item = &'a Function> {
        let nics = self.nics.iter().map(|nic| &nic.function);
        self.gpus.iter().copied().chain(nics)
    }
}

/// A check: its findings, one at least.
type Check = fn(&Facts<'_>) -> Vec<Finding>;

/// In the order in which they are printed.
const CHECKS: &[Check] = &[
    kernel::version,
    kernel::rust,
    kernel::page_size,
    module::loaded,
    module::rdma_drivers,
    module::device,
    module::abi,
    devices::gpus,
    devices::nics,
    policy::pairs,
    nvidia::driver,
    nvidia::flavour,
    nvidia::peer_mapping,
    nvidia::gpu_memory,
    path::reach,
    path::affinity,
    iommu::translation,
    iommu::acs,
    link::links,
    aer::counters,
    aer::recovery,
    port::state,
    port::addresses,
    port::mtu,
    limits::memlock,
    limits::container,
    limits::nodes,
];

fn examine(facts: &Facts<'_>) -> Vec<Finding> {
    CHECKS.iter().flat_map(|check| check(facts)).collect()
}

#[derive(Serialize)]
struct Summary {
    ok: usize,
    warn: usize,
    fail: usize,
    #[serde(rename = "n/a")]
    not_applicable: usize,
}

#[derive(Serialize)]
struct Document<'a> {
    version: u32,
    summary: Summary,
    findings: &'a [Finding],
}

fn document(findings: &[Finding]) -> Document<'_> {
    let count = |status| {
        findings
            .iter()
            .filter(|finding| finding.status == status)
            .count()
    };
    Document {
        version: 1,
        summary: Summary {
            ok: count(Outcome::Ok),
            warn: count(Outcome::Warn),
            fail: count(Outcome::Fail),
            not_applicable: count(Outcome::NotApplicable),
        },
        findings,
    }
}

/// Runs it.
pub fn run(root: &Root, arguments: &Arguments) -> Result<ExitCode> {
    let machine = Machine::read(root);
    let findings = examine(&Facts::read(
        root,
        &machine,
        arguments.gpu,
        arguments.nic.as_deref(),
    )?);
    let document = document(&findings);
    let summary = &document.summary;
    print(&if arguments.json {
        serde_json::to_string_pretty(&document)? + "\n"
    } else {
        let lines: Vec<String> = findings.iter().map(Finding::to_string).collect();
        let lines = lines.join(
            "
",
        );
        let Summary {
            ok,
            warn,
            fail,
            not_applicable,
        } = summary;
        format!("{lines}\n{ok} ok, {warn} warn, {fail} fail, {not_applicable} not applicable\n")
    })?;
    Ok(if summary.fail == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests;
