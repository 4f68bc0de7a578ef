// The op FusedGroupedQuantMatMul: GroupedQuantMatMul with its neighbours.
#pragma once

#include "grouped_quant_op.h"
#include "op.h"

namespace intaglio {

// Inputs x [..., in], norm_weight [in] or none, residual [..., out] or none, then codes, scales and offsets of each
// weight; outputs y [..., out] of each. Attributes bits, group_size and zero_point are those of all weights, `fast` as
// in GroupedQuantMatMul.
// - norm_weight: the products are those of x / sqrt(mean(x^2) + epsilon) * norm_weight (attribute epsilon).
// - residual: is added to y of the only weight.
// - attribute gated = 1: of two weights, the only output is silu(first y) * second y.
class FusedGroupedQuantMatMulKernel {
   public:
    static const OpSignature kSignature;
    explicit FusedGroupedQuantMatMulKernel(const Attributes& attributes);
    void compute(OpContext& context) const;
    // Each y has the dims of x but for the last, which is the first of its codes.
    static std::vector<SymbolicShape> infer_shapes(const std::vector<SymbolicShape>& inputs);

   private:
    GroupedQuantMatMul checked(const OpContext& context, const Tensor& x, std::size_t weight) const;

    InstructionSet instruction_set_;
    WeightFormat format_;
    float epsilon_;
    bool is_gated_, is_fast_;
    // Constant weights are checked once; empty where they are not constant, or do not fit.
    std::vector<GroupedQuantMatMul> constant_;
};

}  // namespace intaglio
