// SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR MIT
//! Generates the definitions from `ibgda.h`.

use bindgen::callbacks::{IntKind, ItemInfo, ParseCallbacks};
use std::{env, path::PathBuf};

#[derive(Debug)]
struct Names;

impl ParseCallbacks for Names {
    fn item_name(&self, item: ItemInfo<'_>) -> Option<String> {
        item.name.strip_prefix("VALUE_OF_").map(str::to_owned)
    }

    fn int_macro(&self, name: &str, _value: i64) -> Option<IntKind> {
        // As wide as the field they are bits of.
        Some(if name.starts_with("IBGDA_FEATURE_") {
            IntKind::U64
        } else {
            IntKind::U32
        })
    }
}

fn main() {
    println!("cargo:rerun-if-changed=ibgda.h");
    println!("cargo:rerun-if-changed=wrapper.h");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    bindgen::Builder::default()
        .header("wrapper.h")
        .allowlist_type("ibgda_.*")
        .allowlist_var("IBGDA_.*")
        .allowlist_var("VALUE_OF_IBGDA_.*")
        .use_core()
        .derive_default(true)
        .derive_eq(true)
        .layout_tests(true)
        .parse_callbacks(Box::new(Names))
        .generate()
        .expect("bindgen over ibgda.h (install linux-libc-dev and libclang)")
        .write_to_file(out.join("uapi.rs"))
        .expect("write uapi.rs");
}
