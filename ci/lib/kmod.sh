# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# Builds ibgda.ko, outside the checkout. Needs enter_setup.

# Builds the module if its sources have changed. KMOD is its path on the host.
kmod_ensure() {
    local dir stamp key lock
    dir=$(checkout_dir kmod)
    stamp=$dir/.built-from
    overlay_ensure
    key=$(cd "$IBGDA_SRC" && find Kbuild kmod uapi -type f -print0 | sort -z | xargs -0 sha256sum | hash_of -)-${PART##*-}
    KMOD=$dir/ibgda.ko
    exec {lock}>"$dir/.lock"
    flock "$lock"
    if [[ ! -f $KMOD || $(cat "$stamp" 2>/dev/null) != "$key" ]]; then
        rm -f -- "$stamp"
        quiet_step "ibgda.ko" kmod_make
        printf '%s\n' "$key" >"$stamp"
    fi
    exec {lock}>&-
}

# kmod_make [ARG…]: the kernel's build system, its output in /kmod-build.
kmod_make() {
    in_rootfs make -C "$OVERLAY" M=/src MO=/kmod-build "$@" modules
}

# Formats and lints the Rust sources, changing nothing; any finding is a failure.
kmod_lint() {
    local log
    in_rootfs rustfmt --check --edition 2021 --config-path /src/kmod kmod/main.rs || die "ibgda.ko: rustfmt would change the sources"
    in_rootfs mkdir -p /kmod-build/clippy
    log=$(mktemp)
    # Objects of its own: those of the module were compiled without clippy.
    in_rootfs make -C "$OVERLAY" M=/src MO=/kmod-build/clippy CLIPPY=1 modules 2>&1 | tee "$log"
    if grep -qE '^(warning|error|WARNING)' "$log"; then
        rm -f -- "$log"
        die "ibgda.ko: clippy or the compiler found the above"
    fi
    rm -f -- "$log"
}
