// Statistics of a piece of a group of channels (group_norm.h), computed once for each instruction set (for_isa.h).
#pragma once

#include <cstddef>

namespace intaglio {

// Mean of `count` values, at most kGroupPiece, and the sum of their squared distances from it.
struct PieceStatistics {
    double mean, squares;
};
constexpr std::size_t kGroupPiece = 8192;

// Only those that the compiler could build are defined.
PieceStatistics piece_statistics_portable(const float* values, std::size_t count) noexcept;
PieceStatistics piece_statistics_avx2(const float* values, std::size_t count) noexcept;
PieceStatistics piece_statistics_avx512(const float* values, std::size_t count) noexcept;

}  // namespace intaglio
