// Attention with products of 8-bit digits, see attention_digits.h. Compiled for AMX only.
//
// Lanes are rows (queries), as in attention_tile.cpp: scores^T = keys queries^T and sums^T = values^T weights.
// The left factor of a product lies in tiles of rows, the right one as four bytes for each of 16 lanes, which
// is how weights come out of the softmax.

#include "amx_tiles.h"
#include "attention_digits.h"

#include "attention_rows.h"

namespace intaglio {
namespace {

constexpr std::size_t kTileBytes = 1024, kTileRows = 16, kStep = 64;
constexpr std::size_t kGroups = 2, kLanes = kDigitQueries;
static_assert(kLanes == kGroups * kTileRows);
using RowTile = Tile<kLanes>;

// The integers of a row reach this far: all digits then stay within 8 bits.
template <std::size_t Digits>
constexpr float kReach = Digits == 3 ? 127.0f * 65536 : 127.0f * 256;
// Weights are from 0 to 1 and take unsigned digits.
template <std::size_t Digits>
constexpr float kWeightReach = Digits == 3 ? 16777215.0f : 65535.0f;
// Numbers that are larger than this times the mean magnitude leave too few bits to the others.
template <std::size_t Digits>
constexpr float kSpread = Digits == 3 ? 32.0f : 256.0f;

// Largest and mean magnitude of numbers, in each lane.
struct Magnitudes {
    __m512i largest = _mm512_setzero_si512();
    __m512 sum = _mm512_setzero_ps();

    INTAGLIO_INLINE void add(__m512 x) {
        const __m512 magnitude = _mm512_abs_ps(x);
        // As integers: infinity is the largest but for NaN, and neither is lost.
        largest = _mm512_max_epi32(largest, _mm512_castps_si512(magnitude));
        sum = _mm512_add_ps(sum, magnitude);
    }
};

// Whether numbers with these magnitudes take digits. The range keeps products of scales within float32.
template <std::size_t Digits>
INTAGLIO_INLINE __mmask16 takes_digits(__m512 largest, __m512 mean) {
    const __mmask16 zero = _mm512_cmp_ps_mask(largest, _mm512_setzero_ps(), _CMP_EQ_OQ);
    const __mmask16 in_range = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(1e15f), _CMP_LE_OQ) &
                               _mm512_cmp_ps_mask(largest, _mm512_set1_ps(1e-15f), _CMP_GE_OQ);
    const __m512 most = _mm512_mul_ps(mean, _mm512_set1_ps(kSpread<Digits>));
    return zero | (in_range & _mm512_cmp_ps_mask(largest, most, _CMP_LE_OQ));
}

// Bytes of the result are the signed digits, the lowest first.
template <std::size_t Digits>
INTAGLIO_INLINE __m512i signed_digits(__m512 x, __m512 inverse) {
    const __m512i half = _mm512_set1_epi32(Digits == 3 ? 0x00808080 : 0x00008080);
    const __m512i integer = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
    return _mm512_xor_si512(_mm512_add_epi32(integer, half), half);
}

// Four vectors of integers to vectors of four bytes a lane, one for each digit, the highest first.
template <std::size_t Digits>
INTAGLIO_INLINE void split_digits(const __m512i (&x)[4], __m512i (&digit)[Digits]) {
    constexpr __mmask32 odd_words = 0xaaaaaaaa;
    constexpr __mmask64 odd_bytes = 0xaaaaaaaaaaaaaaaa;
    // Low words of 0 and 2, of 1 and 3; then likewise bytes.
    const __m512i low02 = _mm512_mask_blend_epi16(odd_words, x[0], _mm512_slli_epi32(x[2], 16));
    const __m512i low13 = _mm512_mask_blend_epi16(odd_words, x[1], _mm512_slli_epi32(x[3], 16));
    digit[Digits - 1] = _mm512_mask_blend_epi8(odd_bytes, low02, _mm512_slli_epi16(low13, 8));
    digit[Digits - 2] = _mm512_mask_blend_epi8(odd_bytes, _mm512_srli_epi16(low02, 8), low13);
    if constexpr (Digits == 3) {
        const __m512i high02 = _mm512_mask_blend_epi16(odd_words, _mm512_srli_epi32(x[0], 16), x[2]);
        const __m512i high13 = _mm512_mask_blend_epi16(odd_words, _mm512_srli_epi32(x[1], 16), x[3]);
        digit[0] = _mm512_mask_blend_epi8(odd_bytes, high02, _mm512_slli_epi16(high13, 8));
    }
}

// Magnitudes of `count` numbers in a row, from and to memory that reaches to a multiple of kStep.
template <std::size_t Digits>
INTAGLIO_INLINE bool row_scale(float* row, std::size_t count, float& scale, float& inverse) {
    for (std::size_t i = count; i < round_up(count, kStep); ++i) row[i] = 0;
    Magnitudes magnitudes;
    for (std::size_t i = 0; i < count; i += kWidth) magnitudes.add(_mm512_loadu_ps(row + i));
    const float largest = float_of_bits(static_cast<std::uint32_t>(_mm512_reduce_max_epi32(magnitudes.largest)));
    const float mean = _mm512_reduce_add_ps(magnitudes.sum) / static_cast<float>(count);
    scale = largest / kReach<Digits>;
    inverse = largest > 0 ? kReach<Digits> / largest : 0;
    return takes_digits<Digits>(_mm512_set1_ps(largest), _mm512_set1_ps(mean)) & 1;
}

// Digits of a row, `count` numbers from `row`: those of digit d at to + d * digit_stride, kStep numbers every
// step_stride.
template <std::size_t Digits>
INTAGLIO_INLINE void row_digits(const float* row, std::size_t count, float inverse, std::uint8_t* to,
                                std::size_t digit_stride, std::size_t step_stride) {
    for (std::size_t i = 0; i < round_up(count, kStep); i += kWidth) {
        const __m512i digits = signed_digits<Digits>(_mm512_loadu_ps(row + i), _mm512_set1_ps(inverse));
        for (std::size_t d = 0; d < Digits; ++d) {
            const __m128i bytes = _mm512_cvtepi32_epi8(
                _mm512_srli_epi32(digits, static_cast<unsigned>(8 * (Digits - 1 - d))));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + d * digit_stride + i / kStep * step_stride + i % kStep),
                             bytes);
        }
    }
}

