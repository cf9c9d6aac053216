#!/bin/sh
# Builds and runs the tests in C++: check.sh plain | address,undefined | thread | qemu. $CMAKE is honoured.
set -eu
kind=$1
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
cmake=${CMAKE:-$(command -v cmake || echo "$root/.venv/bin/cmake")}
ctest=$(dirname "$cmake")/ctest

make_tests() { # folder, then options for CMake
  folder=$root/build/$1
  shift
  generator=
  if [ ! -e "$folder/CMakeCache.txt" ] && command -v ninja >/dev/null 2>&1; then generator=-GNinja; fi
  "$cmake" -S "$here" -B "$folder" $generator -DOCTAVO_TESTS=ON "$@" >/dev/null
  "$cmake" --build "$folder" --parallel "$(getconf _NPROCESSORS_ONLN)" --target octavo_tests >"$folder/build.log" || { cat "$folder/build.log" >&2; exit 1; }
}
run() { # a command before ctest's, the folder
  echo "native tests, $kind:"
  UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 $1 "$ctest" --test-dir "$root/build/$2" --output-on-failure --no-tests=error
}

case $kind in
  plain) # beside the library's own build, whose objects they are
    make_tests native "-DOCTAVO_PLACE=$root/src/octavo/backends/_native"
    run "" native
    ;;
  address,undefined)
    make_tests sanitize-address "-DOCTAVO_SANITIZE=$kind" -DOCTAVO_EMULATED_TILES=ON # no sanitizer sees what real tiles read and write
    run "" sanitize-address
    ;;
  thread) # the thread sanitizer wants its shadow where random addresses may already be
    make_tests sanitize-thread -DOCTAVO_SANITIZE=thread -DOCTAVO_EMULATED_TILES=ON "-DOCTAVO_ONLY=generic;avx2;amx;neon_i8mm" # what threads share is the same for all
    if setarch -R true 2>/dev/null; then run "setarch -R" sanitize-thread; else run "" sanitize-thread; fi
    ;;
  qemu)
    for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
      command -v $tool >/dev/null || {
        echo "error: $tool is missing; on Debian or Ubuntu: apt install g++-aarch64-linux-gnu qemu-user" >&2; exit 1; }
    done
    make_tests native "-DOCTAVO_PLACE=$root/src/octavo/backends/_native"
    "$root/build/native/tests/golden" write "$root/build/goldens.txt"
    grep -qs aarch64-linux-gnu-g++ "$root/build/qemu/CMakeCache.txt" || rm -rf "$root/build/qemu"
    make_tests qemu "-DCMAKE_TOOLCHAIN_FILE=$here/cmake/aarch64.cmake" "-DOCTAVO_GOLDENS=$root/build/goldens.txt"
    run "" qemu
    ;;
  *)
    echo "usage: check.sh plain | address,undefined | thread | qemu" >&2
    exit 2
    ;;
esac
