#!/bin/sh
# Builds the native library beside the Python module that loads it; again, only what changed. Without a compiler it says so and
# ends with 3. $CMAKE, $CXX (at the first build) and $JOBS are honoured; arguments go to CMake (-DOCTAVO_...).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
build=$root/build/native
cmake=${CMAKE:-cmake}
command -v "$cmake" >/dev/null || { echo 'error: cmake is missing: pip install cmake' >&2; exit 1; }
mkdir -p "$build"

generator=
if [ ! -e "$build/CMakeCache.txt" ] && command -v ninja >/dev/null 2>&1; then generator=-GNinja; fi
if ! "$cmake" -S "$here" -B "$build" $generator "-DOCTAVO_PLACE=$root/src/octavo/backends/_native" "$@" >"$build/configure.log" 2>&1; then
  rm -f "$build/CMakeCache.txt"
  echo "The native kernels were not built: no working C++ compiler was found, see $build/configure.log" >&2
  echo 'Octavo runs without them, slowly. Install one (on Debian or Ubuntu: apt install g++), then: make native' >&2
  exit 3
fi
"$cmake" --build "$build" --parallel "${JOBS:-$(getconf _NPROCESSORS_ONLN)}" --target octavo_native
