// Work that the threads of a session share.
#pragma once

#include <cstddef>

namespace intaglio {

// Phases run one after the other; the parts of a phase in any order and at the same time. What a part computes
// must not depend on which thread runs it, or on how many there are.
class ParallelWork {
   public:
    virtual ~ParallelWork() = default;

    virtual std::size_t phases() const { return 1; }
    virtual std::size_t parts(std::size_t phase) const = 0;
    // Whether handing parts to other threads costs more than it saves.
    virtual bool is_small() const { return false; }
    // Memory that all phases share, at an address that is a multiple of 64. Its content is not defined at the start.
    virtual std::size_t scratch_bytes() const { return 0; }
    virtual void compute(std::size_t phase, std::size_t part, std::byte* scratch) const noexcept = 0;
};

}  // namespace intaglio
