// The vectors of fast_rows_arithmetic.cpp, one set of functions for each instruction set (for_isa.h): kBytes packed
// bytes of the weight, and kLanes sums, each over the codes of four of these bytes.
#pragma once

#include "grouped_quant_arithmetic.h"

namespace intaglio {
namespace {

// Packed bytes are unpacked into planes of one code a byte, plane j with the codes of kPlaneInputs<Bits>[j] in each
// packed byte. With 2 bits the last two planes hold the codes times 4, which saves two shifts, but not where one
// instruction shifts and masks.
template <int Bits>
constexpr std::size_t kPlanes = 8 / Bits;
template <int Bits>
constexpr std::size_t kPlaneInputs[] = {0, Bits == 2 ? 2 : 1, 1, 3};

// `first_dot` adds the products of codes and activations, which are arranged alike, to a start that is given in
// multiples of kStart<Bits>.

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

constexpr std::size_t kBytes = 64, kLanes = 16;
using Bytes = __m512i;
using Ints = __m512i;
using Floats = __m512;
using Pattern = __m512i;

INTAGLIO_INLINE Bytes load_bytes(const std::uint8_t* from) { return _mm512_loadu_si512(from); }
INTAGLIO_INLINE Bytes load_some_bytes(const std::uint8_t* from, std::size_t count, const std::uint8_t*) {
    return _mm512_maskz_loadu_epi8(~__mmask64{0} >> (64 - count), from);
}
INTAGLIO_INLINE Bytes all_bytes(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }

#if defined(__GFNI__)

// Of each byte the code that begins at the bit `shift`, as a product of bits: a row of the matrix for each bit of the
// result, the lowest in the highest byte.
template <int Bits>
INTAGLIO_INLINE Bytes codes_at(Bytes packed, int shift) {
    std::uint64_t matrix = 0;
    for (int bit = 0; bit < Bits; ++bit) matrix |= std::uint64_t{1} << (8 * (7 - bit) + shift + bit);
    return _mm512_gf2p8affine_epi64_epi8(packed, _mm512_set1_epi64(static_cast<long long>(matrix)), 0);
}

template <int Bits>
INTAGLIO_INLINE void unpack(Bytes packed, Bytes (&planes)[kPlanes<Bits>]) {
    planes[0] = Bits == 8 ? packed : _mm512_and_si512(packed, all_bytes((1 << Bits) - 1));
    INTAGLIO_UNROLL
    for (std::size_t j = 1; j < kPlanes<Bits>; ++j)
        planes[j] = codes_at<Bits>(packed, Bits * static_cast<int>(kPlaneInputs<Bits>[j]));
}

template <int Bits>
constexpr int kStart = 1;

template <int Bits>
INTAGLIO_INLINE Ints first_dot(Ints sum, const Bytes (&planes)[kPlanes<Bits>], const std::int8_t* activations) {
    INTAGLIO_UNROLL
    for (std::size_t j = 0; j < kPlanes<Bits>; ++j)
        sum = _mm512_dpbusd_epi32(sum, planes[j], _mm512_load_si512(activations + j * kBytes));
    return sum;
}

#else

template <int Bits>
INTAGLIO_INLINE void unpack(Bytes packed, Bytes (&planes)[kPlanes<Bits>]) {
    if constexpr (Bits == 8) {
        planes[0] = packed;
    } else {
        const Bytes high = _mm512_srli_epi16(packed, 4), mask = all_bytes((1 << Bits) - 1);
        planes[0] = _mm512_and_si512(packed, mask);
        planes[1] = _mm512_and_si512(high, mask);
        if constexpr (Bits == 2) {
            planes[2] = _mm512_and_si512(packed, all_bytes(12));
            planes[3] = _mm512_and_si512(high, all_bytes(12));
        }
    }
}

template <int Bits>
constexpr int kStart = Bits == 2 ? 4 : 1;

template <int Bits>
INTAGLIO_INLINE Ints first_dot(Ints sum, const Bytes (&planes)[kPlanes<Bits>], const std::int8_t* activations) {
    const auto add = [&](std::size_t j) {
        sum = _mm512_dpbusd_epi32(sum, planes[j], _mm512_load_si512(activations + j * kBytes));
    };
    if constexpr (Bits == 2) {
        add(2);
        add(3);
        sum = _mm512_srai_epi32(sum, 2);
    }
    add(0);
    if constexpr (Bits < 8) add(1);
    return sum;
}

#endif

INTAGLIO_INLINE Ints added(Ints a, Ints b) { return _mm512_add_epi32(a, b); }

INTAGLIO_INLINE Ints load_ints(const std::int32_t* from) { return _mm512_load_si512(from); }
INTAGLIO_INLINE void store_ints(Ints value, std::int32_t* to) { _mm512_store_si512(to, value); }
INTAGLIO_INLINE Floats to_floats(Ints value) { return _mm512_cvtepi32_ps(value); }
INTAGLIO_INLINE Floats zeros() { return _mm512_setzero_ps(); }
INTAGLIO_INLINE Ints zero_ints() { return _mm512_setzero_si512(); }
INTAGLIO_INLINE Floats load_floats(const float* from) { return _mm512_load_ps(from); }
INTAGLIO_INLINE Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INTAGLIO_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INTAGLIO_INLINE float sum_of(Floats value) { return _mm512_reduce_add_ps(value); }

// The first `count` scales, zeros after them; `end` is where the memory of all scales ends.
INTAGLIO_INLINE Floats load_scales(const std::uint8_t* from, std::size_t count, ScaleType type, const std::uint8_t*) {
    const auto mask = static_cast<__mmask16>(0xffffu >> (16 - count));
    if (type == ScaleType::kFloat32) return _mm512_maskz_loadu_ps(mask, from);
    const __m256i bits = _mm256_maskz_loadu_epi16(mask, from);
    if (type == ScaleType::kFloat16) return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// Which lane of the scales each lane of the sums takes.
INTAGLIO_INLINE Pattern load_pattern(const std::int32_t* lanes) { return _mm512_loadu_si512(lanes); }
INTAGLIO_INLINE Pattern moved(Pattern pattern, Pattern by) { return _mm512_add_epi32(pattern, by); }
INTAGLIO_INLINE Pattern moves(std::size_t lanes) { return _mm512_set1_epi32(static_cast<int>(lanes)); }
INTAGLIO_INLINE Floats spread(Floats scales, Pattern pattern) { return _mm512_permutexvar_ps(pattern, scales); }

#elif defined(__AVX2__)

constexpr std::size_t kBytes = 32, kLanes = 8;
using Bytes = __m256i;
using Ints = __m256i;
using Floats = __m256;
using Pattern = __m256i;

INTAGLIO_INLINE Bytes load_bytes(const std::uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
INTAGLIO_INLINE Bytes load_some_bytes(const std::uint8_t* from, std::size_t count, const std::uint8_t* end) {
    if (static_cast<std::size_t>(end - from) >= kBytes) return load_bytes(from);
    std::uint8_t bytes[kBytes] = {};
    std::memcpy(bytes, from, count);
    return load_bytes(bytes);
}
INTAGLIO_INLINE Bytes all_bytes(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }

template <int Bits>
INTAGLIO_INLINE void unpack(Bytes packed, Bytes (&planes)[kPlanes<Bits>]) {
    if constexpr (Bits == 8) {
        planes[0] = packed;
    } else {
        const Bytes high = _mm256_srli_epi16(packed, 4), mask = all_bytes((1 << Bits) - 1);
        planes[0] = _mm256_and_si256(packed, mask);
        planes[1] = _mm256_and_si256(high, mask);
        if constexpr (Bits == 2) {
            planes[2] = _mm256_and_si256(packed, all_bytes(12));
            planes[3] = _mm256_and_si256(high, all_bytes(12));
        }
    }
}

INTAGLIO_INLINE __m256i load_activations(const std::int8_t* from) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
}
INTAGLIO_INLINE Ints added(Ints a, Ints b) { return _mm256_add_epi32(a, b); }

#if defined(__AVXVNNI__)

template <int Bits>
constexpr int kStart = Bits == 2 ? 4 : 1;

template <int Bits>
INTAGLIO_INLINE Ints first_dot(Ints sum, const Bytes (&planes)[kPlanes<Bits>], const std::int8_t* activations) {
    const auto add = [&](std::size_t j) {
        sum = _mm256_dpbusd_avx_epi32(sum, planes[j], load_activations(activations + j * kBytes));
    };
    if constexpr (Bits == 2) {
        add(2);
        add(3);
        sum = _mm256_srai_epi32(sum, 2);
    }
    add(0);
    if constexpr (Bits < 8) add(1);
    return sum;
}

#else

template <int Bits>
constexpr int kStart = 1;

template <int Bits>
INTAGLIO_INLINE Ints first_dot(Ints sum, const Bytes (&planes)[kPlanes<Bits>], const std::int8_t* activations) {
    const __m256i ones = _mm256_set1_epi16(1);
    if constexpr (Bits == 8) {
        // Sums of two products need 17 bits; with half of each code they fit 16.
        const __m256i values = load_activations(activations), mask = all_bytes(15);
        const __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(planes[0], mask), values);
        const __m256i high = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(planes[0], 4), mask), values);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(high, _mm256_set1_epi16(16)));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(low, ones));
    } else {
        // No sum of a few exceeds 16 bits: the largest is 4 * 15 * 127, and 4 * 3 * 127 times 4.
        const auto pairs = [&](std::size_t j) {
            return _mm256_maddubs_epi16(planes[j], load_activations(activations + j * kBytes));
        };
        __m256i pair = _mm256_add_epi16(pairs(0), pairs(1));
        if constexpr (Bits == 2)
            pair = _mm256_add_epi16(pair, _mm256_srai_epi16(_mm256_add_epi16(pairs(2), pairs(3)), 2));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pair, ones));
    }
}

