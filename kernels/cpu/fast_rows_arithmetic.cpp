// Few rows of x at the accuracy `fast`, compiled once for each instruction set.
//
// A row of the weight is read in units: kBytes packed bytes that hold several whole groups, or one group that takes
// several times kBytes. A lane of a unit's sums belongs to one group. The activations of a row of x are quantized
// into the order in which the codes of a unit come out of its bytes, so that codes are never moved across lanes.

#include "fast_activations.h"
#include "ceil_div.h"
#include "fast_rows.h"
#include "fast_rows_vector.h"

namespace intaglio {
namespace {

// Packed bytes ahead of the load in each stream: what the memory delivers while the loads under way are waited for.
constexpr std::size_t kAhead = 2048;

// How a row of the weight is cut, and where its activations lie.
struct Layout {
    explicit Layout(const GroupedQuantMatMul& p)
        : planes(8 / static_cast<std::size_t>(p.bits)),
          groups(p.K / p.group_size),
          row_bytes(p.K / planes),
          group_bytes(p.group_size / planes),
          is_packed(group_bytes >= kBytes / kLanes && kBytes % group_bytes == 0),
          unit_groups(is_packed ? kBytes / group_bytes : 1),
          unit_chunks(is_packed ? 1 : ceil_div(group_bytes, kBytes)),
          units(ceil_div(groups, unit_groups)),
          tail_bytes((is_packed ? row_bytes : group_bytes) % kBytes),
          scale_units(kLanes / unit_groups),
          unit_codes(unit_chunks * planes * kBytes),
          corrections(units * unit_codes),
          scales(corrections + units * kLanes * sizeof(std::int32_t)),
          sums(scales + ceil_div(groups, kLanes) * kLanes * sizeof(float)),
          bytes(sums + ceil_div(groups, kLanes) * kLanes * sizeof(float)) {
        bytes = ceil_div(bytes, 64) * 64;
        for (std::size_t lane = 0; lane < kLanes; ++lane)
            pattern[lane] = static_cast<std::int32_t>(lane * unit_groups / kLanes);
    }

