#include <algorithm>

#include "conv.h"
#include "ceil_div.h"
#include "conv_float.h"

namespace intaglio {
namespace {

// Of pixels and sums that are held at a time, so that they stay in the caches that threads share.
constexpr std::size_t kBandBytes = std::size_t{16} << 20;
// Blocks of O in a part.
constexpr std::size_t kOutputGroup = 8;
constexpr std::size_t kLeastWinogradChannels = 16;

const FloatConvKernels& kernels_of(InstructionSet set) {
    switch (set) {
#if INTAGLIO_HAS_avx512
        case InstructionSet::kAvx512:
        case InstructionSet::kAvx512Vnni:
        case InstructionSet::kAmx: return float_conv_kernels_avx512;
#endif
#if INTAGLIO_HAS_avx2
        case InstructionSet::kAvx2:
        case InstructionSet::kAvxVnni: return float_conv_kernels_avx2;
#endif
        default: return float_conv_kernels_portable;
    }
}

// `count` rows in bands that differ by a row at most and have `fit` rows or, if that is none, one.
std::size_t rows_of_band(std::size_t count, std::size_t fit) {
    return ceil_div(count, ceil_div(count, std::max<std::size_t>(fit, 1)));
}

// A phase that packs the weight, then for each band one that fills its image and one that multiplies.
class DirectConvWork : public ParallelWork {
   public:
    DirectConvWork(const Conv& conv, const FloatConvKernels& kernels) : kernels_(kernels), conv_{} {
        DirectConv& c = conv_;
        static_cast<Conv&>(c) = conv;
        const ConvExtent rows = conv_extent(c.y_height, c.pad_top, c.is_upsampled);
        const ConvExtent columns = conv_extent(c.y_width, c.pad_left, c.is_upsampled);
        c.first_row = rows.first;
        c.first_column = columns.first;
        c.grid_rows = rows.count;
        c.grid_columns = columns.count;
        c.output_blocks = ceil_div(c.O, kOutputBlock);
        c.image_columns = ceil_div(c.grid_columns, 16) * 16 + c.tap_columns() - 1;
        c.band_rows = rows_of_band(c.grid_rows, kBandBytes / (c.row_stride() * sizeof(float)));
        bands_ = ceil_div(c.grid_rows, c.band_rows);
        groups_ = ceil_div(c.output_blocks, kOutputGroup);
        weight_size_ = ceil_div(c.output_blocks * c.block_size(), 16) * 16;
    }

    std::size_t phases() const override { return 1 + 2 * conv_.B * bands_; }
    std::size_t scratch_bytes() const override {
        // Registers are filled whole: the last one of the last row reaches beyond it.
        return (weight_size_ + conv_.image_rows() * conv_.row_stride() + 16) * sizeof(float);
    }
    std::size_t parts(std::size_t phase) const override {
        if (phase == 0) return conv_.output_blocks;
        return phase % 2 == 1 ? conv_.image_rows() : ceil_div(rows_in((phase - 1) / 2 % bands_), kRows) * groups_;
    }
    void compute(std::size_t phase, std::size_t part, std::byte* scratch) const noexcept override {
        auto* weight = reinterpret_cast<float*>(scratch);
        float* image = weight + weight_size_;
        if (phase == 0) return kernels_.pack_direct(conv_, part, weight);
        const std::size_t batch = (phase - 1) / 2 / bands_, band = (phase - 1) / 2 % bands_;
        if (phase % 2 == 1) return kernels_.fill_row(conv_, batch, band, part, image);
        const std::size_t block = part % groups_ * kOutputGroup, row = part / groups_ * kRows;
        const std::size_t first = band * conv_.band_rows;
        const DirectRows rows{batch, first + row, first + std::min(row + kRows, rows_in(band)), block,
                              std::min(block + kOutputGroup, conv_.output_blocks)};
        kernels_.convolve_rows(conv_, rows, weight, image);
    }

   private:
    // In a part: they share the weights that are near.
    static constexpr std::size_t kRows = 4;

    std::size_t rows_in(std::size_t band) const {
        return std::min(conv_.band_rows, conv_.grid_rows - band * conv_.band_rows);
    }

