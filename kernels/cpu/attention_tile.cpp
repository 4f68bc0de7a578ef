// Attention of many rows, compiled once for each instruction set.
//
// Lanes are rows (queries): scores lie as [keys, lanes], sums of values as [E, lanes], and each product is a
// number of a key or a value times a vector of rows. So keys and values are read as they are, for any D and E,
// and the softmax needs nothing across lanes. Legend: attention.h.

#include "attention_rows.h"

namespace intaglio {
namespace {

// A tile of kRows keys (or numbers of a value) and kVectors vectors of rows: its sums, one vector of rows and a
// number must fit the registers, 32 with AVX-512 and NEON, else 16.
#if defined(__AVX512F__)
constexpr std::size_t kRows = 8, kVectors = 3;
#elif defined(__AVX2__)
constexpr std::size_t kRows = 4, kVectors = 3;
#elif defined(__aarch64__)
constexpr std::size_t kRows = 6, kVectors = 4;
#else
constexpr std::size_t kRows = 4, kVectors = 2;
#endif
constexpr std::size_t kLanes = kWidth * kVectors;
static_assert(kTileQueries % kLanes == 0);
constexpr std::size_t kKeys = kTileKeys;
// What one row of keys or values needs beyond its end: a tile reads kRows keys.
constexpr std::size_t kSpare = 16;

constexpr std::size_t kPartLanes = kTileQueries * kPartTiles;

// The memory of a part. Each of its tiles has kLanes rows; tile t of any array starts at t * kLanes times its
// height.
struct Memory {
    float *queries, *sums;          // [D, kLanes] and [E, kLanes] a tile
    float *largest, *weights;       // [kLanes] a tile: the largest score, the sum of the exponentials
    float *keys, *values;           // [kKeys, D] and [kKeys, E]
    float *scores, *bias;           // [kKeys, kLanes]
    std::uint32_t* words;           // [kKeys / 32, kLanes]: load_seen
    float* head;                    // [max(D, E)]

    Memory(const Attention& a, float* at) {
        const auto take = [&at](std::size_t count) {
            float* taken = at;
            at += round_up(count, 16);
            return taken;
        };
        queries = take(a.D * kPartLanes);
        sums = take(a.E * kPartLanes);
        largest = take(kPartLanes);
        weights = take(kPartLanes);
        keys = take((kKeys + kSpare) * a.D);
        values = take(kKeys * a.E + kSpare);
        scores = take((kKeys + kSpare) * kLanes);
        bias = take(kKeys * kLanes);
        words = reinterpret_cast<std::uint32_t*>(take(kKeys / kWordKeys * kLanes));
        head = take(a.D > a.E ? a.D : a.E);
    }
};

using RowTile = Tile<kLanes>;

// Rows keys times all rows of a tile.
template <std::size_t Rows>
INTAGLIO_INLINE void score_keys(const float* queries, const float* keys, std::size_t D, float* scores) {
    Lanes sum[Rows][kVectors], q[kVectors], k;
    INTAGLIO_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < kVectors; ++c) sum[r][c].clear();
    }
    for (std::size_t d = 0; d < D; ++d) {
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < kVectors; ++c) q[c].load(queries + d * kLanes + c * kWidth);
        INTAGLIO_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) {
            k.fill(keys[r * D + d]);
            INTAGLIO_UNROLL
            for (std::size_t c = 0; c < kVectors; ++c) add_fused(sum[r][c], k, q[c]);
        }
    }
    INTAGLIO_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < kVectors; ++c) sum[r][c].store(scores + r * kLanes + c * kWidth);
    }
}

// Rows numbers of the values times the weights of a tile: sums = sums * decay + values^T weights.
template <std::size_t Rows>
INTAGLIO_INLINE void add_values(const float* weights, const float* values, std::size_t E, std::size_t count,
                                const Lanes (&decay)[kVectors], float* sums) {
    Lanes sum[Rows][kVectors], p[kVectors], v;
    INTAGLIO_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < kVectors; ++c) sum[r][c].clear();
    }
    for (std::size_t k = 0; k < count; ++k) {
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < kVectors; ++c) p[c].load(weights + k * kLanes + c * kWidth);
        INTAGLIO_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) {
            v.fill(values[k * E + r]);
            INTAGLIO_UNROLL
            for (std::size_t c = 0; c < kVectors; ++c) add_fused(sum[r][c], v, p[c]);
        }
    }
    INTAGLIO_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < kVectors; ++c) {
            Lanes earlier;
            earlier.load(sums + r * kLanes + c * kWidth);
            add_fused(sum[r][c], earlier, decay[c]);
            sum[r][c].store(sums + r * kLanes + c * kWidth);
        }
    }
}

template <std::size_t Rows>
void add_last_values(const float* weights, const float* values, std::size_t E, std::size_t count, std::size_t rows,
                     const Lanes (&decay)[kVectors], float* sums) {
    if constexpr (Rows > 1)
        if (rows < Rows) return add_last_values<Rows - 1>(weights, values, E, count, rows, decay, sums);
    add_values<Rows>(weights, values, E, count, decay, sums);
}

