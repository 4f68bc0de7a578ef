// Work on rows that do not depend on each other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>

#include "parallel_work.h"

namespace intaglio {

// body(row) for each of `rows` rows of about `width` numbers.
template <typename Body>
class RowWork final : public ParallelWork {
   public:
    RowWork(std::size_t rows, std::size_t width, Body body)
        : rows_(rows),
          part_rows_(std::max<std::size_t>(kPartNumbers / std::max<std::size_t>(width, 1), 1)),
          body_(std::move(body)) {}

    std::size_t parts(std::size_t) const override { return (rows_ + part_rows_ - 1) / part_rows_; }
    void compute(std::size_t, std::size_t part, std::byte*) const noexcept override {
        const std::size_t end = std::min((part + 1) * part_rows_, rows_);
        for (std::size_t row = part * part_rows_; row < end; ++row) body_(row);
    }

   private:
    // A few microseconds' worth; less is done where it is.
    static constexpr std::size_t kPartNumbers = 1 << 15;

    std::size_t rows_, part_rows_;
    Body body_;
};

}  // namespace intaglio
