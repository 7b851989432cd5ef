// SPDX-License-Identifier: MIT OR Apache-2.0
//! The messages between the host and the guest: one JSON value a line, over a virtio-serial port.

use std::io::{self, BufRead, Write};

use serde::{Serialize, de::DeserializeOwned};

/// Names of the virtio-serial ports.
pub mod port {
    /// [`Request`](super::Request)s to the guest, [`Report`](super::Report)s from it.
    pub const CONTROL: &str = "org.ibgda.control";
    /// The command's standard output, unmodified.
    pub const STDOUT: &str = "org.ibgda.stdout";
    /// The command's standard error, unmodified.
    pub const STDERR: &str = "org.ibgda.stderr";
    /// The kernel's log, as lines.
    pub const KERNEL: &str = "org.ibgda.kernel";
    /// The model's control socket, for programs in the guest (`connectx ctl`).
    pub const MODEL: &str = "org.ibgda.model";
    /// The agent of a GPU outside the guest.
    pub const GPU: &str = "org.ibgda.gpu";
    /// QEMU's monitor (QMP), for tests in the guest that plug devices in and out.
    pub const MONITOR: &str = "org.ibgda.monitor";
}

/// Where the guest finds what was built from the checkout: `bin/`, `tests/`, `ibgda.ko`.
pub const STAGE: &str = "/opt/ibgda";

/// Where the guest finds the directory of `--share`.
pub const SHARE: &str = "/mnt/share";

/// A guest of `--peer`: its name and its address on the link between the two.
pub struct Peer {
    /// Host name.
    pub name: &'static str,
    /// IPv4 address.
    pub address: &'static str,
}

/// The two guests of `--peer`.
pub const PEERS: [Peer; 2] = [
    Peer {
        name: "a",
        address: "10.77.0.1",
    },
    Peer {
        name: "b",
        address: "10.77.0.2",
    },
];

/// From the host to the guest.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Request {
    /// Make everything ready. Sent once, first.
    Start(Start),
    /// Run the command. Sent once, when the guest is ready.
    Run,
    /// Write the stacks of all blocked tasks to the kernel's log, for whoever will wonder what hung.
    ShowBlocked,
}

/// What to prepare and what to run.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Start {
    /// The command and its arguments: any bytes but NUL.
    pub argv: Vec<Vec<u8>>,
    /// How many NICs must come up.
    pub nics: usize,
    /// How many stand-in GPUs must be there.
    pub gpus: usize,
    /// Whether to load `ibgda.ko`.
    pub module: bool,
    /// Whether there is a directory to mount at [`SHARE`].
    pub share: bool,
    /// Which of [`PEERS`] this guest is, if there are two.
    pub peer: Option<usize>,
}

/// From the guest to the host.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Report {
    /// The agent runs.
    Booted,
    /// The NICs are up and the module is loaded.
    Ready,
    /// A process of the guest has begun to listen on a TCP port. Sent at most once, and only where there are two guests.
    Listening,
    /// The guest could not be made ready.
    Failed(String),
    /// The command could not be started.
    CannotRun(String),
    /// The command has ended. The counts say how many bytes there are in each stream.
    Exited {
        /// Its exit status, or 128 plus the number of the signal that ended it.
        status: i32,
        /// Bytes of standard output.
        stdout: u64,
        /// Bytes of standard error.
        stderr: u64,
        /// Bytes of the kernel's log.
        kernel: u64,
    },
}

/// Writes one message.
pub fn send(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)?;
    to.flush()
}

/// Reads one message; `None` at the end of the stream.
pub fn receive<T: DeserializeOwned>(from: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    if from.read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    Ok(Some(serde_json::from_slice(&line)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_bytes_of_an_argument_survive() {
        let all: Vec<u8> = (1..=255).collect();
        let request = Request::Start(Start {
            argv: vec![b"printf".to_vec(), Vec::new(), all],
            nics: 2,
            gpus: 0,
            module: true,
            share: false,
            peer: Some(1),
        });
        let mut wire = Vec::new();
        send(&mut wire, &request).unwrap();
        assert_eq!(wire.iter().filter(|&&byte| byte == b'\n').count(), 1);
        assert_eq!(receive(&mut wire.as_slice()).unwrap(), Some(request));
    }

    #[test]
    fn the_end_of_the_stream_is_no_error_but_half_a_message_is() {
        assert_eq!(receive::<Report>(&mut &b""[..]).unwrap(), None);
        assert!(receive::<Report>(&mut &b"{\"Failed\":\"x"[..]).is_err());
    }
}
