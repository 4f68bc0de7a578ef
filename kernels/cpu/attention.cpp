#include "attention_work.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>

#include "ceil_div.h"

namespace intaglio {
namespace {

// From this many parts on, threads end about together.
constexpr std::size_t kWantedParts = 32;
// Multiplications below which handing work to other threads costs more than it saves.
constexpr std::size_t kSmall = std::size_t{1} << 18;
// Rows and keys from which on digits are worth packing, and what the packed heads of a round may take.
constexpr std::size_t kDigitRows = 64, kRoundBytes = std::size_t{32} << 20;

// Memory of this thread, grown when more is asked for and kept until the thread ends; null where there is none.
float* thread_memory(std::size_t floats) noexcept {
    struct Delete {
        void operator()(float* block) const { ::operator delete(block, std::align_val_t{64}); }
    };
    static thread_local std::unique_ptr<float, Delete> block;
    static thread_local std::size_t size = 0;
    if (floats > size) {
        block.reset();
        block.reset(static_cast<float*>(
            ::operator new(floats * sizeof(float), std::align_val_t{64}, std::nothrow)));
        size = block ? floats : 0;
    }
    return block.get();
}

void attend_tiles(Float32Level level, const Attention& attention, const AttentionRows& rows, float* memory) noexcept {
#if INTAGLIO_HAS_avx512
    if (level == Float32Level::kAvx512) return attend_tiles_avx512(attention, rows, memory);
#endif
#if INTAGLIO_HAS_avx2
    if (level == Float32Level::kAvx2) return attend_tiles_avx2(attention, rows, memory);
#endif
    (void)level;
    attend_tiles_portable(attention, rows, memory);
}

void attend_split(Float32Level level, const Attention& attention, const AttentionRows& rows, std::size_t split,
                  float* partial) noexcept {
#if INTAGLIO_HAS_avx512
    if (level == Float32Level::kAvx512) return attend_split_avx512(attention, rows, split, partial);
#endif
#if INTAGLIO_HAS_avx2
    if (level == Float32Level::kAvx2) return attend_split_avx2(attention, rows, split, partial);
#endif
    (void)level;
    attend_split_portable(attention, rows, split, partial);
}

}  // namespace

std::size_t tile_memory(const Attention& a) {
    constexpr std::size_t part_rows = kTileQueries * kPartTiles, spare = 16;
    return (a.D + a.E + 2) * part_rows + (kTileKeys + spare) * (a.D + a.E) +
           (2 * (kTileKeys + spare) + kTileKeys) * kTileQueries + std::max(a.D, a.E) + 16 * spare;
}

DigitsLayout::DigitsLayout(const Attention& a, std::size_t wanted)
    : digits(wanted),
      key_steps(ceil_div(a.D, 64)),
      value_tiles(ceil_div(a.E, 16)),
      blocks(ceil_div(a.T, kDigitKeys)),
      key_scales(ceil_div(blocks, 64) * 64) {
    const std::size_t steps = ceil_div(a.T, 64), tile = 1024 * digits;
    value_scales = key_scales + steps * 64 * sizeof(float);
    key_tiles = value_scales + blocks * value_tiles * 16 * sizeof(float);
    value_tiles_at = key_tiles + steps * 4 * key_steps * tile;
    bytes = value_tiles_at + steps * value_tiles * tile;
}

std::size_t digits_memory(const Attention& a) {
    constexpr std::size_t lanes = kDigitQueries, spare = 256, tile = 1024 / sizeof(float);
    const std::size_t steps = ceil_div(a.D, 64);
    return steps * 64 + 2 * kDigitKeys * lanes + (a.E + 16) * lanes + kDigitKeys + 16 * 256 + 9 * (steps + 1) * tile +
           kDigitKeys / 64 * 6 * tile + spare;
}

AttentionWork::AttentionWork(const Attention& attention, InstructionSet set, bool is_fast)
    : attention_(attention), set_(set), layout_(attention, is_fast ? 2 : 3) {
    const Attention& a = attention;
    rows_ = a.S * (a.H / a.K);
    is_small_ = a.B * a.H * a.S * a.T * (a.D + a.E) < kSmall;
    if (rows_ <= kFewRows && !a.key_rotary.cos && a.D <= 256) {
        splits_ = ceil_div(a.T, kSplitKeys);
        // A cache line for itself: neighbours are written by other threads.
        partial_floats_ = ceil_div(rows_ * (a.E + 2), 16) * 16;
        part_rows_ = rows_;
        row_parts_ = 1;
        return;
    }
#if INTAGLIO_HAS_amx
    has_digits_ = set == InstructionSet::kAmx && rows_ >= kDigitRows && a.T >= kDigitRows && a.D >= 32 && a.E >= 16;
    if (has_digits_) round_heads_ = std::clamp<std::size_t>(kRoundBytes / layout_.bytes, 1, a.B * a.K);
#endif
    const std::size_t tile = has_digits_ ? kDigitQueries : kTileQueries;
    const std::size_t tiles = ceil_div(rows_, tile), wanted = ceil_div(kWantedParts, a.B * a.K);
    part_rows_ = std::clamp<std::size_t>(tiles / wanted, 1, kTileQueries * kPartTiles / tile) * tile;
    row_parts_ = ceil_div(rows_, part_rows_);
}

std::size_t AttentionWork::phases() const {
    if (has_digits_) return 2 * ceil_div(attention_.B * attention_.K, round_heads_);
    return splits_ ? 2 : 1;
}

std::size_t AttentionWork::parts(std::size_t phase) const {
    const std::size_t heads = attention_.B * attention_.K;
    if (has_digits_) {
        const std::size_t in_round = std::min(round_heads_, heads - phase / 2 * round_heads_);
        return in_round * (phase % 2 == 0 ? layout_.blocks : row_parts_);
    }
    if (!splits_) return heads * row_parts_;
    // Adding up is too little to hand over.
    return phase == 0 ? heads * splits_ : 1;
}

std::size_t AttentionWork::scratch_bytes() const {
    if (has_digits_) return round_heads_ * layout_.bytes;
    return attention_.B * attention_.K * splits_ * partial_floats_ * sizeof(float);
}

void AttentionWork::compute(std::size_t phase, std::size_t part, std::byte* scratch) const noexcept {
    const Attention& a = attention_;
    float* partials = reinterpret_cast<float*>(scratch);
    if (splits_ && phase == 1) {
        for (std::size_t head = 0; head < a.B * a.K; ++head) add_splits(head, partials);
        return;
    }
    if (splits_) {
        const std::size_t head = part / splits_;
        const AttentionRows rows{head / a.K, head % a.K, 0, rows_};
        return attend_split(float32_level(set_), a, rows, part % splits_, partials + part * partial_floats_);
    }
    float* memory = thread_memory(std::max(tile_memory(a), has_digits_ ? digits_memory(a) : 0));
    if (!memory) {
        ran_out_of_memory_ = true;
        return;
    }
#if INTAGLIO_HAS_amx
    if (has_digits_) {
        const bool packs = phase % 2 == 0;
        const std::size_t in_round = part / (packs ? layout_.blocks : row_parts_);
        const std::size_t head = phase / 2 * round_heads_ + in_round;
        std::byte* packed = scratch + in_round * layout_.bytes;
        if (packs)
            return pack_digits_amx(a, layout_, head / a.K, head % a.K, part % layout_.blocks, packed, memory);
        const AttentionRows rows = rows_of(head, part % row_parts_);
        if (!attend_digits_amx(a, layout_, rows, packed, memory)) attend_tiles(float32_level(set_), a, rows, memory);
        return;
    }
#endif
    attend_tiles(float32_level(set_), a, rows_of(part / row_parts_, part % row_parts_), memory);
}

AttentionRows AttentionWork::rows_of(std::size_t head, std::size_t part) const {
    const std::size_t row = part * part_rows_;
    return {head / attention_.K, head % attention_.K, row, std::min(row + part_rows_, rows_)};
}

void AttentionWork::add_splits(std::size_t head, const float* partials) const noexcept {
    const Attention& a = attention_;
    partials += head * splits_ * partial_floats_;
    for (std::size_t row = 0; row < rows_; ++row) {
        const float* first = partials + row * (a.E + 2);
        float largest = first[0];
        for (std::size_t i = 1; i < splits_; ++i) largest = std::max(largest, first[i * partial_floats_]);
        const std::size_t h = head % a.K * (a.H / a.K) + row / a.S;
        float* to = a.output + head / a.K * a.output_batch + h * a.output_head + row % a.S * a.output_row;
        float weight = 0;
        for (std::size_t e = 0; e < a.E; ++e) to[e] = 0;
        for (std::size_t i = 0; i < splits_; ++i) {
            const float* from = first + i * partial_floats_;
            const float decay = splits_ == 1 ? 1 : std::exp(from[0] - largest);
            weight += from[1] * decay;
            for (std::size_t e = 0; e < a.E; ++e) to[e] += from[2 + e] * decay;
        }
        // Every score was minus infinity: the sums are zeros.
        const float factor = weight == 0 ? 0 : 1 / weight;
        for (std::size_t e = 0; e < a.E; ++e) to[e] *= factor;
    }
}

}  // namespace intaglio