#endif

INTAGLIO_INLINE Ints load_ints(const std::int32_t* from) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
}
INTAGLIO_INLINE void store_ints(Ints value, std::int32_t* to) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), value);
}
INTAGLIO_INLINE Floats to_floats(Ints value) { return _mm256_cvtepi32_ps(value); }
INTAGLIO_INLINE Floats zeros() { return _mm256_setzero_ps(); }
INTAGLIO_INLINE Ints zero_ints() { return _mm256_setzero_si256(); }
INTAGLIO_INLINE Floats load_floats(const float* from) { return _mm256_load_ps(from); }
INTAGLIO_INLINE Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
INTAGLIO_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INTAGLIO_INLINE float sum_of(Floats value) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

alignas(64) constexpr std::int32_t kFirstLanes[2 * kLanes] = {-1, -1, -1, -1, -1, -1, -1, -1};

INTAGLIO_INLINE Floats load_scales(const std::uint8_t* from, std::size_t count, ScaleType type,
                                   const std::uint8_t* end) {
    const std::size_t stride = type == ScaleType::kFloat32 ? 4 : 2;
    std::uint8_t values[kLanes * 4] = {};
    if (static_cast<std::size_t>(end - from) < kLanes * stride) {
        std::memcpy(values, from, count * stride);
        from = values;
    }
    Floats scales;
    if (type == ScaleType::kFloat32) {
        scales = _mm256_loadu_ps(reinterpret_cast<const float*>(from));
    } else {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        scales = type == ScaleType::kFloat16
                     ? _mm256_cvtph_ps(bits)
                     : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
    if (count == kLanes) return scales;
    // Those of the next row, which may be anything.
    const std::int32_t* mask = kFirstLanes + kLanes - count;
    return _mm256_and_ps(scales, _mm256_castsi256_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(mask))));
}

