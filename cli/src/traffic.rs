// SPDX-License-Identifier: MIT OR Apache-2.0
//! `ibgda route`, `bench`, `shadow` and `stress`: they open NICs, so that they are linked with libibverbs. The doctor
//! has to run where that is missing; so they are a program of their own, `ibgda-traffic`, which takes the place of this
//! one.

use crate::root::Root;
use anyhow::{Context as _, Result, anyhow, ensure};
use std::{
    env,
    ffi::{CStr, OsString},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

const PROGRAM: &str = "ibgda-traffic";

/// What it asks the loader for, and Debian's packages of them.
const LIBRARIES: [(&CStr, &str); 2] = [
    (c"libibverbs.so.1", "libibverbs1"),
    (c"libmlx5.so.1", "ibverbs-providers"),
];

/// Whatever follows is for that program, --help too.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Arguments {
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "OPTION"
    )]
    words: Vec<OsString>,
}

/// Becomes it. Returns only if that fails.
pub fn run(root: &Root, subcommand: &str, arguments: &Arguments) -> Result<ExitCode> {
    ensure!(
        root.is_real(),
        "{subcommand} opens this machine's NICs, not those of a copy: leave --root out"
    );
    for (library, package) in LIBRARIES {
        if !loads(library) {
            let name = library.to_string_lossy();
            return Err(anyhow!(
                "{subcommand} opens NICs by rdma-core, and {name} cannot be loaded here; \
                 fix: install rdma-core's libraries (Debian, Ubuntu: apt install {package})"
            ));
        }
    }
    let own = env::current_exe().context("where is this program?")?;
    let program = find(&own)?;
    let error = Command::new(&program)
        .arg(subcommand)
        .args(&arguments.words)
        .exec();
    Err(error).with_context(|| program.display().to_string())
}

/// Beside this program, as cargo has it, or where the package puts it.
fn find(own: &Path) -> Result<PathBuf> {
    let folder = own.parent().unwrap_or(Path::new("/"));
    let places = [
        folder.join(PROGRAM),
        folder.join("../libexec/ibgda").join(PROGRAM),
    ];
    let found = places.iter().find(|place| place.is_file());
    found.cloned().ok_or_else(|| {
        anyhow!(
            "there is no {PROGRAM} at {} or {}; fix: cargo build -p {PROGRAM}, or install the package ibgda-utils anew",
            places[0].display(),
            places[1].display()
        )
    })
}

/// Whether the loader finds a library.
fn loads(name: &CStr) -> bool {
    // SAFETY: libraries named so are rdma-core's, whose loading does nothing but to make them ready; a handle that is
    // found is closed again.
    unsafe {
        let library = libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL);
        !library.is_null() && libc::dlclose(library) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_program_is_beside_this_one_or_in_libexec() {
        let root = tempfile::tempdir().expect("a folder");
        let own = root.path().join("bin/ibgda");
        fs::create_dir(root.path().join("bin")).expect("mkdir");
        let error = find(&own).expect_err("nothing is there").to_string();
        assert!(
            error.contains("bin/ibgda-traffic") && error.contains("libexec/ibgda/ibgda-traffic"),
            "{error}"
        );
        for place in ["libexec/ibgda", "bin"] {
            fs::create_dir_all(root.path().join(place)).expect("mkdir");
            fs::write(root.path().join(place).join(PROGRAM), "").expect("write");
            let found = find(&own).expect("it is there");
            let expected = root.path().join(place).join(PROGRAM);
            assert_eq!(
                found.canonicalize().expect("found"),
                expected.canonicalize().expect("written")
            );
        }
    }

    #[test]
    fn a_library_that_is_none_is_missed() {
        assert!(!loads(c"libibgda-no-such-library.so.9"));
        assert!(loads(c"libc.so.6"));
    }
}
