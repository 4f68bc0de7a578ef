#include "fast_rows.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace intaglio {
namespace {

// Columns of y come in multiples of this, which the kernels take at once.
constexpr std::size_t kColumns = 4;

// A product is cut into about this many parts, so that the threads end together, but a part reads at least
// kMinPartBytes of the weight, which pays for handing it over.
constexpr std::size_t kParts = 64, kMinPartBytes = std::size_t{1} << 15;
// Below this many bytes a second thread does not help.
constexpr std::size_t kSmallBytes = std::size_t{1} << 16;

std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

FastRowsKernel kernel_of(InstructionSet set) {
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

// Quantizing x takes less time than waiting for another thread that does it, so each thread that takes parts does
// it for itself, in the scratch memory of the first part that it takes.
struct QuantizedByThisThread {
    std::uint64_t product = 0;
    const std::byte* activations = nullptr;
};

std::uint64_t next_product() {
    static std::atomic<std::uint64_t> last{0};
    return ++last;
}

class FastRows final : public ParallelWork {
   public:
    FastRows(const GroupedQuantMatMul& product, InstructionSet set)
        : product_(product), kernel_(kernel_of(set)), id_(next_product()) {
        bytes_ = kernel_.row_bytes(product) * product.M;
        const std::size_t row_bytes = std::max<std::size_t>(product.K * static_cast<std::size_t>(product.bits) / 8, 1);
        const std::size_t wanted =
            std::max(ceil_div(product.N, kParts), ceil_div(kMinPartBytes, row_bytes * std::max<std::size_t>(product.M, 1)));
        columns_ = std::min(ceil_div(wanted, kColumns) * kColumns, product.N);
        parts_ = ceil_div(product.N, columns_);
        is_small_ = row_bytes * product.N * product.M < kSmallBytes;
    }

    std::size_t parts(std::size_t) const override { return parts_; }
    bool is_small() const override { return is_small_; }
    std::size_t scratch_bytes() const override { return bytes_ * parts_; }

    void compute(std::size_t, std::size_t part, std::byte* scratch) const noexcept override {
        static thread_local QuantizedByThisThread quantized;
        if (quantized.product != id_) {
            kernel_.quantize(product_, scratch + part * bytes_);
            quantized = {id_, scratch + part * bytes_};
        }
        const std::size_t column = part * columns_;
        kernel_.multiply(product_, quantized.activations, column, std::min(column + columns_, product_.N));
    }

   private:
    const GroupedQuantMatMul& product_;
    FastRowsKernel kernel_;
    std::uint64_t id_;
    std::size_t bytes_, columns_, parts_;
    bool is_small_;
};

}  // namespace

std::unique_ptr<ParallelWork> make_fast_rows(const GroupedQuantMatMul& product, InstructionSet set) {
    return std::make_unique<FastRows>(product, set);
}

}  // namespace intaglio
