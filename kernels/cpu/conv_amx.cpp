#include "conv_amx.h"

#include <immintrin.h>

#include <cstring>

#include "amx_tiles.h"

namespace intaglio {
namespace {

constexpr std::size_t kTile = 16;             // rows, and values of 32 bits in a row
constexpr std::size_t kTileValues = 512;      // bfloat16 ones
constexpr std::size_t kChunk = 64;            // pixels that are converted at once
constexpr std::size_t kSums = 4 * kTile * kTile;  // of two rows of 16 positions and a block of O
// Steps whose weights stay near while the pixels of a region pass by.
constexpr std::size_t kSliceSteps = 9;

INTAGLIO_INLINE std::size_t smaller(std::size_t a, std::size_t b) { return a < b ? a : b; }

INTAGLIO_INLINE std::uint16_t to_bfloat16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
    return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Rows become columns.
INTAGLIO_INLINE void transpose(__m512i (&r)[kTile]) {
    __m512i t[kTile];
    INTAGLIO_UNROLL
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    INTAGLIO_UNROLL
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    INTAGLIO_UNROLL
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    INTAGLIO_UNROLL
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// x / (1 + exp(-x)) with an error of about 1e-4 of it, a twentieth of what rounding to bfloat16 makes.
INTAGLIO_INLINE __m512 silu(__m512 x) {
    const __m512 power = _mm512_max_ps(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)), _mm512_set1_ps(-126.0f));
    const __m512 whole = _mm512_roundscale_ps(power, 0x08);
    const __m512 part = _mm512_sub_ps(power, whole);
    // 2^part for part in [-0.5, 0.5].
    __m512 e = _mm512_set1_ps(0.0096181f);
    e = _mm512_fmadd_ps(e, part, _mm512_set1_ps(0.0555041f));
    e = _mm512_fmadd_ps(e, part, _mm512_set1_ps(0.2402265f));
    e = _mm512_fmadd_ps(e, part, _mm512_set1_ps(0.6931472f));
    e = _mm512_fmadd_ps(e, part, _mm512_set1_ps(1.0f));
    e = _mm512_scalef_ps(e, whole);
    return _mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(e, _mm512_set1_ps(1.0f))));
}

struct ChannelNorm {
    float mean = 0, scale = 1, bias = 0;
};

INTAGLIO_INLINE ChannelNorm norm_of(const AmxConv& conv, std::size_t batch, std::size_t channel) {
    ChannelNorm norm;
    if (!conv.mean) return norm;
    const std::size_t group = batch * conv.G + channel / (conv.C / conv.G);
    norm.mean = conv.mean[group];
    norm.scale = conv.norm_weight[channel] / __builtin_sqrtf(conv.variance[group] + conv.epsilon);
    norm.bias = conv.norm_bias[channel];
    return norm;
}

// Pixels of a channel, from `from` on, as they are multiplied.
template <bool Normed>
INTAGLIO_INLINE __m512 activation(const float* from, __mmask16 valid, const ChannelNorm& norm, __m512 row_mask) {
    __m512 x = _mm512_maskz_loadu_ps(valid, from);
    if (Normed) {
        x = _mm512_sub_ps(x, _mm512_set1_ps(norm.mean));
        x = silu(_mm512_fmadd_ps(x, _mm512_set1_ps(norm.scale), _mm512_set1_ps(norm.bias)));
    }
    return _mm512_maskz_mul_ps(valid, x, row_mask);
}

INTAGLIO_INLINE __mmask16 first_lanes(std::size_t count) {
    return static_cast<__mmask16>(count >= 16 ? 0xffffu : (1u << count) - 1u);
}

