#pragma once

#include <cstddef>

#include "for_isa.h"

namespace intaglio {

// How many parts of `b` hold `a`.
INTAGLIO_INLINE std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

}  // namespace intaglio
