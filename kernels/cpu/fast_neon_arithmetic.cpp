// Many rows of x at the accuracy `fast` on ARM, compiled for dot products and for products of 8-bit matrices.
//
// Both sides are bytes in tiles: kNeonTile rows of x, or columns of y, for kSpan inputs, and again for the next.
// Groups are padded with zeros to a multiple of kSpan inputs.

#include "fast_activations.h"
#include "ceil_div.h"
#include "fast_neon.h"

namespace intaglio {
namespace {

constexpr std::size_t kSpan = 16;

// Sizes in bytes and where the parts begin. A tile of rows: codes; then for each group and row its scale, its scale
// times its sum, and what is to be added to its dot products. A tile of columns: codes; then for each group and
// column its scale and its offset.
struct Layout {
    explicit Layout(const GroupedQuantMatMul& p)
        : groups(p.K / p.group_size),
          group_inputs(ceil_div(p.group_size, kSpan) * kSpan),
          group_bytes(kNeonTile * group_inputs),
          scales(groups * group_bytes),
          sums(scales + groups * kNeonTile * sizeof(float)),
          corrections(sums + groups * kNeonTile * sizeof(float)),
          rows_bytes(ceil_div(corrections + groups * kNeonTile * sizeof(std::int32_t), 64) * 64),
          offsets(sums),
          column_bytes(ceil_div(groups * (group_inputs + 2 * sizeof(float)), 64) * 64),
          shift(p.bits == 8 ? 128 : p.zero_point) {}

