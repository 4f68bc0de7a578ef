#include "attention_cache.h"

#include "attention_arithmetic.h"

namespace intaglio {
namespace {

// Numbers below which handing the copy to other threads costs more than it saves.
constexpr std::size_t kSmall = std::size_t{1} << 15;

}  // namespace

CacheAppend::CacheAppend(const CachePart& keys, const CachePart& values, std::size_t B, std::size_t K,
                         std::size_t filled, std::size_t S)
    : keys_(keys), values_(values), B_(B), K_(K), filled_(filled), S_(S) {
    const auto copied = [&](const CachePart& part) {
        return (S + (part.present == part.past ? 0 : filled)) * part.D;
    };
    is_small_ = B * K * (copied(keys) + copied(values)) < kSmall;
}

void CacheAppend::compute(std::size_t, std::size_t part, std::byte*) const noexcept {
    append(keys_, part / K_, part % K_);
    append(values_, part / K_, part % K_);
}

void CacheAppend::append(const CachePart& part, std::size_t batch, std::size_t head) const noexcept {
    const std::size_t at = batch * K_ + head;
    float* to = part.present + at * part.room * part.D;
    if (part.present != part.past && filled_ > 0)
        std::memcpy(to, part.past + at * part.past_room * part.D, filled_ * part.D * sizeof(float));
    for (std::size_t s = 0; s < S_; ++s)
        load_head(part.rotary, batch, s, part.fresh.at(batch, head, s), part.D, to + (filled_ + s) * part.D);
}

}  // namespace intaglio
