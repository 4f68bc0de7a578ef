// Panels of the weight times strips of x with AMX, compiled for it (for_isa.h).

#include "fast_panel.h"
#include "fast_panel_decode.h"

namespace intaglio {
namespace {

constexpr std::size_t kSlivers = kFastColumns / kLanes;
// 16 columns of the panel, as tiles of [64 inputs / 4][16 columns][4].
constexpr std::size_t kSliverBytes = kPanelBlock * kLanes;
constexpr std::size_t kTileBytes = 1024;
constexpr std::size_t kStripRows = 2 * kTileRows;

struct TileConfig {
    std::uint8_t palette, start_row, reserved[14];
    std::uint16_t row_bytes[16];
    std::uint8_t rows[16];
};
alignas(64) const TileConfig kConfig = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// What a part keeps in the caches: all but the sums fits the first level.
struct Workspace {
    alignas(64) std::int8_t panel[kPanelBlock * kFastColumns];
    alignas(64) float scales[kPanelBlock / 16 * kFastColumns];
    alignas(64) float offsets[kPanelBlock / 16 * kFastColumns];
    alignas(64) std::int32_t dots[2][4][kTileRows * kLanes];
    alignas(64) float sums[(kFastRows + kStripRows) * kFastColumns];
};

// Dots of four tiles that are to be added to the sums while the tiles compute the next ones.
struct Pending {
    const std::int32_t* dots;
    const float *x_scales, *x_sums;
    const std::int32_t* starts;
    const float *scales, *offsets;
    float* sums;
};

// Four rows of a tile at a time: quarter 0 to 3 of tiles 0 to 3, which are two of rows by two of columns.
constexpr std::size_t kQuarters = 16;
template <bool IsAdjusted>
INTAGLIO_INLINE void add_quarter(const Pending& pending, std::size_t quarter) {
    const std::size_t tile = quarter / 4, column = tile % 2 * kLanes, row = tile / 2 * kTileRows + quarter % 4 * 4;
    const std::int32_t* dots = pending.dots + quarter * 4 * kLanes;
    const __m512 scale = _mm512_load_ps(pending.scales + column);
    float* sums = pending.sums + row * kFastColumns + column;
    INTAGLIO_UNROLL
    for (std::size_t r = 0; r < 4; ++r) {
        __m512i dot = _mm512_load_si512(dots + r * kLanes);
        __m512 sum = _mm512_load_ps(sums + r * kFastColumns);
        if constexpr (IsAdjusted) {
            dot = _mm512_add_epi32(dot, _mm512_set1_epi32(pending.starts[row + r]));
            sum = _mm512_fmadd_ps(_mm512_load_ps(pending.offsets + column), _mm512_set1_ps(pending.x_sums[row + r]), sum);
        }
        const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), scale);
        _mm512_store_ps(sums + r * kFastColumns, _mm512_fmadd_ps(scaled, _mm512_set1_ps(pending.x_scales[row + r]), sum));
    }
}

