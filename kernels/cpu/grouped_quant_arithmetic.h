// What the exact kernels of both regimes are made of. Compiled once for each instruction set (for_isa.h).
#pragma once

#include <cstring>

#include "for_isa.h"
#include "grouped_quant_matmul.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Short loops that GCC would unroll into scalars before it looks for vectors.
#if defined(__GNUC__) && !defined(__clang__)
#define INTAGLIO_VECTORIZE _Pragma("GCC unroll 1")
#else
#define INTAGLIO_VECTORIZE
#endif

// A packed byte holds its first code in the lowest bits, and scales are little-endian, as ONNX data is.
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels read weights in place, which needs a little-endian machine"
#endif

namespace intaglio {
namespace {

INTAGLIO_INLINE void prefetch(const void* from) {
#if defined(__GNUC__) || defined(__clang__)
    __builtin_prefetch(from);
#else
    (void)from;
#endif
}

INTAGLIO_INLINE std::size_t smaller(std::size_t a, std::size_t b) { return a < b ? a : b; }

// Width consecutive floats, in a register where the target has one of that width.
#if defined(__GNUC__) || defined(__clang__)
template <std::size_t Width>
struct Vector {
    typedef float Type __attribute__((vector_size(Width * sizeof(float))));
    Type v;
    INTAGLIO_INLINE void load(const void* from) { std::memcpy(&v, from, sizeof v); }
    INTAGLIO_INLINE void store(void* to) const { std::memcpy(to, &v, sizeof v); }
    INTAGLIO_INLINE void clear() { v = Type{}; }
    // Subtracting zeros keeps every value, -0 too, and compiles to a broadcast.
    INTAGLIO_INLINE void fill(float value) { v = value - Type{}; }
    INTAGLIO_INLINE void add(const Vector& a) { v += a.v; }
    INTAGLIO_INLINE void add_product(const Vector& a, const Vector& b) { v += a.v * b.v; }
};
#else
template <std::size_t Width>
struct Vector {
    float v[Width];
    INTAGLIO_INLINE void load(const void* from) { std::memcpy(v, from, sizeof v); }
    INTAGLIO_INLINE void store(void* to) const { std::memcpy(to, v, sizeof v); }
    INTAGLIO_INLINE void clear() {
        for (float& lane : v) lane = 0;
    }
    INTAGLIO_INLINE void fill(float value) {
        for (float& lane : v) lane = value;
    }
    INTAGLIO_INLINE void add(const Vector& a) {
        for (std::size_t i = 0; i < Width; ++i) v[i] += a.v[i];
    }
    INTAGLIO_INLINE void add_product(const Vector& a, const Vector& b) {
        for (std::size_t i = 0; i < Width; ++i) v[i] += a.v[i] * b.v[i];
    }
};
#endif

INTAGLIO_INLINE float float_of_bits(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

INTAGLIO_INLINE float float_of_half(std::uint16_t half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
    const std::uint32_t magnitude = half & 0x7fffu;
    // Subnormal halves go through an integer, since a thread may treat float32 subnormals as zero.
    const float small = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f;
    std::uint32_t small_bits;
    std::memcpy(&small_bits, &small, sizeof small_bits);
    const std::uint32_t normal = (magnitude << 13) + (magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u);
    return float_of_bits(sign | (magnitude < 0x0400u ? small_bits : normal));
}

INTAGLIO_INLINE void load_scales(const std::uint8_t* from, std::size_t first, std::size_t count,
                                 ScaleType type, float* to) {
    if (type == ScaleType::kFloat32) {
        std::memcpy(to, from + first * 4, count * 4);
        return;
    }
    from += first * 2;
    for (std::size_t i = 0; i < count; ++i) {
        std::uint16_t bits;
        std::memcpy(&bits, from + 2 * i, sizeof bits);
        to[i] = type == ScaleType::kFloat16 ? float_of_half(bits)
                                            : float_of_bits(static_cast<std::uint32_t>(bits) << 16);
    }
}

}  // namespace
}  // namespace intaglio
