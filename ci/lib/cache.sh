# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# The cache's parts. A part is a directory NAME-KEY, KEY being a hash of all that it is made from, so that a stale part
# is never used. It is made under another name and renamed when complete, so that an interrupted run leaves nothing
# that looks like a part. Whoever uses a part holds a shared lock on it, and what nobody uses any more is removed.

# part NAME KEY TITLE FUNCTION: makes sure that the part exists, calling FUNCTION DIRECTORY to fill it if not (in a step,
# unless TITLE is empty), and holds it until this process and its children are gone. PART is its path.
part() {
    local name=$1 key=$2 title=$3 fill=$4 lock
    PART=$IBGDA_CACHE/$name-$key
    hold_part "$PART"
    if [[ ! -d $PART ]]; then
        exec {lock}>"$IBGDA_CACHE/$name.lock"
        if ! flock -n "$lock"; then
            [[ -z $title ]] || say "  waiting for another run that makes the $title"
            flock "$lock"
        fi
        if [[ ! -d $PART ]]; then
            # The lock is held, so what lies there is from a run that was cut short.
            remove_tree "$IBGDA_CACHE/$name.new"
            mkdir -p "$IBGDA_CACHE/$name.new"
            ${title:+step "$title"} "$fill" "$IBGDA_CACHE/$name.new"
            mv -T -- "$IBGDA_CACHE/$name.new" "$PART"
        fi
        prune_parts "$name"
        exec {lock}>&-
    fi
    touch -- "$PART.lock"
}

# Holds the part at path $1 against removal.
hold_part() {
    local lock
    mkdir -p "$IBGDA_CACHE"
    while :; do
        exec {lock}>>"$1.lock"
        flock -s "$lock"
        # Whoever removes a part removes its lock file too, while holding it: then we hold a file without a name.
        [[ ! /proc/self/fd/$lock -ef $1.lock ]] || return 0
        exec {lock}>&-
    done
}

# Removes the parts NAME-* that no process holds, but for the two used last: two checkouts may take turns.
prune_parts() {
    local name=$1 kept=0 lock path
    while IFS= read -r path; do
        kept=$((kept + 1))
        ((kept > 2)) || continue
        exec {lock}>>"$path"
        if flock -n "$lock"; then
            remove_tree "${path%.lock}"
            rm -f -- "$path"
        fi
        exec {lock}>&-
    done < <(find "$IBGDA_CACHE" -maxdepth 1 -name "$name-*.lock" -printf '%T@ %p\n' | sort -rn | cut -d' ' -f2-)
}

# Never descends into what is mounted there.
remove_tree() {
    rm -rf --one-file-system -- "$1"
}
