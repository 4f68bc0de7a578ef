// The arithmetic of one part of a product, compiled once for each instruction set: the regime of few rows.

#include "grouped_quant_arithmetic.h"

namespace intaglio {
namespace {

// The order of additions, the same everywhere: inputs in chunks of kChunk; in a chunk, lane l adds
// the products of inputs l, l + 16, l + 32, ... one by one; a fixed tree adds the lanes; the sums of
// the chunks are added in order. Changing one of the two numbers changes results in their last bits.
constexpr std::size_t kLanes = 16;
constexpr std::size_t kChunk = 1024;

// Rows of the weight decoded together: 8 * 1024 floats are 32 KiB of stack, and fit the first-level cache.
constexpr std::size_t kPanel = 8;

// A packed byte to its codes, one a byte.
INTAGLIO_INLINE void spread(std::uint8_t byte, std::uint16_t& nibbles) {
    nibbles = static_cast<std::uint16_t>((byte | byte << 4) & 0x0f0f);
}
INTAGLIO_INLINE void spread(std::uint8_t byte, std::uint32_t& pairs) {
    const std::uint32_t nibbles = (byte | static_cast<std::uint32_t>(byte) << 12) & 0x000f000fu;
    pairs = (nibbles | nibbles << 6) & 0x03030303u;
}

// `bytes` packed bytes to codes, one a byte; Codes holds those of one packed byte.
template <typename Codes>
INTAGLIO_INLINE void unpack(const std::uint8_t* packed, std::size_t bytes, std::uint8_t* codes) {
    for (std::size_t i = 0; i < bytes; ++i) {
        Codes spread_byte;
        spread(packed[i], spread_byte);
        std::memcpy(codes + i * sizeof(Codes), &spread_byte, sizeof(Codes));
    }
}

INTAGLIO_INLINE void dequantize(const std::uint8_t* codes, std::size_t count, int zero_point, float scale,
                                float offset, float* w) {
    for (std::size_t i = 0; i < count; ++i)
        w[i] = static_cast<float>(static_cast<int>(codes[i]) - zero_point) * scale + offset;
}

// kLanes codes at once. Compilers do not find the one widening load by themselves.
INTAGLIO_INLINE void dequantize_lanes(const std::uint8_t* codes, int zero_point, float scale, float offset,
                                      float* w) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const __m512i values = _mm512_sub_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(zero_point));
    const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(values), _mm512_set1_ps(scale));
    _mm512_storeu_ps(w, _mm512_add_ps(scaled, _mm512_set1_ps(offset)));
#elif defined(__AVX2__)
    for (std::size_t i = 0; i < kLanes; i += 8) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i));
        const __m256i values = _mm256_sub_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_set1_epi32(zero_point));
        const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(values), _mm256_set1_ps(scale));
        _mm256_storeu_ps(w + i, _mm256_add_ps(scaled, _mm256_set1_ps(offset)));
    }
#else
    dequantize(codes, kLanes, zero_point, scale, offset, w);
#endif
}

// Inputs [k, k + count) of row n of the weight, to float32.
template <int Bits>
INTAGLIO_INLINE void decode_row(const GroupedQuantMatMul& p, std::size_t n, std::size_t k, std::size_t count,
                                float* w) {
    std::uint8_t unpacked[kChunk];
    const std::uint8_t* codes = p.codes + (n * p.K + k) * Bits / 8;
    if (Bits == 4) unpack<std::uint16_t>(codes, count / 2, unpacked);
    if (Bits == 2) unpack<std::uint32_t>(codes, count / 4, unpacked);
    if (Bits < 8) codes = unpacked;
    // A batch of groups at a time, so that converting scales is one loop and not a branch a group.
    constexpr std::size_t batch = 64;
    float scales[batch];
    float offsets[batch];
    const std::size_t groups = p.K / p.group_size;
    const std::size_t last_group = (k + count - 1) / p.group_size;
    if (!p.offset_per_group) {
        load_scales(p.offsets, 0, 1, p.scale_type, offsets);
        for (float& offset : offsets) offset = offsets[0];
    }
    std::size_t done = 0;
    for (std::size_t first = k / p.group_size; first <= last_group; first += batch) {
        const std::size_t in_batch = smaller(batch, last_group + 1 - first);
        load_scales(p.scales, n * groups + first, in_batch, p.scale_type, scales);
        if (p.offset_per_group) load_scales(p.offsets, n * groups + first, in_batch, p.scale_type, offsets);
        for (std::size_t g = 0; g < in_batch; ++g) {
            const std::size_t end = smaller((first + g + 1) * p.group_size - k, count);
            for (; done + kLanes <= end; done += kLanes)
                dequantize_lanes(codes + done, p.zero_point, scales[g], offsets[g], w + done);
            dequantize(codes + done, end - done, p.zero_point, scales[g], offsets[g], w + done);
            done = end;
        }
    }
}

INTAGLIO_INLINE float add_lanes(float* lanes) {
    for (std::size_t half = kLanes / 2; half > 0; half /= 2)
        for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}

