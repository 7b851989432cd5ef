// SPDX-License-Identifier: MIT OR Apache-2.0
//! The header under NVRTC, from the text that the crate carries: ci/toolbox cargo test -p ibgda-test-kernels --features nvrtc

use ibgda_device::{
    HEADERS,
    kernels::{SOURCE, nvrtc},
};
use std::collections::BTreeSet;

const EVERY_CALL: &str = include_str!("../gpu/every_call.cuh");

/// The PTX of a kernel that includes the header, or what NVRTC has against it, be it only a warning.
fn compile(source: &str, architecture: u32) -> Result<String, String> {
    let compiled = nvrtc::compile(source, &format!("compute_{architecture}"))
        .map_err(|error| error.to_string())?;
    if compiled.log.trim().is_empty() {
        Ok(String::from_utf8(compiled.image).expect("PTX is text"))
    } else {
        Err(compiled.log)
    }
}

#[test]
fn every_call_compiles_without_a_warning() {
    // Before and after fence.release; nvcc compiles for the others.
    for architecture in [75, 90] {
        let ptx = compile(EVERY_CALL, architecture)
            .unwrap_or_else(|log| panic!("compute_{architecture}: {log}"));
        assert!(ptx.contains(".visible .entry exclusive_host("), "{ptx}");
        let fence = if architecture < 90 {
            "fence.acq_rel.gpu"
        } else {
            "fence.release.gpu"
        };
        assert!(ptx.contains(fence), "{ptx}");
    }
}

#[test]
fn a_warning_is_an_error() {
    let kernel = "#include <ibgda_device.cuh>\n__global__ void kernel() { int unused; }";
    let log = compile(kernel, 90).expect_err("a variable is unused");
    assert!(log.contains("unused") && log.contains("warning"), "{log}");
    let log = compile("#include <ibgda/no_such.h>", 90).expect_err("no such file");
    assert!(log.contains("no_such.h"), "{log}");
}

#[test]
fn the_kernels_that_are_loaded_compile_to_machine_code() {
    for architecture in ["sm_75", "sm_90"] {
        let compiled = nvrtc::compile(SOURCE, architecture)
            .unwrap_or_else(|error| panic!("{architecture}: {error}"));
        assert_eq!(compiled.log.trim(), "");
        assert_eq!(compiled.image[..4], *b"\x7fELF", "a cubin is an ELF file");
        for kernel in ["ibgda_kernel_put_blocks", "ibgda_kernel_wait"] {
            let named = compiled
                .image
                .windows(kernel.len())
                .any(|bytes| bytes == kernel.as_bytes());
            assert!(named, "{architecture}: no {kernel}");
        }
    }
    let error = nvrtc::compile(SOURCE, "sm_1").expect_err("no such architecture");
    assert!(error.to_string().contains("gpu-architecture"), "{error}");
}

/// The calls are those whose mode has a default: what only the header's own files use has none.
#[test]
fn no_call_is_missing() {
    let declared: BTreeSet<&str> = HEADERS
        .iter()
        .flat_map(|(_, text)| text.split("template <ibgda_u32 M = 0").skip(1))
        .filter_map(|declaration| declaration.split_once("IBGDA_FN ")?.1.split_once('('))
        .filter_map(|(result_and_name, _)| result_and_name.split_whitespace().last())
        .chain(["ibgda_publish", "ibgda_wait_until"])
        .collect();
    assert!(declared.contains("ibgda_put"), "{declared:?}");
    let missing: Vec<_> = declared
        .iter()
        .filter(|name| {
            !EVERY_CALL.contains(&format!("{name}<")) && !EVERY_CALL.contains(&format!("{name}("))
        })
        .collect();
    assert!(
        missing.is_empty(),
        "kernels/tests/gpu/every_call.cuh lacks {missing:?}"
    );
}
