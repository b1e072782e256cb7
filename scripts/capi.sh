#!/usr/bin/env bash
# Makes what a C program needs of outcore: capi.sh [--archive FILE] [PREFIX]
#
# Below PREFIX (target/capi unless named) there are then lib/liboutcore.so.VERSION with its two links, lib/liboutcore.a,
# include/outcore.h and lib/pkgconfig/outcore.pc, which finds the others wherever the folder is moved to.
#
# Both are made of one archive, which Cargo builds; --archive names one that is there already. Cargo could link a shared
# library itself, but then hands the linker a list of symbols that does not go together with symbol versions.
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
cp "$source/include/outcore.h" "$prefix/include/outcore.h"

# The archive as one object, in which nothing has a name but what the header declares: a program may link other archives
# of Rust beside it. What no exported function needs is left out, and so is the compiler's code for linking with LTO.
object=$lib/outcore.o
trap 'rm -f "$object"' EXIT
mapfile -t keep < <(sed -nE 's/^[a-z][a-z0-9_ ]*[ *](outcore_[a-z_]+)\(.*/-Wl,-u,\1/p' "$source/include/outcore.h")
# No section stays in a group: of groups with one name the linker takes one, and another archive could not name what is
# in ours.
$compiler -r -nostdlib -o "$object" "${keep[@]}" -Wl,--gc-sections -Wl,--force-group-allocation \
    -Wl,--whole-archive "$archive" -Wl,--no-whole-archive
# The names of what was left out go too: some were weak, and would not be any more.
"${OBJCOPY:-objcopy}" --wildcard --keep-global-symbol='outcore_*' --keep-symbol='outcore_*' \
    --strip-unneeded-symbol='*' -R .llvmbc -R .llvmcmd "$object"
rm -f "$lib/liboutcore.a"
"${AR:-ar}" crs "$lib/liboutcore.a" "$object"

# Never unloaded: its threads and their cleanup would stay without code.
$compiler -shared -o "$lib/liboutcore.so.$version" "$object" -Wl,-soname,"$soname" \
    -Wl,--version-script="$source/outcore.map" \
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
