#include "fast_matmul.h"

#include <cstring>
#include <vector>

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

std::unique_ptr<ParallelWork> make_work(const GroupedQuantMatMul& product, InstructionSet set) {
    if (product.M < kFastManyRows) return make_fast_rows(product, set);
    if (auto work = make_fast_neon(product, set)) return work;
    if (auto work = make_fast_panel(product, set)) return work;
    return make_fast_rows(product, set);
}

// A product whose groups are cut into pieces, each with a copy of its group's scale and offset.
class InPieces final : public ParallelWork {
   public:
    InPieces(const GroupedQuantMatMul& product, InstructionSet set)
        : product_(product),
          scales_(copies(product, product.scales)),
          offsets_(product.offset_per_group ? copies(product, product.offsets) : std::vector<std::uint8_t>()) {
        product_.scales = scales_.data();
        if (product.offset_per_group) product_.offsets = offsets_.data();
        product_.group_size = activation_group(product.group_size);
        work_ = make_work(product_, set);
    }

    std::size_t phases() const override { return work_->phases(); }
    std::size_t parts(std::size_t phase) const override { return work_->parts(phase); }
    bool is_small() const override { return work_->is_small(); }
    std::size_t scratch_bytes() const override { return work_->scratch_bytes(); }
    void compute(std::size_t phase, std::size_t part, std::byte* scratch) const noexcept override {
        work_->compute(phase, part, scratch);
    }

   private:
    static std::vector<std::uint8_t> copies(const GroupedQuantMatMul& p, const std::uint8_t* values) {
        const std::size_t size = p.scale_type == ScaleType::kFloat32 ? 4 : 2;
        const std::size_t pieces = p.group_size / activation_group(p.group_size), groups = p.N * (p.K / p.group_size);
        std::vector<std::uint8_t> result(groups * pieces * size);
        for (std::size_t i = 0; i < groups * pieces; ++i)
            std::memcpy(result.data() + i * size, values + i / pieces * size, size);
        return result;
    }

    GroupedQuantMatMul product_;
    std::vector<std::uint8_t> scales_, offsets_;
    std::unique_ptr<ParallelWork> work_;
};

}  // namespace

std::size_t activation_group(std::size_t group_size) {
    constexpr std::size_t longest = 512, step = 16;
    if (group_size <= longest) return group_size;
    for (std::size_t piece = longest; piece >= step; piece -= step)
        if (group_size % piece == 0) return piece;
    return group_size;
}

std::unique_ptr<ParallelWork> make_fast_matmul(const GroupedQuantMatMul& product, InstructionSet set) {
    if (!has_fast_matmul(product.group_size, product.K)) return nullptr;
    if (!product.offset_per_group && !is_zero_offset(product)) return nullptr;
    if (activation_group(product.group_size) != product.group_size) return std::make_unique<InPieces>(product, set);
    return make_work(product, set);
}

}  // namespace intaglio
