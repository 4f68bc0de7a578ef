#include "grouped_quant_matmul.h"

#include <algorithm>

namespace intaglio {
namespace {

// Rows of x that meet a panel in turn: 256 * 1024 floats are 1 MiB, and fit the second-level cache.
constexpr std::size_t kMaxRows = 256;
// Rows of the weight that a part takes, in panels.
constexpr std::size_t kPanelRows = 8, kMaxColumns = 64;

}  // namespace

InstructionSet best_instruction_set() {
#if INTAGLIO_HAS_avx512 || INTAGLIO_HAS_avx2
    // Usually done by a constructor of the compiler's own library, which not every toolchain links.
    __builtin_cpu_init();
#endif
#if INTAGLIO_HAS_avx512
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return InstructionSet::kAvx512;
#endif
#if INTAGLIO_HAS_avx2
    if (__builtin_cpu_supports("avx2")) return InstructionSet::kAvx2;
#endif
    return InstructionSet::kPortable;
}

Partition::Partition(const GroupedQuantMatMul& product) : product_(product) {
    // About this many multiplications make a part: enough to pay for handing it over, and few enough
    // for the threads to end together.
    constexpr std::size_t work = std::size_t{1} << 19;
    rows_ = std::min(product.M, kMaxRows);
    const std::size_t wanted = work / std::max<std::size_t>(rows_ * product.K, 1) / kPanelRows * kPanelRows;
    columns_ = std::clamp(wanted, kPanelRows, kMaxColumns);
    row_parts_ = rows_ ? (product.M + rows_ - 1) / rows_ : 0;
    column_parts_ = (product.N + columns_ - 1) / columns_;
    is_small_ = product.M * product.N * product.K < work / 8;
}

void Partition::compute(InstructionSet set, std::size_t part) const noexcept {
    const GroupedQuantMatMul& p = product_;
    OutputBlock block{};
    block.row = part / column_parts_ * rows_;
    block.row_end = std::min(block.row + rows_, p.M);
    block.column = part % column_parts_ * columns_;
    block.column_end = std::min(block.column + columns_, p.N);
#if INTAGLIO_HAS_avx512
    if (set == InstructionSet::kAvx512) return compute_block_avx512(p, block);
#endif
#if INTAGLIO_HAS_avx2
    if (set == InstructionSet::kAvx2) return compute_block_avx2(p, block);
#endif
    (void)set;
    compute_block_portable(p, block);
}

}  // namespace intaglio
