// Products of one x with several weights as one work, with a norm before them and a gate or a sum after them. Nothing
// of what comes between is handed back, and the threads meet once for all products.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "fused_rows.h"
#include "grouped_quant_matmul.h"
#include "parallel_work.h"

namespace intaglio {

// All products have the same x, M and K. With a gate there are two of one N, and y of the second is not needed.
struct FusedMatMul {
    std::vector<GroupedQuantMatMul> products;
    const float* norm_weight = nullptr;  // [K]: x is divided by its root mean square and multiplied by this
    float epsilon = 0;
    const float* residual = nullptr;  // [M, N]: added to y of the only product
    bool is_gated = false;            // y of the first = silu(first) * second
    bool is_fast = false;             // as fast_matmul.h says, where it takes the product
};

class FusedMatMulWork final : public ParallelWork {
   public:
    FusedMatMulWork(FusedMatMul fused, InstructionSet set);

    std::size_t phases() const override { return first_phase_ + product_phases_ + (has_last_ ? 1 : 0); }
    std::size_t parts(std::size_t phase) const override;
    bool is_small() const override { return is_small_; }
    std::size_t scratch_bytes() const override { return scratch_bytes_; }
    void compute(std::size_t phase, std::size_t part, std::byte* scratch) const noexcept override;

   private:
    FusedMatMul fused_;
    const float* x_;  // before the norm
    RowKernels rows_;
    std::vector<std::unique_ptr<ParallelWork>> works_;
    std::vector<std::size_t> scratch_offsets_;
    std::size_t first_phase_, product_phases_ = 0, scratch_bytes_ = 0;
    bool has_last_, is_small_ = true;
};

}  // namespace intaglio
