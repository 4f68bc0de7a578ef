// The accuracy `fast` with many rows of x. First x is rounded into scratch memory, in the order in which the inner
// loop reads it; then each part decodes panels of the weight, which stay in the cache while its rows meet them.
//
// Inputs are cut into segments, each a group or, where groups are longer than kPanelBlock, a piece of one: the
// products of a segment are added in int32, its sum becomes a float32 without rounding, and the segments are added
// in their order. So a result depends neither on the number of threads nor on that of rows.
#pragma once

#include <memory>

#include "grouped_quant_matmul.h"

namespace intaglio {

// Most inputs that a decoded panel holds, and that a segment has. 255 * 127 * 512 < 2^24.
constexpr std::size_t kPanelBlock = 512;

// Columns that a decoded panel holds, and what a part computes at most of y.
constexpr std::size_t kFastColumns = 64, kPartColumns = 128, kFastRows = 768;

// Most rows of a strip of x.
constexpr std::size_t kMostStripRows = 32, kMostInterleaved = 6, kTileRows = 16;

// How x lies in scratch memory, strip by strip. Interleaved: as [k / 4][row][4], and strips differ by a row at most.
// Tiles: as [k / 64][row][64], and all but the last strip are full, which zeros fill up to a multiple of kTileRows.
enum class PanelOrder { kInterleaved, kTiles };

// What the parts of one product share. Positions are inputs in scratch memory, where groups are filled up with zeros
// to a multiple of `unit`.
struct PanelPlan {
    PanelPlan(const GroupedQuantMatMul& product, PanelOrder order, std::size_t strip_rows, std::size_t unit,
              bool signed_codes);

    // A stretch of inputs that is decoded at once.
    struct Block {
        std::size_t segment, segments;   // the first one and their number
        std::size_t position, length;
    };
    struct Segment {
        std::size_t group, input, inputs;
        std::size_t position, length;
        bool starts_group;
    };
    Segment segment(std::size_t index) const;
    Block block(std::size_t index) const;
    std::size_t strip_begin(std::size_t strip) const;

    std::int8_t* x_of(std::byte* scratch, const Block& block, std::size_t strip) const;
    // What goes with x, of one strip: [segment of the block][row].
    struct Factors {
        float* scales;
        std::int32_t* starts;   // the sum of x times (base - zero_point), what the dots of a segment start with
        float* sums;            // the sum of x times its scale, what an offset is multiplied by
    };
    Factors factors_of(std::byte* scratch, const Block& block, std::size_t strip) const;
    std::size_t scratch_bytes() const;

    const GroupedQuantMatMul& product;
    PanelOrder order;
    std::size_t strip_rows, strips, rows;   // rows: with those that fill up the last strip
    std::size_t unit;
    int base;   // what is subtracted from a code in a panel
    std::size_t pieces, piece, groups, group_length;   // segments of a group, inputs of one
    std::size_t segments, block_segments, blocks;
};

// One strip of x to scratch memory.
void quantize_strip_portable(const PanelPlan& plan, std::size_t strip, std::byte* scratch) noexcept;
void quantize_strip_avx_vnni(const PanelPlan& plan, std::size_t strip, std::byte* scratch) noexcept;
void quantize_strip_avx2(const PanelPlan& plan, std::size_t strip, std::byte* scratch) noexcept;
void quantize_strip_avx512_vnni(const PanelPlan& plan, std::size_t strip, std::byte* scratch) noexcept;

// Strips [strip, strip_end) times columns [column, column_end), which begins at a multiple of kFastColumns.
struct FastBlock {
    std::size_t strip, strip_end, column, column_end;
};

// What one part needs while it runs, aligned to 64 bytes: a panel, which stays in the first-level cache, and sums,
// which stay in the second.
constexpr std::size_t kWorkspaceBytes = std::size_t{480} << 10;

// Each writes its block of y. Only those that the compiler could build are defined.
using MultiplyPanel = void(const PanelPlan& plan, const FastBlock& part, std::byte* scratch,
                           std::byte* workspace) noexcept;
MultiplyPanel multiply_panel_portable, multiply_panel_avx2, multiply_panel_avx_vnni, multiply_panel_avx512_vnni,
    multiply_panel_amx;

// Takes every format that has_fast_matmul (fast_matmul.h) knows; null where there is no such kernel for `set`.
std::unique_ptr<ParallelWork> make_fast_panel(const GroupedQuantMatMul& product, InstructionSet set);

}  // namespace intaglio
