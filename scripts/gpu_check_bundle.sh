#!/usr/bin/env bash
# Packs everything that the GPU check needs: gpu_check_bundle.sh [--profile PROFILE] [--out DIR]
#
# There are two folders, one for each run of the check: target/gpu-check/bundle, and beside it bundle-peers. Each can
# be copied to a machine that has a GPU and its driver, Python 3 and glibc 2.36 or newer; it needs no network and no
# compiler there: `./run.sh [--quick]`. What is packed: probes, generate, make_model and the kernels, compiled here,
# in both; the tests of the device, the runtime, the GPU's kernels and updates by them in the first; llama-bench in
# the second, if scripts/fetch_gpu_peers.sh has built it; the newest results for comparison, and a hash of what each
# part is made of.
#
# The kernels are compiled by scripts/check_kernels.sh with the compilers of scripts/fetch_nvcc.sh, or with NVCC;
# KERNELS_DIR names a folder that has them compiled. Without them the folder is not made, unless
# GPU_CHECK_WITHOUT_KERNELS=1 asks for it: the programs then compile their kernels with the other machine's NVRTC, or
# where it has none the driver compiles their own PTX.
#
# It fails if there are no kernels, if a folder is larger than 45 MiB, if a program needs a newer glibc, or if one
# holds a path of this machine.
set -euo pipefail
cd "$(dirname "$0")/.."

profile=packed out=''
while [ $# -gt 0 ]; do
    case $1 in
        --profile) profile=$2 && shift ;;
        --out) out=$2 && shift ;;
        *) echo "gpu_check_bundle.sh: there is no option $1" >&2 && exit 2 ;;
    esac
    shift
done
limit_bytes=$((45 << 20))
newest_glibc=2.36

# First, before anything that takes long; and in the folder of ordinary builds, where `make test` leaves the same.
kernels=${KERNELS_DIR:-${CARGO_TARGET_DIR:-target}/kernels}
if [ "${GPU_CHECK_WITHOUT_KERNELS:-}" != 1 ]; then
    if [ -z "${KERNELS_DIR:-}" ]; then
        scripts/need.sh c++ pip
        if ! { [ -n "${NVCC:-}" ] || scripts/fetch_nvcc.sh; } || ! scripts/check_kernels.sh; then
            echo "gpu_check_bundle: the kernels were not compiled; NVCC names another compiler, KERNELS_DIR a folder of" \
                "compiled ones, and GPU_CHECK_WITHOUT_KERNELS=1 packs none" >&2
            exit 1
        fi
    fi
    for file in kernels.fatbin train.fatbin; do
        if [ ! -f "$kernels/$file" ]; then
            echo "gpu_check_bundle: $kernels holds no $file; scripts/check_kernels.sh makes one" >&2
            exit 1
        fi
    done
fi

# The messages of panics would hold paths of this machine, so these paths are given other names. The flags for that are
# not those of ordinary builds, so the build is kept apart from theirs.
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")/gpu-check
out=${out:-$target/bundle}
cargo_home=$(realpath -m "${CARGO_HOME:-$HOME/.cargo}")
export CARGO_TARGET_DIR=$target/build
export RUSTFLAGS="--remap-path-prefix=$PWD=outcore --remap-path-prefix=$cargo_home=cargo ${RUSTFLAGS:-}"
peers=$out-peers
rm -rf "$out" "$peers"
mkdir -p "$out/bin" "$out/kernels" "$out/previous" "$peers"
out=$(cd "$out" && pwd) peers=$(cd "$peers" && pwd)

