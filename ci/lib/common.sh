# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# What every script in ci/ starts from: paths, messages and the exit statuses of the VM runner. Sourced, never run.

set -euo pipefail

IBGDA_SRC=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
IBGDA_PROGRAM=ci/${0##*/}

# Everything that is kept between runs, and nothing else, lies below this directory.
IBGDA_CACHE=${IBGDA_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/ibgda}
[[ $IBGDA_CACHE == /* ]] || IBGDA_CACHE=$PWD/$IBGDA_CACHE
export IBGDA_CACHE

# The harness, not the command, is at fault (the other statuses are those of ci/runner).
readonly EXIT_HARNESS=125

say() {
    printf '%s\n' "$*" >&2
}

die() {
    printf '%s: %s\n' "$IBGDA_PROGRAM" "$*" >&2
    exit "$EXIT_HARNESS"
}

# Prints a hash of the contents and names of the given files, and of the strings on standard input if "-" is given.
hash_of() {
    local path
    for path; do
        if [[ $path == - ]]; then
            cat
        else
            printf '%s\n' "${path##*/}"
            cat -- "$path"
        fi
    done | sha256sum | cut -c1-16
}
