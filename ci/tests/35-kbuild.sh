# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# Kbuild as others than ci/kmod use it: what it says of a kernel that lacks something, and modules_install.

kbuild_modules_install() {
    local module
    module=$("$IBGDA_SRC/ci/kmod")
    # The cache's directory of this checkout is at /kmod-build there.
    module=/kmod-build/${module#"$IBGDA_CACHE"/kmod-*/}
    "$IBGDA_SRC/ci/enter" /src/ci/kbuild/modules-install "${module%/*}"
}

check kbuild::says_what_a_kernel_lacks "$IBGDA_SRC/ci/enter" /src/ci/kbuild/probes
check kbuild::modules_install kbuild_modules_install
