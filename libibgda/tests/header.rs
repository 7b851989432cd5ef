// SPDX-License-Identifier: MIT OR Apache-2.0
//! `include/ibgda.h` is what cbindgen makes of the C ABI, and compiles as C11 and C++17.
//!
//! To renew it: `IBGDA_WRITE_HEADER=1 cargo test -p libibgda --test header`.

use std::{env, fs, path::Path, process::Command};

fn crate_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn the_header_is_current() {
    let config =
        cbindgen::Config::from_file(crate_dir().join("cbindgen.toml")).expect("cbindgen.toml");
    let bindings = cbindgen::Builder::new()
        .with_src(crate_dir().join("src/capi.rs"))
        .with_config(config)
        .generate()
        .expect("cbindgen reads src/capi.rs");
    let mut made = Vec::new();
    bindings.write(&mut made);
    let made = String::from_utf8(made).expect("a header in UTF-8");
    let path = crate_dir().join("include/ibgda.h");
    if env::var_os("IBGDA_WRITE_HEADER").is_some() {
        fs::write(&path, &made).expect("write include/ibgda.h");
    }
    let there = fs::read_to_string(&path).expect("include/ibgda.h");
    assert!(
        made == there,
        "include/ibgda.h is not current: IBGDA_WRITE_HEADER=1 cargo test -p libibgda --test header"
    );
}

#[test]
fn the_header_compiles_as_c_and_as_cpp() {
    for (compiler, language, standard) in [("cc", "c", "c11"), ("c++", "c++", "c++17")] {
        let output = Command::new(compiler)
            .args([
                "-x",
                language,
                &format!("-std={standard}"),
                "-Wall",
                "-Wextra",
                "-Wpedantic",
                "-Werror",
                "-fsyntax-only",
            ])
            .arg("-I")
            .arg(crate_dir().join("../kernels/include"))
            .arg(crate_dir().join("include/ibgda.h"))
            .output()
            .expect("a C compiler");
        assert!(
            output.status.success(),
            "{compiler}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}
