// The op HeadRMSNorm: the norm of queries or keys, read from parts of wider rows, of one sequence or several.
#pragma once

#include "fused_rows.h"
#include "op.h"

namespace intaglio {

// Inputs are pairs of rows [B, S, any] and weight [head_size]. Of each row, `heads` times `head_size` numbers from
// `offset` on (attributes) become x / sqrt(mean(x^2) + epsilon) * weight, head by head. Output [B, S of the first pair +
// S of the second + ..., heads, head_size]: the sequences one after another.
class HeadRMSNormKernel {
   public:
    static const OpSignature kSignature;
    explicit HeadRMSNormKernel(const Attributes& attributes);
    void compute(OpContext& context) const;
    // Heads are attributes, which are not to be had here: the shape stands in the graph.
    static std::vector<SymbolicShape> infer_shapes(const std::vector<SymbolicShape>&) { return {}; }

   private:
    RowKernels rows_;
    std::int64_t heads_, head_size_, offset_;
    float epsilon_;
};

}  // namespace intaglio
