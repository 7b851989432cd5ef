# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# What can be said of the sources without running them.

sources_have_licences() {
    local path missing=0
    while IFS= read -r path; do
        [[ -f $path ]] || continue
        head -n 3 -- "$path" | grep -q 'SPDX-License-Identifier:' || {
            printf '%s has no SPDX line\n' "$path"
            missing=1
        }
    done < <(cd "$IBGDA_SRC" && git ls-files -- . ':!*.lock' ':!connectx/fuzz/corpus' ':!LICENSES' ':!.gitignore' ':!*.svg')
    return "$missing"
}

sources_shell() {
    local paths
    mapfile -t paths < <(cd "$IBGDA_SRC" && {
        git ls-files -- '*.sh'
        git grep -lE '^#!/usr/bin/env bash|^#!/bin/(ba)?sh' -- . ':!*.sh'
    })
    # SC2034: it does not see that a sourced file's variables are used by those that source it.
    "$IBGDA_SRC/ci/enter" shellcheck -x -S warning -e SC2034 "${paths[@]}"
}

check sources::licences sources_have_licences
check sources::shellcheck sources_shell
check sources::rustfmt "$IBGDA_SRC/ci/enter" cargo fmt --all --check
check sources::clippy "$IBGDA_SRC/ci/enter" cargo clippy -q --workspace --all-targets \
    --features ibgda-test-kernels/nvrtc,ibgda-communicator/nvrtc -- -D warnings
check sources::module-lint "$IBGDA_SRC/ci/kmod" --lint