# One set of packages and features, so that nothing is built twice. Test binaries are named with a hash; cargo says
# where they are.
of=(--profile "$profile" -p outcore -p outcore-llm -p outcore-train -p outcore-gpu-check
    --features outcore-gpu-check/cuda,outcore-llm/cuda,outcore-train/cuda --message-format json-render-diagnostics)
{
    cargo build "${of[@]}" --bin gpu-probe --bin generate --bin make_model --test device --test cuda --test prompts \
        --test train_cuda
    cargo test "${of[@]}" --lib --no-run
} >"$target/built.json"
python3 - "$target/built.json" "$out/bin" <<'E'
import json, shutil, sys
packed = {
    ("bin", "gpu-probe"): "gpu-probe",
    ("bin", "generate"): "generate",
    ("bin", "make_model"): "make_model",
    ("test", "device"): "device",
    ("test", "cuda"): "forward",
    ("test", "prompts"): "prompts",
    ("test", "train_cuda"): "updates",
    ("lib", "outcore_llm"): "kernels",
}
found = {}
for line in open(sys.argv[1]):
    message = json.loads(line)
    if message.get("executable"):
        found[message["target"]["kind"][0], message["target"]["name"]] = message["executable"]
for key, name in packed.items():
    shutil.copy(found[key], f"{sys.argv[2]}/{name}")
E
strip "$out"/bin/*

cp benches/gpu-check/{run.sh,report.py,extra.py,peers.py,limits.py} "$out/"
python3 benches/gpu-check/sources.py >"$out/SOURCES"
if [ "${GPU_CHECK_WITHOUT_KERNELS:-}" = 1 ]; then
    echo "gpu_check_bundle: WITHOUT kernels: the parts kernels and generate will use NVRTC, or the programs' own PTX"
else
    cp "$kernels"/{kernels,train}.fatbin "$out/kernels/"
fi
find docs/results -name 'gpu-*.json' -exec cp {} "$out/previous/" \;
changed=$([ -z "$(git status --porcelain --untracked-files=no 2>/dev/null)" ] || echo ", changed")
echo "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)$changed, profile $profile" >"$out/BUILD"

# The second run: what is compared, and the peers.
cp -r "$out/." "$peers/"
rm "$peers"/bin/{device,kernels,forward,prompts,updates}
echo 1 >"$out/PART"
echo 2 >"$peers/PART"
llama=${target%/gpu-check}/gpu-peers/bin/llama-bench
if [ -x "$llama" ]; then
    cp "$llama" "$peers/bin/"
else
    echo "gpu_check_bundle: WITHOUT llama.cpp (make gpu-peers): the second run will have PyTorch and managed memory alone"
fi

failed=0
for folder in "$out" "$peers"; do
    for binary in "$folder"/bin/*; do
        needed=$(objdump -T "$binary" | grep -oE 'GLIBC_[0-9.]+' | sed 's/GLIBC_//' | sort -uV | tail -n 1)
        if [ "$(printf '%s\n%s\n' "$needed" "$newest_glibc" | sort -V | tail -n 1)" != "$newest_glibc" ]; then
            echo "gpu_check_bundle: $(basename "$binary") needs glibc $needed, newer than $newest_glibc" >&2
            failed=1
        fi
        for place in "$PWD" "$cargo_home" "$HOME/"; do
            if grep -qaF -- "$place" "$binary"; then
                echo "gpu_check_bundle: $(basename "$binary") holds the path $place" >&2
                failed=1
            fi
        done
    done
    programs=$(du -b "$folder"/bin/*)
    # Packed, they are two fifths of their size. run.sh unpacks them, with Python's own library.
    tar -C "$folder" --owner 0 --group 0 --sort name -czf "$folder/bin.tar.gz" bin
    rm -r "$folder/bin"
    bytes=$(du -sb "$folder" | cut -f 1)
    if [ "$bytes" -gt "$limit_bytes" ]; then
        printf '%s\n' "gpu_check_bundle: $folder has $bytes bytes, more than $limit_bytes; unpacked:" "$programs" >&2
        failed=1
    fi
    printf 'gpu_check_bundle: %s, %s MiB\n' "${folder#"$PWD"/}" "$((bytes >> 20))"
done
[ "$failed" -eq 0 ] || exit 1
echo "copy them to a machine with a GPU, and there, in each: ./run.sh [--quick]"
