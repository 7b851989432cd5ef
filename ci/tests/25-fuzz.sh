# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# Fuzzing of the model: two minutes of all targets.

check fuzz::format "$IBGDA_SRC/ci/enter" cargo fmt --check --manifest-path connectx/fuzz/Cargo.toml
check fuzz::two_minutes "$IBGDA_SRC/ci/fuzz" --time 120
