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

# rdma-core on doorbell pages that are memory: three pairs at a time, whose CQs are polled, and then sleep until they are armed
# for. An arm or a doorbell that is lost leaves a pair waiting.
vm_mapped_doorbells() {
    # shellcheck disable=SC2016
    vm_clean --nics 1 --gpus 0 --no-ibgda --mapped-doorbells --timeout 240 -- sh -c '
        ip link set lo up
        for how in "" -e; do
            pids=
            for port in 1 2 3; do
                timeout 120 ibv_rc_pingpong -p 2000$port -n 500 $how >/dev/null &
                pids="$pids $!"
            done
            # 4E21 is 20001; 0A: it listens.
            for port in 4E21 4E22 4E23; do
                for look in $(seq 600); do
                    ! grep -q ":$port .* 0A " /proc/net/tcp /proc/net/tcp6 || break
                    sleep 0.1
                done
            done
            for port in 1 2 3; do
                timeout 60 ibv_rc_pingpong -p 2000$port -n 500 $how localhost & pids="$pids $!"
            done
            for pid in $pids; do wait $pid || exit 1; done
        done
        connectx ctl counts'
    grep -qx 'lost_doorbells *0' "$CHECK_LOG"
    grep -qx 'torn_wqes *0' "$CHECK_LOG"
    # Each of the 12 processes sent 500 times; those of one look count once.
    (($(sed -n 's/^found_doorbells *//p' "$CHECK_LOG") > 3000))
}
check vm::mapped_doorbells vm_mapped_doorbells
for path in "$IBGDA_SRC"/ci/vmtests/tests/*.rs; do
    # A line "//! vm: OPTION…" says what machine the tests want; quotes as in the shell keep words together.
    mapfile -t vm_options < <(sed -n 's|^//! vm: ||p' "$path" | xargs -r -n 1 printf '%s\n')
    ((${#vm_options[@]})) || vm_options=(--nics 2 --gpus 1)
    path=$(basename -- "$path" .rs)
    suite "vm::$path" vm_clean --timeout 900 "${vm_options[@]}" -- "/opt/ibgda/tests/$path" --test-threads=1
done
check vm::demo "$IBGDA_SRC/ci/demo"
