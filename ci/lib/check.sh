# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# Runs tests, tells what they did and counts them.

checks_begin() {
    CHECKS_PASSED=0
    CHECKS_FAILED=0
    CHECK_DIR=$(mktemp -d)
    CHECK_LOG=$CHECK_DIR/log
}

checks_end() {
    if ((CHECKS_PASSED + CHECKS_FAILED == 0)); then
        say "no test has a name that contains ${CHECK_WORDS[*]}"
        CHECKS_FAILED=1
    fi
    say "took $((SECONDS / 60)) min $((SECONDS % 60)) s"
    printf '%d passed, %d failed\n' "$CHECKS_PASSED" "$CHECKS_FAILED"
    exit $((CHECKS_FAILED > 0))
}

check_wanted() {
    local word
    ((${#CHECK_WORDS[@]})) || return 0
    for word in "${CHECK_WORDS[@]}"; do
        [[ $1 != *"$word"* ]] || return 0
    done
    return 1
}

# check NAME COMMAND [ARG…]: one test, which passes when COMMAND succeeds.
check() {
    check_run 1 "$@"
}

# suite NAME COMMAND [ARG…]: the same for a COMMAND that runs test programs of cargo's; each of their tests counts.
suite() {
    check_run '' "$@"
}

check_run() {
    local one=$1 name=$2 status=0 started=$SECONDS passed failed
    shift 2
    check_wanted "$name" || return 0
    printf '%s … ' "$name"
    # A process of its own: a shell that is asked whether a function fails does not end it at the first error.
    (set -e; "$@") >"$CHECK_LOG" 2>&1 </dev/null &
    wait $! || status=$?
    passed=$((status == 0)) failed=$((status != 0))
    if [[ -z $one ]]; then
        read -r passed failed < <(check_count)
        # It failed, but not in a test; or there was none.
        ((status == 0 || failed > 0)) || failed=1
        ((passed + failed > 0)) || failed=1
    fi
    CHECKS_PASSED=$((CHECKS_PASSED + passed))
    CHECKS_FAILED=$((CHECKS_FAILED + failed))
    if ((failed)); then
        printf 'FAILED (status %d, %d s)\n' "$status" $((SECONDS - started))
        grep -aE --no-group-separator -A1 '^(test .* FAILED|---- .* stdout ----|thread .* panicked|.*in a child process: )' "$CHECK_LOG" | sed 's/^/  | /' || :
        tail -n "${CHECK_TAIL:-60}" -- "$CHECK_LOG" | sed 's/^/  | /'
    else
        [[ -n $one ]] || printf '%d tests ' "$passed"
        printf 'ok (%d s)\n' $((SECONDS - started))
    fi
}

# Prints how many tests passed and failed by the lines that libtest closes with.
check_count() {
    awk '/^test result: / { for (i = 2; i <= NF; i++) { if ($i ~ /^passed/) p += $(i - 1); if ($i ~ /^failed/) f += $(i - 1) } }
        END { print p + 0, f + 0 }' "$CHECK_LOG"
}

# expect_status STATUS COMMAND [ARG…]
expect_status() {
    local wanted=$1 got=0
    shift
    "$@" || got=$?
    [[ $got == "$wanted" ]] || {
        printf 'the status is %s, should be %s: %s\n' "$got" "$wanted" "$*"
        return 1
    }
}

# expect_text TEXT: the log of this test so far has it.
expect_text() {
    grep -aqF -- "$1" "$CHECK_LOG" || {
        printf 'this was not said: %s\n' "$1"
        return 1
    }
}
