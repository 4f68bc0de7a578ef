#include "fused_matmul_op.h"

#include "fused_matmul.h"

#include <string>
#include <utility>

namespace intaglio {
namespace {

constexpr OpSlot kInputs[] = {{ort::ElementType::kFloat},
                              {ort::ElementType::kFloat, OpSlot::kOptional},
                              {ort::ElementType::kFloat, OpSlot::kOptional},
                              {ort::ElementType::kOpen, OpSlot::kVariadic}};
constexpr OpSlot kOutputs[] = {{ort::ElementType::kFloat, OpSlot::kVariadic}};
constexpr std::size_t kNorm = 1, kResidual = 2, kWeights = 3, kWeightInputs = 3;

void check_dims(const char* name, const Tensor& tensor, const Dims& expected) {
    if (tensor.dims != expected)
        throw Mismatch(std::string(name) + " has shape " + text(tensor.dims) + ", expected " + text(expected));
}

// The products of constant weights of one width, but for x and y; none if a weight is not constant or does not fit,
// which is reported when the op runs.
std::vector<GroupedQuantMatMul> constant_products(const WeightFormat& format, const Attributes& attributes) {
    std::vector<GroupedQuantMatMul> products;
    const std::size_t inputs = attributes.input_count();
    for (std::size_t at = kWeights; at + kWeightInputs <= inputs; at += kWeightInputs) {
        const Tensor codes = attributes.constant_input(at), scales = attributes.constant_input(at + 1),
                     offsets = attributes.constant_input(at + 2);
        if (!codes || !scales || !offsets || codes.dims.size() != 2) return {};
        Tensor row;
        row.data = codes.data;
        row.type = ort::ElementType::kFloat;
        row.dims = {codes.dims[1] * (8 / format.bits)};
        try {
            products.push_back(checked_product(format, row, codes, scales, offsets));
        } catch (const Mismatch&) {
            return {};
        }
        if (products.back().K != products.front().K) return {};
    }
    return products;
}

}  // namespace

const OpSignature FusedGroupedQuantMatMulKernel::kSignature = {"FusedGroupedQuantMatMul", kInputs, 4, kOutputs, 1};

FusedGroupedQuantMatMulKernel::FusedGroupedQuantMatMulKernel(const Attributes& attributes)
    : instruction_set_(chosen_instruction_set()),
      format_(attributes),
      epsilon_(attributes.real("epsilon", 0)),
      is_gated_(attributes.integer("gated", 0) != 0),
      is_fast_(attributes.integer("fast", 0) != 0),
      constant_(constant_products(format_, attributes)) {}

GroupedQuantMatMul FusedGroupedQuantMatMulKernel::checked(const OpContext& context, const Tensor& x,
                                                          std::size_t weight) const {
    const bool fits = !constant_.empty() && x && x.type == ort::ElementType::kFloat && !x.dims.empty() &&
                      x.dims.back() == static_cast<std::int64_t>(constant_[0].K);
    if (!fits) {
        const std::size_t at = kWeights + weight * kWeightInputs;
        return checked_product(format_, x, context.input(at), context.input(at + 1), context.input(at + 2));
    }
    GroupedQuantMatMul product = constant_[weight];
    product.x = x.data;
    product.M = x.size() / product.K;
    return product;
}

void FusedGroupedQuantMatMulKernel::compute(OpContext& context) const {
    const std::size_t inputs = context.input_count(), outputs = context.output_count();
    const std::size_t weights = inputs < kWeights ? 0 : (inputs - kWeights) / kWeightInputs;
    if (weights == 0 || inputs != kWeights + weights * kWeightInputs)
        throw Mismatch("there are " + text(static_cast<std::int64_t>(inputs)) +
                       " inputs, expected x, norm_weight, residual, and codes, scales and offsets of each weight");
    if (outputs != (is_gated_ ? 1 : weights) || (is_gated_ && weights != 2))
        throw Mismatch(text(static_cast<std::int64_t>(weights)) + " weights have " +
                       text(static_cast<std::int64_t>(outputs)) +
                       " outputs, expected one of each, and one of the two of a gate");
    const Tensor x = context.input(0), norm_weight = context.input(kNorm), residual = context.input(kResidual);
    FusedMatMul fused;
    fused.is_gated = is_gated_;
    fused.is_fast = is_fast_;
    for (std::size_t i = 0; i < weights; ++i) {
        GroupedQuantMatMul product = checked(context, x, i);
        Dims y_dims = x.dims;
        y_dims.back() = static_cast<std::int64_t>(product.N);
        if (i < outputs) product.y = static_cast<float*>(context.output(i, y_dims).data);
        fused.products.push_back(product);
    }
    const GroupedQuantMatMul& first = fused.products[0];
    if (is_gated_ && first.N != fused.products[1].N)
        throw Mismatch("the weights of a gate have " + text(static_cast<std::int64_t>(first.N)) + " and " +
                       text(static_cast<std::int64_t>(fused.products[1].N)) + " rows, expected as many");
    if (norm_weight) {
        check_dims("norm_weight", norm_weight, {x.dims.back()});
        fused.norm_weight = norm_weight.as<float>();
        fused.epsilon = epsilon_;
    }
    if (residual) {
        if (weights != 1) throw Mismatch("a residual is added to one product, but there is more than one weight");
        Dims y_dims = x.dims;
        y_dims.back() = static_cast<std::int64_t>(first.N);
        check_dims("residual", residual, y_dims);
        fused.residual = residual.as<float>();
    }
    if (first.M == 0) return;
    context.run(FusedMatMulWork(std::move(fused), instruction_set_));
}

std::vector<SymbolicShape> FusedGroupedQuantMatMulKernel::infer_shapes(const std::vector<SymbolicShape>& inputs) {
    // What does not fit is reported when the op runs.
    std::vector<SymbolicShape> outputs;
    if (inputs.empty() || !inputs[0].is_known) return outputs;
    for (std::size_t i = kWeights; i < inputs.size() && inputs[i].rank() == 2; i += kWeightInputs) {
        outputs.push_back(inputs[0]);
        outputs.back().copy_dim(inputs[0].rank() - 1, inputs[i], 0);
    }
    return outputs;
}

}  // namespace intaglio
