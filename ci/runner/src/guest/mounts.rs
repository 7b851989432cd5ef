// SPDX-License-Identifier: MIT OR Apache-2.0
//! File systems of the guest.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount, umount};

use crate::protocol::SHARE;

/// Mounts what every Linux program expects. `/dev` comes from the initramfs.
pub fn base() -> Result<()> {
    let secure = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    attach("proc", "/proc", "proc", secure, "")?;
    attach("sysfs", "/sys", "sysfs", secure, "")?;
    attach("debugfs", "/sys/kernel/debug", "debugfs", secure, "")?;
    attach("tracefs", "/sys/kernel/tracing", "tracefs", secure, "")?;
    fs::create_dir_all("/dev/pts")?;
    attach(
        "devpts",
        "/dev/pts",
        "devpts",
        MsFlags::empty(),
        "gid=5,mode=620,ptmxmode=666",
    )?;
    fs::create_dir_all("/dev/shm")?;
    attach("tmpfs", "/dev/shm", "tmpfs", MsFlags::empty(), "mode=1777")?;
    attach("tmpfs", "/run", "tmpfs", MsFlags::empty(), "mode=755")?;
    attach("tmpfs", "/tmp", "tmpfs", MsFlags::empty(), "mode=1777")?;
    fs::set_permissions("/tmp", fs::Permissions::from_mode(0o1777))?;
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        if !Path::new(link).exists() {
            symlink(target, link).with_context(|| format!("making {link}"))?;
        }
    }
    Ok(())
}

/// Mounts configfs, which is a module in Debian's kernel.
pub fn configfs() -> Result<()> {
    attach(
        "configfs",
        "/sys/kernel/config",
        "configfs",
        MsFlags::empty(),
        "",
    )
}

/// Mounts the directory of `--share`.
pub fn share() -> Result<()> {
    fs::create_dir_all(SHARE)?;
    // No cache: the host reads and writes there at the same time.
    attach(
        "share",
        SHARE,
        "9p",
        MsFlags::empty(),
        "trans=virtio,version=9p2000.L,msize=512000,cache=mmap",
    )
}

/// Unmounts the directory of `--share`, so that all that was written there is on the host.
pub fn unmount_share() -> Result<()> {
    umount(SHARE).with_context(|| format!("unmounting {SHARE}"))
}

fn attach(source: &str, target: &str, kind: &str, flags: MsFlags, options: &str) -> Result<()> {
    mount(Some(source), target, Some(kind), flags, Some(options))
        .with_context(|| format!("mounting {kind} at {target}"))
}
