// SPDX-License-Identifier: MIT OR Apache-2.0
//! For tests: the files of a machine on which everything is well, in a folder, where a test can break one thing.

use crate::root::Root;
use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
};
use tempfile::TempDir;

/// The pair that is allowed there.
pub const PAIR: &str = "0000:04:00.0@0000:05:00.0";

pub struct Fixture {
    pub root: Root,
    dir: TempDir,
}

impl Fixture {
    /// Not even a kernel.
    pub fn empty() -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        Self {
            root: Root::new(dir.path()),
            dir,
        }
    }

    /// A GPU of NVIDIA's and a ConnectX below one switch, which the policy allows, and all that they need.
    pub fn healthy() -> Self {
        let fixture = Self::empty();
        let files = [
            ("proc/sys/kernel/osrelease", "7.3.4-test\n"),
            ("boot/config-7.3.4-test", "CONFIG_PCI=y\nCONFIG_RUST=y\n"),
            (
                "proc/self/status",
                "Name:\tibgda\nCapEff:\t0000000000000000\n",
            ),
            (
                "proc/self/limits",
                "Max locked memory  unlimited  unlimited  bytes\n",
            ),
            ("proc/self/uid_map", "         0          0 4294967295\n"),
            ("proc/self/cgroup", "0::/user.slice\n"),
            ("sys/module/ibgda/refcnt", "0\n"),
            ("sys/module/ib_core/taint", "\n"),
            ("sys/module/mlx5_core/taint", "\n"),
            ("sys/module/mlx5_ib/taint", "\n"),
            ("sys/module/ib_uverbs/taint", "\n"),
            ("sys/devices/system/node/node0/cpulist", "0-15\n"),
            (
                "etc/ibgda/policy",
                "# ours\n0000:04:00.0@0000:05:00.0   # the pair\n",
            ),
            ("dev/ibgda", ""),
            ("dev/nvidiactl", ""),
            ("dev/nvidia-uvm", ""),
            ("dev/infiniband/uverbs0", ""),
            (
                "proc/driver/nvidia/version",
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 14\n",
            ),
            (
                "proc/driver/nvidia/params",
                "EnableStreamMemOPs: 0\nDmaRemapPeerMmio: 1\nRegistryDwords: \"PeerMappingOverride=1\"\n",
            ),
        ];
        for (path, text) in files {
            fixture.write(path, text);
        }
        fixture.write(
            &format!("sys/kernel/config/ibgda/allow/{PAIR}/any_path"),
            "0\n",
        );
        let device = fixture.root.path("dev/ibgda");
        fs::set_permissions(device, fs::Permissions::from_mode(0o660)).expect("chmod");
        let vector: Vec<u8> = [6u64, 4096, 0, 0]
            .iter()
            .flat_map(|word| word.to_ne_bytes())
            .collect();
        fixture.write_bytes("proc/self/auxv", &vector);
        fixture.gpu(
            "0000:04:00.0",
            &["0000:00:01.0", "0000:01:00.0", "0000:02:00.0"],
        );
        fixture.nic(
            "0000:05:00.0",
            "mlx5_0",
            &["0000:00:01.0", "0000:01:00.0", "0000:02:01.0"],
        );
        fixture
    }

    /// A GPU below these bridges.
    pub fn gpu(&self, bdf: &str, bridges: &[&str]) {
        self.function(bdf, bridges, "0x030200", "0x10de", "nvidia");
    }

    /// A NIC, which has an InfiniBand port.
    pub fn nic(&self, bdf: &str, rdma: &str, bridges: &[&str]) {
        self.function(bdf, bridges, "0x020700", "0x15b3", "mlx5_core");
        let device = self.device(bdf);
        let number = &rdma[rdma.len() - 1..];
        self.write(
            &format!("{device}/infiniband_verbs/uverbs{number}/ibdev"),
            rdma,
        );
        for (file, text) in [
            ("state", "4: ACTIVE\n"),
            ("phys_state", "5: LinkUp\n"),
            ("link_layer", "InfiniBand\n"),
            ("rate", "400 Gb/sec (4X NDR)\n"),
            ("lid", "0x1\n"),
            ("sm_lid", "0x2\n"),
            ("gids/0", "fe80:0000:0000:0000:0202:c903:0000:0100\n"),
            ("gids/1", "0000:0000:0000:0000:0000:0000:0000:0000\n"),
        ] {
            self.write(&format!("{device}/infiniband/{rdma}/ports/1/{file}"), text);
        }
    }

    /// Makes a NIC's port one of RoCE, with an interface of that MTU.
    pub fn ethernet(&self, rdma: &str, bdf: &str, mtu: u32) {
        let device = self.device(bdf);
        let port = format!("{device}/infiniband/{rdma}/ports/1");
        self.write(&format!("{device}/net/eth0/mtu"), &format!("{mtu}\n"));
        for (file, text) in [
            ("link_layer", "Ethernet\n"),
            ("lid", "0x0\n"),
            ("gids/0", "fe80:0000:0000:0000:0202:c9ff:fe00:0100\n"),
            ("gids/1", "0000:0000:0000:0000:0000:ffff:0a00:0001\n"),
            ("gid_attrs/ndevs/0", "eth0\n"),
            ("gid_attrs/types/0", "IB/RoCE v1\n"),
            ("gid_attrs/types/1", "RoCE v2\n"),
        ] {
            self.write(&format!("{port}/{file}"), text);
        }
    }

    /// A PCI function, and the bridges above it if they are not there yet. A host bridge other than pci0000:00 may be
    /// named first.
    fn function(&self, bdf: &str, above: &[&str], class: &str, vendor: &str, driver: &str) {
        let (host, bridges) = match above {
            [host, bridges @ ..] if host.starts_with("pci") => (*host, bridges),
            bridges => ("pci0000:00", bridges),
        };
        let mut path = format!("devices/{host}");
        for (bdf, class, driver) in bridges
            .iter()
            .map(|bridge| (*bridge, "0x060400", "pcieport"))
            .chain([(bdf, class, driver)])
        {
            path = format!("{path}/{bdf}");
            let link = format!("sys/bus/pci/devices/{bdf}");
            if self.root.has(&link) {
                continue;
            }
            fs::create_dir_all(self.root.path(&format!("sys/{path}")))
                .expect("make the device's folder");
            self.link(&link, &format!("../../../{path}"));
            self.link(
                &format!("{link}/driver"),
                &format!("../../bus/pci/drivers/{driver}"),
            );
            let speed = "32.0 GT/s PCIe\n";
            for (file, text) in [
                ("class", class),
                (
                    "vendor",
                    if class == "0x060400" {
                        "0x104c"
                    } else {
                        vendor
                    },
                ),
                ("numa_node", "0\n"),
                ("local_cpulist", "0-15\n"),
                ("current_link_speed", speed),
                ("max_link_speed", speed),
                ("current_link_width", "16\n"),
                ("max_link_width", "16\n"),
                ("aer_dev_fatal", "DLP 0\nTOTAL_ERR_FATAL 0\n"),
                ("aer_dev_nonfatal", "CmpltTO 0\nTOTAL_ERR_NONFATAL 0\n"),
                ("aer_dev_correctable", "RxErr 0\nTOTAL_ERR_COR 0\n"),
            ] {
                self.write(&format!("{link}/{file}"), text);
            }
            self.write_bytes(&format!("{link}/config"), &[0; 4096]);
        }
    }

    /// A function's folder.
    pub fn device(&self, bdf: &str) -> String {
        format!("sys/bus/pci/devices/{bdf}")
    }

    /// Writes a file, anew.
    pub fn write(&self, path: &str, text: &str) {
        self.write_bytes(path, text.as_bytes());
    }

    pub fn write_bytes(&self, path: &str, bytes: &[u8]) {
        let path = self.root.path(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("make a folder");
        fs::write(path, bytes).expect("write a file");
    }

    /// Makes a link, anew.
    pub fn link(&self, path: &str, target: &str) {
        let path = self.root.path(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("make a folder");
        let _ = fs::remove_file(&path);
        symlink(target, path).expect("make a link");
    }

    /// Removes a file or a folder with all that is in it.
    pub fn remove(&self, path: &str) {
        let path = self.root.path(path);
        assert!(path.starts_with(self.dir.path()) && path != Path::new("/"));
        if path.is_dir() {
            fs::remove_dir_all(path).expect("remove a folder");
        } else {
            fs::remove_file(path).expect("remove a file");
        }
    }
}
