// SPDX-License-Identifier: MIT OR Apache-2.0
//! The header under NVRTC, from the text that the crate carries: ci/toolbox cargo test -p ibgda-test-kernels --features nvrtc

use cudarc::nvrtc::{result, sys};
use ibgda_device::HEADERS;
use std::{
    collections::BTreeSet,
    ffi::{CString, c_char},
};

const EVERY_CALL: &str = include_str!("../gpu/every_call.cuh");

/// The PTX of a kernel that includes the header, or what NVRTC has against it, be it only a warning.
fn compile(source: &str, architecture: u32) -> Result<String, String> {
    let text = |text: &str| CString::new(text).expect("sources have no NUL");
    let (source, name) = (text(source), text("kernel.cu"));
    let contents = HEADERS.map(|(_, contents)| text(contents));
    let names = HEADERS.map(|(name, _)| text(name));
    let pointers = |texts: &[CString]| -> Vec<*const c_char> {
        texts.iter().map(|text| text.as_ptr()).collect()
    };
    let mut program = std::ptr::null_mut();
    // SAFETY: all strings end in NUL and live to the end of this function, the program does not.
    unsafe {
        sys::nvrtcCreateProgram(
            &mut program,
            source.as_ptr(),
            name.as_ptr(),
            HEADERS.len() as i32,
            pointers(&contents).as_ptr(),
            pointers(&names).as_ptr(),
        )
    }
    .result()
    .map_err(|error| error.to_string())?;
    let options = [
        format!("--gpu-architecture=compute_{architecture}"),
        "--std=c++17".to_owned(),
    ];
    // SAFETY: the program is valid until it is destroyed, which is done once, last.
    let (compiled, log, ptx) = unsafe {
        let compiled = result::compile_program(program, &options);
        let log = result::get_program_log(program).map_err(|error| error.to_string())?;
        let ptx = compiled.and_then(|()| result::get_ptx(program));
        result::destroy_program(program).map_err(|error| error.to_string())?;
        (compiled, string(&log), ptx)
    };
    match (compiled, ptx) {
        (Ok(()), Ok(ptx)) if log.trim().is_empty() => Ok(string(&ptx)),
        (compiled, _) => Err(format!("{compiled:?}\n{log}")),
    }
}

/// Up to the NUL.
fn string(chars: &[c_char]) -> String {
    chars
        .iter()
        .take_while(|&&char| char != 0)
        .map(|&char| char::from(char as u8))
        .collect()
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
