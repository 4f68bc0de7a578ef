// The op FusedConv: checks its inputs and chooses a kernel.
#pragma once

#include <memory>
#include <mutex>

#include "conv.h"
#include "op.h"

namespace intaglio {

// FusedConv(x, weight, bias, mean, variance, norm_weight, norm_bias, row_mask, residual) -> y as in conv.h, of which
// all but x and weight may be left out, the four of the norm together. Attributes: pad_top, pad_left, pad_bottom,
// pad_right (0 if missing; negative ones cut off), upsample (1 or 2; 1 if missing), epsilon, fast.
//
// `fast` (0 if missing) allows what conv.h says. The weight is a constant of the graph: a kernel may bring it into its
// own order at the first run and not read it again.
class FusedConvKernel {
   public:
    static const OpSignature kSignature;
    explicit FusedConvKernel(const Attributes& attributes);
    void compute(OpContext& context) const;
    static std::vector<SymbolicShape> infer_shapes(const std::vector<SymbolicShape>& inputs);

   private:
    struct State {
        std::mutex mutex;
        std::unique_ptr<ConvKernel> kernel;
    };
    Conv checked(const OpContext& context, Tensor* inputs) const;
    const ConvKernel& prepared(OpContext& context, const Conv& conv) const;

    InstructionSet instruction_set_;
    std::int64_t pad_top_, pad_left_, pad_bottom_, pad_right_, upsample_;
    float epsilon_;
    bool is_fast_;
    std::unique_ptr<State> state_;
};

}  // namespace intaglio
