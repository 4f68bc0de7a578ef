#include "fused_head_norm_op.h"

#include <algorithm>

#include "fused_modulation.h"
#include "fused_row_work.h"

namespace intaglio {
namespace {

constexpr OpSlot kInputs[] = {{ort::ElementType::kFloat, OpSlot::kVariadic}};
constexpr OpSlot kOutputs[] = {{ort::ElementType::kFloat}};

struct Sequence {
    const float* x;
    const float* weight;
    std::size_t tokens, stride;
};

}  // namespace

const OpSignature HeadRMSNormKernel::kSignature = {"HeadRMSNorm", kInputs, 1, kOutputs, 1};

HeadRMSNormKernel::HeadRMSNormKernel(const Attributes& attributes)
    : rows_(row_kernels(chosen_instruction_set())),
      heads_(attributes.integer("heads")),
      head_size_(attributes.integer("head_size")),
      offset_(attributes.integer("offset", 0)),
      epsilon_(attributes.real("epsilon", 1e-5f)) {
    if (heads_ < 1 || head_size_ < 1 || offset_ < 0)
        throw Mismatch("heads " + text(heads_) + ", head_size " + text(head_size_) + " and offset " + text(offset_) +
                       " are not a part of a row");
}

void HeadRMSNormKernel::compute(OpContext& context) const {
    const std::size_t count = context.input_count() / 2;
    if (count == 0 || context.input_count() % 2)
        throw Mismatch("there are " + text(static_cast<std::int64_t>(context.input_count())) +
                       " inputs, expected pairs of rows and weight");
    std::vector<Sequence> sequences;
    std::int64_t batch = 0, tokens = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const Tensor x = context.input(2 * i), weight = context.input(2 * i + 1);
        check_rows("rows", x);
        if (x.dims.size() != 3 || (i > 0 && x.dims[0] != batch))
            throw Mismatch("rows have shape " + text(x.dims) + ", expected [batch, tokens, width]");
        if (offset_ > x.dims[2] || heads_ > (x.dims[2] - offset_) / head_size_)
            throw Mismatch("rows " + text(x.dims) + " end before " + text(heads_) + " heads of " + text(head_size_) +
                           " from " + text(offset_) + " on");
        if (weight.dims != Dims{head_size_})
            throw Mismatch("weight has shape " + text(weight.dims) + ", expected " + text(Dims{head_size_}));
        batch = x.dims[0];
        tokens += x.dims[1];
        sequences.push_back({x.as<float>() + offset_, weight.as<float>(), static_cast<std::size_t>(x.dims[1]),
                             row_width(x)});
    }
    float* y = static_cast<float*>(context.output(0, {batch, tokens, heads_, head_size_}).data);
    const auto joint = static_cast<std::size_t>(tokens), size = static_cast<std::size_t>(head_size_);
    const std::size_t width = static_cast<std::size_t>(heads_) * size;
    context.run(RowWork(static_cast<std::size_t>(batch) * joint, width, [&](std::size_t row) {
        std::size_t token = row % joint, i = 0;
        for (; token >= sequences[i].tokens; ++i) token -= sequences[i].tokens;
        const Sequence& from = sequences[i];
        const float* x = from.x + (row / joint * from.tokens + token) * from.stride;
        for (std::size_t h = 0; h < width; h += size)
            rows_.rms_norm(x + h, from.weight, epsilon_, size, y + row * width + h);
    }));
}

}  // namespace intaglio
