// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compiles the kernel for CPU threads, and by nvcc for GPUs if NVCC says which; else NVRTC does that when it is loaded.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

const KERNEL: &str = "kernels/ring.cu";
/// What nvcc compiles for; the last also as PTX, for GPUs that come after it.
const ARCHITECTURES: [u32; 3] = [80, 90, 100];

fn main() {
    println!("cargo:rerun-if-changed=kernels");
    println!("cargo:rerun-if-changed=../communicator-rust/kernels/team.cuh");
    println!("cargo:rerun-if-env-changed=NVCC");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let include =
        env::var_os("DEP_IBGDA_DEVICE_INCLUDE").expect("ibgda-device says where its header is");
    println!("cargo:rerun-if-changed={}", include.to_string_lossy());
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .flag("-xc++")
        .define("IBGDA_HOST", None)
        .include(&include)
        .extra_warnings(true)
        .warnings_into_errors(true)
        .file(KERNEL)
        .compile("ibgda_all_reduce_kernel");

    let nvcc = env::var_os("NVCC").filter(|nvcc| !nvcc.is_empty());
    let image = nvcc.map_or("None", |nvcc| {
        fat_binary(
            Path::new(&nvcc),
            Path::new(&include),
            &out.join("ring.fatbin"),
        );
        "Some(include_bytes!(concat!(env!(\"OUT_DIR\"), \"/ring.fatbin\")))"
    });
    fs::write(out.join("image.rs"), image).expect("write image.rs");
}

fn fat_binary(nvcc: &Path, include: &Path, output: &Path) {
    let mut command = Command::new(nvcc);
    command.args(["-O3", "-std=c++17", "-lineinfo", "-fatbin"]);
    for architecture in ARCHITECTURES {
        let code = format!("arch=compute_{architecture},code=sm_{architecture}");
        command.args(["-gencode", &code]);
    }
    let last = ARCHITECTURES[ARCHITECTURES.len() - 1];
    let ptx = format!("arch=compute_{last},code=compute_{last}");
    command.args(["-gencode", &ptx]).arg("-I").arg(include);
    command.arg("-o").arg(output).arg(KERNEL);
    let status = command
        .status()
        .unwrap_or_else(|error| panic!("{}: {error}; NVCC says which nvcc", nvcc.display()));
    assert!(status.success(), "{} failed ({status})", nvcc.display());
}
