// The CPUs that this process may use, and threads on them.
#pragma once
#include <vector>

namespace octavo {

// Of the affinity mask: first one of each core, then their siblings.
std::vector<int> allowed_cpus();
// Their number, at most what the control group's quota allows; at least 1.
int available_cpus();
// The calling thread runs on this CPU alone from now on.
void pin_to(int cpu);

// The calling thread on one CPU for as long as this lives; then it may run where it might before. Does nothing for cpu < 0,
// for a thread that may not run there, and for one that somebody has bound to a single CPU already.
class Bound {
 public:
  explicit Bound(int cpu);
  ~Bound();
  Bound(const Bound&) = delete;
  Bound& operator=(const Bound&) = delete;

 private:
  bool moved_ = false;
  alignas(8) unsigned char before_[128];  // a cpu_set_t
};

}  // namespace octavo
