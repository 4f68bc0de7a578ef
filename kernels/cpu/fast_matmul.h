// The accuracy `fast` of GroupedQuantMatMul: activations are rounded to 8 bits with one scale per row and group
// (scale = the group's largest magnitude / 127, values rounded half to even), products of integers are added
// exactly within a group, and the groups in float32. A group with a non-finite activation makes its row NaN.
// On normal activations the relative L2 of y is below 8e-3 for groups of up to 256 inputs; whole rows, with one scale
// for all, come to 8.2e-3 at 2560 inputs.
#pragma once

#include <memory>

#include "grouped_quant_matmul.h"

namespace intaglio {

// Whether there are fast kernels for weights of this format: groups of a multiple of 16 inputs, or whole rows, that are
// short enough for their dot products to fit 32 bits. All widths of codes, types of scales and instruction sets have
// them.
constexpr std::size_t kMaxFastGroup = std::size_t{1} << 16;
bool has_fast_matmul(std::size_t group_size, std::size_t width);

// From this many rows of x on, unpacking a panel of the weight saves more than it costs.
constexpr std::size_t kFastManyRows = 8;

// The product in work that the threads share; null where no such kernel takes it, and the exact one must: the format is
// another, or all groups share an offset that is not zero.
std::unique_ptr<ParallelWork> make_fast_matmul(const GroupedQuantMatMul& product, InstructionSet set);

}  // namespace intaglio
