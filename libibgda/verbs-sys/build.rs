// SPDX-License-Identifier: MIT OR Apache-2.0
//! Generates the bindings from the installed rdma-core headers, and compiles the static inline functions among them.

use std::{env, path::PathBuf};

fn main() {
    println!("cargo:rerun-if-changed=wrapper.h");
    println!("cargo:rustc-link-lib=dylib=ibverbs");
    println!("cargo:rustc-link-lib=dylib=mlx5");

    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let inlines = out.join("inlines");

    bindgen::Builder::default()
        .header("wrapper.h")
        .allowlist_function("_*ibv_.*")
        .allowlist_function("mlx5dv_(open_device|is_supported|init_obj|devx_.*)")
        .allowlist_type("ibv_.*")
        .allowlist_type("mlx5dv_(context_attr|context_attr_flags|obj|obj_type|pd|devx_.*)")
        .allowlist_var("(IBV|MLX5DV)_.*")
        // A bit field straddling a byte array: current libclang's layout of it is not one that bindgen can express.
        .opaque_type("mlx5_wqe_ctrl_seg")
        // These come from libc, so that they are the same types as everywhere else.
        .blocklist_type("(pthread_.*|__pthread_.*|timespec|_IO_.*|FILE)")
        .blocklist_function("ibv_(node_type_str|port_state_str|event_type_str|wc_status_str)_.*")
        .raw_line("use libc::{pthread_cond_t, pthread_mutex_t, timespec};")
        .default_enum_style(bindgen::EnumVariation::ModuleConsts)
        .bitfield_enum("ibv_access_flags")
        .wrap_static_fns(true)
        .wrap_static_fns_path(&inlines)
        .layout_tests(true)
        .derive_default(true)
        .parse_callbacks(Box::new(bindgen::CargoCallbacks::new()))
        .generate()
        .expect("bindgen over infiniband/{verbs,mlx5dv}.h (install libibverbs-dev and libclang)")
        .write_to_file(out.join("bindings.rs"))
        .expect("write bindings.rs");

    cc::Build::new()
        .file(inlines.with_extension("c"))
        .include(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"))
        .warnings(false)
        .compile("ibgda_verbs_inlines");
}
