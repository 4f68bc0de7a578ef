// Convolution of bfloat16 pixels and weights in tiles: products are exact, sums float32.
//
// Pixels lie as [row][block of 32 channels][column][32], so that a tile of 16 pixels is 1024 bytes in one piece at
// every tap. A step is the products of 32 channels at one tap: steps of one block of channels follow each other.
// Weights lie as [block of 32 of O][phase of the row][phase of the column][step][2][16 pairs of channels][16 of O][2].
// A result does not depend on what else is computed with it.
#pragma once

#include "conv.h"

namespace intaglio {

constexpr std::size_t kConvBlock = 32;  // channels, in and out

struct AmxConv : Conv {
    const std::uint16_t* packed;
    std::size_t channel_blocks, output_blocks, steps;
    // Of the source or, if it is upsampled, of pixels of the source: position (i, j) meets those from row
    // first_row + i and column first_column + j on.
    std::ptrdiff_t first_row, first_column;
    std::size_t grid_rows, grid_columns;
    std::size_t band_rows;       // positions in a band, a multiple of region_rows
    std::size_t region_columns;  // a multiple of 16
    std::size_t output_group;    // blocks of O in a part
    std::size_t image_columns;   // held, with those that a tap reaches

    INTAGLIO_INLINE std::size_t image_rows() const { return band_rows + tap_rows() - 1; }
    // In values.
    INTAGLIO_INLINE std::size_t block_stride() const { return image_columns * kConvBlock; }
    INTAGLIO_INLINE std::size_t row_stride() const { return channel_blocks * block_stride(); }
};

constexpr std::size_t kRegionRows = 8;
// Positions of a region times phases of the column.
constexpr std::size_t kRegionArea = 512;

// Block `block` of O of a weight.
void pack_conv_weight_amx(const ConvShape& shape, const float* weight, std::size_t block, std::uint16_t* to) noexcept;

// Row `row` of the image of a band.
void fill_conv_row_amx(const AmxConv& conv, std::size_t batch, std::size_t band, std::size_t row,
                       std::uint16_t* image) noexcept;

// The outputs of one region, a rectangle of positions of the grid, in blocks [block, block_end) of O.
struct ConvRegion {
    std::size_t batch, row, row_end, column, column_end, block, block_end;
};
// `image` is that of the band, which starts at position `band_row`.
void convolve_region_amx(const AmxConv& conv, const ConvRegion& region, std::size_t band_row,
                         const std::uint16_t* image) noexcept;

}  // namespace intaglio