void load_queries(const RowTile& tile, float* head, float* queries) {
    const Attention& a = tile.a;
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
        if (lane >= tile.count) {
            for (std::size_t d = 0; d < a.D; ++d) queries[d * kLanes + lane] = 0;
            continue;
        }
        const std::size_t s = tile.query(lane);
        load_head(a.query_rotary, tile.part.batch, s, a.query.at(tile.part.batch, tile.head(lane), s), a.D, head);
        for (std::size_t d = 0; d < a.D; ++d) queries[d * kLanes + lane] = head[d] * a.scale;
    }
}

void load_block(const Attention& a, const AttentionRows& part, std::size_t key, std::size_t count, const Memory& m) {
    for (std::size_t k = 0; k < count; ++k) {
        load_head(a.key_rotary, part.batch, key + k, a.key.at(part.batch, part.kv_head, key + k), a.D, m.keys + k * a.D);
        std::memcpy(m.values + k * a.E, a.value.at(part.batch, part.kv_head, key + k), a.E * sizeof(float));
    }
    // Scored with the last keys, and then not looked at.
    for (std::size_t i = count * a.D; i < round_up(count, kRows) * a.D; ++i) m.keys[i] = 0;
}

// Scores to weights e^(score - largest). `decay` is what the sums of earlier blocks must be multiplied with.
void weigh(std::size_t count, float* scores, float* largest, float* weights, Lanes (&decay)[kVectors]) {
    Lanes most[kVectors], sum[kVectors], x;
    INTAGLIO_UNROLL
    for (std::size_t c = 0; c < kVectors; ++c) {
        most[c].load(largest + c * kWidth);
        decay[c] = most[c];
    }
    for (std::size_t k = 0; k < count; ++k) {
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < kVectors; ++c) {
            x.load(scores + k * kLanes + c * kWidth);
            keep_larger(most[c], x);
        }
    }
    INTAGLIO_UNROLL
    for (std::size_t c = 0; c < kVectors; ++c) {
        most[c].store(largest + c * kWidth);
        subtract(decay[c], most[c]);
        exponential(decay[c]);
        sum[c].clear();
    }
    for (std::size_t k = 0; k < count; ++k) {
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < kVectors; ++c) {
            x.load(scores + k * kLanes + c * kWidth);
            subtract(x, most[c]);
            exponential(x);
            x.store(scores + k * kLanes + c * kWidth);
            sum[c].add(x);
        }
    }
    // Blocks are added up by themselves first: a single sum of all keys would lose digits.
    INTAGLIO_UNROLL
    for (std::size_t c = 0; c < kVectors; ++c) {
        x.load(weights + c * kWidth);
        add_fused(sum[c], x, decay[c]);
        sum[c].store(weights + c * kWidth);
    }
}

// One tile meets one block of keys.
void attend_block(const RowTile& tile, std::size_t t, std::size_t key, std::size_t count, const Memory& m) {
    const Attention& a = tile.a;
    const Seen seen = load_seen(tile, key, count, m.words);
    if (seen.end == 0) return;
    const float* queries = m.queries + t * kLanes * a.D;
    for (std::size_t k = 0; k < count; k += kRows)
        score_keys<kRows>(queries, m.keys + k * a.D, a.D, m.scores + k * kLanes);
    if (a.mask.bias) add_bias(tile, key, count, m.bias, m.scores);
    if (!seen.is_all) hide_unseen<kLanes>(m.words, 0, count, m.scores);
    Lanes decay[kVectors];
    weigh(count, m.scores, m.largest + t * kLanes, m.weights + t * kLanes, decay);
    float* sums = m.sums + t * kLanes * a.E;
    std::size_t e = 0;
    for (; e + kRows <= a.E; e += kRows)
        add_values<kRows>(m.scores, m.values + e, a.E, count, decay, sums + e * kLanes);
    if (e < a.E) add_last_values<kRows - 1>(m.scores, m.values + e, a.E, count, a.E - e, decay, sums + e * kLanes);
}

}  // namespace

void INTAGLIO_FOR_ISA(attend_tiles)(const Attention& attention, const AttentionRows& part, float* memory) noexcept {
    const Attention& a = attention;
    const Memory m(a, memory);
    const std::size_t tiles = (part.row_end - part.row + kLanes - 1) / kLanes;
    const auto tile_at = [&](std::size_t t) {
        const std::size_t row = part.row + t * kLanes;
        return RowTile{a, part, row, smaller(kLanes, part.row_end - row)};
    };
    for (std::size_t t = 0; t < tiles; ++t) load_queries(tile_at(t), m.head, m.queries + t * kLanes * a.D);
    for (std::size_t i = 0; i < tiles * kLanes * a.E; ++i) m.sums[i] = 0;
    for (std::size_t i = 0; i < tiles * kLanes; ++i) {
        m.largest[i] = kLowest;
        m.weights[i] = 0;
    }
    for (std::size_t key = 0; key < a.T; key += kKeys) {
        const std::size_t count = smaller(kKeys, a.T - key);
        load_block(a, part, key, count, m);
        for (std::size_t t = 0; t < tiles; ++t) attend_block(tile_at(t), t, key, count, m);
    }
    for (std::size_t t = 0; t < tiles; ++t)
        store_rows(tile_at(t), m.sums + t * kLanes * a.E, m.weights + t * kLanes);
}

}  // namespace intaglio
