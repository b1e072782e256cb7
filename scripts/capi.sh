#!/usr/bin/env bash
# Makes what a C program needs of outcore: capi.sh [--archive FILE] [PREFIX]
#
# Below PREFIX (target/capi unless named) there are then lib/liboutcore.so.VERSION with its two links, lib/liboutcore.a,
# include/outcore.h and lib/pkgconfig/outcore.pc, which finds the others wherever the folder is moved to.
#
# Both are made of one archive, which Cargo builds; --archive names one that is there already. Cargo could link a
# shared library itself, but then hands the linker a list of symbols that does not go together with symbol versions.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
archive=
if [ "${1:-}" = --archive ]; then
    archive=$2
    shift 2
else
    cargo build --release -p outcore-capi
    archive=$target/release/liboutcore_capi.a
fi
prefix=${1:-$target/capi}
source=runtime/capi
compiler=${CC:-cc}
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n1)
soname=liboutcore.so.0
# What Rust's standard library needs of the system: `rustc --print native-static-libs` lists it.
system=(-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc)

mkdir -p "$prefix/lib/pkgconfig" "$prefix/include"
lib=$prefix/lib
cp "$archive" "$lib/liboutcore.a"
cp "$source/include/outcore.h" "$prefix/include/outcore.h"

# What no exported function needs is left out. Never unloaded: its threads and their cleanup would stay without code.
$compiler -shared -o "$lib/liboutcore.so.$version" -Wl,-soname,"$soname" \
    -Wl,--version-script="$source/outcore.map" -Wl,--whole-archive "$archive" -Wl,--no-whole-archive \
    -Wl,--gc-sections -Wl,-z,defs -Wl,-z,now -Wl,-z,relro -Wl,-z,nodelete "${system[@]}"
ln -sf "liboutcore.so.$version" "$lib/$soname"
ln -sf "$soname" "$lib/liboutcore.so"

cat > "$lib/pkgconfig/outcore.pc" <<PC
prefix=\${pcfiledir}/../..
libdir=\${prefix}/lib
includedir=\${prefix}/include

Name: outcore
Description: Tensors larger than memory: fixed-size pages across memory and disk, under a budget
Version: $version
Cflags: -I\${includedir}
Libs: -L\${libdir} -loutcore
Libs.private: ${system[*]}
PC
echo "outcore $version for C is in $prefix"
