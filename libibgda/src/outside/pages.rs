// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where pages of this process lie on the machine's bus.

use crate::{
    error::{Error, Result, Source},
    processor::{HostKind, HostRange},
};
use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    sync::atomic::{AtomicU8, Ordering},
};

pub(super) use crate::memory::PAGE_BYTES as PAGE;

/// Of an entry of `pagemap` (Documentation/admin-guide/mm/pagemap.rst).
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

fn failed(what: String, errno: i32, why: impl Into<String>, advice: &str) -> Error {
    Error::new(Source::Agent, errno, what, why, advice)
}

fn io(what: &str, error: &std::io::Error) -> Error {
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    failed(what.to_owned(), errno, error.to_string(), "")
}

/// Runs of the range's pages, by frame. The kernel tells only root.
///
/// # Safety
/// The range is mapped for reading, and for writing unless its kind is [`HostKind::ReadOnly`].
pub(super) unsafe fn frames(range: &HostRange) -> Result<Vec<(u64, u64)>> {
    const MAP: &str = "/proc/self/pagemap";
    let start = range.address.addr() as u64;
    let (first, end) = (start / PAGE, (start + range.bytes as u64).div_ceil(PAGE));
    for page in first..end {
        let at = std::ptr::with_exposed_provenance_mut::<u8>((page * PAGE).max(start) as usize);
        if range.kind == HostKind::ReadOnly {
            // SAFETY: mapped, by this function's contract.
            unsafe { at.read_volatile() };
        } else {
            // A page that was never written has no frame of its own: it is the kernel's page of zeros.
            // SAFETY: as above; atomics bear any sharing.
            let byte = unsafe { AtomicU8::from_ptr(at) };
            let value = byte.load(Ordering::Relaxed);
            // A write that changes nothing. (Compilers make a load of an atomic or with 0.)
            let _ = byte.compare_exchange(value, value, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
    let file = File::open(MAP).map_err(|error| io(MAP, &error))?;
    let mut entries = vec![0; (end - first) as usize * 8];
    file.read_exact_at(&mut entries, first * 8)
        .map_err(|error| io(MAP, &error))?;
    let mut frames = Vec::new();
    for (page, entry) in (first..).zip(entries.chunks_exact(8)) {
        let entry = u64::from_ne_bytes(entry.try_into().expect("eight bytes"));
        let what = || format!("find the page at {:#x}", page * PAGE);
        if entry & PRESENT == 0 {
            return Err(failed(what(), libc::EFAULT, "it is not in memory", ""));
        }
        if entry & FRAME == 0 {
            return Err(failed(
                what(),
                libc::EPERM,
                "the kernel does not say where it lies",
                "run as root: page frames are shown to CAP_SYS_ADMIN only",
            ));
        }
        frames.push((entry & FRAME) * PAGE);
    }
    Ok(runs(&frames))
}

/// A doorbell page, by the broker's word.
pub(super) fn doorbell(range: &HostRange) -> Result<Vec<(u64, u64)>> {
    let Some((nic, offset)) = range.bar else {
        return Err(failed(
            format!("register MMIO at {:p} outside", range.address),
            libc::EINVAL,
            "it is no doorbell page that the broker granted",
            "",
        ));
    };
    let path = format!("/sys/bus/pci/devices/{nic}/resource");
    let text = fs::read_to_string(&path).map_err(|error| io(&path, &error))?;
    let start = text.split(' ').next().and_then(|word| {
        let digits = word.strip_prefix("0x")?;
        u64::from_str_radix(digits, 16)
            .ok()
            .filter(|&start| start != 0)
    });
    match start {
        Some(start) => Ok(vec![(start + offset, 1)]),
        None => Err(failed(path, libc::ENODEV, "the NIC has no BAR 0", "")),
    }
}

/// Addresses that follow each other, as one run.
fn runs(pages: &[u64]) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for &page in pages {
        match runs.last_mut() {
            Some((start, count)) if *start + *count * PAGE == page => *count += 1,
            _ => runs.push((page, 1)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_become_runs_in_their_order() {
        assert_eq!(runs(&[]), []);
        assert_eq!(
            runs(&[0x3000, 0x4000, 0x1000, 0x2000, 0x2000, 0x5000]),
            [(0x3000, 2), (0x1000, 2), (0x2000, 1), (0x5000, 1)]
        );
    }
}
