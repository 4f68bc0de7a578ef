// Attention of few rows over a part of the keys, compiled once for each instruction set.
//
// Lanes are numbers of a head: keys and values are read where they lie, once for all rows. Legend: attention.h.

#include "attention_arithmetic.h"

namespace intaglio {
namespace {

// Rows that meet a key together, and vectors of sums of values of each.
constexpr std::size_t kRows = 4;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr std::size_t kVectors = 4;
#else
constexpr std::size_t kVectors = 2;
#endif
constexpr std::size_t kMaxHead = 256;

INTAGLIO_INLINE void load_first(Lanes& lanes, const float* from, std::size_t count) {
#if defined(__AVX512F__)
    lanes.v = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
#else
    float padded[kWidth] = {};
    std::memcpy(padded, from, count * sizeof(float));
    lanes.load(padded);
#endif
}

INTAGLIO_INLINE float sum_of(const Lanes& lanes) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(lanes.v);
#else
    float sums[kWidth];
    lanes.store(sums);
    for (std::size_t half = kWidth / 2; half > 0; half /= 2)
        for (std::size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
    return sums[0];
#endif
}

// Sums of the lanes of each of four.
INTAGLIO_INLINE void store_sums(const Lanes (&sums)[4], float* to) {
#if defined(__AVX512F__)
    const __m512 first = _mm512_add_ps(_mm512_unpacklo_ps(sums[0].v, sums[1].v), _mm512_unpackhi_ps(sums[0].v, sums[1].v));
    const __m512 second =
        _mm512_add_ps(_mm512_unpacklo_ps(sums[2].v, sums[3].v), _mm512_unpackhi_ps(sums[2].v, sums[3].v));
    // In each quarter one sum for each of the four.
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(first, second, 0x44), _mm512_shuffle_ps(first, second, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__AVX2__)
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(sums[0].v, sums[1].v), _mm256_hadd_ps(sums[2].v, sums[3].v));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
    for (std::size_t i = 0; i < 4; ++i) to[i] = sum_of(sums[i]);
#endif
}
INTAGLIO_INLINE void store_sums(const Lanes (&sums)[1], float* to) { to[0] = sum_of(sums[0]); }

// Scores of Rows rows and Keys keys, [Rows, kSplitKeys].
template <std::size_t Rows, std::size_t Keys>
INTAGLIO_INLINE void score_keys(const float* queries, std::size_t stride, const float* keys, std::size_t key_row,
                                std::size_t D, float* scores) {
    const std::size_t whole = D / kWidth * kWidth;
    Lanes sum[Rows][Keys], x[Keys], q;
    INTAGLIO_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
        INTAGLIO_UNROLL
        for (std::size_t k = 0; k < Keys; ++k) sum[r][k].clear();
    }
    const auto add = [&](std::size_t d) {
        INTAGLIO_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) {
            q.load(queries + r * stride + d);
            INTAGLIO_UNROLL
            for (std::size_t k = 0; k < Keys; ++k) add_fused(sum[r][k], q, x[k]);
        }
    };
    for (std::size_t d = 0; d < whole; d += kWidth) {
        INTAGLIO_UNROLL
        for (std::size_t k = 0; k < Keys; ++k) x[k].load(keys + k * key_row + d);
        add(d);
    }
    if (whole < D) {
        INTAGLIO_UNROLL
        for (std::size_t k = 0; k < Keys; ++k) load_first(x[k], keys + k * key_row + whole, D - whole);
        add(whole);
    }
    INTAGLIO_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) store_sums(sum[r], scores + r * kSplitKeys);
}

template <std::size_t Rows>
INTAGLIO_INLINE void score(const float* queries, std::size_t stride, const float* keys, std::size_t key_row,
                           std::size_t count, std::size_t D, float* scores) {
    // Some of a key's sums are added in another order than those of the last keys, which depends on count
    // alone.
    std::size_t k = 0;
    for (; k + 4 <= count; k += 4) score_keys<Rows, 4>(queries, stride, keys + k * key_row, key_row, D, scores + k);
    for (; k < count; ++k) score_keys<Rows, 1>(queries, stride, keys + k * key_row, key_row, D, scores + k);
}

// Sums of values for Vectors vectors of their numbers, of which the last has `last` in use.
template <std::size_t Rows, std::size_t Vectors>
INTAGLIO_INLINE void add_values(const float* weights, const float* values, std::size_t value_row, std::size_t count,
                                std::size_t last, float* sums, std::size_t stride) {
    Lanes sum[Rows][Vectors], v[Vectors], p;
    INTAGLIO_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < Vectors; ++c) sum[r][c].clear();
    }
    for (std::size_t k = 0; k < count; ++k) {
        const float* value = values + k * value_row;
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c + 1 < Vectors; ++c) v[c].load(value + c * kWidth);
        if (last == kWidth) v[Vectors - 1].load(value + (Vectors - 1) * kWidth);
        else load_first(v[Vectors - 1], value + (Vectors - 1) * kWidth, last);
        INTAGLIO_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) {
            p.fill(weights[r * kSplitKeys + k]);
            INTAGLIO_UNROLL
            for (std::size_t c = 0; c < Vectors; ++c) add_fused(sum[r][c], p, v[c]);
        }
    }
    INTAGLIO_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c + 1 < Vectors; ++c) sum[r][c].store(sums + r * stride + c * kWidth);
        float lanes[kWidth];
        sum[r][Vectors - 1].store(lanes);
        std::memcpy(sums + r * stride + (Vectors - 1) * kWidth, lanes, last * sizeof(float));
    }
}

