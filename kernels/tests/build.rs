// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compiles the kernels for CPU threads.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=src");
    println!("cargo:rerun-if-changed=../bench");
    let include =
        env::var_os("DEP_IBGDA_DEVICE_INCLUDE").expect("ibgda-device says where its header is");
    println!("cargo:rerun-if-changed={}", include.to_string_lossy());
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .define("IBGDA_HOST", None)
        .include(include)
        .include("../bench")
        .file("src/kernels.cpp")
        .file("src/bench.cpp")
        .flag("-Wconversion")
        .flag("-Wpedantic")
        .extra_warnings(true)
        .warnings_into_errors(true)
        .compile("ibgda_test_kernels");
}
