// What this machine gives, measured with the engine's own threads: benchmarks are read against it. Nothing here computes.
#include "measure.h"

#include <string.h>
#include <time.h>

#include <algorithm>
#include <vector>

#include "arena.h"
#include "pool.h"

namespace octavo {
namespace {

double seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

double least(const std::vector<double>& values) { return *std::min_element(values.begin(), values.end()); }

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Runs `part(thread)` on all threads `rounds` times, each between two barriers, and keeps their times.
template <typename Part>
struct Timed {
  const Part* part;
  int rounds;
  std::vector<double> took;

  static void main(void* argument, int thread) {
    Timed& self = *static_cast<Timed*>(argument);
    Pool& pool = Pool::shared();
    for (int round = 0; round <= self.rounds; round++) {  // the first one warms up
      pool.barrier(thread);
      const double begin = thread == 0 ? seconds() : 0;
      (*self.part)(thread);
      pool.barrier(thread);
      if (thread == 0 && round > 0) self.took.push_back(seconds() - begin);
    }
  }
};

template <typename Part>
std::vector<double> times_on(int threads, int rounds, const Part& part) {
  Timed<Part> timed{&part, rounds, {}};
  timed.took.reserve(static_cast<size_t>(rounds));
  Pool::shared().run(threads, Timed<Part>::main, &timed);
  return timed.took;
}

template <typename Part>
double time_on(int threads, int rounds, const Part& part) {
  return std::max(median(times_on(threads, rounds, part)), 1e-9);
}

}  // namespace

double measure_read(const Kernels& kernels, int threads, int64_t bytes, int rounds) {
  const int64_t part = std::max<int64_t>(bytes / threads / 4096 * 4096, 4096);
  Arena memory(int64_t{2} << 20);
  uint8_t* base = memory.take(part * threads);
  const auto fill = [&](int thread) { memset(base + thread * part, thread + 1, static_cast<size_t>(part)); };
  time_on(threads, 1, fill);
  const double took = time_on(threads, rounds, [&](int thread) { kernels.read_bytes(base + thread * part, part); });
  return static_cast<double>(part * threads) / took;
}

double measure_dots(const Kernels& kernels, int threads, int kind, int64_t repeats, int rounds) {
  const double operations = kernels.dots(kind, 1) * static_cast<double>(repeats);
  if (operations == 0) return 0;
  return operations * threads / std::max(least(times_on(threads, rounds, [&](int) { kernels.dots(kind, repeats); })), 1e-9);
}

double measure_barrier(int threads, int64_t repeats, int rounds) {
  if (threads == 1) return 0;
  const auto meet = [&](int thread) {
    for (int64_t i = 0; i < repeats; i++) Pool::shared().barrier(thread);
  };
  return time_on(threads, rounds, meet) / static_cast<double>(repeats);
}

}  // namespace octavo
