// SPDX-License-Identifier: MIT OR Apache-2.0
//! `/dev/ibgda`: what the module offers, a session of a pair, and its event records. ibgda(4) has the whole ABI.

use crate::{bdf::Bdf, root::Root};
use anyhow::{Error, anyhow};
use ibgda_uapi::*;
use std::{
    ffi::CStr,
    fs::{File, OpenOptions},
    io,
    mem::size_of,
    os::fd::{AsRawFd, BorrowedFd},
};

/// The device's path below the root.
pub const DEVICE: &str = "dev/ibgda";

/// One open file of the broker.
#[derive(Debug)]
pub struct Session(File);

/// What the broker says of a pair that a session is bound to.
#[derive(Clone, Debug)]
pub struct Bound {
    /// Name of the NIC's verbs device.
    pub rdma: String,
    /// `IBGDA_PATH_*`.
    pub path: u32,
    /// The kernel's p2pdma distance, -1 when not reachable.
    pub distance: i32,
    /// 1, and one more at each return of the NIC.
    pub generation: u32,
}

macro_rules! argument {
    ($type:ident { $($field:ident: $value:expr),* $(,)? }) => {
        $type { size: size_of::<$type>() as u32, $($field: $value,)* ..$type::default() }
    };
}

impl Session {
    /// Opens the device.
    pub fn open(root: &Root) -> io::Result<Self> {
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(root.path(DEVICE))
            .map(Self)
    }

    /// `argument` must be the structure that belongs to the command.
    fn call<T>(&self, command: u32, argument: &mut T) -> io::Result<()> {
        loop {
            // SAFETY: each caller below passes the command's own structure, with its size; the one that has a user
            // pointer (ibgda_events) points at as many records as it says.
            let result = unsafe {
                libc::ioctl(
                    self.0.as_raw_fd(),
                    command as libc::Ioctl,
                    &raw mut *argument,
                )
            };
            if result == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// What the module offers.
    pub fn info(&self) -> io::Result<ibgda_info> {
        let mut info = argument!(ibgda_info {});
        self.call(IBGDA_IOC_INFO, &mut info)?;
        Ok(info)
    }

    /// Binds the pair.
    pub fn bind(&self, gpu: Bdf, nic: Bdf) -> io::Result<Bound> {
        let mut bind = argument!(ibgda_bind {
            gpu: gpu.into(),
            nic: nic.into()
        });
        self.call(IBGDA_IOC_BIND, &mut bind)?;
        Ok(bound(&bind))
    }

    /// Binds the pair again after a loss.
    pub fn rebind(&self) -> io::Result<Bound> {
        let mut bind = argument!(ibgda_bind {});
        self.call(IBGDA_IOC_REBIND, &mut bind)?;
        Ok(bound(&bind))
    }

    /// Has an eventfd signalled at each new record.
    pub fn set_eventfd(&self, eventfd: BorrowedFd<'_>) -> io::Result<()> {
        let mut argument = ibgda_eventfd {
            size: size_of::<ibgda_eventfd>() as u32,
            fd: eventfd.as_raw_fd(),
        };
        self.call(IBGDA_IOC_EVENTFD, &mut argument)
    }

    /// Takes up to `most` records that wait, oldest first; none when there are none.
    pub fn events(&self, most: usize) -> io::Result<Vec<ibgda_event>> {
        let mut records = vec![ibgda_event::default(); most.clamp(1, 64)];
        let mut events = argument!(ibgda_events {
            records: records.as_mut_ptr() as u64,
            capacity: records.len() as u32,
        });
        match self.call(IBGDA_IOC_EVENTS, &mut events) {
            Ok(()) => records.truncate(events.count as usize),
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => records.clear(),
            Err(error) => return Err(error),
        }
        Ok(records)
    }
}

fn bound(bind: &ibgda_bind) -> Bound {
    // SAFETY: the kernel terminates the name, and the array was zeroed before.
    let name = unsafe { CStr::from_ptr(bind.ibdev_name.as_ptr()) };
    Bound {
        rdma: name.to_string_lossy().into_owned(),
        path: bind.path,
        distance: bind.path_distance,
        generation: bind.generation,
    }
}

/// Why `/dev/ibgda` cannot be opened, and what to do.
pub fn why_not_opened(error: &io::Error) -> (String, String) {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => (
            "there is no /dev/ibgda: the module is not loaded, or this container was not given the device".into(),
            "modprobe -a configfs mlx5_ib ib_uverbs ibgda; for a container: --device /dev/ibgda".into(),
        ),
        Some(libc::EACCES) => (
            "no permission to open /dev/ibgda, which is for root and the group ibgda".into(),
            "adduser USER ibgda, and log in again (without the package ibgda-utils: chgrp and chmod 0660)".into(),
        ),
        Some(libc::EPERM) => (
            "the container's device cgroup forbids /dev/ibgda".into(),
            "start the container with --device /dev/ibgda".into(),
        ),
        _ => (format!("/dev/ibgda cannot be opened: {error}"), "see dmesg".into()),
    }
}

/// Why a pair was not bound, and what to do: BIND's errors in words.
pub fn why_not_bound(gpu: Bdf, nic: Bdf, error: &io::Error) -> (String, String) {
    let (why, fix) = match error.raw_os_error() {
        Some(libc::ENODEV) => (
            "there is no such PCI function",
            "ibgda topo lists GPUs and NICs".into(),
        ),
        Some(libc::EINVAL) => (
            "the first is no GPU, or the second no RDMA NIC that mlx5_ib drives",
            "ibgda topo lists GPUs and NICs".into(),
        ),
        Some(libc::EACCES) => (
            "the policy does not allow this pair",
            format!("as root: ibgda policy add {gpu}@{nic}"),
        ),
        Some(libc::EHOSTDOWN) => (
            "the NIC is being reset, or its recovery has failed",
            format!(
                "try again in a second; if it stays: dmesg, and echo 1 >/sys/bus/pci/devices/{nic}/reset"
            ),
        ),
        Some(libc::EXDEV) => (
            "the GPU cannot reach the NIC peer to peer",
            format!(
                "use a NIC below the GPU's PCIe switch (ibgda topo), turn ACS redirect off on the way, or, if you know \
                 that it works: ibgda policy add --any-path {gpu}@{nic}"
            ),
        ),
        _ => {
            return (
                format!("the broker does not bind {gpu} and {nic}: {error}"),
                "see dmesg".into(),
            );
        }
    };
    (
        format!("the broker does not bind {gpu} and {nic}: {why} ({error})"),
        fix,
    )
}

/// The two as one error.
pub fn as_error((why, fix): (String, String)) -> Error {
    anyhow!("{why}; fix: {fix}")
}

/// Words of `IBGDA_PATH_*`.
pub fn path_in_words(path: u32) -> &'static str {
    match path {
        IBGDA_PATH_SWITCH => "below one PCIe switch",
        IBGDA_PATH_HOST_BRIDGE => "through a host bridge that the kernel allows",
        _ => "not known to be reachable",
    }
}
