// An attention in parts that the threads share, with the kernel that fits it.
#pragma once

#include <atomic>

#include "attention.h"
#include "attention_digits.h"
#include "parallel_work.h"

namespace intaglio {

// An attention cut into parts that may be computed in any order and at the same time.
class AttentionWork final : public ParallelWork {
   public:
    // The machine must have `set`.
    AttentionWork(const Attention& attention, InstructionSet set, bool is_fast);

    std::size_t phases() const override;
    std::size_t parts(std::size_t phase) const override;
    bool is_small() const override { return is_small_; }
    std::size_t scratch_bytes() const override;
    void compute(std::size_t phase, std::size_t part, std::byte* scratch) const noexcept override;
    // Whether a part found no memory, and the output is not whole.
    bool ran_out_of_memory() const { return ran_out_of_memory_; }

   private:
    AttentionRows rows_of(std::size_t head, std::size_t part) const;
    void add_splits(std::size_t part, const float* partials) const noexcept;

    const Attention& attention_;
    InstructionSet set_;
    std::size_t rows_;        // of a key head
    std::size_t part_rows_, row_parts_;
    std::size_t splits_ = 0;  // of the keys, where there are few rows
    std::size_t partial_floats_ = 0;
    DigitsLayout layout_;
    bool has_digits_ = false;
    std::size_t round_heads_ = 0;  // heads whose digits are held at a time
    bool is_small_;
    mutable std::atomic<bool> ran_out_of_memory_{false};
};

}  // namespace intaglio
