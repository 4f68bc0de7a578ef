// The arithmetic of one part of a product, compiled once for each instruction set: the regime of many rows.
//
// A panel of the weight is decoded to float32, and every row of x of the part meets it in the cache. One
// output is the sum of its products in the order of the inputs, kPanelInputs at a time, fused where the
// target has such an instruction; the sums are added in order.

#include "grouped_quant_arithmetic.h"

namespace intaglio {
namespace {

// The panel lies as slivers [kPanelInputs, kLanes]: kLanes columns of y side by side, input after input.
constexpr std::size_t kLanes = 16;
constexpr std::size_t kSliver = kPanelInputs * kLanes;

// Rows of x are copied to this stride before they meet a panel. Rows of a power of two apart would share
// their places in the first-level cache.
constexpr std::size_t kStripStride = kPanelInputs + kLanes;

// A tile of y is kRows rows and kVectors vectors of kWidth. Its sums, one row of the panel and a value of x
// must fit the registers: 32 with AVX-512 and NEON, else 16. Fourteen rows of two vectors need less of the
// panel with AVX-512, but their strip fills the first-level cache: measured slower beside other work.
#if defined(__AVX512F__)
constexpr std::size_t kWidth = 16, kRows = 8, kVectors = 3;
#elif defined(__AVX2__)
constexpr std::size_t kWidth = 8, kRows = 6, kVectors = 2;
#elif defined(__aarch64__) || defined(_M_ARM64)
constexpr std::size_t kWidth = 4, kRows = 6, kVectors = 4;
#else
constexpr std::size_t kWidth = 4, kRows = 6, kVectors = 2;
#endif
constexpr std::size_t kTileColumns = kWidth * kVectors;
constexpr std::size_t kTileSlivers = kTileColumns > kLanes ? kTileColumns / kLanes : 1;
static_assert(kPanelColumns % (kTileSlivers * kLanes) == 0 && (kTileSlivers * kLanes) % kTileColumns == 0);

// `count` bytes of each of kLanes rows to [count, kLanes].
#if defined(__SSE2__) || defined(__aarch64__)
#if defined(__SSE2__)
using Bytes = __m128i;
INTAGLIO_INLINE Bytes load_bytes(const std::uint8_t* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
INTAGLIO_INLINE void store_bytes(Bytes bytes, std::uint8_t* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}
INTAGLIO_INLINE Bytes interleave_low(Bytes a, Bytes b) { return _mm_unpacklo_epi8(a, b); }
INTAGLIO_INLINE Bytes interleave_high(Bytes a, Bytes b) { return _mm_unpackhi_epi8(a, b); }
#else
using Bytes = uint8x16_t;
INTAGLIO_INLINE Bytes load_bytes(const std::uint8_t* from) { return vld1q_u8(from); }
INTAGLIO_INLINE void store_bytes(Bytes bytes, std::uint8_t* to) { vst1q_u8(to, bytes); }
INTAGLIO_INLINE Bytes interleave_low(Bytes a, Bytes b) { return vzip1q_u8(a, b); }
INTAGLIO_INLINE Bytes interleave_high(Bytes a, Bytes b) { return vzip2q_u8(a, b); }
#endif
// A byte's place in the 16 x 16 has eight bits. Each round rotates them by one, so four swap row and column.
INTAGLIO_INLINE void transpose_square(const std::uint8_t* const (&rows)[kLanes], std::size_t at,
                                      std::uint8_t* to) {
    Bytes square[kLanes], next[kLanes];
    INTAGLIO_UNROLL
    for (std::size_t i = 0; i < kLanes; ++i) square[i] = load_bytes(rows[i] + at);
    INTAGLIO_UNROLL
    for (int round = 0; round < 4; ++round) {
        INTAGLIO_UNROLL
        for (std::size_t i = 0; i < kLanes / 2; ++i) {
            next[2 * i] = interleave_low(square[i], square[i + kLanes / 2]);
            next[2 * i + 1] = interleave_high(square[i], square[i + kLanes / 2]);
        }
        INTAGLIO_UNROLL
        for (std::size_t i = 0; i < kLanes; ++i) square[i] = next[i];
    }
    INTAGLIO_UNROLL
    for (std::size_t i = 0; i < kLanes; ++i) store_bytes(square[i], to + i * kLanes);
}
#else
INTAGLIO_INLINE void transpose_square(const std::uint8_t* const (&rows)[kLanes], std::size_t at,
                                      std::uint8_t* to) {
    for (std::size_t i = 0; i < kLanes; ++i)
        for (std::size_t j = 0; j < kLanes; ++j) to[j * kLanes + i] = rows[i][at + j];
}
#endif

INTAGLIO_INLINE void transpose(const std::uint8_t* const (&rows)[kLanes], std::size_t count,
                               std::uint8_t* to) {
    std::size_t at = 0;
    for (; at + kLanes <= count; at += kLanes) transpose_square(rows, at, to + at * kLanes);
    for (; at < count; ++at)
        for (std::size_t i = 0; i < kLanes; ++i) to[at * kLanes + i] = rows[i][at];
}

// Bytes [size, kLanes] of kLanes scales to float32.
INTAGLIO_INLINE void convert_scales(const std::uint8_t* bytes, ScaleType type, float* to) {
    std::uint32_t bits[kLanes];
    INTAGLIO_VECTORIZE
    for (std::size_t i = 0; i < kLanes; ++i)
        bits[i] = bytes[i] | static_cast<std::uint32_t>(bytes[kLanes + i]) << 8;
    if (type == ScaleType::kFloat16) {
        INTAGLIO_VECTORIZE
        for (std::size_t i = 0; i < kLanes; ++i) to[i] = float_of_half(static_cast<std::uint16_t>(bits[i]));
        return;
    }
    INTAGLIO_VECTORIZE
    for (std::size_t i = 0; i < kLanes; ++i) {
        if (type == ScaleType::kBfloat16) bits[i] <<= 16;
        if (type == ScaleType::kFloat32)
            bits[i] |= static_cast<std::uint32_t>(bytes[2 * kLanes + i]) << 16 |
                       static_cast<std::uint32_t>(bytes[3 * kLanes + i]) << 24;
        to[i] = float_of_bits(bits[i]);
    }
}

// The codes of kLanes packed bytes, one of each of kLanes columns, to float32: [8 / Bits, kLanes].
template <int Bits>
INTAGLIO_INLINE void dequantize_bytes(const std::uint8_t* packed, int zero_point, const float* scales,
                                      const float* offsets, float* w) {
#if defined(__AVX512F__)
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
    const __m512 scale = _mm512_loadu_ps(scales), offset = _mm512_loadu_ps(offsets);
    // Code minus zero point for each of the 16 values of the lowest four bits, which is all that the
    // permutation looks at.
    const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 levels = _mm512_cvtepi32_ps(_mm512_sub_epi32(
        _mm512_and_si512(numbers, _mm512_set1_epi32((1 << Bits) - 1)), _mm512_set1_epi32(zero_point)));
    INTAGLIO_UNROLL
    for (int i = 0; i < 8 / Bits; ++i) {
        const __m512i codes = _mm512_srli_epi32(bytes, static_cast<unsigned>(i * Bits));
        const __m512 values =
            Bits < 8 ? _mm512_permutexvar_ps(codes, levels)
                     : _mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(zero_point)));
        const __m512 scaled = _mm512_mul_ps(values, scale);
        _mm512_storeu_ps(w + static_cast<std::size_t>(i) * kLanes, _mm512_add_ps(scaled, offset));
    }
#elif defined(__AVX2__)
    INTAGLIO_UNROLL
    for (std::size_t half = 0; half < kLanes; half += 8) {
        const __m256i bytes =
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed + half)));
        const __m256 scale = _mm256_loadu_ps(scales + half), offset = _mm256_loadu_ps(offsets + half);
        INTAGLIO_UNROLL
        for (int i = 0; i < 8 / Bits; ++i) {
            const __m256i codes =
                _mm256_and_si256(_mm256_srli_epi32(bytes, i * Bits), _mm256_set1_epi32((1 << Bits) - 1));
            const __m256i values = _mm256_sub_epi32(codes, _mm256_set1_epi32(zero_point));
            const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(values), scale);
            _mm256_storeu_ps(w + static_cast<std::size_t>(i) * kLanes + half, _mm256_add_ps(scaled, offset));
        }
    }