// Dots of one segment with two tiles of rows (or one) and two of columns, while the pending ones are added.
template <bool IsAdjusted, bool HasTwo>
INTAGLIO_INLINE void multiply_tiles(const std::int8_t* x, const std::int8_t* panel, std::size_t steps,
                                    std::int32_t* dots, const Pending& pending) {
    constexpr std::size_t quarters = HasTwo ? kQuarters : kQuarters / 2;
    constexpr std::size_t x_step = (HasTwo ? 2 : 1) * kTileBytes;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (HasTwo) {
        _tile_zero(2);
        _tile_zero(3);
    }
    std::size_t quarter = 0;
    for (std::size_t step = 0; step < steps; ++step) {
        _tile_loadd(6, panel, 64);
        _tile_loadd(4, x, 64);
        _tile_loadd(7, panel + kSliverBytes, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        if constexpr (HasTwo) {
            _tile_loadd(5, x + kTileBytes, 64);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
        for (const std::size_t end = quarters * (step + 1) / steps; quarter < end; ++quarter)
            add_quarter<IsAdjusted>(pending, quarter);
        panel += kTileBytes;
        x += x_step;
    }
    _tile_stored(0, dots, 64);
    _tile_stored(1, dots + kTileRows * kLanes, 64);
    if constexpr (HasTwo) {
        _tile_stored(2, dots + 2 * kTileRows * kLanes, 64);
        _tile_stored(3, dots + 3 * kTileRows * kLanes, 64);
    }
}

struct Strip {
    const std::int8_t* x;
    PanelPlan::Factors factors;
    float* sums;
};

// One strip times the panel. What is pending at the start is of a strip with as many rows.
template <bool IsAdjusted, bool HasTwo>
void multiply_strip(const PanelPlan& plan, const PanelPlan::Block& b, Workspace& space, const Strip& strip,
                    Pending& pending) {
    constexpr std::size_t rows = HasTwo ? kStripRows : kTileRows;
    for (std::size_t sliver = 0; sliver < kSlivers; sliver += 2) {
        const std::int8_t *x = strip.x, *panel = space.panel + sliver * kSliverBytes;
        for (std::size_t i = 0; i < b.segments; ++i) {
            const std::size_t length = plan.segment(b.segment + i).length;
            std::int32_t* dots = pending.dots == space.dots[0][0] ? space.dots[1][0] : space.dots[0][0];
            multiply_tiles<IsAdjusted, HasTwo>(x, panel, length / 64, dots, pending);
            pending = {dots,
                       strip.factors.scales + i * rows,
                       strip.factors.sums + i * rows,
                       strip.factors.starts + i * rows,
                       space.scales + i * kFastColumns + sliver * kLanes,
                       space.offsets + i * kFastColumns + sliver * kLanes,
                       strip.sums + sliver * kLanes};
            x += length * rows;
            panel += length * kLanes;
        }
    }
}

template <bool IsAdjusted, bool HasTwo>
void add_pending(Pending& pending) {
    for (std::size_t quarter = 0; quarter < (HasTwo ? kQuarters : kQuarters / 2); ++quarter)
        add_quarter<IsAdjusted>(pending, quarter);
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
void multiply_panel(const PanelPlan& plan, const FastBlock& part, std::byte* scratch) {
    Workspace space;
    const GroupedQuantMatMul& p = plan.product;
    const std::size_t first_row = plan.strip_begin(part.strip), rows = plan.strip_begin(part.strip_end) - first_row;
    std::memset(space.sums, 0, rows * kFastColumns * sizeof(float));
    // Where groups do not fill their tiles, inputs of the panel meet zeros.
    std::memset(space.panel, 0, sizeof space.panel);
    const std::size_t twos = rows / kStripRows;
    const auto strip_at = [&](const PanelPlan::Block& b, std::size_t i) {
        return Strip{plan.x_of(scratch, b, part.strip + i), plan.factors_of(scratch, b, part.strip + i),
                     space.sums + i * kStripRows * kFastColumns};
    };
    for (std::size_t index = 0; index < plan.blocks; ++index) {
        const PanelPlan::Block b = plan.block(index);
        decode_panel<Bits>(plan, b, part.column, space);
        decode_scales(plan, b, p.scales, part.column, space.scales);
        if (IsAdjusted) decode_offsets(plan, b, part.column, space.offsets);
        // Nothing is pending yet: zeros are added to sums of no use.
        std::memset(space.dots, 0, sizeof space.dots);
        Strip strip = strip_at(b, 0);
        Pending pending{space.dots[1][0], strip.factors.scales, strip.factors.sums, strip.factors.starts, space.scales, space.offsets,
                        space.sums + kFastRows * kFastColumns};
        for (std::size_t i = 0; i < twos; ++i)
            multiply_strip<IsAdjusted, true>(plan, b, space, strip_at(b, i), pending);
        if (twos > 0) add_pending<IsAdjusted, true>(pending);
        if (twos * kStripRows < rows) {
            strip = strip_at(b, twos);
            pending.sums = space.sums + kFastRows * kFastColumns;
            pending.x_scales = strip.factors.scales;
            multiply_strip<IsAdjusted, false>(plan, b, space, strip, pending);
            add_pending<IsAdjusted, false>(pending);
        }
    }
    store_rows(p, space.sums, first_row, smaller(first_row + rows, p.M), part.column);
}

template <int Bits>
INTAGLIO_INLINE void multiply_bits(const PanelPlan& plan, const FastBlock& part, std::byte* scratch) {
    if (has_offsets(plan.product) || plan.base != plan.product.zero_point)
        multiply_panel<Bits, true>(plan, part, scratch);
    else
        multiply_panel<Bits, false>(plan, part, scratch);
}

}  // namespace

void INTAGLIO_FOR_ISA(multiply_panel)(const PanelPlan& plan, const FastBlock& part, std::byte* scratch) noexcept {
    _tile_loadconfig(&kConfig);
    if (plan.product.bits == 2) multiply_bits<2>(plan, part, scratch);
    if (plan.product.bits == 4) multiply_bits<4>(plan, part, scratch);
    if (plan.product.bits == 8) multiply_bits<8>(plan, part, scratch);
    _tile_release();
}

}  // namespace intaglio
