// Arithmetic on rows of activations: norms, gates and sums, bound by memory, so each reads a row once and writes it
// once. Compiled once for each instruction set (for_isa.h) and bit-equal in all of them: sums are made of kRowLanes
// lanes that a fixed tree adds, and nothing is fused. In all, y may be one of the inputs.
#pragma once

#include <cstddef>

#include "instruction_set.h"

namespace intaglio {

struct RowKernels {
    // y = x / sqrt(mean(x * x) + epsilon) * weight
    void (*rms_norm)(const float* x, const float* weight, float epsilon, std::size_t width, float* y);
    // y = (x - mean(x)) / sqrt(var(x) + epsilon) * (1 + scale) + shift
    void (*adaptive_layer_norm)(const float* x, const float* scale, const float* shift, float epsilon,
                                std::size_t width, float* y);
    // y = x + gate * z
    void (*gated_add)(const float* x, const float* gate, const float* z, std::size_t width, float* y);
    // y = x + y
    void (*add)(const float* x, std::size_t width, float* y);
    // y = silu(gate) * up, where silu(a) = a / (1 + exp(-a))
    void (*silu_multiply)(const float* gate, const float* up, std::size_t width, float* y);
};

RowKernels row_kernels_portable() noexcept;
RowKernels row_kernels_avx2() noexcept;
RowKernels row_kernels_avx512() noexcept;

// Those of the widest vectors that `set` has.
RowKernels row_kernels(InstructionSet set);

}  // namespace intaglio
