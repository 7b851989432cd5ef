// SPDX-License-Identifier: MIT OR Apache-2.0
//! The GPUs and RDMA NICs of a machine, and the bridges above them, as sysfs has them.

use crate::{bdf::Bdf, root::Root};
use anyhow::{Result, bail};
use std::collections::BTreeMap;

/// PCI vendor ids.
pub const NVIDIA: u64 = 0x10de;
const AMD: u64 = 0x1002;
const MELLANOX: u64 = 0x15b3;

/// A PCI function.
#[derive(Clone, Debug)]
pub struct Function {
    /// Its address.
    pub bdf: Bdf,
    /// Its host bridge, as `pci0000:00`.
    pub host: String,
    /// The bridges from the root port down to it, without it.
    pub bridges: Vec<Bdf>,
    /// PCI class, 24 bits.
    pub class: u64,
    /// PCI vendor.
    pub vendor: u64,
    /// NUMA node, if the firmware says.
    pub node: Option<u64>,
    /// The CPUs near it, as `0-15`.
    pub cpus: String,
    /// The driver that is bound to it.
    pub driver: Option<String>,
    /// It is an SR-IOV virtual function.
    pub is_virtual: bool,
}

/// Virtual functions that a guest was given, which have no link to their physical function there: those that mlx5_core
/// knows by `MLX5_PCI_DEV_IS_VF` (`mlx5_core_pci_table`).
const MELLANOX_VFS: [u64; 8] = [
    0x1012, 0x1014, 0x1016, 0x1018, 0x101a, 0x101c, 0x101e, 0xa2d3,
];

impl Function {
    fn read(root: &Root, bdf: Bdf) -> Self {
        let at = |file: &str| format!("{}/{file}", folder(bdf));
        let link = root.link(&folder(bdf)).unwrap_or_default();
        let mut host = String::new();
        let mut bridges = Vec::new();
        for part in link.components() {
            let part = part.as_os_str().to_string_lossy();
            if let Some(domain_and_bus) = part.strip_prefix("pci").filter(|rest| rest.contains(':'))
            {
                // A host bridge below another device (VMD) begins anew.
                host = format!("pci{domain_and_bus}");
                bridges.clear();
            } else if let Ok(bridge) = part.parse::<Bdf>() {
                bridges.push(bridge);
            }
        }
        bridges.retain(|&bridge| bridge != bdf);
        let vendor = root.number(&at("vendor")).unwrap_or(0);
        let device = root.number(&at("device")).unwrap_or(0);
        let is_known = vendor == MELLANOX && MELLANOX_VFS.contains(&device);
        Self {
            bdf,
            host,
            bridges,
            class: root.number(&at("class")).unwrap_or(0),
            vendor,
            node: root.number(&at("numa_node")),
            cpus: root.text(&at("local_cpulist")).unwrap_or_default(),
            driver: root.link_name(&at("driver")),
            is_virtual: is_known || root.link(&at("physfn")).is_some(),
        }
    }

    /// A display or 3D controller that computes. The display of a BMC or of a virtual machine is none.
    pub fn is_gpu(&self) -> bool {
        match self.class >> 8 {
            0x0302 => true,
            0x0300 | 0x0380 => [NVIDIA, AMD].contains(&self.vendor),
            _ => false,
        }
    }

    /// A file of the function in sysfs.
    pub fn file(&self, name: &str) -> String {
        format!("{}/{name}", folder(self.bdf))
    }
}

/// A function's folder in sysfs.
pub fn folder(bdf: Bdf) -> String {
    format!("sys/bus/pci/devices/{bdf}")
}

/// An RDMA NIC, or a ConnectX function without RDMA.
#[derive(Clone, Debug)]
pub struct Nic {
    /// The PCI function.
    pub function: Function,
    /// Its verbs device, as `mlx5_0`.
    pub rdma: Option<String>,
    /// Its uverbs node, as `uverbs0`.
    pub uverbs: Option<String>,
    /// Its Ethernet or IPoIB interfaces.
    pub interfaces: Vec<String>,
}

impl Nic {
    /// `mlx5_0 (0000:03:00.0)`.
    pub fn title(&self) -> String {
        match &self.rdma {
            Some(rdma) => format!("{rdma} ({})", self.function.bdf),
            None => self.function.bdf.to_string(),
        }
    }

    /// Whether a driver has it whose NICs the broker does not know.
    pub fn is_foreign(&self) -> bool {
        let driver = self.function.driver.as_deref();
        driver.is_some_and(|driver| driver != "mlx5_core")
    }

    /// Files of its verbs device.
    pub fn ports(&self) -> Option<String> {
        let rdma = self.rdma.as_ref()?;
        Some(self.function.file(&format!("infiniband/{rdma}/ports")))
    }
}

