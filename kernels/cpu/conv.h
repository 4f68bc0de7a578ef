// Two-dimensional convolution of stride 1, with what stands before and after it in a picture's decoder:
//
//     a = x, or silu((x - mean) / sqrt(variance + epsilon) * norm_weight + norm_bias) of its group of channels
//     y = conv(upsample(a * row_mask), weight) + bias + residual
//
// One part of a phase at a time, `a` is held for a band of rows only, in the order that the products read. The order
// in which products are added depends on the shape of the weight and, with `is_fast`, on whether y is wide enough for
// Winograd's transforms (make_float_conv): a narrow band then differs from the whole picture in the last bits.
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

#include "for_isa.h"
#include "instruction_set.h"
#include "parallel_work.h"

namespace intaglio {

struct ConvShape {
    std::size_t C, O, kernel_height, kernel_width;
    bool is_upsampled;  // 3x3 only

    INTAGLIO_INLINE std::size_t phases() const { return is_upsampled ? 2 : 1; }  // in each direction
    INTAGLIO_INLINE std::size_t tap_rows() const { return is_upsampled ? 2 : kernel_height; }
    INTAGLIO_INLINE std::size_t tap_columns() const { return is_upsampled ? 2 : kernel_width; }
    INTAGLIO_INLINE std::size_t taps() const { return tap_rows() * tap_columns(); }
};

struct Conv : ConvShape {
    std::size_t B, H, W, G;
    std::size_t y_height, y_width;
    // Rows and columns of zeros before the (upsampled) picture; of it that many are left out if negative.
    std::ptrdiff_t pad_top, pad_left;
    float epsilon;
    const float *x, *weight;                                 // [B, C, H, W], [O, C, kernel_height, kernel_width]
    const float *bias, *residual;                            // [O], that of y, or null
    const float *mean, *variance, *norm_weight, *norm_bias;  // [B, G], [C]; null: x is taken as it is
    const float* row_mask;                                  // [H], or null
    float* y;                                               // [B, O, y_height, y_width]
};

// How one instruction set convolves with one weight.
class ConvKernel {
   public:
    virtual ~ConvKernel() = default;
    // Brings the weight into the kernel's own order, once, after which conv.weight is not read; null if it is read
    // as it lies.
    virtual std::unique_ptr<ParallelWork> packing(const float* weight) = 0;
    virtual std::unique_ptr<ParallelWork> convolution(const Conv& conv) const = 0;
};

// `is_fast` allows rounding to bfloat16 (relative L2 of y about 2e-3) and Winograd's transforms (about 3e-6). Null
// where no kernel takes the shape.
std::unique_ptr<ConvKernel> make_conv_kernel(const ConvShape& shape, InstructionSet set, bool is_fast);

// The sum of the taps of g [3, 3] that meet pixel `tap` of 2 x 2, for phase 2 * (row is odd) + (column is odd): in an
// even row the first two taps meet one pixel, in an odd row the last two.
INTAGLIO_INLINE float upsampled_tap(const float* g, std::size_t phase, std::size_t tap) {
    const std::size_t row_split = 2 - phase / 2, column_split = 2 - phase % 2;
    float sum = 0;
    for (std::size_t i = tap / 2 ? row_split : 0; i < (tap / 2 ? 3 : row_split); ++i)
        for (std::size_t j = tap % 2 ? column_split : 0; j < (tap % 2 ? 3 : column_split); ++j) sum += g[i * 3 + j];
    return sum;
}

// Largest number of taps that a kernel takes.
constexpr std::size_t kMaxConvTaps = 64;

// Of a length of y, the positions of the grid and the row or column of x that the first one meets. A position is a
// pixel of y or, where x is upsampled, two of them.
struct ConvExtent {
    std::size_t count;
    std::ptrdiff_t first;
};
ConvExtent conv_extent(std::size_t y_length, std::ptrdiff_t pad, bool is_upsampled);

// The least width of y that Winograd's transforms take.
constexpr std::size_t kLeastWinogradWidth = 32;

// In float32; Winograd's transforms if `is_fast`, and the shape has 3x3 taps, width and channels enough.
std::unique_ptr<ParallelWork> make_float_conv(const Conv& conv, InstructionSet set, bool is_fast);

}  // namespace intaglio
