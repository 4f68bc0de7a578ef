// How the accuracy `fast` rounds activations, the same in all its kernels. Compiled once for each instruction set.
#pragma once

#include "grouped_quant_arithmetic.h"

namespace intaglio {
namespace {

// An activation is code * scale, and its code round(x * inverse).
struct ActivationScale {
    float scale, inverse;
};

// Of a group by its largest magnitude, which is given as float32 bits: in their order all that is not finite comes
// last, NaN too.
INTAGLIO_INLINE ActivationScale activation_scale(std::int32_t largest_bits) {
    const float largest = float_of_bits(static_cast<std::uint32_t>(largest_bits));
    // Makes every output of the row NaN.
    if (largest_bits >= 0x7f800000) return {float_of_bits(0x7fc00000u), 0.0f};
    // The inverse of what is smaller is not finite; the group counts as zeros.
    if (largest < 0x1p-120f) return {0.0f, 0.0f};
    return {largest / 127.0f, 127.0f / largest};
}

// To the nearest integer, half to even, of magnitudes below 2^22; zero for NaN.
INTAGLIO_INLINE std::int8_t rounded_activation(float value) {
    const float shifted = value + 0x1.8p23f;
    std::uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    return static_cast<std::int8_t>(bits & 0xffu);
}

// The bits of the largest magnitude of `count` float32 values at any address.
INTAGLIO_INLINE std::int32_t largest_magnitude(const char* x, std::size_t count) {
    std::int32_t largest = 0;
    for (std::size_t k = 0; k < count; ++k) {
        std::int32_t bits;
        std::memcpy(&bits, x + k * sizeof bits, sizeof bits);
        bits &= 0x7fffffff;
        largest = largest > bits ? largest : bits;
    }
    return largest;
}

// `count` values to their codes. Returns the sum of these.
INTAGLIO_INLINE std::int32_t round_activations(const char* x, std::size_t count, float inverse, std::int8_t* codes) {
    std::int32_t sum = 0;
    for (std::size_t k = 0; k < count; ++k) {
        float value;
        std::memcpy(&value, x + k * sizeof value, sizeof value);
        codes[k] = rounded_activation(value * inverse);
        sum += codes[k];
    }
    return sum;
}

}  // namespace
}  // namespace intaglio
