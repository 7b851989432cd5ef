// SPDX-License-Identifier: MIT OR Apache-2.0
//! The program on CPU threads, and what it says where no GPU is.

use std::process::{Command, Output};

fn run(on: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ibgda-loopback"))
        .args(["--on", on])
        .output()
        .expect("the program starts")
}

#[test]
fn every_step_passes_on_cpu_threads() {
    let output = run("cpu");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    for part in [
        "256 WRITEs of 4096 bytes posted and polled on a CPU thread: 1048576 bytes equal",
        "IBGDA_ERR_REMOTE_ACCESS",
        "IBGDA_ERR_NIC_LOST",
        "all steps passed",
    ] {
        assert!(said.contains(part), "{part:?} is missing in {said}");
    }
}

#[test]
fn without_a_gpu_asking_for_one_says_why() {
    let output = run("gpu");
    if output.status.success() {
        return;
    }
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("NVIDIA's driver is not installed") || said.contains("CUDA_ERROR_"),
        "{said}"
    );
}
