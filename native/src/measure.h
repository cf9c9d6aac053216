// What this machine gives: the rates that benchmarks are read against. Each is the median of `rounds` on `threads` threads
// of the pool, of dots the best: a peak is what there is when nobody else takes some of it.
#pragma once
#include <stdint.h>

#include "kernels.h"

namespace octavo {

enum DotKind : int32_t { kDotInt8 = 0, kDotBf16 = 1, kDotFp32 = 2, kDotKinds = 3 };

double measure_read(const Kernels& kernels, int threads, int64_t bytes, int rounds);                // bytes a second
double measure_dots(const Kernels& kernels, int threads, int kind, int64_t repeats, int rounds);    // operations a second; 0: unknown
double measure_barrier(int threads, int64_t repeats, int rounds);                                   // seconds; one thread: 0

}  // namespace octavo
