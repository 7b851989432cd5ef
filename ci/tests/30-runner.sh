# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# ci/vm: exit statuses, streams, and that nothing is left behind. One boot a test.

vm() {
    "$IBGDA_SRC/ci/vm" "$@"
}

runner_options() {
    expect_status 125 vm --nics 9 -- true
    expect_status 125 vm --kernel other -- true
    expect_status 125 vm --frobnicate -- true
    expect_status 125 vm --timeout 0 -- true
    expect_status 125 vm --share /nonexistent -- true
    expect_status 125 vm --cap bf -- true
    expect_status 125 vm --outside-gpu x -- true
    expect_status 125 vm --peer -- true
    expect_status 125 vm --peer true --peer-wait x -- true
    expect_status 125 vm
    expect_text '--nics 9: must be a number from 0 to 8'
}

runner_status_of_command() {
    # From elsewhere than the checkout, as it must work too.
    expect_status 1 env -C / "$IBGDA_SRC/ci/vm" -- false
}

runner_streams_and_share() {
    local dir=$CHECK_DIR/share
    mkdir -p "$dir"
    printf 'from the host\n' >"$dir/in"
    # shellcheck disable=SC2016
    expect_status 7 vm --nics 0 --gpus 0 --no-ibgda --share "$dir" -- \
        sh -c 'cat /mnt/share/in; echo "$1|$2" >/mnt/share/out; echo "to stderr" >&2; exit 7' sh 'a  b' $'c\nd' \
        >"$dir/stdout" 2>"$dir/stderr"
    [[ $(cat "$dir/stdout") == 'from the host' ]]
    grep -qx 'to stderr' "$dir/stderr"
    [[ $(cat "$dir/out") == $'a  b|c\nd' ]]
}

runner_command_not_found() {
    expect_status 127 vm --nics 0 --gpus 0 --no-ibgda -- no-such-command
    expect_text 'no-such-command'
}

runner_panic() {
    expect_status 126 vm --nics 0 --gpus 0 --no-ibgda -- sh -c 'echo c >/proc/sysrq-trigger; sleep 60'
    expect_text 'panic'
}

# The process namespace of a descendant of process $1 called $2, and its number; waits for it.
runner_descendant() {
    local tick pid
    for ((tick = 0; tick < 600; tick++)); do
        for pid in $(runner_tree "$1"); do
            if [[ $(cat "/proc/$pid/comm" 2>/dev/null) == "$2" ]]; then
                printf '%s %s\n' "$pid" "$(readlink "/proc/$pid/ns/pid")"
                return 0
            fi
        done
        sleep 0.2
    done
    printf 'no process called %s below process %s\n' "$2" "$1" >&2
    return 1
}

runner_tree() {
    local child
    for child in $(cat "/proc/$1/task/$1/children" 2>/dev/null); do
        printf '%s\n' "$child"
        runner_tree "$child"
    done
}

# Nothing lives in process namespace $1 any more, soon.
runner_namespace_empty() {
    local tick left=''
    for ((tick = 0; tick < 50; tick++)); do
        left=$(find /proc -maxdepth 3 -path '/proc/[0-9]*/ns/pid' -lname "$1" 2>/dev/null || :)
        [[ -n $left ]] || return 0
        sleep 0.1
    done
    printf 'still there: %s\n' "$left"
    return 1
}

runner_timeout() {
    local pid found status=0
    vm --nics 0 --gpus 0 --no-ibgda --timeout 5 -- sleep 100 &
    pid=$!
    found=$(runner_descendant "$pid" qemu-system-x86)
    wait "$pid" || status=$?
    [[ $status == 124 ]]
    expect_text 'time'
    runner_namespace_empty "${found#* }"
}

runner_model_dies() {
    local pid found status=0
    vm --no-ibgda -- sh -c 'echo started; sleep 100' &
    pid=$!
    found=$(runner_descendant "$pid" connectx)
    until grep -qx started "$CHECK_LOG"; do
        kill -0 "$pid"
        sleep 0.2
    done
    kill -KILL "${found% *}"
    wait "$pid" || status=$?
    [[ $status == 123 ]]
    runner_namespace_empty "${found#* }"
}

# Two VMs: names, the link, output, statuses; b listens only some time after its start.
runner_peer() {
    local out=$CHECK_DIR/peer.stdout
    expect_status 3 vm --nics 0 --gpus 0 --no-ibgda \
        --peer 'hostname; sleep 1; echo "$IBGDA_PEER calls" | busybox nc -l -p 9; echo too far >&2; exit 3' \
        -- sh -c 'hostname; busybox nc b 9 </dev/null' >"$out"
    printf '%s\n' 'a' 'a calls' 'b: b' | diff - <(sort "$out")
    expect_text 'b: too far'
    expect_text 'b: the command ended with status 3'
    expect_status 4 vm --nics 0 --gpus 0 --no-ibgda --peer-wait 0 --peer 'sleep 100' -- sh -c 'exit 4'
}

runner_peer_dies() {
    expect_status 126 vm --nics 0 --gpus 0 --no-ibgda --peer-wait 0 --peer 'echo c >/proc/sysrq-trigger' -- sleep 100
    expect_text 'ci/vm: b: '
    expect_text 'panic'
}

# The model is reached from outside while the VMs run.
runner_peer_control() {
    local name=runner-log dir pid status=0
    # shellcheck source=/dev/null
    dir=$(. "$IBGDA_SRC/ci/lib/enter.sh" && checkout_dir target)/$name
    vm --log "$dir" --gpus 0 --no-ibgda --peer 'echo started; sleep 100' --peer-wait 0 \
        -- sh -c 'until grep -q DOWN /sys/class/infiniband/*/ports/1/state; do sleep 0.1; done' &
    pid=$!
    until grep -qx 'b: started' "$CHECK_LOG"; do
        kill -0 "$pid"
        sleep 0.2
    done
    "$IBGDA_SRC/ci/enter" /target/debug/connectx ctl --socket "/target/$name/ctl.sock" link nic0 down
    wait "$pid" || status=$?
    rm -r -- "$dir"
    [[ $status == 0 ]]
}

runner_killed() {
    local pid found
    vm --nics 0 --gpus 0 --no-ibgda -- sleep 100 &
    pid=$!
    found=$(runner_descendant "$pid" qemu-system-x86)
    kill -KILL "$pid"
    wait "$pid" || :
    runner_namespace_empty "${found#* }"
}

check runner::options runner_options
check runner::status_of_command runner_status_of_command
check runner::streams_and_share runner_streams_and_share
check runner::command_not_found runner_command_not_found
check runner::panic runner_panic
check runner::timeout_leaves_nothing runner_timeout
check runner::model_dies runner_model_dies
check runner::peer runner_peer
check runner::peer_dies runner_peer_dies
check runner::peer_control runner_peer_control
check runner::kill_leaves_nothing runner_killed
