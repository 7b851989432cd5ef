// SPDX-License-Identifier: MIT OR Apache-2.0
//! The virtio-serial ports. There is no udev in the guest, so the links by name are made here.

use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

const BY_NAME: &str = "/dev/virtio-ports";
const APPEAR: Duration = Duration::from_secs(20);

/// Makes `/dev/virtio-ports/NAME` for every port, once all of `names` are there.
pub fn link_all(names: &[&str]) -> Result<()> {
    fs::create_dir_all(BY_NAME)?;
    let deadline = Instant::now() + APPEAR;
    loop {
        link_present()?;
        let missing: Vec<_> = names
            .iter()
            .filter(|name| !Path::new(BY_NAME).join(name).exists())
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("virtio-serial ports {missing:?} did not appear within {APPEAR:?}");
        }
        sleep(Duration::from_millis(5));
    }
}

/// Makes the links of the ports that are there. A port's name comes some time after the port.
pub fn link_present() -> Result<()> {
    let ports = match fs::read_dir("/sys/class/virtio-ports") {
        Ok(ports) => ports,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).context("listing the virtio-serial ports"),
    };
    for port in ports {
        let port = port?;
        let name = fs::read_to_string(port.path().join("name")).unwrap_or_default();
        let node = Path::new("/dev").join(port.file_name());
        let link = Path::new(BY_NAME).join(name.trim_end());
        if !name.trim_end().is_empty() && node.exists() && !link.is_symlink() {
            symlink(&node, &link).with_context(|| format!("making {}", link.display()))?;
        }
    }
    Ok(())
}

/// Opens the port of that name.
pub fn open(name: &str) -> Result<File> {
    let path = Path::new(BY_NAME).join(name);
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .with_context(|| format!("opening {}", path.display()))
}