#else
    for (std::size_t i = 0; i < 8 / Bits; ++i)
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            const int code = packed[lane] >> (i * Bits) & ((1 << Bits) - 1);
            w[i * kLanes + lane] = static_cast<float>(code - zero_point) * scales[lane] + offsets[lane];
        }
#endif
}

// Inputs [k, k + count) of kLanes rows of the weight from `column` on, to a sliver. Beyond the last row,
// the last is decoded again: what it makes is never stored.
template <int Bits>
INTAGLIO_INLINE void decode_sliver(const GroupedQuantMatMul& p, std::size_t column, std::size_t k,
                                   std::size_t count, float* w) {
    constexpr std::size_t per_byte = 8 / Bits, batch = 32;
    alignas(64) std::uint8_t codes[kSliver / per_byte];
    alignas(64) std::uint8_t scale_bytes[batch * 4 * kLanes], offset_bytes[batch * 4 * kLanes];
    alignas(64) float scales[kLanes], offsets[kLanes];
    const std::size_t groups = p.K / p.group_size, last_group = (k + count - 1) / p.group_size;
    const std::size_t scale_size = p.scale_type == ScaleType::kFloat32 ? 4 : 2;
    const int zero_point = p.zero_point;
    const std::uint8_t* rows[kLanes];
    std::size_t weight_rows[kLanes];
    for (std::size_t i = 0; i < kLanes; ++i) {
        weight_rows[i] = smaller(column + i, p.N - 1);
        rows[i] = p.codes + (weight_rows[i] * p.K + k) / per_byte;
    }
    transpose(rows, count / per_byte, codes);
    if (!p.offset_per_group) {
        load_scales(p.offsets, 0, 1, p.scale_type, offsets);
        for (float& offset : offsets) offset = offsets[0];
    }
    std::size_t done = 0;
    for (std::size_t first = k / p.group_size; first <= last_group; first += batch) {
        const std::size_t in_batch = smaller(batch, last_group + 1 - first);
        const auto transpose_scales = [&](const std::uint8_t* from, std::uint8_t* to) {
            for (std::size_t i = 0; i < kLanes; ++i)
                rows[i] = from + (weight_rows[i] * groups + first) * scale_size;
            transpose(rows, in_batch * scale_size, to);
        };
        transpose_scales(p.scales, scale_bytes);
        if (p.offset_per_group) transpose_scales(p.offsets, offset_bytes);
        for (std::size_t g = 0; g < in_batch; ++g) {
            convert_scales(scale_bytes + g * scale_size * kLanes, p.scale_type, scales);
            if (p.offset_per_group)
                convert_scales(offset_bytes + g * scale_size * kLanes, p.scale_type, offsets);
            const std::size_t end = smaller((first + g + 1) * p.group_size - k, count);
            for (; done < end; done += per_byte)
                dequantize_bytes<Bits>(codes + done / per_byte * kLanes, zero_point, scales, offsets,
                                       w + done * kLanes);
        }
    }
}