    std::size_t groups, group_inputs, group_bytes, scales, sums, corrections, rows_bytes, offsets, column_bytes;
    int shift;  // codes are stored less this, which fits a signed byte
};

template <typename T>
INTAGLIO_INLINE T* at(std::byte* tile, std::size_t offset) {
    return reinterpret_cast<T*>(tile + offset);
}
template <typename T>
INTAGLIO_INLINE const T* at(const std::byte* tile, std::size_t offset) {
    return reinterpret_cast<const T*>(tile + offset);
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Two rows or columns side by side: what a product of matrices takes.
constexpr std::size_t kRowRun = 8, kColumnRun = 8;
#else
// What a dot product by lane takes.
constexpr std::size_t kRowRun = kSpan, kColumnRun = 4;
#endif

// Codes of one row or column to where its tile has them: runs of Run inputs of all its lines, one after the other.
template <std::size_t Run>
INTAGLIO_INLINE void place(const std::int8_t* codes, std::size_t count, std::size_t line, std::int8_t* tile) {
    for (std::size_t k = 0; k < count; k += Run) std::memcpy(tile + k * kNeonTile + line * Run, codes + k, Run);
}

// Inputs that are converted at a time.
constexpr std::size_t kChunk = 256;

void quantize_row(const GroupedQuantMatMul& p, const Layout& layout, const char* x, std::size_t line,
                  std::byte* tile) {
    std::int8_t codes[kChunk];
    for (std::size_t group = 0; group < layout.groups; ++group) {
        const char* values = x + group * p.group_size * sizeof(float);
        const ActivationScale scale = activation_scale(largest_magnitude(values, p.group_size));
        std::int32_t sum = 0;
        for (std::size_t k = 0; k < p.group_size; k += kChunk) {
            const std::size_t count = smaller(kChunk, p.group_size - k);
            std::memset(codes, 0, sizeof codes);
            sum += round_activations(values + k * sizeof(float), count, scale.inverse, codes);
            place<kRowRun>(codes, ceil_div(count, kSpan) * kSpan, line,
                           at<std::int8_t>(tile, group * layout.group_bytes + k * kNeonTile));
        }
        at<float>(tile, layout.scales)[group * kNeonTile + line] = scale.scale;
        at<float>(tile, layout.sums)[group * kNeonTile + line] = scale.scale * static_cast<float>(sum);
        at<std::int32_t>(tile, layout.corrections)[group * kNeonTile + line] = (layout.shift - p.zero_point) * sum;
    }
}

void quantize(const GroupedQuantMatMul& p, std::size_t row, std::byte* activations) {
    const Layout layout(p);
    const std::size_t rows = smaller(kNeonTile, p.M - row);
    if (rows < kNeonTile) std::memset(activations, 0, layout.rows_bytes);
    for (std::size_t r = 0; r < rows; ++r)
        quantize_row(p, layout, static_cast<const char*>(p.x) + (row + r) * p.K * sizeof(float), r, activations);
}

// The codes of `count` packed bytes, less the shift.
template <int Bits>
INTAGLIO_INLINE void unpack(const std::uint8_t* packed, std::size_t count, int shift, std::int8_t* codes) {
    const int8x16_t shifts = vdupq_n_s8(static_cast<std::int8_t>(shift));
    constexpr int mask = (1 << Bits) - 1;
    constexpr std::size_t per_byte = 8 / Bits;
    const auto shifted = [shifts](uint8x16_t code) { return vsubq_s8(vreinterpretq_s8_u8(code), shifts); };
    std::size_t b = 0;
    for (; b + 16 <= count; b += 16) {
        const uint8x16_t bytes = vld1q_u8(packed + b), low = vandq_u8(bytes, vdupq_n_u8(mask));
        if constexpr (Bits == 8) vst1q_s8(codes + b, shifted(bytes));
        if constexpr (Bits == 4) {
            const int8x16x2_t halves = {shifted(low), shifted(vshrq_n_u8(bytes, 4))};
            vst2q_s8(codes + 2 * b, halves);
        }
        if constexpr (Bits == 2) {
            const int8x16x4_t quarters = {shifted(low), shifted(vandq_u8(vshrq_n_u8(bytes, 2), vdupq_n_u8(mask))),
                                          shifted(vandq_u8(vshrq_n_u8(bytes, 4), vdupq_n_u8(mask))),
                                          shifted(vshrq_n_u8(bytes, 6))};
            vst4q_s8(codes + 4 * b, quarters);
        }
    }
    for (; b < count; ++b)
        for (std::size_t j = 0; j < per_byte; ++j)
            codes[b * per_byte + j] = static_cast<std::int8_t>((packed[b] >> Bits * j & mask) - shift);
}

template <int Bits>
void unpack_column(const GroupedQuantMatMul& p, const Layout& layout, std::size_t column, std::size_t line,
                   std::byte* tile) {
    constexpr std::size_t per_byte = 8 / Bits;
    std::int8_t codes[kChunk];
    for (std::size_t group = 0; group < layout.groups; ++group)
        for (std::size_t k = 0; k < p.group_size; k += kChunk) {
            const std::size_t count = smaller(kChunk, p.group_size - k);
            std::memset(codes, 0, sizeof codes);
            unpack<Bits>(p.codes + (column * p.K + group * p.group_size + k) / per_byte, count / per_byte, layout.shift,
                         codes);
            place<kColumnRun>(codes, ceil_div(count, kSpan) * kSpan, line,
                              at<std::int8_t>(tile, group * layout.group_bytes + k * kNeonTile));
        }
    float values[kChunk];
    const auto convert = [&](const std::uint8_t* from, std::size_t offset) {
        for (std::size_t group = 0; group < layout.groups; group += kChunk) {
            const std::size_t count = smaller(kChunk, layout.groups - group);
            load_scales(from, column * layout.groups + group, count, p.scale_type, values);
            for (std::size_t g = 0; g < count; ++g)
                at<float>(tile, offset)[(group + g) * kNeonTile + line] = values[g];
        }
    };
    convert(p.scales, layout.scales);
    if (p.offset_per_group) convert(p.offsets, layout.offsets);
}

// kNeonTile rows times kNeonTile columns.
#if defined(__ARM_FEATURE_MATMUL_INT8)

INTAGLIO_INLINE float32x4_t twice(const float* pair) { return vcombine_f32(vld1_f32(pair), vld1_f32(pair)); }
INTAGLIO_INLINE float32x4_t each_twice(const float* pair) {
    return vcombine_f32(vdup_n_f32(pair[0]), vdup_n_f32(pair[1]));
}

INTAGLIO_INLINE void multiply_tile(const GroupedQuantMatMul& p, const Layout& layout, const std::byte* rows,
                                   const std::byte* columns, float (&y)[kNeonTile][kNeonTile]) {
    // Each vector holds two rows of two columns.
    float32x4_t total[4][4] = {};
    for (std::size_t group = 0; group < layout.groups; ++group) {
        int32x4_t sums[4][4];
        INTAGLIO_UNROLL
        for (std::size_t i = 0; i < 4; ++i) {
            const std::int32_t* pair = at<std::int32_t>(rows, layout.corrections) + group * kNeonTile + 2 * i;
            INTAGLIO_UNROLL
            for (std::size_t j = 0; j < 4; ++j) sums[i][j] = vcombine_s32(vdup_n_s32(pair[0]), vdup_n_s32(pair[1]));
        }
        const auto a = at<std::int8_t>(rows, group * layout.group_bytes);
        const auto b = at<std::int8_t>(columns, group * layout.group_bytes);
        for (std::size_t k = 0; k < layout.group_bytes; k += kRowRun * kNeonTile) {
            int8x16_t of_rows[4];
            INTAGLIO_UNROLL
            for (std::size_t i = 0; i < 4; ++i) of_rows[i] = vld1q_s8(a + k + 16 * i);
            INTAGLIO_UNROLL
            for (std::size_t j = 0; j < 4; ++j) {
                const int8x16_t of_columns = vld1q_s8(b + k + 16 * j);
                INTAGLIO_UNROLL
                for (std::size_t i = 0; i < 4; ++i) sums[i][j] = vmmlaq_s32(sums[i][j], of_rows[i], of_columns);
            }
        }
        INTAGLIO_UNROLL
        for (std::size_t j = 0; j < 4; ++j) {
            const std::size_t pair = group * kNeonTile + 2 * j;
            const float32x4_t scale = twice(at<float>(columns, layout.scales) + pair);
            INTAGLIO_UNROLL
            for (std::size_t i = 0; i < 4; ++i) {
                const float32x4_t of_rows = each_twice(at<float>(rows, layout.scales) + group * kNeonTile + 2 * i);
                total[i][j] = vfmaq_f32(total[i][j], vcvtq_f32_s32(sums[i][j]), vmulq_f32(scale, of_rows));
            }
            if (!p.offset_per_group) continue;
            const float32x4_t offset = twice(at<float>(columns, layout.offsets) + pair);
            INTAGLIO_UNROLL
            for (std::size_t i = 0; i < 4; ++i)
                total[i][j] = vfmaq_f32(
                    total[i][j], offset, each_twice(at<float>(rows, layout.sums) + group * kNeonTile + 2 * i));
        }
    }
    for (std::size_t i = 0; i < 4; ++i)
        for (std::size_t j = 0; j < 4; ++j) {
            vst1_f32(y[2 * i] + 2 * j, vget_low_f32(total[i][j]));
            vst1_f32(y[2 * i + 1] + 2 * j, vget_high_f32(total[i][j]));
        }
}

#else

template <int Lane>
INTAGLIO_INLINE void add_inputs(const std::int8_t* columns, const int8x16_t (&of_rows)[kNeonTile],
                                int32x4_t (&sums)[kNeonTile][2]) {
    const int8x16_t left = vld1q_s8(columns + Lane * 32), right = vld1q_s8(columns + Lane * 32 + 16);
    INTAGLIO_UNROLL
    for (std::size_t r = 0; r < kNeonTile; ++r) {
        sums[r][0] = vdotq_laneq_s32(sums[r][0], left, of_rows[r], Lane);
        sums[r][1] = vdotq_laneq_s32(sums[r][1], right, of_rows[r], Lane);
    }
}

INTAGLIO_INLINE void multiply_tile(const GroupedQuantMatMul& p, const Layout& layout, const std::byte* rows,
                                   const std::byte* columns, float (&y)[kNeonTile][kNeonTile]) {
    float32x4_t total[kNeonTile][2] = {};
    for (std::size_t group = 0; group < layout.groups; ++group) {
        int32x4_t sums[kNeonTile][2];
        INTAGLIO_UNROLL
        for (std::size_t r = 0; r < kNeonTile; ++r)
            sums[r][0] = sums[r][1] =
                vdupq_n_s32(at<std::int32_t>(rows, layout.corrections)[group * kNeonTile + r]);
        const auto a = at<std::int8_t>(rows, group * layout.group_bytes);
        const auto b = at<std::int8_t>(columns, group * layout.group_bytes);
        for (std::size_t k = 0; k < layout.group_bytes; k += kSpan * kNeonTile) {
            int8x16_t of_rows[kNeonTile];
            INTAGLIO_UNROLL
            for (std::size_t r = 0; r < kNeonTile; ++r) of_rows[r] = vld1q_s8(a + k + r * kSpan);
            add_inputs<0>(b + k, of_rows, sums);
            add_inputs<1>(b + k, of_rows, sums);
            add_inputs<2>(b + k, of_rows, sums);
            add_inputs<3>(b + k, of_rows, sums);
        }
        INTAGLIO_UNROLL
        for (std::size_t half = 0; half < 2; ++half) {
            const std::size_t first = group * kNeonTile + 4 * half;
            const float32x4_t scale = vld1q_f32(at<float>(columns, layout.scales) + first);
            INTAGLIO_UNROLL
            for (std::size_t r = 0; r < kNeonTile; ++r) {
                const float of_row = at<float>(rows, layout.scales)[group * kNeonTile + r];
                total[r][half] =
                    vfmaq_f32(total[r][half], vcvtq_f32_s32(sums[r][half]), vmulq_n_f32(scale, of_row));
            }
            if (!p.offset_per_group) continue;
            const float32x4_t offset = vld1q_f32(at<float>(columns, layout.offsets) + first);
            INTAGLIO_UNROLL
            for (std::size_t r = 0; r < kNeonTile; ++r)
                total[r][half] =
                    vfmaq_n_f32(total[r][half], offset, at<float>(rows, layout.sums)[group * kNeonTile + r]);
        }
    }
    for (std::size_t r = 0; r < kNeonTile; ++r)
        for (std::size_t half = 0; half < 2; ++half) vst1q_f32(y[r] + 4 * half, total[r][half]);
}

#endif

void multiply(const GroupedQuantMatMul& p, const std::byte* activations, std::size_t column, std::size_t column_end,
              std::byte* panel) {
    const Layout layout(p);
    const std::size_t tiles = ceil_div(column_end - column, kNeonTile);
    std::memset(panel + (tiles - 1) * kNeonTile * layout.column_bytes, 0, kNeonTile * layout.column_bytes);
    for (std::size_t c = column; c < column_end; ++c) {
        std::byte* tile = panel + (c - column) / kNeonTile * kNeonTile * layout.column_bytes;
        const std::size_t line = (c - column) % kNeonTile;
        if (p.bits == 2) unpack_column<2>(p, layout, c, line, tile);
        if (p.bits == 4) unpack_column<4>(p, layout, c, line, tile);
        if (p.bits == 8) unpack_column<8>(p, layout, c, line, tile);
    }
    for (std::size_t row = 0; row < p.M; row += kNeonTile)
        for (std::size_t tile = 0; tile < tiles; ++tile) {
            float y[kNeonTile][kNeonTile];
            multiply_tile(p, layout, activations + row / kNeonTile * layout.rows_bytes,
                          panel + tile * kNeonTile * layout.column_bytes, y);
            const std::size_t first = column + tile * kNeonTile, columns = smaller(kNeonTile, column_end - first);
            for (std::size_t r = 0; r < smaller(kNeonTile, p.M - row); ++r)
                std::memcpy(p.y + (row + r) * p.N + first, y[r], columns * sizeof(float));
        }
}

std::size_t rows_bytes(const GroupedQuantMatMul& p) { return Layout(p).rows_bytes; }
std::size_t column_bytes(const GroupedQuantMatMul& p) { return Layout(p).column_bytes; }

}  // namespace

FastNeonKernel INTAGLIO_FOR_ISA(fast_neon)() noexcept { return {rows_bytes, column_bytes, quantize, multiply}; }

}  // namespace intaglio
