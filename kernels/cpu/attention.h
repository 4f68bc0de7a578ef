// Scaled dot-product attention, softmax(scale * query key^T + mask) value, in blocks of keys: scores are never
// held whole (https://arxiv.org/abs/2205.14135).
//
// A masked score is minus infinity, whatever its key holds. A row whose scores are all minus infinity gives
// zeros, as onnxruntime's Attention and torch do. A NaN in a query or its mask stays in that row. Results do
// not depend on the number of threads. Legend: B batch, H query heads, K key heads (H is a multiple of K), S
// queries, T keys, D numbers of a query and of a key, E of a value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "for_isa.h"
#include "instruction_set.h"
#include "parallel_work.h"

namespace intaglio {

// Strides in elements; numbers of a head lie side by side.
struct HeadRows {
    const float* data = nullptr;
    std::size_t batch = 0, head = 0, row = 0;

    INTAGLIO_INLINE const float* at(std::size_t b, std::size_t h, std::size_t r) const {
        return data + b * batch + h * head + r * row;
    }
};

// Rotary embedding of the first 2 * pairs numbers of a head: halves, or neighbours where it is interleaved. A
// null cos stands for none. Strides in elements.
struct Rotary {
    const float* cos = nullptr;
    const float* sin = nullptr;
    std::size_t batch = 0, row = 0, pairs = 0;
    bool is_interleaved = false;
};

// Either `visible`, bytes that are 0 where a query does not see a key, or `bias`, which is added to the scaled
// scores, or neither. Strides in elements, 0 where the mask is broadcast.
struct AttentionMask {
    const std::uint8_t* visible = nullptr;
    const float* bias = nullptr;
    std::size_t batch = 0, head = 0, query = 0, key = 0;
};

struct Attention {
    std::size_t B, H, K, S, T, D, E;
    HeadRows query, key, value;
    float* output;
    std::size_t output_batch, output_head, output_row;
    float scale;
    AttentionMask mask;
    bool is_causal;             // query s sees the keys up to s + causal_offset
    std::size_t causal_offset;
    Rotary query_rotary, key_rotary;
};

// Rows of one key head, which its H / K query heads share: row r is query r % S of the head's query head r / S.
struct AttentionRows {
    std::size_t batch, kv_head, row, row_end;
};

// Many rows: in tiles of queries, one a lane. A part has at most kPartTiles tiles of kTileQueries rows.
constexpr std::size_t kTileQueries = 48, kPartTiles = 4, kTileKeys = 64;

// Floats that a part needs, aligned to 64 bytes.
std::size_t tile_memory(const Attention& attention);
void attend_tiles_portable(const Attention& attention, const AttentionRows& rows, float* memory) noexcept;
void attend_tiles_avx2(const Attention& attention, const AttentionRows& rows, float* memory) noexcept;
void attend_tiles_avx512(const Attention& attention, const AttentionRows& rows, float* memory) noexcept;

// Few rows (text generation): bound by reading keys and values once. A part is kSplitKeys keys of all rows of a
// key head, and leaves for each row the largest score, the sum of the exponentials and E sums of values at
// `partial`, which the last step adds up in order.
constexpr std::size_t kFewRows = 8, kSplitKeys = 256;

void attend_split_portable(const Attention& attention, const AttentionRows& rows, std::size_t split,
                           float* partial) noexcept;
void attend_split_avx2(const Attention& attention, const AttentionRows& rows, std::size_t split,
                       float* partial) noexcept;
void attend_split_avx512(const Attention& attention, const AttentionRows& rows, std::size_t split,
                         float* partial) noexcept;

}  // namespace intaglio