    const FloatConvKernels& kernels_;
    DirectConv conv_;
    std::size_t bands_, groups_, weight_size_;
};

// A phase that transforms the weight, then for each band three: pixels are transformed, terms multiplied, sums
// transformed.
class WinogradConvWork : public ParallelWork {
   public:
    WinogradConvWork(const Conv& conv, const FloatConvKernels& kernels) : kernels_(kernels), conv_{} {
        WinogradConv& c = conv_;
        static_cast<Conv&>(c) = conv;
        c.output_blocks = ceil_div(c.O, kOutputBlock);
        c.tile_rows = ceil_div(c.y_height, kTileSide);
        c.tile_columns = ceil_div(ceil_div(c.y_width, kTileSide), kTileLanes) * kTileLanes;
        const std::size_t row = kTerms * (c.C + c.output_blocks * kOutputBlock) * c.tile_columns * sizeof(float);
        c.band_rows = rows_of_band(c.tile_rows, kBandBytes / row);
        bands_ = ceil_div(c.tile_rows, c.band_rows);
        groups_ = ceil_div(c.output_blocks, kOutputGroup);
    }

    std::size_t phases() const override { return 1 + 3 * conv_.B * bands_; }
    std::size_t scratch_bytes() const override {
        return kTerms * (conv_.weight_term() + conv_.pixel_term() + conv_.sum_term()) * sizeof(float);
    }
    std::size_t parts(std::size_t phase) const override {
        if (phase == 0) return conv_.output_blocks;
        const std::size_t rows = rows_in((phase - 1) / 3 % bands_);
        switch ((phase - 1) % 3) {
            case 0: return rows * ceil_div(conv_.C, kChannels);
            case 1: return kTerms * groups_;
            default: return rows * ceil_div(conv_.O, kChannels);
        }
    }
    void compute(std::size_t phase, std::size_t part, std::byte* scratch) const noexcept override {
        auto* weight = reinterpret_cast<float*>(scratch);
        float* pixels = weight + kTerms * conv_.weight_term();
        float* sums = pixels + kTerms * conv_.pixel_term();
        if (phase == 0) return kernels_.transform_weight(conv_, part, weight);
        const std::size_t batch = (phase - 1) / 3 / bands_, band = (phase - 1) / 3 % bands_;
        const std::size_t rows = rows_in(band), row = part % rows, channel = part / rows * kChannels;
        switch ((phase - 1) % 3) {
            case 0:
                for (std::size_t c = channel; c < std::min(channel + kChannels, conv_.C); ++c)
                    kernels_.transform_pixels(conv_, batch, band, row, c, pixels);
                break;
            case 1: {
                const std::size_t block = part % groups_ * kOutputGroup;
                kernels_.multiply_term(conv_, part / groups_, block, std::min(block + kOutputGroup, conv_.output_blocks),
                                       weight, pixels, sums);
                break;
            }
            default:
                for (std::size_t c = channel; c < std::min(channel + kChannels, conv_.O); ++c)
                    kernels_.transform_sums(conv_, batch, band, row, c, sums);
        }
    }

   private:
    static constexpr std::size_t kChannels = 16;  // in a part

    std::size_t rows_in(std::size_t band) const {
        return std::min(conv_.band_rows, conv_.tile_rows - band * conv_.band_rows);
    }

    const FloatConvKernels& kernels_;
    WinogradConv conv_;
    std::size_t bands_, groups_;
};

}  // namespace

std::unique_ptr<ParallelWork> make_float_conv(const Conv& conv, InstructionSet set, bool is_fast) {
    const bool is_3x3 = conv.kernel_height == 3 && conv.kernel_width == 3 && !conv.is_upsampled;
    if (is_fast && is_3x3 && std::min(conv.C, conv.O) >= kLeastWinogradChannels && conv.y_width >= kLeastWinogradWidth)
        return std::make_unique<WinogradConvWork>(conv, kernels_of(set));
    return std::make_unique<DirectConvWork>(conv, kernels_of(set));
}

}  // namespace intaglio
