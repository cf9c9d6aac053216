// The thread pool: every thread of a job once, barriers that order plain memory, sleep and waking, changing numbers of threads,
// callers that take turns, CPUs. What the jobs write is not atomic: the thread sanitizer sees whether the pool orders it.
#ifdef __linux__
#include <sched.h>
#endif
#include <time.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "../src/cpus.h"
#include "../src/pool.h"
#include "check.h"

// Not under the thread sanitizer, which ends a process that forks beside threads, nor under qemu, whose child then fails an
// assertion of its own (7.2).
#if !defined(__SANITIZE_THREAD__) && !defined(OCTAVO_EMULATED)
#define OCTAVO_FORKS
#endif

#ifdef OCTAVO_FORKS
#include <sys/wait.h>
#include <unistd.h>
#endif

using namespace check;
using octavo::Pool;

namespace {

constexpr int kMost = 4;

void sleep_ms(long ms) {
  const timespec t{ms / 1000, ms % 1000 * 1'000'000};
  nanosleep(&t, nullptr);
}

struct Slot {
  alignas(64) int64_t value = 0;
};

// Threads add to what their neighbour left in the phase before: one wrong order, and the sums differ.
struct Rounds {
  Pool* pool;
  int threads, phases;
  int late;  // this thread sleeps before it meets the others, so that they sleep too
  Slot runs[kMost], slots[2][kMost];

  Rounds(Pool* of, int count, int times, int slow = -1) : pool(of), threads(count), phases(times), late(slow) {}

  static void job(void* argument, int thread) {
    auto& r = *static_cast<Rounds*>(argument);
    r.runs[thread].value++;
    for (int phase = 0; phase < r.phases; phase++) {
      const int64_t left = r.slots[phase & 1][(thread + 1) % r.threads].value;
      r.slots[(phase & 1) ^ 1][thread].value = left + thread + 1;
      if (thread == r.late) sleep_ms(1);
      r.pool->barrier(thread);
    }
  }
  // What slot `thread` holds after all phases, by one thread.
  int64_t expected(int thread) const {
    int64_t sum = 0;
    for (int phase = phases; phase > 0; phase--, thread = (thread + 1) % threads) sum += thread + 1;
    return sum;
  }
  bool right(int64_t times) const {
    bool ok = true;
    for (int t = 0; t < threads; t++) ok = ok && runs[t].value == times && slots[phases & 1][t].value == expected(t);
    for (int t = threads; t < kMost; t++) ok = ok && runs[t].value == 0;
    return ok;
  }
};

// Many short steps of changing numbers of threads: workers that are not asked must stay out.
void test_steps(Pool* pool) {
  Random random(1);
  for (int i = 0; i < 3000; i++) {
    Rounds rounds{pool, int(random.between(1, kMost)), int(random.below(6))};
    pool->run(rounds.threads, Rounds::job, &rounds);
    CHECK(rounds.right(1));
  }
}

// Longer than a waiting thread spins: workers sleep between jobs, and inside of them.
void test_sleep(Pool* pool) {
  for (int i = 0; i < 12; i++) {
    Rounds rounds{pool, 1 + i % kMost, 3, i % (1 + i % kMost)};
    pool->run(rounds.threads, Rounds::job, &rounds);
    CHECK(rounds.right(1));
    sleep_ms(2);
  }
}

void test_callers(Pool* pool) {
  Rounds rounds[3] = {{pool, 2, 4}, {pool, 4, 3}, {pool, 3, 5}};
  bool right[3] = {};
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; c++) {
    callers.emplace_back([&, c] {
      bool ok = true;
      for (int i = 0; i < 150; i++) {
        Rounds one{pool, rounds[c].threads, rounds[c].phases};
        pool->run(one.threads, Rounds::job, &one);
        ok = ok && one.right(1);
      }
      right[c] = ok;
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const bool ok : right) CHECK(ok);
}

void test_numbers_of_threads() {
  Pool pool;
  for (const int threads : {1, 0, -5, INT32_MIN}) {
    Rounds rounds{&pool, 1, 2};
    pool.run(threads, Rounds::job, &rounds);
    CHECK(rounds.right(1));
  }
}

// More threads than there are seats: as many as there are, once each.
void test_too_many() {
  static std::atomic<int> ran[Pool::kMaxThreads + 2];
  Pool pool;
  pool.run(1000, [](void*, int thread) { ran[std::min(thread, Pool::kMaxThreads + 1)]++; }, nullptr);
  for (int thread = 0; thread < Pool::kMaxThreads + 2; thread++) CHECK(ran[thread] == (thread < Pool::kMaxThreads));
}

// Pools end while their workers spin, sleep, or have never been asked twice.
void test_end() {
  for (int i = 0; i < 20; i++) {
    Pool pool;
    Rounds rounds{&pool, 1 + i % kMost, 2};
    if (i != 0) pool.run(rounds.threads, Rounds::job, &rounds);
    CHECK(i == 0 || rounds.right(1));
    if (i % 5 == 1) sleep_ms(2);
  }
}

void test_cpus() {
  const int cpus = octavo::available_cpus();
  CHECK(cpus >= 1 && cpus <= Pool::kMaxThreads && cpus <= int(std::thread::hardware_concurrency()));
}

#ifdef __linux__
// The only CPU that this thread may run on, or -1.
int own_cpu() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0 || CPU_COUNT(&set) != 1) return -1;
  int cpu = 0;
  while (!CPU_ISSET(cpu, &set)) cpu++;
  return cpu;
}

// Each thread of a job has a CPU of its own where there are enough; afterwards its caller may run where it might before.
void test_binding() {
  static int where[kMost];
  const auto note = [](void*, int thread) { where[thread] = own_cpu(); };
  for (const bool pinned : {true, false}) {
    if (octavo::available_cpus() < 2) return;
    setenv("OCTAVO_NATIVE_PIN", pinned ? "1" : "0", 1);
    Pool pool;
    pool.run(2, note, nullptr);
    CHECK(pinned ? where[0] >= 0 && where[1] >= 0 && where[0] != where[1] : where[0] < 0 && where[1] < 0);
    CHECK(own_cpu() < 0);
  }
  unsetenv("OCTAVO_NATIVE_PIN");
}
#endif

#ifdef OCTAVO_FORKS
void test_child() {
  for (int i = 0; i < 3; i++) {
    Rounds before{&Pool::shared(), kMost, 3}, after{&Pool::shared(), 3, 3};
    Pool::shared().run(kMost, Rounds::job, &before);
    CHECK(before.right(1));
    const pid_t child = fork();
    after.pool = &Pool::shared();
    after.pool->run(3, Rounds::job, &after);
    if (child == 0) _exit(after.right(1) ? 0 : 1);
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0 && after.right(1));
  }
}
#endif

}  // namespace

int main() {
#ifdef OCTAVO_FORKS
  test_child();
#endif
  test_steps(&Pool::shared());
  test_sleep(&Pool::shared());
  test_callers(&Pool::shared());
  test_numbers_of_threads();
  test_too_many();
  test_end();
  test_cpus();
#ifdef __linux__
  test_binding();
#endif
  return finish("test_pool");
}
