#include "group_norm_piece.h"

#include "for_isa.h"

namespace intaglio {

PieceStatistics INTAGLIO_FOR_ISA(piece_statistics)(const float* values, std::size_t count) noexcept {
    // One sum a lane: their order is the same for every width of vectors.
    constexpr std::size_t lanes = 64;
    const std::size_t whole = count - count % lanes;
    float sums[lanes] = {};
    for (std::size_t i = 0; i < whole; i += lanes)
        for (std::size_t j = 0; j < lanes; ++j) sums[j] += values[i + j];
    double sum = 0;
    for (std::size_t j = 0; j < lanes; ++j) sum += static_cast<double>(sums[j]);
    for (std::size_t i = whole; i < count; ++i) sum += static_cast<double>(values[i]);
    const double mean = sum / static_cast<double>(count);
    // Squared distances from a float32 near the mean, put right afterwards.
    const float center = static_cast<float>(mean);
    float squares[lanes] = {};
    for (std::size_t i = 0; i < whole; i += lanes)
        for (std::size_t j = 0; j < lanes; ++j) {
            const float distance = values[i + j] - center;
            squares[j] += distance * distance;
        }
    double square_sum = 0;
    for (std::size_t j = 0; j < lanes; ++j) square_sum += static_cast<double>(squares[j]);
    for (std::size_t i = whole; i < count; ++i) {
        const double distance = static_cast<double>(values[i]) - static_cast<double>(center);
        square_sum += distance * distance;
    }
    const double off = mean - static_cast<double>(center);
    return {mean, square_sum - static_cast<double>(count) * off * off};
}

}  // namespace intaglio
