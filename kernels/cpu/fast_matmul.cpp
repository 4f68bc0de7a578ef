#include "fast_matmul.h"

#include "fast_neon.h"
#include "fast_rows.h"

namespace intaglio {

bool is_fast_format(const GroupedQuantMatMul& product) {
    return product.group_size <= kMaxFastGroup && (product.group_size % 16 == 0 || product.group_size == product.K);
}

std::unique_ptr<ParallelWork> make_fast_matmul(const GroupedQuantMatMul& product, InstructionSet set) {
    if (!is_fast_format(product)) return nullptr;
    if (product.M < kFastManyRows) return make_fast_rows(product, set);
    return make_fast_neon(product, set);
}

}  // namespace intaglio
