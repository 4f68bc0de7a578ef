// Attention with products of 8-bit digits on AMX: the accuracy of float32, and a faster one.
//
// A row of numbers becomes integers of 24 (or 16) bits over its largest magnitude, and these signed digits of 8
// bits. Products of digits are added exactly, those whose places add up alike in one sum; places below the last
// digit's are left out (https://arxiv.org/abs/2306.11975 does this for float64). Three digits take six
// products, and are as close as float32 where no number is much larger than the mean magnitude of its row;
// others take the kernel of attention_tile.cpp, rows that are not finite too. Legend: attention.h.
#pragma once

#include "attention.h"

namespace intaglio {

// Keys that a step of the softmax takes together, and the rows that it takes.
constexpr std::size_t kDigitKeys = 512, kDigitQueries = 32;

// How the digits of the keys and values of one key head lie. A tile is 16 rows of 64 bytes.
struct DigitsLayout {
    DigitsLayout(const Attention& attention, std::size_t digits);

    std::size_t digits;
    std::size_t key_steps;    // tiles along D, 64 numbers each
    std::size_t value_tiles;  // along E, 16 numbers each
    std::size_t blocks;       // of kDigitKeys keys
    // Bytes from the start of the head: a flag for each block (1: these do not take digits), scales of the
    // keys, scales of the values of each block, tiles [T / 16, key_steps, digits] of keys and [blocks,
    // value_tiles, keys / 64, digits] of values.
    std::size_t key_scales, value_scales, key_tiles, value_tiles_at, bytes;
};

// Floats that a part needs, aligned to 64 bytes.
std::size_t digits_memory(const Attention& attention);

// Digits of one block of keys and values. `memory` as for a part.
void pack_digits_amx(const Attention& attention, const DigitsLayout& layout, std::size_t batch, std::size_t kv_head,
                     std::size_t block, std::byte* head, float* memory) noexcept;

// False where keys, values or some of these rows do not take digits. The outputs of rows before these may have been
// written by then: the caller computes all rows of the part anew.
bool attend_digits_amx(const Attention& attention, const DigitsLayout& layout, const AttentionRows& rows,
                       const std::byte* head, float* memory) noexcept;

}  // namespace intaglio
