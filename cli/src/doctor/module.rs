// SPDX-License-Identifier: MIT OR Apache-2.0
//! The broker's module, its device and what it stands on.

use super::{Broker, Facts, Finding};
use crate::broker::{DEVICE, why_not_opened};
use ibgda_uapi::{IBGDA_ABI_VERSION, IBGDA_PAGE_SIZE};
use std::{fs, os::unix::fs::MetadataExt as _};

pub fn loaded(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "module";
    if facts.root.has("sys/module/ibgda") {
        return vec![Finding::ok(NAME, "ibgda is loaded")];
    }
    let release = facts
        .root
        .text("proc/sys/kernel/osrelease")
        .unwrap_or_default();
    let places = ["updates/dkms", "updates", "extra"]
        .map(|folder| format!("lib/modules/{release}/{folder}"));
    let is_built = places
        .iter()
        .flat_map(|place| facts.root.names(place))
        .any(|name| name.starts_with("ibgda.ko"));
    vec![if is_built {
        Finding::fail(
            NAME,
            format!("ibgda is built for Linux {release}, but not loaded"),
            "modprobe -a configfs mlx5_ib ib_uverbs ibgda; if that is refused, ibgda(7) on Secure Boot",
        )
    } else {
        Finding::fail(
            NAME,
            format!("ibgda is neither loaded nor found below /lib/modules/{release}"),
            "install ibgda-dkms (dkms status ibgda says what became of it), or load an ibgda.ko of your own",
        )
    }]
}

pub fn rdma_drivers(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "rdma-drivers";
    let modules = ["mlx5_core", "mlx5_ib", "ib_uverbs"];
    let missing: Vec<&str> = modules
        .into_iter()
        .filter(|module| !facts.root.has(&format!("sys/module/{module}")))
        .collect();
    let foreign: Vec<&str> = ["ib_core"]
        .into_iter()
        .chain(modules)
        .filter(|module| {
            let taint = facts.root.text(&format!("sys/module/{module}/taint"));
            taint.is_some_and(|taint| taint.contains('O'))
        })
        .collect();
    vec![if !foreign.is_empty() {
        Finding::fail(
            NAME,
            format!(
                "{} not the kernel's own: an out-of-tree stack (MLNX_OFED or DOCA-OFED)",
                are(&foreign)
            ),
            "the kernel's own drivers: ibgda works with no others",
        )
    } else if !missing.is_empty() {
        Finding::fail(
            NAME,
            format!("{} not loaded", are(&missing)),
            format!("modprobe -a {}", missing.join(" ")),
        )
    } else {
        Finding::ok(NAME, "mlx5_core, mlx5_ib and ib_uverbs, the kernel's own")
    }]
}

fn are(names: &[&str]) -> String {
    format!(
        "{} {}",
        names.join(", "),
        if names.len() == 1 { "is" } else { "are" }
    )
}

/// The node and who may open it.
pub fn device(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "device";
    let not_opened = |error| {
        let (why, fix) = why_not_opened(error);
        vec![Finding::fail(NAME, why, fix)]
    };
    let node = match fs::metadata(facts.root.path(DEVICE)) {
        Ok(node) => node,
        Err(_) if facts.root.has("sys/module/ibgda") => {
            return vec![Finding::fail(
                NAME,
                "the module is loaded, but there is no /dev/ibgda here",
                "in a container: --device /dev/ibgda; else a devtmpfs at /dev",
            )];
        }
        Err(error) => return not_opened(&error),
    };
    if let Broker::Closed(error) = &facts.broker {
        return not_opened(error);
    }
    let mode = node.mode() & 0o777;
    let found = format!(
        "/dev/ibgda, mode {mode:04o}, owner {}, group {}",
        node.uid(),
        node.gid()
    );
    vec![if mode & 0o006 != 0 {
        Finding::warn(
            NAME,
            format!("{found}: every user may open it"),
            "the udev rule of ibgda-utils, or chmod 0660 /dev/ibgda",
        )
    } else {
        Finding::ok(NAME, found)
    }]
}

