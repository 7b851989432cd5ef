// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rust definitions of the types that host and kernels share, from the header that kernels include; and the kernels of
//! `library/`, compiled by nvcc where there is one.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// What the kernels are compiled for. The code of the last is also kept as PTX, for GPUs that come after it.
const ARCHITECTURES: [u32; 4] = [75, 80, 90, 100];

/// The sources of kernels in `library/`.
const KERNELS: [&str; 2] = ["transfer", "steps"];
/// What the kernels are given.
const REQUESTS: &str = "library/requests.h";

fn source(name: &str) -> String {
    format!("library/{name}.cu")
}

fn main() {
    let include =
        PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"))
            .join("include");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let types = include.join("ibgda/types.h");
    println!("cargo:rerun-if-changed={}", include.display());
    println!("cargo:rerun-if-changed=library");
    // For the build scripts of dependents that compile kernels: DEP_IBGDA_DEVICE_INCLUDE.
    println!("cargo:include={}", include.display());

    bindings(types.to_str().expect("a path in UTF-8"))
        .allowlist_type("ibgda_.*")
        .allowlist_var("IBGDA_.*")
        .generate()
        .expect("bindgen over ibgda/types.h (install libclang)")
        .write_to_file(out.join("types.rs"))
        .expect("write types.rs");
    bindings(REQUESTS)
        .clang_arg(format!("-I{}", include.display()))
        .allowlist_type("ibgda_(request|request_kind|job|stream|u8|u32|u64)")
        .allowlist_recursively(false)
        .raw_line("use crate::abi::ibgda_qp;")
        .generate()
        .expect("bindgen over requests.h")
        .write_to_file(out.join("requests.rs"))
        .expect("write requests.rs");

    bindgen::Builder::default()
        .header("library/steps.h")
        .clang_arg(format!("-I{}", include.display()))
        .allowlist_type("ibgda_(step|task)")
        .allowlist_type("ibgda_step_kind")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .derive_default(true)
        .layout_tests(true)
        .generate()
        .expect("bindgen over library/steps.h (install libclang)")
        .write_to_file(out.join("steps.rs"))
        .expect("write steps.rs");

    if env::var_os("CARGO_FEATURE_CUDA").is_some() {
        let nvcc = nvcc();
        for name in KERNELS {
            let image = match &nvcc {
                Some(nvcc) => {
                    let file = format!("{name}.fatbin");
                    fat_binary(nvcc, &include, &out.join(&file), &source(name));
                    format!("Some(include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{file}\")))")
                }
                None => "None".to_owned(),
            };
            fs::write(out.join(format!("{name}-image.rs")), image).expect("write the image");
        }
    }
    #[cfg(feature = "cpu-kernels")]
    for (library, fault) in [
        ("ibgda_kernels", None),
        ("ibgda_kernels_blind", Some("IBGDA_PLANTED_BLIND")),
    ] {
        let mut build = cc::Build::new();
        build
            .cpp(true)
            .std("c++17")
            .flag("-xc++")
            // Nothing of it needs the C++ library, which programs would then depend on.
            .cpp_link_stdlib(None)
            .flag("-fno-exceptions")
            .flag("-fno-rtti")
            .define("IBGDA_HOST", None)
            .include(&include)
            .extra_warnings(true)
            .file(source("steps"));
        match fault {
            Some(fault) => build.define(fault, None),
            None => build.file(source("transfer")),
        };
        build.compile(library);
    }
}

fn bindings(header: &str) -> bindgen::Builder {
    bindgen::Builder::default()
        .header(header)
        .default_enum_style(bindgen::EnumVariation::ModuleConsts)
        .default_macro_constant_type(bindgen::MacroTypeVariation::Unsigned)
        .derive_default(true)
        .derive_eq(true)
        .layout_tests(true)
}

/// nvcc: NVCC's, which an empty NVCC says not to look for; else that in PATH. Cargo looks at a change of NVCC only, so
/// that a tree which is built with and without CUDA in PATH in turn is not compiled anew each time.
fn nvcc() -> Option<PathBuf> {
    println!("cargo:rerun-if-env-changed=NVCC");
    match env::var_os("NVCC") {
        Some(nvcc) => (!nvcc.is_empty()).then(|| nvcc.into()),
        None => env::split_paths(&env::var_os("PATH")?)
            .map(|folder| folder.join("nvcc"))
            .find(|nvcc| nvcc.is_file()),
    }
}

fn fat_binary(nvcc: &Path, include: &Path, output: &Path, source: &str) {
    let mut command = Command::new(nvcc);
    command.args(["-O3", "-std=c++17", "-lineinfo", "-fatbin"]);
    for architecture in ARCHITECTURES {
        let code = format!("arch=compute_{architecture},code=sm_{architecture}");
        command.args(["-gencode", &code]);
    }
    let last = ARCHITECTURES[ARCHITECTURES.len() - 1];
    let ptx = format!("arch=compute_{last},code=compute_{last}");
    command.args(["-gencode", &ptx]).arg("-I").arg(include);
    command.arg("-o").arg(output).arg(source);
    let status = command.status().unwrap_or_else(|error| {
        panic!(
            "{}: {error}. NVCC says which nvcc; an empty NVCC leaves the kernels to NVRTC",
            nvcc.display()
        )
    });
    assert!(
        status.success(),
        "{} failed ({status}): {command:?}",
        nvcc.display()
    );
}