// Rows x Columns sums of Width of the lanes, over `count` inputs (a multiple of kLanes) of the rows at x
// and of the panel.
template <std::size_t Width, std::size_t Rows, std::size_t Columns>
INTAGLIO_INLINE void multiply_lanes(const char* x, std::size_t x_stride, const float* panel,
                                    std::size_t count, Vector<Width> (&sum)[Rows * Columns]) {
    for (std::size_t k = 0; k < count; k += kLanes) {
        Vector<Width> w[Columns], row;
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < Columns; ++c) w[c].load(panel + c * kChunk + k);
        INTAGLIO_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) {
            row.load(x + r * x_stride + k * sizeof(float));
            INTAGLIO_UNROLL
            for (std::size_t c = 0; c < Columns; ++c) sum[r * Columns + c].add_product(row, w[c]);
        }
    }
}

// One chunk of Rows rows of x times Columns rows of the panel, each output in 16 lanes that are then
// added. Lanes that do not fit a register of Width are taken in turns: each lane's sum is its own.
template <std::size_t Width, std::size_t Rows, std::size_t Columns>
INTAGLIO_INLINE void multiply_tile(const char* x, std::size_t x_stride, const float* panel, std::size_t count,
                                   float (&sums)[Rows][Columns]) {
    float lanes[Rows * Columns][kLanes];
    const std::size_t whole = count / kLanes * kLanes;
    for (std::size_t lane = 0; lane < kLanes; lane += Width) {
        Vector<Width> sum[Rows * Columns];
        INTAGLIO_UNROLL
        for (std::size_t i = 0; i < Rows * Columns; ++i) sum[i].clear();
        multiply_lanes<Width, Rows, Columns>(x + lane * sizeof(float), x_stride, panel + lane, whole, sum);
        INTAGLIO_UNROLL
        for (std::size_t i = 0; i < Rows * Columns; ++i) sum[i].store(lanes[i] + lane);
    }
    if (whole < count)
        for (std::size_t r = 0; r < Rows; ++r)
            for (std::size_t k = whole; k < count; ++k) {
                float value;
                std::memcpy(&value, x + r * x_stride + k * sizeof(float), sizeof value);
                for (std::size_t c = 0; c < Columns; ++c)
                    lanes[r * Columns + c][k - whole] += value * panel[c * kChunk + k];
            }
    for (std::size_t r = 0; r < Rows; ++r)
        for (std::size_t c = 0; c < Columns; ++c) sums[r][c] = add_lanes(lanes[r * Columns + c]);
}

// A part of y narrowed to one panel, and the chunk of the inputs that is being added.
struct Step : OutputBlock {
    std::size_t k, count;
};

template <std::size_t Width, std::size_t Rows, std::size_t Columns>
INTAGLIO_INLINE void multiply_rows(const GroupedQuantMatMul& p, const Step& b, const float* panel,
                                   std::size_t row) {
    const std::size_t stride = p.K * sizeof(float);
    const char* x = static_cast<const char*>(p.x) + row * stride + b.k * sizeof(float);
    for (std::size_t c = b.column; c < b.column_end; c += Columns) {
        float sums[Rows][Columns];
        multiply_tile<Width, Rows, Columns>(x, stride, panel + (c - b.column) * kChunk, b.count, sums);
        const std::size_t columns = smaller(Columns, b.column_end - c);
        for (std::size_t i = 0; i < Rows; ++i)
            for (std::size_t j = 0; j < columns; ++j) {
                float& y = p.y[(row + i) * p.N + c + j];
                y = b.k == 0 ? sums[i][j] : y + sums[i][j];
            }
    }
}

template <std::size_t Width, std::size_t Rows, int Bits>
INTAGLIO_INLINE void compute_block(const GroupedQuantMatMul& p, const OutputBlock& part) {
    alignas(64) float panel[kPanel * kChunk];
    Step b{part, 0, 0};
    for (b.k = 0; b.k < p.K; b.k += kChunk) {
        b.count = smaller(kChunk, p.K - b.k);
        for (b.column = part.column; b.column < part.column_end; b.column += kPanel) {
            b.column_end = smaller(b.column + kPanel, part.column_end);
            for (std::size_t i = 0; i < kPanel; ++i) {
                float* w = panel + i * kChunk;
                const std::size_t decoded = b.column + i < b.column_end ? b.count : 0;
                if (decoded) decode_row<Bits>(p, b.column + i, b.k, b.count, w);
                for (std::size_t k = decoded; k < b.count; ++k) w[k] = 0;
            }
            std::size_t row = part.row;
            for (; row + Rows <= part.row_end; row += Rows) multiply_rows<Width, Rows, 4>(p, b, panel, row);
            for (; row < part.row_end; ++row) multiply_rows<Width, 1, 8>(p, b, panel, row);
        }
    }
}


// Rows * 4 sums, 4 columns and a row of x must fit the registers: 32 with AVX-512 and NEON, else 16.
#if defined(__AVX512F__)
constexpr std::size_t kWidth = 16, kRows = 4;
#elif defined(__AVX2__)
constexpr std::size_t kWidth = 8, kRows = 2;
#elif defined(__aarch64__) || defined(_M_ARM64)
constexpr std::size_t kWidth = 4, kRows = 4;
#else
constexpr std::size_t kWidth = 4, kRows = 2;
#endif

}  // namespace

void INTAGLIO_FOR_ISA(compute_block)(const GroupedQuantMatMul& product, const OutputBlock& part) noexcept {
    if (product.bits == 2) compute_block<kWidth, kRows, 2>(product, part);
    if (product.bits == 4) compute_block<kWidth, kRows, 4>(product, part);
    if (product.bits == 8) compute_block<kWidth, kRows, 8>(product, part);
}

}  // namespace intaglio
