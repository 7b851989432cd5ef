# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# The debug kernel: clang's build of the same source with KASAN, lockdep and the other checkers of ci/kernel/debug.config.

# Makes sure that there is one. DEBUG_KERNEL is its directory, DEBUG_RELEASE its name. Needs enter_setup.
debug_kernel_ensure() {
    local key
    key=$(cat "$ROOTFS/etc/ibgda-kernel" |
        hash_of "$IBGDA_SRC"/ci/kernel/debug{,.config} "$IBGDA_SRC/ci/lib/debug-kernel.sh" -)
    part kernel-debug "$key" "debug kernel (a quarter of an hour on two cores)" debug_kernel_fill
    DEBUG_KERNEL=$PART
    DEBUG_RELEASE=$(<"$PART/release")
}

debug_kernel_fill() {
    # The source tree takes 3 GB while it is needed: on disk, not in memory.
    remove_tree "$1.source"
    mkdir "$1.source"
    mount --bind -- "$1.source" "$ENTER/mnt"
    mount --bind -- "$1" "$ENTER$OVERLAY"
    in_rootfs sh /src/ci/kernel/debug /mnt "$OVERLAY"
    umount -- "$ENTER/mnt" "$ENTER$OVERLAY"
    remove_tree "$1.source"
}

# Puts its modules in the place of the root file system's own.
debug_kernel_enter() {
    local modules=$ENTER/usr/lib/modules
    mount -t tmpfs -o mode=755 tmpfs "$modules"
    mkdir "$modules/$DEBUG_RELEASE"
    mount --bind -- "$DEBUG_KERNEL/lib/modules/$DEBUG_RELEASE" "$modules/$DEBUG_RELEASE"
}
