// Panels of the weight times strips of x with vectors of 32 bytes or none, compiled once for each instruction set
// (for_isa.h).

#include "fast_panel.h"
#include "grouped_quant_arithmetic.h"

namespace intaglio {
namespace {

// Rows of a strip meet this many columns at a time, whose sums must fit 16 registers.
#if defined(__AVXVNNI__)
constexpr std::size_t kRows = 6;
#else
constexpr std::size_t kRows = 4;
#endif
#if defined(__AVX2__)
constexpr std::size_t kTileColumns = 16;
#else
constexpr std::size_t kTileColumns = 8;
#endif
constexpr std::size_t kQuadBytes = kFastColumns * 4;

struct Workspace {
    alignas(64) std::uint8_t panel[kPanelBlock * kFastColumns];   // [k / 4][column][4]
    alignas(64) float scales[kPanelBlock / 16 * kFastColumns];    // [segment][column]
    alignas(64) float offsets[kPanelBlock / 16 * kFastColumns];
    alignas(64) float sums[kFastRows * kPartColumns];   // [panel][row][column]
};

// The codes of four inputs, one a byte.
template <int Bits>
INTAGLIO_INLINE std::uint32_t spread(const std::uint8_t* from) {
    if constexpr (Bits == 2) {
        const std::uint32_t pairs = (from[0] | static_cast<std::uint32_t>(from[0]) << 12) & 0x000f000fu;
        return (pairs | pairs << 6) & 0x03030303u;
    }
    if constexpr (Bits == 4) {
        const std::uint32_t pairs = from[0] | static_cast<std::uint32_t>(from[1]) << 16;
        return (pairs | pairs << 4) & 0x0f0f0f0fu;
    }
    std::uint32_t four;
    std::memcpy(&four, from, sizeof four);
    return four;
}

// Inputs [k, k + count) of kFastColumns columns from `column` on; count is rounded up to four, where zeros are met.
template <int Bits>
INTAGLIO_INLINE void decode_columns(const GroupedQuantMatMul& p, std::size_t column, std::size_t k, std::size_t count,
                                    std::uint8_t* to) {
    constexpr std::size_t per_byte = 8 / Bits, quad_bytes = Bits / 2;
    for (std::size_t c = 0; c < kFastColumns; ++c) {
        // Beyond the last column, the last is decoded again: what it makes is never stored.
        const std::uint8_t* from = p.codes + (smaller(column + c, p.N - 1) * p.K + k) / per_byte;
        for (std::size_t quad = 0; quad < count / 4; ++quad) {
            const std::uint32_t four = spread<Bits>(from + quad * quad_bytes);
            std::memcpy(to + quad * kQuadBytes + c * 4, &four, sizeof four);
        }
        if (count % 4 != 0) {
            std::uint8_t last[4] = {};
            std::memcpy(last, from + count / 4 * quad_bytes, count % 4 * static_cast<std::size_t>(Bits) / 8);
            const std::uint32_t four = spread<Bits>(last);
            std::memcpy(to + count / 4 * kQuadBytes + c * 4, &four, sizeof four);
        }
    }
}

INTAGLIO_INLINE void decode_scales(const PanelPlan& plan, const PanelPlan::Block& b, const std::uint8_t* from,
                                   std::size_t column, float* to) {
    const GroupedQuantMatMul& p = plan.product;
    float values[kPanelBlock / 16];
    const std::size_t first = b.segment / plan.pieces;
    for (std::size_t c = 0; c < kFastColumns; ++c) {
        load_scales(from, smaller(column + c, p.N - 1) * plan.groups + first, b.segments, p.scale_type, values);
        for (std::size_t i = 0; i < b.segments; ++i) to[i * kFastColumns + c] = values[i];
    }
}

// Dots of Rows rows with kTileColumns columns, over `quads` times four inputs.
template <int Bits, std::size_t Rows>
INTAGLIO_INLINE void add_dots(const std::int8_t* x, const std::uint8_t* panel, std::size_t quads,
                              std::int32_t (&dots)[kRows][kTileColumns]) {
#if defined(__AVX2__)
    constexpr std::size_t vectors = kTileColumns / 8;
    const auto codes_at = [&](std::size_t quad, std::size_t c) {
        return _mm256_load_si256(reinterpret_cast<const __m256i*>(panel + quad * kQuadBytes + c * 32));
    };
    const auto x_at = [&](std::size_t quad, std::size_t r) {
        std::int32_t four;
        std::memcpy(&four, x + (quad * Rows + r) * 4, sizeof four);
        return _mm256_set1_epi32(four);
    };
    __m256i sum[Rows][vectors];
    INTAGLIO_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < vectors; ++c)
            sum[r][c] = _mm256_load_si256(reinterpret_cast<const __m256i*>(dots[r] + c * 8));
    }
#if defined(__AVXVNNI__)
    for (std::size_t quad = 0; quad < quads; ++quad) {
        __m256i codes[vectors];
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < vectors; ++c) codes[c] = codes_at(quad, c);
        INTAGLIO_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) {
            const __m256i four = x_at(quad, r);
            INTAGLIO_UNROLL
            for (std::size_t c = 0; c < vectors; ++c) sum[r][c] = _mm256_dpbusd_avx_epi32(sum[r][c], codes[c], four);
        }
    }