// 16 rows of 16 times four bytes, `stride` bytes apart, with rows and columns exchanged.
INTAGLIO_INLINE void transpose(const std::uint8_t* from, std::size_t stride, std::uint8_t* to) {
    const __m512i places = _mm512_mullo_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(static_cast<int>(stride)));
    for (std::size_t i = 0; i < kTileRows; ++i)
        _mm512_storeu_si512(to + i * 64, _mm512_i32gather_epi32(places, from + i * 4, 1));
}

// Sums of products of digits whose places add up alike. Of scores, those with places beyond the last digit's
// are left out; of values one more is kept, since the digits of a small weight are as large as those of a large
// one.
template <std::size_t Digits>
constexpr std::size_t kScoreSums = Digits;
template <std::size_t Digits>
constexpr std::size_t kValueSums = Digits == 3 ? 4 : 2;
constexpr std::size_t kMaxSums = 4;
constexpr std::size_t kProducts = kGroups * kMaxSums * 256;

// The memory of a part.
struct Memory {
    float *head;                  // one row of a head
    float *scores, *bias;         // [kDigitKeys, kLanes]
    float *sums;                  // [E, kLanes]
    float *query_scales;          // [kLanes]
    std::uint32_t* words;         // load_seen
    std::int32_t* products;       // two of [kGroups, kMaxSums, 16, 16]
    std::uint8_t *rows;           // digits of 16 queries, or of 64 values
    std::uint8_t *queries;        // tiles [key_steps, kGroups, digits]
    std::uint8_t *weights;        // tiles [kDigitKeys / 64, kGroups, digits]