// Rounded once where the target has such an instruction.
INTAGLIO_INLINE void add_fused_product(Vector<kWidth>& sum, const Vector<kWidth>& a,
                                       const Vector<kWidth>& b) {
#if defined(__AVX512F__)
    sum.v = _mm512_fmadd_ps(a.v, b.v, sum.v);
#elif defined(__FMA__)
    sum.v = _mm256_fmadd_ps(a.v, b.v, sum.v);
#elif defined(__aarch64__)
    sum.v = (Vector<kWidth>::Type)vfmaq_f32((float32x4_t)sum.v, (float32x4_t)a.v, (float32x4_t)b.v);
#else
    sum.add_product(a, b);
#endif
}

// The rows of x that meet the panel, the panel's columns and its inputs.
struct Step : OutputBlock {
    std::size_t k, count;
};

// Rows of x to fetch while a tile is computed, from the start of the panel's inputs.
struct NextRows {
    const char* x;
    std::size_t row, row_end;
};

// Rows rows of the strip times kTileColumns columns of the panel from `column` on, into y.
template <std::size_t Rows>
INTAGLIO_INLINE void multiply_tile(const GroupedQuantMatMul& p, const Step& b, const float* strip,
                                   const float* panel, std::size_t column, const NextRows& next) {
    const std::size_t first = column - b.column;
    panel += first / kLanes * kSliver + first % kLanes;
    Vector<kWidth> sum[Rows][kVectors], w[kVectors], x;
    INTAGLIO_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < kVectors; ++c) sum[r][c].clear();
    }
    float* y = p.y + b.row * p.N + column;
    for (std::size_t r = 0; r < Rows; ++r)
        for (std::size_t c = 0; c < kTileColumns; c += kLanes) prefetch(y + r * p.N + c);
    for (std::size_t k = 0; k < b.count;) {
        for (std::size_t r = next.row; r < next.row_end; ++r) prefetch(next.x + (r * p.K + k) * sizeof(float));
        for (const std::size_t end = smaller(k + kLanes, b.count); k < end; ++k) {
            INTAGLIO_UNROLL
            for (std::size_t c = 0; c < kVectors; ++c)
                w[c].load(panel + c * kWidth / kLanes * kSliver + c * kWidth % kLanes + k * kLanes);
            INTAGLIO_UNROLL
            for (std::size_t r = 0; r < Rows; ++r) {
                x.fill(strip[r * kStripStride + k]);
                INTAGLIO_UNROLL
                for (std::size_t c = 0; c < kVectors; ++c) add_fused_product(sum[r][c], x, w[c]);
            }
        }
    }

    if (column + kTileColumns <= b.column_end) {
        INTAGLIO_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) {
            INTAGLIO_UNROLL
            for (std::size_t c = 0; c < kVectors; ++c) {
                float* to = y + r * p.N + c * kWidth;
                if (b.k > 0) {
                    x.load(to);
                    sum[r][c].add(x);
                }
                sum[r][c].store(to);
            }
        }
        return;
    }
    float sums[Rows][kTileColumns];
    INTAGLIO_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < kVectors; ++c) sum[r][c].store(sums[r] + c * kWidth);
    }
    for (std::size_t r = 0; r < Rows; ++r)
        for (std::size_t c = 0; c < b.column_end - column; ++c)
            y[r * p.N + c] = b.k > 0 ? sums[r][c] + y[r * p.N + c] : sums[r][c];
}

