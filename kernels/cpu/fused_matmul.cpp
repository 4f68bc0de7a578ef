#include "fused_matmul.h"

#include <algorithm>
#include <utility>

#include "ceil_div.h"
#include "fast_matmul.h"

namespace intaglio {
namespace {

// Rows that a part of a norm, gate or sum takes.
constexpr std::size_t kPartRows = 8;

constexpr std::size_t kAlignment = 64;

// What lies between the phases, kept until the thread ends like the scratch memory of works, whose address is not
// known while a work is made.
float* thread_buffer(std::size_t count) {
    static thread_local std::unique_ptr<float[]> buffer;
    static thread_local std::size_t size = 0;
    if (count > size) {
        buffer.reset();
        size = 0;
        buffer.reset(new float[count]);
        size = count;
    }
    return buffer.get();
}

}  // namespace

FusedMatMulWork::FusedMatMulWork(FusedMatMul fused, InstructionSet set)
    : fused_(std::move(fused)),
      x_(static_cast<const float*>(fused_.products[0].x)),
      rows_(row_kernels(set)),
      first_phase_(fused_.norm_weight ? 1 : 0),
      has_last_(fused_.is_gated || fused_.residual) {
    const GroupedQuantMatMul& first = fused_.products[0];
    const std::size_t normed = fused_.norm_weight ? first.M * first.K : 0;
    const std::size_t gated = fused_.is_gated ? first.M * first.N : 0;
    float* buffer = thread_buffer(normed + gated);
    if (fused_.is_gated) fused_.products[1].y = buffer + normed;
    for (GroupedQuantMatMul& product : fused_.products) {
        if (fused_.norm_weight) product.x = buffer;
        std::unique_ptr<ParallelWork> work;
        if (fused_.is_fast) work = make_fast_matmul(product, set);
        if (!work) work = std::make_unique<Partition>(product, set);
        scratch_offsets_.push_back(scratch_bytes_);
        scratch_bytes_ += ceil_div(work->scratch_bytes(), kAlignment) * kAlignment;
        product_phases_ = std::max(product_phases_, work->phases());
        is_small_ = is_small_ && work->is_small();
        works_.push_back(std::move(work));
    }
}

std::size_t FusedMatMulWork::parts(std::size_t phase) const {
    if (phase < first_phase_ || phase >= first_phase_ + product_phases_)
        return ceil_div(fused_.products[0].M, kPartRows);
    phase -= first_phase_;
    std::size_t count = 0;
    for (const auto& work : works_) count += phase < work->phases() ? work->parts(phase) : 0;
    return count;
}

void FusedMatMulWork::compute(std::size_t phase, std::size_t part, std::byte* scratch) const noexcept {
    const GroupedQuantMatMul& first = fused_.products[0];
    if (phase >= first_phase_ && phase < first_phase_ + product_phases_) {
        phase -= first_phase_;
        for (std::size_t i = 0; i < works_.size(); ++i) {
            const std::size_t count = phase < works_[i]->phases() ? works_[i]->parts(phase) : 0;
            if (part < count) return works_[i]->compute(phase, part, scratch + scratch_offsets_[i]);
            part -= count;
        }
        return;
    }
    const std::size_t end = std::min((part + 1) * kPartRows, first.M);
    for (std::size_t row = part * kPartRows; row < end; ++row) {
        float* y = first.y + row * first.N;
        if (phase < first_phase_) {
            float* normed = static_cast<float*>(const_cast<void*>(first.x)) + row * first.K;
            rows_.rms_norm(x_ + row * first.K, fused_.norm_weight, fused_.epsilon, first.K, normed);
        } else if (fused_.is_gated) {
            rows_.silu_multiply(y, fused_.products[1].y + row * first.N, first.N, y);
        } else {
            rows_.add(fused_.residual + row * first.N, first.N, y);
        }
    }
}

}  // namespace intaglio
