// Vectors that scale, shift or gate the rows of a batch entry, as diffusion transformers make them of a timestep.
#pragma once

#include "op.h"

namespace intaglio {

// [B, 1, ..., width] or, for all entries alike, [1, ..., width], beside x [B, ..., width].
class Modulation {
   public:
    // Throws Mismatch that names it.
    Modulation(const char* name, const Tensor& tensor, const Tensor& x);

    // The vector of a row of x.
    const float* of_row(std::size_t row) const { return data_ + row / rows_ * stride_; }

   private:
    const float* data_;
    std::size_t rows_, stride_;  // rows of x that share a vector, and the distance to the next
};

// A tensor's number of rows, all dims but the last; it has at least one dim.
std::size_t row_count(const Tensor& tensor);
std::size_t row_width(const Tensor& tensor);

// Throws Mismatch unless it is float32 with at least one dim.
void check_rows(const char* name, const Tensor& tensor);

}  // namespace intaglio
