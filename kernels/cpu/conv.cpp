#include "conv.h"

#include <algorithm>
#include <new>

#include "ceil_div.h"
#if INTAGLIO_HAS_amx
#include "conv_amx.h"
#endif

namespace intaglio {
namespace {

// Divided towards minus infinity.
std::ptrdiff_t floor_half(std::ptrdiff_t value) { return value >= 0 ? value / 2 : -((1 - value) / 2); }

class FloatConvKernel : public ConvKernel {
   public:
    FloatConvKernel(InstructionSet set, bool is_fast) : set_(set), is_fast_(is_fast) {}
    std::unique_ptr<ParallelWork> packing(const float*) override { return nullptr; }
    std::unique_ptr<ParallelWork> convolution(const Conv& conv) const override {
        return make_float_conv(conv, set_, is_fast_);
    }

   private:
    InstructionSet set_;
    bool is_fast_;
};

#if INTAGLIO_HAS_amx

class AmxPacking : public ParallelWork {
   public:
    AmxPacking(const ConvShape& shape, const float* weight, std::uint16_t* to, std::size_t block_size)
        : shape_(shape), weight_(weight), to_(to), block_size_(block_size) {}
    std::size_t parts(std::size_t) const override { return ceil_div(shape_.O, kConvBlock); }
    void compute(std::size_t, std::size_t part, std::byte*) const noexcept override {
        pack_conv_weight_amx(shape_, weight_, part, to_ + part * block_size_);
    }

   private:
    ConvShape shape_;
    const float* weight_;
    std::uint16_t* to_;
    std::size_t block_size_;
};

// A phase that fills the image of a band, then one that multiplies, for one band after the other.
class AmxConvWork : public ParallelWork {
   public:
    AmxConvWork(const Conv& conv, const std::uint16_t* packed) : conv_{} {
        AmxConv& c = conv_;
        static_cast<Conv&>(c) = conv;
        c.packed = packed;
        const ConvExtent rows = conv_extent(c.y_height, c.pad_top, c.is_upsampled);
        const ConvExtent columns = conv_extent(c.y_width, c.pad_left, c.is_upsampled);
        c.first_row = rows.first;
        c.first_column = columns.first;
        c.grid_rows = rows.count;
        c.grid_columns = columns.count;
        c.channel_blocks = ceil_div(c.C, kConvBlock);
        c.output_blocks = ceil_div(c.O, kConvBlock);
        c.steps = c.taps() * c.channel_blocks;
        c.region_columns = kRegionArea / kRegionRows / c.phases();
        c.image_columns = ceil_div(c.grid_columns, 16) * 16 + c.tap_columns() - 1;
        c.output_group = 4;
        const std::size_t fit = kBandBytes / (c.row_stride() * sizeof(std::uint16_t)) / kRegionRows;
        const std::size_t bands = ceil_div(ceil_div(c.grid_rows, kRegionRows), std::max<std::size_t>(fit, 1));
        c.band_rows = ceil_div(ceil_div(c.grid_rows, kRegionRows), bands) * kRegionRows;
        bands_ = ceil_div(c.grid_rows, c.band_rows);
        regions_across_ = ceil_div(c.grid_columns, c.region_columns);
        groups_ = ceil_div(c.output_blocks, c.output_group);
    }

    std::size_t phases() const override { return 2 * conv_.B * bands_; }
    std::size_t scratch_bytes() const override {
        return conv_.image_rows() * conv_.row_stride() * sizeof(std::uint16_t);
    }
    std::size_t parts(std::size_t phase) const override {
        return phase % 2 == 0 ? conv_.image_rows()
                              : ceil_div(rows_of(phase / 2 % bands_), kRegionRows) * regions_across_ * groups_;
    }
    void compute(std::size_t phase, std::size_t part, std::byte* scratch) const noexcept override {
        auto* image = reinterpret_cast<std::uint16_t*>(scratch);
        const std::size_t batch = phase / 2 / bands_, band = phase / 2 % bands_;
        if (phase % 2 == 0) return fill_conv_row_amx(conv_, batch, band, part, image);
        const std::size_t band_row = band * conv_.band_rows, group = part % groups_;
        const std::size_t across = part / groups_ % regions_across_, down = part / groups_ / regions_across_;
        ConvRegion region{};
        region.batch = batch;
        region.row = band_row + down * kRegionRows;
        region.row_end = std::min(region.row + kRegionRows, conv_.grid_rows);
        region.column = across * conv_.region_columns;
        region.column_end = std::min(region.column + conv_.region_columns, conv_.grid_columns);
        region.block = group * conv_.output_group;
        region.block_end = std::min(region.block + conv_.output_group, conv_.output_blocks);
        convolve_region_amx(conv_, region, band_row, image);
    }

   private:
    // Stays in the caches that threads share.
    static constexpr std::size_t kBandBytes = std::size_t{8} << 20;

    std::size_t rows_of(std::size_t band) const {
        return std::min(conv_.band_rows, conv_.grid_rows - band * conv_.band_rows);
    }

    AmxConv conv_;
    std::size_t bands_, regions_across_, groups_;
};

class AmxConvKernel : public ConvKernel {
   public:
    explicit AmxConvKernel(const ConvShape& shape)
        : shape_(shape),
          block_size_(shape.phases() * shape.phases() * shape.taps() * ceil_div(shape.C, kConvBlock) * kConvBlock *
                      kConvBlock),
          values_(static_cast<std::uint16_t*>(::operator new(
              block_size_ * ceil_div(shape.O, kConvBlock) * sizeof(std::uint16_t), kAlignment))) {}

    std::unique_ptr<ParallelWork> packing(const float* weight) override {
        return std::make_unique<AmxPacking>(shape_, weight, values_.get(), block_size_);
    }
    std::unique_ptr<ParallelWork> convolution(const Conv& conv) const override {
        return std::make_unique<AmxConvWork>(conv, values_.get());
    }

   private:
    static constexpr std::align_val_t kAlignment{64};
    struct Delete {
        void operator()(std::uint16_t* values) const { ::operator delete(values, kAlignment); }
    };
    ConvShape shape_;
    std::size_t block_size_;
    std::unique_ptr<std::uint16_t, Delete> values_;
};

#endif

}  // namespace

ConvExtent conv_extent(std::size_t y_length, std::ptrdiff_t pad, bool is_upsampled) {
    if (!is_upsampled) return {y_length, -pad};
    const std::ptrdiff_t first = floor_half(-pad), last = floor_half(static_cast<std::ptrdiff_t>(y_length) - 1 - pad);
    return {static_cast<std::size_t>(last - first + 1), first};
}

std::unique_ptr<ConvKernel> make_conv_kernel(const ConvShape& shape, InstructionSet set, bool is_fast) {
    if (shape.taps() > kMaxConvTaps) return nullptr;
#if INTAGLIO_HAS_amx
    if (set == InstructionSet::kAmx && is_fast) return std::make_unique<AmxConvKernel>(shape);
#endif
    return std::make_unique<FloatConvKernel>(set, is_fast);
}

}  // namespace intaglio
