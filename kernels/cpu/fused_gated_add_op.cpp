#include "fused_gated_add_op.h"

#include "fused_modulation.h"
#include "fused_row_work.h"

namespace intaglio {
namespace {

constexpr OpSlot kInputs[] = {{ort::ElementType::kFloat}, {ort::ElementType::kFloat}, {ort::ElementType::kFloat}};
constexpr OpSlot kOutputs[] = {{ort::ElementType::kFloat}};

}  // namespace

const OpSignature GatedAddKernel::kSignature = {"GatedAdd", kInputs, 3, kOutputs, 1};

GatedAddKernel::GatedAddKernel(const Attributes&) : rows_(row_kernels(chosen_instruction_set())) {}

void GatedAddKernel::compute(OpContext& context) const {
    const Tensor x = context.input(0), z = context.input(2);
    check_rows("x", x);
    check_rows("z", z);
    if (z.dims != x.dims) throw Mismatch("z has shape " + text(z.dims) + ", expected that of x, " + text(x.dims));
    const Modulation gate("gate", context.input(1), x);
    float* y = static_cast<float*>(context.output(0, x.dims).data);
    const std::size_t width = row_width(x);
    context.run(RowWork(row_count(x), width, [&](std::size_t row) {
        const std::size_t at = row * width;
        rows_.gated_add(x.as<float>() + at, gate.of_row(row), z.as<float>() + at, width, y + at);
    }));
}

std::vector<SymbolicShape> GatedAddKernel::infer_shapes(const std::vector<SymbolicShape>& inputs) {
    if (inputs.empty()) return {};
    return {inputs[0]};
}

}  // namespace intaglio
