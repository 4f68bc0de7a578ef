#include "fast_rows.h"

#include <algorithm>

#include "ceil_div.h"

namespace intaglio {
namespace {

// Columns of y whose rows of the weight are read side by side. They lie a quarter of the weight apart, in pages of their
// own: processors look ahead in several pages at once, but in none past its end, so that memory is read faster by a
// quarter than when the rows follow each other.
constexpr std::size_t kStreams = 4;

// A product is cut into about this many parts, so that the threads end together, but a part reads at least
// kMinPartBytes of the weight, which pays for handing it over.
constexpr std::size_t kParts = 64, kMinPartBytes = std::size_t{1} << 15;
// Below this many bytes a second thread does not help.
constexpr std::size_t kSmallBytes = std::size_t{1} << 16;

FastRowsKernel kernel_of(InstructionSet set) {
#if INTAGLIO_HAS_amx
    if (set == InstructionSet::kAmx) return fast_rows_amx();  // with GFNI
#endif
#if INTAGLIO_HAS_avx512_vnni
    if (set >= InstructionSet::kAvx512Vnni) return fast_rows_avx512_vnni();
#endif
#if INTAGLIO_HAS_avx_vnni
    if (set == InstructionSet::kAvxVnni) return fast_rows_avx_vnni();
#endif
#if INTAGLIO_HAS_avx2
    if (set >= InstructionSet::kAvx2) return fast_rows_avx2();
#endif
#if INTAGLIO_HAS_neon
    if (set == InstructionSet::kNeon || set == InstructionSet::kNeonI8mm) return fast_rows_neon();
#endif
    (void)set;
    return fast_rows_portable();
}

// Phase 0 quantizes x: one part, which is done before another thread would have begun. Phase 1 multiplies.
class FastRows final : public ParallelWork {
   public:
    FastRows(const GroupedQuantMatMul& product, InstructionSet set)
        : product_(product), kernel_(kernel_of(set)) {
        const std::size_t row_bytes = std::max<std::size_t>(product.K * static_cast<std::size_t>(product.bits) / 8, 1);
        const std::size_t wanted =
            std::max(ceil_div(product.N, kParts), kMinPartBytes / (row_bytes * std::max<std::size_t>(product.M, 1)));
        apart_ = product.N / kStreams;
        columns_ = std::max<std::size_t>(ceil_div(wanted, kStreams), 1);
        parts_ = std::max<std::size_t>(ceil_div(apart_, columns_), product.N > 0);
        is_small_ = row_bytes * product.N * product.M < kSmallBytes;
    }

    std::size_t phases() const override { return 2; }
    std::size_t parts(std::size_t phase) const override { return phase == 0 ? 1 : parts_; }
    bool is_small() const override { return is_small_; }
    std::size_t scratch_bytes() const override { return kernel_.row_bytes(product_) * product_.M; }

    void compute(std::size_t phase, std::size_t part, std::byte* scratch) const noexcept override {
        if (phase == 0) return kernel_.quantize(product_, scratch);
        const std::size_t column = std::min(part * columns_, apart_);
        const std::size_t count = std::min(columns_, apart_ - column), streamed = kStreams * apart_;
        kernel_.multiply(product_, scratch, {column, count, kStreams, apart_});
        if (part + 1 == parts_) kernel_.multiply(product_, scratch, {streamed, 1, product_.N - streamed, 1});
    }

   private:
    const GroupedQuantMatMul& product_;
    FastRowsKernel kernel_;
    std::size_t apart_, columns_, parts_;
    bool is_small_;
};

}  // namespace

std::unique_ptr<ParallelWork> make_fast_rows(const GroupedQuantMatMul& product, InstructionSet set) {
    return std::make_unique<FastRows>(product, set);
}

}  // namespace intaglio
