// Convolution in float32: direct, and by Winograd's minimal filtering F(4x4, 3x3) (Lavin and Gray, 2015), which has 36
// products for 144. Files that include this are compiled once for each instruction set (for_isa.h).
//
// Products are made by one tile for both: kOutputBlock channels of O times up to kPixelBlock pixels (or the same term
// of as many transformed tiles), added over channels and taps in registers.
#pragma once

#include "conv.h"
#include "for_isa.h"

namespace intaglio {

constexpr std::size_t kOutputBlock = 8, kPixelBlock = 48;

// Weights lie as [block of O][phase of the row][phase of the column][C][tap][8]. Pixels lie as [row][C][column].
struct DirectConv : Conv {
    std::size_t output_blocks;
    // Position (i, j) of the grid meets pixels from row first_row + i and column first_column + j on.
    std::ptrdiff_t first_row, first_column;
    std::size_t grid_rows, grid_columns;
    std::size_t band_rows;
    std::size_t image_columns;

    INTAGLIO_INLINE std::size_t image_rows() const { return band_rows + tap_rows() - 1; }
    INTAGLIO_INLINE std::size_t row_stride() const { return C * image_columns; }
    INTAGLIO_INLINE std::size_t block_size() const { return phases() * phases() * C * taps() * kOutputBlock; }
};

struct DirectRows {
    std::size_t batch, row, row_end, block, block_end;
};

// Tiles are 4 x 4 pixels of y. They are counted along rows of tiles, whose last ones are beyond y where that
// makes a row a multiple of kTileLanes, and lie in blocks of kPixelBlock. Terms are numbered from 0 to 35.
// Weights lie as [term][block of O][C][8], pixels as [term][block of tiles][C][48], sums as
// [term][block of tiles][O up to a whole block][48].
constexpr std::size_t kTileSide = 4, kTerms = 36, kTileLanes = 16;

struct WinogradConv : Conv {
    std::size_t output_blocks;
    std::size_t tile_rows, tile_columns;  // tile_columns is a multiple of kTileLanes
    std::size_t band_rows;                // of tiles

    INTAGLIO_INLINE std::size_t vectors_across() const { return tile_columns / kTileLanes; }
    INTAGLIO_INLINE std::size_t blocks() const { return (band_rows * tile_columns + kPixelBlock - 1) / kPixelBlock; }
    INTAGLIO_INLINE std::size_t weight_term() const { return output_blocks * C * kOutputBlock; }
    INTAGLIO_INLINE std::size_t pixel_term() const { return blocks() * C * kPixelBlock; }
    INTAGLIO_INLINE std::size_t sum_block() const { return output_blocks * kOutputBlock * kPixelBlock; }
    INTAGLIO_INLINE std::size_t sum_term() const { return blocks() * sum_block(); }
};

// The kernels of one instruction set.
struct FloatConvKernels {
    void (*pack_direct)(const DirectConv& conv, std::size_t block, float* weight) noexcept;
    void (*fill_row)(const DirectConv& conv, std::size_t batch, std::size_t band, std::size_t row,
                     float* image) noexcept;
    // Outputs of rows [row, row_end) of the grid, all of one band, in blocks [block, block_end).
    void (*convolve_rows)(const DirectConv& conv, const DirectRows& rows, const float* weight,
                          const float* image) noexcept;

    void (*transform_weight)(const WinogradConv& conv, std::size_t block, float* weight) noexcept;
    // One channel of row `row` of the band's tiles.
    void (*transform_pixels)(const WinogradConv& conv, std::size_t batch, std::size_t band, std::size_t row,
                             std::size_t channel, float* pixels) noexcept;
    void (*multiply_term)(const WinogradConv& conv, std::size_t term, std::size_t block, std::size_t block_end,
                          const float* weight, const float* pixels, float* sums) noexcept;
    // One channel of y of row `row` of the band's tiles.
    void (*transform_sums)(const WinogradConv& conv, std::size_t batch, std::size_t band, std::size_t row,
                           std::size_t channel, const float* sums) noexcept;
};

extern const FloatConvKernels float_conv_kernels_portable, float_conv_kernels_avx2, float_conv_kernels_avx512;

}  // namespace intaglio
