// Tiles of queries, one a lane, and what they see. Compiled once for each instruction set (for_isa.h).
#pragma once

#include "attention_arithmetic.h"

namespace intaglio {
namespace {

// At most kLanes rows of a part, from `row` on.
template <std::size_t kLanes>
struct Tile {
    const Attention& a;
    const AttentionRows& part;
    std::size_t row, count;

    std::size_t head(std::size_t lane) const { return part.kv_head * (a.H / a.K) + (row + lane) / a.S; }
    std::size_t query(std::size_t lane) const { return (row + lane) % a.S; }
    std::size_t mask_at(std::size_t lane) const {
        return part.batch * a.mask.batch + head(lane) * a.mask.head + query(lane) * a.mask.query;
    }
    float* output(std::size_t lane) const {
        return a.output + part.batch * a.output_batch + head(lane) * a.output_head + query(lane) * a.output_row;
    }
};

// What the rows of a tile see of a block of keys: keys [begin, end) of it, of those all or some.
struct Seen {
    std::size_t begin, end;
    bool is_all;
};

constexpr std::size_t kWordKeys = 32;

// Whether each of eight bytes is other than 0, the first in the lowest bit.
INTAGLIO_INLINE std::uint32_t bits_of_bytes(const std::uint8_t* bytes) {
    constexpr std::uint64_t low = 0x7f7f7f7f7f7f7f7f;
    std::uint64_t x;
    std::memcpy(&x, bytes, sizeof x);
    x = (((x & low) + low) | x) >> 7 & 0x0101010101010101;
    return static_cast<std::uint32_t>(x * 0x0102040810204080 >> 56);
}

INTAGLIO_INLINE std::uint32_t bits_of_mask(const std::uint8_t* mask, std::size_t stride, std::size_t count) {
    std::uint32_t bits = 0;
    if (stride == 1 && count == kWordKeys) {
#if defined(__AVX512BW__)
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(mask));
        return _mm256_test_epi8_mask(bytes, bytes);
#else
        for (std::size_t k = 0; k < kWordKeys; k += 8) bits |= bits_of_bytes(mask + k) << k;
        return bits;
#endif
    }
    for (std::size_t k = 0; k < count; ++k) bits |= std::uint32_t{mask[k * stride] != 0} << k;
    return bits;
}

INTAGLIO_INLINE std::uint32_t low_bits(std::size_t count) {
    return count >= kWordKeys ? ~std::uint32_t{0} : (std::uint32_t{1} << count) - 1;
}

// Which keys [key, key + count) the rows of a tile see: words [count / 32, kLanes], a bit a key. The words are
// written only where not all is seen.
template <std::size_t kLanes>
INTAGLIO_INLINE Seen load_seen(const Tile<kLanes>& tile, std::size_t key, std::size_t count, std::uint32_t* words) {
    const Attention& a = tile.a;
    if (!a.mask.visible && (!a.is_causal || tile.count == 0)) return {0, count, true};
    Seen seen{count, 0, true};
    for (std::size_t word = 0; word * kWordKeys < count; ++word) {
        const std::size_t first = word * kWordKeys, keys = smaller(kWordKeys, count - first);
        std::uint32_t any = 0, all = ~std::uint32_t{0};
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            std::uint32_t bits = 0;
            if (lane < tile.count) {
                bits = low_bits(keys);
                if (a.is_causal) {
                    const std::size_t end = tile.query(lane) + a.causal_offset + 1;
                    bits &= end > key + first ? low_bits(end - key - first) : 0;
                }
                if (a.mask.visible && bits)
                    bits &= bits_of_mask(a.mask.visible + tile.mask_at(lane) + (key + first) * a.mask.key, a.mask.key,
                                         keys);
                any |= bits;
                all &= bits;
            }
            words[word * kLanes + lane] = bits;
        }
        if (all != low_bits(keys)) seen.is_all = false;
        if (any) {
            seen.begin = smaller(seen.begin, first);
            seen.end = first + keys;
        }
    }
    return seen;
}

// Scores of kWidth rows for one key, minus infinity where `words` lacks its bit.
INTAGLIO_INLINE void hide(const std::uint32_t* words, std::size_t key_in_word, float* scores) {
#if defined(__AVX512F__)
    const __m512i bit = _mm512_set1_epi32(static_cast<int>(std::uint32_t{1} << key_in_word));
    const __mmask16 hidden = _mm512_testn_epi32_mask(_mm512_loadu_si512(words), bit);
    _mm512_mask_storeu_ps(scores, hidden, _mm512_set1_ps(kHidden));
#else
    for (std::size_t lane = 0; lane < kWidth; ++lane)
        scores[lane] = words[lane] >> key_in_word & 1 ? scores[lane] : kHidden;
#endif
}

// Scores [count, kLanes] of keys [begin, begin + count) of a block whose words these are.
template <std::size_t kLanes>
INTAGLIO_INLINE void hide_unseen(const std::uint32_t* words, std::size_t begin, std::size_t count, float* scores) {
    for (std::size_t k = 0; k < count; ++k)
        for (std::size_t lane = 0; lane < kLanes; lane += kWidth)
            hide(words + (begin + k) / kWordKeys * kLanes + lane, (begin + k) % kWordKeys, scores + k * kLanes + lane);
}

// Adds the mask's numbers to scores [count, kLanes] of keys from `key` on; `bias` is room for as many.
template <std::size_t kLanes>
INTAGLIO_INLINE void add_bias(const Tile<kLanes>& tile, std::size_t key, std::size_t count, float* bias, float* scores) {
    const AttentionMask& mask = tile.a.mask;
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
        const bool is_row = lane < tile.count;
        const float* row = mask.bias + (is_row ? tile.mask_at(lane) : 0);
        for (std::size_t k = 0; k < count; ++k) bias[k * kLanes + lane] = is_row ? row[(key + k) * mask.key] : 0;
    }
    for (std::size_t i = 0; i < count * kLanes; i += kWidth) {
        Lanes sum, added;
        sum.load(scores + i);
        added.load(bias + i);
        sum.add(added);
        sum.store(scores + i);
    }
}

// Sums of values [E, kLanes] over the sums of the weights [kLanes], to the output.
template <std::size_t kLanes>
INTAGLIO_INLINE void store_rows(const Tile<kLanes>& tile, const float* sums, const float* weights) {
    for (std::size_t lane = 0; lane < tile.count; ++lane) {
        // Where every score was minus infinity the sums are zeros.
        const float factor = weights[lane] == 0 ? 0 : 1 / weights[lane];
        float* to = tile.output(lane);
        for (std::size_t e = 0; e < tile.a.E; ++e) to[e] = sums[e * kLanes + lane] * factor;
    }
}

}  // namespace
}  // namespace intaglio
