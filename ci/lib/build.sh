# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# Builds the checkout inside the root file system. Needs enter_setup.

# In CI the lock file is what was committed, or the build fails.
CARGO_LOCKED=()
[[ -z ${CI:-} ]] || CARGO_LOCKED=(--locked)
readonly CARGO_LOCKED

# From here until build_unlock no other run builds this checkout: what is built is what is staged.
build_lock() {
    exec {BUILD_LOCK}>"$(checkout_dir target)/.ci-lock"
    flock -n "$BUILD_LOCK" || {
        say "  waiting for another run that builds this checkout"
        flock "$BUILD_LOCK"
    }
}

build_unlock() {
    exec {BUILD_LOCK}>&-
}

# Builds all programs, libraries and VM tests, or those of the packages in IBGDA_PACKAGES. ARTIFACTS is the list of what
# the guest needs: lines of DESTINATION<tab>PATH.
build_programs() {
    local list packages=() package test
    list=$(mktemp)
    for package in ${IBGDA_PACKAGES:-}; do
        packages+=(-p "$package")
    done
    # All in one call: what cargo builds depends on what it is asked for besides, and two calls would undo each other.
    if ((${#packages[@]} == 0)); then
        packages=(--workspace)
        for test in "$IBGDA_SRC"/ci/vmtests/tests/*.rs; do
            packages+=(--test "$(basename -- "$test" .rs)")
        done
    fi
    quiet_step "cargo build" cargo_artifacts "$list" build "${packages[@]}" --lib --bins --examples
    ARTIFACTS=$(sort -u "$list")
    rm -f "$list"
}

cargo_artifacts() {
    local list=$1
    shift
    # The messages of the compiler go to the log as text.
    in_rootfs cargo "$@" "${CARGO_LOCKED[@]}" --message-format=json-render-diagnostics |
        in_rootfs python3 -I /src/ci/lib/artifacts.py >>"$list"
}