INTAGLIO_INLINE Pattern load_pattern(const std::int32_t* lanes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lanes));
}
INTAGLIO_INLINE Pattern moved(Pattern pattern, Pattern by) { return _mm256_add_epi32(pattern, by); }
INTAGLIO_INLINE Pattern moves(std::size_t lanes) { return _mm256_set1_epi32(static_cast<int>(lanes)); }
INTAGLIO_INLINE Floats spread(Floats scales, Pattern pattern) { return _mm256_permutevar8x32_ps(scales, pattern); }

#elif defined(__ARM_FEATURE_DOTPROD)

constexpr std::size_t kBytes = 16, kLanes = 4;
using Bytes = uint8x16_t;
using Ints = int32x4_t;
using Floats = float32x4_t;
using Pattern = uint8x16_t;

INTAGLIO_INLINE Bytes load_bytes(const std::uint8_t* from) { return vld1q_u8(from); }
INTAGLIO_INLINE Bytes load_some_bytes(const std::uint8_t* from, std::size_t count, const std::uint8_t* end) {
    if (static_cast<std::size_t>(end - from) >= kBytes) return load_bytes(from);
    std::uint8_t bytes[kBytes] = {};
    std::memcpy(bytes, from, count);
    return load_bytes(bytes);
}
INTAGLIO_INLINE Bytes all_bytes(int value) { return vdupq_n_u8(static_cast<std::uint8_t>(value)); }