// Rows [b.row, b.row_end), of which there are at most Rows, times the panel.
template <std::size_t Rows>
void multiply_strip(const GroupedQuantMatMul& p, const Step& b, const float* strip, const float* panel,
                    std::size_t last_row) {
    if constexpr (Rows > 1)
        if (b.row_end - b.row < Rows) return multiply_strip<Rows - 1>(p, b, strip, panel, last_row);
    const std::size_t tiles = (b.column_end - b.column + kTileColumns - 1) / kTileColumns;
    const std::size_t next_rows = smaller(Rows, last_row - b.row_end);
    for (std::size_t i = 0; i < tiles; ++i) {
        const NextRows next{static_cast<const char*>(p.x) + (b.row_end * p.K + b.k) * sizeof(float),
                            next_rows * i / tiles, next_rows * (i + 1) / tiles};
        multiply_tile<Rows>(p, b, strip, panel, b.column + i * kTileColumns, next);
    }
}

template <int Bits>
INTAGLIO_INLINE void compute_panel(const GroupedQuantMatMul& p, const OutputBlock& part, float* panel) {
    alignas(64) float strip[kRows * kStripStride];
    const std::size_t strips = (part.row_end - part.row + kRows - 1) / kRows;
    Step b{part, 0, 0};
    for (b.k = 0; b.k < p.K; b.k += kPanelInputs) {
        b.count = smaller(kPanelInputs, p.K - b.k);
        for (std::size_t at = 0; at < b.column_end - b.column; at += kTileSlivers * kLanes)
            for (std::size_t i = 0; i < kTileSlivers; ++i)
                decode_sliver<Bits>(p, b.column + at + i * kLanes, b.k, b.count,
                                    panel + (at / kLanes + i) * kSliver);
        // Strips differ by a row at most, since a low one takes nearly as long as a full one.
        for (std::size_t i = 0; i < strips; ++i) {
            b.row = part.row + (part.row_end - part.row) * i / strips;
            b.row_end = part.row + (part.row_end - part.row) * (i + 1) / strips;
            for (std::size_t r = b.row; r < b.row_end; ++r)
                std::memcpy(strip + (r - b.row) * kStripStride,
                            static_cast<const char*>(p.x) + (r * p.K + b.k) * sizeof(float),
                            b.count * sizeof(float));
            multiply_strip<kRows>(p, b, strip, panel, part.row_end);
        }
    }
}

}  // namespace

void INTAGLIO_FOR_ISA(compute_panel)(const GroupedQuantMatMul& product, const OutputBlock& part,
                            float* panel) noexcept {
    if (product.bits == 2) compute_panel<2>(product, part, panel);
    if (product.bits == 4) compute_panel<4>(product, part, panel);
    if (product.bits == 8) compute_panel<8>(product, part, panel);
}

}  // namespace intaglio