#else
    if constexpr (Bits == 8) {
        const __m256i low = _mm256_set1_epi16(0xff);
        for (std::size_t quad = 0; quad < quads; ++quad) {
            __m256i even[vectors], odd[vectors];
            INTAGLIO_UNROLL
            for (std::size_t c = 0; c < vectors; ++c) {
                even[c] = _mm256_and_si256(codes_at(quad, c), low);
                odd[c] = _mm256_srli_epi16(codes_at(quad, c), 8);
            }
            INTAGLIO_UNROLL
            for (std::size_t r = 0; r < Rows; ++r) {
                const __m256i four = x_at(quad, r);
                const __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8);
                const __m256i x_odd = _mm256_srai_epi16(four, 8);
                INTAGLIO_UNROLL
                for (std::size_t c = 0; c < vectors; ++c)
                    sum[r][c] = _mm256_add_epi32(sum[r][c], _mm256_add_epi32(_mm256_madd_epi16(even[c], x_even),
                                                                             _mm256_madd_epi16(odd[c], x_odd)));
            }
        }
    } else {
        // So many products of two are sure to fit 16 bits: 32 * 2 * 3 * 127 and 8 * 2 * 15 * 127 are below 2^15.
        constexpr std::size_t most = Bits == 2 ? 32 : 8;
        const __m256i ones = _mm256_set1_epi16(1);
        for (std::size_t quad = 0; quad < quads;) {
            __m256i narrow[Rows][vectors] = {};
            for (const std::size_t end = smaller(quad + most, quads); quad < end; ++quad) {
                __m256i codes[vectors];
                INTAGLIO_UNROLL
                for (std::size_t c = 0; c < vectors; ++c) codes[c] = codes_at(quad, c);
                INTAGLIO_UNROLL
                for (std::size_t r = 0; r < Rows; ++r) {
                    const __m256i four = x_at(quad, r);
                    INTAGLIO_UNROLL
                    for (std::size_t c = 0; c < vectors; ++c)
                        narrow[r][c] = _mm256_add_epi16(narrow[r][c], _mm256_maddubs_epi16(codes[c], four));
                }
            }
            INTAGLIO_UNROLL
            for (std::size_t r = 0; r < Rows; ++r) {
                INTAGLIO_UNROLL
                for (std::size_t c = 0; c < vectors; ++c)
                    sum[r][c] = _mm256_add_epi32(sum[r][c], _mm256_madd_epi16(narrow[r][c], ones));
            }
        }
    }
#endif
    INTAGLIO_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < vectors; ++c)
            _mm256_store_si256(reinterpret_cast<__m256i*>(dots[r] + c * 8), sum[r][c]);
    }
