// SPDX-License-Identifier: MIT OR Apache-2.0
//! How near two PCI functions are, in the words of `nvidia-smi topo -m`.

use crate::{
    bdf::Bdf,
    machine::{Function, Machine},
};
use std::fmt;

/// From the nearest to the farthest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Relation {
    /// The same function.
    Same,
    /// Below one bridge or one switch.
    Pix,
    /// Below several switches, without the host bridge.
    Pxb,
    /// Through the host bridge.
    Phb,
    /// Through host bridges of one NUMA node.
    Node,
    /// Through the link between NUMA nodes.
    Sys,
}

impl Relation {
    /// All but `Same`.
    pub const PATHS: [Self; 5] = [Self::Sys, Self::Node, Self::Phb, Self::Pxb, Self::Pix];

    /// What the word means.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Same => "itself",
            Self::Pix => "below one PCIe switch",
            Self::Pxb => "below several PCIe switches, not through the host bridge",
            Self::Phb => "through the PCIe host bridge",
            Self::Node => "through several host bridges of one NUMA node",
            Self::Sys => "through the link between NUMA nodes",
        }
    }

    /// Of two functions.
    pub fn of(machine: &Machine, one: &Function, other: &Function) -> Self {
        if one.bdf == other.bdf {
            return Self::Same;
        }
        if one.host != other.host {
            return match (one.node, other.node) {
                (Some(one), Some(other)) if one == other => Self::Node,
                _ if machine.nodes == 1 => Self::Node,
                _ => Self::Sys,
            };
        }
        let [below_one, below_other] = apart(one, other);
        if shared(one, other).is_empty() {
            Self::Phb
        } else if below_one.len() <= 1 && below_other.len() <= 1 {
            Self::Pix
        } else {
            Self::Pxb
        }
    }
}

impl fmt::Display for Relation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Same => "X",
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
        })
    }
}

/// The bridges that both are below.
pub fn shared<'a>(one: &'a Function, other: &Function) -> &'a [Bdf] {
    let same = one
        .bridges
        .iter()
        .zip(&other.bridges)
        .take_while(|(a, b)| a == b);
    let count = if one.host == other.host {
        same.count()
    } else {
        0
    };
    &one.bridges[..count]
}

/// The bridges that only one of them is below.
pub fn apart<'a>(one: &'a Function, other: &'a Function) -> [&'a [Bdf]; 2] {
    let count = shared(one, other).len();
    [&one.bridges[count..], &other.bridges[count..]]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn function(host: &str, bridges: &[&str], bdf: &str, node: Option<u64>) -> Function {
        Function {
            bdf: bdf.parse().unwrap(),
            host: host.into(),
            bridges: bridges
                .iter()
                .map(|bridge| bridge.parse().unwrap())
                .collect(),
            class: 0,
            vendor: 0,
            node,
            cpus: String::new(),
            driver: None,
            is_virtual: false,
        }
    }

    #[test]
    fn each_word_has_its_place() {
        let mut machine = Machine {
            functions: BTreeMap::new(),
            gpus: Vec::new(),
            nics: Vec::new(),
            nodes: 2,
        };
        let near = |bridges: &[&str], bdf: &str| function("pci0000:00", bridges, bdf, Some(0));
        let gpu = near(&["00:01.0", "01:00.0", "02:00.0"], "03:00.0");
        let relation = |machine: &Machine, other: &Function| Relation::of(machine, &gpu, other);
        assert_eq!(relation(&machine, &gpu), Relation::Same);
        let nic = near(&["00:01.0", "01:00.0", "02:01.0"], "04:00.0");
        assert_eq!(relation(&machine, &nic), Relation::Pix);
        assert_eq!(shared(&gpu, &nic).len(), 2);
        // A switch below a switch.
        let nic = near(
            &["00:01.0", "01:00.0", "02:01.0", "05:00.0", "06:00.0"],
            "07:00.0",
        );
        assert_eq!(relation(&machine, &nic), Relation::Pxb);
        assert_eq!(
            relation(&machine, &near(&["00:02.0"], "08:00.0")),
            Relation::Phb
        );
        let far = |node| function("pci0000:80", &["80:01.0"], "81:00.0", node);
        assert_eq!(relation(&machine, &far(Some(0))), Relation::Node);
        assert_eq!(relation(&machine, &far(Some(1))), Relation::Sys);
        assert_eq!(
            relation(&machine, &far(None)),
            Relation::Sys,
            "nobody says that it is near"
        );
        machine.nodes = 1;
        assert_eq!(relation(&machine, &far(None)), Relation::Node);
        // Both functions of one card.
        let [one, other] = ["09:00.0", "09:00.1"].map(|bdf| near(&["00:03.0"], bdf));
        assert_eq!(Relation::of(&machine, &one, &other), Relation::Pix);
    }
}
