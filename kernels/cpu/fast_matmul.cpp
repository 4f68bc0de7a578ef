#include "fast_matmul.h"

#include "fast_panel.h"
#include "fast_rows.h"

namespace intaglio {

bool is_fast_format(const GroupedQuantMatMul& product) {
    return product.group_size <= kMaxFastGroup && (product.group_size % 16 == 0 || product.group_size == product.K);
}

std::unique_ptr<ParallelWork> make_fast_matmul(const GroupedQuantMatMul& product, InstructionSet set) {
    if (!is_fast_format(product)) return nullptr;
    if (product.M >= kFastManyRows)
        if (auto work = make_fast_panel(product, set)) return work;
    return make_fast_rows(product, set);
}

}  // namespace intaglio
