// The accuracy `fast` (fast_matmul.h) for few rows of x: text generation, where reading the packed weight is all the
// work. Rows of the weight are streamed once, and each load meets all rows of x. Legend: M rows of x, N = out, K = in.
#pragma once

#include <memory>

#include "grouped_quant_matmul.h"

namespace intaglio {

// Columns of y, first + i + s * apart for i < count and s < streams.
struct FastRowsColumns {
    std::size_t first, count, streams, apart;
};

// What the arithmetic, compiled once for each instruction set, offers. All rows of x lie in one block, which
// starts at a multiple of 64.
struct FastRowsKernel {
    // Bytes of one row of x once it is quantized, a multiple of 64.
    std::size_t (*row_bytes)(const GroupedQuantMatMul& product);
    void (*quantize)(const GroupedQuantMatMul& product, std::byte* activations);
    // Up to four streams are read side by side.
    void (*multiply)(const GroupedQuantMatMul& product, const std::byte* activations, const FastRowsColumns& columns);
};

// Only those that the compiler could build are defined.
FastRowsKernel fast_rows_portable() noexcept;
FastRowsKernel fast_rows_neon() noexcept;
FastRowsKernel fast_rows_avx2() noexcept;
FastRowsKernel fast_rows_avx_vnni() noexcept;
FastRowsKernel fast_rows_avx512_vnni() noexcept;
FastRowsKernel fast_rows_amx() noexcept;

// Takes every format that has_fast_matmul (fast_matmul.h) knows, and any number of rows. The product must outlive
// the work, and the machine must have `set`.
std::unique_ptr<ParallelWork> make_fast_rows(const GroupedQuantMatMul& product, InstructionSet set);

}  // namespace intaglio
