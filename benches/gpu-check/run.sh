#!/usr/bin/env bash
# Runs the parts of the GPU check in this folder, each in a process and under a limit of its own.
#
#   run.sh [--quick] [--out DIR] [--only PART,...] [--dir DIR] [--previous FILE] [--memory SIZE]
#          [--seconds N] [--limit N]
#
#   --quick       smaller inputs, fewer rounds
#   --out         where gpu-check.json, .txt and .log go (gpu-check-out); the JSON is written after each part
#   --only        these parts; without a name that exists the parts are listed
#   --dir         where large files are made and removed again (the system's folder for temporary files)
#   --previous    results to compare with (the newest that was packed)
#   --memory      host memory that may be used (what is free)
#   --seconds     all together (520): what does not fit is skipped, and said so
#   --limit       any one part (a limit for each, 20 to 200)
#   --tiny        megabytes, for the emulated driver: the numbers mean nothing
#
# Ends with 0 if everything ran and every verdict was met, 1 if not, 2 without a GPU, 64 if it was called wrongly.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
probe=$here/bin/gpu-probe
scale=full out=gpu-check-out only='' dir=${TMPDIR:-/tmp} previous='' seconds=520 most=520
memory=()

usage() {
    echo "run.sh: $1" >&2
    sed -n 's/^# \{0,1\}//; 4,15p' "${BASH_SOURCE[0]}" >&2
    exit 64
}
while [ $# -gt 0 ]; do
    case $1 in
        --quick) scale=quick ;;
        --tiny) scale=tiny ;;
        --out | --only | --dir | --previous | --memory | --seconds | --limit)
            [ $# -ge 2 ] || usage "$1 needs a value"
            case $1 in
                --out) out=$2 ;;
                --only) only=$2 ;;
                --dir) dir=$2 ;;
                --previous) previous=$2 ;;
                --memory) memory=(--memory "$2") ;;
                --seconds) seconds=$2 ;;
                --limit) most=$2 ;;
            esac
            shift
            ;;
        *) usage "there is no option $1" ;;
    esac
    shift
done
for count in "$seconds" "$most"; do
    case $count in
        '' | *[!0-9]*) usage "$count is no number of seconds" ;;
    esac
done

# Parts, and the most seconds that each may take. Those that are quick and say most come first.
parts=(
    machine:30 copies:60 mapping:60 events:30 device-suite:100 runtime-suite:90 kernels:90 lock:60 disk:100 pin:20
    first-page:40 soak:90 overlap:90 oversized:200 three-tier:120 generate:120 accelerate:120 sweep:90 sanitizer:90
)
names=("${parts[@]%%:*}")
if [ -n "$only" ]; then
    IFS=, read -r -a wanted <<<"$only"
    for name in "${wanted[@]}"; do
        [[ " ${names[*]} " == *" $name "* ]] || { echo "run.sh: there is no part '$name'; there are: ${names[*]}" >&2; exit 64; }
    done
fi

for need in python3 timeout; do
    command -v "$need" >/dev/null || { echo "run.sh: $need is missing" >&2; exit 1; }
done
if ! gpu=$("$probe" gpu 2>&1); then
    echo "run.sh: no GPU can be used here, so nothing was measured:" >&2
    echo "$gpu" >&2
    exit 2
fi

mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
work=$(mktemp -d "$dir/outcore-gpu-check.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
results=$out/gpu-check.json log=$out/gpu-check.log
: >"$log"
report=("$here/report.py")
if [ -z "$previous" ]; then
    previous=$(find "$here/previous" -name 'gpu-*.json' 2>/dev/null | sort | tail -n 1)
fi
PYTHONDONTWRITEBYTECODE=1
export PYTHONDONTWRITEBYTECODE
# PyTorch brings cuBLAS and NVRTC along, in folders that the loader does not search.
libraries=$(python3 "${report[@]}" libraries)
[ -z "$libraries" ] || export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$libraries"

python3 "${report[@]}" start "$results" --scale "$scale" --bundle "$here" || exit 1
echo "GPU: $gpu; results go to $out"

command_of() {
    case $1 in
        device-suite | runtime-suite | kernels | generate | accelerate | sanitizer)
            command=(python3 "$here/extra.py" "$1" --bundle "$here" --scale "$scale" --dir "$work" --results "$results")
            ;;
        *) command=("$probe" run "$1" --scale "$scale" --dir "$work" "${memory[@]}") ;;
    esac
}

for part in "${parts[@]}"; do
    name=${part%%:*} limit=${part##*:}
    if [ -n "$only" ] && [[ ",$only," != *",$name,"* ]]; then
        continue
    fi
    left=$((seconds - SECONDS))
    if [ "$left" -lt 5 ]; then
        python3 "${report[@]}" add "$results" "$name" --skipped "no time was left of $seconds s"
        continue
    fi
    [ "$limit" -le "$most" ] || limit=$most
    [ "$limit" -le "$left" ] || limit=$left
    command_of "$name"
    begin=$(date +%s.%N)
    timeout --kill-after=5 "$limit" "${command[@]}" >"$work/part.out" 2>"$work/part.err" </dev/null
    status=$?
    end=$(date +%s.%N)
    { printf '== %s: status %s\n' "$name" "$status"; cat "$work/part.out" "$work/part.err"; } >>"$log"
    python3 "${report[@]}" add "$results" "$name" --status "$status" --limit "$limit" --begin "$begin" --end "$end" \
        --records "$work/part.out" --errors "$work/part.err"
    # A part that was stopped leaves an unfinished file.
    rm -f "$work"/*.partial
done

status=0
python3 "${report[@]}" table "$results" | tee "$out/gpu-check.txt"
[ "${PIPESTATUS[0]}" -eq 0 ] || status=1
if [ -n "$previous" ]; then
    python3 "${report[@]}" compare "$results" "$previous" | tee -a "$out/gpu-check.txt"
fi
exit "$status"
