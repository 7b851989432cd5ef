# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# Tools that only some tests need and that are no part of the root file system, which would otherwise be made anew, and
# the guest's too, for each change of them: CUDA's compilers, and what ci/tools/packages names. Needs enter_setup.

# Makes sure that there is a toolbox and mounts it in the root file system; in_toolbox then finds its programs.
toolbox_ensure() {
    local key
    key=$(printf '%s' "$IBGDA_SUITE" | hash_of "$IBGDA_SRC"/ci/tools/* "$IBGDA_SRC/ci/lib/toolbox.sh" -)
    mkdir "$ENTER$TOOLBOX"
    part toolbox "$key" "CUDA's compilers and other tools" toolbox_fill
    mount --bind -- "$PART" "$ENTER$TOOLBOX"
    mount -o remount,bind,ro -- "$ENTER$TOOLBOX"
}

toolbox_fill() {
    mount --bind -- "$1" "$ENTER$TOOLBOX"
    in_rootfs /src/ci/tools/fill "$TOOLBOX"
    umount -- "$ENTER$TOOLBOX"
}

# Like in_rootfs.
in_toolbox() {
    # shellcheck disable=SC2016
    in_rootfs sh -c '
        export TOOLBOX="$1" PATH="$1/cuda/nvidia/cu13/bin:$1/sass/nvidia/cu13/bin:$PATH" LD_LIBRARY_PATH="$1/cuda/nvidia/cu13/lib"
        shift
        exec "$@"
    ' sh "$TOOLBOX" "$@"
}

# /run of the root file system is writable.
readonly TOOLBOX=/run/toolbox
