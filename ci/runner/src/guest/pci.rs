// SPDX-License-Identifier: MIT OR Apache-2.0
//! The PCI functions that the tests are about.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// PCI functions by what they are, each list in the order of the bus.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Devices {
    /// `domain:bus:device.function` of each NIC.
    pub nics: Vec<String>,
    /// The same of each GPU.
    pub gpus: Vec<String>,
}

const MELLANOX: u32 = 0x15b3;
const NETWORK: u32 = 0x02;
const DISPLAY: u32 = 0x03;

impl Devices {
    /// Reads them from sysfs and checks their number.
    pub fn find(nics: usize, gpus: usize) -> Result<Self> {
        let found = Self::read(Path::new("/sys/bus/pci/devices"))?;
        if found.nics.len() != nics || found.gpus.len() != gpus {
            bail!(
                "asked for {nics} NICs and {gpus} GPUs, the guest sees NICs {:?} and GPUs {:?}",
                found.nics,
                found.gpus
            );
        }
        Ok(found)
    }

    fn read(dir: &Path) -> Result<Self> {
        let mut found = Self::default();
        for entry in fs::read_dir(dir).with_context(|| format!("listing {}", dir.display()))? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let vendor = hex(entry.path().join("vendor"))?;
            match hex(entry.path().join("class"))? >> 16 {
                NETWORK if vendor == MELLANOX => found.nics.push(name),
                DISPLAY => found.gpus.push(name),
                _ => {}
            }
        }
        found.nics.sort();
        found.gpus.sort();
        Ok(found)
    }
}

fn hex(path: PathBuf) -> Result<u32> {
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    u32::from_str_radix(text.trim().trim_start_matches("0x"), 16)
        .with_context(|| format!("{} holds {text:?}, not a number", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nics_and_gpus_are_told_apart_and_sorted() {
        let dir = tempfile::tempdir().unwrap();
        for (name, vendor, class) in [
            ("0000:04:00.0", "0x15b3", "0x020700"),
            ("0000:03:00.0", "0x15b3", "0x020700"),
            ("0000:05:00.0", "0x10de", "0x030200"),
            ("0000:00:02.0", "0x1af4", "0x020000"),
            ("0000:00:01.0", "0x1b36", "0x060400"),
        ] {
            let device = dir.path().join(name);
            fs::create_dir(&device).unwrap();
            fs::write(device.join("vendor"), format!("{vendor}\n")).unwrap();
            fs::write(device.join("class"), format!("{class}\n")).unwrap();
        }
        let found = Devices::read(dir.path()).unwrap();
        assert_eq!(found.nics, ["0000:03:00.0", "0000:04:00.0"]);
        assert_eq!(found.gpus, ["0000:05:00.0"]);
    }
}
