#include "conv_float.h"

#include <math.h>

#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace intaglio {
namespace {

// Width floats in a register, rows of a tile of products, vectors in such a row.
#if defined(__AVX512F__)
constexpr std::size_t kWidth = 16, kRows = 8, kVectors = 3;
struct Floats {
    __m512 v;
    INTAGLIO_INLINE void clear() { v = _mm512_setzero_ps(); }
    INTAGLIO_INLINE void load(const float* from) { v = _mm512_loadu_ps(from); }
    INTAGLIO_INLINE void fill(float value) { v = _mm512_set1_ps(value); }
    INTAGLIO_INLINE void store(float* to) const { _mm512_storeu_ps(to, v); }
    INTAGLIO_INLINE void add_product(const Floats& a, const Floats& b) { v = _mm512_fmadd_ps(a.v, b.v, v); }
};
#elif defined(__FMA__)
constexpr std::size_t kWidth = 8, kRows = 4, kVectors = 3;
struct Floats {
    __m256 v;
    INTAGLIO_INLINE void clear() { v = _mm256_setzero_ps(); }
    INTAGLIO_INLINE void load(const float* from) { v = _mm256_loadu_ps(from); }
    INTAGLIO_INLINE void fill(float value) { v = _mm256_set1_ps(value); }
    INTAGLIO_INLINE void store(float* to) const { _mm256_storeu_ps(to, v); }
    INTAGLIO_INLINE void add_product(const Floats& a, const Floats& b) { v = _mm256_fmadd_ps(a.v, b.v, v); }
};
#elif defined(__aarch64__)
constexpr std::size_t kWidth = 4, kRows = 8, kVectors = 3;
struct Floats {
    float32x4_t v;
    INTAGLIO_INLINE void clear() { v = vdupq_n_f32(0); }
    INTAGLIO_INLINE void load(const float* from) { v = vld1q_f32(from); }
    INTAGLIO_INLINE void fill(float value) { v = vdupq_n_f32(value); }
    INTAGLIO_INLINE void store(float* to) const { vst1q_f32(to, v); }
    INTAGLIO_INLINE void add_product(const Floats& a, const Floats& b) { v = vfmaq_f32(v, a.v, b.v); }
};
#else
constexpr std::size_t kWidth = 4, kRows = 4, kVectors = 3;
struct Floats {
    float v[kWidth];
    INTAGLIO_INLINE void clear() { fill(0); }
    INTAGLIO_INLINE void load(const float* from) { std::memcpy(v, from, sizeof v); }
    INTAGLIO_INLINE void fill(float value) {
        for (float& lane : v) lane = value;
    }
    INTAGLIO_INLINE void store(float* to) const { std::memcpy(to, v, sizeof v); }
    INTAGLIO_INLINE void add_product(const Floats& a, const Floats& b) {
        for (std::size_t i = 0; i < kWidth; ++i) v[i] += a.v[i] * b.v[i];
    }
};
#endif

INTAGLIO_INLINE std::size_t smaller(std::size_t a, std::size_t b) { return a < b ? a : b; }

// `groups` times the taps at `offsets` from pixels, which move on by `stride` between groups, into rows of sums.
template <std::size_t Vectors>
INTAGLIO_INLINE void multiply(const float* weight, const float* pixels, std::size_t stride, std::size_t groups,
                              const std::size_t* offsets, std::size_t taps, float* sums) {
    Floats sum[kRows][Vectors], x[Vectors], w;
    INTAGLIO_UNROLL
    for (std::size_t r = 0; r < kRows; ++r) {
        INTAGLIO_UNROLL
        for (std::size_t i = 0; i < Vectors; ++i) sum[r][i].clear();
    }
    for (std::size_t group = 0; group < groups; ++group, pixels += stride)
        for (std::size_t tap = 0; tap < taps; ++tap, weight += kOutputBlock) {
            INTAGLIO_UNROLL
            for (std::size_t i = 0; i < Vectors; ++i) x[i].load(pixels + offsets[tap] + i * kWidth);
            INTAGLIO_UNROLL
            for (std::size_t r = 0; r < kRows; ++r) {
                w.fill(weight[r]);
                INTAGLIO_UNROLL
                for (std::size_t i = 0; i < Vectors; ++i) sum[r][i].add_product(w, x[i]);
            }
        }
    INTAGLIO_UNROLL
    for (std::size_t r = 0; r < kRows; ++r) {
        INTAGLIO_UNROLL
        for (std::size_t i = 0; i < Vectors; ++i) sum[r][i].store(sums + r * kPixelBlock + i * kWidth);
    }
}

// A block of O times `count` pixels, which is at most kPixelBlock; those up to a whole register are made as well.
void multiply_block(const float* weight, const float* pixels, std::size_t stride, std::size_t groups,
                    const std::size_t* offsets, std::size_t taps, std::size_t count, float* sums) {
    for (std::size_t row = 0; row < kOutputBlock; row += kRows)
        for (std::size_t at = 0; at < count; at += kVectors * kWidth) {
            const float *w = weight + row, *x = pixels + at;
            float* to = sums + row * kPixelBlock + at;
            if (count - at > 2 * kWidth)
                multiply<3>(w, x, stride, groups, offsets, taps, to);
            else if (count - at > kWidth)
                multiply<2>(w, x, stride, groups, offsets, taps, to);
            else
                multiply<1>(w, x, stride, groups, offsets, taps, to);
        }
}

// x / (1 + exp(-x)), within 4e-7 of it.
INTAGLIO_INLINE float silu(float x) {
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23: added, it rounds to a whole number
    const float shifted = x * -1.44269504f + magic;
    const float whole = shifted - magic;
    // exp(-x) = 2^whole * exp(part), with ln 2 in two pieces.
    const float part = (-x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float e = 1.9875691500e-4f;
    e = e * part + 1.3981999507e-3f;
    e = e * part + 8.3334519073e-3f;
    e = e * part + 4.1665795894e-2f;
    e = e * part + 1.6666665459e-1f;
    e = e * part + 5.0000001201e-1f;
    e = e * part * part + part + 1.0f;
    std::uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + 0x3f800000u;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    // Beyond these the exponential is no float32. Chosen at the end, and not by bounding x: a compiler that divides by
    // the bound on the way makes subnormal numbers, which take a hundred times as long.
    float y = x / (1.0f + e * scale);
    y = x > 87.0f ? x : y;
    return x < -87.0f ? x * 0.0f : y;
}

struct ChannelNorm {
    float mean, scale, bias;
};

INTAGLIO_INLINE ChannelNorm norm_of(const Conv& conv, std::size_t batch, std::size_t channel) {
    const std::size_t group = batch * conv.G + channel / (conv.C / conv.G);
    return {conv.mean[group], conv.norm_weight[channel] / sqrtf(conv.variance[group] + conv.epsilon),
            conv.norm_bias[channel]};
}

// Columns [first, first + count) of a row of one channel as they are multiplied: zeros beyond the picture.
INTAGLIO_INLINE void fill_pixels(const Conv& conv, std::size_t batch, std::size_t channel, std::ptrdiff_t row,
                                 std::ptrdiff_t first, std::size_t count, float* to) {
    const auto height = static_cast<std::ptrdiff_t>(conv.H), width = static_cast<std::ptrdiff_t>(conv.W);
    const std::ptrdiff_t end = first + static_cast<std::ptrdiff_t>(count);
    const std::ptrdiff_t valid = first > 0 ? first : 0, valid_end = end < width ? end : width;
    if (row < 0 || row >= height || valid >= valid_end) {
        std::memset(to, 0, count * sizeof *to);
        return;
    }
    const std::size_t before = static_cast<std::size_t>(valid - first);
    const std::size_t pixels = static_cast<std::size_t>(valid_end - valid);
    const float* x = conv.x + ((batch * conv.C + channel) * conv.H + static_cast<std::size_t>(row)) * conv.W + valid;
    std::memset(to, 0, before * sizeof *to);
    std::memset(to + before + pixels, 0, (count - before - pixels) * sizeof *to);
    to += before;
    if (conv.mean) {
        const ChannelNorm norm = norm_of(conv, batch, channel);
        for (std::size_t i = 0; i < pixels; ++i) to[i] = silu((x[i] - norm.mean) * norm.scale + norm.bias);
    } else {
        std::memcpy(to, x, pixels * sizeof *to);
    }
    if (conv.row_mask)
        for (std::size_t i = 0; i < pixels; ++i) to[i] *= conv.row_mask[row];
}

// Asks for the same columns of a row of the next channel: rows of different channels lie too far apart for the machine
// to see them coming.
INTAGLIO_INLINE void prefetch_pixels(const Conv& conv, std::size_t batch, std::size_t channel, std::ptrdiff_t row,
                                     std::ptrdiff_t first, std::size_t count) {
#if defined(__GNUC__) || defined(__clang__)
    const auto height = static_cast<std::ptrdiff_t>(conv.H);
    if (channel + 1 >= conv.C || row < 0 || row >= height || first >= static_cast<std::ptrdiff_t>(conv.W)) return;
    const std::size_t at = first < 0 ? 0 : static_cast<std::size_t>(first);
    const float* x = conv.x + ((batch * conv.C + channel + 1) * conv.H + static_cast<std::size_t>(row)) * conv.W + at;
    for (std::size_t i = 0; i < smaller(count, conv.W - at); i += 16) __builtin_prefetch(x + i);
#else
    (void)conv, (void)batch, (void)channel, (void)row, (void)first, (void)count;
#endif
}

// Adds bias and residual to `count` values of row `row` of a channel of y, from `column` on; those beyond are dropped.
INTAGLIO_INLINE void store_row(const Conv& conv, std::size_t batch, std::size_t channel, std::size_t row,
                               std::ptrdiff_t column, std::size_t count, const float* values) {
    const std::size_t skipped = column < 0 ? smaller(count, static_cast<std::size_t>(-column)) : 0;
    const std::size_t at = column < 0 ? 0 : static_cast<std::size_t>(column);
    if (at >= conv.y_width) return;
    const std::size_t stored = smaller(count - skipped, conv.y_width - at);
    const std::size_t start = ((batch * conv.O + channel) * conv.y_height + row) * conv.y_width + at;
    const float bias = conv.bias ? conv.bias[channel] : 0.0f;
    float* y = conv.y + start;
    values += skipped;
    if (conv.residual) {
        const float* residual = conv.residual + start;
        for (std::size_t i = 0; i < stored; ++i) y[i] = values[i] + bias + residual[i];
    } else {
        for (std::size_t i = 0; i < stored; ++i) y[i] = values[i] + bias;
    }
}

void pack_direct(const DirectConv& conv, std::size_t block, float* weight) noexcept {
    const std::size_t kernel = conv.kernel_height * conv.kernel_width, taps = conv.taps();
    float* to = weight + block * conv.block_size();
    for (std::size_t phase = 0; phase < conv.phases() * conv.phases(); ++phase)
        for (std::size_t c = 0; c < conv.C; ++c)
            for (std::size_t tap = 0; tap < taps; ++tap, to += kOutputBlock)
                for (std::size_t i = 0; i < kOutputBlock; ++i) {
                    const std::size_t o = block * kOutputBlock + i;
                    const float* from = conv.weight + (o * conv.C + c) * kernel;
                    if (o >= conv.O)
                        to[i] = 0;
                    else
                        to[i] = conv.is_upsampled ? upsampled_tap(from, phase, tap) : from[tap];
                }
}

void fill_row(const DirectConv& conv, std::size_t batch, std::size_t band, std::size_t row, float* image) noexcept {
    const std::ptrdiff_t source = conv.first_row + static_cast<std::ptrdiff_t>(band * conv.band_rows + row);
    float* to = image + row * conv.row_stride();
    for (std::size_t c = 0; c < conv.C; ++c, to += conv.image_columns) {
        prefetch_pixels(conv, batch, c, source, conv.first_column, conv.image_columns);
        fill_pixels(conv, batch, c, source, conv.first_column, conv.image_columns, to);
    }
}

// Row `row` of the grid from `column` on, in block `block` of O.
INTAGLIO_INLINE void convolve_pixels(const DirectConv& conv, std::size_t batch, std::size_t row, std::size_t column,
                                     std::size_t block, const std::size_t* offsets, const float* weight,
                                     const float* image) {
    alignas(64) float sums[2][kOutputBlock * kPixelBlock], interleaved[2 * kPixelBlock];
    const std::size_t phases = conv.phases(), taps = conv.taps();
    const std::size_t count = smaller(kPixelBlock, conv.grid_columns - column);
    const auto step = static_cast<std::ptrdiff_t>(phases);
    const std::ptrdiff_t y_column = (conv.first_column + static_cast<std::ptrdiff_t>(column)) * step + conv.pad_left;
    image += row % conv.band_rows * conv.row_stride() + column;
    weight += block * conv.block_size();
    for (std::size_t phase_row = 0; phase_row < phases; ++phase_row) {
        const std::ptrdiff_t y_row = (conv.first_row + static_cast<std::ptrdiff_t>(row)) * step +
                                     static_cast<std::ptrdiff_t>(phase_row) + conv.pad_top;
        for (std::size_t phase = 0; phase < phases; ++phase, weight += conv.C * taps * kOutputBlock)
            multiply_block(weight, image, conv.image_columns, conv.C, offsets, taps, count, sums[phase]);
        if (y_row < 0 || y_row >= static_cast<std::ptrdiff_t>(conv.y_height)) continue;
        for (std::size_t i = 0; i < smaller(kOutputBlock, conv.O - block * kOutputBlock); ++i) {
            const float* values = sums[0] + i * kPixelBlock;
            if (phases == 2) {
                for (std::size_t j = 0; j < count; ++j) {
                    interleaved[2 * j] = values[j];
                    interleaved[2 * j + 1] = sums[1][i * kPixelBlock + j];
                }
                values = interleaved;
            }
            store_row(conv, batch, block * kOutputBlock + i, static_cast<std::size_t>(y_row), y_column, phases * count,
                      values);
        }
    }
}

void convolve_rows(const DirectConv& conv, const DirectRows& rows, const float* weight, const float* image) noexcept {
    const std::size_t tap_columns = conv.tap_columns();
    std::size_t offsets[kMaxConvTaps];
    for (std::size_t tap = 0; tap < conv.taps(); ++tap)
        offsets[tap] = tap / tap_columns * conv.row_stride() + tap % tap_columns;
    for (std::size_t column = 0; column < conv.grid_columns; column += kPixelBlock)
        for (std::size_t block = rows.block; block < rows.block_end; ++block)
            for (std::size_t row = rows.row; row < rows.row_end; ++row)
                convolve_pixels(conv, rows.batch, row, column, block, offsets, weight, image);
}

// As many numbers as a row of tiles that are transformed at once has.
#if defined(__GNUC__) || defined(__clang__)
typedef float Lanes __attribute__((vector_size(kTileLanes * sizeof(float))));
#else
struct Lanes {
    float v[kTileLanes];
};
INTAGLIO_INLINE Lanes operator+(const Lanes& a, const Lanes& b) {
    Lanes result;
    for (std::size_t i = 0; i < kTileLanes; ++i) result.v[i] = a.v[i] + b.v[i];
    return result;
}
INTAGLIO_INLINE Lanes operator-(const Lanes& a, const Lanes& b) {
    Lanes result;
    for (std::size_t i = 0; i < kTileLanes; ++i) result.v[i] = a.v[i] - b.v[i];
    return result;
}
INTAGLIO_INLINE Lanes operator*(const Lanes& a, float b) {
    Lanes result;
    for (std::size_t i = 0; i < kTileLanes; ++i) result.v[i] = a.v[i] * b;
    return result;
}
#endif

// The transforms of the paper's F(4, 3), of numbers or of Lanes.
template <typename T>
INTAGLIO_INLINE void transform_input(const T (&d)[6], T (&v)[6]) {
    const T even = d[4] - d[2] * 4.0f, odd = d[3] - d[1] * 4.0f;
    const T fourth = d[4] - d[2], third = (d[3] - d[1]) * 2.0f;
    v[0] = d[0] * 4.0f - d[2] * 5.0f + d[4];
    v[1] = even + odd;
    v[2] = even - odd;
    v[3] = fourth + third;
    v[4] = fourth - third;
    v[5] = d[1] * 4.0f - d[3] * 5.0f + d[5];
}

template <typename T>
INTAGLIO_INLINE void transform_output(const T (&m)[6], T (&y)[4]) {
    const T sum = m[1] + m[2], difference = m[1] - m[2];
    const T far_sum = m[3] + m[4], far_difference = m[3] - m[4];
    y[0] = m[0] + sum + far_sum;
    y[1] = difference + far_difference * 2.0f;
    y[2] = sum + far_sum * 4.0f;
    y[3] = difference + far_difference * 8.0f + m[5];
}

INTAGLIO_INLINE void transform_taps(const float* g, std::size_t step, float (&u)[6]) {
    const float a = g[0], b = g[step], c = g[2 * step];
    u[0] = a * (1.0f / 4.0f);
    u[1] = (a + b + c) * (-1.0f / 6.0f);
    u[2] = (a - b + c) * (-1.0f / 6.0f);
    u[3] = a * (1.0f / 24.0f) + b * (1.0f / 12.0f) + c * (1.0f / 6.0f);
    u[4] = a * (1.0f / 24.0f) - b * (1.0f / 12.0f) + c * (1.0f / 6.0f);
    u[5] = c;
}

void transform_weight(const WinogradConv& conv, std::size_t block, float* weight) noexcept {
    weight += block * conv.C * kOutputBlock;
    for (std::size_t c = 0; c < conv.C; ++c) {
        alignas(64) float terms[kTerms][kOutputBlock] = {};
        for (std::size_t i = 0; i < kOutputBlock && block * kOutputBlock + i < conv.O; ++i) {
            const float* g = conv.weight + ((block * kOutputBlock + i) * conv.C + c) * 9;
            float columns[3][6], rows[3][6], u[6];
            for (std::size_t j = 0; j < 3; ++j) transform_taps(g + j, 3, columns[j]);
            for (std::size_t row = 0; row < 6; ++row) {
                for (std::size_t j = 0; j < 3; ++j) rows[j][row] = columns[j][row];
                const float g_row[3] = {rows[0][row], rows[1][row], rows[2][row]};
                transform_taps(g_row, 1, u);
                for (std::size_t k = 0; k < 6; ++k) terms[row * 6 + k][i] = u[k];
            }
        }
        for (std::size_t term = 0; term < kTerms; ++term)
            std::memcpy(weight + term * conv.weight_term() + c * kOutputBlock, terms[term], sizeof terms[term]);
    }
}

void transform_pixels(const WinogradConv& conv, std::size_t batch, std::size_t band, std::size_t row,
                      std::size_t channel, float* pixels) noexcept {
    constexpr std::size_t held = kTileLanes + 1, width = kTileSide * held;
    alignas(64) float line[width], d[6][kTileSide][held];
    const std::ptrdiff_t source = static_cast<std::ptrdiff_t>((band * conv.band_rows + row) * kTileSide) - conv.pad_top;
    for (std::size_t vector = 0; vector < conv.vectors_across(); ++vector) {
        const std::ptrdiff_t column = static_cast<std::ptrdiff_t>(vector * kTileLanes * kTileSide) - conv.pad_left;
        for (std::size_t i = 0; i < 6; ++i) {
            const std::ptrdiff_t from_row = source + static_cast<std::ptrdiff_t>(i);
            prefetch_pixels(conv, batch, channel, from_row, column, width);
            fill_pixels(conv, batch, channel, from_row, column, width, line);
            for (std::size_t p = 0; p < kTileSide; ++p)
                for (std::size_t t = 0; t < held; ++t) d[i][p][t] = line[t * kTileSide + p];
        }
        const std::size_t at = (row * conv.vectors_across() + vector) * kTileLanes;
        float* to = pixels + (at / kPixelBlock * conv.C + channel) * kPixelBlock + at % kPixelBlock;
        Lanes columns[6][6];  // [column][row]
        for (std::size_t j = 0; j < 6; ++j) {
            Lanes from[6];
            for (std::size_t i = 0; i < 6; ++i)
                std::memcpy(&from[i], &d[i][j % kTileSide][j / kTileSide], sizeof from[i]);
            transform_input(from, columns[j]);
        }
        for (std::size_t i = 0; i < 6; ++i) {
            Lanes from[6], v[6];
            for (std::size_t j = 0; j < 6; ++j) from[j] = columns[j][i];
            transform_input(from, v);
            for (std::size_t j = 0; j < 6; ++j) std::memcpy(to + (i * 6 + j) * conv.pixel_term(), &v[j], sizeof v[j]);
        }
    }
}

void multiply_term(const WinogradConv& conv, std::size_t term, std::size_t block, std::size_t block_end,
                   const float* weight, const float* pixels, float* sums) noexcept {
    weight += term * conv.weight_term();
    pixels += term * conv.pixel_term();
    sums += term * conv.sum_term();
    // Several channels in a turn of the loop.
    const std::size_t taps = conv.C % 8 == 0 ? 8 : conv.C % 4 == 0 ? 4 : 1;
    std::size_t offsets[8];
    for (std::size_t i = 0; i < taps; ++i) offsets[i] = i * kPixelBlock;
    const std::size_t tiles = conv.band_rows * conv.tile_columns;
    for (std::size_t b = block; b < block_end; ++b)
        for (std::size_t at = 0; at < conv.blocks(); ++at)
            multiply_block(weight + b * conv.C * kOutputBlock, pixels + at * conv.C * kPixelBlock, taps * kPixelBlock,
                           conv.C / taps, offsets, taps, smaller(kPixelBlock, tiles - at * kPixelBlock),
                           sums + at * conv.sum_block() + b * kOutputBlock * kPixelBlock);
}

void transform_sums(const WinogradConv& conv, std::size_t batch, std::size_t band, std::size_t row,
                    std::size_t channel, const float* sums) noexcept {
    const std::size_t y_row = (band * conv.band_rows + row) * kTileSide;
    for (std::size_t vector = 0; vector < conv.vectors_across(); ++vector) {
        const std::size_t at = (row * conv.vectors_across() + vector) * kTileLanes;
        const float* from = sums + at / kPixelBlock * conv.sum_block() + channel * kPixelBlock + at % kPixelBlock;
        Lanes columns[6][4];  // [column][row]
        for (std::size_t j = 0; j < 6; ++j) {
            Lanes m[6];
            for (std::size_t i = 0; i < 6; ++i) std::memcpy(&m[i], from + (i * 6 + j) * conv.sum_term(), sizeof m[i]);
            transform_output(m, columns[j]);
        }
        for (std::size_t i = 0; i < kTileSide && y_row + i < conv.y_height; ++i) {
            Lanes m[6], y[4];
            for (std::size_t j = 0; j < 6; ++j) m[j] = columns[j][i];
            transform_output(m, y);
            alignas(64) float lanes[kTileSide][kTileLanes], values[kTileSide * kTileLanes];
            std::memcpy(lanes, y, sizeof lanes);
            for (std::size_t t = 0; t < kTileLanes; ++t)
                for (std::size_t p = 0; p < kTileSide; ++p) values[t * kTileSide + p] = lanes[p][t];
            store_row(conv, batch, channel, y_row + i, static_cast<std::ptrdiff_t>(vector * kTileLanes * kTileSide),
                      kTileLanes * kTileSide, values);
        }
    }
}

}  // namespace

extern const FloatConvKernels INTAGLIO_FOR_ISA(float_conv_kernels);
const FloatConvKernels INTAGLIO_FOR_ISA(float_conv_kernels) = {
    &pack_direct,      &fill_row,      &convolve_rows,  &transform_weight,
    &transform_pixels, &multiply_term, &transform_sums,
};

}  // namespace intaglio
