#include "cpus.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "pool.h"
#ifdef __linux__
#include <sched.h>
#endif

namespace octavo {
namespace {

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

#ifdef __linux__
// The lowest CPU of the core that this one belongs to; itself where the system does not say.
int first_of_core(int cpu) {
  const std::string siblings = read_line("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
  return siblings.empty() ? cpu : atoi(siblings.c_str());
}
#endif

}  // namespace

std::vector<int> allowed_cpus() {
  std::vector<int> cpus, siblings, cores;
#ifdef __linux__
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(getpid(), sizeof set, &set) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET(cpu, &set)) continue;
    const int core = first_of_core(cpu);
    const bool taken = std::find(cores.begin(), cores.end(), core) != cores.end();
    (taken ? siblings : cpus).push_back(cpu);
    if (!taken) cores.push_back(core);
  }
  cpus.insert(cpus.end(), siblings.begin(), siblings.end());
#endif
  return cpus;
}

int available_cpus() {
  int count = static_cast<int>(allowed_cpus().size());
  if (count == 0) count = static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  const int quota = quota_cpus();
  return std::clamp(quota > 0 ? std::min(count, quota) : count, 1, Pool::kMaxThreads);
}

#ifdef __linux__
void pin_to(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

Bound::Bound(int cpu) {
  static_assert(sizeof(cpu_set_t) <= sizeof before_, "a mask must fit");
  cpu_set_t mine;
  if (cpu < 0 || pthread_getaffinity_np(pthread_self(), sizeof mine, &mine) != 0) return;
  if (!CPU_ISSET(cpu, &mine) || CPU_COUNT(&mine) == 1) return;
  memcpy(before_, &mine, sizeof mine);
  pin_to(cpu);
  moved_ = true;
}

Bound::~Bound() {
  if (moved_) pthread_setaffinity_np(pthread_self(), sizeof(cpu_set_t), reinterpret_cast<const cpu_set_t*>(before_));
}
#else
void pin_to(int) {}
Bound::Bound(int) {}
Bound::~Bound() {}
#endif

}  // namespace octavo
