#include "grouped_quant_op.h"

#include <utility>

#include "fast_matmul.h"

namespace intaglio {
namespace {

// Scales and offsets are left open: the schema has no "one of three types".
constexpr OpSlot kInputs[] = {
    {ort::ElementType::kFloat}, {ort::ElementType::kUint8}, {ort::ElementType::kOpen}, {ort::ElementType::kOpen}};
constexpr OpSlot kOutputs[] = {{ort::ElementType::kFloat}};

[[noreturn]] void mismatch(const std::string& message) { throw Mismatch(message); }

}  // namespace

const OpSignature GroupedQuantMatMulKernel::kSignature = {"GroupedQuantMatMul", kInputs, 4, kOutputs, 1};

WeightFormat::WeightFormat(const Attributes& attributes)
    : bits(attributes.integer("bits")),
      group_size(attributes.integer("group_size")),
      zero_point(attributes.integer("zero_point")) {
    if (bits != 2 && bits != 4 && bits != 8) mismatch("bits is " + text(bits) + ", expected 2, 4 or 8");
    if (group_size < 1 || group_size % (8 / bits) != 0)
        mismatch("group_size " + text(group_size) + " with " + text(bits) +
                 " bits does not end on a byte; it must be a positive multiple of " + text(8 / bits));
    if (zero_point < 0 || zero_point >= std::int64_t{1} << bits)
        mismatch("zero_point " + text(zero_point) + " is not a " + text(bits) + "-bit code");
}

GroupedQuantMatMul checked_product(const WeightFormat& format, const Tensor& x, const Tensor& codes,
                                   const Tensor& scales, const Tensor& offsets) {
    const std::pair<const char*, const Tensor*> inputs[] = {
        {"x", &x}, {"codes", &codes}, {"scales", &scales}, {"offsets", &offsets}};
    for (const auto& [name, tensor] : inputs)
        if (!*tensor) mismatch("input " + std::string(name) + " is left out; all four inputs are needed");
    if (x.type != ort::ElementType::kFloat) mismatch("x is " + text(x.type) + ", expected float32");
    if (codes.type != ort::ElementType::kUint8) mismatch("codes are " + text(codes.type) + ", expected uint8");
    if (x.dims.empty()) mismatch("x is a scalar, expected [..., in]");
    if (codes.dims.size() != 2)
        mismatch("codes have shape " + text(codes.dims) + ", expected [out, in * bits / 8]");
    const std::int64_t K = x.dims.back(), N = codes.dims[0];
    if (K < 1 || N < 1)
        mismatch("x " + text(x.dims) + " and codes " + text(codes.dims) + " make a weight of " + text(N) + " x " +
                 text(K) + "; both sizes must be positive");
    if (K % format.group_size != 0)
        mismatch("x has width " + text(K) + ", which is not a multiple of the group size " +
                 text(format.group_size));
    // Divided, not multiplied: a width near the end of int64 must not wrap around.
    if (codes.dims[1] != K / (8 / format.bits))
        mismatch("codes have shape " + text(codes.dims) + ", expected [out, " + text(K / (8 / format.bits)) +
                 "] for x of width " + text(K) + " and " + text(format.bits) + " bits");

    const Dims groups = {N, K / format.group_size};
    if (scales.dims != groups)
        mismatch("scales have shape " + text(scales.dims) + ", expected " + text(groups));
    if (!offsets.dims.empty() && offsets.dims != groups)
        mismatch("offsets have shape " + text(offsets.dims) + ", expected " + text(groups) + " or a scalar");
    if (scales.type != offsets.type)
        mismatch("scales are " + text(scales.type) + " and offsets " + text(offsets.type) +
                 "; they must be alike");

    GroupedQuantMatMul product{};
    switch (scales.type) {
        case ort::ElementType::kFloat16: product.scale_type = ScaleType::kFloat16; break;
        case ort::ElementType::kBfloat16: product.scale_type = ScaleType::kBfloat16; break;
        case ort::ElementType::kFloat: product.scale_type = ScaleType::kFloat32; break;
        default: mismatch("scales are " + text(scales.type) + ", expected float16, bfloat16 or float32");
    }
    product.M = 1;
    for (std::size_t i = 0; i + 1 < x.dims.size(); ++i) product.M *= static_cast<std::size_t>(x.dims[i]);
    product.N = static_cast<std::size_t>(N);
    product.K = static_cast<std::size_t>(K);
    product.group_size = static_cast<std::size_t>(format.group_size);
    product.bits = static_cast<int>(format.bits);
    product.zero_point = static_cast<int>(format.zero_point);
    product.offset_per_group = !offsets.dims.empty();
    product.x = x.data;
    product.codes = codes.as<std::uint8_t>();
    product.scales = scales.as<std::uint8_t>();
    product.offsets = offsets.as<std::uint8_t>();
    return product;
}

GroupedQuantMatMulKernel::GroupedQuantMatMulKernel(const Attributes& attributes)
    : instruction_set_(chosen_instruction_set()), format_(attributes), is_fast_(attributes.integer("fast", 0) != 0) {}

void GroupedQuantMatMulKernel::compute(OpContext& context) const {
    const Tensor x = context.input(0);
    GroupedQuantMatMul product =
        checked_product(format_, x, context.input(1), context.input(2), context.input(3));
    Dims y_dims = x.dims;
    y_dims.back() = static_cast<std::int64_t>(product.N);
    product.y = static_cast<float*>(context.output(0, y_dims).data);
    if (product.M == 0) return;
    if (is_fast_)
        if (const auto work = make_fast_matmul(product, instruction_set_)) return context.run(*work);
    context.run(Partition(product, instruction_set_));
}

std::vector<SymbolicShape> GroupedQuantMatMulKernel::infer_shapes(const std::vector<SymbolicShape>& inputs) {
    // What does not fit is reported when the op runs.
    if (inputs.size() != 4 || !inputs[0].is_known || inputs[1].rank() != 2) return {};
    SymbolicShape y = inputs[0];
    y.copy_dim(y.rank() - 1, inputs[1], 0);
    return {y};
}

}  // namespace intaglio
