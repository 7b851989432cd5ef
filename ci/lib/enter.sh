# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# Commands inside the root file system. Needs the sandbox: its mounts are never seen outside.

# Mounts the root file system (read-only) with the checkout at /src, this checkout's cargo target directory at /target
# and cargo's registry at /cargo. ENTER is where, KERNEL_RELEASE the name of the root file system's kernel.
enter_setup() {
    local root=$IBGDA_CACHE/mnt
    # shellcheck disable=SC1091
    . "$ROOTFS/etc/ibgda-kernel"
    prune_checkouts
    mkdir -p "$IBGDA_CACHE/cargo" "$(checkout_dir target)" "$(checkout_dir kmod)"
    printf '%s' "$IBGDA_SRC" >"$(checkout_dir target)/.checkout"
    mount --bind -- "$ROOTFS" "$root"
    mount -o remount,bind,ro -- "$root"
    mount -t proc proc "$root/proc"
    mount --rbind /sys "$root/sys"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
    mount -t tmpfs -o mode=755 tmpfs "$root/run"
    mount -t tmpfs -o mode=700 tmpfs "$root/root"
    mount --bind -- "$(readlink -f /etc/resolv.conf)" "$root/etc/resolv.conf" 2>/dev/null || true
    mount --bind -- "$(readlink -f /etc/ssl/certs/ca-certificates.crt)" "$root/etc/ssl/certs/ca-certificates.crt"
    mount --bind -- "$IBGDA_SRC" "$root/src"
    mount --bind -- "$IBGDA_CACHE/cargo" "$root/cargo"
    mount --bind -- "$(checkout_dir target)" "$root/target"
    mount --bind -- "$(checkout_dir kmod)" "$root/kmod-build"
    ENTER=$root
}

# What belongs to one checkout, so that two clones never mix.
checkout_dir() {
    printf '%s/%s-%s' "$IBGDA_CACHE" "$1" "$(printf '%s' "$IBGDA_SRC" | hash_of -)"
}

# Removes what belongs to checkouts that are no more.
prune_checkouts() {
    local record
    for record in "$IBGDA_CACHE"/target-*/.checkout; do
        [[ -e $record && ! -d $(<"$record") ]] || continue
        remove_tree "${record%/.checkout}"
        remove_tree "$(dirname -- "${record/target-/kmod-}")"
    done
}

# in_rootfs COMMAND [ARG…]: runs COMMAND in /src. Of the environment only what names proxies and cargo's and pip's settings passes.
in_rootfs() {
    chroot -- "$ENTER" /usr/bin/env -i "${ROOTFS_ENV[@]}" "${PASSED_ENV[@]}" \
        sh -c 'cd /src && exec "$@"' sh "$@"
}

readonly ROOTFS_ENV=(
    HOME=/root
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    LANG=C.UTF-8
    CARGO_HOME=/cargo
    CARGO_TARGET_DIR=/target
)

PASSED_ENV=()
while IFS= read -r -d '' variable; do
    case $variable in
    [hH][tT][tT][pP]_[pP][rR][oO][xX][yY]=* | [hH][tT][tT][pP][sS]_[pP][rR][oO][xX][yY]=* | [nN][oO]_[pP][rR][oO][xX][yY]=* | \
        [aA][lL][lL]_[pP][rR][oO][xX][yY]=* | CARGO_HTTP_*=* | CARGO_NET_*=* | CARGO_REGISTRIES_*=* | CARGO_SOURCE_*=* | \
        PIP_INDEX_URL=* | PIP_DEFAULT_TIMEOUT=* | RUST_BACKTRACE=* | RUST_LOG=* | TERM=*)
        PASSED_ENV+=("$variable")
        ;;
    esac
done < <(env -0)
readonly PASSED_ENV
