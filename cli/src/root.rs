// SPDX-License-Identifier: MIT OR Apache-2.0
//! The files of the kernel that the command reads, below the root folder of a machine or of a copy of one.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Where `/sys`, `/proc` and `/dev` lie. Paths are given without their first slash.
#[derive(Clone, Debug)]
pub struct Root(PathBuf);

impl Root {
    /// The machine's own is `/`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Whether this is the machine that the command runs on.
    pub fn is_real(&self) -> bool {
        self.0 == Path::new("/")
    }

    /// A file's own path.
    pub fn path(&self, path: &str) -> PathBuf {
        self.0.join(path)
    }

    /// What a file says, without white space around it; `None` when there is none or it cannot be read.
    pub fn text(&self, path: &str) -> Option<String> {
        let bytes = self.bytes(path).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// The same as a number, decimal or with `0x`.
    pub fn number(&self, path: &str) -> Option<u64> {
        let text = self.text(path)?;
        match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => text.parse().ok(),
        }
    }

    /// A file's bytes.
    pub fn bytes(&self, path: &str) -> io::Result<Vec<u8>> {
        fs::read(self.path(path))
    }

    /// The entries of a folder in order; none when there is no such folder.
    pub fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(path)).into_iter().flatten();
        let mut names: Vec<String> = entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }

    /// Where a link leads, as it is written.
    pub fn link(&self, path: &str) -> Option<PathBuf> {
        fs::read_link(self.path(path)).ok()
    }

    /// The last part of where a link leads.
    pub fn link_name(&self, path: &str) -> Option<String> {
        Some(self.link(path)?.file_name()?.to_string_lossy().into_owned())
    }

    /// Whether there is such a file, folder or link.
    pub fn has(&self, path: &str) -> bool {
        fs::symlink_metadata(self.path(path)).is_ok()
    }
}
