#include "conv_op.h"

namespace intaglio {
namespace {

constexpr OpSlot kFloat{ort::ElementType::kFloat}, kOptional{ort::ElementType::kFloat, OpSlot::kOptional};
constexpr OpSlot kInputs[] = {kFloat, kFloat, kOptional, kOptional, kOptional, kOptional, kOptional, kOptional, kOptional};
constexpr OpSlot kOutputs[] = {kFloat};
constexpr const char* kNames[] = {"x",           "weight",    "bias",     "mean",    "variance",
                                  "norm_weight", "norm_bias", "row_mask", "residual"};
enum Input { kX, kWeight, kBias, kMean, kVariance, kNormWeight, kNormBias, kRowMask, kResidual, kInputCount };

[[noreturn]] void mismatch(const std::string& message) { throw Mismatch(message); }

void check_dims(const Tensor* inputs, Input index, const Dims& expected) {
    if (inputs[index] && inputs[index].dims != expected)
        mismatch(std::string(kNames[index]) + " has shape " + text(inputs[index].dims) + ", expected " + text(expected));
}

}  // namespace

const OpSignature FusedConvKernel::kSignature = {"FusedConv", kInputs, kInputCount, kOutputs, 1};

FusedConvKernel::FusedConvKernel(const Attributes& attributes)
    : instruction_set_(chosen_instruction_set()),
      pad_top_(attributes.integer("pad_top", 0)),
      pad_left_(attributes.integer("pad_left", 0)),
      pad_bottom_(attributes.integer("pad_bottom", 0)),
      pad_right_(attributes.integer("pad_right", 0)),
      upsample_(attributes.integer("upsample", 1)),
      epsilon_(attributes.real("epsilon", 1e-5f)),
      is_fast_(attributes.integer("fast", 0) != 0),
      state_(std::make_unique<State>()) {
    if (!attributes.is_constant(kWeight))
        mismatch("the weight is not a constant of the graph; leave such a Conv as it is");
    if (upsample_ != 1 && upsample_ != 2) mismatch("upsample is " + text(upsample_) + ", expected 1 or 2");
}

Conv FusedConvKernel::checked(const OpContext& context, Tensor* inputs) const {
    const std::size_t given = context.input_count();
    for (std::size_t i = 0; i < kInputCount && i < given; ++i) inputs[i] = context.input(i);
    const Dims &x = inputs[kX].dims, &weight = inputs[kWeight].dims;
    if (x.size() != 4) mismatch("x has shape " + text(x) + ", expected [batch, channels, height, width]");
    if (weight.size() != 4 || weight[1] != x[1])
        mismatch("weight has shape " + text(weight) + ", expected [out, " + text(x[1]) + ", height, width]");
    for (const std::int64_t size : weight)
        if (size < 1) mismatch("weight has shape " + text(weight) + "; all sizes must be positive");
    if (upsample_ == 2 && (weight[2] != 3 || weight[3] != 3))
        mismatch("weight has shape " + text(weight) + ", expected [out, in, 3, 3] after upsampling");
    const std::int64_t y_height = x[2] * upsample_ + pad_top_ + pad_bottom_ - weight[2] + 1;
    const std::int64_t y_width = x[3] * upsample_ + pad_left_ + pad_right_ - weight[3] + 1;
    if (y_height < 0 || y_width < 0)
        mismatch("x of " + text(x[2]) + " x " + text(x[3]) + " with its padding is smaller than the kernel of " +
                 text(weight[2]) + " x " + text(weight[3]));

    const bool is_normed = static_cast<bool>(inputs[kMean]);
    for (const Input index : {kVariance, kNormWeight, kNormBias})
        if (static_cast<bool>(inputs[index]) != is_normed)
            mismatch("mean, variance, norm_weight and norm_bias must be given together; " +
                     std::string(kNames[is_normed ? index : kMean]) + " is left out");
    Conv conv{};
    if (is_normed) {
        const Dims& mean = inputs[kMean].dims;
        if (mean.size() != 2 || mean[0] != x[0] || mean[1] < 1 || x[1] % mean[1] != 0)
            mismatch("mean has shape " + text(mean) + ", expected [" + text(x[0]) + ", groups] with groups that divide " +
                     text(x[1]) + " channels");
        check_dims(inputs, kVariance, mean);
        check_dims(inputs, kNormWeight, {x[1]});
        check_dims(inputs, kNormBias, {x[1]});
        conv.G = static_cast<std::size_t>(mean[1]);
    }
    check_dims(inputs, kBias, {weight[0]});
    check_dims(inputs, kRowMask, {x[2]});
    check_dims(inputs, kResidual, {x[0], weight[0], y_height, y_width});

    conv.C = static_cast<std::size_t>(x[1]);
    conv.O = static_cast<std::size_t>(weight[0]);
    conv.kernel_height = static_cast<std::size_t>(weight[2]);
    conv.kernel_width = static_cast<std::size_t>(weight[3]);
    conv.is_upsampled = upsample_ == 2;
    conv.B = static_cast<std::size_t>(x[0]);
    conv.H = static_cast<std::size_t>(x[2]);
    conv.W = static_cast<std::size_t>(x[3]);
    conv.y_height = static_cast<std::size_t>(y_height);
    conv.y_width = static_cast<std::size_t>(y_width);
    conv.pad_top = static_cast<std::ptrdiff_t>(pad_top_);
    conv.pad_left = static_cast<std::ptrdiff_t>(pad_left_);
    conv.epsilon = epsilon_;
    conv.x = inputs[kX].as<float>();
    conv.weight = inputs[kWeight].as<float>();
    conv.bias = inputs[kBias].as<float>();
    conv.mean = inputs[kMean].as<float>();
    conv.variance = inputs[kVariance].as<float>();
    conv.norm_weight = inputs[kNormWeight].as<float>();
    conv.norm_bias = inputs[kNormBias].as<float>();
    conv.row_mask = inputs[kRowMask].as<float>();
    conv.residual = inputs[kResidual].as<float>();
    return conv;
}

const ConvKernel& FusedConvKernel::prepared(OpContext& context, const Conv& conv) const {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->kernel) return *state_->kernel;
    auto kernel = make_conv_kernel(conv, instruction_set_, is_fast_);
    if (!kernel)
        mismatch("a kernel of " + text(static_cast<std::int64_t>(conv.kernel_height)) + " x " +
                 text(static_cast<std::int64_t>(conv.kernel_width)) + " taps is more than " +
                 text(static_cast<std::int64_t>(kMaxConvTaps)) + "; leave such a Conv as it is");
    if (const auto packing = kernel->packing(conv.weight)) context.run(*packing);
    state_->kernel = std::move(kernel);
    return *state_->kernel;
}

void FusedConvKernel::compute(OpContext& context) const {
    Tensor inputs[kInputCount];
    Conv conv = checked(context, inputs);
    const Dims dims = {static_cast<std::int64_t>(conv.B), static_cast<std::int64_t>(conv.O),
                       static_cast<std::int64_t>(conv.y_height), static_cast<std::int64_t>(conv.y_width)};
    conv.y = static_cast<float*>(context.output(0, dims).data);
    if (conv.B == 0 || conv.y_height == 0 || conv.y_width == 0) return;
    context.run(*prepared(context, conv).convolution(conv));
}

std::vector<SymbolicShape> FusedConvKernel::infer_shapes(const std::vector<SymbolicShape>& inputs) {
    // Height and width of what is padded have no name.
    if (inputs.size() < 2 || inputs[0].rank() != 4 || inputs[1].rank() != 4) return {};
    SymbolicShape y = inputs[0];
    y.copy_dim(1, inputs[1], 0);
    if (inputs.size() == kInputCount && inputs[kResidual].rank() == 4) return {inputs[kResidual]};
    return {};
}

}  // namespace intaglio
