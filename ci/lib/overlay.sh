# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# What a Rust module is built against. Debian's headers package has no Rust metadata, so that is built once from the
# kernel's source package and laid over a copy of the headers.

readonly OVERLAY=/usr/src/ibgda-kbuild

# Makes sure that there is an overlay for the root file system's kernel, and mounts it.
overlay_ensure() {
    local key
    key=$(cat "$ROOTFS/etc/ibgda-kernel" | hash_of "$IBGDA_SRC/ci/kernel/overlay" "$IBGDA_SRC/ci/lib/overlay.sh" -)
    part kbuild "$key" "kernel's Rust artefacts" overlay_fill
    mount --bind -- "$PART" "$ENTER$OVERLAY"
}

overlay_fill() {
    mount --bind -- "$1" "$ENTER$OVERLAY"
    # The source tree takes 1.5 GB while it is needed: on disk, not in memory.
    remove_tree "$1.source"
    mkdir "$1.source"
    mount --bind -- "$1.source" "$ENTER/mnt"
    in_rootfs sh /src/ci/kernel/overlay /mnt "$OVERLAY"
    umount -- "$ENTER/mnt" "$ENTER$OVERLAY"
    remove_tree "$1.source"
}
