# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# The Debian packages: what is in them, DKMS, and the policy's program in the guest.

packages_dkms() {
    mkdir -p "$CHECK_DIR/packages"
    "$IBGDA_SRC/ci/packages" --out "$CHECK_DIR/packages" -- /src/packaging/tests/dkms
}

packages_guest() {
    local packages
    [[ -e $CHECK_DIR/packages/modules.tar ]] || packages_dkms
    mapfile -t packages < <("$IBGDA_SRC/ci/packages")
    cp -- "${packages[@]}" "$CHECK_DIR/packages/"
    vm_clean --nics 1 --gpus 1 --no-ibgda --timeout 300 --share "$CHECK_DIR/packages" -- /src/packaging/tests/guest
}

check packages::contents "$IBGDA_SRC/ci/packages" -- /src/packaging/tests/contents
check packages::dkms packages_dkms
check packages::guest packages_guest
