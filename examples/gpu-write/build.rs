// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compiles the kernels for CPU threads. With CUDA it is: nvcc -I$DEP_IBGDA_DEVICE_INCLUDE -arch=sm_90 -cubin kernel.cu

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=kernel.cu");
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
        .file("kernel.cu")
        .compile("gpu_write_kernels");
}
