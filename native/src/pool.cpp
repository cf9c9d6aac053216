#include "pool.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "cpus.h"
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace octavo {
namespace {

constexpr int64_t kSpinNanoseconds = 60'000;  // longer waits give the core away: a neighbour may need it
constexpr int kLinesAPause = 8;  // about what one core reads meanwhile

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

struct Holder {
  std::mutex guard;
  Pool* pool = nullptr;
};
Holder holder;

// The child has none of the parent's threads, and perhaps a lock that nobody will open.
void forget_pool_in_child() { new (&holder) Holder; }

}  // namespace

void Ahead::fetch(int lines) {
  for (int i = 0; i < lines && next < end; i++, next += 64) __builtin_prefetch(next, 0, 2);
}

void Signal::set(uint32_t next) {
  value.store(next, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) wake_all(value);
}

uint32_t Signal::wait(uint32_t seen, int spins) {
  for (int i = 0; i < spins; i++) {
    const uint32_t now = value.load(std::memory_order_acquire);
    if (now != seen) return now;
    pause_cpu();
  }
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  uint32_t now;
  while ((now = value.load(std::memory_order_seq_cst)) == seen) sleep_while(value, seen);
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return now;
}

void Signal::reach(uint32_t goal, int spins, Ahead* ahead) {
  const auto there = [goal](uint32_t now) { return static_cast<int32_t>(now - goal) >= 0; };
  for (int i = 0; i < spins; i++) {
    if (there(value.load(std::memory_order_acquire))) return;
    if (ahead != nullptr) ahead->fetch(kLinesAPause);
    pause_cpu();
  }
  for (uint32_t now = value.load(std::memory_order_acquire); !there(now); now = value.load(std::memory_order_acquire)) wait(now, 0);
}

Pool& Pool::shared() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool_in_child);
  (void)registered;
  const std::lock_guard<std::mutex> lock(holder.guard);
  if (holder.pool == nullptr) holder.pool = new Pool;  // lives as long as the process: workers may outlast statics
  return *holder.pool;
}

Pool::Pool() : spins_(count_spins()), room_(available_cpus()), patience_(spins_) {
  const char* wish = getenv("OCTAVO_NATIVE_PIN");
  if (wish == nullptr || strcmp(wish, "0") != 0) cpus_ = allowed_cpus();
}

Pool::~Pool() {
  stop_.store(true);
  start_.set(++runs_ << 8);
  for (std::thread& worker : workers_) worker.join();
}

void Pool::grow(int threads) {
  while (static_cast<int>(workers_.size()) + 1 < threads) {
    const int id = static_cast<int>(workers_.size()) + 1;
    const int cpu = cpus_.empty() ? -1 : cpus_[static_cast<size_t>(id) % cpus_.size()];
    workers_.emplace_back([this, id, cpu] {
      if (cpu >= 0) pin_to(cpu);
      work(id);
    });
  }
}

void Pool::run(int threads, Job job, void* argument) {
  const std::lock_guard<std::mutex> lock(turn_);
  threads = std::clamp(threads, 1, kMaxThreads);
  if (threads == 1) {
    active_ = 1;
    job(argument, 0);
    return;
  }
  grow(threads);
  const Bound here(threads <= room_ && !cpus_.empty() ? cpus_[0] : -1);
  active_ = threads;
  patience_.store(threads > room_ ? 0 : spins_, std::memory_order_relaxed);
  job_ = job;
  argument_ = argument;
  seats_[0].passed = passed_;
  start_.set(++runs_ << 8 | static_cast<uint32_t>(threads));
  job(argument, 0);
  barrier(0);
  passed_ = seats_[0].passed;
}

void Pool::work(int id) {
  uint32_t seen = 0;
  for (;;) {
    seen = start_.wait(seen, patience_.load(std::memory_order_relaxed));
    if (stop_.load()) return;
    // who is not in this job must not look at it: the next one may be being set up
    if (id >= static_cast<int>(seen & 0xff)) continue;
    seats_[static_cast<size_t>(id)].passed = passed_;
    job_(argument_, id);
    barrier(id);
  }
}

// In round r each tells the one 2^r seats further on, which has then heard from 2^(r+1) of them: Hensgen, Finkel and Manber,
// "Two algorithms for barrier synchronization" (1988). Two threads pass one line each way.
void Pool::barrier(int thread, Ahead* ahead) {
  const int all = active_, spins = patience_.load(std::memory_order_relaxed);
  if (all == 1) return;
  Seat& mine = seats_[static_cast<size_t>(thread)];
  const uint32_t goal = ++mine.passed;
  for (int round = 0, step = 1; step < all; round++, step *= 2) {
    seats_[static_cast<size_t>((thread + step) % all)].told[round].set(goal);
    mine.told[round].reach(goal, spins, ahead);
  }
}

}  // namespace octavo
