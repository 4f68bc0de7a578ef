// The accuracy `fast` (fast_matmul.h) for many rows of x on ARM, with dot products or products of 8-bit matrices.
// Activations are quantized once; each part unpacks some columns of the weight to bytes, which stay in the
// second-level cache while all rows of x meet them. Legend: M rows of x, N = out, K = in.
#pragma once

#include <memory>

#include "grouped_quant_matmul.h"

namespace intaglio {

// Rows of x and columns of y that meet in registers.
constexpr std::size_t kNeonTile = 8;

// What the arithmetic, compiled once for each of the two instruction sets, offers.
struct FastNeonKernel {
    // Bytes of kNeonTile rows of x once they are quantized, and of a column of the weight once it is unpacked, both
    // multiples of 64.
    std::size_t (*rows_bytes)(const GroupedQuantMatMul& product);
    std::size_t (*column_bytes)(const GroupedQuantMatMul& product);
    // kNeonTile rows of x from `row` on.
    void (*quantize)(const GroupedQuantMatMul& product, std::size_t row, std::byte* activations);
    // Columns [column, column_end) of y. `activations` holds all rows; `panel` has room for the columns, in whole
    // tiles.
    void (*multiply)(const GroupedQuantMatMul& product, const std::byte* activations, std::size_t column,
                     std::size_t column_end, std::byte* panel);
};

// Only those that the compiler could build are defined.
FastNeonKernel fast_neon_neon() noexcept;
FastNeonKernel fast_neon_neon_i8mm() noexcept;

// Takes every format that has_fast_matmul (fast_matmul.h) knows, and any number of rows; null where `set` is neither
// kNeon nor kNeonI8mm, or the compiler could not build it. The product must outlive the work, and the machine must
// have `set`.
std::unique_ptr<ParallelWork> make_fast_neon(const GroupedQuantMatMul& product, InstructionSet set);

}  // namespace intaglio