#elif defined(__SSE2__)
    constexpr std::size_t vectors = kTileColumns / 4;
    const __m128i low = _mm_set1_epi16(0xff);
    __m128i sum[Rows][vectors];
    INTAGLIO_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < vectors; ++c)
            sum[r][c] = _mm_load_si128(reinterpret_cast<const __m128i*>(dots[r] + c * 4));
    }
    for (std::size_t quad = 0; quad < quads; ++quad) {
        __m128i even[vectors], odd[vectors];
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < vectors; ++c) {
            const __m128i codes =
                _mm_load_si128(reinterpret_cast<const __m128i*>(panel + quad * kQuadBytes + c * 16));
            even[c] = _mm_and_si128(codes, low);
            odd[c] = _mm_srli_epi16(codes, 8);
        }
        INTAGLIO_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) {
            std::int32_t bytes;
            std::memcpy(&bytes, x + (quad * Rows + r) * 4, sizeof bytes);
            const __m128i four = _mm_set1_epi32(bytes);
            const __m128i x_even = _mm_srai_epi16(_mm_slli_epi16(four, 8), 8), x_odd = _mm_srai_epi16(four, 8);
            INTAGLIO_UNROLL
            for (std::size_t c = 0; c < vectors; ++c)
                sum[r][c] = _mm_add_epi32(sum[r][c], _mm_add_epi32(_mm_madd_epi16(even[c], x_even),
                                                                   _mm_madd_epi16(odd[c], x_odd)));
        }
    }
    INTAGLIO_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < vectors; ++c)
            _mm_store_si128(reinterpret_cast<__m128i*>(dots[r] + c * 4), sum[r][c]);
    }
#else
    for (std::size_t quad = 0; quad < quads; ++quad)
        for (std::size_t r = 0; r < Rows; ++r) {
            const std::int8_t* four = x + (quad * Rows + r) * 4;
            const std::uint8_t* codes = panel + quad * kQuadBytes;
            for (std::size_t c = 0; c < kTileColumns; ++c)
                dots[r][c] += codes[c * 4] * four[0] + codes[c * 4 + 1] * four[1] + codes[c * 4 + 2] * four[2] +
                              codes[c * 4 + 3] * four[3];
        }
#endif
}

// sum + dot * scale * x_scale, the last product fused where the target has such an instruction, as sum + a * b.
INTAGLIO_INLINE void add_scaled(const std::int32_t* dots, const float* scales, float x_scale, float* sums) {
#if defined(__FMA__)
    INTAGLIO_UNROLL
    for (std::size_t c = 0; c < kTileColumns; c += 8) {
        const __m256i dot = _mm256_load_si256(reinterpret_cast<const __m256i*>(dots + c));
        const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), _mm256_load_ps(scales + c));
        _mm256_store_ps(sums + c, _mm256_fmadd_ps(scaled, _mm256_set1_ps(x_scale), _mm256_load_ps(sums + c)));
    }
#else
    for (std::size_t c = 0; c < kTileColumns; ++c) sums[c] += static_cast<float>(dots[c]) * scales[c] * x_scale;
#endif
}

INTAGLIO_INLINE void add_offsets(const float* offsets, float x_sum, float* sums) {
#if defined(__FMA__)
    INTAGLIO_UNROLL
    for (std::size_t c = 0; c < kTileColumns; c += 8)
        _mm256_store_ps(sums + c,
                        _mm256_fmadd_ps(_mm256_load_ps(offsets + c), _mm256_set1_ps(x_sum), _mm256_load_ps(sums + c)));
#else
    for (std::size_t c = 0; c < kTileColumns; ++c) sums[c] += offsets[c] * x_sum;
#endif
}

