// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files that are there whole, or as they were before.

use anyhow::{Context as _, Result, ensure};
use std::{fs::Permissions, io::Write as _, os::unix::fs::PermissionsExt as _, path::Path};

/// Puts `text` in the place of what is at `path`, which no reader sees half.
pub fn replace(path: &Path, text: &str) -> Result<()> {
    let what = || format!("write {}", path.display());
    // As any file of the user's, and not as a secret of a program's.
    let mut file = tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder(path))
        .with_context(what)?;
    file.write_all(text.as_bytes()).with_context(what)?;
    file.as_file().sync_all().with_context(what)?;
    file.persist(path).with_context(what)?;
    Ok(())
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// Whether that can be done, before anything else is.
pub fn check(path: &Path) -> Result<()> {
    ensure!(
        path.file_name().is_some() && !path.is_dir(),
        "{} is a folder, not a file to write",
        path.display()
    );
    tempfile::NamedTempFile::new_in(folder(path))
        .with_context(|| format!("{} cannot be written", path.display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_file_is_replaced_whole() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("report.json");
        check(&path).expect("it can be written");
        assert!(!path.exists());
        for text in ["first, and longer", "second"] {
            replace(&path, text).expect("write");
            assert_eq!(fs::read_to_string(&path).expect("read"), text);
        }
        let left = fs::read_dir(folder.path()).expect("list").count();
        assert_eq!(left, 1, "nothing else is left behind");
        for wrong in [folder.path(), &folder.path().join("no/such/file")] {
            assert!(check(wrong).is_err(), "{}", wrong.display());
        }
    }
}
