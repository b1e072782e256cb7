#!/usr/bin/env bash
# Runs a command in a fresh memory cgroup, page cache counted in:
#
#     cgroup_run.sh [--drop-caches] LIMIT COMMAND...
#
# LIMIT is bytes, or a number with KiB, MiB, GiB, KB, MB or GB. Swap is not allowed to make room. With --drop-caches the
# machine's page cache is dropped first: pages already cached by others are not charged to this group, so without it
# a command may read "from disk" for free. The peak goes to standard error as one line:
#
#     cgroup_run: limit=N peak=N cache=N failcnt=N oom_kills=N version=v1|v2
#
# peak counts everything charged to the group, page cache too; cache is what was left of that at the end. The exit
# status is the command's; 77 means it was not run, because this user may not make memory cgroups here.
set -euo pipefail

skip() {
    echo "cgroup_run: SKIPPED: $1" >&2
    exit 77
}
usage() {
    echo "usage: cgroup_run.sh [--drop-caches] LIMIT COMMAND..." >&2
    exit 2
}

drop=0
if [ "${1:-}" = --drop-caches ]; then
    drop=1
    shift
fi
[ $# -ge 2 ] || usage

to_bytes() {
    local number unit
    [[ $1 =~ ^([0-9]+)([A-Za-z]*)$ ]] || usage
    number=${BASH_REMATCH[1]} unit=${BASH_REMATCH[2],,}
    case $unit in
        "" | b) echo "$number" ;;
        k | kib) echo $((number << 10)) ;;
        m | mib) echo $((number << 20)) ;;
        g | gib) echo $((number << 30)) ;;
        kb) echo $((number * 1000)) ;;
        mb) echo $((number * 1000000)) ;;
        gb) echo $((number * 1000000000)) ;;
        *) usage ;;
    esac
}
limit=$(to_bytes "$1")
shift

[ "$(id -u)" -eq 0 ] || skip "not root"

# Where the memory controller is: v1 has a mount of its own, v2 a unified one that must offer it.
group=
version=
name=outcore-$$-$RANDOM
root=$(awk '$3 == "cgroup" && $4 ~ /(^|,)memory(,|$)/ { print $2; exit }' /proc/self/mounts)
if [ -n "$root" ]; then
    version=v1
    own=$(awk -F: '$2 ~ /(^|,)memory(,|$)/ { print $3; exit }' /proc/self/cgroup)
    for parent in "$root${own%/}" "$root"; do
        if [ -d "$parent" ] && mkdir "$parent/$name" 2>/dev/null; then
            group=$parent/$name
            break
        fi
    done
else
    root=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/self/mounts)
    [ -n "$root" ] || skip "no cgroup file system is mounted"
    version=v2
    own=$(awk -F: '$1 == "0" { print $3; exit }' /proc/self/cgroup)
    parent=$root${own%/}
    # A group with processes of its own cannot hand the controller down, unless it is the root: try upwards.
    while :; do
        if [ -r "$parent/cgroup.controllers" ] && grep -qw memory "$parent/cgroup.controllers"; then
            if grep -qw memory "$parent/cgroup.subtree_control" ||
                { echo +memory >"$parent/cgroup.subtree_control"; } 2>/dev/null; then
                if mkdir "$parent/$name" 2>/dev/null; then
                    group=$parent/$name
                    break
                fi
            fi
        fi
        [ "$parent" != "$root" ] || break
        parent=${parent%/*}
        [ -n "$parent" ] || break
    done
fi
[ -n "$group" ] || skip "no memory cgroup can be made under $root"

# shellcheck disable=SC2317,SC2329
cleanup() {
    # A v1 group that still holds page cache can be removed; a group with processes left cannot.
    rmdir "$group" 2>/dev/null || echo "cgroup_run: left behind: $group" >&2
}
trap cleanup EXIT

if [ "$version" = v1 ]; then
    { echo "$limit" >"$group/memory.limit_in_bytes"; } 2>/dev/null || skip "the limit cannot be set in $group"
    if [ -w "$group/memory.memsw.limit_in_bytes" ]; then
        { echo "$limit" >"$group/memory.memsw.limit_in_bytes"; } 2>/dev/null || true
    fi
    { echo 0 >"$group/memory.swappiness"; } 2>/dev/null || true
else
    { echo "$limit" >"$group/memory.max"; } 2>/dev/null || skip "the limit cannot be set in $group"
    if [ -w "$group/memory.swap.max" ]; then
        { echo 0 >"$group/memory.swap.max"; } 2>/dev/null || true
    fi
fi

if [ "$drop" -eq 1 ]; then
    sync
    { echo 3 >/proc/sys/vm/drop_caches; } 2>/dev/null || skip "the page cache cannot be dropped"
fi

status=0
# The subshell moves itself in, then becomes the command: nothing of the command runs outside.
(
    echo "$BASHPID" >"$group/cgroup.procs"
    exec "$@"
) || status=$?

# field FILE NAME
field() { awk -v name="$2" '$1 == name { print $2; found = 1; exit } END { if (!found) print 0 }' "$group/$1" 2>/dev/null || echo 0; }
value() { cat "$group/$1" 2>/dev/null || echo unknown; }
if [ "$version" = v1 ]; then
    peak=$(value memory.max_usage_in_bytes) failcnt=$(value memory.failcnt)
    cache=$(field memory.stat total_cache) kills=$(field memory.oom_control oom_kill)
else
    peak=$(value memory.peak) failcnt=$(field memory.events max)
    cache=$(field memory.stat file) kills=$(field memory.events oom_kill)
fi
echo "cgroup_run: limit=$limit peak=$peak cache=$cache failcnt=$failcnt oom_kills=$kills version=$version" >&2
exit "$status"
