# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# The initramfs holds only what mounting the root file system needs. It is run inside the root file system.

# The modules through which the guest reaches its root, and what they need, are inserted in this order.
readonly ROOT_MODULES='9pnet_virtio 9p overlay'

# initramfs_make FILE: FILE is a path inside the root file system.
initramfs_make() {
    in_rootfs sh -euc '
        dir=$(mktemp -d)
        mkdir "$dir/bin" "$dir/modules" "$dir/dev" "$dir/lower" "$dir/rw" "$dir/root"
        cp /usr/bin/busybox "$dir/bin/busybox"
        cp /src/ci/guest/init "$dir/init"
        : >"$dir/modules/order"
        for module in $2; do
            modprobe -S "$3" --show-depends "$module"
        done | sed -n "s/^insmod \([^ ]*\).*/\1/p" | awk "!seen[\$0]++" | while read -r path; do
            cp "$path" "$dir/modules/"
            basename "$path" >>"$dir/modules/order"
        done
        cd "$dir"
        find . | cpio -o -H newc --quiet >"$1.new"
        mv "$1.new" "$1"
        rm -rf "$dir"
    ' sh "$1" "$ROOT_MODULES" "$KERNEL_RELEASE"
}