// One strip times the panel.
template <int Bits, std::size_t Rows>
void multiply_strip(const PanelPlan& plan, const PanelPlan::Block& b, const Workspace& space, const std::int8_t* x,
                    const PanelPlan::Factors& factors, bool has_offsets, float* sums) {
    for (std::size_t column = 0; column < kFastColumns; column += kTileColumns)
        for (std::size_t i = 0; i < b.segments; ++i) {
            const PanelPlan::Segment s = plan.segment(b.segment + i);
            const std::size_t at = s.position - b.position;
            alignas(64) std::int32_t dots[kRows][kTileColumns];
            for (std::size_t r = 0; r < Rows; ++r)
                for (std::size_t c = 0; c < kTileColumns; ++c) dots[r][c] = factors.starts[i * Rows + r];
            add_dots<Bits, Rows>(x + at * Rows, space.panel + at / 4 * kQuadBytes + column * 4, s.length / 4, dots);
            for (std::size_t r = 0; r < Rows; ++r) {
                float* to = sums + r * kFastColumns + column;
                if (has_offsets)
                    add_offsets(space.offsets + i * kFastColumns + column, factors.sums[i * Rows + r], to);
                add_scaled(dots[r], space.scales + i * kFastColumns + column, factors.scales[i * Rows + r], to);
            }
        }
}

template <int Bits>
void multiply_strip(const PanelPlan& plan, const PanelPlan::Block& b, const Workspace& space, std::size_t rows,
                    const std::int8_t* x, const PanelPlan::Factors& factors, bool has_offsets, float* sums) {
    switch (rows) {
        case 1: return multiply_strip<Bits, 1>(plan, b, space, x, factors, has_offsets, sums);
        case 2: return multiply_strip<Bits, 2>(plan, b, space, x, factors, has_offsets, sums);
        case 3: return multiply_strip<Bits, 3>(plan, b, space, x, factors, has_offsets, sums);
        case 4: return multiply_strip<Bits, 4>(plan, b, space, x, factors, has_offsets, sums);
        default: break;
    }
    if constexpr (kRows == 6) {
        if (rows == 5) return multiply_strip<Bits, 5>(plan, b, space, x, factors, has_offsets, sums);
        return multiply_strip<Bits, 6>(plan, b, space, x, factors, has_offsets, sums);
    }
}

template <int Bits>
void multiply_panel(const PanelPlan& plan, const FastBlock& part, std::byte* scratch, Workspace& space) {
    const GroupedQuantMatMul& p = plan.product;
    const std::size_t first_row = plan.strip_begin(part.strip), rows = plan.strip_begin(part.strip_end) - first_row;
    const std::size_t panels = (part.column_end - part.column + kFastColumns - 1) / kFastColumns;
    std::memset(space.sums, 0, sizeof(float) * rows * panels * kFastColumns);
    // Inputs that fill up a segment meet zeros.
    std::memset(space.panel, 0, sizeof space.panel);
    for (std::size_t index = 0; index < plan.blocks; ++index) {
        const PanelPlan::Block b = plan.block(index);
        const PanelPlan::Segment first = plan.segment(b.segment), last = plan.segment(b.segment + b.segments - 1);
        float* sums = space.sums;
        for (std::size_t column = part.column; column < part.column_end; column += kFastColumns) {
            decode_columns<Bits>(p, column, first.input, last.input + last.inputs - first.input, space.panel);
            decode_scales(plan, b, p.scales, column, space.scales);
            if (p.offset_per_group) decode_scales(plan, b, p.offsets, column, space.offsets);
            for (std::size_t strip = part.strip; strip < part.strip_end; ++strip) {
                const std::size_t strip_rows = plan.strip_begin(strip + 1) - plan.strip_begin(strip);
                multiply_strip<Bits>(plan, b, space, strip_rows, plan.x_of(scratch, b, strip),
                                     plan.factors_of(scratch, b, strip), p.offset_per_group, sums);
                sums += strip_rows * kFastColumns;
            }
        }
    }
    const float* sums = space.sums;
    for (std::size_t column = part.column; column < part.column_end; column += kFastColumns) {
        const std::size_t columns = smaller(kFastColumns, p.N - column);
        for (std::size_t r = 0; r < rows; ++r, sums += kFastColumns)
            std::memcpy(p.y + (first_row + r) * p.N + column, sums, columns * sizeof(float));
    }
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
