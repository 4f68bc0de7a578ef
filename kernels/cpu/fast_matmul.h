// The accuracy `fast` of GroupedQuantMatMul: activations are rounded to 8 bits with one scale per row and group
// (scale = the group's largest magnitude / 127, values rounded half to even), products of integers are added
// exactly within a group, and the groups in float32. A group with a non-finite activation makes its row NaN.
#pragma once

#include <memory>

#include "grouped_quant_matmul.h"

namespace intaglio {

// Whether there is a fast kernel for weights of this format: the same on every machine.
bool has_fast_matmul(std::int64_t bits, std::int64_t group_size, std::int64_t width);

// The product in work that the threads share; null where no such kernel takes it, and the exact one must.
std::unique_ptr<ParallelWork> make_fast_matmul(const GroupedQuantMatMul& product, InstructionSet set);

}  // namespace intaglio
