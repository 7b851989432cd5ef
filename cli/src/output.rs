// SPDX-License-Identifier: MIT OR Apache-2.0
//! Standard output, whose reader may have gone.

use anyhow::Result;
use std::io::{self, Write as _};

/// Of standard output alone: a peer that closes a connection is a broken pipe as well.
#[derive(Debug, thiserror::Error)]
#[error("the reader of the output has gone")]
struct ReaderIsGone;

/// Prints, at once. An error when the reader has gone, which [`reader_is_gone`] knows.
pub fn print(text: &str) -> Result<()> {
    let mut output = io::stdout().lock();
    let written = output
        .write_all(text.as_bytes())
        .and_then(|()| output.flush());
    written.map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => ReaderIsGone.into(),
        _ => error.into(),
    })
}

/// Whether that is all that went wrong: `ibgda … | head` is no failure.
pub fn reader_is_gone(error: &anyhow::Error) -> bool {
    error.is::<ReaderIsGone>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_output_has_a_reader_that_may_go() {
        assert!(reader_is_gone(&ReaderIsGone.into()));
        let of_a_peer = io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(!reader_is_gone(&of_a_peer.into()));
    }
}
