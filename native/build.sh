#!/bin/sh
# Builds the native library beside the Python module that loads it. CXX, EXTRA (further flags) and OUT are honoured.
set -e
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here/../src/octavo/backends/_native}
objects=${OBJECTS:-$here/build/objects}
mkdir -p "$out" "$objects"
common="-std=c++17 -O3 -fno-tree-pre -ffp-contract=off -fPIC -fvisibility=hidden -pthread -I$here/include -I$here/src $EXTRA"

compile() { # source, object, flags
  newest=$(ls -t "$1" "$here"/src/*.h "$here"/src/*.inc "$here"/include/*.h "$here"/build.sh | head -1)
  [ -e "$objects/$2" ] && [ "$objects/$2" -nt "$newest" ] || ${CXX:-g++} $common $3 -c "$1" -o "$objects/$2"
}

avx2="-mavx2 -mfma -mf16c"
avx512="$avx2 -mavx512f -mavx512bw -mavx512vl -mavx512dq"
for name in api arena dispatch engine pool program_check program_open program_sync run run_linear run_moe sampling step sync; do
  compile "$here/src/$name.cpp" $name.o "-Wall -Wextra" &
done
wait
case $(uname -m) in
  x86_64 | amd64)
    compile "$here/src/kernels_generic.cpp" kernels_generic.o "" &
    compile "$here/src/kernels_avx512_vnni_bf16.cpp" kernels_avx512_vnni_bf16.o "$avx512 -mavx512vnni -mavx512bf16" &
    wait
    compile "$here/src/kernels_avx2.cpp" kernels_avx2.o "$avx2" &
    compile "$here/src/kernels_avx2_vnni.cpp" kernels_avx2_vnni.o "$avx2 -mavxvnni" &
    wait
    compile "$here/src/kernels_avx512.cpp" kernels_avx512.o "$avx512" &
    compile "$here/src/kernels_amx.cpp" kernels_amx.o "$avx512 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16" &
    wait
    ;;
  *) compile "$here/src/kernels_generic.cpp" kernels_generic.o "" ;;
esac
${CXX:-g++} -shared -pthread $EXTRA -Wl,--no-undefined -o "$out/liboctavo_native.so" "$objects"/*.o
