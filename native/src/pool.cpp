#include "pool.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <string>
#ifdef __linux__
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#endif

namespace octavo {
namespace {

constexpr int64_t kSpinNanoseconds = 60'000;  // longer waits give the core away: a neighbour may need it

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

int64_t nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

// How many pauses kSpinNanoseconds are: a pause takes 15 to 150 cycles, depending on the CPU.
int count_spins() {
  constexpr int kTrial = 512;
  const int64_t begin = nanoseconds();
  for (int i = 0; i < kTrial; i++) pause_cpu();
  const int64_t took = std::max<int64_t>(nanoseconds() - begin, 1);
  return static_cast<int>(std::clamp<int64_t>(kSpinNanoseconds * kTrial / took, 128, 8192));
}

void sleep_while(const std::atomic<uint32_t>& word, uint32_t seen) {
#ifdef __linux__
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
  const timespec t{0, 50'000};
  if (word.load() == seen) nanosleep(&t, nullptr);
#endif
}

void wake_all(const std::atomic<uint32_t>& word) {
#ifdef __linux__
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

// CPUs that this process may use, ascending.
std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
#ifdef __linux__
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(getpid(), sizeof set, &set) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
    }
  }
#endif
  return cpus;
}

void pin_to(int cpu) {
#ifdef __linux__
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
  (void)cpu;
#endif
}

std::string read_line(const std::string& path) {
  char text[256] = "";
  if (FILE* file = fopen(path.c_str(), "re")) {
    if (fgets(text, sizeof text, file) == nullptr) text[0] = 0;
    fclose(file);
  }
  return text;
}

// Whole CPUs of the control group's quota, rounded up; 0: no quota.
int quota_cpus() {
  long quota = 0, period = 0;
  char first[64] = "";
  if (sscanf(read_line("/sys/fs/cgroup/cpu.max").c_str(), "%63s %ld", first, &period) == 2 && strcmp(first, "max") != 0) {
    quota = atol(first);
  } else {
    quota = atol(read_line("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").c_str());
    period = atol(read_line("/sys/fs/cgroup/cpu/cpu.cfs_period_us").c_str());
  }
  return quota > 0 && period > 0 ? static_cast<int>((quota + period - 1) / period) : 0;
}

struct Holder {
  std::mutex guard;
  Pool* pool = nullptr;
};
Holder holder;

// The child has none of the parent's threads, and perhaps a lock that nobody will open.
void forget_pool_in_child() { new (&holder) Holder; }

}  // namespace

int available_cpus() {
  int count = static_cast<int>(allowed_cpus().size());
  if (count == 0) count = static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  const int quota = quota_cpus();
  return std::clamp(quota > 0 ? std::min(count, quota) : count, 1, Pool::kMaxThreads);
}

void Signal::set(uint32_t next) {
  value.store(next, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) wake_all(value);
}

uint32_t Signal::wait(uint32_t seen, int spins) const {
  auto& self = const_cast<Signal&>(*this);
  for (int i = 0; i < spins; i++) {
    const uint32_t now = value.load(std::memory_order_acquire);
    if (now != seen) return now;
    pause_cpu();
  }
  self.sleepers.fetch_add(1, std::memory_order_seq_cst);
  uint32_t now;
  while ((now = value.load(std::memory_order_seq_cst)) == seen) sleep_while(value, seen);
  self.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return now;
}

Pool& Pool::shared() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool_in_child);
  (void)registered;
  const std::lock_guard<std::mutex> lock(holder.guard);
  if (holder.pool == nullptr) holder.pool = new Pool;  // lives as long as the process: workers may outlast statics
  return *holder.pool;
}

Pool::Pool() : spins_(count_spins()), cpus_(available_cpus()), patience_(spins_) {}

Pool::~Pool() {
  stop_.store(true);
  start_.set(++runs_ << 8);
  for (std::thread& worker : workers_) worker.join();
}

void Pool::grow(int threads) {
  const std::vector<int> cpus = allowed_cpus();
  while (static_cast<int>(workers_.size()) + 1 < threads) {
    const int id = static_cast<int>(workers_.size()) + 1;
    const int cpu = cpus.empty() ? -1 : cpus[static_cast<size_t>(id) % cpus.size()];
    workers_.emplace_back([this, id, cpu] {
      if (cpu >= 0) pin_to(cpu);
      work(id);
    });
  }
}

void Pool::run(int threads, Job job, void* argument) {
  const std::lock_guard<std::mutex> lock(turn_);
  threads = std::clamp(threads, 1, kMaxThreads);
  grow(threads);
  active_ = threads;
  patience_.store(threads > cpus_ ? 0 : spins_, std::memory_order_relaxed);
  job_ = job;
  argument_ = argument;
  if (threads > 1) start_.set(++runs_ << 8 | static_cast<uint32_t>(threads));
  job(argument, 0);
  barrier();
}

void Pool::work(int id) {
  uint32_t seen = 0;
  for (;;) {
    seen = start_.wait(seen, patience_.load(std::memory_order_relaxed));
    if (stop_.load()) return;
    // who is not in this job must not look at it: the next one may be being set up
    if (id >= static_cast<int>(seen & 0xff)) continue;
    job_(argument_, id);
    barrier();
  }
}

void Pool::barrier() {
  if (active_ == 1) return;
  const uint32_t generation = meet_.value.load(std::memory_order_relaxed);
  const uint32_t all = static_cast<uint32_t>(active_);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == all) {
    arrived_.store(0, std::memory_order_relaxed);
    meet_.set(generation + 1);
  } else {
    meet_.wait(generation, patience_.load(std::memory_order_relaxed));
  }
}

}  // namespace octavo
