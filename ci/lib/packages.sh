# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# The Debian packages. Needs enter_setup.

# Builds the packages anew; it takes some seconds once the command and the library are compiled. PACKAGES is where they lie on
# the host, with programs/, which packaging/build needs besides the checkout.
packages_build() {
    local lock
    quiet_step "the ibgda command" in_rootfs cargo build --release "${CARGO_LOCKED[@]}" -p ibgda-cli --bin ibgda
    # By itself: built together with others, libibgda has the features that those want.
    quiet_step "its part that opens NICs" in_rootfs cargo build --release "${CARGO_LOCKED[@]}" -p ibgda-traffic
    quiet_step "libibgda" in_rootfs cargo build --release "${CARGO_LOCKED[@]}" -p libibgda
    PACKAGES=$(checkout_dir target)/packages
    exec {lock}>"$PACKAGES.lock"
    flock "$lock"
    rm -rf -- "$PACKAGES"
    quiet_step "packages" packages_make
    exec {lock}>&-
}

packages_make() {
    in_rootfs install -D -s -m 755 /target/release/ibgda /target/packages/programs/ibgda
    in_rootfs install -D -s -m 755 /target/release/ibgda-traffic /target/packages/programs/ibgda-traffic
    in_rootfs install -D -m 644 /target/release/libibgda.a /target/packages/programs/libibgda.a
    { packages_crates ibgda-cli && packages_crates ibgda-traffic; } | LC_ALL=C sort -u >"$PACKAGES/programs/ibgda.crates"
    packages_crates libibgda >"$PACKAGES/programs/libibgda.crates"
    in_rootfs sh packaging/build /target/packages /target/packages/programs
}

# The crates that are compiled into a crate, with their licences, without those of this checkout.
packages_crates() {
    in_rootfs cargo tree -q "${CARGO_LOCKED[@]}" -p "$1" -e normal --prefix none --format '{p}: {l}' |
        sed -e '/ (\/src/d' -e 's/ (\*)$//' -e 's/ (proc-macro)//' | LC_ALL=C sort -u
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
    for path in proc sys dev tmp run root src "${OVERLAY#/}"; do
        mount --rbind -- "$ENTER/$path" "$root/$path"
    done
    mount --bind -- "$PACKAGES" "$root/packages"
    [[ -z $1 ]] || mount --bind -- "$1" "$root/out"
    ENTER=$root
}
