# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# Fuzzing of the model: two minutes of all targets, and that a bug would be found.

fuzz_finds_a_bug() {
    "$IBGDA_SRC/ci/fuzz" --planted --time 60
    expect_text 'the planted bug'
}

check fuzz::format "$IBGDA_SRC/ci/enter" cargo fmt --check --manifest-path connectx/fuzz/Cargo.toml
check fuzz::two_minutes "$IBGDA_SRC/ci/fuzz" --time 120
check fuzz::finds_a_planted_bug fuzz_finds_a_bug
