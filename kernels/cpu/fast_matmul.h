// The accuracy `fast` of GroupedQuantMatMul: activations are rounded to 8 bits with one scale per row and group
// (scale = the group's largest magnitude / 127, values rounded half to even), products of integers are added
// exactly within a group, and the groups in float32. A group with a non-finite activation makes its row NaN.
// Groups of more than 512 inputs, which are whole rows, are taken in the pieces of activation_group: with one scale for
// 2560 normal activations the relative L2 of y would be 8.2e-3, with pieces it is below 8e-3.
#pragma once

#include <memory>

#include "grouped_quant_matmul.h"

namespace intaglio {

// Whether there are fast kernels for weights of this format: groups of a multiple of 16 inputs, or whole rows, that are
// short enough for their dot products to fit 32 bits. All widths of codes, types of scales and instruction sets have
// them.
constexpr std::size_t kMaxFastGroup = std::size_t{1} << 16;
bool has_fast_matmul(std::size_t group_size, std::size_t width);

// The inputs that share a scale of activations: the group's own, or of a long group the longest of its equal pieces
// that have at most 512 inputs and a multiple of 16; the group if there are none.
std::size_t activation_group(std::size_t group_size);

// From this many rows of x on, unpacking a panel of the weight saves more than it costs.
constexpr std::size_t kFastManyRows = 8;

// The product in work that the threads share; null where no such kernel takes it, and the exact one must: the format is
// another, or all groups share an offset that is not zero.
std::unique_ptr<ParallelWork> make_fast_matmul(const GroupedQuantMatMul& product, InstructionSet set);

}  // namespace intaglio
