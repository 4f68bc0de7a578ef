#include "fused_gather_op.h"

#include "fused_gather.h"

namespace intaglio {
namespace {

constexpr OpSlot kInputs[] = {
    {ort::ElementType::kInt64}, {ort::ElementType::kUint8}, {ort::ElementType::kOpen}, {ort::ElementType::kOpen}};
constexpr OpSlot kOutputs[] = {{ort::ElementType::kFloat}};

}  // namespace

const OpSignature GroupedQuantGatherKernel::kSignature = {"GroupedQuantGather", kInputs, 4, kOutputs, 1};

GroupedQuantGatherKernel::GroupedQuantGatherKernel(const Attributes& attributes) : format_(attributes) {}

void GroupedQuantGatherKernel::compute(OpContext& context) const {
    const Tensor indices = context.input(0), codes = context.input(1);
    if (!indices || indices.type != ort::ElementType::kInt64)
        throw Mismatch("indices are " + text(indices.type) + ", expected int64");
    if (codes.dims.size() != 2) throw Mismatch("codes have shape " + text(codes.dims) + ", expected two dims");
    // The table is checked as the weight of a product with rows as wide as its own.
    Tensor row;
    row.type = ort::ElementType::kFloat;
    row.dims = {codes.dims[1] * (8 / format_.bits)};
    row.data = indices.data;
    QuantizedTable table{checked_product(format_, row, codes, context.input(2), context.input(3)),
                         indices.as<std::int64_t>(), indices.size(), nullptr};
    const auto rows = static_cast<std::int64_t>(table.weight.N);
    for (std::size_t i = 0; i < table.count; ++i)
        if (table.indices[i] < -rows || table.indices[i] >= rows)
            throw Mismatch("index " + text(table.indices[i]) + " is not a row of a table of " + text(rows) + " rows");
    Dims y_dims = indices.dims;
    y_dims.push_back(row.dims[0]);
    table.y = static_cast<float*>(context.output(0, y_dims).data);
    if (table.count) context.run(GatherWork(table));
}

}  // namespace intaglio
