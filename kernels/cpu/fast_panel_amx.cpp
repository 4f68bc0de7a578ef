// Panels of the weight times strips of x with AMX, compiled for it (for_isa.h).

#include "amx_tiles.h"
#include "fast_panel.h"
#include "fast_panel_decode.h"

namespace intaglio {
namespace {

constexpr std::size_t kSlivers = kFastColumns / kLanes;
// 16 columns of the panel, as tiles of [64 inputs / 4][16 columns][4].
constexpr std::size_t kSliverBytes = kPanelBlock * kLanes;
constexpr std::size_t kTileBytes = 1024;
constexpr std::size_t kStripRows = 2 * kTileRows;

// What a part keeps in the caches: all but the sums fits the first level.
struct Workspace {
    alignas(64) std::int8_t panel[kPanelBlock * kFastColumns];
    alignas(64) float scales[kPanelBlock / 16 * kFastColumns];
    alignas(64) float offsets[kPanelBlock / 16 * kFastColumns];
    std::size_t steps[kPanelBlock / 16];   // of 64 inputs, of each segment
    alignas(64) std::int32_t dots[2][4][kTileRows * kLanes];
    alignas(64) float sums[kFastRows * kPartColumns + kStripRows * kFastColumns];   // [panel][row][column], nothing
};

// The dots of one segment in four tiles, two of rows by two of columns, and where they are to be added. Storing a
// tile waits for its dots, so the tiles of a segment are stored one by one when the next one starts to compute them,
// and added yet one segment later.
struct Dots {
    std::int32_t* tiles;
    PanelPlan::Factors factors;
    const float *scales, *offsets;
    float* sums;
};

template <bool IsAdjusted>
INTAGLIO_INLINE void add_tile(const Dots& from, std::size_t tile) {
    const std::size_t column = tile % 2 * kLanes, row = tile / 2 * kTileRows;
    const std::int32_t* dots = from.tiles + tile * kTileRows * kLanes;
    const __m512 scale = _mm512_load_ps(from.scales + column), offset = _mm512_load_ps(from.offsets + column);
    float* sums = from.sums + row * kFastColumns + column;
    INTAGLIO_UNROLL
    for (std::size_t r = 0; r < kTileRows; ++r) {
        __m512i dot = _mm512_load_si512(dots + r * kLanes);
        __m512 sum = _mm512_load_ps(sums + r * kFastColumns);
        if constexpr (IsAdjusted) {
            dot = _mm512_add_epi32(dot, _mm512_set1_epi32(from.factors.starts[row + r]));
            sum = _mm512_fmadd_ps(offset, _mm512_set1_ps(from.factors.sums[row + r]), sum);
        }
        const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), scale);
        const __m512 x_scale = _mm512_set1_ps(from.factors.scales[row + r]);
        _mm512_store_ps(sums + r * kFastColumns, _mm512_fmadd_ps(scaled, x_scale, sum));
    }
}

// What the tiles hold, and what lies in memory to be added.
struct Pipeline {
    Dots running, stored;
};

