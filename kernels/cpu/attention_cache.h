// The key-value cache of FusedAttention: new keys and values behind the past.
#pragma once

#include "attention.h"

namespace intaglio {

// One of keys and values; D numbers a row.
struct CachePart {
    const float* past;     // [B, K, past_room, D], of which `filled` rows count
    HeadRows fresh;        // S new rows
    float* present;        // [B, K, room, D]; past's own memory where it is appended to in place
    std::size_t D, past_room, room;
    Rotary rotary;         // of the new rows
};

// Writes past and new rows to present; a part is a key head.
class CacheAppend final : public ParallelWork {
   public:
    CacheAppend(const CachePart& keys, const CachePart& values, std::size_t B, std::size_t K, std::size_t filled,
                std::size_t S);

    std::size_t parts(std::size_t) const override { return B_ * K_; }
    bool is_small() const override { return is_small_; }
    void compute(std::size_t phase, std::size_t part, std::byte* scratch) const noexcept override;

   private:
    void append(const CachePart& part, std::size_t batch, std::size_t head) const noexcept;

    CachePart keys_, values_;
    std::size_t B_, K_, filled_, S_;
    bool is_small_;
};

}  // namespace intaglio
