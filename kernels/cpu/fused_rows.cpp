#include "fused_rows.h"

namespace intaglio {

RowKernels row_kernels(InstructionSet set) {
#if INTAGLIO_HAS_avx512
    if (set >= InstructionSet::kAvx512) return row_kernels_avx512();
#endif
#if INTAGLIO_HAS_avx2
    if (set >= InstructionSet::kAvx2) return row_kernels_avx2();
#endif
    (void)set;
    return row_kernels_portable();
}

}  // namespace intaglio