    explicit Memory(const Attention& a, float* at) {
        const auto take = [&at](std::size_t floats) {
            float* taken = at;
            at += round_up(floats, 16);
            return taken;
        };
        const auto take_bytes = [&](std::size_t bytes) { return reinterpret_cast<std::uint8_t*>(take(bytes / 4)); };
        const std::size_t steps = round_up(a.D, kStep) / kStep;
        head = take(round_up(a.D, kStep));
        scores = take(kDigitKeys * kLanes);
        bias = take(kDigitKeys * kLanes);
        sums = take(round_up(a.E, kTileRows) * kLanes);
        query_scales = take(kLanes);
        words = reinterpret_cast<std::uint32_t*>(take(kDigitKeys / kWordKeys * kLanes));
        products = reinterpret_cast<std::int32_t*>(take(2 * kProducts));
        rows = take_bytes(3 * kTileBytes * (steps > 1 ? steps : 1));
        queries = take_bytes(steps * kGroups * 3 * kTileBytes);
        weights = take_bytes(kDigitKeys / kStep * kGroups * 3 * kTileBytes);
    }
};

template <std::size_t Digits>
bool pack_keys(const Attention& a, const DigitsLayout& layout, std::size_t b, std::size_t h, std::size_t key,
               std::size_t count, std::byte* head, const Memory& m) {
    float* scales = reinterpret_cast<float*>(head + layout.key_scales) + key;
    std::uint8_t* tiles = reinterpret_cast<std::uint8_t*>(head + layout.key_tiles) +
                          key / kTileRows * layout.key_steps * Digits * kTileBytes;
    bool takes = true;
    for (std::size_t k = 0; k < round_up(count, kStep); ++k) {
        float inverse = 0;
        if (k < count) {
            load_head(a.key_rotary, b, key + k, a.key.at(b, h, key + k), a.D, m.head);
            takes = row_scale<Digits>(m.head, a.D, scales[k], inverse) && takes;
        } else {
            for (std::size_t d = 0; d < round_up(a.D, kStep); ++d) m.head[d] = 0;
            scales[k] = 0;
        }
        row_digits<Digits>(m.head, a.D, inverse,
                           tiles + k / kTileRows * layout.key_steps * Digits * kTileBytes + k % kTileRows * kStep,
                           kTileBytes, Digits * kTileBytes);
    }
    return takes;
}

template <std::size_t Digits>
bool pack_values(const Attention& a, const DigitsLayout& layout, std::size_t b, std::size_t h, std::size_t key,
                 std::size_t count, std::byte* head, const Memory& m) {
    const std::size_t block = key / kDigitKeys, steps = round_up(count, kStep) / kStep;
    float* scales = reinterpret_cast<float*>(head + layout.value_scales) + block * layout.value_tiles * kTileRows;
    std::uint8_t* tiles = reinterpret_cast<std::uint8_t*>(head + layout.value_tiles_at) +
                          block * layout.value_tiles * (kDigitKeys / kStep) * Digits * kTileBytes;
    bool takes = true;
    for (std::size_t tile = 0; tile < layout.value_tiles; ++tile) {
        const std::size_t e = tile * kTileRows, width = smaller(kTileRows, a.E - e);
        const auto used = static_cast<__mmask16>((1u << width) - 1);
        const auto load = [&](std::size_t k) { return _mm512_maskz_loadu_ps(used, a.value.at(b, h, key + k) + e); };
        Magnitudes magnitudes;
        for (std::size_t k = 0; k < count; ++k) magnitudes.add(load(k));
        const __m512 largest = _mm512_castsi512_ps(magnitudes.largest);
        const __m512 mean = _mm512_mul_ps(magnitudes.sum, _mm512_set1_ps(1 / static_cast<float>(count)));
        takes = takes_digits<Digits>(largest, mean) == 0xffff && takes;
        const __mmask16 positive = _mm512_cmp_ps_mask(largest, _mm512_setzero_ps(), _CMP_GT_OQ);
        const __m512 inverse = _mm512_maskz_div_ps(positive, _mm512_set1_ps(kReach<Digits>), largest);
        _mm512_storeu_ps(scales + e, _mm512_mul_ps(largest, _mm512_set1_ps(1 / kReach<Digits>)));
        for (std::size_t step = 0; step < steps; ++step, tiles += Digits * kTileBytes) {
            for (std::size_t k = 0; k < kStep; k += 4) {
                __m512i integers[4], digits[Digits];
                for (std::size_t i = 0; i < 4; ++i) {
                    const std::size_t at = step * kStep + k + i;
                    integers[i] = at < count ? signed_digits<Digits>(load(at), inverse) : _mm512_setzero_si512();
                }
                split_digits<Digits>(integers, digits);
                for (std::size_t d = 0; d < Digits; ++d)
                    _mm512_storeu_si512(m.rows + d * kTileBytes + k / 4 * 64, digits[d]);
            }
            for (std::size_t d = 0; d < Digits; ++d)
                transpose(m.rows + d * kTileBytes, 64, tiles + d * kTileBytes);
        }
    }
    return takes;
}

