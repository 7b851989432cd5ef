// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's log, as lines to a port. The serial console shows only what is urgent: it is slow without KVM.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, Mutex};
use std::thread;

use anyhow::{Context, Result};
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Copies `/dev/kmsg` to a port.
pub struct KernelLog {
    kmsg: File,
    out: Mutex<Output>,
}

struct Output {
    port: File,
    bytes: u64,
}

impl KernelLog {
    /// Begins with the first line of the boot and goes on in a thread.
    pub fn stream(port: File) -> Result<Arc<Self>> {
        let kmsg = OpenOptions::new()
            .read(true)
            .custom_flags(OFlag::O_NONBLOCK.bits())
            .open("/dev/kmsg")
            .context("opening /dev/kmsg")?;
        let log = Arc::new(Self {
            kmsg,
            out: Mutex::new(Output { port, bytes: 0 }),
        });
        let reader = Arc::clone(&log);
        thread::spawn(move || {
            loop {
                reader.flush();
                let mut ready = [PollFd::new(reader.kmsg.as_fd(), PollFlags::POLLIN)];
                if poll(&mut ready, PollTimeout::NONE).is_err() {
                    return;
                }
            }
        });
        Ok(log)
    }

    /// Copies what there is now; returns how many bytes were written so far.
    pub fn flush(&self) -> u64 {
        let mut out = self.out.lock().expect("no holder of this lock panics");
        // One read returns one record.
        let mut record = [0; 8192];
        loop {
            match (&self.kmsg).read(&mut record) {
                Ok(0) => break,
                Ok(length) => {
                    let lines = format_record(&String::from_utf8_lossy(&record[..length]));
                    if out.port.write_all(lines.as_bytes()).is_ok() {
                        out.bytes += lines.len() as u64;
                    }
                }
                // Records that were overwritten before they could be read: the next read goes on after the gap.
                Err(error) if error.raw_os_error() == Some(nix::errno::Errno::EPIPE as i32) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        out.bytes
    }
}

/// `level,sequence,microseconds,flags;text`, then lines of properties that begin with a space (Documentation/ABI/testing/dev-kmsg).
fn format_record(record: &str) -> String {
    let Some((prefix, rest)) = record.split_once(';') else {
        return format!("{record}\n");
    };
    let text = rest.lines().next().unwrap_or_default();
    let microseconds: u64 = prefix
        .split(',')
        .nth(2)
        .and_then(|field| field.parse().ok())
        .unwrap_or(0);
    format!(
        "[{:5}.{:06}] {}\n",
        microseconds / 1_000_000,
        microseconds % 1_000_000,
        text
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_becomes_a_line_as_dmesg_prints_it() {
        let record = "6,339,5140900,-;NET: Registered protocol family 10\n SUBSYSTEM=acpi\n DEVICE=+acpi:PNP0A03:00\n";
        assert_eq!(
            format_record(record),
            "[    5.140900] NET: Registered protocol family 10\n"
        );
    }
}
