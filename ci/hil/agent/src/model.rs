// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the model knows of the guest's address space (`connectx ctl memory`), with the files.

use anyhow::{Context as _, Result, ensure};
use nix::{
    cmsg_space,
    sys::socket::{ControlMessageOwned, MsgFlags, recvmsg},
};
use serde_json::Value;
use std::{
    fs::File,
    io::{IoSliceMut, Write},
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::Arc,
    time::Duration,
};

const PATIENCE: Duration = Duration::from_secs(20);
/// Files of one answer: the guest's memory, and a BAR for each NIC.
const FILES: usize = 32;
const MOST: usize = 1 << 20;

/// A piece of the guest's address space.
#[derive(Clone, Debug)]
pub struct Piece {
    /// First bus address.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// Doorbell pages; else memory.
    pub doorbells: bool,
    /// What it is of.
    pub file: Arc<File>,
    /// Where in it.
    pub offset: u64,
}

/// All pieces as they are now.
pub fn pieces(control: &Path) -> Result<Vec<Piece>> {
    let stream = UnixStream::connect(control).with_context(|| control.display().to_string())?;
    stream.set_read_timeout(Some(PATIENCE))?;
    (&stream).write_all(b"{\"command\":\"memory\"}\n")?;
    let (mut text, mut files) = (Vec::new(), Vec::new());
    while text.last() != Some(&b'\n') {
        let mut buffer = [0; 4096];
        let mut space = cmsg_space!([i32; FILES]);
        let mut slices = [IoSliceMut::new(&mut buffer)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let message = recvmsg::<()>(stream.as_raw_fd(), &mut slices, Some(&mut space), flags)?;
        for part in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(numbers) = part {
                for number in numbers {
                    // SAFETY: just received, and nobody else's.
                    files.push(Arc::new(unsafe { File::from_raw_fd(number) }));
                }
            }
        }
        let read = message.bytes;
        ensure!(
            read > 0 && text.len() < MOST,
            "the model's answer is cut off"
        );
        text.extend_from_slice(&buffer[..read]);
    }
    let answer: Value = serde_json::from_slice(&text).context("the model's answer")?;
    let rows = answer["memory"]
        .as_array()
        .with_context(|| format!("the model answered {answer}"))?;
    rows.iter()
        .map(|row| piece(row, &files).with_context(|| format!("the model says {row}")))
        .collect()
}

fn piece(row: &Value, files: &[Arc<File>]) -> Option<Piece> {
    Some(Piece {
        address: row["address"].as_u64()?,
        bytes: row["bytes"].as_u64()?,
        doorbells: row["kind"] == "doorbells",
        file: Arc::clone(files.get(row["file"].as_u64()? as usize)?),
        offset: row["offset"].as_u64()?,
    })
}