    std::size_t planes, groups, row_bytes, group_bytes;
    bool is_packed;
    std::size_t unit_groups, unit_chunks, units;
    std::size_t tail_bytes;  // of the last unit, or of each that is one group; 0 if whole
    std::size_t scale_units;  // of which a vector holds the scales
    // In bytes: the codes of a unit's activations; then where the other parts of a row of x begin. These are, for
    // each lane of the units, what the zero points add; for each group, its scale, and its scale times its sum.
    std::size_t unit_codes, corrections, scales, sums, bytes;
    std::int32_t pattern[kLanes];
};

template <typename T>
INTAGLIO_INLINE T* at(std::byte* row, std::size_t offset) {
    return reinterpret_cast<T*>(row + offset);
}
template <typename T>
INTAGLIO_INLINE const T* at(const std::byte* row, std::size_t offset) {
    return reinterpret_cast<const T*>(row + offset);
}

// The codes of one chunk from the order of the inputs to that of the planes.
template <int Bits>
INTAGLIO_INLINE void arrange(const std::int8_t* codes, std::int8_t* planes) {
    for (std::size_t j = 0; j < kPlanes<Bits>; ++j)
        for (std::size_t b = 0; b < kBytes; ++b)
            planes[j * kBytes + b] = codes[b * kPlanes<Bits> + kPlaneInputs<Bits>[j]];
}

template <int Bits>
void quantize_row(const GroupedQuantMatMul& p, const Layout& layout, const char* x, std::byte* row) {
    constexpr std::size_t chunk = kPlanes<Bits> * kBytes;
    alignas(64) std::int8_t codes[4 * kBytes];
    // One in the place of each code.
    constexpr int ones = Bits == 2 ? 0x55 : Bits == 4 ? 0x11 : 1;
    Bytes zero_points[kPlanes<Bits>];
    unpack<Bits>(all_bytes(p.zero_point * ones), zero_points);
    const auto scales = at<float>(row, layout.scales), sums = at<float>(row, layout.sums);
    for (std::size_t unit = 0; unit < layout.units; ++unit) {
        const auto unit_codes = at<std::int8_t>(row, unit * layout.unit_codes);
        const std::size_t group = unit * layout.unit_groups;
        const char* values = x + group * p.group_size * sizeof(float);
        Ints zero_point = zero_ints();
        if (layout.is_packed) {
            std::size_t count = 0;
            for (std::size_t g = group; g < smaller(group + layout.unit_groups, layout.groups); ++g) {
                const char* from = values + count * sizeof(float);
                const ActivationScale scale = activation_scale(largest_magnitude(from, p.group_size));
                const std::int32_t sum = round_activations(from, p.group_size, scale.inverse, codes + count);
                scales[g] = scale.scale;
                sums[g] = scale.scale * static_cast<float>(sum);
                count += p.group_size;
            }
            std::memset(codes + count, 0, chunk - count);
            arrange<Bits>(codes, unit_codes);
            zero_point = first_dot<Bits>(zero_point, zero_points, unit_codes);
        } else {
            const ActivationScale scale = activation_scale(largest_magnitude(values, p.group_size));
            std::int32_t sum = 0;
            for (std::size_t c = 0; c < layout.unit_chunks; ++c) {
                const std::size_t count = smaller(chunk, p.group_size - c * chunk);
                sum += round_activations(values + c * chunk * sizeof(float), count, scale.inverse, codes);
                std::memset(codes + count, 0, chunk - count);
                arrange<Bits>(codes, unit_codes + c * chunk);
                zero_point = added(zero_point, first_dot<Bits>(zero_ints(), zero_points, unit_codes + c * chunk));
            }
            scales[group] = scale.scale;
            sums[group] = scale.scale * static_cast<float>(sum);
        }
        std::int32_t* corrections = at<std::int32_t>(row, layout.corrections) + unit * kLanes;
        store_ints(zero_point, corrections);
        for (std::size_t lane = 0; lane < kLanes; ++lane) corrections[lane] *= -kStart<Bits>;
    }
    for (std::size_t g = layout.groups; g % kLanes; ++g) scales[g] = sums[g] = 0;
}

std::size_t row_bytes(const GroupedQuantMatMul& p) { return Layout(p).bytes; }

void quantize(const GroupedQuantMatMul& p, std::byte* activations) {
    const Layout layout(p);
    const char* x = static_cast<const char*>(p.x);
    for (std::size_t m = 0; m < p.M; ++m) {
        if (p.bits == 2) quantize_row<2>(p, layout, x, activations);
        if (p.bits == 4) quantize_row<4>(p, layout, x, activations);
        if (p.bits == 8) quantize_row<8>(p, layout, x, activations);
        x += p.K * sizeof(float);
        activations += layout.bytes;
    }
}

// Scales and offsets of all groups, and where a row of the weight begins in them.
struct Scales {
    const std::uint8_t *from, *end;
    std::size_t row_stride, stride;
    ScaleType type;

