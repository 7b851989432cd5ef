// SPDX-License-Identifier: MIT OR Apache-2.0
//! Standard output, whose reader may have gone.

use anyhow::Result;
use std::io::{self, Write as _};

/// Prints, at once. An error when the reader has gone, which [`reader_is_gone`] knows.
pub fn print(text: &str) -> Result<()> {
    let mut output = io::stdout().lock();
    output.write_all(text.as_bytes())?;
    output.flush()?;
    Ok(())
}

/// Whether that is all that went wrong: `ibgda … | head` is no failure.
pub fn reader_is_gone(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<io::Error>();
    error.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