// Queries to tiles; false where one does not take digits.
template <std::size_t Digits>
bool load_queries(const RowTile& tile, const DigitsLayout& layout, const Memory& m) {
    const Attention& a = tile.a;
    const std::size_t stride = layout.key_steps * kStep;
    for (std::size_t group = 0; group < kGroups; ++group) {
        for (std::size_t i = 0; i < kTileRows; ++i) {
            const std::size_t lane = group * kTileRows + i;
            float scale = 0, inverse = 0;
            if (lane < tile.count) {
                const std::size_t s = tile.query(lane);
                load_head(a.query_rotary, tile.part.batch, s, a.query.at(tile.part.batch, tile.head(lane), s), a.D,
                          m.head);
                if (!row_scale<Digits>(m.head, a.D, scale, inverse)) return false;
            } else {
                for (std::size_t d = 0; d < stride; ++d) m.head[d] = 0;
            }
            m.query_scales[lane] = scale * a.scale;
            row_digits<Digits>(m.head, a.D, inverse, m.rows + i * stride, kTileRows * stride, kStep);
        }
        for (std::size_t step = 0; step < layout.key_steps; ++step)
            for (std::size_t d = 0; d < Digits; ++d)
                transpose(m.rows + d * kTileRows * stride + step * kStep, stride,
                          m.queries + ((step * kGroups + group) * Digits + d) * kTileBytes);
    }
    return true;
}

// Tile registers are named by constants.
#define INTAGLIO_MULTIPLY(sum, left, right)                                \
    do {                                                                   \
        if constexpr (IsUnsigned) _tile_dpbsud(sum, left, right);          \
        else _tile_dpbssd(sum, left, right);                               \
    } while (0)

// Tiles [steps, Digits] times tiles [steps, kGroups, Digits], to products [kGroups, kMaxSums, 16, 16]:
// registers 0 to 2 add those of the first 16 lanes, 3 to 5 those of the others, 6 has a digit of the left
// factor, 7 one of the right.
#define INTAGLIO_ADD_DIGITS(low, high, d)                                  \
    do {                                                                   \
        _tile_loadd(7, right + (d) * kTileBytes, 64);                      \
        INTAGLIO_MULTIPLY(low, 6, 7);                                      \
        _tile_loadd(7, right + (Digits + (d)) * kTileBytes, 64);           \
        INTAGLIO_MULTIPLY(high, 6, 7);                                     \
    } while (0)
template <std::size_t Digits, bool IsUnsigned>
INTAGLIO_INLINE void multiply_tiles(const std::uint8_t* left, const std::uint8_t* right, std::size_t steps,
                                    std::int32_t* products) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(3);
    _tile_zero(4);
    if constexpr (Digits == 3) {
        _tile_zero(2);
        _tile_zero(5);
    }
    for (; steps > 0; --steps, left += Digits * kTileBytes, right += kGroups * Digits * kTileBytes) {
        _tile_loadd(6, left, 64);
        INTAGLIO_ADD_DIGITS(0, 3, 0);
        INTAGLIO_ADD_DIGITS(1, 4, 1);
        if constexpr (Digits == 3) INTAGLIO_ADD_DIGITS(2, 5, 2);
        _tile_loadd(6, left + kTileBytes, 64);
        INTAGLIO_ADD_DIGITS(1, 4, 0);
        if constexpr (Digits == 3) {
            INTAGLIO_ADD_DIGITS(2, 5, 1);
            _tile_loadd(6, left + 2 * kTileBytes, 64);
            INTAGLIO_ADD_DIGITS(2, 5, 0);
        }
    }
    _tile_stored(0, products, 64);
    _tile_stored(1, products + 256, 64);
    _tile_stored(3, products + kMaxSums * 256, 64);
    _tile_stored(4, products + (kMaxSums + 1) * 256, 64);
    if constexpr (Digits == 3) {
        _tile_stored(2, products + 2 * 256, 64);
        _tile_stored(5, products + (kMaxSums + 2) * 256, 64);
    }
}
#undef INTAGLIO_ADD_DIGITS

