// What the kernels of attention are made of. Compiled once for each instruction set (for_isa.h).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention.h"
#include "grouped_quant_arithmetic.h"

namespace intaglio {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t kWidth = 16;
#elif defined(__AVX2__)
constexpr std::size_t kWidth = 8;
#else
constexpr std::size_t kWidth = 4;
#endif
using Lanes = Vector<kWidth>;

constexpr float kLowest = -3.402823466e38f;
constexpr float kHidden = -HUGE_VALF;

// Rounded once where the target has such an instruction.
INTAGLIO_INLINE void add_fused(Lanes& sum, const Lanes& a, const Lanes& b) {
#if defined(__AVX512F__)
    sum.v = _mm512_fmadd_ps(a.v, b.v, sum.v);
#elif defined(__FMA__)
    sum.v = _mm256_fmadd_ps(a.v, b.v, sum.v);
#elif defined(__aarch64__)
    sum.v = (Lanes::Type)vfmaq_f32((float32x4_t)sum.v, (float32x4_t)a.v, (float32x4_t)b.v);
#else
    sum.add_product(a, b);
#endif
}

// e^x for x <= 0 by x = n ln 2 + r and a polynomial of degree 6 in r, at most 2 units in the last place off.
// What is not a normal number may become 0, NaN stays NaN.
constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
constexpr float kExp2 = 0.49999994f, kExp3 = 0.16666521f, kExp4 = 0.041668389f, kExp5 = 8.3687166e-3f,
                kExp6 = 1.38145988e-3f;

#if defined(__GNUC__) || defined(__clang__)
INTAGLIO_INLINE void subtract(Lanes& a, const Lanes& b) { a.v -= b.v; }
INTAGLIO_INLINE void multiply(Lanes& a, const Lanes& b) { a.v *= b.v; }
// A NaN in b leaves a as it is.
INTAGLIO_INLINE void keep_larger(Lanes& a, const Lanes& b) {
#if defined(__AVX512F__)
    a.v = _mm512_max_ps(b.v, a.v);
#else
    a.v = b.v > a.v ? b.v : a.v;
#endif
}

INTAGLIO_INLINE Lanes lanes_of(float value) {
    Lanes result;
    result.fill(value);
    return result;
}

// a * b + c with a constant c.
INTAGLIO_INLINE Lanes fused(const Lanes& a, const Lanes& b, float c) {
    Lanes sum = lanes_of(c);
    add_fused(sum, a, b);
    return sum;
}

INTAGLIO_INLINE void exponential(Lanes& x) {
#if defined(__AVX512F__)
    // The result is 0 from here on, and r is no remainder where n is far beyond what float32 counts.
    x.v = _mm512_max_ps(_mm512_set1_ps(-104.0f), x.v);
    const Lanes n{_mm512_roundscale_ps(_mm512_mul_ps(x.v, _mm512_set1_ps(kLog2E)), _MM_FROUND_TO_NEAREST_INT)};
#else
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the lowest bits.
    constexpr float shift = 12582912.0f, least = -88.0f;
    x.v = x.v < lanes_of(least).v ? lanes_of(least).v : x.v;
    const Lanes shifted = fused(x, lanes_of(kLog2E), shift);
    const Lanes n{shifted.v - lanes_of(shift).v};
#endif
    Lanes r = x;
    add_fused(r, n, lanes_of(-kLn2High));
    add_fused(r, n, lanes_of(-kLn2Low));
    Lanes p = fused(lanes_of(kExp6), r, kExp5);
    p = fused(p, r, kExp4);
    p = fused(p, r, kExp3);
    p = fused(p, r, kExp2);
    p = fused(p, r, 1.0f);
    p = fused(p, r, 1.0f);
#if defined(__AVX512F__)
    x.v = _mm512_scalef_ps(p.v, n.v);
#else
    typedef std::int32_t Integers __attribute__((vector_size(sizeof(Lanes::Type))));
    const Integers exponent = (Integers)shifted.v - (Integers)lanes_of(shift).v + 127;
    x.v = p.v * (Lanes::Type)(exponent << 23);
#endif
}
#else
INTAGLIO_INLINE void subtract(Lanes& a, const Lanes& b) {
    for (std::size_t i = 0; i < kWidth; ++i) a.v[i] -= b.v[i];
}
INTAGLIO_INLINE void multiply(Lanes& a, const Lanes& b) {
    for (std::size_t i = 0; i < kWidth; ++i) a.v[i] *= b.v[i];
}
INTAGLIO_INLINE void keep_larger(Lanes& a, const Lanes& b) {
    for (std::size_t i = 0; i < kWidth; ++i) a.v[i] = b.v[i] > a.v[i] ? b.v[i] : a.v[i];
}
INTAGLIO_INLINE Lanes lanes_of(float value) {
    Lanes result;
    result.fill(value);
    return result;
}
INTAGLIO_INLINE void exponential(Lanes& x) {
    constexpr float shift = 12582912.0f, least = -88.0f;
    for (float& lane : x.v) {
        lane = lane < least ? least : lane;
        const float shifted = lane * kLog2E + shift;
        const float n = shifted - shift, r = (lane - n * kLn2High) - n * kLn2Low;
        const float p = ((((kExp6 * r + kExp5) * r + kExp4) * r + kExp3) * r + kExp2) * r * r + r + 1.0f;
        std::int32_t bits, zero;
        std::memcpy(&bits, &shifted, sizeof bits);
        std::memcpy(&zero, &shift, sizeof zero);
        lane = p * float_of_bits(static_cast<std::uint32_t>(bits - zero + 127) << 23);
    }
}
#endif

INTAGLIO_INLINE float exponential(float x) {
    Lanes lanes = lanes_of(x);
    exponential(lanes);
    float first[kWidth];
    lanes.store(first);
    return first[0];
}

INTAGLIO_INLINE std::size_t round_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

// Rotates the first numbers of a head from `x` to `y`; token `s` of batch `b`.
INTAGLIO_INLINE void rotate(const Rotary& rotary, std::size_t b, std::size_t s, const float* x, float* y) {
    const float* cos = rotary.cos + b * rotary.batch + s * rotary.row;
    const float* sin = rotary.sin + b * rotary.batch + s * rotary.row;
    const std::size_t pairs = rotary.pairs;
    if (rotary.is_interleaved) {
        for (std::size_t i = 0; i < pairs; ++i) {
            const float real = x[2 * i], imaginary = x[2 * i + 1];
            y[2 * i] = real * cos[i] - imaginary * sin[i];
            y[2 * i + 1] = real * sin[i] + imaginary * cos[i];
        }
        return;
    }
    for (std::size_t i = 0; i < pairs; ++i) {
        const float real = x[i], imaginary = x[pairs + i];
        y[i] = real * cos[i] - imaginary * sin[i];
        y[pairs + i] = real * sin[i] + imaginary * cos[i];
    }
}

// `count` numbers of a head, rotated where there is a rotary embedding.
INTAGLIO_INLINE void load_head(const Rotary& rotary, std::size_t b, std::size_t s, const float* x, std::size_t count,
                               float* y) {
    const std::size_t rotated = rotary.cos ? 2 * rotary.pairs : 0;
    if (rotated) rotate(rotary, b, s, x, y);
    std::memcpy(y + rotated, x + rotated, (count - rotated) * sizeof(float));
}

}  // namespace
}  // namespace intaglio