// Starts to compute the dots of a segment with two tiles of rows (or one) and two of columns.
template <bool IsAdjusted, bool HasTwo>
INTAGLIO_INLINE void multiply_tiles(const std::int8_t* x, const std::int8_t* panel, std::size_t steps,
                                    std::int32_t* to, const Dots& stored) {
    constexpr std::size_t x_step = (HasTwo ? 2 : 1) * kTileBytes, dots = kTileRows * kLanes;
    _tile_loadd(6, panel, 64);
    _tile_loadd(4, x, 64);
    _tile_loadd(7, panel + kSliverBytes, 64);
    if constexpr (HasTwo) _tile_loadd(5, x + kTileBytes, 64);
    _tile_stored(0, to, 64);
    _tile_zero(0);
    _tile_dpbssd(0, 4, 6);
    add_tile<IsAdjusted>(stored, 0);
    _tile_stored(1, to + dots, 64);
    _tile_zero(1);
    _tile_dpbssd(1, 4, 7);
    add_tile<IsAdjusted>(stored, 1);
    if constexpr (HasTwo) {
        _tile_stored(2, to + 2 * dots, 64);
        _tile_zero(2);
        _tile_dpbssd(2, 5, 6);
        add_tile<IsAdjusted>(stored, 2);
        _tile_stored(3, to + 3 * dots, 64);
        _tile_zero(3);
        _tile_dpbssd(3, 5, 7);
        add_tile<IsAdjusted>(stored, 3);
    }
    for (std::size_t step = 1; step < steps; ++step) {
        panel += kTileBytes;
        x += x_step;
        _tile_loadd(6, panel, 64);
        _tile_loadd(4, x, 64);
        _tile_loadd(7, panel + kSliverBytes, 64);
        if constexpr (HasTwo) _tile_loadd(5, x + kTileBytes, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        if constexpr (HasTwo) {
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
}

struct Strip {
    const std::int8_t* x;
    PanelPlan::Factors factors;
    float* sums;
};

// One strip times the panel.
template <bool IsAdjusted, bool HasTwo>
void multiply_strip(const Workspace& space, std::size_t segments, const Strip strip, Pipeline& pipeline) {
    constexpr std::size_t rows = HasTwo ? kStripRows : kTileRows;
    Dots running = pipeline.running, stored = pipeline.stored;
    const std::int8_t* panel = space.panel;
    for (std::size_t sliver = 0; sliver < kSlivers; sliver += 2, panel += 2 * kSliverBytes) {
        const std::int8_t *x = strip.x, *w = panel;
        Dots next{nullptr, strip.factors, space.scales + sliver * kLanes, space.offsets + sliver * kLanes,
                  strip.sums + sliver * kLanes};
        for (std::size_t i = 0; i < segments; ++i) {
            const std::size_t steps = space.steps[i];
            multiply_tiles<IsAdjusted, HasTwo>(x, w, steps, running.tiles, stored);
            x += steps * rows * 64;
            w += steps * kTileBytes;
            next.tiles = stored.tiles;
            stored = running;
            running = next;
            next.factors.scales += rows;
            next.factors.starts += rows;
            next.factors.sums += rows;
            next.scales += kFastColumns;
            next.offsets += kFastColumns;
        }
    }
    pipeline = {running, stored};
}

// Strips of one height: nothing runs before, and all is added after.
template <bool IsAdjusted, bool HasTwo, typename StripAt, typename StoreStrip>
INTAGLIO_INLINE void multiply_strips(Workspace& space, std::size_t segments, std::size_t first, std::size_t end,
                                     const StripAt& strip_at, const StoreStrip& store_strip) {
    if (first == end) return;
    std::memset(space.dots, 0, sizeof space.dots);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const PanelPlan::Factors factors = strip_at(first).factors;
    float* nowhere = space.sums + kFastRows * kPartColumns;
    Pipeline pipeline{{space.dots[0][0], factors, space.scales, space.offsets, nowhere},
                      {space.dots[1][0], factors, space.scales, space.offsets, nowhere}};
    for (std::size_t i = first; i < end; ++i) {
        multiply_strip<IsAdjusted, HasTwo>(space, segments, strip_at(i), pipeline);
        // What is pending now is all of this strip, since it has two pairs of columns.
        if (i > first) store_strip(i - 1);
    }
    constexpr std::size_t tiles = HasTwo ? 4 : 2;
    for (std::size_t tile = 0; tile < tiles; ++tile) add_tile<IsAdjusted>(pipeline.stored, tile);
    std::int32_t* to = pipeline.running.tiles;
    _tile_stored(0, to, 64);
    _tile_stored(1, to + kTileRows * kLanes, 64);
    _tile_stored(2, to + 2 * kTileRows * kLanes, 64);
    _tile_stored(3, to + 3 * kTileRows * kLanes, 64);
    for (std::size_t tile = 0; tile < tiles; ++tile) add_tile<IsAdjusted>(pipeline.running, tile);
    store_strip(end - 1);
}

template <int Bits>
INTAGLIO_INLINE void decode_panel(const PanelPlan& plan, const PanelPlan::Block& b, std::size_t column,
                                  Workspace& space) {
    const GroupedQuantMatMul& p = plan.product;
    auto* panel = reinterpret_cast<std::uint8_t*>(space.panel);
    // Segments that fill their tiles lie side by side, as in the weight.
    const bool is_dense = p.group_size % plan.unit == 0;
    for (std::size_t i = 0; i < (is_dense ? 1 : b.segments); ++i) {
        const PanelPlan::Segment s = plan.segment(b.segment + i);
        for (std::size_t sliver = 0; sliver < kSlivers; ++sliver)
            decode_columns<Bits>(p, plan.base, column + sliver * kLanes, s.input, is_dense ? b.length : s.inputs,
                                 panel + sliver * kSliverBytes + (s.position - b.position) * kLanes, 64);
    }
}

template <int Bits, bool IsAdjusted>
void multiply_panel(const PanelPlan& plan, const FastBlock& part, std::byte* scratch, Workspace& space) {
    const GroupedQuantMatMul& p = plan.product;
    const std::size_t first_row = plan.strip_begin(part.strip), rows = plan.strip_begin(part.strip_end) - first_row;
    const std::size_t panels = (part.column_end - part.column + kFastColumns - 1) / kFastColumns;
    std::memset(space.sums, 0, sizeof(float) * rows * panels * kFastColumns);
    // Where groups do not fill their tiles, inputs of the panel meet zeros.
    std::memset(space.panel, 0, sizeof space.panel);
    const std::size_t twos = rows / kStripRows, strips = part.strip_end - part.strip;
    for (std::size_t index = 0; index < plan.blocks; ++index) {
        const PanelPlan::Block b = plan.block(index);
        for (std::size_t i = 0; i < b.segments; ++i) space.steps[i] = plan.segment(b.segment + i).length / 64;
        float* sums = space.sums;
        const auto strip_at = [&](std::size_t i) {
            return Strip{plan.x_of(scratch, b, part.strip + i), plan.factors_of(scratch, b, part.strip + i),
                         sums + i * kStripRows * kFastColumns};
        };
        // Later panels find the block's x in the second-level cache.
        for (std::size_t column = part.column; column < part.column_end; column += kFastColumns) {
            const auto store_strip = [&](std::size_t i) {
                const std::size_t row = first_row + i * kStripRows;
                if (index + 1 == plan.blocks)
                    store_rows(p, sums + i * kStripRows * kFastColumns, row, smaller(row + kStripRows, p.M), column);
            };
            decode_panel<Bits>(plan, b, column, space);
            decode_scales(plan, b, p.scales, column, space.scales);
            if (IsAdjusted) decode_offsets(plan, b, column, space.offsets);
            multiply_strips<IsAdjusted, true>(space, b.segments, 0, twos, strip_at, store_strip);
            multiply_strips<IsAdjusted, false>(space, b.segments, twos, strips, strip_at, store_strip);
            sums += rows * kFastColumns;
        }
    }
    _mm_sfence();
}

template <int Bits>
INTAGLIO_INLINE void multiply_bits(const PanelPlan& plan, const FastBlock& part, std::byte* scratch,
                                   Workspace& space) {
    if (plan.product.offset_per_group || plan.base != plan.product.zero_point)
        multiply_panel<Bits, true>(plan, part, scratch, space);
    else
        multiply_panel<Bits, false>(plan, part, scratch, space);
}

}  // namespace

void INTAGLIO_FOR_ISA(multiply_panel)(const PanelPlan& plan, const FastBlock& part, std::byte* scratch,
                                      std::byte* workspace) noexcept {
    static_assert(sizeof(Workspace) <= kWorkspaceBytes);
    auto& space = *reinterpret_cast<Workspace*>(workspace);
    load_tiles();
    if (plan.product.bits == 2) multiply_bits<2>(plan, part, scratch, space);
    if (plan.product.bits == 4) multiply_bits<4>(plan, part, scratch, space);
    if (plan.product.bits == 8) multiply_bits<8>(plan, part, scratch, space);
    release_tiles();
}

}  // namespace intaglio
