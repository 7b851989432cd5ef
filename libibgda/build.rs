// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compiles the device calls for programs that cannot include the device header (include/ibgda_host.h).

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=host");
    let include =
        env::var_os("DEP_IBGDA_DEVICE_INCLUDE").expect("ibgda-device says where its header is");
    println!("cargo:rerun-if-changed={}", include.to_string_lossy());
    cc::Build::new()
        .cpp(true)
        // Nothing of it needs the C++ library.
        .cpp_link_stdlib(None)
        .flag("-fno-exceptions")
        .flag("-fno-rtti")
        .std("c++17")
        .include(include)
        .file("host/calls.cpp")
        .flag("-Wconversion")
        .flag("-Wpedantic")
        .extra_warnings(true)
        .warnings_into_errors(true)
        .compile("ibgda_host_calls");
}
