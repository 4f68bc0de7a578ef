// Panels of the weight for kernels that add products of four consecutive inputs: [k / 4][column][4], one code a byte.
// For AVX-512, in files that are compiled for it (for_isa.h).
#pragma once

#include "fast_panel.h"
#include "grouped_quant_arithmetic.h"

namespace intaglio {
namespace {

constexpr std::size_t kLanes = 16;

// Four bytes of each of 16 rows of the weight at a time, rows in order; `at` in bytes.
struct Words {
    __m512i word[4];
};

INTAGLIO_INLINE Words load_words(const std::uint8_t* const (&rows)[kLanes], std::size_t at, __mmask16 mask) {
    const auto four = [&](std::size_t r) {
        __m512i v = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(mask, rows[r] + at));
        v = _mm512_inserti32x4(v, _mm_maskz_loadu_epi8(mask, rows[r + 4] + at), 1);
        v = _mm512_inserti32x4(v, _mm_maskz_loadu_epi8(mask, rows[r + 8] + at), 2);
        return _mm512_inserti32x4(v, _mm_maskz_loadu_epi8(mask, rows[r + 12] + at), 3);
    };
    const __m512i a = four(0), b = four(1), c = four(2), d = four(3);
    const __m512i ab_low = _mm512_unpacklo_epi32(a, b), ab_high = _mm512_unpackhi_epi32(a, b);
    const __m512i cd_low = _mm512_unpacklo_epi32(c, d), cd_high = _mm512_unpackhi_epi32(c, d);
    return {{_mm512_unpacklo_epi64(ab_low, cd_low), _mm512_unpackhi_epi64(ab_low, cd_low),
             _mm512_unpacklo_epi64(ab_high, cd_high), _mm512_unpackhi_epi64(ab_high, cd_high)}};
}

// The codes of the lowest 4 * Bits bits of each word, one a byte.
template <int Bits>
INTAGLIO_INLINE __m512i spread(__m512i word) {
    if constexpr (Bits == 8) return word;
    if constexpr (Bits == 4) {
        const __m512i low = _mm512_and_si512(word, _mm512_set1_epi32(0xffff));
        const __m512i pairs = _mm512_and_si512(_mm512_or_si512(low, _mm512_slli_epi32(low, 8)),
                                               _mm512_set1_epi32(0x00ff00ff));
        return _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 4)), _mm512_set1_epi32(0x0f0f0f0f));
    }
    const __m512i low = _mm512_and_si512(word, _mm512_set1_epi32(0xff));
    const __m512i pairs =
        _mm512_and_si512(_mm512_or_si512(low, _mm512_slli_epi32(low, 12)), _mm512_set1_epi32(0x000f000f));
    return _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 6)), _mm512_set1_epi32(0x03030303));
}

// The codes of the given part of each word, one a byte: 4 * Bits bits from part * 4 * Bits on.
template <int Bits>
INTAGLIO_INLINE __m512i spread_part(__m512i word, unsigned part) {
#if defined(__AVX512VBMI__)
    if constexpr (Bits < 8) {
        // For each byte, the bit of its 8 bytes at which it starts.
        constexpr long long bits = Bits, first = bits << 8 | 2 * bits << 16 | 3 * bits << 24;
        const long long start = static_cast<long long>(part) * 4 * bits * 0x01010101;
        const long long low = first + start, high = low + 0x20202020;
        const __m512i fields = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(low | high << 32), word);
        return _mm512_and_si512(fields, _mm512_set1_epi8((1 << Bits) - 1));
    }
#endif
    return spread<Bits>(_mm512_srli_epi32(word, part * 4 * Bits));
}

