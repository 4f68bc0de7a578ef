// The op GatedAdd: a residual sum whose second part is gated.
#pragma once

#include "fused_rows.h"
#include "op.h"

namespace intaglio {

// Inputs x [B, ..., width], gate as Modulation takes it, and z with the shape of x; y = x + gate * z.
class GatedAddKernel {
   public:
    static const OpSignature kSignature;
    explicit GatedAddKernel(const Attributes& attributes);
    void compute(OpContext& context) const;
    static std::vector<SymbolicShape> infer_shapes(const std::vector<SymbolicShape>& inputs);

   private:
    RowKernels rows_;
};

}  // namespace intaglio
