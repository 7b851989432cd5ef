// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an administrator does, not an application: allow a pair, and break a NIC to see what happens.

use anyhow::{Context as _, Result};
use ibgda::Bdf;
use std::{fs, io, path::PathBuf};

/// An entry of the broker's allow-list, which lasts as long as this value.
pub struct Allowed(Option<PathBuf>);

impl Allowed {
    /// Allows `gpu` to drive `nic`. An entry that exists already is left as it is.
    pub fn new(gpu: Bdf, nic: Bdf) -> Result<Self> {
        let entry = PathBuf::from(format!("/sys/kernel/config/ibgda/allow/{gpu}@{nic}"));
        match fs::create_dir(&entry) {
            Ok(()) => Ok(Self(Some(entry))),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(Self(None)),
            Err(error) => Err(error).with_context(|| format!("mkdir {}", entry.display())),
        }
    }
}

impl Drop for Allowed {
    fn drop(&mut self) {
        if let Some(entry) = self.0.take() {
            if let Err(error) = fs::remove_dir(&entry) {
                eprintln!("rmdir {}: {error}", entry.display());
            }
        }
    }
}

/// Makes the kernel see a fatal PCIe error (Data Link Protocol) of a function, through the aer_inject module.
pub fn inject_fatal_error(function: Bdf) -> Result<()> {
    const DATA_LINK_PROTOCOL: u32 = 0x10;
    // struct aer_error_inj: bus, device, function, a byte of padding, uncorrectable and correctable status, a TLP header, domain.
    let mut record = [0; 32];
    record[..3].copy_from_slice(&[function.bus, function.device, function.function]);
    record[4..8].copy_from_slice(&DATA_LINK_PROTOCOL.to_ne_bytes());
    record[28..].copy_from_slice(&function.domain.to_ne_bytes());
    fs::write("/dev/aer_inject", record)
        .context("write /dev/aer_inject (is the module aer_inject loaded?)")
}
