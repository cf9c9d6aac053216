// The thread pool: the calling thread and n - 1 workers that all walk the same code, meeting at barriers. Each has a CPU of its
// own where there are enough; the caller is bound to its one for the length of a job only (OCTAVO_NATIVE_PIN=0: nobody is).
//
// A waiting thread spins for some 60 microseconds and then sleeps on a futex, so that an idle engine takes no CPU and a
// busy neighbour gets the core. One pool serves a process; engines take turns. A forked child makes a new one.
#pragma once
#include <stdint.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

using Job = void (*)(void* argument, int thread);

// Memory to have in the cache after a wait.
struct Ahead {
  const uint8_t *next = nullptr, *end = nullptr;
  void fetch(int lines);
};

// A word that threads wait on, alone on its cache line.
struct alignas(64) Signal {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  void set(uint32_t next);                                        // and wake who sleeps
  uint32_t wait(uint32_t seen, int spins);                        // until the value is another one; returns it
  void reach(uint32_t goal, int spins, Ahead* ahead);             // until the value, which only grows, is there
};

class Pool {
 public:
  static constexpr int kMaxThreads = 255;

  static Pool& shared();
  // Runs job(argument, 0 .. threads - 1), thread 0 on the caller; returns when all are done. Calls take turns.
  void run(int threads, Job job, void* argument);
  // All threads of the running job meet. Only from inside a job, by each thread with its number; `ahead` is fetched meanwhile.
  void barrier(int thread, Ahead* ahead = nullptr);

  Pool();
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

 private:
  static constexpr int kRounds = 8;  // 2^8 threads

  // What others tell a thread in each round of a barrier, and how many barriers it has passed.
  struct Seat {
    Signal told[kRounds];
    alignas(64) uint32_t passed = 0;
  };

  void work(int id);
  void grow(int threads);

  std::mutex turn_;
  std::vector<std::thread> workers_;
  std::vector<int> cpus_;  // of the threads; empty: they go where the system puts them
  std::unique_ptr<Seat[]> seats_{new Seat[kMaxThreads]};
  const int spins_, room_;     // pauses before a thread sleeps; threads that have a CPU each
  std::atomic<int> patience_;  // spins_, or none while there are more threads than CPUs: whom one waits for needs the CPU
  int active_ = 1;
  Job job_ = nullptr;
  void* argument_ = nullptr;
  uint32_t runs_ = 0, passed_ = 0;
  Signal start_;  // runs << 8 | threads
  std::atomic<bool> stop_{false};
};

}  // namespace octavo