// Products are of signed bytes: 8-bit codes are moved by 128, and their zero point with them.
template <int Bits>
INTAGLIO_INLINE void unpack(Bytes packed, Bytes (&planes)[kPlanes<Bits>]) {
    if constexpr (Bits == 8) {
        planes[0] = veorq_u8(packed, all_bytes(128));
    } else {
        const Bytes mask = all_bytes((1 << Bits) - 1);
        planes[0] = vandq_u8(packed, mask);
        if constexpr (Bits == 4) {
            planes[1] = vshrq_n_u8(packed, 4);
        } else {
            planes[1] = vandq_u8(vshrq_n_u8(packed, 4), mask);
            planes[2] = vandq_u8(vshrq_n_u8(packed, 2), mask);
            planes[3] = vshrq_n_u8(packed, 6);
        }
    }
}

template <int Bits>
constexpr int kStart = 1;

template <int Bits>
INTAGLIO_INLINE Ints first_dot(Ints sum, const Bytes (&planes)[kPlanes<Bits>], const std::int8_t* activations) {
    INTAGLIO_UNROLL
    for (std::size_t j = 0; j < kPlanes<Bits>; ++j)
        sum = vdotq_s32(sum, vreinterpretq_s8_u8(planes[j]), vld1q_s8(activations + j * kBytes));
    return sum;
}

INTAGLIO_INLINE Ints added(Ints a, Ints b) { return vaddq_s32(a, b); }
INTAGLIO_INLINE Ints load_ints(const std::int32_t* from) { return vld1q_s32(from); }
INTAGLIO_INLINE void store_ints(Ints value, std::int32_t* to) { vst1q_s32(to, value); }
INTAGLIO_INLINE Floats to_floats(Ints value) { return vcvtq_f32_s32(value); }
INTAGLIO_INLINE Floats zeros() { return vdupq_n_f32(0); }
INTAGLIO_INLINE Ints zero_ints() { return vdupq_n_s32(0); }
INTAGLIO_INLINE Floats load_floats(const float* from) { return vld1q_f32(from); }
INTAGLIO_INLINE Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
INTAGLIO_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
INTAGLIO_INLINE float sum_of(Floats value) { return vaddvq_f32(value); }

INTAGLIO_INLINE Floats load_scales(const std::uint8_t* from, std::size_t count, ScaleType type, const std::uint8_t*) {
    const std::size_t stride = type == ScaleType::kFloat32 ? 4 : 2;
    std::uint8_t values[kLanes * 4] = {};
    if (count < kLanes) {
        std::memcpy(values, from, count * stride);
        from = values;
    }
    if (type == ScaleType::kFloat32) return vreinterpretq_f32_u8(vld1q_u8(from));
    const uint16x4_t bits = vreinterpret_u16_u8(vld1_u8(from));
    if (type == ScaleType::kFloat16) return vcvt_f32_f16(vreinterpret_f16_u16(bits));
    return vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
}

// The bytes of each lane.
INTAGLIO_INLINE Pattern load_pattern(const std::int32_t* lanes) {
    const uint32x4_t first = vmulq_n_u32(vreinterpretq_u32_s32(vld1q_s32(lanes)), 0x04040404u);
    return vreinterpretq_u8_u32(vaddq_u32(first, vdupq_n_u32(0x03020100u)));
}
INTAGLIO_INLINE Pattern moved(Pattern pattern, Pattern by) { return vaddq_u8(pattern, by); }
INTAGLIO_INLINE Pattern moves(std::size_t lanes) { return all_bytes(static_cast<int>(4 * lanes)); }
INTAGLIO_INLINE Floats spread(Floats scales, Pattern pattern) {
    return vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(scales), pattern));
}

#else

#define INTAGLIO_NO_VECTORS 1
constexpr std::size_t kBytes = 16, kLanes = 4;
struct Bytes {
    std::uint8_t v[kBytes];
};
struct Ints {
    std::int32_t v[kLanes];
};
struct Floats {
    float v[kLanes];
};
struct Pattern {
    std::int32_t v[kLanes];
};

