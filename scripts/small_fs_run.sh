#!/usr/bin/env bash
# Runs a command with a small empty file system, to see what happens when a disk is full:
#
#     small_fs_run.sh tmpfs|ext4|ext4-sparse|btrfs MIB COMMAND...
#
# The mount point is in the command's environment as OUTCORE_SMALL_FS. ext4 (on a loop device) accepts O_DIRECT, tmpfs
# shows what happens where it may be refused. ext4-sparse has no extents, and so no fallocate. btrfs writes nothing in
# place, and needs 109 MiB. Exit status 77: not run, because this user may not mount here.
set -euo pipefail

skip() {
    echo "small_fs_run: SKIPPED: $1" >&2
    exit 77
}
if [ $# -lt 3 ] || ! [[ $2 =~ ^[0-9]+$ ]]; then
    echo "usage: small_fs_run.sh tmpfs|ext4|ext4-sparse|btrfs MIB COMMAND..." >&2
    exit 2
fi
kind=$1 mib=$2
shift 2
[ "$(id -u)" -eq 0 ] || skip "not root"

work=$(mktemp -d)
mounted=0
# shellcheck disable=SC2317,SC2329
cleanup() {
    if [ "$mounted" -eq 1 ]; then
        umount "$work/fs" || umount -l "$work/fs" || true
    fi
    rm -rf --one-file-system "$work"
}
trap cleanup EXIT
mkdir "$work/fs"

case $kind in
    tmpfs)
        mount -t tmpfs -o "size=${mib}m,mode=0700" tmpfs "$work/fs" 2>/dev/null || skip "tmpfs cannot be mounted"
        ;;
    ext4 | ext4-sparse | btrfs)
        make=mkfs.${kind%-sparse}
        command -v "$make" >/dev/null || skip "$make is missing"
        truncate -s "${mib}M" "$work/image"
        case $kind in
            ext4) "$make" -q -m 0 -O ^has_journal "$work/image" ;;
            ext4-sparse) "$make" -q -m 0 -O ^has_journal,^extent,^64bit "$work/image" ;;
            btrfs) "$make" -q "$work/image" >/dev/null ;;
        esac
        mount -o loop "$work/image" "$work/fs" 2>/dev/null || skip "no loop device can be mounted"
        ;;
    *)
        echo "small_fs_run: unknown file system '$kind'" >&2
        exit 2
        ;;
esac
mounted=1

status=0
OUTCORE_SMALL_FS=$work/fs "$@" || status=$?
exit "$status"