/// What the module says of itself.
pub fn abi(facts: &Facts<'_>) -> Vec<Finding> {
    const NAME: &str = "abi";
    let info = match &facts.broker {
        Broker::NotAsked => {
            return vec![Finding::not_applicable(
                NAME,
                "a copy of a machine cannot be asked",
            )];
        }
        Broker::Closed(_) => {
            return vec![Finding::not_applicable(NAME, "/dev/ibgda cannot be opened")];
        }
        Broker::Open { info, .. } => info,
    };
    vec![match info {
        Err(error) => Finding::fail(
            NAME,
            format!(
                "IBGDA_IOC_INFO: {error}: /dev/ibgda is another module's, or one that this command does not know"
            ),
            "an ibgda.ko of this command's version",
        ),
        Ok(info) if info.abi_version != IBGDA_ABI_VERSION || info.page_size != IBGDA_PAGE_SIZE => {
            Finding::fail(
                NAME,
                format!(
                    "the module has ABI {} and pages of {} bytes, not {IBGDA_ABI_VERSION} and {IBGDA_PAGE_SIZE}",
                    info.abi_version, info.page_size
                ),
                "module, library and command of one version",
            )
        }
        Ok(info) => Finding::ok(
            NAME,
            format!(
                "version {}, features {:#x}, {} doorbells and {} queue memories a session",
                info.abi_version, info.features, info.max_doorbells, info.max_queues
            ),
        ),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        doctor::tests::{check, check_with},
        fixture::Fixture,
    };
    use ibgda_uapi::ibgda_info;
    use std::{collections::BTreeMap, io, os::unix::fs::PermissionsExt as _};

    fn open(info: io::Result<ibgda_info>) -> Broker {
        Broker::Open {
            info,
            binds: BTreeMap::new(),
        }
    }

    #[test]
    fn a_module_that_is_not_loaded_or_not_built() {
        let fixture = Fixture::healthy();
        check(&fixture, loaded).is("ok", "loaded");
        fixture.remove("sys/module/ibgda");
        check(&fixture, loaded)
            .is("fail", "neither loaded")
            .fixed_by("ibgda-dkms");
        fixture.write("lib/modules/7.3.4-test/updates/dkms/ibgda.ko.xz", "");
        check(&fixture, loaded)
            .is("fail", "not loaded")
            .fixed_by("modprobe");
    }

    #[test]
    fn foreign_and_missing_rdma_drivers() {
        let fixture = Fixture::healthy();
        check(&fixture, rdma_drivers).is("ok", "own");
        fixture.write("sys/module/mlx5_ib/taint", "OE\n");
        check(&fixture, rdma_drivers)
            .is("fail", "mlx5_ib is not the kernel's own")
            .fixed_by("the kernel's own");
        fixture.remove("sys/module/mlx5_ib");
        fixture.remove("sys/module/ib_uverbs");
        check(&fixture, rdma_drivers)
            .is("fail", "mlx5_ib, ib_uverbs are not loaded")
            .fixed_by("modprobe -a mlx5_ib ib_uverbs");
    }

    #[test]
    fn the_device_and_its_mode() {
        let fixture = Fixture::healthy();
        check(&fixture, device).is("ok", "mode 0660");
        let path = fixture.root.path(DEVICE);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        check(&fixture, device)
            .is("warn", "every user")
            .fixed_by("0660");
        for (errno, word, fix) in [
            (libc::EACCES, "no permission", "adduser"),
            (libc::EPERM, "cgroup", "--device"),
        ] {
            let broker = Broker::Closed(io::Error::from_raw_os_error(errno));
            check_with(&fixture, broker, device)
                .is("fail", word)
                .fixed_by(fix);
        }
        fs::remove_file(path).unwrap();
        check(&fixture, device)
            .is("fail", "the module is loaded, but")
            .fixed_by("--device /dev/ibgda");
        fixture.remove("sys/module/ibgda");
        check(&fixture, device)
            .is("fail", "there is no /dev/ibgda: ")
            .fixed_by("modprobe");
    }

    #[test]
    fn another_abi() {
        let fixture = Fixture::healthy();
        let info = |abi_version| ibgda_info {
            abi_version,
            page_size: 4096,
            ..Default::default()
        };
        check_with(&fixture, open(Ok(info(1))), abi).is("ok", "version 1");
        check_with(&fixture, open(Ok(info(2))), abi)
            .is("fail", "ABI 2")
            .fixed_by("one version");
        let error = io::Error::from_raw_os_error(libc::ENOTTY);
        check_with(&fixture, open(Err(error)), abi)
            .is("fail", "IBGDA_IOC_INFO")
            .fixed_by("ibgda.ko");
        check(&fixture, abi).is("n/a", "cannot be asked");
    }
}
