// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compiles the kernels for CPU threads. For a GPU NVRTC does it, when they are loaded.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=kernels");
    let include =
        env::var_os("DEP_IBGDA_DEVICE_INCLUDE").expect("ibgda-device says where its header is");
    println!("cargo:rerun-if-changed={}", include.to_string_lossy());
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .flag("-xc++")
        .define("IBGDA_HOST", None)
        .include(include)
        .extra_warnings(true)
        .warnings_into_errors(true)
        .file("kernels/exchange.cu")
        .compile("ibgda_communicator_kernels");
}
