// SPDX-License-Identifier: MIT OR Apache-2.0
//! `include/ibgda.h` is what cbindgen makes of the C ABI, and compiles as C11 and C++17; the symbols of `libibgda.map` are the
//! calls of both headers; sizes and offsets are those of version 0.1.
//!
//! To renew it: `IBGDA_WRITE_HEADER=1 cargo test -p libibgda --test header`.

use std::{collections::BTreeSet, env, fs, path::Path, process::Command};

fn crate_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn the_header_is_current() {
    let config =
        cbindgen::Config::from_file(crate_dir().join("cbindgen.toml")).expect("cbindgen.toml");
    let bindings = cbindgen::Builder::new()
        .with_src(crate_dir().join("src/capi.rs"))
        .with_src(crate_dir().join("src/capi/events.rs"))
        .with_src(crate_dir().join("src/capi/gpu.rs"))
        .with_src(crate_dir().join("src/capi/heap.rs"))
        .with_src(crate_dir().join("src/capi/routes.rs"))
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

/// Compiles without a result, with every warning an error.
fn compiles(compiler: &str, language: &str, standard: &str, source: &str) {
    let output = Command::new(compiler)
        .args(["-x", language, &format!("-std={standard}")])
        .args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"])
        .args(["-I", "../kernels/include", "-I", "include", source])
        .current_dir(crate_dir())
        .output()
        .expect("a C compiler");
    assert!(
        output.status.success(),
        "{compiler} {source}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn the_headers_compile() {
    compiles("cc", "c", "c11", "include/ibgda.h");
    compiles("c++", "c++", "c++17", "include/ibgda.h");
    compiles("cc", "c", "c11", "include/ibgda_host.h");
}

#[test]
fn layouts_are_those_of_version_0_1() {
    compiles("cc", "c", "c11", "tests/layout.c");
}

/// Words of a C source or a linker's script that are calls by their form: `ibgda_`, then `until`.
fn calls(path: &str, until: &str) -> BTreeSet<String> {
    let text = fs::read_to_string(crate_dir().join(path)).expect(path);
    let (mut code, mut rest) = (String::new(), text.as_str());
    while let Some((before, comment)) = rest.split_once("/*") {
        code += before;
        rest = comment.split_once("*/").expect("comments end").1;
    }
    code += rest;
    let word = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
    let places = code
        .match_indices("ibgda_")
        .filter(|(at, _)| code[..*at].ends_with(word));
    places
        .filter_map(|(at, _)| {
            let (name, _) = code[at..].split_once(word)?;
            code[at + name.len()..]
                .starts_with(until)
                .then(|| name.to_owned())
        })
        .collect()
}

#[test]
fn every_call_has_a_symbol_and_every_symbol_is_a_call() {
    let headers = ["include/ibgda.h", "include/ibgda_host.h"].map(|path| calls(path, "("));
    let declared: BTreeSet<_> = headers.into_iter().flatten().collect();
    assert!(declared.len() > 30, "{declared:?}");
    assert_eq!(declared, calls("libibgda.map", ";"));
}