template <bool Normed>
void fill_row(const AmxConv& conv, std::size_t batch, std::size_t source_row, std::uint16_t* to) {
    const std::size_t pixels = conv.H * conv.W;
    const __m512 row_mask = _mm512_set1_ps(conv.row_mask ? conv.row_mask[source_row] : 1.0f);
    // Words of two channels, one after the other, to words of one pixel.
    alignas(64) std::uint16_t order_values[32];
    for (std::size_t i = 0; i < 16; ++i) {
        order_values[2 * i] = static_cast<std::uint16_t>(i);
        order_values[2 * i + 1] = static_cast<std::uint16_t>(16 + i);
    }
    const __m512i order = _mm512_load_si512(order_values);
    // Columns of the source that the image holds.
    const std::size_t first = conv.first_column > 0 ? static_cast<std::size_t>(conv.first_column) : 0;
    const std::ptrdiff_t image_end = conv.first_column + static_cast<std::ptrdiff_t>(conv.image_columns);
    const std::size_t end = image_end < 0 ? 0 : smaller(conv.W, static_cast<std::size_t>(image_end));
    for (std::size_t block = 0; block < conv.channel_blocks; ++block, to += conv.block_stride()) {
        if (end <= first) {
            std::memset(to, 0, conv.block_stride() * sizeof *to);
            continue;
        }
        const std::size_t before = static_cast<std::size_t>(static_cast<std::ptrdiff_t>(first) - conv.first_column);
        const std::size_t after = before + (end - first);
        std::memset(to, 0, before * kConvBlock * sizeof *to);
        std::memset(to + after * kConvBlock, 0, (conv.image_columns - after) * kConvBlock * sizeof *to);
        ChannelNorm norms[kConvBlock];
        const std::size_t channels = smaller(kConvBlock, conv.C - block * kConvBlock);
        for (std::size_t i = 0; i < channels; ++i) norms[i] = norm_of(conv, batch, block * kConvBlock + i);
        const float* x = conv.x + (batch * conv.C + block * kConvBlock) * pixels + source_row * conv.W;
        for (std::size_t column = first; column < end; column += kChunk) {
            const std::size_t count = smaller(kChunk, end - column);
            alignas(64) __m512i words[kTile][kChunk / kTile];
            for (std::size_t pair = 0; pair < kTile; ++pair) {
                const float* even = x + 2 * pair * pixels + column;
                const bool has_even = 2 * pair < channels, has_odd = 2 * pair + 1 < channels;
                // Rows of so many channels are too many for the machine to see them coming.
                for (std::size_t i = 0; i < kChunk; i += kTile) {
                    if (has_even) _mm_prefetch(even + kChunk + i, _MM_HINT_T0);
                    if (has_odd) _mm_prefetch(even + pixels + kChunk + i, _MM_HINT_T0);
                }
                for (std::size_t i = 0; i * kTile < count; ++i) {
                    const __mmask16 valid = first_lanes(count - i * kTile);
                    __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
                    if (has_even) low = activation<Normed>(even + i * kTile, valid, norms[2 * pair], row_mask);
                    if (has_odd)
                        high = activation<Normed>(even + pixels + i * kTile, valid, norms[2 * pair + 1], row_mask);
                    const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
                    words[pair][i] = _mm512_permutexvar_epi16(order, both);
                }
            }
            std::uint16_t* line = to + (before + column - first) * kConvBlock;
            for (std::size_t i = 0; i * kTile < count; ++i) {
                __m512i r[kTile];
                INTAGLIO_UNROLL
                for (std::size_t pair = 0; pair < kTile; ++pair) r[pair] = words[pair][i];
                transpose(r);
                const std::size_t lines = smaller(kTile, count - i * kTile);
                if (lines == kTile) {
                    INTAGLIO_UNROLL
                    for (std::size_t p = 0; p < kTile; ++p) _mm512_storeu_si512(line + p * kConvBlock, r[p]);
                } else {
                    alignas(64) __m512i rest[kTile];
                    INTAGLIO_UNROLL
                    for (std::size_t p = 0; p < kTile; ++p) rest[p] = r[p];
                    std::memcpy(line, rest, lines * sizeof rest[0]);
                }
                line += kTile * kConvBlock;
            }
        }
    }
}

// Adds `count` steps for two rows of 16 positions and a block of O to `sums`, or starts them.
INTAGLIO_INLINE void add_steps(const std::uint16_t* upper, std::size_t row_stride, const std::size_t* offsets,
                               const std::uint16_t* weight, std::size_t count, bool is_first, float* sums) {
    constexpr std::size_t area = kTile * kTile;
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + area, 64);
        _tile_loadd(2, sums + 2 * area, 64);
        _tile_loadd(3, sums + 3 * area, 64);
    }
    for (std::size_t i = 0; i < count; ++i, weight += 2 * kTileValues) {
        const std::uint16_t* pixels = upper + offsets[i];
        _tile_loadd(4, pixels, 64);
        _tile_loadd(6, weight, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weight + kTileValues, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, pixels + row_stride, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + area, 64);
    _tile_stored(2, sums + 2 * area, 64);
    _tile_stored(3, sums + 3 * area, 64);
}

