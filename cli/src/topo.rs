// SPDX-License-Identifier: MIT OR Apache-2.0
//! `ibgda topo`: the matrix of GPUs and RDMA NICs.

use crate::{
    machine::{Function, Machine},
    output::print,
    root::Root,
    topology::Relation,
};
use anyhow::Result;
use serde::Serialize;
use std::fmt::Write as _;

/// Print how near GPUs and RDMA NICs are to each other, in the words of `nvidia-smi topo -m`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Device {
    name: String,
    kind: &'static str,
    bdf: String,
    rdma_device: Option<String>,
    numa_node: Option<u64>,
    cpus: String,
}

#[derive(Serialize)]
struct Path {
    from: String,
    to: String,
    relation: String,
}

#[derive(Serialize)]
struct Document {
    version: u32,
    devices: Vec<Device>,
    paths: Vec<Path>,
}

/// Runs it.
pub fn run(root: &Root, arguments: &Arguments) -> Result<()> {
    let machine = Machine::read(root);
    let document = document(&machine);
    print(&if arguments.json {
        serde_json::to_string_pretty(&document)? + "\n"
    } else {
        table(&document)
    })
}

fn document(machine: &Machine) -> Document {
    let gpus = machine.gpus.iter().map(|gpu| (gpu, "gpu", None));
    let nics = machine
        .nics
        .iter()
        .map(|nic| (&nic.function, "nic", nic.rdma.clone()));
    let mut counts = [0, 0];
    let all: Vec<(&Function, Device)> = gpus
        .chain(nics)
        .map(|(function, kind, rdma_device)| {
            let count = &mut counts[usize::from(kind == "nic")];
            let device = Device {
                name: format!("{}{count}", kind.to_uppercase()),
                kind,
                bdf: function.bdf.to_string(),
                rdma_device,
                numa_node: function.node,
                cpus: function.cpus.clone(),
            };
            *count += 1;
            (function, device)
        })
        .collect();
    let mut paths = Vec::new();
    for (from, one) in &all {
        for (to, other) in &all {
            paths.push(Path {
                from: one.name.clone(),
                to: other.name.clone(),
                relation: Relation::of(machine, from, to).to_string(),
            });
        }
    }
    Document {
        version: 1,
        devices: all.into_iter().map(|(_, device)| device).collect(),
        paths,
    }
}

fn table(document: &Document) -> String {
    let mut text = String::new();
    if document.devices.is_empty() {
        return "no GPU and no RDMA NIC\n".into();
    }
    let _ = write!(text, "{:8}", "");
    for device in &document.devices {
        let _ = write!(text, "{:8}", device.name);
    }
    let cpus = document.devices.iter().map(|device| device.cpus.len());
    let cpus = cpus.max().unwrap_or(0).max("CPU affinity".len()) + 2;
    let _ = writeln!(text, "{:cpus$}NUMA node", "CPU affinity");
    let rows = document.paths.chunks(document.devices.len());
    for (device, row) in document.devices.iter().zip(rows) {
        let _ = write!(text, "{:8}", device.name);
        for path in row {
            let _ = write!(text, "{:8}", path.relation);
        }
        let node = device
            .numa_node
            .map_or("unknown".into(), |node| node.to_string());
        let _ = writeln!(text, "{:cpus$}{node}", device.cpus);
    }
    text.push('\n');
    for device in &document.devices {
        let rdma = device.rdma_device.as_deref().unwrap_or_default();
        let line = format!("{:7} {}  {rdma}", device.name, device.bdf);
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text.push('\n');
    for relation in [Relation::Same].into_iter().chain(Relation::PATHS) {
        let _ = writeln!(text, "{:5} {}", relation.to_string(), relation.meaning());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Fixture;

    #[test]
    fn the_matrix_has_every_device_and_the_legend() {
        let fixture = Fixture::healthy();
        let text = table(&document(&Machine::read(&fixture.root)));
        let lines: Vec<&str> = text.lines().collect();
        let words = |line: &str| {
            line.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            words(lines[0]),
            ["GPU0", "NIC0", "CPU", "affinity", "NUMA", "node"]
        );
        assert_eq!(words(lines[1]), ["GPU0", "X", "PIX", "0-15", "0"]);
        assert_eq!(words(lines[2]), ["NIC0", "PIX", "X", "0-15", "0"]);
        assert!(text.contains("NIC0    0000:05:00.0  mlx5_0\n"), "{text}");
        for word in ["X ", "PIX ", "PXB ", "PHB ", "NODE ", "SYS "] {
            assert!(
                lines.iter().any(|line| line.starts_with(word)),
                "{word} in {text}"
            );
        }
    }

    #[test]
    fn an_empty_machine_says_so() {
        let fixture = Fixture::empty();
        assert_eq!(
            table(&document(&Machine::read(&fixture.root))),
            "no GPU and no RDMA NIC\n"
        );
    }
}
