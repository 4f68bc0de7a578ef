#include "fast_neon.h"

#include <algorithm>

#include "ceil_div.h"

namespace intaglio {

#if INTAGLIO_HAS_neon || INTAGLIO_HAS_neon_i8mm
namespace {

// Bytes of unpacked columns that a part keeps in the second-level cache.
constexpr std::size_t kPanelBytes = std::size_t{1} << 17;
// A product is cut into at least this many parts, so that the threads end together.
constexpr std::size_t kParts = 32;
// Fewer multiplications than this are done before another thread has begun.
constexpr std::size_t kSmallWork = std::size_t{1} << 17;

// Phase 0 quantizes x, phase 1 multiplies.
class FastNeon final : public ParallelWork {
   public:
    FastNeon(const GroupedQuantMatMul& product, const FastNeonKernel& kernel)
        : product_(product),
          kernel_(kernel),
          row_parts_(ceil_div(product.M, kNeonTile)),
          rows_bytes_(kernel.rows_bytes(product)) {
        const std::size_t tile_bytes = kNeonTile * kernel.column_bytes(product);
        const std::size_t tiles = ceil_div(product.N, kNeonTile);
        const std::size_t part_tiles =
            std::max<std::size_t>(std::min(kPanelBytes / tile_bytes, ceil_div(tiles, kParts)), 1);
        columns_ = part_tiles * kNeonTile;
        column_parts_ = ceil_div(tiles, part_tiles);
        panel_bytes_ = part_tiles * tile_bytes;
    }

    std::size_t phases() const override { return 2; }
    std::size_t parts(std::size_t phase) const override { return phase == 0 ? row_parts_ : column_parts_; }
    bool is_small() const override { return product_.M * product_.N * product_.K < kSmallWork; }
    std::size_t scratch_bytes() const override { return row_parts_ * rows_bytes_ + column_parts_ * panel_bytes_; }

    void compute(std::size_t phase, std::size_t part, std::byte* scratch) const noexcept override {
        if (phase == 0) return kernel_.quantize(product_, part * kNeonTile, scratch + part * rows_bytes_);
        const std::size_t column = part * columns_;
        kernel_.multiply(product_, scratch, column, std::min(column + columns_, product_.N),
                         scratch + row_parts_ * rows_bytes_ + part * panel_bytes_);
    }

   private:
    const GroupedQuantMatMul& product_;
    FastNeonKernel kernel_;
    std::size_t row_parts_, rows_bytes_, columns_, column_parts_, panel_bytes_;
};

}  // namespace

std::unique_ptr<ParallelWork> make_fast_neon(const GroupedQuantMatMul& product, InstructionSet set) {
#if INTAGLIO_HAS_neon_i8mm
    if (set == InstructionSet::kNeonI8mm) return std::make_unique<FastNeon>(product, fast_neon_neon_i8mm());
#endif
#if INTAGLIO_HAS_neon
    if (set == InstructionSet::kNeon) return std::make_unique<FastNeon>(product, fast_neon_neon());
#endif
    return nullptr;
}

#else

std::unique_ptr<ParallelWork> make_fast_neon(const GroupedQuantMatMul&, InstructionSet) { return nullptr; }

#endif

}  // namespace intaglio
