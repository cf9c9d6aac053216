// The thread pool: the calling thread and n - 1 pinned workers that all walk the same code, meeting at barriers.
//
// A waiting thread spins for some 60 microseconds and then sleeps on a futex, so that an idle engine takes no CPU and a
// busy neighbour gets the core. One pool serves a process; engines take turns. A forked child makes a new one.
#pragma once
#include <stdint.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

using Job = void (*)(void* argument, int thread);

// A word that threads wait on, alone on its cache line.
struct alignas(64) Signal {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  void set(uint32_t next);                        // and wake who sleeps
  uint32_t wait(uint32_t seen, int spins) const;  // until the value is another one; returns it
};

class Pool {
 public:
  static constexpr int kMaxThreads = 255;

  static Pool& shared();
  // Runs job(argument, 0 .. threads - 1), thread 0 on the caller; returns when all are done. Calls take turns.
  void run(int threads, Job job, void* argument);
  // All threads of the running job meet. Only from inside a job.
  void barrier();

  Pool();
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

 private:
  void work(int id);
  void grow(int threads);

  std::mutex turn_;
  std::vector<std::thread> workers_;
  const int spins_, cpus_;
  std::atomic<int> patience_;  // spins_, or none while there are more threads than CPUs: whom one waits for needs the CPU
  int active_ = 1;
  Job job_ = nullptr;
  void* argument_ = nullptr;
  uint32_t runs_ = 0;
  Signal start_;  // runs << 8 | threads
  Signal meet_;   // generation of the barrier
  alignas(64) std::atomic<uint32_t> arrived_{0};
  std::atomic<bool> stop_{false};
};

int available_cpus();  // of the affinity mask, at most what the control group's quota allows; at least 1

}  // namespace octavo