    Scales(const GroupedQuantMatMul& p, const Layout& layout, const std::uint8_t* values)
        : from(values), stride(p.scale_type == ScaleType::kFloat32 ? 4 : 2), type(p.scale_type) {
        row_stride = layout.groups * stride;
        end = from + p.N * row_stride;
    }
    INTAGLIO_INLINE Floats load(std::size_t row, std::size_t group, std::size_t count) const {
        return load_scales(from + row * row_stride + group * stride, count, type, end);
    }
};

// What a tile of the product reads: Rows rows of x and Columns columns of y, of which Rows * Columns fit the registers.
struct Tile {
    const std::byte* activations;  // the codes of the unit in the first row
    std::size_t row_stride;        // of the activations
    const std::uint8_t* codes;     // of the unit in the first column
    std::size_t column_stride;     // of the codes
    const std::uint8_t* codes_end;
};

// Adds a chunk of codes, or its first `count` bytes, to the sums of a unit.
template <int Bits, std::size_t Rows, std::size_t Columns, bool IsFirst, bool IsWhole>
INTAGLIO_INLINE void add_chunk(Tile& tile, std::size_t count, Ints (&sums)[Columns][Rows]) {
    INTAGLIO_UNROLL
    for (std::size_t c = 0; c < Columns; ++c) {
        const std::uint8_t* from = tile.codes + c * tile.column_stride;
        Bytes planes[kPlanes<Bits>];
        unpack<Bits>(IsWhole ? load_bytes(from) : load_some_bytes(from, count, tile.codes_end), planes);
        prefetch(from + kAhead);
        INTAGLIO_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) {
            const auto activations = at<std::int8_t>(tile.activations + r * tile.row_stride, 0);
            sums[c][r] = IsFirst ? first_dot<Bits>(sums[c][r], planes, activations)
                                 : added(sums[c][r], first_dot<Bits>(zero_ints(), planes, activations));
        }
    }
    tile.codes += IsWhole ? kBytes : count;
    tile.activations += kPlanes<Bits> * kBytes;
}

// Adds a unit, times its scales of weight and activations, to the sums of the tile.
template <int Bits, std::size_t Rows, std::size_t Columns, bool IsPacked, bool IsWhole>
INTAGLIO_INLINE void add_unit(Tile& tile, const Layout& layout, const std::byte* corrections, Pattern pattern,
                              const Floats (&scales)[Columns][Rows], Floats (&total)[Columns][Rows]) {
    Ints sums[Columns][Rows];
    INTAGLIO_UNROLL
    for (std::size_t c = 0; c < Columns; ++c) {
        INTAGLIO_UNROLL
        for (std::size_t r = 0; r < Rows; ++r)
            sums[c][r] = load_ints(at<std::int32_t>(corrections + r * tile.row_stride, 0));
    }
    if (IsPacked || layout.unit_chunks == 1) {
        add_chunk<Bits, Rows, Columns, true, IsWhole>(tile, layout.tail_bytes, sums);
    } else {
        add_chunk<Bits, Rows, Columns, true, true>(tile, kBytes, sums);
        for (std::size_t i = 2; i < layout.unit_chunks; ++i)
            add_chunk<Bits, Rows, Columns, false, true>(tile, kBytes, sums);
        add_chunk<Bits, Rows, Columns, false, IsWhole>(tile, layout.tail_bytes, sums);
    }
    INTAGLIO_UNROLL
    for (std::size_t c = 0; c < Columns; ++c) {
        INTAGLIO_UNROLL
        for (std::size_t r = 0; r < Rows; ++r)
            total[c][r] = multiply_add(to_floats(sums[c][r]), spread(scales[c][r], pattern), total[c][r]);
    }
}

// Columns of y that are `apart` from each other.
template <int Bits, std::size_t Rows, std::size_t Columns, bool IsPacked>
INTAGLIO_INLINE void multiply_tile(const GroupedQuantMatMul& p, const Layout& layout, const std::byte* activations,
                                   std::size_t row, std::size_t column, std::size_t apart) {
    Tile tile{activations, layout.bytes, p.codes + column * layout.row_bytes, apart * layout.row_bytes,
              p.codes + p.N * layout.row_bytes};
    const Scales scales(p, layout, p.scales), offsets(p, layout, p.offsets);
    const std::size_t rows_ahead = 1 + kAhead / layout.row_bytes;
    const Pattern first = load_pattern(layout.pattern), step = moves(layout.unit_groups);
    const std::byte* corrections = activations + layout.corrections;
    Floats total[Columns][Rows];
    INTAGLIO_UNROLL
    for (std::size_t c = 0; c < Columns; ++c) {
        INTAGLIO_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) total[c][r] = zeros();
    }
    std::size_t units = layout.units;
    for (std::size_t group = 0; group < layout.groups; group += kLanes) {
        const std::size_t groups = smaller(kLanes, layout.groups - group);
        Floats product[Columns][Rows];
        INTAGLIO_UNROLL
        for (std::size_t c = 0; c < Columns; ++c) {
            const Floats scale = scales.load(column + c * apart, group, groups);
            prefetch(scales.from + (column + c * apart + rows_ahead) * scales.row_stride + group * scales.stride);
            INTAGLIO_UNROLL
            for (std::size_t r = 0; r < Rows; ++r)
                product[c][r] =
                    multiply(scale, load_floats(at<float>(activations + r * layout.bytes, layout.scales) + group));
            if (!p.offset_per_group) continue;
            const Floats offset = offsets.load(column + c * apart, group, groups);
            prefetch(offsets.from + (column + c * apart + rows_ahead) * offsets.row_stride + group * offsets.stride);
            INTAGLIO_UNROLL
            for (std::size_t r = 0; r < Rows; ++r)
                total[c][r] = multiply_add(
                    offset, load_floats(at<float>(activations + r * layout.bytes, layout.sums) + group), total[c][r]);
        }
        Pattern pattern = first;
        const std::size_t here = smaller(layout.scale_units, units);
        units -= here;
        const std::size_t whole = layout.tail_bytes == 0 ? here : !IsPacked ? 0 : units ? here : here - 1;
        for (std::size_t unit = 0; unit < whole; ++unit) {
            add_unit<Bits, Rows, Columns, IsPacked, true>(tile, layout, corrections, pattern, product, total);
            pattern = moved(pattern, step);
            corrections += kLanes * sizeof(std::int32_t);
        }
        for (std::size_t unit = whole; unit < here; ++unit) {
            add_unit<Bits, Rows, Columns, IsPacked, false>(tile, layout, corrections, pattern, product, total);
            pattern = moved(pattern, step);
            corrections += kLanes * sizeof(std::int32_t);
        }
    }
    INTAGLIO_UNROLL
    for (std::size_t c = 0; c < Columns; ++c) {
        INTAGLIO_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) p.y[(row + r) * p.N + column + c * apart] = sum_of(total[c][r]);
    }
}

