#include "fused_swiglu_op.h"

#include <algorithm>
#include <cstring>

#include "fused_modulation.h"
#include "fused_row_work.h"

namespace intaglio {
namespace {

constexpr OpSlot kInputs[] = {{ort::ElementType::kFloat}, {ort::ElementType::kFloat, OpSlot::kOptional}};
constexpr OpSlot kOutputs[] = {{ort::ElementType::kFloat}};

}  // namespace

const OpSignature SwiGLUKernel::kSignature = {"SwiGLU", kInputs, 2, kOutputs, 1};

SwiGLUKernel::SwiGLUKernel(const Attributes& attributes)
    : rows_(row_kernels(chosen_instruction_set())),
      width_(attributes.integer("width")),
      gate_offset_(attributes.integer("gate_offset")),
      up_offset_(attributes.integer("up_offset")) {
    if (width_ < 1 || gate_offset_ < 0 || up_offset_ < 0)
        throw Mismatch("width " + text(width_) + ", gate_offset " + text(gate_offset_) + " and up_offset " +
                       text(up_offset_) + " are not a part of a row");
}

void SwiGLUKernel::compute(OpContext& context) const {
    const Tensor x = context.input(0), before = context.input_count() > 1 ? context.input(1) : Tensor{};
    check_rows("rows", x);
    if (std::max(gate_offset_, up_offset_) > x.dims.back() - width_)
        throw Mismatch("rows " + text(x.dims) + " end before " + text(width_) + " numbers from " +
                       text(std::max(gate_offset_, up_offset_)) + " on");
    std::size_t prefix = 0;
    if (before) {
        check_rows("before", before);
        Dims expected = x.dims;
        expected.back() = before.dims.back();
        if (before.dims != expected)
            throw Mismatch("before has shape " + text(before.dims) + ", expected " + text(expected));
        prefix = row_width(before);
    }
    const auto width = static_cast<std::size_t>(width_), stride = row_width(x), y_stride = prefix + width;
    Dims y_dims = x.dims;
    y_dims.back() = static_cast<std::int64_t>(y_stride);
    float* y = static_cast<float*>(context.output(0, y_dims).data);
    context.run(RowWork(row_count(x), y_stride, [&](std::size_t row) {
        const float* from = x.as<float>() + row * stride;
        float* to = y + row * y_stride;
        if (prefix) std::memcpy(to, before.as<float>() + row * prefix, prefix * sizeof(float));
        rows_.silu_multiply(from + gate_offset_, from + up_offset_, width, to + prefix);
    }));
}

}  // namespace intaglio
