// Two-dimensional convolution of stride 1, with what stands before and after it in a picture's decoder:
//
//     a = x, or silu((x - mean) / sqrt(variance + epsilon) * norm_weight + norm_bias) of its group of channels
//     y = conv(upsample(a * row_mask), weight) + bias + residual
//
// One part of a phase at a time, `a` is held for a band of rows only, in the order that the products read. The order
// in which products are added depends on the shape of the weight alone.
//
// Upsampling repeats every pixel twice in both directions. The 3x3 taps then meet only 2x2 pixels, and which taps
// meet which pixel depends on whether row and column are even: four convolutions of 2x2 taps that are sums of the
// 3x3 ones, with 4 products for 9.
//
// Legend: B batch, C channels in, O channels out, H and W rows and columns of x, G groups of channels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "instruction_set.h"
#include "parallel_work.h"

namespace intaglio {

struct ConvShape {
    std::size_t C, O, kernel_height, kernel_width;
    bool is_upsampled;  // 3x3 only

    std::size_t phases() const { return is_upsampled ? 2 : 1; }  // in each direction
    std::size_t tap_rows() const { return is_upsampled ? 2 : kernel_height; }
    std::size_t tap_columns() const { return is_upsampled ? 2 : kernel_width; }
    std::size_t taps() const { return tap_rows() * tap_columns(); }
};

struct Conv : ConvShape {
    std::size_t B, H, W, G;
    std::size_t y_height, y_width;
    // Rows and columns of zeros before the (upsampled) picture; of it that many are left out if negative.
    std::ptrdiff_t pad_top, pad_left;
    float epsilon;
    const float *x, *bias, *residual;                       // [B, C, H, W], [O], that of y; the last two may be null
    const float *mean, *variance, *norm_weight, *norm_bias;  // [B, G], [C]; null: x is taken as it is
    const float* row_mask;                                  // [H], or null
    float* y;                                               // [B, O, y_height, y_width]
};

// A weight in the order of one instruction set's kernel.
class PackedConvWeight {
   public:
    virtual ~PackedConvWeight() = default;
    // Fills it from weight [O, C, kernel_height, kernel_width]; to be run once, before it is used.
    virtual std::unique_ptr<ParallelWork> packing(const float* weight) = 0;
    virtual std::unique_ptr<ParallelWork> convolution(const Conv& conv) const = 0;
};

// Null where no kernel of this set takes the shape.
std::unique_ptr<PackedConvWeight> make_packed_conv_weight(const ConvShape& shape, InstructionSet set);

}  // namespace intaglio