// 16 values of one channel from column `column` of a row of y on, of which those within it are stored.
INTAGLIO_INLINE void store_row(const AmxConv& conv, std::size_t row_start, std::ptrdiff_t column, std::size_t count,
                               float bias, __m512 sum) {
    __mmask16 valid = first_lanes(count);
    if (column < 0) valid = static_cast<__mmask16>(valid & (0xffffu << -column));
    const std::ptrdiff_t left = static_cast<std::ptrdiff_t>(conv.y_width) - column;
    if (left < 16) valid = static_cast<__mmask16>(valid & (left <= 0 ? 0u : first_lanes(static_cast<std::size_t>(left))));
    const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(row_start) + column;
    sum = _mm512_add_ps(sum, _mm512_set1_ps(bias));
    if (conv.residual) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(valid, conv.residual + at));
    _mm512_mask_storeu_ps(conv.y + at, valid, sum);
}

// The sums of one tile: 16 positions, 16 channels.
INTAGLIO_INLINE void load_transposed(const float* sums, __m512 (&columns)[kTile]) {
    __m512i r[kTile];
    INTAGLIO_UNROLL
    for (std::size_t i = 0; i < kTile; ++i) r[i] = _mm512_loadu_si512(sums + i * kTile);
    transpose(r);
    INTAGLIO_UNROLL
    for (std::size_t i = 0; i < kTile; ++i) columns[i] = _mm512_castsi512_ps(r[i]);
}

}  // namespace

void pack_conv_weight_amx(const ConvShape& shape, const float* weight, std::size_t block, std::uint16_t* to) noexcept {
    const std::size_t blocks = (shape.C + kConvBlock - 1) / kConvBlock;
    const std::size_t kernel = shape.kernel_height * shape.kernel_width;
    const std::size_t phases = shape.phases(), taps = shape.taps();
    std::memset(to, 0, phases * phases * blocks * taps * 2 * kTileValues * sizeof *to);
    for (std::size_t o = 0; o < kConvBlock && block * kConvBlock + o < shape.O; ++o)
        for (std::size_t c = 0; c < shape.C; ++c) {
            const float* from = weight + ((block * kConvBlock + o) * shape.C + c) * kernel;
            const std::size_t in_block = c % kConvBlock;
            const std::size_t in_tile = o / kTile * kTileValues + (in_block / 2 * kTile + o % kTile) * 2 + in_block % 2;
            for (std::size_t phase = 0; phase < phases * phases; ++phase)
                for (std::size_t tap = 0; tap < taps; ++tap) {
                    const float value = shape.is_upsampled ? upsampled_tap(from, phase, tap) : from[tap];
                    const std::size_t step = (phase * blocks + c / kConvBlock) * taps + tap;
                    to[step * 2 * kTileValues + in_tile] = to_bfloat16(value);
                }
        }
}

void fill_conv_row_amx(const AmxConv& conv, std::size_t batch, std::size_t band, std::size_t row,
                       std::uint16_t* image) noexcept {
    std::uint16_t* to = image + row * conv.row_stride();
    const std::ptrdiff_t source = conv.first_row + static_cast<std::ptrdiff_t>(band * conv.band_rows + row);
    if (source < 0 || source >= static_cast<std::ptrdiff_t>(conv.H)) {
        std::memset(to, 0, conv.row_stride() * sizeof *to);
    } else if (conv.mean) {
        fill_row<true>(conv, batch, static_cast<std::size_t>(source), to);
    } else {
        fill_row<false>(conv, batch, static_cast<std::size_t>(source), to);
    }
}

