# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# On the debug kernel: the module's tests, and programs of random calls, under KASAN, lockdep, kmemleak and the others. The
# kernel takes a quarter of an hour of two idle cores to build: with IBGDA_DEBUG_KERNEL=cached (.ci/run) these are left out
# when there is none.

debug_kernel_is_wanted() {
    [[ ${IBGDA_DEBUG_KERNEL:-} != cached ]] || compgen -G "$IBGDA_CACHE/kernel-debug-*/release" >/dev/null
}

if debug_kernel_is_wanted; then
    suite debug::module vm_clean --kernel debug --nics 2 --gpus 1 --timeout 3600 -- \
        /opt/ibgda/tests/module --test-threads=1
    suite debug::fuzz vm_clean --kernel debug --nics 2 --gpus 1 --timeout 900 -- /opt/ibgda/tests/fuzz
else
    say "debug:: left out: no debug kernel in the cache, and IBGDA_DEBUG_KERNEL=cached"
fi
