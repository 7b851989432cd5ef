# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# Inside the VM: the programs of ci/vmtests/tests, a guest for each, and the main job. A complaint of the guest's kernel
# (BUG, WARNING, oops) is a failure too.

# vm_clean OPTION… -- COMMAND…
vm_clean() {
    local logs=$CHECK_DIR/vm status=0
    rm -rf -- "$logs"
    "$IBGDA_SRC/ci/vm" --log "$logs" "$@" || status=$?
    if [[ -s $logs/kernel-problems.log ]]; then
        printf 'the kernel of the guest complained:\n'
        cat -- "$logs/kernel-problems.log"
        return 1
    fi
    return "$status"
}

vm_devinfo() {
    vm_clean --nics 2 --no-ibgda -- ibv_devinfo
    [[ $(grep -c PORT_ACTIVE "$CHECK_LOG") == 2 ]]
}

check vm::two_active_ports vm_devinfo
for path in "$IBGDA_SRC"/ci/vmtests/tests/*.rs; do
    # A line "//! vm: OPTION…" says what machine the tests want; quotes as in the shell keep words together.
    mapfile -t vm_options < <(sed -n 's|^//! vm: ||p' "$path" | xargs -r -n 1 printf '%s\n')
    ((${#vm_options[@]})) || vm_options=(--nics 2 --gpus 1)
    path=$(basename -- "$path" .rs)
    suite "vm::$path" vm_clean --timeout 900 "${vm_options[@]}" -- "/opt/ibgda/tests/$path" --test-threads=1
done
check vm::demo "$IBGDA_SRC/ci/demo"
