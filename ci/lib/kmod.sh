# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# Builds ibgda.ko in a copy of its sources, so that the checkout stays clean. Needs enter_setup.

# kmod_ensure KERNEL: builds the module for the stock or the debug kernel if its sources have changed; IBGDA_KMOD_CFG is a
# --cfg for builds that only tests use. KMOD is its path on the host.
kmod_ensure() {
    local dir stamp key lock tree
    KMOD_FLAGS=()
    case $1 in
    stock)
        overlay_ensure
        tree=$PART
        ;;
    debug)
        # A directory of the part of the debug kernel, which debug_kernel_ensure holds.
        tree=$DEBUG_KERNEL
        mount --bind -- "$tree/build" "$ENTER$OVERLAY"
        KMOD_FLAGS=(ARCH=x86 LLVM=-19)
        ;;
    esac
    dir=$(checkout_dir kmod)/$1
    mkdir -p "$dir"
    stamp=$dir/built-from
    KMOD=$dir/build/ibgda.ko
    KMOD_BUILD=/kmod-build/$1/build
    exec {lock}>"$dir/lock"
    flock "$lock"
    key=$(cd -- "$IBGDA_SRC" && kmod_sources | xargs -0 sha256sum | hash_of "$IBGDA_SRC/ci/lib/kmod.sh" -)
    key+=-${tree##*-}-${IBGDA_KMOD_CFG:-}
    if [[ ! -f $KMOD || $(cat "$stamp" 2>/dev/null) != "$key" ]]; then
        rm -rf -- "$stamp" "$dir/build"
        mkdir "$dir/build"
        (cd -- "$IBGDA_SRC" && kmod_sources | xargs -0 cp --parents -t "$dir/build")
        quiet_step "ibgda.ko for the $1 kernel" kmod_make
        printf '%s\n' "$key" >"$stamp"
    fi
    exec {lock}>&-
}

# The names of the sources below the current directory, ended by NUL, and not of what a build there may have left.
kmod_sources() {
    find Kbuild kmod uapi -name target -prune -o -type f ! -name '.*' ! -name '*.o' ! -name '*.ko' ! -name '*.mod' \
        ! -name '*.mod.c' ! -name '*_abi.rs' -print0 | sort -z
}

# The kernel's build system over the copy, with every warning an error, modpost's too (W=e).
kmod_make() {
    [[ -z ${IBGDA_KMOD_CFG:-} ]] || KMOD_FLAGS+=("KRUSTFLAGS=--cfg $IBGDA_KMOD_CFG")
    in_rootfs make -C "$OVERLAY" "${KMOD_FLAGS[@]}" M="$KMOD_BUILD" W=e modules
}

# Format, and clippy's opinion, of all that the kernel builds.
kmod_lint() {
    step "rustfmt of kmod/" in_rootfs rustfmt --check --edition 2021 kmod/main.rs
    step "clippy of kmod/" kmod_clippy
}

# In a further copy, since clippy takes the compiler's place.
kmod_clippy() {
    in_rootfs sh -euc '
        dir=$(mktemp -d)
        cd "$2"
        cp -r --parents Kbuild kmod uapi "$dir"
        find "$dir" -name "*.o" -delete
        make -C "$1" M="$dir" W=e CLIPPY=1 modules
    ' sh "$OVERLAY" "$KMOD_BUILD"
}
