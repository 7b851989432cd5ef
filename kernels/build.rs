// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rust definitions of the types that host and kernels share, from the header that kernels include.

use std::{env, path::PathBuf};

fn main() {
    let include =
        PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"))
            .join("include");
    let types = include.join("ibgda/types.h");
    println!("cargo:rerun-if-changed={}", types.display());
    // For the build scripts of dependents that compile kernels: DEP_IBGDA_DEVICE_INCLUDE.
    println!("cargo:include={}", include.display());

    bindgen::Builder::default()
        .header(types.to_str().expect("a path in UTF-8"))
        .allowlist_type("ibgda_.*")
        .allowlist_var("IBGDA_.*")
        .default_enum_style(bindgen::EnumVariation::ModuleConsts)
        .default_macro_constant_type(bindgen::MacroTypeVariation::Unsigned)
        .derive_default(true)
        .derive_eq(true)
        .layout_tests(true)
        .generate()
        .expect("bindgen over ibgda/types.h (install libclang)")
        .write_to_file(
            PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("types.rs"),
        )
        .expect("write types.rs");
}
