// The arithmetic of fused_rows.h, compiled once for each instruction set.

#include "fused_rows.h"

#include <math.h>

#include "grouped_quant_arithmetic.h"

namespace intaglio {
namespace {

// Two registers with AVX-512: one addition waits for another only every second time.
constexpr std::size_t kRowLanes = 32;

#if defined(__AVX512F__)
constexpr std::size_t kWidth = 16;
#elif defined(__AVX2__)
constexpr std::size_t kWidth = 8;
#else
constexpr std::size_t kWidth = 4;
#endif
constexpr std::size_t kVectors = kRowLanes / kWidth;

INTAGLIO_INLINE float add_lanes(float* lanes) {
    for (std::size_t half = kRowLanes / 2; half > 0; half /= 2)
        for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}

// The sum over a row of (x - center)^Power, for Power 1 or 2.
template <int Power>
INTAGLIO_INLINE float sum_of_powers(const float* x, float center, std::size_t width) {
    Vector<kWidth> sum[kVectors], minus_center;
    minus_center.fill(-center);
    INTAGLIO_UNROLL
    for (std::size_t v = 0; v < kVectors; ++v) sum[v].clear();
    std::size_t i = 0;
    for (; i + kRowLanes <= width; i += kRowLanes) {
        INTAGLIO_UNROLL
        for (std::size_t v = 0; v < kVectors; ++v) {
            Vector<kWidth> values;
            values.load(x + i + v * kWidth);
            values.add(minus_center);
            if (Power == 1) sum[v].add(values);
            if (Power == 2) sum[v].add_product(values, values);
        }
    }
    float lanes[kRowLanes];
    INTAGLIO_UNROLL
    for (std::size_t v = 0; v < kVectors; ++v) sum[v].store(lanes + v * kWidth);
    for (std::size_t l = 0; i + l < width; ++l) {
        const float value = x[i + l] - center;
        lanes[l] += Power == 2 ? value * value : value;
    }
    return add_lanes(lanes);
}

void rms_norm(const float* x, const float* weight, float epsilon, std::size_t width, float* y) {
    const float scale = 1 / sqrtf(sum_of_powers<2>(x, 0, width) / static_cast<float>(width) + epsilon);
    for (std::size_t i = 0; i < width; ++i) y[i] = x[i] * scale * weight[i];
}

void adaptive_layer_norm(const float* x, const float* scale, const float* shift, float epsilon, std::size_t width,
                         float* y) {
    const float count = static_cast<float>(width);
    const float near_mean = sum_of_powers<1>(x, 0, width) / count;
    // Far from zero a float32 does not hold the mean: what it lacks is the mean of the distances to it.
    const float rest = sum_of_powers<1>(x, near_mean, width) / count;
    const float variance = sum_of_powers<2>(x, near_mean, width) / count - rest * rest;
    const float factor = 1 / sqrtf(variance + epsilon);
    for (std::size_t i = 0; i < width; ++i)
        y[i] = (x[i] - near_mean - rest) * factor * (1 + scale[i]) + shift[i];
}

void gated_add(const float* x, const float* gate, const float* z, std::size_t width, float* y) {
    for (std::size_t i = 0; i < width; ++i) y[i] = x[i] + gate[i] * z[i];
}

void add(const float* x, std::size_t width, float* y) {
    for (std::size_t i = 0; i < width; ++i) y[i] += x[i];
}

// 2^n times a polynomial for the rest, |rest| <= ln(2) / 2, whose relative error is below 1e-7. Overflows to infinity
// a little early, at 88.4, and stops at exp(-87).
INTAGLIO_INLINE float exponential(float x) {
    constexpr float log2_e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    constexpr float round = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
    x = x > 89.0f ? 89.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float shifted = x * log2_e + round;
    const float n = shifted - round;
    const float rest = x - n * ln2_high - n * ln2_low;
    std::uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    // The lowest bits of `shifted` are n; a biased exponent of 255 is infinity.
    const float power = float_of_bits((bits << 23) + 0x3f800000u);
    float p = 1.0f / 720;
    p = p * rest + 1.0f / 120;
    p = p * rest + 1.0f / 24;
    p = p * rest + 1.0f / 6;
    p = p * rest + 0.5f;
    return ((p * rest) * rest + rest + 1.0f) * power;
}

void silu_multiply(const float* gate, const float* up, std::size_t width, float* y) {
    for (std::size_t i = 0; i < width; ++i) y[i] = gate[i] * (1.0f / (1.0f + exponential(-gate[i]))) * up[i];
}

}  // namespace

RowKernels INTAGLIO_FOR_ISA(row_kernels)() noexcept { return {rms_norm, adaptive_layer_norm, gated_add, add, silu_multiply}; }

}  // namespace intaglio
