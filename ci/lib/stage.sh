# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# The stage: what was built from the checkout, as the guest sees it in /opt/ibgda. A build while a guest runs does not
# change what that guest sees.

# stage_ensure MODULE: MODULE is the path of ibgda.ko, or empty. Needs build_programs, and
# KERNEL_RELEASE, the name of the kernel that the guest runs. STAGE is the result's path.
stage_ensure() {
    local key
    STAGE_MODULE=$1
    key=$({
        stage_files | cut -f2 | xargs -d '\n' stat -c '%n %i %s %Y'
        stage_files
        printf '%s\n' "$ROOTFS" "$KERNEL_RELEASE"
    } | hash_of "$IBGDA_SRC/ci/guest/init" "$IBGDA_SRC"/ci/lib/{stage,initramfs}.sh -)
    part stage "$key" '' stage_fill
    STAGE=$PART
    mount --bind -- "$STAGE" "$ENTER/opt/ibgda"
}

# Lines of DESTINATION<tab>PATH, of paths on the host.
stage_files() {
    # All that cargo makes is in /target.
    sed -E "s|\t/target/|\t$(checkout_dir target)/|" <<<"$ARTIFACTS"
    [[ -z $STAGE_MODULE ]] || printf 'ibgda.ko\t%s\n' "$STAGE_MODULE"
}

stage_fill() {
    local destination path
    while IFS=$'\t' read -r destination path; do
        mkdir -p "$(dirname -- "$1/$destination")"
        # Linkers write a new file, so a link keeps what is there now. The module's linker is told to as well.
        ln -- "$path" "$1/$destination"
    done < <(stage_files)
    mount --bind -- "$1" "$ENTER/opt/ibgda"
    initramfs_make /opt/ibgda/initramfs
    umount -- "$ENTER/opt/ibgda"
}
