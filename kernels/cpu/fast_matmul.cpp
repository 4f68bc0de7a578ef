#include "fast_matmul.h"

#include "fast_neon.h"
#include "fast_panel.h"
#include "fast_rows.h"

namespace intaglio {

bool has_fast_matmul(std::size_t group_size, std::size_t width) {
    return group_size <= kMaxFastGroup && (group_size % 16 == 0 || group_size == width);
}

std::unique_ptr<ParallelWork> make_fast_matmul(const GroupedQuantMatMul& product, InstructionSet set) {
    if (!has_fast_matmul(product.group_size, product.K)) return nullptr;
    if (product.M < kFastManyRows) return make_fast_rows(product, set);
    if (auto work = make_fast_neon(product, set)) return work;
    if (auto work = make_fast_panel(product, set)) return work;
    return make_fast_rows(product, set);
}

}  // namespace intaglio
