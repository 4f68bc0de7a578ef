#include "fused_norm_op.h"

#include "fused_modulation.h"
#include "fused_row_work.h"

namespace intaglio {
namespace {

constexpr OpSlot kInputs[] = {{ort::ElementType::kFloat}, {ort::ElementType::kFloat}, {ort::ElementType::kFloat}};
constexpr OpSlot kOutputs[] = {{ort::ElementType::kFloat}};

}  // namespace

const OpSignature AdaptiveLayerNormKernel::kSignature = {"AdaptiveLayerNorm", kInputs, 3, kOutputs, 1};

AdaptiveLayerNormKernel::AdaptiveLayerNormKernel(const Attributes& attributes)
    : rows_(row_kernels(chosen_instruction_set())), epsilon_(attributes.real("epsilon", 1e-5f)) {}

void AdaptiveLayerNormKernel::compute(OpContext& context) const {
    const Tensor x = context.input(0);
    check_rows("x", x);
    const Modulation scale("scale", context.input(1), x), shift("shift", context.input(2), x);
    float* y = static_cast<float*>(context.output(0, x.dims).data);
    const std::size_t width = row_width(x);
    context.run(RowWork(row_count(x), width, [&](std::size_t row) {
        const std::size_t at = row * width;
        rows_.adaptive_layer_norm(x.as<float>() + at, scale.of_row(row), shift.of_row(row), epsilon_, width, y + at);
    }));
}

std::vector<SymbolicShape> AdaptiveLayerNormKernel::infer_shapes(const std::vector<SymbolicShape>& inputs) {
    if (inputs.empty()) return {};
    return {inputs[0]};
}

}  // namespace intaglio
