# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# On the debug kernel: the module's tests, and programs of random calls, under KASAN, lockdep, kmemleak and the others. The
# kernel takes a quarter of an hour of two idle cores to build: with IBGDA_DEBUG_KERNEL=cached (.ci/run) these are left out
# when there is none.

# Left out: what it has no part for (userfaultfd, kprobes), and slots whose button is pressed. There lockdep finds that
# pciehp and a rescan take pci_rescan_remove_lock and reset_lock in both orders, which is the kernel's, and then looks no more.
debug_module() {
    vm_clean --kernel debug --nics 2 --gpus 1 --timeout 3600 -- /opt/ibgda/tests/module --test-threads=1 \
        --skip a_call_that_waits --skip a_function_that_is_removed --skip plugging_it_in
}

debug_kernel_is_wanted() {
    [[ ${IBGDA_DEBUG_KERNEL:-} != cached ]] || compgen -G "$IBGDA_CACHE/kernel-debug-*/release" >/dev/null
}

if debug_kernel_is_wanted; then
    suite debug::module debug_module
    suite debug::fuzz vm_clean --kernel debug --nics 2 --gpus 1 --timeout 900 -- /opt/ibgda/tests/fuzz
else
    say "debug:: left out: no debug kernel in the cache, and IBGDA_DEBUG_KERNEL=cached"
fi