// The streams of one column, Columns at a time.
template <int Bits, std::size_t Rows, std::size_t Columns, bool IsPacked>
void multiply_streams(const GroupedQuantMatMul& p, const Layout& layout, const std::byte* activations,
                      std::size_t row, std::size_t column, const FastRowsColumns& columns) {
    activations += row * layout.bytes;
    const std::size_t apart = columns.apart;
    std::size_t stream = 0;
    for (; stream + Columns <= columns.streams; stream += Columns)
        multiply_tile<Bits, Rows, Columns, IsPacked>(p, layout, activations, row, column + stream * apart, apart);
    if constexpr (Columns > 1)
        for (; stream < columns.streams; ++stream)
            multiply_tile<Bits, Rows, 1, IsPacked>(p, layout, activations, row, column + stream * apart, apart);
}

template <int Bits, bool IsPacked>
void multiply_columns(const GroupedQuantMatMul& p, const Layout& layout, const std::byte* activations,
                      const FastRowsColumns& columns) {
    for (std::size_t column = columns.first; column < columns.first + columns.count; ++column) {
        std::size_t row = 0;
#if defined(INTAGLIO_NO_VECTORS)
        // Without vector registers a tile saves nothing, and takes the compiler a minute.
        for (; row < p.M; ++row) multiply_streams<Bits, 1, 1, IsPacked>(p, layout, activations, row, column, columns);
#else
        // The rows of the weight stay in the first-level cache while all rows of x meet them.
        for (; row + 4 <= p.M; row += 4)
            multiply_streams<Bits, 4, 1, IsPacked>(p, layout, activations, row, column, columns);
        if (row + 2 <= p.M) {
            multiply_streams<Bits, 2, 2, IsPacked>(p, layout, activations, row, column, columns);
            row += 2;
        }
        if (row < p.M) multiply_streams<Bits, 1, 4, IsPacked>(p, layout, activations, row, column, columns);
#endif
    }
}

template <int Bits>
void multiply_bits(const GroupedQuantMatMul& p, const std::byte* activations, const FastRowsColumns& columns) {
    const Layout layout(p);
    if (layout.is_packed) return multiply_columns<Bits, true>(p, layout, activations, columns);
    multiply_columns<Bits, false>(p, layout, activations, columns);
}

void multiply(const GroupedQuantMatMul& p, const std::byte* activations, const FastRowsColumns& columns) {
    if (p.bits == 2) multiply_bits<2>(p, activations, columns);
    if (p.bits == 4) multiply_bits<4>(p, activations, columns);
    if (p.bits == 8) multiply_bits<8>(p, activations, columns);
}

}  // namespace

FastRowsKernel INTAGLIO_FOR_ISA(fast_rows)() noexcept { return {row_bytes, quantize, multiply}; }

}  // namespace intaglio
