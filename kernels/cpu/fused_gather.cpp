#include "fused_gather.h"

#include <algorithm>

#include "grouped_quant_arithmetic.h"

namespace intaglio {
namespace {

// Values that a part takes at least.
constexpr std::size_t kPartValues = 1 << 16;

std::size_t rows_in_part(const QuantizedTable& table) {
    return std::max<std::size_t>(kPartValues / std::max<std::size_t>(table.weight.K, 1), 1);
}

// One group of packed codes, the first in the lowest bits.
template <int Bits>
void dequantize_group(const GroupedQuantMatMul& w, const std::uint8_t* codes, float scale, float offset, float* y) {
    constexpr std::size_t per_byte = 8 / Bits;
    for (std::size_t i = 0; i < w.group_size / per_byte; ++i)
        for (std::size_t j = 0; j < per_byte; ++j) {
            const int code = codes[i] >> (j * Bits) & ((1 << Bits) - 1);
            y[i * per_byte + j] = static_cast<float>(code - w.zero_point) * scale + offset;
        }
}

void dequantize_row(const GroupedQuantMatMul& w, std::size_t n, float* y) {
    const std::size_t groups = w.K / w.group_size;
    const std::size_t bytes = w.group_size * static_cast<std::size_t>(w.bits) / 8;
    for (std::size_t g = 0; g < groups; ++g) {
        const std::size_t group = n * groups + g;
        float scale, offset;
        load_scales(w.scales, group, 1, w.scale_type, &scale);
        load_scales(w.offsets, w.offset_per_group ? group : 0, 1, w.scale_type, &offset);
        const std::uint8_t* codes = w.codes + group * bytes;
        if (w.bits == 2) dequantize_group<2>(w, codes, scale, offset, y + g * w.group_size);
        if (w.bits == 4) dequantize_group<4>(w, codes, scale, offset, y + g * w.group_size);
        if (w.bits == 8) dequantize_group<8>(w, codes, scale, offset, y + g * w.group_size);
    }
}

}  // namespace

std::size_t GatherWork::parts(std::size_t) const {
    const std::size_t rows = rows_in_part(table_);
    return (table_.count + rows - 1) / rows;
}

void GatherWork::compute(std::size_t, std::size_t part, std::byte*) const noexcept {
    const std::size_t rows = rows_in_part(table_);
    const std::size_t end = std::min((part + 1) * rows, table_.count);
    for (std::size_t i = part * rows; i < end; ++i) {
        const std::int64_t index = table_.indices[i];
        const std::int64_t row = index < 0 ? index + static_cast<std::int64_t>(table_.weight.N) : index;
        dequantize_row(table_.weight, static_cast<std::size_t>(row), table_.y + i * table_.weight.K);
    }
}

}  // namespace intaglio
