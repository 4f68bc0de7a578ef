// The op GroupedQuantGather: rows of a packed table, such as an embedding's, dequantized.
#pragma once

#include "grouped_quant_op.h"
#include "op.h"

namespace intaglio {

// Inputs indices int64 [...], and codes, scales and offsets of a table [rows, width]; output y [..., width], bit-equal
// to intaglio.kernels.grouped_quant.dequantize. Negative indices count from the end. Attributes bits, group_size and
// zero_point.
class GroupedQuantGatherKernel {
   public:
    static const OpSignature kSignature;
    explicit GroupedQuantGatherKernel(const Attributes& attributes);
    void compute(OpContext& context) const;
    // The width is not to be had from shapes alone.
    static std::vector<SymbolicShape> infer_shapes(const std::vector<SymbolicShape>&) { return {}; }

   private:
    WeightFormat format_;
};

}  // namespace intaglio