// The same with eight products of three digits and 16 lanes at a time: registers 0 to 3 add, 4 to 6 have the
// digits of the right factor, 7 one of the left.
template <bool IsUnsigned>
INTAGLIO_INLINE void multiply_tiles_closely(const std::uint8_t* left, const std::uint8_t* right, std::size_t steps,
                                            std::int32_t* products) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (; steps > 0; --steps, left += 3 * kTileBytes, right += kGroups * 3 * kTileBytes) {
        _tile_loadd(4, right, 64);
        _tile_loadd(7, left, 64);
        INTAGLIO_MULTIPLY(0, 7, 4);
        _tile_loadd(5, right + kTileBytes, 64);
        INTAGLIO_MULTIPLY(1, 7, 5);
        _tile_loadd(6, right + 2 * kTileBytes, 64);
        INTAGLIO_MULTIPLY(2, 7, 6);
        _tile_loadd(7, left + kTileBytes, 64);
        INTAGLIO_MULTIPLY(3, 7, 6);
        INTAGLIO_MULTIPLY(1, 7, 4);
        INTAGLIO_MULTIPLY(2, 7, 5);
        _tile_loadd(7, left + 2 * kTileBytes, 64);
        INTAGLIO_MULTIPLY(3, 7, 5);
        INTAGLIO_MULTIPLY(2, 7, 4);
    }
    _tile_stored(0, products, 64);
    _tile_stored(1, products + 256, 64);
    _tile_stored(2, products + 2 * 256, 64);
    _tile_stored(3, products + 3 * 256, 64);
}
#undef INTAGLIO_MULTIPLY

template <std::size_t Digits>
INTAGLIO_INLINE void multiply_values(const std::uint8_t* values, const std::uint8_t* weights, std::size_t steps,
                                     std::int32_t* products) {
    if constexpr (Digits == 3) {
        for (std::size_t g = 0; g < kGroups; ++g)
            multiply_tiles_closely<true>(values, weights + g * 3 * kTileBytes, steps, products + g * kMaxSums * 256);
    } else {
        multiply_tiles<Digits, true>(values, weights, steps, products);
    }
}

// Row `row` of Sums sums of products of 16 lanes, as one number a lane. Its unit is the place of the last sum.
template <std::size_t Sums>
INTAGLIO_INLINE __m512 joined(const std::int32_t* products, std::size_t row) {
    __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(products + (Sums - 1) * 256 + row * 16));
    float place = 1;
    for (std::size_t i = Sums - 1; i-- > 0;) {
        place *= 256;
        sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(products + i * 256 + row * 16)),
                              _mm512_set1_ps(place), sum);
    }
    return sum;
}

// The place of the last of Sums sums, the last digits' being 1.
template <std::size_t Digits, std::size_t Sums>
constexpr float kUnit = 2 * (Digits - 1) - (Sums - 1) == 2 ? 65536.0f : 256.0f;

// The running softmax of a tile.
struct State {
    __m512 largest[kGroups], weights[kGroups], decay[kGroups];
};

// Scores of 16 keys from their products.
template <std::size_t Digits>
INTAGLIO_INLINE void store_scores(const std::int32_t* products, const float* key_scales,
                                  const __m512 (&query_scales)[kGroups], float* scores) {
    for (std::size_t row = 0; row < kTileRows; ++row) {
        const __m512 key_scale = _mm512_set1_ps(key_scales[row]);
        for (std::size_t g = 0; g < kGroups; ++g) {
            const __m512 unit = _mm512_mul_ps(key_scale, query_scales[g]);
            _mm512_store_ps(scores + row * kLanes + g * 16,
                            _mm512_mul_ps(joined<kScoreSums<Digits>>(products + g * kMaxSums * 256, row), unit));
        }
    }
}