INTAGLIO_INLINE Bytes load_bytes(const std::uint8_t* from) {
    Bytes bytes;
    std::memcpy(bytes.v, from, kBytes);
    return bytes;
}
INTAGLIO_INLINE Bytes load_some_bytes(const std::uint8_t* from, std::size_t count, const std::uint8_t*) {
    Bytes bytes{};
    std::memcpy(bytes.v, from, count);
    return bytes;
}
INTAGLIO_INLINE Bytes all_bytes(int value) {
    Bytes bytes;
    for (std::uint8_t& byte : bytes.v) byte = static_cast<std::uint8_t>(value);
    return bytes;
}

template <int Bits>
INTAGLIO_INLINE void unpack(Bytes packed, Bytes (&planes)[kPlanes<Bits>]) {
    constexpr int mask = (1 << Bits) - 1;
    for (std::size_t j = 0; j < kPlanes<Bits>; ++j) {
        const int shift = j < 2 ? static_cast<int>(j) * 4 % 8 : static_cast<int>(j) * 4 - 8;
        for (std::size_t b = 0; b < kBytes; ++b)
            planes[j].v[b] = static_cast<std::uint8_t>(packed.v[b] >> shift & (j < 2 ? mask : 4 * mask));
    }
}

template <int Bits>
constexpr int kStart = 1;

template <int Bits>
INTAGLIO_INLINE Ints first_dot(Ints sum, const Bytes (&planes)[kPlanes<Bits>], const std::int8_t* activations) {
    for (std::size_t j = 0; j < kPlanes<Bits>; ++j)
        for (std::size_t b = 0; b < kBytes; ++b)
            sum.v[b / 4] += (j < 2 ? planes[j].v[b] : planes[j].v[b] / 4) * activations[j * kBytes + b];
    return sum;
}

INTAGLIO_INLINE Ints added(Ints a, Ints b) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) a.v[lane] += b.v[lane];
    return a;
}
INTAGLIO_INLINE Ints load_ints(const std::int32_t* from) {
    Ints ints;
    std::memcpy(ints.v, from, sizeof ints);
    return ints;
}
INTAGLIO_INLINE void store_ints(Ints value, std::int32_t* to) { std::memcpy(to, value.v, sizeof value); }
INTAGLIO_INLINE Floats to_floats(Ints value) {
    Floats floats;
    for (std::size_t lane = 0; lane < kLanes; ++lane) floats.v[lane] = static_cast<float>(value.v[lane]);
    return floats;
}
INTAGLIO_INLINE Floats zeros() { return {}; }
INTAGLIO_INLINE Ints zero_ints() { return {}; }
INTAGLIO_INLINE Floats load_floats(const float* from) {
    Floats floats;
    std::memcpy(floats.v, from, sizeof floats);
    return floats;
}
INTAGLIO_INLINE Floats multiply(Floats a, Floats b) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) a.v[lane] *= b.v[lane];
    return a;
}
INTAGLIO_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) c.v[lane] += a.v[lane] * b.v[lane];
    return c;
}
INTAGLIO_INLINE float sum_of(Floats value) { return (value.v[0] + value.v[1]) + (value.v[2] + value.v[3]); }

INTAGLIO_INLINE Floats load_scales(const std::uint8_t* from, std::size_t count, ScaleType type, const std::uint8_t*) {
    Floats scales{};
    load_scales(from, 0, count, type, scales.v);
    return scales;
}

INTAGLIO_INLINE Pattern load_pattern(const std::int32_t* lanes) {
    Pattern pattern;
    std::memcpy(pattern.v, lanes, sizeof pattern);
    return pattern;
}
INTAGLIO_INLINE Pattern moved(Pattern pattern, Pattern by) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) pattern.v[lane] += by.v[lane];
    return pattern;
}
INTAGLIO_INLINE Pattern moves(std::size_t lanes) {
    Pattern pattern;
    for (std::int32_t& lane : pattern.v) lane = static_cast<std::int32_t>(lanes);
    return pattern;
}
// The last step leads past the last lane.
INTAGLIO_INLINE Floats spread(Floats scales, Pattern pattern) {
    Floats floats;
    for (std::size_t lane = 0; lane < kLanes; ++lane) floats.v[lane] = scales.v[pattern.v[lane] & 3];
    return floats;
}

#endif

}  // namespace
}  // namespace intaglio
