// The op SwiGLU: the gate of a feed-forward layer, read from parts of wider rows and written behind others.
#pragma once

#include "fused_rows.h"
#include "op.h"

namespace intaglio {

// Inputs rows [..., any] and, optionally, before [..., P] with as many rows. Of each row, `width` numbers from
// `gate_offset` and from `up_offset` on (attributes) make y [..., P + width]: the row of `before`, then
// silu(gate) * up (https://arxiv.org/abs/2002.05202).
class SwiGLUKernel {
   public:
    static const OpSignature kSignature;
    explicit SwiGLUKernel(const Attributes& attributes);
    void compute(OpContext& context) const;
    // The width is an attribute, which is not to be had here: the shape stands in the graph.
    static std::vector<SymbolicShape> infer_shapes(const std::vector<SymbolicShape>&) { return {}; }

   private:
    RowKernels rows_;
    std::int64_t width_, gate_offset_, up_offset_;
};

}  // namespace intaglio