/// All of it.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Every PCI function.
    pub functions: BTreeMap<Bdf, Function>,
    /// The GPUs, in order of their addresses.
    pub gpus: Vec<Function>,
    /// The RDMA NICs, the same.
    pub nics: Vec<Nic>,
    /// NUMA nodes that have CPUs or memory; 1 when the kernel does not say.
    pub nodes: usize,
}

impl Machine {
    /// Reads sysfs.
    pub fn read(root: &Root) -> Self {
        let names = root.names("sys/bus/pci/devices");
        let functions: BTreeMap<Bdf, Function> = names
            .iter()
            .filter_map(|name| name.parse().ok())
            .map(|bdf| (bdf, Function::read(root, bdf)))
            .collect();
        let entry = |function: &Function, folder: &str| {
            root.names(&function.file(folder)).into_iter().next()
        };
        let nics = functions.values().filter_map(|function| {
            let rdma = entry(function, "infiniband");
            let is_connectx = function.vendor == MELLANOX && function.class >> 16 == 2;
            (rdma.is_some() || is_connectx).then(|| Nic {
                rdma,
                uverbs: entry(function, "infiniband_verbs"),
                interfaces: root.names(&function.file("net")),
                function: function.clone(),
            })
        });
        let nodes = root.names("sys/devices/system/node");
        let is_node = |name: &&String| {
            name.strip_prefix("node")
                .is_some_and(|number| number.parse::<u32>().is_ok())
        };
        Self {
            gpus: functions
                .values()
                .filter(|function| function.is_gpu())
                .cloned()
                .collect(),
            nics: nics.collect(),
            nodes: nodes.iter().filter(is_node).count().max(1),
            functions,
        }
    }

    /// The GPU of that address.
    pub fn gpu(&self, bdf: Bdf) -> Result<&Function> {
        if let Some(gpu) = self.gpus.iter().find(|gpu| gpu.bdf == bdf) {
            return Ok(gpu);
        }
        match self.functions.get(&bdf) {
            Some(other) => bail!(
                "{bdf} is no GPU: its PCI class is {:#08x}; GPUs here: {}",
                other.class,
                list(self.gpus.iter().map(|gpu| gpu.bdf.to_string()))
            ),
            None => bail!(
                "there is no PCI function {bdf}; GPUs here: {}",
                list(self.gpus.iter().map(|gpu| gpu.bdf.to_string()))
            ),
        }
    }

    /// The NIC of that address or name of its verbs device.
    pub fn nic(&self, name: &str) -> Result<&Nic> {
        let bdf = name.parse::<Bdf>().ok();
        let found = self
            .nics
            .iter()
            .find(|nic| bdf == Some(nic.function.bdf) || nic.rdma.as_deref() == Some(name));
        match found {
            Some(nic) => Ok(nic),
            None => bail!(
                "{name:?} is neither the name nor the PCI address of an RDMA NIC; NICs here: {}",
                list(self.nics.iter().map(Nic::title))
            ),
        }
    }
}

/// Words with commas, or "none".
pub fn list(words: impl Iterator<Item = String>) -> String {
    let words: Vec<String> = words.collect();
    if words.is_empty() {
        "none".into()
    } else {
        words.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Fixture;

    #[test]
    fn a_host_bridge_below_a_device_begins_anew() {
        let fixture = Fixture::empty();
        let above = ["pci0000:00", "0000:00:0e.0", "pci10000:e0", "10000:e0:06.0"];
        fixture.link(
            "sys/bus/pci/devices/10000:e1:00.0",
            &format!("../../../devices/{}/10000:e1:00.0", above.join("/")),
        );
        let machine = Machine::read(&fixture.root);
        let function = machine.functions.values().next().expect("one function");
        assert_eq!(function.host, "pci10000:e0");
        assert_eq!(function.bridges, ["10000:e0:06.0".parse().unwrap()]);
    }

    #[test]
    fn displays_that_do_not_compute_are_no_gpus() {
        let fixture = Fixture::healthy();
        let gpu = fixture.device("0000:04:00.0");
        for (class, vendor, gpus) in [
            ("0x030000", "0x10de", 1),
            ("0x038000", "0x1002", 1),
            // The display of a BMC (ASPEED).
            ("0x030000", "0x1a03", 0),
            ("0x040300", "0x10de", 0),
        ] {
            fixture.write(&format!("{gpu}/class"), class);
            fixture.write(&format!("{gpu}/vendor"), vendor);
            assert_eq!(
                Machine::read(&fixture.root).gpus.len(),
                gpus,
                "{class} {vendor}"
            );
        }
    }
}