template <std::size_t Digits>
void score_keys(const DigitsLayout& layout, std::size_t key, std::size_t count, const std::byte* head,
                const Memory& m) {
    const float* scales = reinterpret_cast<const float*>(head + layout.key_scales) + key;
    const std::size_t tile_bytes = layout.key_steps * Digits * kTileBytes;
    const std::uint8_t* tiles =
        reinterpret_cast<const std::uint8_t*>(head + layout.key_tiles) + key / kTileRows * tile_bytes;
    __m512 query_scales[kGroups];
    for (std::size_t g = 0; g < kGroups; ++g)
        query_scales[g] = _mm512_mul_ps(_mm512_load_ps(m.query_scales + g * 16), _mm512_set1_ps(kUnit<Digits, kScoreSums<Digits>>));
    // The products of one tile are read while those of the next are made.
    std::int32_t *made = m.products, *read = m.products + kProducts;
    for (std::size_t k = 0; k < count; k += kTileRows) {
        multiply_tiles<Digits, false>(tiles + k / kTileRows * tile_bytes, m.queries, layout.key_steps, made);
        if (k > 0)
            store_scores<Digits>(read, scales + k - kTileRows, query_scales, m.scores + (k - kTileRows) * kLanes);
        std::int32_t* const next = read;
        read = made;
        made = next;
    }
    const std::size_t last = (count - 1) / kTileRows * kTileRows;
    store_scores<Digits>(read, scales + last, query_scales, m.scores + last * kLanes);
}

// Scores to digits of weights e^(score - largest).
template <std::size_t Digits>
void weigh(std::size_t count, const Memory& m, State& state) {
    for (std::size_t g = 0; g < kGroups; ++g) {
        __m512 most = state.largest[g];
        for (std::size_t k = 0; k < count; ++k)
            most = _mm512_max_ps(_mm512_load_ps(m.scores + k * kLanes + g * 16), most);
        Lanes decay{_mm512_sub_ps(state.largest[g], most)};
        exponential(decay);
        state.decay[g] = decay.v;
        state.largest[g] = most;
        // In sums of their own: a single one of all keys would lose digits.
        __m512 sum[4] = {};
        std::uint8_t* to = m.weights + g * Digits * kTileBytes;
        for (std::size_t k = 0; k < count; k += 4) {
            __m512i integers[4], digits[Digits];
            INTAGLIO_UNROLL
            for (std::size_t i = 0; i < 4; ++i) {
                Lanes x{_mm512_sub_ps(_mm512_load_ps(m.scores + (k + i) * kLanes + g * 16), most)};
                exponential(x);
                sum[i] = _mm512_add_ps(sum[i], x.v);
                integers[i] = _mm512_cvtps_epi32(_mm512_mul_ps(x.v, _mm512_set1_ps(kWeightReach<Digits>)));
            }
            split_digits<Digits>(integers, digits);
            std::uint8_t* tile = to + k / kStep * kGroups * Digits * kTileBytes + k % kStep / 4 * 64;
            for (std::size_t d = 0; d < Digits; ++d) _mm512_store_si512(tile + d * kTileBytes, digits[d]);
        }
        const __m512 block = _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
        state.weights[g] = _mm512_fmadd_ps(state.weights[g], decay.v, block);
    }
}

template <std::size_t Digits>
INTAGLIO_INLINE void store_sums(const std::int32_t* products, const float* scales, const State& state, float* sums) {
    for (std::size_t row = 0; row < kTileRows; ++row) {
        const __m512 unit = _mm512_set1_ps(scales[row] * (kUnit<Digits, kValueSums<Digits>> / kWeightReach<Digits>));
        for (std::size_t g = 0; g < kGroups; ++g) {
            float* to = sums + row * kLanes + g * 16;
            const __m512 earlier = _mm512_mul_ps(_mm512_load_ps(to), state.decay[g]);
            _mm512_store_ps(to, _mm512_fmadd_ps(joined<kValueSums<Digits>>(products + g * kMaxSums * 256, row), unit, earlier));
        }
    }
}

