// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels as the programs give them to NVRTC, in one piece. Needs libnvrtc: ci/toolbox.

use ibgda_communicator::TEAM_HEADER;
use ibgda_device::kernels::nvrtc::compile;

#[test]
fn nvrtc_takes_the_kernels_without_a_warning() {
    for (kernel, source) in [
        (
            "communicator_all_to_all",
            include_str!("../kernels/exchange.cu"),
        ),
        (
            "all_reduce_ring",
            include_str!("../../all-reduce/kernels/ring.cu"),
        ),
    ] {
        for architecture in ["compute_75", "compute_90"] {
            let compiled = compile(&format!("{TEAM_HEADER}{source}"), architecture)
                .unwrap_or_else(|error| panic!("{kernel}, {architecture}: {error}"));
            let warnings = compiled.log.trim_matches(['\0', '\n', ' ']);
            assert!(warnings.is_empty(), "{kernel}, {architecture}: {warnings}");
            let assembly = String::from_utf8_lossy(&compiled.image);
            assert!(
                assembly.contains(&format!(".entry {kernel}")),
                "{kernel} is no kernel"
            );
        }
    }
}
