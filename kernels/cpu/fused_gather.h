// Rows of a packed table, dequantized one by one: an embedding, whose table is never unpacked whole.
#pragma once

#include <cstddef>
#include <cstdint>

#include "grouped_quant_matmul.h"
#include "parallel_work.h"

namespace intaglio {

struct QuantizedTable {
    GroupedQuantMatMul weight;    // [N, K]; x, y and M are not read
    const std::int64_t* indices;  // [count], from -N to N - 1
    std::size_t count;
    float* y;  // [count, K]
};

class GatherWork final : public ParallelWork {
   public:
    explicit GatherWork(const QuantizedTable& table) : table_(table) {}

    std::size_t parts(std::size_t) const override;
    void compute(std::size_t phase, std::size_t part, std::byte* scratch) const noexcept override;

   private:
    QuantizedTable table_;
};

}  // namespace intaglio