// Inputs [k, k + count) of kLanes columns from `column` on; those of four inputs are `step` bytes apart. Beyond the
// last column, the last is decoded again: what it makes is never stored.
template <int Bits>
INTAGLIO_INLINE void decode_columns(const GroupedQuantMatMul& p, int base, std::size_t column, std::size_t k,
                                    std::size_t count, std::uint8_t* to, std::size_t step) {
    constexpr std::size_t per_byte = 8 / Bits;
    const std::uint8_t* rows[kLanes];
    for (std::size_t i = 0; i < kLanes; ++i)
        rows[i] = p.codes + (smaller(column + i, p.N - 1) * p.K + k) / per_byte;
    const __m512i zero = _mm512_set1_epi8(static_cast<char>(base));
    // A row may end before the inputs, which are a multiple of 16.
    const std::size_t bytes = count / per_byte, row_bytes = (p.K - k) / per_byte;
    for (std::size_t at = 0; at < bytes; at += 16) {
        const std::size_t left = smaller(bytes - at, 16), in_row = smaller(left, row_bytes - at);
        const Words words = load_words(rows, at, static_cast<__mmask16>((1u << in_row) - 1));
        for (std::size_t i = 0; i < (left + 3) / 4; ++i) {
            const __m512i word = i == 0 ? words.word[0] : i == 1 ? words.word[1] : i == 2 ? words.word[2] : words.word[3];
            INTAGLIO_UNROLL
            for (unsigned part = 0; part < 8 / Bits; ++part, to += step)
                _mm512_storeu_si512(to, _mm512_sub_epi8(spread_part<Bits>(word, part), zero));
        }
    }
}

// Scales (or offsets) of a block's segments for kFastColumns columns: [segment][column].
INTAGLIO_INLINE void decode_scales(const PanelPlan& plan, const PanelPlan::Block& b, const std::uint8_t* from,
                                   std::size_t column, float* to) {
    const GroupedQuantMatMul& p = plan.product;
    const std::size_t first = b.segment / plan.pieces;
    const auto from_row = [&](std::size_t c) { return smaller(column + c, p.N - 1) * plan.groups + first; };
    if (p.scale_type == ScaleType::kFloat32) {
        for (std::size_t c = 0; c < kFastColumns; ++c)
            for (std::size_t i = 0; i < b.segments; ++i)
                std::memcpy(to + i * kFastColumns + c, from + (from_row(c) + i) * 4, 4);
        return;
    }
    std::uint16_t halves[kPanelBlock / 16 * kFastColumns];
    for (std::size_t c = 0; c < kFastColumns; ++c)
        for (std::size_t i = 0; i < b.segments; ++i)
            std::memcpy(halves + i * kFastColumns + c, from + (from_row(c) + i) * 2, 2);
    for (std::size_t i = 0; i < b.segments * kFastColumns; i += kLanes) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves + i));
        const __m512 values = p.scale_type == ScaleType::kFloat16
                                  ? _mm512_cvtph_ps(bits)
                                  : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
        _mm512_store_ps(to + i, values);
    }
}

INTAGLIO_INLINE void decode_offsets(const PanelPlan& plan, const PanelPlan::Block& b, std::size_t column, float* to) {
    if (plan.product.offset_per_group) return decode_scales(plan, b, plan.product.offsets, column, to);
    for (std::size_t i = 0; i < b.segments * kFastColumns; ++i) to[i] = 0;
}

// Where y is larger than this, it will not be read from a near cache, and is written past all of them: a line would
// first be read from memory otherwise. Measured: 14 GB/s instead of 3.6. Such writes need a fence at the end of a part.
constexpr std::size_t kLargeOutput = std::size_t{1} << 22;

// Of what is computed of some rows, [row][kFastColumns], to their columns of y.
INTAGLIO_INLINE void store_rows(const GroupedQuantMatMul& p, const float* sums, std::size_t row, std::size_t row_end,
                                std::size_t column) {
    const std::size_t columns = smaller(kFastColumns, p.N - column);
    float* y = p.y + row * p.N + column;
    if (columns == kFastColumns && p.N % kLanes == 0 && reinterpret_cast<std::uintptr_t>(y) % 64 == 0 &&
        p.M * p.N * sizeof(float) >= kLargeOutput) {
        for (std::size_t r = row; r < row_end; ++r, sums += kFastColumns, y += p.N) {
            INTAGLIO_UNROLL
            for (std::size_t c = 0; c < kFastColumns; c += kLanes) _mm512_stream_ps(y + c, _mm512_load_ps(sums + c));
        }
        return;
    }
    for (std::size_t r = row; r < row_end; ++r, sums += kFastColumns, y += p.N) {
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < kFastColumns; c += kLanes) {
            const std::size_t left = columns > c ? smaller(columns - c, kLanes) : 0;
            _mm512_mask_storeu_ps(y + c, static_cast<__mmask16>((1u << left) - 1), _mm512_load_ps(sums + c));
        }
    }
}

}  // namespace
}  // namespace intaglio
