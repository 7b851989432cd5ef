// SPDX-License-Identifier: MIT OR Apache-2.0
//! libFuzzer has a callback of the same name as our work counter's that does nothing. Ours comes first and is taken.

fn main() {
    println!("cargo:rustc-link-arg-bins=-Wl,-z,muldefs");
    println!("cargo:rerun-if-changed=build.rs");
}
