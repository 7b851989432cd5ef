# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# A long set-up step shows that it is alive, and when it fails, why.

# step NAME COMMAND [ARG…]: runs COMMAND with its output in a log file of the cache. On a terminal the elapsed time
# counts up; otherwise one line says that it began and one that it ended. A failure prints the end of the log and is
# the end of the script.
step() {
    STEP_QUIET='' step_run "$@"
}

# The same for what mostly takes no time: it says nothing unless it takes more than a few seconds, or fails.
quiet_step() {
    STEP_QUIET=3 step_run "$@"
}

step_run() {
    local name=$1 log status=0 started=$SECONDS pid
    shift
    mkdir -p "$IBGDA_CACHE/log"
    log=$(mktemp -- "$IBGDA_CACHE/log/${name//[^A-Za-z0-9]/-}.XXXXXX.log")
    "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    if [[ -n $STEP_QUIET ]]; then
        step_wait "$pid" "$STEP_QUIET"
    fi
    if [[ -t 2 ]]; then
        while kill -0 "$pid" 2>/dev/null; do
            printf '\r  %s … %s ' "$name" "$(elapsed $((SECONDS - started)))" >&2
            sleep 0.5
        done
        printf '\r\033[K' >&2
    elif [[ -z $STEP_QUIET ]] || kill -0 "$pid" 2>/dev/null; then
        say "  $name …"
    fi
    wait "$pid" || status=$?
    if ((status)); then
        say "  $name FAILED after $(elapsed $((SECONDS - started))); the end of its log:"
        tail -n 40 -- "$log" | sed 's/^/  | /' >&2
        die "$name failed (status $status). The whole log: $log"
    fi
    if [[ -z $STEP_QUIET ]] || ((SECONDS - started > STEP_QUIET)); then
        say "  $name: done in $(elapsed $((SECONDS - started)))"
    fi
    rm -f -- "$log"
}

# Waits until the process has ended, but no longer than so many seconds.
step_wait() {
    local tick
    for ((tick = 0; tick < $2 * 50; tick++)); do
        kill -0 "$1" 2>/dev/null || return 0
        sleep 0.02
    done
}

elapsed() {
    if (($1 < 60)); then
        printf '%d s' "$1"
    else
        printf '%d min %02d s' $(($1 / 60)) $(($1 % 60))
    fi
}
