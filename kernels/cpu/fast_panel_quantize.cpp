// x to 8 bits, in the order in which panels meet it. Compiled once for each instruction set (for_isa.h).

#include "fast_activations.h"
#include "fast_panel.h"

namespace intaglio {
namespace {

// Rows [quad][row][4] of what lies as rows kPanelBlock apart.
template <std::size_t Rows>
INTAGLIO_INLINE void interleave(const std::int8_t* from, std::size_t length, std::int8_t* to) {
    for (std::size_t quad = 0; quad < length / 4; ++quad, to += Rows * 4) {
        INTAGLIO_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) std::memcpy(to + r * 4, from + r * kPanelBlock + quad * 4, 4);
    }
}

INTAGLIO_INLINE void interleave(const std::int8_t* from, std::size_t length, std::size_t rows, std::int8_t* to) {
    static_assert(kMostInterleaved == 6);
    switch (rows) {
        case 1: return interleave<1>(from, length, to);
        case 2: return interleave<2>(from, length, to);
        case 3: return interleave<3>(from, length, to);
        case 4: return interleave<4>(from, length, to);
        case 5: return interleave<5>(from, length, to);
        default: return interleave<6>(from, length, to);
    }
}

// Rows [k / 64][row][64] of what lies as rows kPanelBlock apart.
INTAGLIO_INLINE void place_tiles(const std::int8_t* from, std::size_t length, std::size_t rows, std::int8_t* to) {
    for (std::size_t r = 0; r < rows; ++r)
        for (std::size_t at = 0; at < length; at += 64)
            std::memcpy(to + at * rows + r * 64, from + r * kPanelBlock + at, 64);
}

}  // namespace

void INTAGLIO_FOR_ISA(quantize_strip)(const PanelPlan& plan, std::size_t strip, std::byte* scratch) noexcept {
    alignas(64) std::int8_t codes[kMostStripRows * kPanelBlock];
    ActivationScale scale[kMostStripRows] = {};
    const GroupedQuantMatMul& p = plan.product;
    const std::size_t first = plan.strip_begin(strip), rows = plan.strip_begin(strip + 1) - first;
    for (std::size_t index = 0; index < plan.blocks; ++index) {
        const PanelPlan::Block b = plan.block(index);
        std::int8_t* x = plan.x_of(scratch, b, strip);
        const PanelPlan::Factors factors = plan.factors_of(scratch, b, strip);
        for (std::size_t i = 0; i < b.segments; ++i) {
            const PanelPlan::Segment s = plan.segment(b.segment + i);
            for (std::size_t r = 0; r < rows; ++r) {
                // Rows that fill up the last strip are zeros: their scale stays 0.
                const char* row = static_cast<const char*>(p.x) + smaller(first + r, p.M - 1) * p.K * sizeof(float);
                if (s.starts_group && first + r < p.M)
                    scale[r] = activation_scale(largest_magnitude(row + s.input * sizeof(float), p.group_size));
                std::int8_t* to = codes + r * kPanelBlock;
                std::int32_t sum = 0;
                // Products with what is not finite need not be zero.
                if (scale[r].inverse == 0)
                    std::memset(to, 0, s.inputs);
                else
                    sum = round_activations(row + s.input * sizeof(float), s.inputs, scale[r].inverse, to);
                std::memset(to + s.inputs, 0, s.length - s.inputs);
                factors.scales[i * rows + r] = scale[r].scale;
                factors.starts[i * rows + r] = (plan.base - p.zero_point) * sum;
                factors.sums[i * rows + r] = scale[r].scale * static_cast<float>(sum);
            }
            std::int8_t* to = x + (s.position - b.position) * rows;
            if (plan.order == PanelOrder::kTiles)
                place_tiles(codes, s.length, rows, to);
            else
                interleave(codes, s.length, rows, to);
        }
    }
}

}  // namespace intaglio
