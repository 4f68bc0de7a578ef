#include "grouped_quant_matmul.h"

#include <algorithm>
#include <memory>
#include <new>

#include "ceil_div.h"

namespace intaglio {
namespace {

// From this many rows of x on, a decoded panel saves more than it costs: measured with AVX-512 and AVX2 at
// 3 to 6 rows; the portable code is as fast either way.
constexpr std::size_t kManyRows = 8;

// Few rows: rows of the weight that a part takes, in panels of kPanelRows.
constexpr std::size_t kPanelRows = 8, kMaxColumns = 64;

// Many rows: a product is cut into at least this many parts, so that the threads end together, but not
// below these sizes: each part decodes its columns of the weight and copies its rows of x.
constexpr std::size_t kParts = 32, kMinPartColumns = 48, kMinPartRows = 192;

// The panel of this thread, kept until the thread ends; null where there is no memory for it.
float* thread_panel() noexcept {
    struct alignas(64) Panel {
        float values[kPanelColumns * kPanelInputs];
    };
    static thread_local std::unique_ptr<Panel> panel;
    if (!panel) panel.reset(new (std::nothrow) Panel);
    return panel ? panel->values : nullptr;
}

}  // namespace

Partition::Partition(const GroupedQuantMatMul& product, InstructionSet set)
    : product_(product), set_(set), has_many_rows_(product.M >= kManyRows) {
    // About this many multiplications make a part: enough to pay for handing it over, and few enough
    // for the threads to end together.
    constexpr std::size_t work = std::size_t{1} << 19;
    if (has_many_rows_) {
        const std::size_t wanted = ceil_div(ceil_div(product.N, kParts), kMinPartColumns) * kMinPartColumns;
        columns_ = std::min(wanted, kPanelColumns);
        column_parts_ = ceil_div(product.N, columns_);
        const std::size_t splits = std::min(ceil_div(kParts, column_parts_), product.M / kMinPartRows);
        rows_ = ceil_div(product.M, std::max<std::size_t>(splits, 1));
    } else {
        rows_ = product.M;
        const std::size_t wanted =
            work / std::max<std::size_t>(rows_ * product.K, 1) / kPanelRows * kPanelRows;
        columns_ = std::clamp(wanted, kPanelRows, kMaxColumns);
        column_parts_ = ceil_div(product.N, columns_);
    }
    row_parts_ = rows_ ? ceil_div(product.M, rows_) : 0;
    is_small_ = product.M * product.N * product.K < work / 8;
}

void Partition::compute(std::size_t, std::size_t part, std::byte*) const noexcept {
    const GroupedQuantMatMul& p = product_;
    OutputBlock block{};
    block.row = part / column_parts_ * rows_;
    block.row_end = std::min(block.row + rows_, p.M);
    block.column = part % column_parts_ * columns_;
    block.column_end = std::min(block.column + columns_, p.N);
    // Without memory for a panel the other regime computes the same, but slower.
    float* panel = has_many_rows_ ? thread_panel() : nullptr;
    const Float32Level level = float32_level(set_);
#if INTAGLIO_HAS_avx512
    if (level == Float32Level::kAvx512)
        return panel ? compute_panel_avx512(p, block, panel) : compute_block_avx512(p, block);
#endif
#if INTAGLIO_HAS_avx2
    if (level == Float32Level::kAvx2)
        return panel ? compute_panel_avx2(p, block, panel) : compute_block_avx2(p, block);
#endif
    (void)level;
    return panel ? compute_panel_portable(p, block, panel) : compute_block_portable(p, block);
}

}  // namespace intaglio
