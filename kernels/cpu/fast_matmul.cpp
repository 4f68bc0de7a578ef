#include "fast_matmul.h"

#include "fast_neon.h"
#include "fast_panel.h"
#include "fast_rows.h"

namespace intaglio {

bool has_fast_matmul(std::size_t group_size, std::size_t width) {
    return group_size <= kMaxFastGroup && (group_size % 16 == 0 || group_size == width);
}

namespace {

// Whether the offset that all groups share is zero. The sign of a zero is the last bit of its last byte.
bool is_zero_offset(const GroupedQuantMatMul& p) {
    const std::size_t bytes = p.scale_type == ScaleType::kFloat32 ? 4 : 2;
    for (std::size_t i = 0; i < bytes; ++i)
        if (p.offsets[i] & (i + 1 < bytes ? 0xff : 0x7f)) return false;
    return true;
}

}  // namespace

std::unique_ptr<ParallelWork> make_fast_matmul(const GroupedQuantMatMul& product, InstructionSet set) {
    if (!has_fast_matmul(product.group_size, product.K)) return nullptr;
    if (!product.offset_per_group && !is_zero_offset(product)) return nullptr;
    if (product.M < kFastManyRows) return make_fast_rows(product, set);
    if (auto work = make_fast_neon(product, set)) return work;
    if (auto work = make_fast_panel(product, set)) return work;
    return make_fast_rows(product, set);
}

}  // namespace intaglio