void convolve_region_amx(const AmxConv& conv, const ConvRegion& region, std::size_t band_row,
                         const std::uint16_t* image) noexcept {
    alignas(64) float sums[kRegionArea / (2 * kTile) * kSums];
    const std::size_t phases = conv.phases(), taps = conv.taps(), tap_columns = conv.tap_columns();
    const std::size_t row_pairs = (region.row_end - region.row + 1) / 2;
    const std::size_t tiles = (region.column_end - region.column + kTile - 1) / kTile;
    const std::size_t row_stride = conv.row_stride(), block_stride = conv.block_stride();
    const std::size_t slice = taps >= kSliceSteps ? taps : kSliceSteps / taps * taps;
    const std::uint16_t* start = image + (region.row - band_row) * row_stride + region.column * kConvBlock;
    load_tiles();
    for (std::size_t block = region.block; block < region.block_end; ++block)
        for (std::size_t phase_row = 0; phase_row < phases; ++phase_row) {
            const std::uint16_t* weight = conv.packed + (block * phases + phase_row) * phases * conv.steps * 2 * kTileValues;
            for (std::size_t phase = 0; phase < phases; ++phase, weight += conv.steps * 2 * kTileValues)
                for (std::size_t step = 0; step < conv.steps; step += slice) {
                    const std::size_t count = smaller(slice, conv.steps - step);
                    std::size_t offsets[kMaxConvTaps];
                    for (std::size_t i = 0; i < count; ++i) {
                        const std::size_t tap = (step + i) % taps;
                        offsets[i] = (step + i) / taps * block_stride + tap / tap_columns * row_stride +
                                     tap % tap_columns * kConvBlock;
                    }
                    float* to = sums + phase * row_pairs * tiles * kSums;
                    for (std::size_t i = 0; i < row_pairs; ++i)
                        for (std::size_t j = 0; j < tiles; ++j, to += kSums)
                            add_steps(start + 2 * i * row_stride + j * kTile * kConvBlock, row_stride, offsets,
                                      weight + step * 2 * kTileValues, count, step == 0, to);
                }
            for (std::size_t i = 0; i < 2 * row_pairs; ++i) {
                const std::size_t position = region.row + i;
                if (position >= region.row_end) break;
                const std::ptrdiff_t y_row = (conv.first_row + static_cast<std::ptrdiff_t>(position)) *
                                                 static_cast<std::ptrdiff_t>(phases) +
                                             static_cast<std::ptrdiff_t>(phase_row) + conv.pad_top;
                if (y_row < 0 || y_row >= static_cast<std::ptrdiff_t>(conv.y_height)) continue;
                for (std::size_t j = 0; j < tiles; ++j)
                    for (std::size_t half = 0; half < 2; ++half) {
                        const std::size_t channel = block * kConvBlock + half * kTile;
                        if (channel >= conv.O) break;
                        const std::size_t channels = smaller(kTile, conv.O - channel);
                        const std::size_t column = region.column + j * kTile;
                        const std::size_t count = smaller(kTile, region.column_end - column);
                        const float* from = sums + (i / 2 * tiles + j) * kSums + (i % 2 * 2 + half) * kTile * kTile;
                        const std::ptrdiff_t y_column = (conv.first_column + static_cast<std::ptrdiff_t>(column)) *
                                                            static_cast<std::ptrdiff_t>(phases) +
                                                        conv.pad_left;
                        std::size_t row_start = ((region.batch * conv.O + channel) * conv.y_height +
                                                 static_cast<std::size_t>(y_row)) *
                                                conv.y_width;
                        const float* bias = conv.bias ? conv.bias + channel : nullptr;
                        __m512 even[kTile], odd[kTile];
                        load_transposed(from, even);
                        if (phases == 2) load_transposed(from + row_pairs * tiles * kSums, odd);
                        alignas(64) float stored[2][kTile][kTile];
                        INTAGLIO_UNROLL
                        for (std::size_t c = 0; c < kTile; ++c) _mm512_store_ps(stored[0][c], even[c]);
                        if (phases == 2) {
                            INTAGLIO_UNROLL
                            for (std::size_t c = 0; c < kTile; ++c) _mm512_store_ps(stored[1][c], odd[c]);
                        }
                        for (std::size_t c = 0; c < channels; ++c, row_start += conv.y_height * conv.y_width) {
                            const __m512 first = _mm512_load_ps(stored[0][c]);
                            const float added = bias ? bias[c] : 0.0f;
                            if (phases == 1) {
                                store_row(conv, row_start, y_column, count, added, first);
                                continue;
                            }
                            const __m512 second = _mm512_load_ps(stored[1][c]);
                            const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
                            const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
                            store_row(conv, row_start, y_column, 2 * count, added,
                                      _mm512_permutex2var_ps(first, low, second));
                            store_row(conv, row_start, y_column + 16, 2 * count < 16 ? 0 : 2 * count - 16, added,
                                      _mm512_permutex2var_ps(first, high, second));
                        }
                    }
            }
        }
    release_tiles();
}

}  // namespace intaglio
