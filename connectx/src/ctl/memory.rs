// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a process outside a guest needs to reach its memory, and the doorbell pages that are mapped into it.

use std::io::{self, IoSlice};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde_json::{Value, json};

use crate::dma::Mapping;
use crate::mem::SharedMemory;
use crate::vfio::Card;

/// Rows of `address` (a bus address), `bytes`, `file` (its place among those that go along) and `offset` in it.
pub(super) fn list(cards: &[Arc<Card>]) -> (Value, Vec<Arc<SharedMemory>>) {
    let mut files: Vec<Arc<SharedMemory>> = Vec::new();
    let mut rows = Vec::new();
    let mut row = |card: &Card, kind: &str, mapping: Mapping| {
        let same = |file: &Arc<SharedMemory>| Arc::ptr_eq(file, &mapping.file);
        let file = files.iter().position(same).unwrap_or_else(|| {
            files.push(mapping.file.clone());
            files.len() - 1
        });
        rows.push(json!({
            "function": card.function().name(), "kind": kind, "address": mapping.address,
            "bytes": mapping.bytes, "file": file, "offset": mapping.offset,
        }));
    };
    for card in cards
        .iter()
        .filter(|card| card.function().msix_vectors() > 0)
    {
        for mapping in card.memory() {
            row(card, "memory", mapping);
        }
        let placed = card.config().placed(0);
        if let (Some(base), Some((file, window))) = (placed, card.function().bar_window(0)) {
            let mapping = Mapping {
                address: base + window.start,
                bytes: window.end - window.start,
                offset: window.start,
                file,
            };
            row(card, "doorbells", mapping);
        }
    }
    (json!({"memory": rows}), files)
}

/// Sends the beginning of a text with files, if there are any. Returns how many bytes went.
pub(super) fn send_first(
    stream: &UnixStream,
    text: &[u8],
    files: &[Arc<SharedMemory>],
) -> io::Result<usize> {
    if files.is_empty() {
        return Ok(0);
    }
    let numbers: Vec<_> = files.iter().map(|file| file.file().as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&numbers)];
    let sent = sendmsg::<()>(
        stream.as_raw_fd(),
        &[IoSlice::new(text)],
        &rights,
        MsgFlags::MSG_NOSIGNAL,
        None,
    );
    sent.map_err(Into::into)
}
