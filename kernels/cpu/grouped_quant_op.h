// The op GroupedQuantMatMul: checks its inputs and chooses a kernel.
#pragma once

#include "grouped_quant_matmul.h"
#include "op.h"

namespace intaglio {

// Attributes bits, group_size, zero_point of the weight.
struct WeightFormat {
    explicit WeightFormat(const Attributes& attributes);
    std::int64_t bits, group_size, zero_point;
};

// The product of x [..., K] and a weight, ready but for y. Throws Mismatch that names what does not fit.
GroupedQuantMatMul checked_product(const WeightFormat& format, const Tensor& x, const Tensor& codes,
                                   const Tensor& scales, const Tensor& offsets);

// The attribute `fast`, 0 if missing, asks for the accuracy of fast_matmul.h.
class GroupedQuantMatMulKernel {
   public:
    static const OpSignature kSignature;
    explicit GroupedQuantMatMulKernel(const Attributes& attributes);
    void compute(OpContext& context) const;
    // y has the dims of x but for the last, which is the first of codes.
    static std::vector<SymbolicShape> infer_shapes(const std::vector<SymbolicShape>& inputs);

   private:
    InstructionSet instruction_set_;
    WeightFormat format_;
    bool is_fast_;
};

}  // namespace intaglio
