// y = x times the transpose of a grouped-quantized weight, in float32 throughout.
//
// The weight stays packed; only panels of it are decoded at a time. Dequantization is bit-equal to
// intaglio.kernels.grouped_quant.dequantize. There are two regimes, few rows of x and many, and in each
// the order in which the products of one output are added depends on `in` alone: a result is the same
// for every number of threads and, within a regime, of rows. With few rows nothing is fused, and a result
// is the same for every instruction set too. Legend: M rows of x, N = out, K = in.
#pragma once

#include <cstddef>
#include <cstdint>

#include "instruction_set.h"
#include "parallel_work.h"

namespace intaglio {

enum class ScaleType { kFloat16, kBfloat16, kFloat32 };

// A product to compute. Nothing needs alignment beyond a byte: weights may be mapped from a file.
struct GroupedQuantMatMul {
    const void* x;               // float32 [M, K]
    const std::uint8_t* codes;   // [N, K * bits / 8], the first input in the lowest bits
    const std::uint8_t* scales;  // scale_type [N, K / group_size]
    const std::uint8_t* offsets; // scale_type, as scales or one value
    float* y;                    // [M, N]
    std::size_t M, N, K;
    std::size_t group_size;      // divides K; group_size * bits is a multiple of 8
    int bits;                    // 2, 4 or 8
    int zero_point;
    ScaleType scale_type;
    bool offset_per_group;
};

// Rows [row, row_end) and columns [column, column_end) of y.
struct OutputBlock {
    std::size_t row, row_end, column, column_end;
};

// Few rows: each writes a block of y. Only those that the compiler could build are defined.
void compute_block_portable(const GroupedQuantMatMul& product, const OutputBlock& block) noexcept;
void compute_block_avx2(const GroupedQuantMatMul& product, const OutputBlock& block) noexcept;
void compute_block_avx512(const GroupedQuantMatMul& product, const OutputBlock& block) noexcept;

// Many rows: a block is at most kPanelColumns wide, and all its rows meet a decoded panel of
// kPanelColumns columns of y and kPanelInputs inputs.
constexpr std::size_t kPanelColumns = 192, kPanelInputs = 512;

// Each needs kPanelColumns * kPanelInputs floats at `panel`, aligned to 64 bytes.
void compute_panel_portable(const GroupedQuantMatMul& product, const OutputBlock& block,
                            float* panel) noexcept;
void compute_panel_avx2(const GroupedQuantMatMul& product, const OutputBlock& block, float* panel) noexcept;
void compute_panel_avx512(const GroupedQuantMatMul& product, const OutputBlock& block, float* panel) noexcept;

// A product cut into parts that may be computed in any order and at the same time.
class Partition final : public ParallelWork {
   public:
    // The machine must have `set`.
    Partition(const GroupedQuantMatMul& product, InstructionSet set);

    std::size_t parts(std::size_t) const override { return row_parts_ * column_parts_; }
    bool is_small() const override { return is_small_; }
    void compute(std::size_t phase, std::size_t part, std::byte* scratch) const noexcept override;

   private:
    const GroupedQuantMatMul& product_;
    InstructionSet set_;
    bool has_many_rows_;
    std::size_t rows_, columns_, row_parts_, column_parts_;
    bool is_small_;
};

}  // namespace intaglio
