#!/usr/bin/env bash
# Runs the parts of the GPU check in this folder, each in a process and under a limit of its own.
#
#   run.sh [--part 1|2] [--quick] [--out DIR] [--only PART,...] [--dir DIR] [--previous FILE] [--memory SIZE]
#          [--seconds N] [--limit N]
#
#   --part        1: what the device, the runtime and generate do (430 s); 2: the peers (200 s). What was packed
#   --quick       smaller inputs, fewer rounds; always so in the second
#   --out         where gpu-check-PART.json, .txt and .log go (gpu-check-out); the JSON is written after each part
#   --only        these parts, in the order of the run; without a name that exists the parts are listed
#   --dir         where large files are made and removed again (the system's folder for temporary files)
#   --previous    results to compare with (the newest that was packed)
#   --memory      host memory that may be used (what is free)
#   --seconds     all together: what does not fit is skipped, and said so
#   --limit       any one part (a limit for each, 10 to 100)
#   --tiny        megabytes, for the emulated driver: the numbers mean nothing, and only --limit bounds a part
#
# A part that passed on a card before, with the sources that it has here, runs behind the others. A part that takes too
# long is ended; before that, a backtrace of its threads goes to the log.
#
# Ends with 0 if everything ran and every verdict was met, 1 if not, 2 without a GPU, 64 if it was called wrongly.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
probe=$here/bin/gpu-probe
scale=full out=gpu-check-out only='' dir=${TMPDIR:-/tmp} previous='' seconds='' most=520
memory=()
run=$(cat "$here/PART" 2>/dev/null || echo 1)

usage() {
    echo "run.sh: $1" >&2
    sed -n 's/^# \{0,1\}//; 4,16p' "${BASH_SOURCE[0]}" >&2
    exit 64
}
while [ $# -gt 0 ]; do
    case $1 in
        --quick) scale=quick ;;
        --tiny) scale=tiny ;;
        --part | --out | --only | --dir | --previous | --memory | --seconds | --limit)
            [ $# -ge 2 ] || usage "$1 needs a value"
            case $1 in
                --part) run=$2 ;;
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

# Parts, and the most seconds that each may take. What is quick and says most comes first. Even where each part takes
# all its seconds, what is judged most begins in time: `three-tier`, and all peers but accelerate.
case $run in
    1)
        total=430
        parts=(
            machine:15 queue:30 device-suite:60 runtime-suite:40 soak:70 generate:100 overlap:60 three-tier:50
            oversized:60 children:60 kernels:60 budget:40 ncu:40 soak-sanitized:40 mapping-variants:20 copies:20
            events:10 first-page:20 pin:10 mapping:30 lock:20 disk:20 sweep:40
        )
        ;;
    2)
        total=200
        # Time is short, and the peers need as much of it: the smaller inputs are enough for ratios.
        [ "$scale" = tiny ] || scale=quick
        parts=(
            machine:10 managed:35 torch-stream:30 torch-decode:45 llama:55 oversized:25 accelerate:60
        )
        ;;
    *) usage "there is no part $run: --part takes 1 or 2" ;;
esac
[ -n "$seconds" ] || seconds=$total
for count in "$seconds" "$most"; do
    case $count in
        '' | *[!0-9]*) usage "$count is no number of seconds" ;;
    esac
done
names=("${parts[@]%%:*}")
if [ -n "$only" ]; then
    IFS=, read -r -a wanted <<<"$only"
    for name in "${wanted[@]}"; do
        [[ " ${names[*]} " == *" $name "* ]] ||
            { echo "run.sh: there is no part '$name' in run $run; there are: ${names[*]}" >&2; exit 64; }
    done
fi

for need in python3 timeout; do
    command -v "$need" >/dev/null || { echo "run.sh: $need is missing" >&2; exit 1; }
done
# Programs come packed, so that the folder is small. They are unpacked once.
if [ ! -d "$here/bin" ] && [ -f "$here/bin.tar.gz" ] && ! python3 -m tarfile -e "$here/bin.tar.gz" "$here"; then
    echo "run.sh: $here/bin.tar.gz was not unpacked; this user has to be able to write there, and it takes 70 MB" >&2
    exit 1
fi
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
base=$out/gpu-check-$run
results=$base.json log=$base.log
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

python3 "${report[@]}" start "$results" --scale "$scale" --bundle "$here" --gpu "$gpu" || exit 1
echo "GPU: $gpu; results go to $base.json"
read -r -a parts <<<"$(python3 "${report[@]}" order --bundle "$here" --scale "$scale" "${parts[@]}")"
of_probe=" $("$probe" parts | tr '\n' ' ')"

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
    [ "$scale" != tiny ] || limit=$left
    [ "$limit" -le "$most" ] || limit=$most
    [ "$limit" -le "$left" ] || limit=$left
    if [[ $of_probe == *" $name "* ]]; then
        command=("$probe" run "$name" --scale "$scale" --dir "$work" "${memory[@]}")
    else
        command=(python3 "$here/extra.py" "$name" --bundle "$here" --scale "$scale" --dir "$work" --results "$results"
            --seconds "$limit" "${memory[@]}")
    fi
    # Runs the command under the limit, with a backtrace of what is left of it when the limit is over.
    python3 "${report[@]}" run "$results" "$name" --limit "$limit" --records "$work/part.out" \
        --errors "$work/part.err" -- "${command[@]}"
    { printf '== %s\n' "$name"; cat "$work/part.out" "$work/part.err"; } >>"$log"
    # A part that was stopped leaves an unfinished file.
    rm -f "$work"/*.partial
done

status=0
python3 "${report[@]}" table "$results" | tee "$base.txt"
[ "${PIPESTATUS[0]}" -eq 0 ] || status=1
if [ -n "$previous" ]; then
    python3 "${report[@]}" compare "$results" "$previous" | tee -a "$base.txt"
fi
exit "$status"
