#!/bin/sh
# What the same bytes cost: builds of the library that drop one of the orders which promise them, against the one that keeps all,
# by whole steps of SmolLM2-135M's shape, taken in turn in one process. Figures: docs/decisions/0010. ablate.sh [format [table]]
#   claimed   threads take the next panel, whosever it is, instead of panels of their own (the bits stay: this is about speed alone)
#   unchunked attention keeps one softmax state for 2,048 positions (all of these steps), not one for each 512: no merges, no parts
#   fewrows   (table amx, bf16) up to 16 rows run on vectors although more run on tiles, whose sums have another order
# $QUIET runs the measurement (a command that keeps the machine quiet); $CMAKE and $CXX are honoured.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
native=$(dirname "$here")
out=$(dirname "$native")/build/ablate
format=${1:-w8g64}
table=${2:-amx}
cmake=${CMAKE:-$(command -v cmake || echo "$(dirname "$native")/.venv/bin/cmake")}

change() { # file, from, to: a change that does not apply ends it
  grep -q "$2" "$1" || { echo "ablate: $1 has no '$2' any more" >&2; exit 1; }
  sed -i "s/$2/$3/" "$1"
}
build() { # name, flags
  "$cmake" -S "$out/$1" -B "$out/$1/build" "-DOCTAVO_PLACE=$out/$1/build" "-DOCTAVO_ONLY=generic;$table" "-DCMAKE_CXX_FLAGS=${2:-}" >"$out/$1.log" 2>&1
  "$cmake" --build "$out/$1/build" --parallel "$(getconf _NPROCESSORS_ONLN)" --target octavo_native >>"$out/$1.log" 2>&1 || { cat "$out/$1.log" >&2; exit 1; }
  cp "$out/$1/build/liboctavo_native.so" "$out/$1.so"
}
for name in kept claimed unchunked fewrows; do
  mkdir -p "$out/$name"
  cp -Rpu "$native/CMakeLists.txt" "$native/cmake" "$native/include" "$out/$name/" # what is unchanged is not built again
  rm -rf "$out/$name/src"
  cp -Rp "$native/src" "$out/$name/src"
done
change "$out/unchunked/src/attention_view.inc" 'CHUNK = 512' 'CHUNK = 2048'
change "$out/unchunked/src/plan.h" 'kChunk = 512' 'kChunk = 2048'
change "$out/fewrows/src/gemm_amx.inc" '(!bf16 \&\& r1 - r0 <= FEW_ROWS)' 'r1 - r0 <= FEW_ROWS'
build kept
build claimed -DOCTAVO_ABLATE_CLAIMS
build unchunked
libraries="$out/kept.so $out/claimed.so $out/unchunked.so"
if [ "$table $format" = "amx bf16" ]; then
  build fewrows
  libraries="$libraries $out/fewrows.so"
fi
${CXX:-g++} -O2 -std=c++17 -I"$native/include" "$here/bench_step.cpp" -ldl -o "$out/bench_step"
processes=6 # of each, for where a build's memory happens to lie is worth a few percent of a prefill
: >"$out/$format.txt"
for process in $(seq $processes); do
  ${QUIET:-} "$out/bench_step" -r 3 -f "$format" $(for library in $libraries; do echo "$library:$table"; done) -- \
    1,1,128 1,1,2000 16,1,128 64,1,128 1,512,0 1,512,512 1,512,1024 >>"$out/$format.txt"
done
# medians over processes, and against the build that keeps all. Threads that claim panels make the same bits, or it is no step.
awk '
  / behind / {step = $0; sub(/:.*/, "", step); if (!(step in known)) {known[step] = 1; steps[++num_steps] = step}}
  /\.so:/ {
    name = $1; sub(/\.so.*/, "", name); bits = $NF
    if (name == "kept") kept = bits
    if (name == "claimed" && bits != kept) wrong = 1
    if (!(name in seen)) {seen[name] = 1; names[++num_names] = name}
    values[step, name, ++count[step, name]] = $2
  }
  function middle(step, name,   n, i, j, v) {
    n = count[step, name]
    for (i = 1; i <= n; i++) {
      v = values[step, name, i]
      for (j = i - 1; j > 0 && sorted[j] > v; j--) sorted[j + 1] = sorted[j]
      sorted[j + 1] = v
    }
    return (sorted[int((n + 1) / 2)] + sorted[int(n / 2) + 1]) / 2
  }
  END {
    for (s = 1; s <= num_steps; s++) {
      printf "%s:", steps[s]
      for (n = 1; n <= num_names; n++) {
        m = middle(steps[s], names[n])
        if (n == 1) {base = m; printf " %s %.3f ms", names[n], m}
        else printf "; %s %.3f (%+.1f%%)", names[n], m, 100 * (m / base - 1)
      }
      print ""
    }
    if (wrong) print "ablate: claimed panels gave other bits"
    exit wrong
  }' "$out/$format.txt"
