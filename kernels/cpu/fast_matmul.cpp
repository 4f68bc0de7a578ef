#include "fast_matmul.h"

namespace intaglio {

bool has_fast_matmul(std::int64_t, std::int64_t, std::int64_t) { return false; }

std::unique_ptr<ParallelWork> make_fast_matmul(const GroupedQuantMatMul&, InstructionSet) { return nullptr; }

}  // namespace intaglio
