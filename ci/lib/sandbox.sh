# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# A script runs in mount and process namespaces of its own: however it ends, kill -9 included, every process that it
# started ends with it, and its mounts and temporary files are gone.

# sandbox "$@": call it once, first. In the outer process it does not return.
sandbox() {
    local child status=0
    [[ ${IBGDA_SANDBOX:-} != "$$" ]] || {
        # The namespace's first process. What it starts must not take itself for it.
        unset IBGDA_SANDBOX
        sandbox_temporary
        return 0
    }
    mkdir -p "$IBGDA_CACHE/mnt" "$IBGDA_CACHE/tmp" || die "cannot make the cache directory $IBGDA_CACHE"
    # setpriv: if this shell is killed, so is unshare; --kill-child: and then the namespace's first process, and so all.
    IBGDA_SANDBOX=1 setpriv --pdeathsig KILL -- unshare --mount --propagation private --pid --fork --kill-child \
        --mount-proc -- bash "$0" "$@" <&0 &
    child=$!
    # shellcheck disable=SC2064
    trap "sandbox_end $child INT" INT
    # shellcheck disable=SC2064
    trap "sandbox_end $child TERM" TERM
    # shellcheck disable=SC2064
    trap "sandbox_end $child HUP" HUP
    wait "$child" || status=$?
    exit "$status"
}

# Temporary files lie in memory that only this sandbox, and those inside it, see.
sandbox_temporary() {
    [[ ${TMPDIR:-} != "$IBGDA_CACHE/tmp" ]] || return 0
    mount -t tmpfs tmpfs "$IBGDA_CACHE/tmp"
    export TMPDIR=$IBGDA_CACHE/tmp
}

sandbox_end() {
    trap - "$2"
    kill -KILL "$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || true
    kill "-$2" "$$"
}