// Scores of one row to weights; gives the largest score and the sum of the weights.
INTAGLIO_INLINE void weigh(std::size_t count, float* scores, float& largest, float& sum_of_weights) {
    const std::size_t padded = round_up(count, kWidth);
    for (std::size_t k = count; k < padded; ++k) scores[k] = kHidden;
    Lanes most = lanes_of(kLowest), sum = lanes_of(0), x;
    for (std::size_t k = 0; k < padded; k += kWidth) {
        x.load(scores + k);
        keep_larger(most, x);
    }
    float lanes[kWidth];
    most.store(lanes);
    largest = lanes[0];
    for (const float lane : lanes) largest = lane > largest ? lane : largest;
    most.fill(largest);
    for (std::size_t k = 0; k < padded; k += kWidth) {
        x.load(scores + k);
        subtract(x, most);
        exponential(x);
        x.store(scores + k);
        sum.add(x);
    }
    sum_of_weights = sum_of(sum);
}

void apply_mask(const Attention& a, std::size_t b, std::size_t h, std::size_t s, std::size_t key, std::size_t count,
                float* scores) {
    const AttentionMask& mask = a.mask;
    const std::size_t at = b * mask.batch + h * mask.head + s * mask.query + key * mask.key;
    if (mask.bias)
        for (std::size_t k = 0; k < count; ++k) scores[k] += mask.bias[at + k * mask.key];
    if (mask.visible && mask.key == 1)
        for (std::size_t k = 0; k < count; ++k) scores[k] = mask.visible[at + k] ? scores[k] : kHidden;
    else if (mask.visible)
        for (std::size_t k = 0; k < count; ++k) scores[k] = mask.visible[at + k * mask.key] ? scores[k] : kHidden;
    const std::size_t end = s + a.causal_offset + 1;
    if (a.is_causal)
        for (std::size_t k = end > key ? end - key : 0; k < count; ++k) scores[k] = kHidden;
}

template <std::size_t Rows>
void attend_rows(const Attention& a, const AttentionRows& part, std::size_t split, float* partial) {
    alignas(64) float queries[Rows * kMaxHead];
    alignas(64) float scores[Rows * kSplitKeys];
    const std::size_t stride = round_up(a.D, kWidth), first = split * kSplitKeys;
    const std::size_t count = smaller(kSplitKeys, a.T - first), partial_row = a.E + 2;
    for (std::size_t r = 0; r < Rows; ++r) {
        const std::size_t h = part.kv_head * (a.H / a.K) + (part.row + r) / a.S, s = (part.row + r) % a.S;
        float* q = queries + r * stride;
        load_head(a.query_rotary, part.batch, s, a.query.at(part.batch, h, s), a.D, q);
        for (std::size_t d = 0; d < a.D; ++d) q[d] *= a.scale;
        for (std::size_t d = a.D; d < stride; ++d) q[d] = 0;
    }
    score<Rows>(queries, stride, a.key.at(part.batch, part.kv_head, first), a.key.row, count, a.D, scores);
    for (std::size_t r = 0; r < Rows; ++r) {
        const std::size_t h = part.kv_head * (a.H / a.K) + (part.row + r) / a.S, s = (part.row + r) % a.S;
        float* row = scores + r * kSplitKeys;
        apply_mask(a, part.batch, h, s, first, count, row);
        weigh(count, row, partial[r * partial_row], partial[r * partial_row + 1]);
    }
    const float* values = a.value.at(part.batch, part.kv_head, first);
    float* sums = partial + 2;
    std::size_t e = 0;
    for (; e + kVectors * kWidth <= a.E; e += kVectors * kWidth)
        add_values<Rows, kVectors>(scores, values + e, a.value.row, count, kWidth, sums + e, partial_row);
    for (; e < a.E; e += kWidth)
        add_values<Rows, 1>(scores, values + e, a.value.row, count, smaller(kWidth, a.E - e), sums + e, partial_row);
}

template <std::size_t Rows>
void attend_last_rows(const Attention& a, const AttentionRows& part, std::size_t split, float* partial) {
    if constexpr (Rows > 1)
        if (part.row_end - part.row < Rows) return attend_last_rows<Rows - 1>(a, part, split, partial);
    attend_rows<Rows>(a, part, split, partial);
}

}  // namespace

void INTAGLIO_FOR_ISA(attend_split)(const Attention& attention, const AttentionRows& rows, std::size_t split,
                                    float* partial) noexcept {
    AttentionRows part = rows;
    for (; part.row < rows.row_end; part.row += kRows) {
        part.row_end = smaller(part.row + kRows, rows.row_end);
        attend_last_rows<kRows>(attention, part, split, partial + (part.row - rows.row) * (attention.E + 2));
    }
}

}  // namespace intaglio
