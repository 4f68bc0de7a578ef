// Panels of the weight times strips of x with AVX-512 VNNI, compiled for it (for_isa.h).

#include "fast_panel.h"
#include "fast_panel_decode.h"

namespace intaglio {
namespace {

constexpr std::size_t kVectors = kFastColumns / kLanes;
constexpr std::size_t kQuadBytes = kFastColumns * 4;

// What a part keeps in the caches: the panel fills most of the first level, the sums lie in the second.
struct Workspace {
    alignas(64) std::uint8_t panel[kPanelBlock * kFastColumns];
    alignas(64) float scales[kPanelBlock / 16 * kFastColumns];
    alignas(64) float offsets[kPanelBlock / 16 * kFastColumns];
    alignas(64) float sums[kFastRows * kPartColumns];   // [panel][row][column]
};

// Written in assembly because compilers keep such sums in memory otherwise.
INTAGLIO_INLINE void add_dots(__m512i& sum, __m512i codes, __m512i x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
}

struct Strip {
    const std::int8_t* x;
    PanelPlan::Factors factors;
};

template <std::size_t Rows, bool HasOffsets>
INTAGLIO_INLINE void multiply_strip(const PanelPlan& plan, const PanelPlan::Block& b, const Workspace& space,
                                    Strip strip, float* sums) {
    const std::uint8_t* panel = space.panel;
    const float *scales = space.scales, *offsets = space.offsets;
    for (std::size_t i = 0; i < b.segments; ++i) {
        __m512i dots[Rows][kVectors];
        INTAGLIO_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) {
            INTAGLIO_UNROLL
            for (std::size_t c = 0; c < kVectors; ++c) dots[r][c] = _mm512_set1_epi32(strip.factors.starts[r]);
        }
        const std::size_t steps = plan.segment(b.segment + i).length / 16;
        for (std::size_t step = 0; step < steps; ++step) {
            INTAGLIO_UNROLL
            for (std::size_t quad = 0; quad < 4; ++quad) {
                __m512i codes[kVectors];
                INTAGLIO_UNROLL
                for (std::size_t c = 0; c < kVectors; ++c)
                    codes[c] = _mm512_load_si512(panel + quad * kQuadBytes + c * 64);
                INTAGLIO_UNROLL
                for (std::size_t r = 0; r < Rows; ++r) {
                    std::int32_t four;
                    std::memcpy(&four, strip.x + (quad * Rows + r) * 4, 4);
                    const __m512i x = _mm512_set1_epi32(four);
                    INTAGLIO_UNROLL
                    for (std::size_t c = 0; c < kVectors; ++c) add_dots(dots[r][c], codes[c], x);
                }
            }
            panel += 4 * kQuadBytes;
            strip.x += 16 * Rows;
        }
        INTAGLIO_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) {
            INTAGLIO_UNROLL
            for (std::size_t c = 0; c < kVectors; ++c) {
                float* to = sums + r * kFastColumns + c * kLanes;
                __m512 sum = _mm512_load_ps(to);
                if constexpr (HasOffsets)
                    sum = _mm512_fmadd_ps(_mm512_load_ps(offsets + c * kLanes),
                                          _mm512_set1_ps(strip.factors.sums[r]), sum);
                const __m512 scaled =
                    _mm512_mul_ps(_mm512_cvtepi32_ps(dots[r][c]), _mm512_load_ps(scales + c * kLanes));
                _mm512_store_ps(to, _mm512_fmadd_ps(scaled, _mm512_set1_ps(strip.factors.scales[r]), sum));
            }
        }
        scales += kFastColumns;
        offsets += kFastColumns;
        strip.factors.starts += Rows;
        strip.factors.scales += Rows;
        strip.factors.sums += Rows;
    }
}

template <bool HasOffsets>
void multiply_strip(const PanelPlan& plan, const PanelPlan::Block& b, const Workspace& space, std::size_t rows,
                    const Strip& strip, float* sums) {
    switch (rows) {
        case 1: return multiply_strip<1, HasOffsets>(plan, b, space, strip, sums);
        case 2: return multiply_strip<2, HasOffsets>(plan, b, space, strip, sums);
        case 3: return multiply_strip<3, HasOffsets>(plan, b, space, strip, sums);
        case 4: return multiply_strip<4, HasOffsets>(plan, b, space, strip, sums);
        case 5: return multiply_strip<5, HasOffsets>(plan, b, space, strip, sums);
        default: return multiply_strip<6, HasOffsets>(plan, b, space, strip, sums);
    }
}

template <int Bits>
void multiply_panel(const PanelPlan& plan, const FastBlock& part, std::byte* scratch, Workspace& space) {
    const GroupedQuantMatMul& p = plan.product;
    const bool offsets = p.offset_per_group;
    const std::size_t rows = plan.strip_begin(part.strip_end) - plan.strip_begin(part.strip);
    const std::size_t panels = (part.column_end - part.column + kFastColumns - 1) / kFastColumns;
    std::memset(space.sums, 0, sizeof(float) * rows * panels * kFastColumns);
    for (std::size_t index = 0; index < plan.blocks; ++index) {
        const PanelPlan::Block b = plan.block(index);
        float* sums = space.sums;
        // Later panels find the block's x in the second-level cache.
        for (std::size_t column = part.column; column < part.column_end; column += kFastColumns) {
            for (std::size_t c = 0; c < kVectors; ++c)
                decode_columns<Bits>(p, plan.base, column + c * kLanes, plan.segment(b.segment).input, b.length,
                                     space.panel + c * 64, kQuadBytes);
            decode_scales(plan, b, p.scales, column, space.scales);
            if (offsets) decode_offsets(plan, b, column, space.offsets);
            for (std::size_t strip = part.strip; strip < part.strip_end; ++strip) {
                const Strip x{plan.x_of(scratch, b, strip), plan.factors_of(scratch, b, strip)};
                const std::size_t strip_rows = plan.strip_begin(strip + 1) - plan.strip_begin(strip);
                if (offsets)
                    multiply_strip<true>(plan, b, space, strip_rows, x, sums);
                else
                    multiply_strip<false>(plan, b, space, strip_rows, x, sums);
                if (index + 1 == plan.blocks)
                    store_rows(p, sums, plan.strip_begin(strip), plan.strip_begin(strip + 1), column);
                sums += strip_rows * kFastColumns;
            }
        }
    }
    _mm_sfence();
}

}  // namespace

void INTAGLIO_FOR_ISA(multiply_panel)(const PanelPlan& plan, const FastBlock& part, std::byte* scratch,
                                      std::byte* workspace) noexcept {
    static_assert(sizeof(Workspace) <= kWorkspaceBytes);
    auto& space = *reinterpret_cast<Workspace*>(workspace);
    if (plan.product.bits == 2) multiply_panel<2>(plan, part, scratch, space);
    if (plan.product.bits == 4) multiply_panel<4>(plan, part, scratch, space);
    if (plan.product.bits == 8) multiply_panel<8>(plan, part, scratch, space);
}

}  // namespace intaglio