// Values of keys [begin, begin + 64 * steps) of a block.
template <std::size_t Digits>
void add_values(const DigitsLayout& layout, std::size_t block, std::size_t block_steps, std::size_t begin,
                std::size_t steps, const std::byte* head, const Memory& m, const State& state) {
    const std::size_t values = layout.value_tiles * kTileRows;
    const float* scales = reinterpret_cast<const float*>(head + layout.value_scales) + block * values;
    const std::uint8_t* tiles =
        reinterpret_cast<const std::uint8_t*>(head + layout.value_tiles_at) +
        (block * layout.value_tiles * (kDigitKeys / kStep) + begin / kStep) * Digits * kTileBytes;
    const std::size_t stride = block_steps * Digits * kTileBytes;
    std::int32_t *made = m.products, *read = m.products + kProducts;
    for (std::size_t tile = 0; tile <= layout.value_tiles; ++tile) {
        if (tile < layout.value_tiles) multiply_values<Digits>(tiles + tile * stride, m.weights, steps, made);
        if (tile > 0) {
            const std::size_t e = (tile - 1) * kTileRows;
            store_sums<Digits>(read, scales + e, state, m.sums + e * kLanes);
        }
        std::int32_t* const next = read;
        read = made;
        made = next;
    }
}

template <std::size_t Digits>
bool attend_tile(const RowTile& tile, const DigitsLayout& layout, const std::byte* head, const Memory& m) {
    const Attention& a = tile.a;
    if (!load_queries<Digits>(tile, layout, m)) return false;
    State state;
    for (std::size_t g = 0; g < kGroups; ++g) {
        state.largest[g] = _mm512_set1_ps(kLowest);
        state.weights[g] = _mm512_setzero_ps();
    }
    for (std::size_t i = 0; i < layout.value_tiles * kTileRows * kLanes; ++i) m.sums[i] = 0;
    for (std::size_t block = 0; block < layout.blocks; ++block) {
        const std::size_t key = block * kDigitKeys, count = smaller(kDigitKeys, a.T - key);
        const Seen seen = load_seen(tile, key, count, m.words);
        if (seen.end == 0) continue;
        const std::size_t begin = seen.begin / kStep * kStep, keys = seen.end - begin;
        score_keys<Digits>(layout, key + begin, keys, head, m);
        if (a.mask.bias) add_bias(tile, key + begin, keys, m.bias, m.scores);
        if (!seen.is_all) hide_unseen<kLanes>(m.words, begin, keys, m.scores);
        const std::size_t padded = round_up(keys, kStep);
        for (std::size_t i = keys * kLanes; i < padded * kLanes; ++i) m.scores[i] = kHidden;
        weigh<Digits>(padded, m, state);
        add_values<Digits>(layout, block, round_up(count, kStep) / kStep, begin, padded / kStep, head, m, state);
    }
    float weights[kLanes];
    for (std::size_t g = 0; g < kGroups; ++g) _mm512_storeu_ps(weights + g * 16, state.weights[g]);
    store_rows(tile, m.sums, weights);
    return true;
}

template <std::size_t Digits>
bool attend(const Attention& a, const DigitsLayout& layout, const AttentionRows& part, const std::byte* head,
            const Memory& m) {
    const auto* flags = reinterpret_cast<const std::uint8_t*>(head);
    for (std::size_t block = 0; block < layout.blocks; ++block)
        if (flags[block]) return false;
    load_tiles();
    bool done = true;
    for (std::size_t row = part.row; done && row < part.row_end; row += kLanes)
        done = attend_tile<Digits>(RowTile{a, part, row, smaller(kLanes, part.row_end - row)}, layout, head, m);
    release_tiles();
    return done;
}

}  // namespace

void pack_digits_amx(const Attention& a, const DigitsLayout& layout, std::size_t batch, std::size_t kv_head,
                     std::size_t block, std::byte* head, float* memory) noexcept {
    const Memory m(a, memory);
    const std::size_t key = block * kDigitKeys, count = smaller(kDigitKeys, a.T - key);
    bool takes;
    if (layout.digits == 3)
        takes = pack_keys<3>(a, layout, batch, kv_head, key, count, head, m) &&
                pack_values<3>(a, layout, batch, kv_head, key, count, head, m);
    else
        takes = pack_keys<2>(a, layout, batch, kv_head, key, count, head, m) &&
                pack_values<2>(a, layout, batch, kv_head, key, count, head, m);
    reinterpret_cast<std::uint8_t*>(head)[block] = !takes;
}

bool attend_digits_amx(const Attention& a, const DigitsLayout& layout, const AttentionRows& rows,
                       const std::byte* head, float* memory) noexcept {
    const Memory m(a, memory);
    return layout.digits == 3 ? attend<3>(a, layout, rows, head, m) : attend<2>(a, layout, rows, head, m);
}

}  // namespace intaglio
