# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# The Debian packages. Needs enter_setup.

# Builds the packages anew; it takes some seconds, and more when the library has changed. PACKAGES is where they lie on the
# host.
packages_build() {
    local lock
    PACKAGES=$(checkout_dir target)/packages
    exec {lock}>"$PACKAGES.lock"
    flock "$lock"
    rm -rf -- "$PACKAGES"
    quiet_step "libibgda for release" in_rootfs cargo build -q --release "${CARGO_LOCKED[@]}" -p libibgda
    quiet_step "packages" in_rootfs sh packaging/build /target/packages /target/release/libibgda.a
    exec {lock}>&-
}

# Makes ENTER a root file system that can be written to, whose changes are forgotten. $1, if not empty, is at /out there.
packages_root() {
    local dir root path
    dir=$(mktemp -d)
    root=$dir/root
    # In memory: a package with its build takes some 100 MB.
    mkdir "$dir"/{upper,work,root}
    mount -t overlay -o "lowerdir=$ROOTFS,upperdir=$dir/upper,workdir=$dir/work" overlay "$root"
    mkdir -p "$root/packages" "$root/out"
    for path in proc sys dev tmp run root src target "${OVERLAY#/}"; do
        mount --rbind -- "$ENTER/$path" "$root/$path"
    done
    mount --bind -- "$PACKAGES" "$root/packages"
    [[ -z $1 ]] || mount --bind -- "$1" "$root/out"
    ENTER=$root
}
