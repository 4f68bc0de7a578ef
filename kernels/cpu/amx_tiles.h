// The eight tiles of AMX, each of 16 rows of 64 bytes. For files that are compiled for AMX only.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "for_isa.h"

namespace intaglio {
namespace {

struct alignas(64) TileConfig {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

constexpr TileConfig kTileConfig{};

// Gives the thread its tiles, which hold anything. The compiler is told that the instruction reads eight bytes of the
// configuration, hence the barrier.
INTAGLIO_INLINE void load_tiles() {
    __asm__ volatile("" : : "r"(&kTileConfig) : "memory");
    _tile_loadconfig(&kTileConfig);
}

// Whoever loads tiles releases them: a thread that holds them is slower to switch from.
INTAGLIO_INLINE void release_tiles() {
    __asm__ volatile("" : : : "memory");
    _tile_release();
}

}  // namespace
}  // namespace intaglio
