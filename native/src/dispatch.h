// Which kernel table runs: the best one that was built and that this CPU and its operating system support.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace octavo {

// Tables that can run here, best first. A table that exists but is never chosen by itself (amx) comes last.
std::vector<const Kernels*> usable_tables();
// The table of a name; with an empty one, of $OCTAVO_NATIVE_ISA, else the best. Null: `error` says what would work.
const Kernels* choose_table(const std::string& name, std::string* error);

}  // namespace octavo
