// SPDX-License-Identifier: MIT OR Apache-2.0
//! The virtual machines of a run: one, or with `--peer` two.

use std::ffi::OsString;
use std::ops::Range;
use std::path::PathBuf;

use super::Options;
use crate::protocol::{PEERS, Peer};

/// What one of them is.
pub struct Vm<'a> {
    /// The run's options.
    pub options: &'a Options,
    /// Its place in [`PEERS`]; `None` for the only one.
    pub peer: Option<usize>,
    /// The command and its arguments.
    pub command: Vec<OsString>,
    /// Where its own logs are written.
    pub log: PathBuf,
    /// For its own sockets.
    pub run_dir: PathBuf,
}

impl<'a> Vm<'a> {
    /// All of a run.
    pub fn all(options: &'a Options) -> Vec<Self> {
        let first = Self {
            options,
            peer: options.peer.is_some().then_some(0),
            command: options.command.clone(),
            log: options.log.clone(),
            run_dir: options.run_dir.clone(),
        };
        let second = options.peer.as_ref().map(|command| Self {
            options,
            peer: Some(1),
            command: vec!["sh".into(), "-c".into(), command.clone()],
            log: options.log.join(PEERS[1].name),
            run_dir: options.run_dir.join(PEERS[1].name),
        });
        [Some(first), second].into_iter().flatten().collect()
    }

    /// Its name and address, if it is one of two.
    pub fn identity(&self) -> Option<&'static Peer> {
        self.peer.map(|index| &PEERS[index])
    }

    /// What goes before a message about it: nothing, if it is the only one.
    pub fn label(&self) -> String {
        self.identity()
            .map_or(String::new(), |peer| format!("{}: ", peer.name))
    }

    /// Numbers of its NICs in the model.
    pub fn nics(&self) -> Range<usize> {
        self.share(self.options.nics)
    }

    /// Numbers of its GPUs in the model.
    pub fn gpus(&self) -> Range<usize> {
        self.share(self.options.gpus)
    }

    fn share(&self, count: usize) -> Range<usize> {
        let first = self.peer.unwrap_or(0) * count;
        first..first + count
    }
}
