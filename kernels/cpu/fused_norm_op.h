// The op AdaptiveLayerNorm: a layer norm without weights, scaled and shifted (https://arxiv.org/abs/2212.09748).
#pragma once

#include "fused_rows.h"
#include "op.h"

namespace intaglio {

// Inputs x [B, ..., width], scale and shift as Modulation takes them; y = norm(x) * (1 + scale) + shift, where norm(x) =
// (x - mean(x)) / sqrt(var(x) + epsilon) over the last axis. Attribute epsilon.
class AdaptiveLayerNormKernel {
   public:
    static const OpSignature kSignature;
    explicit AdaptiveLayerNormKernel(const Attributes& attributes);
    void compute(OpContext& context) const;
    static std::vector<SymbolicShape> infer_shapes(const std::vector<SymbolicShape>& inputs);

   private:
    RowKernels rows_;
    float epsilon_;
};

}  // namespace intaglio
